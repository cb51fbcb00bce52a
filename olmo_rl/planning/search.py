"""The planner's entry point: one optimizer batch in, one verified plan out.

Owns the choice of starts, the guard (never worse than the best start on expert, token and pair work and
pack count), the dispatch to the searches, and the independent rescore of what they return. Refuses settings
that cannot take effect, samples that no pack holds and a cap that no plan was found to keep.

"Best start" is the start of least J with no more packs than the order of arrival, which is itself a start.
Lower counts do not establish faster training: measure before turning it on.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.anneal import RELAXED, STRICT, anneal, compile_chain
from olmo_rl.planning.loads import compile_counting, stable_hash
from olmo_rl.planning.objective import Bounds, Work, lower_bounds, measure
from olmo_rl.planning.packing import check_lengths, plan_step
from olmo_rl.planning.reference import Batch, greedy_ranks, search_reference, worse_metric
from olmo_rl.planning.schedule import Schedule, StepInput
from olmo_rl.planning.starts import (
    Start,
    arrival_ranks,
    best_start,
    by_length,
    least,
    no_worse,
    order_plan,
    starts,
)
from olmo_rl.planning.weights import Weights, fixed_point
from olmo_rl.types import ExpertLayout, PackPlan, Refusal, SearchLog, Topology


def batch_seed(ids: Sequence[str]) -> int:
    """32 bits that depend on the sample ids and their order alone."""
    return stable_hash("".join(f"{len(i)}:{i}" for i in ids)) >> 32


def balance_refusals(balance: BalanceConfig) -> list[str]:
    """One line for every value of `balance` that no search can use."""
    reasons = []
    proposals = balance.proposals
    if proposals is not None and (
        isinstance(proposals, bool) or not isinstance(proposals, int) or proposals < 0
    ):
        reasons.append(f"balance.proposals={proposals!r} must be null or an integer of at least 0")
    if not isinstance(balance.seconds, int | float) or math.isnan(balance.seconds) or balance.seconds < 0:
        reasons.append(f"balance.seconds={balance.seconds!r} must be a number of at least 0")
    stride = balance.layer_stride
    if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
        reasons.append(f"balance.layer_stride={stride!r} must be an integer of at least 1")
    cap = balance.max_destination_load
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
        reasons.append(f"balance.max_destination_load={cap!r} must be null or an integer of at least 1")
    return reasons


def _check(
    balance: BalanceConfig,
    *,
    ids: Sequence[str],
    lengths: NDArray[np.int64],
    loads: NDArray[np.int32] | None,
    topology: Topology,
) -> None:
    reasons = balance_refusals(balance)
    world, ep = topology.world_size, topology.ep_degree
    searched = balance.kind is not BalanceKind.none
    if searched and loads is not None and (ep == 1 or world <= ep):
        reasons.append(
            f"balance={balance.kind.value} with expert loads needs 1 < strategy.ep_degree < world size, not "
            f"{ep} of {world}: set balance=none"
        )
    if balance.max_destination_load is not None and not (searched and loads is not None):
        reasons.append(
            "balance.max_destination_load has no effect without expert loads and a search: set it to null"
        )
    if reasons:
        raise Refusal(reasons)
    assert len(ids) == len(lengths), "one id per sample"
    if loads is not None:
        assert loads.shape[:2] == (len(lengths), ep), "loads are [samples, EP ranks, layers]"
        total = int(loads.sum(axis=0, dtype=np.int64).max(initial=0))
        if total >= 2**31:
            raise Refusal(
                f"{total} assignments of one layer go to one destination, more than the planner counts: set "
                "batch.samples_per_step lower"
            )


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
        compile_chain(balance.level)


def warm_up(balance: BalanceConfig) -> None:
    """`compile_kernels` of the search alone."""
    compile_kernels(balance, layout=None, topology=Topology(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One batch and how to plan it."""

    n: NDArray[np.int64]
    loads: NDArray[np.int32] | None
    budget: int
    topology: Topology
    bounds: Bounds
    balance: BalanceConfig
    seed: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search returns: its plan, the order of arrival's work, the start that guards it, when it was
    chosen.
    """

    plan: PackPlan
    before: Work
    start: Start
    started: float
    paths: dict[str, int]


def _none(problem: Problem) -> Found:
    plan = plan_step(problem.n, budget=problem.budget, topology=problem.topology)
    work = measure(plan, lengths=problem.n, loads=problem.loads, topology=problem.topology)
    start = Start(name="arrival", plan=plan, work=work)
    return Found(plan=plan, before=work, start=start, started=time.perf_counter(), paths={})


def _starts_of(problem: Problem) -> tuple[Work, Start, Weights]:
    """The order of arrival's work, the best start, and the weights of J."""
    candidates = starts(
        problem.n,
        loads=problem.loads,
        budget=problem.budget,
        topology=problem.topology,
        level=problem.balance.level,
    )
    before = candidates[0].work
    weights = fixed_point(before, topology=problem.topology)
    return before, best_start(candidates, weights=weights, cap=problem.balance.max_destination_load), weights


def _log(seed: int, reason: str) -> SearchLog:
    return SearchLog(seed=seed, proposals=0, accepted=0, stop_reason=reason, rejected={})


def _greedy(problem: Problem) -> Found:
    before, best, _ = _starts_of(problem)
    plan = replace(best.plan, search=_log(problem.seed, "none"))
    return Found(plan=plan, before=before, start=best, started=time.perf_counter(), paths={})


