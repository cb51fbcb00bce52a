"""The annealing kernels keep exact books: after thousands of moves every sum equals a count from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import Case, random_case

from olmo_rl.config import BalanceLevel
from olmo_rl.planning import anneal as annealing
from olmo_rl.planning import moves
from olmo_rl.planning.anneal import anneal, deviates, temperatures
from olmo_rl.planning.cells import anneal_cells
from olmo_rl.planning.moves import State
from olmo_rl.planning.objective import destination_loads, measure
from olmo_rl.planning.order import anneal_order
from olmo_rl.planning.packing import plan_step
from olmo_rl.planning.repack import Order
from olmo_rl.planning.starts import cells_plan, order_plan
from olmo_rl.planning.weights import fixed_point
from olmo_rl.types import PackPlan, SearchLog

LOG = SearchLog(seed=0, proposals=0, accepted=0, stop_reason="none", rejected={})

CASES = [
    dict(world=4, ep=2, per_rank=6, layers=5),
    dict(world=6, ep=2, per_rank=4, layers=17),  # three replicas
    dict(world=8, ep=2, per_rank=5, layers=3),  # four
    dict(world=6, ep=3, per_rank=7, layers=16),
    dict(world=4, ep=4, per_rank=5, layers=2),  # one
    dict(world=3, ep=1, per_rank=8, layers=0),  # lengths alone
]


def chain(
    case: Case, level: BalanceLevel, *, cap: int | None, hot: float, steps: int
) -> tuple[State, Order | None]:
    """A state after `steps` proposals at a fixed temperature."""
    start = plan_step(case.lengths, budget=case.budget, topology=case.topology)
    work = measure(start, lengths=case.lengths, loads=case.loads, topology=case.topology)
    weights = fixed_point(work, topology=case.topology)
    state = annealing._state(
        start,
        lengths=case.lengths,
        loads=case.loads,
        topology=case.topology,
        columns=work.packs_per_rank,
        seed=7,
    )
    annealing._book(state, weights=weights, work=work, guard=work, budget=case.budget, cap=cap)
    temperature = int(hot * state.book[moves.OBJECTIVE] / len(case.lengths))
    if level is BalanceLevel.cells:
        anneal_cells(steps, temperature, 5, deviates(), *state)
        return state, None
    order = annealing._order(start, state)
    anneal_order(steps, temperature, 5, deviates(), *state, *order)
    return state, order


def plan_of(case: Case, state: State, order: Order | None) -> PackPlan:
    if order is not None:
        return order_plan(order.slots, lengths=case.lengths, budget=case.budget)
    n, columns = len(case.lengths), len(state.columns)
    cells = state.sample[:n, moves.RANK] * columns + state.sample[:n, moves.COLUMN]
    return cells_plan(cells, topology=case.topology, columns=columns)


@pytest.mark.parametrize("cap", [None, 40])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("level", list(BalanceLevel))
def test_every_sum_equals_a_count_from_scratch(
    level: BalanceLevel, case: dict[str, int], cap: int | None
) -> None:
    batch = random_case(3, **case)
    cap = None if batch.loads is None else cap
    state, order = chain(batch, level, cap=cap, hot=0.5, steps=4000)
    book = state.book
    assert book[moves.ACCEPTED] > 200
    assert book[moves.WORSE] > 200
    plan = plan_of(batch, state, order)
    replace(plan, search=LOG).check(batch.lengths, batch.budget)
    packs = int(book[moves.COLUMNS])
    assert plan.packs_per_rank == packs
    work = measure(plan, lengths=batch.lengths, loads=batch.loads, topology=batch.topology)
    totals = (work.expert_work or 0, work.token_work, work.pair_work)
    assert tuple(book[:3]) == totals
    assert tuple(state.columns[:packs].sum(axis=0)) == totals
    excess = 0
    if batch.loads is not None:
        load = destination_loads(plan, loads=batch.loads, topology=batch.topology)
        layers = batch.loads.shape[2]
        assert np.array_equal(state.load[:packs, ..., :layers], load)
        assert np.array_equal(state.peak[:packs, ..., :layers], load.max(axis=2))
        assert not state.load[..., layers:].any()
        if cap is not None:
            excess = int(np.maximum(load.max(axis=(2, 3)) - cap, 0).sum())
            assert excess > 0
    assert book[moves.EXCESS] == excess
    weights = book[moves.W_EXPERT : moves.G_EXPERT]
    assert book[moves.OBJECTIVE] == int((weights * np.array([*totals, excess])).sum())
    for w in range(batch.topology.world_size):
        for c in range(packs):
            pack = list(plan.packs[w][c])
            expected = (len(pack), batch.lengths[pack].sum(), (batch.lengths[pack] ** 2).sum())
            assert tuple(state.cell[:, c, w]) == expected
            assert (state.sample[pack, moves.RANK] == w).all()
            assert (state.sample[pack, moves.COLUMN] == c).all()


@pytest.mark.parametrize("room", [1.0, 1.3, 2.5])
def test_all_three_ways_to_score_an_order_are_taken_and_agree_with_the_packer(room: float) -> None:
    batch = random_case(11, world=4, ep=2, per_rank=8, layers=4, room=room)
    state, order = chain(batch, BalanceLevel.order, cap=None, hot=3.0, steps=6000)
    assert order is not None
    kept, repacked, equalised = state.book[moves.KEPT : moves.BOOK_SLOTS]
    assert min(kept, repacked, equalised) > 10
    plan = order_plan(order.slots, lengths=batch.lengths, budget=batch.budget)
    work = measure(plan, lengths=batch.lengths, loads=batch.loads, topology=batch.topology)
    assert (work.expert_work, work.token_work, work.pair_work) == tuple(state.book[:3])
    edges = [np.cumsum([0] + [len(pack) for pack in rank]).tolist() for rank in plan.packs]
    assert order.edges[:, : plan.packs_per_rank + 1].tolist() == edges


def test_the_best_state_within_the_guard_is_the_one_that_is_returned() -> None:
    batch = random_case(5, world=4, ep=2, per_rank=6, layers=4)
    start = plan_step(batch.lengths, budget=batch.budget, topology=batch.topology)
    work = measure(start, lengths=batch.lengths, loads=batch.loads, topology=batch.topology)
    weights = fixed_point(work, topology=batch.topology)
    for level in BalanceLevel:
        plan, log, _ = anneal(
            start,
            work=work,
            guard=work,
            lengths=batch.lengths,
            loads=batch.loads,
            topology=batch.topology,
            budget=batch.budget,
            level=level,
            weights=weights,
            goal=0,
            seed=1,
            proposals=5000,
            cap=None,
            seconds=None,
        )
        assert plan is not None
        assert (log.proposals, log.stop_reason) == (5000, "proposals")
        after = measure(plan, lengths=batch.lengths, loads=batch.loads, topology=batch.topology)
        assert weights.objective(after) < weights.objective(work)
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
    assert [int(moves.draw(state)) for _ in expected] == expected
