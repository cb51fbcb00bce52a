"""The starts of a search: ranks balanced by length, packs filled within the budget, and the best of
these plans.

Owns length rows, Karmarkar-Karp ranks of equal counts, first-fit cells of a given number of columns, J in
fixed point, and the definitions of "the best start" and "no worse". The starts ignore experts: long samples
have many assignments, so lengths already explain most of the imbalance.

Shapes: N = W x n samples, `ranks` int64 [W, n] positions of every rank in packing order, C columns. `cells`
int32 [N] is `rank x C + column` of every sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.objective import Bounds, Work, lower_bounds, measure
from olmo_rl.planning.packing import equalise, pack_consecutively, plan_step
from olmo_rl.types import PackPlan, Topology

# One assignment above the cap costs as much as this many units of expert work, whatever layers they are in.
_EXCESS = 16
# The most that a search adds to the weight of work above its guard, as a multiple (`annealing.STRICT`).
_MOST_PRESSURE = 20
_GUARDED = ("expert_work", "token_work", "pair_work", "packs_per_rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A plan to begin from, with its exact work."""

    name: str
    plan: PackPlan
    work: Work

    def keeps(self, cap: int | None) -> bool:
        """Whether no destination receives more than `cap` assignments of one layer in one column."""
        return cap is None or (self.work.max_destination_load or 0) <= cap


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """J in fixed point: what a unit of each work, and an assignment above the cap, adds to the integer
    objective. Searches compare these integers, so they decide alike on every machine.
    """

    expert: int
    token: int
    pair: int
    excess: int

    @property
    def terms(self) -> tuple[int, int, int, int]:
        return self.expert, self.token, self.pair, self.excess

    def objective(self, work: Work | Bounds) -> int:
        return (
            self.expert * (work.expert_work or 0) + self.token * work.token_work + self.pair * work.pair_work
        )


