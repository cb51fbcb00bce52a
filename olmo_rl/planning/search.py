"""The searches: one optimizer batch in, one verified plan out.

Owns the guard (no worse than the best start on expert, token and pair work and pack count), the choice of the
search and the independent rescore of its plan. Refuses samples that no pack holds and a cap on destinations
that the plan found does not keep.

"Best start" is the start of least J with no more packs than the order of arrival, which is itself a start.
Lower counts do not establish faster training: measure before turning it on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.annealing import RELAXED, STRICT, anneal, compile_chain
from olmo_rl.planning.loads import compile_counting, stable_hash
from olmo_rl.planning.objective import Work, lower_bounds, measure
from olmo_rl.planning.packing import check_lengths, plan_step
from olmo_rl.planning.reference_search import reference_start, search_reference, worse_metric
from olmo_rl.planning.schedule import Schedule, StepInput
from olmo_rl.planning.starts import Problem, Start, best_start, fixed_point, least, no_worse, starts
from olmo_rl.types import ExpertLayout, PackPlan, Refusal, SearchLog, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The plan of a search, the start that guards it, when that start was chosen, and how often each way of
    scoring was taken.
    """

    plan: PackPlan
    start: Start
    started: float
    paths: dict[str, int]


def batch_seed(ids: Sequence[str]) -> int:
    """32 bits that depend on the sample ids and their order alone."""
    return stable_hash("".join(f"{len(i)}:{i}" for i in ids)) >> 32


def compile_kernels(
    balance: BalanceConfig, *, layout: ExpertLayout | None, topology: Topology, searches: bool = True
) -> None:
    """Compile every kernel that planning under `balance` calls, or load it from the cache on disk.

    Call it before ranks wait for each other and before a clock starts: it takes ten seconds when nothing is
    cached, milliseconds later. `layout` None: no routes are counted. `searches` False: this rank only
    counts, another one searches.
    """
    if layout is not None:
        compile_counting(layout, topology=topology)
    if searches and balance.kind is BalanceKind.anneal:
        compile_chain()


def _anneal(problem: Problem) -> Found:
    weights, bounds = problem.weights, problem.bounds
    best = best_start(starts(problem), weights=weights, cap=problem.cap)
    started = time.perf_counter()
    goal = weights.objective(bounds)
    if weights.objective(best.work) == goal and best.work.packs_per_rank == bounds.packs_per_rank:
        log = SearchLog(seed=problem.seed, proposals=0, accepted=0, stop_reason="bounds", rejected={})
        return Found(plan=replace(best.plan, search=log), start=best, started=started, paths={})
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
    return Found(plan=plan, start=best, started=started, paths={})


def _reference(problem: Problem) -> Found:
    start, ranks = reference_start(problem)
    started = time.perf_counter()
    plan, paths = search_reference(ranks, problem=problem)
    return Found(plan=plan, start=start, started=started, paths=paths)


def _problem(step: StepInput) -> Problem:
    """Raises Refusal for samples that no pack or no count holds."""
    budget, topology, loads, balance = step.budget, step.topology, step.loads, step.balance
    lengths = np.array(
        check_lengths(step.lengths, budget=budget, topology=topology, ids=step.ids, source=step.source)
    )
    assert len(step.ids) == len(lengths), "one id per sample"
    if loads is None:
        if balance.max_destination_load is not None:
            raise Refusal("balance.max_destination_load has no effect without expert loads: set it to null")
    else:
        world, ep = topology.world_size, topology.ep_degree
        assert 1 < ep < world, f"a search with expert loads needs 1 < EP degree < ranks, not {ep} of {world}"
        assert loads.shape[:2] == (len(lengths), ep), "loads are [samples, EP ranks, layers]"
        total = int(loads.sum(axis=0, dtype=np.int64).max(initial=0))
        if total >= 2**31:
            raise Refusal(
                f"{total} assignments of one layer go to one destination, more than the planner counts: set "
                "batch.samples_per_step lower"
            )
    plan = plan_step(lengths, budget=budget, topology=topology)
    work = measure(plan, lengths=lengths, loads=loads, topology=topology)
    return Problem(
        lengths=lengths,
        loads=loads,
        budget=budget,
        topology=topology,
        arrival=Start(name="arrival", plan=plan, work=work),
        bounds=lower_bounds(lengths=lengths, loads=loads, topology=topology, budget=budget),
        weights=fixed_point(work, topology=topology),
        cap=balance.max_destination_load,
        proposals=balance.proposals,
        seconds=balance.seconds if step.seconds is None else step.seconds,
        seed=batch_seed(step.ids),
    )


def _verify(after: Work, *, found: Found, problem: Problem, kind: BalanceKind) -> None:
    """The independent rescore against the guards. A failure is ours, except for a cap out of reach."""
    cap, reached = problem.cap, after.max_destination_load
    if cap is not None and reached is not None and reached > cap:
        raise Refusal(
            f"balance.max_destination_load={cap}: the best plan found sends {reached} assignments to one "
            f"destination in one layer of one column: raise it to {reached} or lower packing.max_tokens"
        )
    if found.start.keeps(cap) and not no_worse(after, than=found.start.work):
        raise AssertionError(f"the search returned {after}, worse than its start {found.start.work}")
    if kind is BalanceKind.reference:
        metric = worse_metric(after, guard=found.start.work)
        assert metric is None, f"the reference search made {metric} worse"


def plan_batch(step: StepInput) -> Schedule:
    """Search a plan of one optimizer batch: the plan, its work and that of the order of arrival, the bounds
    and the time split (`start`, `search`, `verify`).

    The plan is never worse than the best start on expert, token and pair work and pack count, on every metric
    under `reference`. Raises Refusal for samples or a cap that no plan can satisfy.
    """
    compile_kernels(step.balance, layout=None, topology=step.topology)
    began = time.perf_counter()
    problem = _problem(step)
    search = {BalanceKind.reference: _reference, BalanceKind.anneal: _anneal}[step.balance.kind]
    found = search(problem)
    searched = time.perf_counter()
    found.plan.check(problem.lengths, problem.budget)
    after = measure(found.plan, lengths=problem.lengths, loads=problem.loads, topology=problem.topology)
    _verify(after, found=found, problem=problem, kind=step.balance.kind)
    return Schedule(
        plan=found.plan,
        before=problem.arrival.work,
        after=after,
        bounds=problem.bounds,
        start=found.start.name,
        seconds={
            "start": found.started - began,
            "search": searched - found.started,
            "verify": time.perf_counter() - searched,
        },
        paths=found.paths,
    )
