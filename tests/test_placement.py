"""The placement diagnostic: by hand, then against its own definition on counted routes."""

from __future__ import annotations

import numpy as np
import pytest
from test_loads import distinct_routes, make_sample

from olmo_rl.planning.loads import collection_loads
from olmo_rl.planning.objective import lower_bounds
from olmo_rl.planning.placement import expert_counts, longest_first
from olmo_rl.types import ExpertLayout, Refusal, Topology


def test_longest_first_is_what_a_hand_would_place() -> None:
    # Ranks own {0, 1} and {2, 3}: 9 + 8 against 2 + 1. Longest first: 9, then 8 and 2 on the other rank, 1
    # on the first.
    found = longest_first(np.array([[9, 8, 2, 1]]), topology=Topology(4, 2))
    assert found.permutation.tolist() == [[0, 3, 1, 2]]
    assert (found.floor, found.reached) == (17 / 10, 10 / 10)


def test_a_rank_that_is_full_takes_no_more_experts() -> None:
    # 10 fills rank 0; 1, 1 would both go to rank 1, and so does the last 1's place stay on rank 0.
    found = longest_first(np.array([[10, 1, 1, 1], [1, 1, 1, 1]]), topology=Topology(2, 2))
    assert found.permutation.tolist() == [[0, 3, 1, 2], [0, 2, 1, 3]]
    assert found.floor == found.reached == pytest.approx((11 + 2) / (13 / 2 + 2))


def test_counts_include_tails_and_agree_with_loads_and_their_bound() -> None:
    rng = np.random.default_rng(0)
    layout = ExpertLayout(num_experts=12, top_k=3, routed_layers=(1, 2, 5))
    topology = Topology(6, 3)
    samples = [make_sample(f"s{i}", 9 + i, distinct_routes(rng, 8 + i, layout)) for i in range(7)]
    counts = expert_counts(samples, layout=layout, topology=topology)
    loads = collection_loads(samples, layout=layout, topology=topology)
    assert np.array_equal(counts.reshape(3, 3, 4).sum(axis=2).T, loads.sum(axis=0))
    found = longest_first(counts, topology=topology)
    assert 1 <= found.reached <= found.floor
    assert [sorted(row) for row in found.permutation.tolist()] == [list(range(12))] * 3
    placed = np.take_along_axis(counts, found.permutation, axis=1).reshape(3, 3, 4).sum(axis=2)
    assert found.reached == pytest.approx(placed.max(axis=1).sum() / placed.mean(axis=1).sum())
    # The floor is the bound of expert work over its mean: what is left when everything else is even.
    lengths = np.array([len(s) for s in samples])
    bound = lower_bounds(lengths=lengths, loads=loads, topology=Topology(3, 3), budget=99).expert_work
    assert bound == pytest.approx(found.floor * counts.sum() / 3)


def test_ids_out_of_range_are_refused() -> None:
    layout = ExpertLayout(num_experts=4, top_k=1, routed_layers=(3,))
    with pytest.raises(Refusal, match="sample x: expert id 4 in row 1, layer 3"):
        expert_counts([make_sample("x", 3, np.array([[[0]], [[4]]]))], layout=layout, topology=Topology(2, 2))
