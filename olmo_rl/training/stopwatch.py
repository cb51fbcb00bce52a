"""Where the time of one update goes, by phase, without waiting for the device inside the pack loop.

On CUDA every lap is a pair of events on the current stream; they are read once, when the update is over. On
the CPU laps are read from the clock. Phases are those of `PHASES`; none contains another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from olmo_rl.progress import note_phase

PHASES = ("transfer", "score", "forward", "backward", "clip", "optimizer")


class Stopwatch:
    """Laps of one update by phase; phases may be entered many times."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def lap(self, phase: str) -> Iterator[None]:
        """Time what runs inside as part of `phase`."""
        assert phase in self._seconds, phase
        note_phase(phase)
        if not self._cuda:
            started = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - started
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((phase, first, last))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase. Waits for the device: call it once, after the update."""
        for phase, first, last in self._events:
            last.synchronize()
            self._seconds[phase] += first.elapsed_time(last) / 1000
        self._events.clear()
        return dict(self._seconds)
