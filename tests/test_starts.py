"""Ranks and packs by length alone: by hand, then what must hold for any lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import random_case

from olmo_rl.planning.searches.starts import (
    arrival_ranks,
    best_start,
    by_length,
    cells_plan,
    fill_columns,
    karmarkar_karp_ranks,
    least,
    length_rows,
    no_worse,
    starts,
)
from olmo_rl.types import Topology


def test_length_rows_give_the_longest_of_a_row_to_the_lightest_rank() -> None:
    lengths = np.array([1, 9, 5, 6, 8, 2])
    # Rows by length: 9 8, 6 5, 2 1. Rank 0 takes 9, rank 1 takes 8; rank 1 is lighter and takes 6; both
    # weigh 14.
    assert lengths[length_rows(lengths, world_size=2)].tolist() == [[9, 5, 2], [8, 6, 1]]


def test_karmarkar_karp_joins_the_most_uneven_rows_heavy_to_light() -> None:
    lengths = np.array([10, 1, 7, 6, 5, 5])
    # Rows 10 7 (apart 3), 6 5 (1), 5 1 (4). 4 and 3 join: 10+1, 7+5 = 11, 12 (1); then with 6 5: 11+6, 12+5.
    ranks = karmarkar_karp_ranks(lengths, world_size=2)
    assert sorted(lengths[ranks].tolist()) == [[7, 5, 5], [10, 6, 1]]


@given(
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(0, 10**6),
)
def test_ranks_by_length_hold_every_sample_once_and_are_descending(
    world: int, per_rank: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 50, world * per_rank)
    rows = length_rows(lengths, world_size=world)
    balanced = karmarkar_karp_ranks(lengths, world_size=world)
    for ranks in (rows, balanced, arrival_ranks(len(lengths), world_size=world)):
        assert ranks.shape == (world, per_rank)
        assert sorted(ranks.ravel().tolist()) == list(range(world * per_rank))
    for ranks in (rows, balanced):
        assert (np.diff(lengths[ranks], axis=1) <= 0).all()
        # Every column comes from one row of the sorted batch: totals differ by at most one longest sample.
        assert np.ptp(lengths[ranks].sum(axis=1)) <= lengths.max()


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 10**6), st.integers(1, 12))
def test_filled_columns_keep_the_budget_and_leave_no_column_empty(
    world: int, per_rank: int, seed: int, columns: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 50, world * per_rank)
    ranks = length_rows(lengths, world_size=world)
    cells = fill_columns(ranks, lengths=lengths, budget=60, columns=min(columns, per_rank))
    if cells is None:
        # First fit fills every column but one beyond half the budget, so that twice the tokens always fit.
        assert 2 * lengths[ranks].sum(axis=1).max() > 60 * (min(columns, per_rank) - 1)
        return
    plan = cells_plan(cells, topology=Topology(world), columns=min(columns, per_rank))
    assert all(0 < sum(lengths[i] for i in pack) <= 60 for rank in plan.packs for pack in rank)


def test_first_fit_reopens_earlier_columns_and_refuses_what_does_not_fit() -> None:
    lengths = np.array([6, 5, 4, 3, 2])
    ranks = np.arange(5)[None]
    # 6+4, 5+3+2 within budget 10; one column cannot hold 20 tokens.
    assert fill_columns(ranks, lengths=lengths, budget=10, columns=2).tolist() == [0, 1, 0, 1, 1]  # type: ignore[union-attr]
    assert fill_columns(ranks, lengths=lengths, budget=10, columns=1) is None
    # Five columns for five samples: each opens one.
    cells = fill_columns(ranks, lengths=lengths, budget=20, columns=5)
    assert cells is not None
    assert sorted(cells.tolist()) == [0, 1, 2, 3, 4]


def test_ties_in_length_keep_the_order_of_arrival() -> None:
    assert by_length(np.array([3, 5, 3, 5, 3])).tolist() == [1, 3, 0, 2, 4]


def test_the_best_start_has_least_j_and_no_more_packs_than_the_order_of_arrival() -> None:
    for seed in range(30):
        case = random_case(seed, world=4, ep=2, per_rank=6, room=1.2)
        problem = case.problem()
        candidates = starts(problem)
        arrival = candidates[0]
        assert arrival.name == "arrival"
        weights = problem.weights
        best = best_start(candidates, weights=weights, cap=None)
        assert best.work.packs_per_rank <= arrival.work.packs_per_rank
        rivals = [s for s in candidates if s.work.packs_per_rank <= arrival.work.packs_per_rank]
        assert weights.objective(best.work) == min(weights.objective(s.work) for s in rivals)
        both = least(best.work, arrival.work)
        assert both.token_work == min(best.work.token_work, arrival.work.token_work)
        assert no_worse(best.work, than=best.work)
        assert no_worse(best.work, than=arrival.work) == (both == best.work)
        # A cap that only one start keeps makes it the best.
        lightest = min(rivals, key=lambda s: s.work.max_destination_load or 0)
        kept = best_start(candidates, weights=weights, cap=lightest.work.max_destination_load)
        assert kept.work.max_destination_load == lightest.work.max_destination_load
