"""Work, bounds, J and gap: hand-computed numbers, then an oracle of plain loops, then brute force."""

import itertools

import numpy as np
import pytest

from olmo_rl.planning.objective import (
    Bounds,
    Work,
    destination_loads,
    gap,
    lower_bounds,
    measure,
    objective,
    pair_straggler,
    token_straggler,
)
from olmo_rl.types import PackPlan, Topology

# 4 experts (top-1), EP 2, world 4 = replicas {0, 1} and {2, 3}; 8 samples of 4 rows, one per pack, no tails.
# Samples 0-3 route to expert 0 (destination 0), samples 4-7 to expert 2 (destination 1).
TOPOLOGY = Topology(4, 2)
LENGTHS = np.full(8, 4, dtype=np.int64)
LOADS = np.zeros((8, 2, 1), dtype=np.int32)
LOADS[:4, 0] = 4
LOADS[4:, 1] = 4


def one_per_pack(order: tuple[int, ...]) -> PackPlan:
    """Rank w runs the positions w, w + 4 .. of `order`, one sample a pack."""
    return PackPlan(packs=tuple(tuple((order[c * 4 + w],) for c in range(len(order) // 4)) for w in range(4)))


def test_the_order_of_arrival_that_sends_a_column_to_one_destination_is_measured_by_hand() -> None:
    work = measure(one_per_pack(tuple(range(8))), lengths=LENGTHS, loads=LOADS, topology=TOPOLOGY)
    # Column 0 holds samples 0-3: two per replica, 8 assignments on destination 0, none on 1. Column 1
    # mirrors.
    assert work == Work(
        expert_work=16,
        token_work=8,
        pair_work=32,
        skew_mean=2.0,
        skew_max=2.0,
        max_destination_load=8,
        packs_per_rank=2,
    )


def test_the_optimum_of_the_same_case_by_brute_force_halves_expert_work() -> None:
    works = []
    for order in itertools.permutations(range(8)):
        # Ranks of one replica share their destinations, so only which pair meets where matters.
        if all(order[i] < order[i + 1] for i in range(0, 8, 2)):
            works.append(measure(one_per_pack(order), lengths=LENGTHS, loads=LOADS, topology=TOPOLOGY))
    assert len(works) == 2520
    best = min(works, key=lambda work: work.expert_work)
    assert (best.expert_work, best.skew_mean, best.skew_max, best.max_destination_load) == (8, 1.0, 1.0, 4)
    bounds = lower_bounds(lengths=LENGTHS, loads=LOADS, topology=TOPOLOGY, budget=4)
    assert bounds == Bounds(expert_work=8, token_work=8, pair_work=32, packs_per_rank=2)
    base = measure(one_per_pack(tuple(range(8))), lengths=LENGTHS, loads=LOADS, topology=TOPOLOGY)
    assert objective(base, base=base) == 3.0
    assert objective(best, base=base) == 2.5
    assert gap(base, bounds=bounds, base=base) == pytest.approx(0.2)
    assert gap(best, bounds=bounds, base=base) == 0.0


def test_pair_work_squares_documents_and_not_packs() -> None:
    lengths = np.full(3, 1000, dtype=np.int64)
    work = measure(PackPlan(packs=(((0, 1, 2),),)), lengths=lengths, loads=None, topology=Topology(1))
    assert work.pair_work == 3_000_000
    assert work.token_work == 3000


def test_without_loads_every_expert_field_is_none_and_j_has_two_terms() -> None:
    lengths = np.array([5, 3, 2, 2], dtype=np.int64)
    plan = PackPlan(packs=(((0,), (2,)), ((1,), (3,))))
    work = measure(plan, lengths=lengths, loads=None, topology=Topology(2))
    assert work == Work(
        expert_work=None,
        token_work=7,
        pair_work=29,
        skew_mean=None,
        skew_max=None,
        max_destination_load=None,
        packs_per_rank=2,
    )
    assert lower_bounds(lengths=lengths, loads=None, topology=Topology(2), budget=5) == Bounds(
        expert_work=None, token_work=6, pair_work=21, packs_per_rank=2
    )
    assert objective(work, base=work) == 2.0
    # Tokens: 7 of at least 6; rank means 6 tokens and 21 pairs.
    assert token_straggler(work, lengths=lengths, topology=Topology(2)) == pytest.approx(7 / 6)
    assert pair_straggler(work, lengths=lengths, topology=Topology(2)) == pytest.approx(29 / 21)


def random_plan(rng: np.random.Generator, samples: int, world: int, columns: int) -> PackPlan:
    order = rng.permutation(samples)
    cuts = np.sort(rng.choice(np.arange(1, samples), world * columns - 1, replace=False))
    cells = [tuple(int(i) for i in cell) for cell in np.split(order, cuts)]
    return PackPlan(packs=tuple(tuple(cells[w * columns : (w + 1) * columns]) for w in range(world)))


@pytest.mark.parametrize(
    ("world", "ep", "columns", "layers"), [(4, 2, 3, 5), (6, 3, 2, 1), (4, 4, 1, 3), (3, 1, 4, 2)]
)
def test_work_equals_an_oracle_of_plain_loops(world: int, ep: int, columns: int, layers: int) -> None:
    rng = np.random.default_rng(world)
    topology = Topology(world, ep)
    for _ in range(20):
        lengths = rng.integers(1, 60, size=40)
        loads = rng.integers(0, 50, size=(40, ep, layers)).astype(np.int32)
        plan = random_plan(rng, 40, world, columns)
        expert = tokens = pairs = busiest = 0
        skews = []
        for c in range(columns):
            cells = [plan.packs[w][c] for w in range(world)]
            tokens += max(sum(int(lengths[i]) for i in cell) for cell in cells)
            pairs += max(sum(int(lengths[i]) ** 2 for i in cell) for cell in cells)
            grid = [[[0] * layers for _ in range(ep)] for _ in range(world // ep)]
            for w, cell in enumerate(cells):
                for i in cell:
                    for e in range(ep):
                        for layer in range(layers):
                            grid[topology.replica_of(w)][e][layer] += int(loads[i, e, layer])
            for layer in range(layers):
                expert += max(replica[e][layer] for replica in grid for e in range(ep))
            for replica in grid:
                busy = sum(max(replica[e][layer] for e in range(ep)) for layer in range(layers))
                mean = sum(replica[e][layer] for e in range(ep) for layer in range(layers)) / ep
                skews.append(busy / mean)
                busiest = max(busiest, max(max(rank) for rank in replica))
        work = measure(plan, lengths=lengths, loads=loads, topology=topology)
        assert (work.expert_work, work.token_work, work.pair_work) == (expert, tokens, pairs)
        assert (work.max_destination_load, work.packs_per_rank) == (busiest, columns)
        assert work.skew_mean == pytest.approx(np.mean(skews), rel=1e-12)
        assert work.skew_max == pytest.approx(max(skews), rel=1e-12)
        bounds = lower_bounds(lengths=lengths, loads=loads, topology=topology, budget=60)
        assert bounds.expert_work <= expert
        assert bounds.token_work <= tokens
        assert bounds.pair_work <= pairs
        assert destination_loads(plan, loads=loads, topology=topology).sum() == loads.sum()


def test_bounds_round_up_in_every_layer_on_its_own() -> None:
    loads = np.array([[[3, 1], [0, 2]], [[2, 0], [1, 2]]], dtype=np.int32)  # [N=2, E=2, L=2]
    # Layer 0: destinations 5 and 1; layer 1: 1 and 4; over 2 replicas ceil(5 / 2) + ceil(4 / 2).
    bounds = lower_bounds(lengths=np.array([10, 11]), loads=loads, topology=Topology(4, 2), budget=4)
    assert bounds == Bounds(expert_work=3 + 2, token_work=6, pair_work=56, packs_per_rank=2)


def test_squares_and_sums_of_long_samples_do_not_overflow() -> None:
    lengths = np.full(4, 100_000, dtype=np.int32)
    loads = np.full((4, 1, 1), 2**31 - 1, dtype=np.int32)
    work = measure(PackPlan(packs=(((0, 1, 2, 3),),)), lengths=lengths, loads=loads, topology=Topology(1))
    assert work.pair_work == 4 * 10**10
    assert work.expert_work == 4 * (2**31 - 1)
