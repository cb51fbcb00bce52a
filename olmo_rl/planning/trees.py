"""Packs of samples that share rows: cuts of the sorted order into ranks x columns runs. No torch.

A run's cost is its rows (`sharing.Sharing`). The number of columns is the least for which runs within the
budget exist; then the least cap on rows with so many runs is searched, which is exact for the order, because
a run inside another never needs more rows; then, within `_SLACK` of that cap, the cuts that repeat the fewest
shared rows. Every rank runs the same number of packs; the numbers of samples differ.

Refused: a sample without tokens or longer than the budget, fewer samples than ranks.

Shapes: N samples in sorted order, M runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.packing import check_lengths
from olmo_rl.planning.sharing import Sharing
from olmo_rl.types import PackPlan, Topology

_SLACK = 0.03  # of the least cap, given up for cuts between groups instead of inside them


def plan_trees(
    sharing: Sharing,
    *,
    budget: int,
    topology: Topology,
    ids: Sequence[str] | None = None,
    source: str | None = None,
) -> PackPlan:
    """The plan of one step; `ids` (in the order given) and `source` (a file) only serve the messages."""
    lengths = np.empty_like(sharing.lengths)
    lengths[sharing.order] = sharing.lengths
    check_lengths(lengths, budget=budget, topology=topology, ids=ids, source=source)
    run = _Runs(sharing)
    world = topology.world_size
    columns = -(-run.needed(budget) // world)
    count = columns * world
    cap = min(budget, int(run.least_cap(count) * (1 + _SLACK)))
    edges = run.cut(count, cap=cap)
    rows = [sharing.rows(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    largest = sorted(range(count), key=lambda i: -rows[i])  # the ranks of a column get runs of like size
    cells = [[largest[column * world + rank] for column in range(columns)] for rank in range(world)]
    plan = PackPlan(
        packs=tuple(
            tuple(tuple(sharing.order[edges[i] : edges[i + 1]].tolist()) for i in rank) for rank in cells
        ),
        rows=tuple(tuple(rows[i] for i in rank) for rank in cells),
    )
    plan.check(lengths, budget)
    return plan


class _Runs:
    """Runs of the sorted order by their rows: run [i, j) needs `ahead[j] - behind[i]`, both ascending."""

    def __init__(self, sharing: Sharing) -> None:
        tokens = np.concatenate([[0], np.cumsum(sharing.lengths)])
        shared = np.concatenate([[0], np.cumsum(sharing.shared)])
        self.size, self._shared = len(sharing.order), sharing.shared
        self._ahead = tokens - shared
        self._behind = tokens[:-1] - shared[1:]
        self._longest = int(sharing.lengths.max())

    def needed(self, cap: int) -> int:
        """The fewest runs of at most `cap` rows: each as long as it can be."""
        count, start = 0, 0
        while start < self.size:
            start = int(np.searchsorted(self._ahead, cap + self._behind[start], side="right")) - 1
            count += 1
        return count

    def least_cap(self, count: int) -> int:
        """The least cap at which `count` runs are enough."""
        low, high = self._longest, int(self._ahead[-1] - self._behind[0])
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.needed(middle) <= count else (middle + 1, high)
        return low

    def cut(self, count: int, *, cap: int) -> list[int]:
        """[M+1] edges of exactly `count` runs of at most `cap` rows, none empty, that together repeat the
        fewest rows. Where `needed(cap)` runs exist so do more: a cut never makes a run larger.
        """
        first = np.searchsorted(self._behind, self._ahead[1:] - cap, side="left")  # of a run that ends there
        cost = np.full(self.size + 1, np.inf)
        cost[0] = 0
        chosen = np.zeros((count, self.size + 1), dtype=np.int64)
        for run in range(count):
            opened = cost[:-1] + (
                self._shared if run else 0
            )  # a run that begins at a sample repeats its rows
            places = _first_minimum(opened, start=first)
            chosen[run, 1:] = places
            cost = np.concatenate([[np.inf], opened[places]])
        edges = [self.size]
        for run in range(count - 1, -1, -1):
            edges.append(int(chosen[run, edges[-1]]))
        assert edges[-1] == 0, "every sample lies in a run"
        return edges[::-1]


def _first_minimum(values: NDArray[np.float64], *, start: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N]: for every j where in values[start[j] : j + 1] the least one is, by a table of powers of two."""
    table = [np.arange(len(values))]
    while 2 ** len(table) <= len(values):
        step = 2 ** (len(table) - 1)
        left, right = table[-1][:-step], table[-1][step:]
        table.append(np.where(values[right] < values[left], right, left))
    stop = np.arange(len(values))
    level = np.frexp(stop - start + 1)[1] - 1
    found = np.empty(len(values), dtype=np.int64)
    for power in np.unique(level).tolist():
        here = level == power
        left, right = table[power][start[here]], table[power][stop[here] + 1 - 2**power]
        found[here] = np.where(values[right] < values[left], right, left)
    return found