def _anneal(problem: Problem) -> Found:
    before, best, weights = _starts_of(problem)
    started = time.perf_counter()
    bounds, goal = problem.bounds, weights.objective(problem.bounds)
    if weights.objective(best.work) == goal and best.work.packs_per_rank == bounds.packs_per_rank:
        plan = replace(best.plan, search=_log(problem.seed, "bounds"))
        return Found(plan=plan, before=before, start=best, started=started, paths={})
    # A plan that is also no worse than the order of arrival comes first. The other attempts are for the
    # rare batch where no such plan is found; they share the deadline.
    guards = [least(best.work, before), best.work]
    if guards[0] == guards[1]:
        guards.pop()
    done = accepted = 0
    for guard, pressure in itertools.product(guards, (RELAXED, STRICT)):
        left = problem.seconds - (time.perf_counter() - started)
        found, log, paths = anneal(
            best.plan,
            work=best.work,
            guard=guard,
            lengths=problem.n,
            loads=problem.loads,
            topology=problem.topology,
            budget=problem.budget,
            level=problem.balance.level,
            weights=weights,
            goal=goal,
            pressure=pressure,
            seed=problem.seed,
            proposals=problem.balance.proposals,
            cap=problem.balance.max_destination_load,
            seconds=left,
        )
        done, accepted = done + log.proposals, accepted + log.accepted
        if found is not None or log.stop_reason == "deadline":
            break
    log = replace(log, proposals=done, accepted=accepted)
    plan = replace(best.plan if found is None else found, search=log)
    return Found(plan=plan, before=before, start=best, started=started, paths=paths)


def _reference(problem: Problem) -> Found:
    n, topology = problem.n, problem.topology
    arrival = arrival_ranks(len(n), world_size=topology.world_size)
    experts = problem.loads is not None
    h = np.zeros((len(n), 1, 0), dtype=np.int64) if problem.loads is None else problem.loads.astype(np.int64)
    before = measure(
        order_plan(arrival, lengths=n, budget=problem.budget),
        lengths=n,
        loads=problem.loads,
        topology=topology,
    )
    weights = fixed_point(before, topology=topology)
    batch = Batch(n=n, h=h, topology=topology, budget=problem.budget, weights=weights)
    orders = {"arrival": np.arange(len(n)), "length": by_length(n)}
    ranks = {"arrival": arrival} | {
        f"greedy_{name}": greedy_ranks(order, n=n, h=h, topology=topology, weights=weights)
        for name, order in orders.items()
    }
    candidates = []
    for name, rank in ranks.items():
        plan = order_plan(rank, lengths=n, budget=problem.budget)
        work = measure(plan, lengths=n, loads=problem.loads, topology=topology)
        if worse_metric(work, guard=before) is None:
            candidates.append(Start(name=name, plan=plan, work=work))
    best = min(candidates, key=lambda s: (weights.objective(s.work), s.work.packs_per_rank))
    started = time.perf_counter()
    plan, _, paths = search_reference(
        ranks[best.name],
        batch=batch,
        experts=experts,
        bounds=problem.bounds,
        seed=problem.seed,
        limit=problem.balance.proposals,
        seconds=problem.seconds,
    )
    return Found(plan=plan, before=before, start=best, started=started, paths=paths)


def _verify(after: Work, *, found: Found, problem: Problem) -> None:
    """The independent rescore against the guards. A failure is ours, except for a cap out of reach."""
    cap, reached = problem.balance.max_destination_load, after.max_destination_load
    if cap is not None and reached is not None and reached > cap:
        raise Refusal(
            f"balance.max_destination_load={cap}: the best plan found sends {reached} assignments to one "
            f"destination in one layer of one column: raise it to {reached} or lower packing.max_tokens"
        )
    kept_cap = cap is None or (found.start.work.max_destination_load or 0) <= cap
    if kept_cap and not no_worse(after, than=found.start.work):
        raise AssertionError(f"the search returned {after}, worse than its start {found.start.work}")
    if problem.balance.kind is BalanceKind.reference:
        metric = worse_metric(after, guard=found.start.work)
        assert metric is None, f"the reference search made {metric} worse"


def plan_batch(step: StepInput) -> Schedule:
    """The plan of one optimizer batch with the work before and after, the bounds and the time split
    (`start`, `search`, `verify`).

    The plan is never worse than the best start on expert, token and pair work and pack count, on every metric
    under `reference`. Raises Refusal for settings, samples or a cap that no plan can satisfy.
    """
    compile_kernels(step.balance, layout=None, topology=step.topology)
    began = time.perf_counter()
    loads, budget, topology, balance = step.loads, step.budget, step.topology, step.balance
    lengths = check_lengths(step.lengths, budget=budget, topology=topology, ids=step.ids, source=step.source)
    n = np.array(lengths, dtype=np.int64)
    _check(balance, ids=step.ids, lengths=n, loads=loads, topology=topology)
    problem = Problem(
        n=n,
        loads=loads,
        budget=budget,
        topology=topology,
        bounds=lower_bounds(lengths=n, loads=loads, topology=topology, budget=budget),
        balance=balance,
        seed=batch_seed(step.ids),
        seconds=balance.seconds if step.seconds is None else step.seconds,
    )
    run = {
        BalanceKind.none: _none,
        BalanceKind.greedy: _greedy,
        BalanceKind.reference: _reference,
        BalanceKind.anneal: _anneal,
    }[balance.kind]
    found = run(problem)
    searched = time.perf_counter()
    found.plan.check(n, budget)
    after = measure(found.plan, lengths=n, loads=loads, topology=topology)
    _verify(after, found=found, problem=problem)
    spent = {
        "start": found.started - began,
        "search": searched - found.started,
        "verify": time.perf_counter() - searched,
    }
    return Schedule(
        plan=found.plan,
        before=found.before,
        after=after,
        bounds=problem.bounds,
        start=found.start.name,
        seconds=spent,
        paths=found.paths,
    )
