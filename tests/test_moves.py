"""The annealing kernels keep exact sums: after thousands of swaps each equals a count from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import Case, random_case

from olmo_rl.planning.objective import destination_loads, measure
from olmo_rl.planning.searches.annealing import anneal, deviates, new_chain, rules_of, temperatures
from olmo_rl.planning.searches.annealing_kernels import (
    ACCEPTED,
    COLUMN,
    EXCESS,
    OBJECTIVE,
    RANK,
    WORSE,
    Chain,
    anneal_cells,
    next_bits,
)
from olmo_rl.planning.searches.starts import cells_plan
from olmo_rl.types import SearchLog

LOG = SearchLog(seed=0, proposals=0, accepted=0, stop_reason="none", rejected={})

CASES = [
    dict(world=4, ep=2, per_rank=6, layers=5),
    dict(world=6, ep=2, per_rank=4, layers=17),  # three replicas
    dict(world=8, ep=2, per_rank=5, layers=3),  # four
    dict(world=6, ep=3, per_rank=7, layers=16),
    dict(world=4, ep=4, per_rank=5, layers=2),  # one
    dict(world=3, ep=1, per_rank=8, layers=0),  # lengths alone
]


def chain_of(case: Case, *, cap: int | None, hot: float, steps: int) -> Chain:
    """A chain after `steps` proposals at a fixed temperature."""
    problem = case.problem(cap=cap)
    arrival = problem.arrival
    chain = new_chain(arrival.plan, problem=problem, best=problem.weights.objective(arrival.work))
    temperature = int(hot * chain.value[OBJECTIVE] / len(case.lengths))
    rules = rules_of(problem, guard=arrival.work, pressure=0)
    anneal_cells(steps, temperature, rules._replace(window=5), chain)
    return chain


@pytest.mark.parametrize("cap", [None, 40])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_sum_equals_a_count_from_scratch(case: dict[str, int], cap: int | None) -> None:
    batch = random_case(3, **case)
    cap = None if batch.loads is None else cap
    chain = chain_of(batch, cap=cap, hot=0.5, steps=4000)
    assert chain.outcomes[ACCEPTED] > 200
    assert chain.outcomes[WORSE] > 200
    n, columns = len(batch.lengths), len(chain.works)
    cells = chain.sample[:n, RANK] * columns + chain.sample[:n, COLUMN]
    plan = replace(cells_plan(cells, topology=batch.topology, columns=columns), search=LOG)
    plan.check(batch.lengths, batch.budget)
    work = measure(plan, lengths=batch.lengths, loads=batch.loads, topology=batch.topology)
    totals = (work.expert_work or 0, work.token_work, work.pair_work)
    assert tuple(chain.total[:3]) == totals
    assert tuple(chain.works.sum(axis=0)) == totals
    excess = 0
    if batch.loads is not None:
        load = destination_loads(plan, loads=batch.loads, topology=batch.topology)
        layers = batch.loads.shape[2]
        assert np.array_equal(chain.load[..., :layers], load)
        assert np.array_equal(chain.peak[..., :layers], load.max(axis=2))
        assert not chain.load[..., layers:].any()
        if cap is not None:
            excess = int(np.maximum(load.max(axis=(2, 3)) - cap, 0).sum())
            assert excess > 0
    assert chain.total[EXCESS] == excess
    weights = np.array(batch.problem().weights.terms)
    assert chain.value[OBJECTIVE] == int((weights * np.array([*totals, excess])).sum())
    for w in range(batch.topology.world_size):
        for c in range(columns):
            pack = list(plan.packs[w][c])
            expected = (len(pack), batch.lengths[pack].sum(), (batch.lengths[pack] ** 2).sum())
            assert tuple(chain.cell[:, c, w]) == expected


def test_the_best_plan_within_the_guard_is_the_one_that_is_returned() -> None:
    batch = random_case(5, world=4, ep=2, per_rank=6, layers=4)
    problem = batch.problem()
    work, weights = problem.arrival.work, problem.weights
    plan, log = anneal(
        problem.arrival,
        problem=problem,
        guard=work,
        best=weights.objective(work),
        goal=0,
        limit=5000,
        seconds=float("inf"),
    )
    assert plan is not None
    assert (log.proposals, log.stop_reason) == (5000, "proposals")
    after = measure(plan, lengths=batch.lengths, loads=batch.loads, topology=batch.topology)
    assert weights.objective(after) < weights.objective(work)
    assert after.expert_work is not None
    assert work.expert_work is not None
    assert after.expert_work <= work.expert_work
    assert after.token_work <= work.token_work
    assert after.pair_work <= work.pair_work


def test_cooling_is_geometric_and_ends_at_a_fiftieth() -> None:
    values = temperatures(10**15, samples=100)
    assert values[0] == 2 * 10**12
    assert values[-1] == pytest.approx(values[0] * 0.02, rel=1e-6)
    ratios = values[1:] / values[:-1]
    assert np.ptp(ratios) < 1e-4
    assert deviates().mean() == pytest.approx(65536, rel=1e-3)  # a unit exponential


def test_draws_are_those_of_splitmix64() -> None:
    # The first outputs for seed 1234567, as its reference implementation gives them.
    state = np.array([1234567], dtype=np.uint64)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(next_bits(state)) for _ in expected] == expected
