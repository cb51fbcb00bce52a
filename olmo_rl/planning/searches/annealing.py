"""`balance=anneal`: simulated annealing over a fixed number of proposals, first by length alone, then with
expert loads.

Owns the chains of a search, their cooling and deadline, and the arrays of a chain; `annealing_kernels` holds
the chain itself. The temperature is a share of J that falls geometrically. No clock and no floating point
enters a decision unless the deadline is nearer than the last proposal, which the log records: every other
plan is equal on every machine.

Shapes as in `annealing_kernels.Chain`.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.numba_kernels import HAVE_NUMBA, compile_for
from olmo_rl.planning.objective import Work
from olmo_rl.planning.searches.annealing_kernels import (
    ACCEPTED,
    BEST,
    COLUMN,
    OBJECTIVE,
    OVER_BUDGET,
    PLACE,
    RANK,
    SQUARES,
    TOKENS,
    WORSE,
    Chain,
    Rules,
    anneal_cells,
)
from olmo_rl.planning.searches.starts import (
    SearchProblem,
    SearchResult,
    Start,
    best_start,
    by_columns,
    by_length,
    cells_plan,
    least,
    starts,
    tolerated,
)
from olmo_rl.types import PackPlan, SearchLog, Topology

CHUNKS = 128
# First temperature as a share of J / N, which is about what a swap of similar samples changes: of a chain
# from a start, and of one from the plan by length. COOLED: last / first.
HEAT, WARM, COOLED = 0.2, 0.05, 0.02
# How much more a unit of work above the guard weighs, in the first and in the second half. RELAXED may pass
# through plans above the guard while it is warm, which finds better ones; STRICT serves batches where the
# chain would not return below the guard.
RELAXED, STRICT = (0, 20), (20, 20)
# Proposals between two readings of the clock: milliseconds.
STEPS, UNCOMPILED_STEPS = 10_000, 64
_LANES = 16
# Batches up to this many samples are searched from both starts.
SMALL = 64
# Fewest proposals of a chain that looks for a plan within the cap.
CAP_PROPOSALS = 40_000
# Above every objective: the first plan that keeps the cap is better than any that does not.
ANY_PLAN = 2**62


def compile_chain() -> None:
    """Compile the kernels for the types that `anneal` calls them with, or load them from the cache."""
    lengths = np.ones(2, dtype=np.int64)
    problem = SearchProblem.of(lengths, loads=None, budget=1, topology=Topology(2), seed=0)
    arrival = problem.arrival
    rules = rules_of(problem, guard=arrival.work, pressure=0)
    compile_for(anneal_cells, 1, 1, rules, new_chain(arrival.plan, problem=problem, best=0))


def default_proposals(samples: int) -> int:
    """Proposals of one chain: about 20 ms for 128 samples, a quarter of a second for 1,024."""
    return max(120_000, 700 * samples)


def deviates() -> NDArray[np.int64]:
    """int64 [4096]: quantiles of the unit exponential in units of 2^-16."""
    return np.rint(-np.log((np.arange(4096) + 0.5) / 4096) * 65536).astype(np.int64)


def temperatures(objective: int, *, samples: int, heat: float = HEAT) -> NDArray[np.int64]:
    """int64 [CHUNKS]: the geometric cooling. The shares are rounded so that no libm shows in them."""
    shares = np.rint(2**24 * COOLED ** (np.arange(CHUNKS) / (CHUNKS - 1))).astype(np.int64)
    first = int(objective * heat / samples)
    return np.array([(first * int(share)) >> 24 for share in shares], dtype=np.int64)


def new_chain(plan: PackPlan, *, problem: SearchProblem, best: int) -> Chain:
    """A chain at `plan` that searches for an objective below `best`."""
    lengths, topology = problem.lengths, problem.topology
    n, world, columns = len(lengths), topology.world_size, plan.packs_per_rank
    ep, layers = (1, 0) if problem.loads is None else problem.loads.shape[1:]
    replicas = topology.num_replicas if problem.loads is not None else world
    padded = -(-layers // _LANES) * _LANES
    loads = np.zeros((n + 1, ep, padded), dtype=np.int32)
    if problem.loads is not None:
        loads[:n, :, :layers] = problem.loads
    order = by_length(lengths)
    sample = np.zeros((n + 1, 5), dtype=np.int64)
    sample[:n, TOKENS] = lengths
    sample[:n, SQUARES] = lengths * lengths
    sample[order, PLACE] = np.arange(n)
    load = np.zeros((columns, replicas, ep, padded), dtype=np.int32)
    cell = np.zeros((3, columns, world), dtype=np.int64)
    for w, packs in enumerate(plan.packs):
        for c, pack in enumerate(packs):
            members = list(pack)
            sample[members, RANK], sample[members, COLUMN] = w, c
            load[c, w // ep] += loads[members].sum(axis=0)
            cell[:, c, w] = len(members), lengths[members].sum(), (lengths[members] ** 2).sum()
    peak = load.max(axis=2)
    works = np.stack([peak.max(axis=1).sum(axis=1), cell[1].max(axis=1), cell[2].max(axis=1)], axis=1)
    excess = 0
    if problem.cap is not None:
        excess = int(np.maximum(peak.max(axis=2, initial=0).astype(np.int64) - problem.cap, 0).sum())
    total = np.array([*works.sum(axis=0), excess], dtype=np.int64)
    return Chain(
        sample=sample,
        loads=loads,
        load=load,
        peak=peak,
        proposed=np.zeros((columns, 3, padded), dtype=np.int32),
        cell=cell,
        works=works.astype(np.int64),
        total=total,
        value=np.array([int((total * problem.weights.terms).sum()), best], dtype=np.int64),
        outcomes=np.zeros(3, dtype=np.int64),
        by_length=order,
        best=np.full(n, -1, dtype=np.int64),
        draws=np.array([problem.seed], dtype=np.uint64),
        deviates=deviates(),
    )


def rules_of(problem: SearchProblem, *, guard: Work, pressure: int) -> Rules:
    """The constants of a chain that must stay within `guard`."""
    n = len(problem.lengths)
    return Rules(
        weights=problem.weights.terms,
        guard=(guard.expert_work or 0, guard.token_work, guard.pair_work),
        pressure=pressure,
        budget=problem.budget,
        cap=problem.cap or 0,
        # Fewer than three samples have no neighbours: partners then come from anywhere.
        window=min(max(8, n // 32), (n - 1) // 2),
    )


def anneal(
    start: Start,
    *,
    problem: SearchProblem,
    guard: Work,
    best: int,
    goal: int,
    limit: int,
    seconds: float,
    pressure: tuple[int, int] = RELAXED,
    heat: float = HEAT,
) -> tuple[PackPlan | None, SearchLog]:
    """A chain of `limit` proposals from `start`: the plan found of least J below `best` that stays within
    `guard` and keeps the cap, or None.

    `goal` is J of the bounds: a plan that reaches it ends the chain. A chain that would not end within
    `seconds` cools by the clock instead of by its proposals, so that it is as cold at the deadline as it
    would have been after all of them; the log records that as stop_reason "deadline".
    """
    began = time.monotonic()
    chain = new_chain(start.plan, problem=problem, best=best)
    rules = rules_of(problem, guard=guard, pressure=0)
    if best == ANY_PLAN:
        # No plan keeps the cap yet: every plan that does is better, whatever its works.
        rules = rules._replace(guard=(ANY_PLAN,) * 3)
    cooling = temperatures(int(chain.value[OBJECTIVE]), samples=len(problem.lengths), heat=heat).tolist()
    ends = [limit * (chunk + 1) // CHUNKS for chunk in range(CHUNKS)]
    done = chunk = 0
    reason = "proposals"
    while (chunk := max(chunk, bisect.bisect_right(ends, done))) < CHUNKS:
        some = min(ends[chunk] - done, STEPS if HAVE_NUMBA else UNCOMPILED_STEPS)
        anneal_cells(some, cooling[chunk], rules._replace(pressure=pressure[2 * chunk // CHUNKS]), chain)
        done += some
        if chain.best[0] >= 0 and chain.value[BEST] == goal:
            reason = "bounds"
            break
        spent = time.monotonic() - began
        by_clock = CHUNKS if spent >= seconds else int(CHUNKS * spent / seconds)
        if by_clock > chunk and done < ends[by_clock - 1]:
            chunk, reason = by_clock, "deadline"
    log = SearchLog(
        seed=problem.seed,
        proposals=done,
        accepted=int(chain.outcomes[ACCEPTED]),
        stop_reason=reason,
        rejected={"objective": int(chain.outcomes[WORSE]), "budget": int(chain.outcomes[OVER_BUDGET])},
    )
    if chain.best[0] < 0:
        return None, log
    return cells_plan(chain.best, topology=problem.topology, columns=start.plan.packs_per_rank), log


@dataclass(kw_only=True, slots=True)
class Search:
    """The chains of one problem: the plan of least J so far, and what all chains did.

    `best` is a start, or a plan that a chain or the search by length found. `clock` is the time when the
    deadline began.
    """

    problem: SearchProblem
    best: Start
    clock: float
    logs: list[SearchLog] = field(default_factory=list)

    @property
    def log(self) -> SearchLog:
        """All chains in one record; the first reason other than "proposals" is that of the search."""
        reasons = [log.stop_reason for log in self.logs if log.stop_reason != "proposals"]
        return SearchLog(
            seed=self.problem.seed,
            proposals=sum(log.proposals for log in self.logs),
            accepted=sum(log.accepted for log in self.logs),
            stop_reason=reasons[0] if reasons else "proposals",
            rejected=dict(sum((Counter(log.rejected) for log in self.logs), Counter())),
        )

    def result(self, start: Start, *, began: float, least_cap: int | None = None) -> SearchResult:
        """The best plan with its log; `start` guards it, `began` is when the search for it began."""
        best = start if least_cap is not None else self.best
        return SearchResult(
            plan=replace(best.plan, search=self.log),
            start=start,
            started=began,
            paths={},
            least_cap=least_cap,
        )

    def seconds(self, *, chains: int) -> float:
        """The share of one of `chains` chains in the time that is left."""
        return max(0.0, self.problem.seconds - (time.monotonic() - self.clock)) / chains

    def chain(
        self,
        start: Start,
        *,
        guard: Work,
        heat: float = HEAT,
        pressure: tuple[int, int] = RELAXED,
    ) -> None:
        """Run a chain from `start` in the time that is left; keep what is better."""
        problem, weights = self.problem, self.problem.weights
        found, log = anneal(
            start,
            problem=replace(problem, seed=problem.seed + len(self.logs)),
            guard=guard,
            best=weights.objective(self.best.work) if self.best.keeps(problem.cap) else ANY_PLAN,
            goal=weights.objective(problem.bounds),
            limit=chain_proposals(problem),
            seconds=self.seconds(chains=1),
            pressure=pressure,
            heat=heat,
        )
        self.logs.append(log)
        if found is not None:
            self.best = problem.start("chain", found)


def no_search(seed: int, reason: str) -> SearchLog:
    """The record of a chain that tried nothing."""
    return SearchLog(seed=seed, proposals=0, accepted=0, stop_reason=reason, rejected={})


def chain_proposals(problem: SearchProblem) -> int:
    """Proposals of each chain of `problem`."""
    return default_proposals(len(problem.lengths)) if problem.proposals is None else problem.proposals


def search_annealed(problem: SearchProblem) -> SearchResult:
    """The plan of `balance=anneal`: the plan of least J among the best start and what the chains find within
    its guard.

    With expert loads, one chain first searches by length alone and a second one goes on from its plan. Half
    of the work needs no loads then, and knowing the experts never gives a worse plan than not knowing them.
    """
    weights, bounds = problem.weights, problem.bounds
    start = best_start(starts(problem), weights=weights, cap=problem.cap)
    began = time.perf_counter()
    search = Search(problem=problem, best=start, clock=time.monotonic())
    if not start.keeps(problem.cap):
        start, least_cap = start_within_cap(search)
        if not start.keeps(problem.cap):
            return search.result(start, began=began, least_cap=least_cap)
        search.best = start
    at_bound = weights.objective(start.work) == weights.objective(bounds)
    if at_bound and start.work.packs_per_rank == bounds.packs_per_rank:
        search.logs.append(no_search(problem.seed, "bounds"))
        return search.result(start, began=began)
    source, heat, first = start, HEAT, start
    if problem.loads is not None:
        by_lengths = search_annealed(problem.by_length_alone(seconds=search.seconds(chains=2)))
        found = problem.start("length", by_lengths.plan)
        assert by_lengths.plan.search is not None
        search.logs.append(by_lengths.plan.search)
        if found.keeps(problem.cap) and found.work.packs_per_rank <= start.work.packs_per_rank:
            source, heat = found, WARM
            if weights.objective(found.work) < weights.objective(start.work):
                search.best = start = found
    # A plan that is also no worse than the order of arrival comes first. The last chain serves the rare
    # batch where none is found: it may be worse than arrival in a term, and is pressed towards its guard
    # throughout.
    search.chain(source, guard=tolerated(least(start.work, problem.arrival.work)), heat=heat)
    if search.best is start and search.log.stop_reason == "proposals":
        search.chain(start, guard=tolerated(start.work), heat=heat, pressure=STRICT)
    if start is not first and len(problem.lengths) <= SMALL:
        # A small batch has few plans, and the guards of both starts may hold the best one.
        best = search.best
        for guard in (least(first.work, problem.arrival.work), first.work):
            search.chain(first, guard=tolerated(guard))
        if search.best is not best:
            start = first
    return search.result(start, began=began)


def start_within_cap(search: Search) -> tuple[Start, int]:
    """A start that keeps the cap, with as few packs as that takes, or one that does not; and the lowest cap
    for which a start was found.
    """
    cap = search.problem.cap
    assert cap is not None, "a search for a cap has one"
    candidates = by_columns(search.problem)
    found = _within(cap, search=search, candidates=candidates)
    if found is not None:
        return found, cap
    best = min((s for some in candidates for s in some), key=lambda s: s.work.max_destination_load or 0)
    lowest = best.work.max_destination_load
    assert lowest is not None, "a search for a cap knows the loads"
    refused = cap
    while lowest - refused > 1 and search.seconds(chains=1) > 0:
        middle = (lowest + refused) // 2
        found = _within(middle, search=search, candidates=candidates)
        if found is None:
            refused = middle
        else:
            best, lowest = found, middle
    return best, lowest


def _within(cap: int, *, search: Search, candidates: Sequence[Sequence[Start]]) -> Start | None:
    """The first plan found that keeps `cap`, columns ascending. It depends on the batch and the cap alone."""
    # Work hardly counts here: a little excess must cost more than any work it saves.
    weights = search.problem.weights
    weights = replace(
        weights, expert=weights.expert // 256, token=weights.token // 256, pair=weights.pair // 256
    )
    problem = replace(search.problem, cap=cap, weights=weights)
    for some in candidates:
        start = min(some, key=lambda s: s.work.max_destination_load or 0)
        if start.keeps(cap):
            return start
        found, log = anneal(
            start,
            problem=problem,
            guard=start.work,
            best=ANY_PLAN,
            goal=0,
            limit=max(chain_proposals(problem), CAP_PROPOSALS),
            seconds=search.seconds(chains=2),
        )
        search.logs.append(log)
        if found is not None:
            return problem.start("within_cap", found)
    return None
