"""Which rows samples have in common: keys of rows, sorted order, shared beginnings, the forest. No torch.

Two samples share row t exactly when their tokens 0..t are equal and, where routes are replayed, the experts
recorded for rows 0..t are equal in every routed layer, as sets: the order of ids in a row does not matter.
The last row of a sample has no recorded experts; it matches whatever another sample recorded there, and the
row then takes what was recorded. A sample with placeholders of images or audio shares nothing, because equal
tokens are not equal inputs there.

Sorted by keys, neighbours share most: with `shared[i]` the rows that sample `order[i]` has in common with
`order[i - 1]`, a run of the order needs `sum(lengths) - sum(shared inside the run)` rows.

Shapes: N samples, T tokens, L routed layers, K experts per token, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.forest import Forest
from olmo_rl.planning.pads import pad_documents
from olmo_rl.types import NO_PADDING, Padding, Sample

# A row's token, and a hash of its experts: 0 where none are recorded, so that a sample that ends there sorts
# directly before those that go on. Big-endian, because keys are compared as bytes.
_KEY = np.dtype([("token", ">u4"), ("experts", ">u8")])
_SEED = 20_260_101  # of the hash of experts
_RUN = 65_536  # rows that are hashed at a time


def row_keys(samples: Sequence[Sample], *, replayed: bool) -> list[NDArray[Any]]:
    """[T] keys of the rows of every sample; `replayed`: recorded routes count."""
    lengths = [len(sample) for sample in samples]
    keys = np.zeros(sum(lengths), dtype=_KEY)
    keys["token"] = np.concatenate([sample.tokens for sample in samples])
    ends = np.cumsum(lengths)
    if replayed:
        recorded = np.ones(len(keys), dtype=bool)
        recorded[ends - 1] = False
        keys["experts"][recorded] = np.concatenate(_experts_hashes(samples))
    return np.split(keys, ends[:-1])


def _experts_hashes(samples: Sequence[Sample]) -> list[NDArray[np.uint64]]:
    """For runs of samples, the hashes of their recorded rows: the sum of one random number for every (layer,
    expert), never 0.
    """
    routes = [sample.routes for sample in samples if sample.routes is not None]
    assert len(routes) == len(samples), "replay needs recorded routes"
    experts = 1 + max((int(part.max()) for part in routes if part.size), default=0)
    tables = np.random.default_rng(_SEED).integers(
        0, 2**64, size=(routes[0].shape[1], experts), dtype=np.uint64
    )
    hashes, run, rows = [], [], 0
    for i, part in enumerate(routes):
        run.append(part)
        rows += len(part)
        if rows >= _RUN or i + 1 == len(routes):
            ids = np.concatenate(run)
            found = np.zeros(len(ids), dtype=np.uint64)
            for layer, table in enumerate(tables):
                found += table[ids[:, layer]].sum(axis=1, dtype=np.uint64)
            hashes.append(np.maximum(found, np.uint64(1)))
            run, rows = [], 0
    return hashes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sharing:
    """Samples in sorted order. `order` [N] are their positions; `shared` [N]: the rows that each has in
    common with the one before it, 0 for the first; `lengths` [N] in sorted order, too.
    """

    order: NDArray[np.int64]
    shared: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def rows(self, start: int, stop: int) -> int:
        """Rows that the run [start, stop) of the order needs."""
        return int(self.lengths[start:stop].sum() - self.shared[start + 1 : stop].sum())


def find_sharing(samples: Sequence[Sample], *, replayed: bool) -> Sharing:
    """The sorted order of `samples` and what neighbours share; ties keep the order given."""
    keys = row_keys(samples, replayed=replayed)
    order = sorted(range(len(samples)), key=lambda i: (samples[i].has_placeholders, keys[i].tobytes()))
    shared = np.zeros(len(samples), dtype=np.int64)
    for place in range(1, len(order)):
        before, after = order[place - 1], order[place]
        if not (samples[before].has_placeholders or samples[after].has_placeholders):
            shared[place] = _common(keys[before], keys[after])
    lengths = np.array([len(samples[i]) for i in order], dtype=np.int64)
    return Sharing(order=np.array(order, dtype=np.int64), shared=shared, lengths=lengths)


def _common(before: NDArray[Any], after: NDArray[Any]) -> int:
    """Leading rows that both have; `before` sorts first, so that only its last row may match anything."""
    count = min(len(before), len(after))
    equal = before["token"][:count] == after["token"][:count]
    experts = (before["experts"][:count] == after["experts"][:count]) | (before["experts"][:count] == 0)
    equal &= experts | (after["experts"][:count] == 0)
    return count if equal.all() else int(equal.argmin())


def grow(sharing: Sharing) -> tuple[Forest, list[NDArray[np.int64]]]:
    """The forest of these samples, rows depth first in sorted order, and for every sample in the order it
    was given the rows of its path. `Forest.leaves` are in the order given.
    """
    starts: list[int] = []  # path rows before each segment
    lengths: list[int] = []
    parents: list[int] = []
    leaves = [0] * len(sharing.order)
    ends = _segment_ends(sharing)
    path: list[int] = []  # open segments of the sample before, from the root on
    for place, position in enumerate(sharing.order.tolist()):
        shared = int(sharing.shared[place])
        while path and starts[path[-1]] >= shared:
            path.pop()
        for end in ends[place]:
            if end <= shared:
                continue
            start = starts[path[-1]] + lengths[path[-1]] if path else 0
            starts.append(start)
            lengths.append(end - start)
            parents.append(path[-1] if path else -1)
            path.append(len(starts) - 1)
        leaves[position] = path[-1]
    forest = Forest(lengths=tuple(lengths), parents=tuple(parents), leaves=tuple(leaves))
    edges = forest.boundaries
    rows = [
        np.concatenate([forest.rows_before(leaf), np.arange(edges[leaf], edges[leaf + 1])]) for leaf in leaves
    ]
    return forest, rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Laid:
    """How the T tokens of samples, one sample after the other, lie on R rows. `row_of` int64 [T]: the row
    that reads each token; `first` int64 [R]: the token whose routes the row takes, that of the first sample
    that has them recorded, else of the first of all; `recorded` bool [T]: tokens with recorded routes.
    `real_rows`: rows from here on are pads, roots that repeat beginnings of paths; no token lies on them.
    """

    forest: Forest
    row_of: NDArray[np.int64]
    first: NDArray[np.int64]
    recorded: NDArray[np.bool_]
    real_rows: int


def lay(samples: Sequence[Sample], *, replayed: bool, padding: Padding = NO_PADDING) -> Laid:
    """The rows of one pack of samples that share rows, pads included."""
    forest, paths = grow(find_sharing(samples, replayed=replayed))
    row_of = np.concatenate(paths)
    recorded = np.ones(len(row_of), dtype=bool)
    recorded[np.cumsum([len(sample) for sample in samples]) - 1] = not replayed
    tokens = np.concatenate([recorded.nonzero()[0], (~recorded).nonzero()[0]])
    _, found = np.unique(row_of[tokens], return_index=True)
    first, real_rows = tokens[found], len(found)
    spans = pad_documents(
        [len(sample) for sample in samples],
        rows=len(row_of) + padding.rows(real_rows) - real_rows,
        placeholders=[sample.has_placeholders for sample in samples],
    )
    if spans:
        forest = Forest(
            lengths=(*forest.lengths, *(tokens for _, tokens in spans)),
            parents=(*forest.parents, *(-1 for _ in spans)),
            leaves=forest.leaves,
        )
        first = np.concatenate([first, *(first[paths[d][:tokens]] for d, tokens in spans)])
    return Laid(forest=forest, row_of=row_of, first=first, recorded=recorded, real_rows=real_rows)


def _segment_ends(sharing: Sharing) -> list[list[int]]:
    """For every sample of the order the path lengths at which its segments end: where another sample leaves
    its path or ends on it, and its own end. In order, each once.
    """
    ends = [{int(length)} for length in sharing.lengths]
    for place, depth in enumerate(sharing.shared.tolist()):
        if depth:
            ends[place - 1].add(depth)
            ends[place].add(depth)
    # A cut lies on every path through its row: to the right, then to the left, as far as rows are shared.
    for place in range(1, len(ends)):
        ends[place] |= {end for end in ends[place - 1] if end <= sharing.shared[place]}
    for place in range(len(ends) - 1, 0, -1):
        ends[place - 1] |= {end for end in ends[place] if end <= sharing.shared[place]}
    return [sorted(found) for found in ends]
