"""Packs on their way to the device, one ahead of the update.

A step's packs stay on the host until they are needed, so that the device holds two at a time and not all of
the step. On CUDA the next pack is copied from pinned memory on a stream of its own while the present one
computes; everywhere else a pack moves when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from olmo_rl.data.packs import Pack
from olmo_rl.training.stopwatch import Stopwatch


def moved(packs: Sequence[Pack], *, device: torch.device, watch: Stopwatch | None = None) -> Iterator[Pack]:
    """The packs in order, each on `device` when it is yielded. `watch` measures the waits."""
    copying = torch.cuda.Stream(device) if device.type == "cuda" else None
    ahead: Pack | None = None
    for index, pack in enumerate(packs):
        with nullcontext() if watch is None else watch.lap("transfer"):
            if copying is None:
                arrived = pack.to(device)
            else:
                arrived = ahead if ahead is not None else _send(pack, device=device, stream=copying)
                _receive(arrived, stream=copying)
        following = packs[index + 1] if index + 1 < len(packs) else None
        if copying is not None and following is not None:
            ahead = _send(following, device=device, stream=copying)
        yield arrived


def _send(pack: Pack, *, device: torch.device, stream: torch.cuda.Stream) -> Pack:
    """Start copying; `_receive` waits."""
    pinned = pack.map(Tensor.pin_memory)
    with torch.cuda.stream(stream):
        return pinned.to(device)


def _receive(pack: Pack, *, stream: torch.cuda.Stream) -> None:
    """Let the current stream use the pack; its memory is not reused before the stream is done with it."""
    computing = torch.cuda.current_stream()
    computing.wait_stream(stream)
    pack.map(lambda tensor: _used(tensor, by=computing))


def _used(tensor: Tensor, *, by: torch.cuda.Stream) -> Tensor:
    tensor.record_stream(by)
    return tensor
