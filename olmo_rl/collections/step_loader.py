"""Optimizer steps for Lightning: one endless epoch of steps, each made when it is requested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from olmo_rl.data.packs import Step

# Lightning prefetches one batch of a loader without a length, which would be one optimizer step of policy
# lag.
UNBOUNDED = 2**31


class StepSource(Protocol):
    """A data module that has steps to train."""

    trainer: Any

    def next_collection(self) -> Iterable[Step] | None:
        """The next steps; None at the end."""
        ...


class StepLoader:
    """One endless Lightning epoch: opens a collection when the previous one is used up."""

    def __init__(self, data: StepSource) -> None:
        self._data = data

    def __len__(self) -> int:
        return UNBOUNDED

    def __iter__(self) -> Iterator[Step]:
        while (steps := self._data.next_collection()) is not None:
            yield from steps
            del steps  # or a collection that was trained stays while the next one is drawn
        self._data.trainer.should_stop = True
