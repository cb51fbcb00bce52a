"""The chains of the annealing planner: cut by a deadline, with and without experts known, under a cap."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from planner_cases import Case, loads_of, random_case

from benchmarks.planner_arms import SETTINGS, Batch, draw_batch
from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.objective import gap, measure, objective
from olmo_rl.planning.searches import annealing
from olmo_rl.planning.searches.annealing import chain_proposals, search_annealed
from olmo_rl.planning.searches.starts import SearchProblem, best_start, starts, tolerated
from olmo_rl.types import PackPlan, Refusal, Topology


class CountingClock:
    """A clock that advances by one with every proposal."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> float:
        return float(self.now)

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CountingClock:
    clock, kernel = CountingClock(), annealing.anneal_cells

    def counted(proposals: int, *arguments: object) -> None:
        clock.now += proposals
        kernel(proposals, *arguments)

    monkeypatch.setattr(annealing, "time", clock)
    monkeypatch.setattr(annealing, "anneal_cells", counted)
    return clock


@functools.cache
def law_batch(seed: int) -> Batch:
    return draw_batch(SETTINGS[0], seed=seed)


def law_problem(seed: int, *, seconds: float = float("inf")) -> SearchProblem:
    batch = law_batch(seed)
    return SearchProblem.of(
        batch.lengths,
        loads=batch.loads,
        budget=batch.budget,
        topology=batch.topology,
        seed=seed,
        seconds=seconds,
    )


def gap_of(problem: SearchProblem, plan: PackPlan) -> float:
    work = problem.start("found", plan).work
    return gap(work, bounds=problem.bounds, base=problem.arrival.work)


def test_a_search_that_is_cut_is_cold_at_its_deadline(clock: CountingClock) -> None:
    both = 2 * chain_proposals(law_problem(0))
    for share, most in ((1.0, 0.015), (0.5, 0.02), (0.25, 0.025), (0.05, 0.05)):
        gaps = []
        for seed in (3, 4):
            problem = law_problem(seed, seconds=both * share if share < 1 else float("inf"))
            start = best_start(starts(problem), weights=problem.weights, cap=None)
            found = search_annealed(problem)
            log = found.plan.search
            assert log is not None
            assert log.proposals <= (1.5 if share == 1 else share) * both + 4 * annealing.STEPS
            assert log.stop_reason == ("deadline" if share < 1 else "proposals")
            gaps.append(gap_of(problem, found.plan))
            assert gaps[-1] < gap_of(problem, start.plan)
        assert np.mean(gaps) <= most, (share, gaps)


def test_a_deadline_that_is_never_near_changes_nothing() -> None:
    case = random_case(3, world=4, ep=2, per_rank=8)
    plans = [
        case.plan(BalanceConfig(kind=BalanceKind.anneal, proposals=3000, seconds=seconds)).plan
        for seconds in (600.0, 6000.0, float("inf"))
    ]
    assert plans[0] == plans[1] == plans[2]


def test_a_plan_may_exceed_its_start_by_three_thousandths_of_a_term_where_j_falls() -> None:
    work = law_problem(1).arrival.work
    assert work.expert_work is not None
    slack = tolerated(work)
    assert slack.token_work == work.token_work * 1003 // 1000
    assert slack.pair_work == work.pair_work * 1003 // 1000
    assert slack.expert_work == work.expert_work * 1003 // 1000
    assert slack.packs_per_rank == work.packs_per_rank


def test_knowing_the_experts_never_gives_a_worse_plan_than_lengths_alone() -> None:
    balance = BalanceConfig(kind=BalanceKind.anneal, proposals=20_000, seconds=600)
    for seed in range(40):
        world, ep = ((4, 2), (8, 2), (8, 4))[seed % 3]
        case = random_case(seed, world=world, ep=ep, per_rank=4 + seed % 5, layers=1 + seed % 4)
        found = case.plan(balance)
        blind = Case(lengths=case.lengths, loads=None, topology=case.topology, budget=case.budget)
        work = measure(
            blind.plan(balance).plan, lengths=case.lengths, loads=case.loads, topology=case.topology
        )
        assert objective(found.after, base=found.before) <= objective(work, base=found.before) + 1e-12


def loads_that_plans_reach(loads: np.ndarray) -> set[int]:
    """The largest destination load of every plan of eight samples on two replicas of two ranks."""
    samples = set(range(len(loads)))
    reached = set()
    for first in itertools.combinations(samples, 4):
        halves = (list(first), sorted(samples - set(first)))
        reached.add(max(int(loads[half].sum(axis=0).max()) for half in halves))  # one column
        for pairs in itertools.product(*(tuple(itertools.combinations(half, 2)) for half in halves)):
            cells = [*pairs, *(set(half) - set(pair) for half, pair in zip(halves, pairs, strict=True))]
            reached.add(max(int(loads[list(cell)].sum(axis=0).max()) for cell in cells))
    return reached


def small_cases() -> Iterator[Case]:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(5, 60, 8)
        loads = loads_of(rng, lengths, ep=2, layers=1 + seed % 2)
        yield Case(lengths=lengths, loads=loads, topology=Topology(4, 2), budget=120)


def test_every_cap_that_a_plan_keeps_is_kept_and_the_least_one_is_named() -> None:
    tried = 0
    for number, case in enumerate(small_cases()):
        assert case.loads is not None
        reached = sorted(loads_that_plans_reach(case.loads))
        for cap in reached:
            tried += 1
            balance = BalanceConfig(
                kind=BalanceKind.anneal, max_destination_load=cap, proposals=4000, seconds=600
            )
            top = case.plan(balance).after.max_destination_load
            assert top is not None
            assert top <= cap
        if number % 4:
            continue
        below = BalanceConfig(
            kind=BalanceKind.anneal, max_destination_load=reached[0] - 1, proposals=4000, seconds=600
        )
        with pytest.raises(Refusal, match=f"raise it to {reached[0]} or lower packing.max_tokens"):
            case.plan(below)
    assert tried >= 400


def test_weights_stay_fine_at_any_scale_and_no_plan_reaches_the_end_of_an_integer() -> None:
    rng = np.random.default_rng(0)
    for world, longest in ((4, 60), (512, 8_000), (4096, 1_000_000)):
        lengths = rng.integers(longest // 4, longest + 1, 2 * world)
        problem = SearchProblem.of(lengths, loads=None, budget=2 * longest, topology=Topology(world), seed=0)
        base, weights = problem.arrival.work, problem.weights
        for value, weight in ((base.token_work, weights.token), (base.pair_work, weights.pair)):
            assert weight >= 1000
            assert value * weight <= 2**62
        # Two packs a rank of two longest samples each are more work than any plan has.
        worst = weights.token * 4 * longest + weights.pair * 4 * longest**2
        assert (1 + max(annealing.STRICT)) * worst < 2**63
        cooling = annealing.temperatures(weights.objective(base), samples=len(lengths), heat=annealing.WARM)
        assert cooling.min() >= 2**20
