"""The rows of a pack as a forest of segments. No torch here.

A segment is a run of rows that the same samples pass through; the rows of one sample are a path of segments,
from a root to the segment in which the sample ends. Rows lie depth first, a parent before its children. A
pack in which nothing is shared is a forest of roots: every document is a segment of its own.

Shapes: S segments, N samples, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Forest:
    """`lengths` [S] rows of each segment; `parents` [S], -1 for a root, below the segment's own index;
    `leaves` [N]: the segment in which each sample ends, an inner one where another sample goes on. Pads are
    roots in which no sample ends.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    leaves: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.parents), "every segment has a parent or is a root"
        assert all(length > 0 for length in self.lengths), "segments are never empty"
        assert all(-1 <= parent < s for s, parent in enumerate(self.parents)), "a parent comes first"

    @classmethod
    def roots(cls, boundaries: Sequence[int]) -> Forest:
        """Documents with these boundaries, nothing shared."""
        lengths = tuple(b - a for a, b in zip(boundaries, boundaries[1:], strict=False))
        return cls(lengths=lengths, parents=(-1,) * len(lengths), leaves=tuple(range(len(lengths))))

    @property
    def branches(self) -> bool:
        """Whether any row is shared."""
        return any(parent >= 0 for parent in self.parents) or len(set(self.leaves)) < len(self.leaves)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """[S+1] from 0 to R."""
        return (0, *np.cumsum(self.lengths).tolist())

    @property
    def prefix(self) -> tuple[int, ...]:
        """[S] rows of the path before each segment: the position of its first row."""
        prefix: list[int] = []
        for parent in self.parents:
            prefix.append(0 if parent < 0 else prefix[parent] + self.lengths[parent])
        return tuple(prefix)

    def path(self, segment: int) -> list[int]:
        """The segments from the root to `segment`."""
        path = [segment]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def rows_before(self, segment: int, *, limit: int | None = None) -> NDArray[np.int64]:
        """The rows of the path before `segment` in order, the last `limit` of them."""
        edges, spans, left = self.boundaries, [], limit
        for s in reversed(self.path(segment)[:-1]):
            if left == 0:
                break
            count = self.lengths[s] if left is None else min(self.lengths[s], left)
            spans.append(np.arange(edges[s + 1] - count, edges[s + 1]))
            left = None if left is None else left - count
        return np.concatenate([*reversed(spans), np.zeros(0, dtype=np.int64)]).astype(np.int64)
