"""Where a search begins: ranks balanced by length, and packs filled within the budget. NumPy only, under a
millisecond.

Owns length rows, Karmarkar-Karp ranks of equal counts, and the first-fit cells of a given number of
columns. It knows nothing about experts: routes of long samples are long, so lengths already explain most of
the imbalance.

Shapes: N = W x n samples, `ranks` int64 [W, n] positions of every rank in packing order, C columns. `cells`
int32 [N] is `rank x C + column` of every sample.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


def by_length(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [N]: positions from the longest sample to the shortest, arrival order on ties."""
    return np.argsort(-lengths, kind="stable")


def arrival_ranks(samples: int, *, world_size: int) -> NDArray[np.int64]:
    """int64 [W, n]: the stride partition."""
    return np.ascontiguousarray(np.arange(samples, dtype=np.int64).reshape(-1, world_size).T)


def length_rows(lengths: NDArray[np.int64], *, world_size: int) -> NDArray[np.int64]:
    """int64 [W, n]: rows of W samples of similar length, each dealt so that the longest goes to the
    lightest rank.

    Column k of every rank comes from the same row, so packs of one column hold samples of similar length.
    """
    rows = by_length(lengths).reshape(-1, world_size)
    ranks = np.empty((world_size, len(rows)), dtype=np.int64)
    totals = np.zeros(world_size, dtype=np.int64)
    for k, row in enumerate(rows):
        lightest_first = np.argsort(totals, kind="stable")
        ranks[lightest_first, k] = row
        totals[lightest_first] += lengths[row]
    return ranks


def karmarkar_karp_ranks(lengths: NDArray[np.int64], *, world_size: int) -> NDArray[np.int64]:
    """int64 [W, n]: the largest differencing method with equal counts, every rank from its longest sample
    down.

    It starts from the same rows of similar length and joins the two partial partitions that are most
    uneven, the heaviest part of one with the lightest of the other.
    """
    heap = []
    for k, row in enumerate(by_length(lengths).reshape(-1, world_size)):
        sums = lengths[row]  # descending
        heap.append((-int(sums[0] - sums[-1]), k, sums, row[:, None]))
    heapq.heapify(heap)
    tick = len(heap)
    while len(heap) > 1:
        _, _, sums, parts = heapq.heappop(heap)
        _, _, others, other_parts = heapq.heappop(heap)
        joined = sums + others[::-1]
        order = np.argsort(-joined, kind="stable")
        members = np.concatenate([parts, other_parts[::-1]], axis=1)[order]
        joined = joined[order]
        heapq.heappush(heap, (-int(joined[0] - joined[-1]), tick, joined, members))
        tick += 1
    ranks = heap[0][3]
    descending = np.lexsort((ranks, -lengths[ranks]), axis=1)
    return np.take_along_axis(ranks, descending, axis=1)


def fill_columns(
    ranks: NDArray[np.int64], *, lengths: NDArray[np.int64], budget: int, columns: int
) -> NDArray[np.int32] | None:
    """int32 [N] cells of `columns` packs a rank by first fit, longest sample first, or None where it does
    not fit.
    """
    cells = np.empty(ranks.size, dtype=np.int32)
    for rank, row in enumerate(ranks):
        room = [budget] * columns
        count = [0] * columns
        left = len(row)
        for position in row[np.argsort(-lengths[row], kind="stable")]:
            n = int(lengths[position])
            empty = count.count(0)
            # The last samples open the columns that are still empty: a pack without samples is no pack.
            allowed = [c for c in range(columns) if room[c] >= n and (left > empty or not count[c])]
            if not allowed:
                return None
            column = allowed[0]
            room[column] -= n
            count[column] += 1
            left -= 1
            cells[position] = rank * columns + column
    return cells


def flatten_columns(
    ranks: NDArray[np.int64], *, cells: NDArray[np.int32], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64 [W, n]: every rank column by column, the longest sample of a column first.

    A long sample at the head of a column is what stops the greedy packer from pulling it into the pack
    before.
    """
    order = np.lexsort((ranks, -lengths[ranks], cells[ranks]), axis=1)
    return np.take_along_axis(ranks, order, axis=1)
