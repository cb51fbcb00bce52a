"""Order-preserving packs: hand numbers, then properties over random lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_rl.planning.packing import cut_into_steps, equalise, pack_consecutively, plan_step, unpacked_plan
from olmo_rl.types import PackPlan, Refusal, Sample, SearchLog, Topology

ONE = Topology(world_size=1)
TWO = Topology(world_size=2)
MIXED = [17, 87, 19, 13, 23, 89, 29, 11]


def test_one_rank_packs_consecutive_samples_up_to_the_budget() -> None:
    assert plan_step(MIXED, budget=128, topology=ONE).packs == (((0, 1, 2), (3, 4, 5), (6, 7)),)


def test_two_ranks_partition_by_stride_before_they_pack() -> None:
    assert plan_step(MIXED, budget=128, topology=TWO).packs == (((0, 2), (4, 6)), ((1, 3), (5, 7)))


def test_a_rank_with_fewer_packs_splits_until_all_ranks_have_as_many() -> None:
    # Rank 1 needs three packs of 9; rank 0 packs [0, 2, 4] at once, splits it at floor(3 / 2), then [2, 4].
    plan = plan_step([4, 9, 4, 9, 4, 9], budget=12, topology=TWO)
    assert plan.packs == (((0,), (2,), (4,)), ((1,), (3,), (5,)))


def test_the_split_of_three_samples_is_one_and_two() -> None:
    plan = plan_step([4, 7, 4, 6, 4, 5], budget=12, topology=TWO)
    assert plan.packs == (((0,), (2, 4)), ((1,), (3, 5)))


def test_the_pack_with_most_samples_is_split_and_the_first_on_ties() -> None:
    ranks = equalise([[(0, 2), (4, 6)], [(1,), (3, 5), (7,)]])
    assert ranks == [[(0,), (2,), (4, 6)], [(1,), (3, 5), (7,)]]
    ranks = equalise([[(0,), (2, 4, 6)], [(1,), (3,), (5,), (7,)]])
    assert ranks == [[(0,), (2,), (4,), (6,)], [(1,), (3,), (5,), (7,)]]


def test_greedy_packing_closes_a_pack_only_when_the_next_sample_does_not_fit() -> None:
    packs = pack_consecutively(range(5), lengths=[5, 3, 4, 4, 2], budget=8)
    assert packs == [(0, 1), (2, 3), (4,)]


def test_eight_sevens_under_a_budget_of_eight_are_eight_packs() -> None:
    assert plan_step([7] * 8, budget=8, topology=ONE).packs_per_rank == 8


def test_a_sample_of_exactly_the_budget_fits_alone() -> None:
    assert plan_step([8, 1, 8], budget=8, topology=ONE).packs == (((0,), (1,), (2,)),)


def test_a_sample_longer_than_the_budget_is_refused_by_id_length_and_file() -> None:
    with pytest.raises(
        Refusal, match=r"a\.jsonl: sample 'math:9' has 9 tokens, more than the budget of 8 \(1 "
    ):
        plan_step([8, 9], budget=8, topology=ONE, ids=["x", "math:9"], source="a.jsonl")
    with pytest.raises(Refusal, match=r"position 1 has 9 tokens.*packing\.max_tokens to at least 9"):
        plan_step([8, 9], budget=8, topology=ONE)


def test_a_sample_without_tokens_is_refused_and_never_packed() -> None:
    with pytest.raises(Refusal, match=r"sample 'b' has no tokens"):
        plan_step([3, 0], budget=8, topology=ONE, ids=["a", "b"])
    with pytest.raises(Refusal, match=r"sample 'b' has no tokens"):
        unpacked_plan([3, 0], topology=ONE, ids=["a", "b"])


def test_unequal_sample_counts_are_the_same_refusal_wherever_they_are_computed() -> None:
    # One sample on rank 0, three on rank 1: no split can give rank 0 three packs.
    with pytest.raises(Refusal, match=r"the ranks would get 1, 3 samples.*multiple of the world size 2"):
        equalise([[(0,)], [(1,), (2,), (3,)]])
    messages = set()
    for _rank in range(2):
        with pytest.raises(Refusal) as caught:
            plan_step([8, 8, 8], budget=8, topology=TWO)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert "2, 1 samples" in messages.pop()


def test_no_sample_at_all_is_refused() -> None:
    with pytest.raises(Refusal, match="at least one"):
        plan_step([], budget=8, topology=TWO)


def test_packing_off_gives_every_sample_its_own_forward_on_the_same_rank_as_packing_on() -> None:
    off, on = unpacked_plan(MIXED, topology=TWO), plan_step(MIXED, budget=128, topology=TWO)
    assert off.packs == (((0,), (2,), (4,), (6,)), ((1,), (3,), (5,), (7,)))
    for rank in range(2):
        assert [i for pack in off.packs[rank] for i in pack] == [i for pack in on.packs[rank] for i in pack]


def test_a_collection_is_cut_into_complete_steps_and_an_untouched_tail() -> None:
    assert cut_into_steps(11, samples_per_step=4, world_size=2) == ([range(0, 4), range(4, 8)], range(8, 11))
    assert cut_into_steps(8, samples_per_step=4, world_size=4) == ([range(0, 4), range(4, 8)], range(8, 8))
    assert cut_into_steps(3, samples_per_step=4, world_size=2) == ([], range(0, 3))
    assert cut_into_steps(6, samples_per_step=None, world_size=2) == ([range(0, 6)], range(6, 6))
    assert cut_into_steps(0, samples_per_step=None, world_size=2) == ([], range(0, 0))


@pytest.mark.parametrize(
    ("n", "per_step", "message"),
    [
        (7, None, r"f: 7 samples do not divide over 2 ranks: set batch\.samples_per_step"),
        (8, 3, r"batch\.samples_per_step=3 is not a positive multiple of the world size 2"),
        (8, 0, r"batch\.samples_per_step=0 is not a positive multiple"),
    ],
)
def test_a_step_that_does_not_divide_over_the_ranks_is_refused(
    n: int, per_step: int | None, message: str
) -> None:
    with pytest.raises(Refusal, match=message):
        cut_into_steps(n, samples_per_step=per_step, world_size=2, source="f")


def test_check_catches_every_way_a_plan_can_be_wrong() -> None:
    lengths = [3, 3, 3, 3]
    log = SearchLog(seed=0, proposals=0, accepted=0, stop_reason="none", rejected={})
    PackPlan(packs=(((0, 2),), ((1, 3),))).check(lengths, 6)
    PackPlan(packs=(((3, 1),), ((0, 2),)), search=log).check(lengths, 6)
    for packs, message in [
        ((((0, 2),), ((1,),)), "exactly once"),
        ((((0, 2),), ((1, 1),)), "exactly once"),
        ((((0,), (2,)), ((1, 3),)), "same number of packs"),
        ((((0, 2), ()), ((1,), (3,))), "empty pack"),
        ((((3, 1),), ((0, 2),)), "order of arrival"),
    ]:
        with pytest.raises(AssertionError, match=message):
            PackPlan(packs=packs).check(lengths, 6)
    with pytest.raises(AssertionError, match="budget 5"):
        PackPlan(packs=(((0, 2),), ((1, 3),))).check(lengths, 5)


def test_packing_keeps_every_array_of_a_sample_together() -> None:
    """Advantage = index, route = index mod experts: after planning they still belong to the same id."""
    lengths = [3 + i % 5 for i in range(12)]
    samples = [
        Sample(
            id=f"s{i}",
            group=f"g{i // 3}",
            tokens=np.arange(n, dtype=np.int32) + 100 * i,
            response_mask=np.arange(n) > 0,
            behavior_logprobs=np.full(n, -0.01 * i, dtype=np.float32),
            reward=float(i),
            advantage=float(i),
            policy_version=i,
            routes=np.full((n - 1, 2, 1), i % 4, dtype=np.int16),
        )
        for i, n in enumerate(lengths)
    ]
    blocks, tail = cut_into_steps(len(samples), samples_per_step=5 * 2, world_size=2)
    assert list(tail) == [10, 11]
    for block in blocks:
        step = [samples[i] for i in block]
        plan = plan_step([len(s) for s in step], budget=16, topology=TWO)
        assert sorted(plan.positions) == list(range(len(block)))
        for position in plan.positions:
            sample, i = step[position], int(step[position].id[1:])
            assert (sample.reward, sample.advantage, sample.policy_version, sample.group) == (
                i,
                i,
                i,
                f"g{i // 3}",
            )
            assert sample.tokens[0] == 100 * i
            assert sample.routes is not None
            assert (sample.routes == i % 4).all()


batches = st.integers(1, 6).flatmap(
    lambda world: st.tuples(
        st.just(world),
        st.integers(1, 8).flatmap(
            lambda n: st.lists(st.integers(1, 40), min_size=n * world, max_size=n * world)
        ),
        st.integers(0, 60),
    )
)


@settings(max_examples=300, deadline=None)
@given(batches)
def test_every_sample_is_packed_once_within_budget_in_order_and_counts_are_equal(
    batch: tuple[int, list[int], int],
) -> None:
    world, lengths, slack = batch
    budget, topology = max(lengths) + slack, Topology(world_size=world)
    plan = plan_step(lengths, budget=budget, topology=topology)
    assert sorted(plan.positions) == list(range(len(lengths)))
    alone = []
    for rank, packs in enumerate(plan.packs):
        assert len(packs) == plan.packs_per_rank
        assert all(pack and sum(lengths[i] for i in pack) <= budget for pack in packs)
        assert [i for pack in packs for i in pack] == list(range(rank, len(lengths), world))
        alone.append(
            len(pack_consecutively(range(rank, len(lengths), world), lengths=lengths, budget=budget))
        )
    assert plan.packs_per_rank == max(alone)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 60))
def test_one_more_token_of_budget_never_needs_more_packs(lengths: list[int], slack: int) -> None:
    budget = max(lengths) + slack
    few = pack_consecutively(range(len(lengths)), lengths=lengths, budget=budget + 1)
    many = pack_consecutively(range(len(lengths)), lengths=lengths, budget=budget)
    assert len(few) <= len(many)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(9, 14))
def test_no_other_cut_of_the_same_order_has_fewer_packs(lengths: list[int], budget: int) -> None:
    # Oracle: fewest packs of every prefix, by dynamic programming over all cuts.
    fewest = [0]
    for stop in range(1, len(lengths) + 1):
        fewest.append(min(fewest[start] + 1 for start in range(stop) if sum(lengths[start:stop]) <= budget))
    assert len(pack_consecutively(range(len(lengths)), lengths=lengths, budget=budget)) == fewest[-1]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 6))
def test_steps_and_tail_hold_every_position_once_and_only_complete_steps_count(
    world: int, n: int, per_rank: int
) -> None:
    blocks, tail = cut_into_steps(n, samples_per_step=world * per_rank, world_size=world)
    assert [i for block in blocks for i in block] + list(tail) == list(range(n))
    assert all(len(block) == world * per_rank for block in blocks)
    assert len(tail) < world * per_rank
