"""Counts of suspicious rows in recorded routes, for the report of an import.

`data/validation.py` refuses routes that cannot be replayed; this file counts the patterns that a broken hook
leaves: spans of zeros, one row again and again, rows that were never filled, ids of physical slots. Shapes: R
rows of one sample, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

# A sequence repeats one row in all layers for a few tokens now and then ("aaaa"); a stuck buffer repeats it
# without end.
SUSPICIOUS_RUN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """Suspicious rows of one sample, by kind; a row may count more than once.

    `zero`: every id of every layer is 0; `repeated`: inside a run of at least 8 identical rows; `unfilled`: a
    negative id; `out_of_range`: an id that no logical expert has, as physical slots do; `duplicated`: an
    expert named twice in one layer.
    """

    zero: int = 0
    repeated: int = 0
    unfilled: int = 0
    out_of_range: int = 0
    duplicated: int = 0

    @property
    def replayable(self) -> bool:
        """Whether these rows can be replayed: the first two patterns may be real."""
        return not (self.unfilled or self.out_of_range or self.duplicated)

    def counts(self) -> Iterator[tuple[str, int]]:
        """The counts that are not 0, by name."""
        for field in fields(self):
            if count := getattr(self, field.name):
                yield field.name, count


def inspect_routes(routes: NDArray[np.integer], *, num_experts: int) -> Capture:
    """Look at the routes [R, L, K] of one sample, dense layers already left out."""
    if routes.size == 0:
        return Capture()
    flat = routes.reshape(len(routes), -1)
    same = (flat[1:] == flat[:-1]).all(axis=1)
    ordered = np.sort(routes, axis=-1)
    duplicated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))
    return Capture(
        zero=int((flat == 0).all(axis=1).sum()),
        repeated=_rows_in_runs(same),
        unfilled=int((flat < 0).any(axis=1).sum()),
        out_of_range=int((flat >= num_experts).any(axis=1).sum()),
        duplicated=int(duplicated.sum()),
    )


def _rows_in_runs(same: NDArray[np.bool_]) -> int:
    """Rows inside runs of at least `SUSPICIOUS_RUN` equal rows; `same[i]`: row i+1 equals row i."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    lengths = edges[1::2] - edges[::2] + 1
    return int(lengths[lengths >= SUSPICIOUS_RUN].sum())
