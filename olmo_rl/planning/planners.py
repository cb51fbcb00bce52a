"""The planners: one optimizer step in, one verified plan out.

Owns the choice of the planner (`balance`), the guard of searches (J of the best start, its pack count, and
within 0.3 % its expert, token and pair work) and the independent rescore of their plans. Refuses samples
that no pack holds, and plans that exceed the cap on destinations. Adding a planner changes two files beside
its own: config.py gets a member of `BalanceKind`, this file a case in `_search`.

"Best start" is the start of least J with no more packs than the order of arrival, which is itself a start.
Lower counts do not establish faster training: measure before turning it on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.lending import compile_slots
from olmo_rl.planning.loads import compile_counting, stable_hash
from olmo_rl.planning.objective import Work, measure, objective
from olmo_rl.planning.packing import check_lengths, plan_step
from olmo_rl.planning.schedule import Schedule, StepInput, known_schedule
from olmo_rl.planning.searches.reference_search import search_from_reference_start, worse_metric
from olmo_rl.planning.searches.starts import SearchProblem, SearchResult, no_worse, tolerated
from olmo_rl.planning.trees import plan_trees
from olmo_rl.types import ExpertLayout, Refusal, Topology


def schedule_step(step: StepInput) -> Schedule:
    """Plan one packed step with the planner of `balance`."""
    if step.balance.kind is not BalanceKind.none:
        return padded_schedule(plan_batch(step), step=step)
    began = time.perf_counter()
    if step.sharing is not None:
        plan = plan_trees(
            step.sharing, budget=step.budget, topology=step.topology, ids=step.ids, source=step.source
        )
    else:
        plan = plan_step(
            step.lengths, budget=step.budget, topology=step.topology, ids=step.ids, source=step.source
        )
    spent = {"start": time.perf_counter() - began, "search": 0.0, "verify": 0.0}
    return known_schedule(plan, step=step, arrival=plan, seconds=spent)


def padded_schedule(schedule: Schedule, *, step: StepInput) -> Schedule:
    """The schedule with the work of its padding, or the order of arrival where that then has the lower J;
    raises Refusal where the loads exceed the cap.
    """
    if step.pads is None:
        return schedule
    arrival = plan_step(step.lengths, budget=step.budget, topology=step.topology)
    before, after = step.work(arrival), step.work(schedule.plan)
    cap = step.balance.max_destination_load

    def rank(work: Work) -> tuple[bool, float]:
        return cap is not None and (work.max_destination_load or 0) > cap, objective(work, base=before)

    if rank(before) < rank(after):
        # Padding can cost more than the search gained.
        plan = replace(arrival, search=schedule.plan.search, lending=step.lending)
        schedule, after = replace(schedule, plan=plan, start="arrival"), before
    schedule = replace(schedule, before=before, after=after)
    reached = after.max_destination_load
    if cap is not None and reached is not None and reached > cap:
        raise Refusal(
            f"balance.max_destination_load={cap}: with pads the plan sends {reached} assignments to one "
            f"destination in one layer of one column: raise it to {reached}, lower packing.max_tokens, or "
            "pad less (packing.pad_to_budget, packing.pad_to_multiple_of)"
        )
    return schedule


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
        if balance.guests:
            compile_slots()
    if searches and balance.kind is BalanceKind.anneal:
        from olmo_rl.planning.searches.annealing import compile_chain

        compile_chain()


def _search(problem: SearchProblem, *, kind: BalanceKind) -> SearchResult:
    """The result of the search that `kind` names: one case a planner, all of which mypy demands."""
    match kind:
        case BalanceKind.anneal:
            from olmo_rl.planning.searches.annealing import search_annealed  # imports compiled kernels

            return search_annealed(problem)
        case BalanceKind.reference:
            return search_from_reference_start(problem)
        case BalanceKind.none:
            raise AssertionError("the order of arrival is no search")


def _problem(step: StepInput) -> SearchProblem:
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
    return SearchProblem.of(
        lengths,
        loads=loads,
        budget=budget,
        topology=topology,
        seed=batch_seed(step.ids),
        cap=balance.max_destination_load,
        proposals=balance.proposals,
        seconds=balance.seconds if step.seconds is None else step.seconds,
    )


def _verify(after: Work, *, found: SearchResult, problem: SearchProblem, kind: BalanceKind) -> None:
    """The independent rescore against the guards. A failure is an internal error, except for a cap out of
    reach.
    """
    cap, reached = problem.cap, after.max_destination_load
    if cap is not None and reached is not None and reached > cap:
        raise Refusal(
            f"balance.max_destination_load={cap}: the best plan found sends {reached} assignments to one "
            "destination in one layer of one column: raise it to "
            f"{reached if found.least_cap is None else found.least_cap} or lower packing.max_tokens"
        )
    score, start = problem.weights.objective, found.start.work
    if not no_worse(after, than=tolerated(start)) or score(after) > score(start):
        raise AssertionError(f"the search returned {after}, worse than its start {start}")
    if kind is BalanceKind.reference:
        metric = worse_metric(after, guard=found.start.work)
        assert metric is None, f"the reference search made {metric} worse"


def plan_batch(step: StepInput) -> Schedule:
    """Search a plan of one optimizer batch: the plan, its work and that of the order of arrival, the bounds
    and the time split (`start`, `search`, `verify`).

    J of the plan is never above that of the best start; expert, token and pair work exceed it by 0.3 % at
    most, the pack count never. Under `reference` no metric is worse. Raises Refusal for samples or a cap that
    no plan can satisfy.
    """
    compile_kernels(step.balance, layout=None, topology=step.topology)
    began = time.perf_counter()
    problem = _problem(step)
    found = _search(problem, kind=step.balance.kind)
    searched = time.perf_counter()
    found.plan.check(problem.lengths, problem.budget)
    after = measure(found.plan, lengths=problem.lengths, loads=problem.loads, topology=problem.topology)
    _verify(after, found=found, problem=problem, kind=step.balance.kind)
    return Schedule(
        plan=replace(found.plan, lending=step.lending),
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
