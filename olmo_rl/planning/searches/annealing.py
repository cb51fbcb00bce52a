"""`balance=anneal`: simulated annealing over a fixed number of proposals, from the best start.

Owns the cooling, the deadline and the arrays of a chain; `annealing_kernels` holds the chain itself. The
temperature is a share of J that falls geometrically; no clock and no floating point enters a decision, so a
plan that no deadline cut short is equal on every machine.

Shapes as in `annealing_kernels.Chain`.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.numba_kernels import HAVE_NUMBA, compile_for
from olmo_rl.planning.objective import Work, lower_bounds, measure
from olmo_rl.planning.packing import plan_step
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
    by_length,
    cells_plan,
    fixed_point,
    least,
    starts,
)
from olmo_rl.types import PackPlan, SearchLog, Topology

CHUNKS = 128
# First temperature as a share of J / N, which is about what a swap of similar samples changes, and last /
# first.
HEAT, COOLED = 0.2, 0.02
# How much more a unit of work above the guard weighs, in the first and in the second half. RELAXED may pass
# through plans above the guard while it is warm, which finds better ones; STRICT serves batches where the
# chain would not return below the guard.
RELAXED, STRICT = (0, 20), (20, 20)
# Proposals between two readings of the clock: milliseconds.
STEPS, UNCOMPILED_STEPS = 10_000, 64
_LANES = 16


def compile_chain() -> None:
    """Compile the kernels for the types that `anneal` calls them with, or load them from the cache."""
    lengths, topology = np.ones(2, dtype=np.int64), Topology(2)
    plan = plan_step(lengths, budget=1, topology=topology)
    work = measure(plan, lengths=lengths, loads=None, topology=topology)
    problem = SearchProblem(
        lengths=lengths,
        loads=None,
        budget=1,
        topology=topology,
        arrival=Start(name="arrival", plan=plan, work=work),
        bounds=lower_bounds(lengths=lengths, loads=None, topology=topology, budget=1),
        weights=fixed_point(work, topology=topology),
        cap=None,
        proposals=None,
        seconds=0.0,
        seed=0,
    )
    rules = rules_of(problem, guard=work, pressure=0)
    compile_for(anneal_cells, 1, 1, rules, new_chain(plan, problem=problem, best=0))


def default_proposals(samples: int) -> int:
    """Proposals of one batch: about 40 ms for 128 samples, half a second for 1,024."""
    return max(120_000, 700 * samples)


def deviates() -> NDArray[np.int64]:
    """int64 [4096]: quantiles of the unit exponential in units of 2^-16."""
    return np.rint(-np.log((np.arange(4096) + 0.5) / 4096) * 65536).astype(np.int64)


def temperatures(objective: int, *, samples: int) -> NDArray[np.int64]:
    """int64 [CHUNKS]: the geometric cooling. The shares are rounded so that no libm shows in them."""
    shares = np.rint(2**24 * COOLED ** (np.arange(CHUNKS) / (CHUNKS - 1))).astype(np.int64)
    first = int(objective * HEAT / samples)
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
    goal: int,
    pressure: tuple[int, int] = RELAXED,
    seconds: float,
) -> tuple[PackPlan | None, SearchLog]:
    """The best plan found that beats `start` in J, is no worse than `guard` and keeps the cap, or None.

    `goal` is J of the bounds: a plan that reaches it ends the search. `seconds` (inf for none) is a safety
    net: the chain stops at the next reading of the clock, and the log records it.
    """
    began = time.monotonic()
    limit = default_proposals(len(problem.lengths)) if problem.proposals is None else problem.proposals
    chain = new_chain(start.plan, problem=problem, best=problem.weights.objective(start.work))
    rules = rules_of(problem, guard=guard, pressure=0)
    if not start.keeps(problem.cap):
        # No start keeps the cap: every plan that keeps it is better, whatever its works.
        chain.value[BEST] = 2**62
        rules = rules._replace(guard=(2**62,) * 3)
    done, reason = 0, "proposals"
    for chunk, temperature in enumerate(
        temperatures(int(chain.value[OBJECTIVE]), samples=len(problem.lengths)).tolist()
    ):
        rules = rules._replace(pressure=pressure[2 * chunk // CHUNKS])
        steps = limit * (chunk + 1) // CHUNKS - done
        while steps:
            some = min(steps, STEPS if HAVE_NUMBA else UNCOMPILED_STEPS)
            anneal_cells(some, temperature, rules, chain)
            done, steps = done + some, steps - some
            if time.monotonic() - began > seconds:
                break
        if chain.best[0] >= 0 and chain.value[BEST] == goal:
            reason = "bounds"
            break
        if time.monotonic() - began > seconds and done < limit:
            reason = "deadline"
            break
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


def search_annealed(problem: SearchProblem) -> SearchResult:
    """The plan of `balance=anneal`: of chains from the best start, or that start itself."""
    weights, bounds = problem.weights, problem.bounds
    best = best_start(starts(problem), weights=weights, cap=problem.cap)
    started = time.perf_counter()
    goal = weights.objective(bounds)
    if weights.objective(best.work) == goal and best.work.packs_per_rank == bounds.packs_per_rank:
        log = SearchLog(seed=problem.seed, proposals=0, accepted=0, stop_reason="bounds", rejected={})
        return SearchResult(plan=replace(best.plan, search=log), start=best, started=started, paths={})
    # A plan that is also no worse than the order of arrival comes first. The other attempts are for the
    # rare batch where no such plan is found; they share the deadline.
    guards = [least(best.work, problem.arrival.work), best.work]
    if guards[0] == guards[1]:
        guards.pop()
    done = accepted = 0
    for guard, pressure in itertools.product(guards, (RELAXED, STRICT)):
        left = problem.seconds - (time.perf_counter() - started)
        found, log = anneal(best, problem=problem, guard=guard, goal=goal, pressure=pressure, seconds=left)
        done, accepted = done + log.proposals, accepted + log.accepted
        if found is not None or log.stop_reason == "deadline":
            break
    log = replace(log, proposals=done, accepted=accepted)
    plan = replace(best.plan if found is None else found, search=log)
    return SearchResult(plan=plan, start=best, started=started, paths={})
