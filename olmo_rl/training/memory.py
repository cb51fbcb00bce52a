"""Peak memory of one update, of the device that the run computes on."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): the peak of the resident set becomes the present one


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak so far. On a CPU without the /proc of Linux the peak stays that of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)


def peak_memory_gib(device: torch.device) -> float:
    """Peak of allocated GPU memory or, on a CPU, of resident memory, in GiB, since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
