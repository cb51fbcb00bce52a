"""The reference search: scores against a count from scratch, guards, counters and why it stops."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from planner_cases import Case, random_case

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.objective import Work, measure
from olmo_rl.planning.searches import reference_search
from olmo_rl.planning.searches.reference_search import (
    EQUALISED,
    KEPT,
    METRICS,
    REPACKED,
    batch_of,
    greedy_ranks,
    pack_order,
    proposals,
    surrogate,
    swapped,
    work_of,
    worse_metric,
)
from olmo_rl.planning.searches.starts import arrival_ranks
from olmo_rl.types import PackPlan, Topology


def test_all_three_scoring_paths_equal_a_count_from_scratch() -> None:
    rng = np.random.default_rng(0)
    taken = dict.fromkeys((KEPT, REPACKED, EQUALISED), 0)
    for room in (1.0, 1.3, 2.5):
        case = random_case(3, world=4, ep=2, per_rank=6, layers=3, room=room)
        batch = batch_of(case.problem())
        packed = pack_order(arrival_ranks(24, world_size=4).tolist(), batch=batch)
        for _ in range(150):
            i, j = ((int(rng.integers(4)), int(rng.integers(6))) for _ in range(2))
            packed, path = swapped(packed, i=i, j=j, batch=batch)
            taken[path] += 1
            fresh = pack_order(packed.ranks, batch=batch)
            assert packed.packs == fresh.packs
            for name in ("load", "tokens", "pairs"):
                assert np.array_equal(getattr(packed, name), getattr(fresh, name))
            plan = PackPlan(packs=tuple(tuple(rank) for rank in packed.packs))
            work = measure(plan, lengths=case.lengths, loads=case.loads, topology=case.topology)
            mine = work_of(packed, experts=True)
            assert worse_metric(mine, guard=work) is None
            assert worse_metric(work, guard=mine) is None
    assert min(taken.values()) > 20


def test_greedy_placement_takes_the_rank_where_a_sample_adds_least() -> None:
    # Two replicas of two ranks, top-1: samples 0 and 1 load destination 0, samples 2 and 3 destination 1.
    h = np.zeros((4, 2, 1), dtype=np.int64)
    h[:2, 0] = h[2:, 1] = 8
    n = np.full(4, 8)
    case = Case(lengths=n, loads=h.astype(np.int32), topology=Topology(4, 2), budget=8)
    ranks = greedy_ranks(
        np.arange(4), n=n, h=h, topology=case.topology, weights=batch_of(case.problem()).weights
    )
    # Sample 0 opens replica 0, sample 1 would double its busiest destination and opens replica 1, sample 2
    # fills up.
    assert sorted(ranks[:2].ravel().tolist()) in ([0, 2], [0, 3])


def test_three_quarters_of_the_proposals_start_from_a_heavy_contributor_of_an_overloaded_destination() -> (
    None
):
    case = random_case(5, world=4, ep=2, per_rank=10, layers=3)
    batch = batch_of(case.problem())
    packed = pack_order(arrival_ranks(40, world_size=4).tolist(), batch=batch)
    pairs = list(itertools.islice(proposals(packed, batch=batch, rng=np.random.default_rng(1)), 4000))
    cell = {i: (c, w // 2) for w in range(4) for c, pack in enumerate(packed.packs[w]) for i in pack}
    across = np.mean([cell[i] != cell[j] for i, j in pairs])
    uniform = np.mean([cell[i] != cell[j] for i in range(40) for j in range(40)])
    assert abs(across - (0.75 + 0.25 * uniform)) < 0.02
    firsts = np.bincount([i for i, _ in pairs], minlength=40) / 4000
    # A quarter of every (block, destination) is heavy: random proposals alone give each sample 1 / 160.
    assert firsts.max() > 0.05
    assert firsts.min() > 0.25 / 40 * 0.5
    total = batch.h.sum(axis=(1, 2))
    assert total[firsts > 0.03].mean() > 1.5 * total.mean()
    place = np.argsort(np.argsort(-case.lengths, kind="stable"))
    near = np.mean([abs(place[i] - place[j]) <= 8 for i, j in pairs])
    assert near > 0.375


def test_the_surrogate_bounds_j_and_sees_what_maxima_hide() -> None:
    case = random_case(7, world=4, ep=2, per_rank=4, layers=2)
    batch = batch_of(case.problem())
    packed = pack_order(arrival_ranks(16, world_size=4).tolist(), batch=batch)
    j = batch.weights.objective(work_of(packed, experts=True))
    assert j <= surrogate(packed, batch=batch) < 1.2 * j
    # The second busiest rank of a column loses tokens: no maximum changes, the surrogate falls.
    lighter = dataclasses.replace(packed, tokens=packed.tokens.copy())
    second = np.argsort(packed.tokens[0])[-2]
    lighter.tokens[0, second] -= 1
    assert lighter.tokens.max(axis=1).tolist() == packed.tokens.max(axis=1).tolist()
    assert surrogate(lighter, batch=batch) < surrogate(packed, batch=batch)


def test_a_plan_is_no_worse_than_arrival_on_every_metric_and_every_proposal_is_accounted_for() -> None:
    improved = 0
    for seed in range(8):
        case = random_case(seed, world=4, ep=2, per_rank=8, layers=4, room=1.5)
        found = case.plan(BalanceConfig(kind=BalanceKind.reference, proposals=150, seconds=600))
        log = found.plan.search
        assert log is not None
        assert worse_metric(found.after, guard=found.before) is None
        assert set(log.rejected) == {"objective", *METRICS}
        assert log.accepted + sum(log.rejected.values()) == log.proposals == sum(found.paths.values())
        improved += found.after.expert_work < found.before.expert_work  # type: ignore[operator]
    assert improved >= 6


def test_the_search_stops_for_each_of_its_reasons() -> None:
    case = random_case(2, world=4, ep=2, per_rank=8, layers=4)

    def reason(case: Case, **settings: float) -> tuple[str, int]:
        found = case.plan(BalanceConfig(kind=BalanceKind.reference, **settings))  # type: ignore[arg-type]
        assert found.plan.search is not None
        return found.plan.search.stop_reason, found.plan.search.proposals

    assert reason(case, proposals=20, seconds=600) == ("proposals", 20)
    assert reason(case, proposals=0, seconds=600) == ("proposals", 0)
    stopped, done = reason(case, seconds=0)
    assert (stopped, done) == ("deadline", 0)
    stopped, done = reason(case, proposals=10**6, seconds=600)
    assert stopped == "no_progress"
    assert done >= reference_search.PATIENCE
    even = dataclasses.replace(
        case, lengths=np.full(32, 7), loads=np.full((32, 2, 4), 7, dtype=np.int32), budget=7
    )
    assert reason(even, seconds=600) == ("bounds", 0)


def test_the_guard_names_the_first_metric_that_is_worse() -> None:
    base = Work(
        expert_work=10,
        token_work=10,
        pair_work=10,
        skew_mean=1.5,
        skew_max=2.0,
        max_destination_load=5,
        packs_per_rank=2,
    )
    assert worse_metric(base, guard=base) is None
    for name in METRICS:
        higher = dataclasses.replace(base, **{name: getattr(base, name) + 1})
        assert worse_metric(higher, guard=base) == name
        assert worse_metric(base, guard=higher) is None
    assert worse_metric(dataclasses.replace(base, skew_mean=1.5 + 1e-15), guard=base) is None