def fixed_point(
    base: Work,
    *,
    lengths: NDArray[np.int64],
    loads: NDArray[np.int32] | None,
    budget: int,
    topology: Topology,
) -> Weights:
    """Weights with J = 1 per term at `base`, as fine as they can be without any plan reaching 2^63, whatever
    its pressure.
    """
    columns = len(lengths) // topology.world_size
    worst_token = min(int(lengths.sum()), columns * budget)
    worst_pair = min(int((lengths**2).sum()), columns * budget * int(lengths.max()))
    worst_expert, worst_excess = 0, 0
    if loads is not None and base.expert_work:
        by_sample = loads.sum(axis=1, dtype=np.int64)  # [N, L]
        of_token = -(-int(by_sample.max(initial=0)) // max(1, int(lengths.min())))
        busiest = min(int(by_sample.sum(axis=0).max(initial=0)), of_token * topology.ep_degree * budget)
        worst_expert = min(int(by_sample.sum()), columns * loads.shape[2] * busiest)
        worst_excess = columns * topology.num_replicas * busiest
    excess = _EXCESS * worst_excess / base.expert_work if base.expert_work else 0.0
    shares = worst_token / base.token_work + worst_pair / base.pair_work
    shares += worst_expert / base.expert_work if base.expert_work else 0.0
    one = int(2**62 / ((1 + _MOST_PRESSURE) * shares + excess))
    expert = one // base.expert_work if base.expert_work else 0
    return Weights(
        expert=expert,
        token=one // base.token_work,
        pair=one // base.pair_work,
        excess=_EXCESS * max(expert, 1),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchProblem:
    """One batch to search a plan for: `lengths` int64 [N]; `loads` int32 [N, E, L], None for a plan by length
    alone; `cap`: most assignments of one destination in one layer of one column, None for any number;
    `proposals` of each chain, None for the search's own number; `seconds` of the whole search.
    """

    lengths: NDArray[np.int64]
    loads: NDArray[np.int32] | None
    budget: int
    topology: Topology
    arrival: Start
    bounds: Bounds
    weights: Weights
    cap: int | None
    proposals: int | None
    seconds: float
    seed: int

    @classmethod
    def of(
        cls,
        lengths: NDArray[np.int64],
        *,
        loads: NDArray[np.int32] | None,
        budget: int,
        topology: Topology,
        seed: int,
        cap: int | None = None,
        proposals: int | None = None,
        seconds: float = math.inf,
    ) -> SearchProblem:
        """The problem, whose order of arrival is its measure of J; raises Refusal where that has no packs."""
        plan = plan_step(lengths, budget=budget, topology=topology)
        work = measure(plan, lengths=lengths, loads=loads, topology=topology)
        return cls(
            lengths=lengths,
            loads=loads,
            budget=budget,
            topology=topology,
            arrival=Start(name="arrival", plan=plan, work=work),
            bounds=lower_bounds(lengths=lengths, loads=loads, topology=topology, budget=budget),
            weights=fixed_point(work, lengths=lengths, loads=loads, budget=budget, topology=topology),
            cap=cap,
            proposals=proposals,
            seconds=seconds,
            seed=seed,
        )

    def start(self, name: str, plan: PackPlan) -> Start:
        """`plan` with its exact work."""
        work = measure(plan, lengths=self.lengths, loads=self.loads, topology=self.topology)
        return Start(name=name, plan=plan, work=work)

    def by_length_alone(self, *, seconds: float) -> SearchProblem:
        """The same batch where nothing is known about experts, to be searched in `seconds`."""
        return SearchProblem.of(
            self.lengths,
            loads=None,
            budget=self.budget,
            topology=self.topology,
            seed=self.seed,
            proposals=self.proposals,
            seconds=seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The plan of a search, the start that guards it, the clock when that start was chosen, and the number of
    proposals scored on each path. `least_cap`: where no plan keeps the cap, the lowest one that a plan keeps.
    """

    plan: PackPlan
    start: Start
    started: float
    paths: dict[str, int]
    least_cap: int | None = None


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


def order_plan(ranks: NDArray[np.int64], *, lengths: NDArray[np.int64], budget: int) -> PackPlan:
    """The greedy, equalised packs of `ranks` [W, n]."""
    packed = equalise([pack_consecutively(rank, lengths=lengths, budget=budget) for rank in ranks.tolist()])
    return PackPlan(packs=tuple(tuple(packs) for packs in packed))


def cells_plan(cells: NDArray[np.integer], *, topology: Topology, columns: int) -> PackPlan:
    """The plan whose sample i lies in cell `rank x columns + column`, in order of arrival within a pack."""
    members: list[list[list[int]]] = [[[] for _ in range(columns)] for _ in range(topology.world_size)]
    for i, cell in enumerate(cells.tolist()):
        members[cell // columns][cell % columns].append(i)
    return PackPlan(packs=tuple(tuple(tuple(pack) for pack in rank) for rank in members))


def tolerated(work: Work) -> Work:
    """`work` plus what a plan of lower J may exceed it by in each term: 0.3 %."""
    expert = work.expert_work
    return replace(
        work,
        expert_work=None if expert is None else expert + expert * 3 // 1000,
        token_work=work.token_work + work.token_work * 3 // 1000,
        pair_work=work.pair_work + work.pair_work * 3 // 1000,
    )


def no_worse(work: Work, *, than: Work) -> bool:
    """Whether no guarded metric of `work` is above that of `than`."""
    return all((getattr(work, name) or 0) <= (getattr(than, name) or 0) for name in _GUARDED)


def balanced_ranks(problem: SearchProblem) -> dict[str, NDArray[np.int64]]:
    """The orders by length of every rank, by name."""
    lengths, world = problem.lengths, problem.topology.world_size
    return {
        "length_rows": length_rows(lengths, world_size=world),
        "karmarkar_karp": karmarkar_karp_ranks(lengths, world_size=world),
    }


def by_columns(problem: SearchProblem) -> list[list[Start]]:
    """Starts of one number of columns after the other, as many columns as a rank has samples at last."""
    known, found = starts(problem), []
    most = len(problem.lengths) // problem.topology.world_size
    for columns in range(problem.bounds.packs_per_rank, most + 1):
        some = [start for start in known if start.work.packs_per_rank == columns]
        for name, ranks in balanced_ranks(problem).items():
            cells = fill_columns(ranks, lengths=problem.lengths, budget=problem.budget, columns=columns)
            if cells is not None:
                plan = cells_plan(cells, topology=problem.topology, columns=columns)
                some.append(problem.start(f"{name}_filled", plan))
        if some:
            found.append(some)
    return found


def starts(problem: SearchProblem) -> list[Start]:
    """The order of arrival first, then ranks balanced by length, their packs greedy or filled to few
    columns.
    """
    lengths, budget, topology = problem.lengths, problem.budget, problem.topology
    plans = {}
    for name, ranks in balanced_ranks(problem).items():
        plans[name] = order_plan(ranks, lengths=lengths, budget=budget)
        for columns in range(problem.bounds.packs_per_rank, plans[name].packs_per_rank + 1):
            cells = fill_columns(ranks, lengths=lengths, budget=budget, columns=columns)
            if cells is not None:
                plans[f"{name}_filled"] = cells_plan(cells, topology=topology, columns=columns)
                break
    return [problem.arrival, *(problem.start(name, plan) for name, plan in plans.items())]


def best_start(candidates: Sequence[Start], *, weights: Weights, cap: int | None) -> Start:
    """The start of least J among those that keep the cap and have no more packs than the order of arrival."""

    def rank(start: Start) -> tuple[bool, int, int]:
        return not start.keeps(cap), weights.objective(start.work), start.work.packs_per_rank

    arrival = candidates[0].work
    return min((s for s in candidates if s.work.packs_per_rank <= arrival.packs_per_rank), key=rank)


def least(a: Work, b: Work) -> Work:
    """`a` with each guarded work lowered to that of `b`."""
    expert = None if a.expert_work is None or b.expert_work is None else min(a.expert_work, b.expert_work)
    return replace(
        a,
        expert_work=expert,
        token_work=min(a.token_work, b.token_work),
        pair_work=min(a.pair_work, b.pair_work),
    )
