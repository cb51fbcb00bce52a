"""Shared beginnings and cuts of the sorted order, against direct comparison and all cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import samples_of

from olmo_rl.planning.sharing import Sharing, find_sharing, grow
from olmo_rl.planning.trees import plan_trees
from olmo_rl.types import Refusal, Sample, Topology


def bare(number: int, tokens: list[int]) -> Sample:
    (sample,) = samples_of(((1, len(tokens) - 1),), seed=number, prefix=f"p{number}-")
    return replace(sample, tokens=np.array(tokens, dtype=np.int32), routes=None)


SAMPLES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=8)


def shared_by_hand(a: Sample, b: Sample) -> int:
    pairs = zip(a.tokens.tolist(), b.tokens.tolist(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_rows_are_the_distinct_beginnings_and_paths_spell_the_samples(drawn: list[list[int]]) -> None:
    samples = [bare(i, tokens) for i, tokens in enumerate(drawn)]
    sharing = find_sharing(samples, replayed=False)
    beginnings = {tuple(tokens[: t + 1]) for tokens in drawn for t in range(len(tokens))}
    assert sharing.rows(0, len(samples)) == len(beginnings)
    for place in range(1, len(samples)):
        before, after = (samples[sharing.order[i]] for i in (place - 1, place))
        assert sharing.shared[place] == shared_by_hand(before, after)
    forest, paths = grow(sharing)
    assert forest.boundaries[-1] == len(beginnings)
    token_of = np.full(len(beginnings), -1)
    for sample, rows in zip(samples, paths, strict=True):
        assert len(rows) == len(sample)
        assert set(token_of[rows] - sample.tokens) <= {0, *(-1 - sample.tokens)}
        token_of[rows] = sample.tokens


def least(sharing: Sharing, *, runs: int, budget: int) -> tuple[int, dict[int, int]]:
    """Over all cuts into `runs` runs: the least largest run, and for every cap the fewest rows in all."""
    count, best, fewest = len(sharing.order), 10**9, {}
    for inner in itertools.combinations(range(1, count), runs - 1):
        edges = (0, *inner, count)
        rows = [sharing.rows(a, b) for a, b in itertools.pairwise(edges)]
        best = min(best, max(rows))
        for cap in range(max(rows), budget + 1):
            fewest[cap] = min(fewest.get(cap, 10**9), sum(rows))
    return best, fewest


@settings(max_examples=60, deadline=None)
@given(SAMPLES, st.integers(6, 20), st.integers(1, 2))
def test_cuts_are_the_best_of_all_cuts(drawn: list[list[int]], budget: int, world: int) -> None:
    samples = [bare(i, tokens) for i, tokens in enumerate(drawn[: len(drawn) // world * world])]
    sharing = find_sharing(samples, replayed=False)
    plan = plan_trees(sharing, budget=budget, topology=Topology(world))
    assert plan.rows is not None
    count = world * plan.packs_per_rank
    best, fewest = least(sharing, runs=count, budget=budget)
    cap = min(budget, int(best * 1.03))
    assert max(map(max, plan.rows)) <= cap
    assert sum(map(sum, plan.rows)) == fewest[cap]
    if plan.packs_per_rank > 1:
        fewer, _ = least(sharing, runs=count - world, budget=budget)
        assert fewer > budget
    for packs, rows in zip(plan.packs, plan.rows, strict=True):
        assert list(rows) == sorted(rows, reverse=True)
        for pack, needed in zip(packs, rows, strict=True):
            part = find_sharing([samples[i] for i in pack], replayed=False)
            assert part.rows(0, len(pack)) == needed


def test_a_sample_longer_than_the_budget_is_refused_by_name() -> None:
    samples = [bare(0, [1, 2]), bare(1, [1, 2, 3, 4])]
    with pytest.raises(Refusal, match="'p1-0' has 4 tokens, more than the budget of 3"):
        plan_trees(
            find_sharing(samples, replayed=False),
            budget=3,
            topology=Topology(1),
            ids=[sample.id for sample in samples],
        )
