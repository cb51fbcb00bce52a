"""How optimizer steps reach Lightning: one endless epoch of batches that are made when they are asked for.

Owns the order: every rank asks for the same steps in the same order, since making one communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, overload

from typing_extensions import override

from olmo_rl.data.packs import PackedBatch

# Lightning prefetches one batch of a loader without a length, which would be one optimizer step of policy
# lag.
UNBOUNDED = 2**31


class StepSource(Protocol):
    """A data module that has steps to train. `given`: steps of the present collection, in order; the last one
    may be unfinished (`PackedBatch.finished`).
    """

    trainer: Any
    given: list[PackedBatch]

    def next_collection(self) -> Sequence[PackedBatch] | None:
        """The next steps; None at the end."""
        ...


class Steps(Sequence[PackedBatch]):
    """The optimizer steps of one collection, each made when it is first asked for, in order: the planner
    works ahead of whoever scores or trains. Every rank asks alike, since making one communicates.
    """

    def __init__(self, count: int, *, make: Callable[[int], PackedBatch]) -> None:
        self._count = count
        self._make = make
        self.made: list[PackedBatch] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> PackedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PackedBatch]: ...
    @override
    def __getitem__(self, index: int | slice) -> PackedBatch | Sequence[PackedBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        position = range(self._count)[index]
        while len(self.made) <= position:
            self.made.append(self._make(len(self.made)))
        return self.made[position]


class StepLoader:
    """One endless Lightning epoch: asks for a collection when the previous one is used up."""

    def __init__(self, data: StepSource) -> None:
        self._data = data

    def __len__(self) -> int:
        return UNBOUNDED

    def __iter__(self) -> Iterator[PackedBatch]:
        while (batches := self._data.next_collection()) is not None:
            for batch in batches:
                self._data.given.append(batch)
                yield batch
        self._data.trainer.should_stop = True
