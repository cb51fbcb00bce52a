"""Loans of experts: shares by hand, rows by hash, loads by slot, and how even they make recorded laws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from planner_cases import Case
from test_loads import distinct_routes, make_sample

from olmo_rl.collections.pending import Pending
from olmo_rl.collections.planner import PlanRecord
from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.data.collate import collate
from olmo_rl.planning.lending import (
    WHOLE,
    SlotTable,
    choose_loans,
    count_numpy,
    expert_loads,
    folded,
    lend,
    ranks_of_a_node,
    row_hashes,
    slot_loads,
    under,
)
from olmo_rl.planning.loads import collection_loads, mix, stable_hash
from olmo_rl.planning.objective import destination_loads
from olmo_rl.planning.pads import Pads
from olmo_rl.planning.schedule import Forecast, StepInput, known_schedule, schedule_digest
from olmo_rl.planning.synthetic import _clipped_softmax, draw_lengths, expert_counts
from olmo_rl.types import ExpertLayout, Lending, Loan, PackPlan, Padding, Refusal, Sample, Topology

LAYOUT = ExpertLayout(num_experts=8, top_k=2, routed_layers=(1, 3))
TOPOLOGY = Topology(4, 4)


def loans_of(*counts: int, ranks: int, guests: int = 1, node_ranks: int | None = None) -> tuple[Loan, ...]:
    found = choose_loans(
        np.array([counts]),
        topology=Topology(ranks, ranks),
        guests=guests,
        node_ranks=ranks if node_ranks is None else node_ranks,
    )
    return () if found is None else found.layers[0]


def loan(expert: int, host: int, *, first: int = 0, below: int, slot: int = 0) -> Loan:
    return Loan(expert=expert, host=host, slot=slot, first=first, below=below)


def test_the_lightest_rank_takes_what_it_lacks_from_the_busiest_ones_smallest_sufficient_expert() -> None:
    # Ranks have 100 and 20 of a mean of 60: 40 rows go over, all of expert 1 or half of expert 0.
    assert loans_of(60, 40, 15, 5, ranks=2) == (loan(1, 1, below=WHOLE),)
    assert loans_of(80, 20, 15, 5, ranks=2) == (loan(0, 1, below=WHOLE * 40 // 80),)


def test_a_lender_that_gave_more_than_its_surplus_is_a_host_itself() -> None:
    # Of a mean of 33, rank 2 lacks 30 and takes them from the 60 of rank 0; that then takes 3 of rank 1's 36.
    assert loans_of(60, 36, 3, ranks=3) == (
        loan(0, 2, below=WHOLE * 30 // 60),
        loan(1, 0, below=WHOLE * 3 // 36),
    )


def test_an_expert_is_shared_by_two_hosts_and_its_owner() -> None:
    # One expert has 70 of 90, the mean is 30: both others take what they lack.
    first, second = WHOLE * 25 // 70, WHOLE * 25 // 70 + WHOLE * 15 // 70
    assert loans_of(70, 15, 5, ranks=3) == (loan(0, 2, below=first), loan(0, 1, first=first, below=second))


def test_guests_of_a_rank_lie_in_the_order_of_their_experts() -> None:
    # Mean 50: rank 1 lacks 50, first takes all of expert 2 (the largest of 40, 30, 30), then 10 of expert 0.
    assert loans_of(30, 30, 40, 0, 0, 0, ranks=2, guests=2) == (
        loan(2, 1, below=WHOLE, slot=1),
        loan(0, 1, below=WHOLE * 10 // 30, slot=0),
    )


def test_layers_within_two_percent_of_even_stay_at_home() -> None:
    assert loans_of(102, 98, ranks=2) == ()
    assert loans_of(103, 97, ranks=2) == (loan(0, 1, below=WHOLE * 3 // 103),)
    assert loans_of(0, 0, ranks=2) == ()


def test_a_host_on_the_lenders_node_comes_first_while_it_lacks_rows() -> None:
    # Of a mean of 25, rank 1 lacks 5 and rank 2 lacks 20. Nodes of two ranks make rank 1 the neighbour.
    assert [found.host for found in loans_of(60, 20, 5, 15, ranks=4, node_ranks=2)] == [1, 2, 3]
    assert [found.host for found in loans_of(60, 20, 5, 15, ranks=4)] == [2, 3, 1]
    assert [found.host for found in loans_of(56, 25, 5, 14, ranks=4, node_ranks=2)] == [2, 3]


@pytest.mark.parametrize(
    ("world", "ep", "devices", "ranks"), [(16, 8, 8, 8), (16, 16, 8, 8), (8, 4, 8, 4), (12, 4, 6, 2)]
)
def test_neighbours_are_on_one_node_in_every_replica(world: int, ep: int, devices: int, ranks: int) -> None:
    assert ranks_of_a_node(Topology(world, ep), devices=devices) == ranks
    for rank in range(world):
        first = rank - rank % ep % ranks
        assert first // devices == rank // devices


def test_hashes_are_the_high_bits_of_splitmix64() -> None:
    # The published outputs of splitmix64 from the seed 1234567.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = np.uint64(1234567) + np.arange(1, 5, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(states).tolist() == outputs
    first = np.array([stable_hash("a") + 0x9E3779B97F4A7C15 & 2**64 - 1], dtype=np.uint64)
    assert row_hashes("a", 3)[0] == int(mix(first)[0]) >> 48
    assert row_hashes("a", 5)[:3].tolist() == row_hashes("a", 3).tolist()


def test_hashes_spread_rows_evenly_within_a_sample_and_over_samples() -> None:
    for hashes in (row_hashes("x", 40_000), np.concatenate([row_hashes(f"s{i}", 4) for i in range(10_000)])):
        for share in (0.1, 0.5, 0.625, 0.9):  # chance alone deviates by 0.0025 at most
            assert abs((hashes < share * WHOLE).mean() - share) < 0.01
        below = hashes < WHOLE // 2
        assert abs((below[1:] & below[:-1]).mean() - 0.25) < 0.01


LENDING = Lending(
    guests=1,
    layers=(
        (
            loan(0, 1, below=WHOLE // 2),
            loan(0, 3, first=WHOLE // 2, below=WHOLE),
            loan(7, 0, below=WHOLE // 4),
        ),
        (),
    ),
)


def samples_of(count: int = 7, *, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [make_sample(f"s{i}", 9 + i, distinct_routes(rng, 8 + i, LAYOUT)) for i in range(count)]


def test_rows_go_to_the_slot_whose_share_has_their_hash() -> None:
    table = SlotTable.of(LENDING, layout=LAYOUT, topology=TOPOLOGY)
    # Three slots a rank, the third is the guest: of ranks 1 and 3 expert 0, of rank 0 expert 7.
    assert (table.slots_per_rank, table.num_slots) == (3, 12)
    routes = np.array([[[0, 7], [0, 7]], [[0, 1], [2, 3]], [[7, 6], [4, 5]]], dtype=np.int16)
    hashes = np.array([WHOLE // 4 - 1, WHOLE // 2, WHOLE // 4], dtype=np.uint16)
    counts, bad = table.count(routes, hashes)
    assert bad == -1
    # Row 0: expert 0 to rank 1's guest (5), 7 to rank 0's (2). Row 1: 0 to rank 3's guest (11), 1 at home.
    # Row 2: 7 (10) and 6 (9) at home. The second layer lends nothing: experts 0 7 2 3 4 5 at home.
    assert counts[:, 0].nonzero()[0].tolist() == [1, 2, 5, 9, 10, 11]
    assert counts[:, 1].nonzero()[0].tolist() == [0, 3, 4, 6, 7, 10]
    assert counts.sum() == 12


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "uint64"])
def test_the_kernel_counts_what_numpy_counts_and_both_find_the_first_bad_id(dtype: str) -> None:
    rng = np.random.default_rng(1)
    table = SlotTable.of(LENDING, layout=LAYOUT, topology=TOPOLOGY)
    routes = distinct_routes(rng, 500, LAYOUT, dtype)
    hashes = row_hashes("r", 500)
    counts, bad = table.count(routes, hashes)
    expected, _ = count_numpy(routes, hashes, table=table)
    assert bad == -1
    assert np.array_equal(counts, expected)
    routes[3, 1, 0] = 8 if dtype.startswith("u") else -1
    assert table.count(routes, hashes)[1] == count_numpy(routes, hashes, table=table)[1] == 3 * 4 + 2
    with pytest.raises(Refusal, match="sample bad: expert id .* in row 3, layer 3"):
        slot_loads([make_sample("bad", 501, routes)], table=table, layout=LAYOUT, topology=TOPOLOGY)


def test_loads_by_slot_add_up_to_those_of_experts_and_ranks() -> None:
    samples = samples_of()
    experts = expert_loads(samples, layout=LAYOUT, topology=TOPOLOGY)
    ranks = collection_loads(samples, layout=LAYOUT, topology=TOPOLOGY)
    assert np.array_equal(folded(experts, ranks=4), ranks)
    lent = under(LENDING, samples=samples, experts=experts, layout=LAYOUT, topology=TOPOLOGY)
    slots = lent.slots.reshape(7, 4, 3, 2)
    served = slots[:, 1, 2, 0] + slots[:, 3, 2, 0] + slots[:, 0, 0, 0]  # expert 0: both guests and its owner
    assert np.array_equal(served, experts[:, 0, 0])
    assert slots[:, 0, 0, 0].sum() == 0, "every row of expert 0 is lent"
    assert np.array_equal(slots[:, 0, 2, 0] + slots[:, 3, 1, 0], experts[:, 7, 0])
    assert np.array_equal(lent.loads[..., 1], ranks[..., 1])
    one_by_one = [slot_loads([s], table=lent.table, layout=LAYOUT, topology=TOPOLOGY)[0] for s in samples]
    assert np.array_equal(lent.slots, np.stack(one_by_one))


def test_exact_loads_never_exceed_those_at_home() -> None:
    rng = np.random.default_rng(5)
    lenders = 0
    for seed in range(40):
        weights = rng.dirichlet(np.full(8, (0.3, 1.0, 5.0)[seed % 3]), size=2)
        samples = []
        for i in range(8):
            keys = np.log(weights + 1e-9) + rng.gumbel(size=(9 + i, 2, 8))
            routes = keys.argsort(axis=-1)[..., -2:].astype(np.int16)
            samples.append(make_sample(f"{seed}-{i}", 10 + i, routes))
        experts = expert_loads(samples, layout=LAYOUT, topology=TOPOLOGY)
        for guests in (1, 2):
            lent = lend(
                samples, experts=experts, layout=LAYOUT, topology=TOPOLOGY, guests=guests, node_ranks=4
            )
            if lent is None:
                continue
            lenders += 1
            before, after = (loads.sum(axis=0).max(axis=0) for loads in (lent.home, lent.loads))
            for layer, loans in enumerate(lent.lending.layers):
                assert after[layer] < before[layer] if loans else after[layer] == before[layer]
                assert len(loans) <= 4 * guests
                assert max(Counter((x.host, x.slot) for x in loans).values(), default=1) == 1
    assert lenders > 40


# Laws of routes: counts int64 [N, L, X] of 256 samples, 24 layers, 128 experts, top-8.

LAWS = {
    "law": (1.03, 1.01),
    "group": (1.03, 1.01),
    "domain": (1.03, 1.01),
    "static": (1.03, 1.01),
    "uniform": (1.01, 1.01),
}
WIDE = ExpertLayout(num_experts=128, top_k=8, routed_layers=tuple(range(24)))
EIGHT = Topology(16, 8)


def drawn_counts(law: str, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths [N] and counts [N, L, X]; `group`, `domain`, `static`: Zipf's law over experts in an order of
    every group's, every domain's, or every layer's own.
    """
    drawn, rng = draw_lengths(256, seed=seed), np.random.default_rng((seed, 9))
    if law == "law":
        return drawn.lengths, np.stack(list(expert_counts(drawn, layout=WIDE, seed=seed)))
    keys = {"group": drawn.prompts, "domain": drawn.domains}.get(law, np.zeros(256, dtype=np.int64))
    logits = -np.log(np.arange(1, 129)) * (law != "uniform")
    shares = {
        key: _clipped_softmax(np.stack([rng.permutation(logits) for _ in range(24)]), ceiling=1 / 8)
        for key in np.unique(keys)
    }
    counts = [rng.multinomial(n * 8, shares[key]) for n, key in zip(drawn.lengths, keys, strict=True)]
    return drawn.lengths, np.stack(counts)


def lent_loads(counts: NDArray[np.int64], *, guests: int, seed: int) -> NDArray[np.int32] | None:
    """int32 [N, E, L]: loads under the loans of these counts, every row of a lent expert drawn on its own."""
    lending = choose_loans(counts.sum(axis=0), topology=EIGHT, guests=guests, node_ranks=8)
    if lending is None:
        return None
    rng, loads = np.random.default_rng(seed), counts.reshape(256, 24, 8, 16).sum(axis=3)
    for layer, loans in enumerate(lending.layers):
        left = {loan.expert: counts[:, layer, loan.expert].copy() for loan in loans}
        for loan in loans:
            moved = rng.binomial(left[loan.expert], (loan.below - loan.first) / (WHOLE - loan.first))
            left[loan.expert] -= moved
            loads[:, layer, loan.host] += moved
            loads[:, layer, loan.expert // 16] -= moved
    return loads.transpose(0, 2, 1).astype(np.int32)


def over_perfect(loads: NDArray[np.int32]) -> float:
    total = loads.sum(axis=0)
    return float(total.max(axis=0).sum() / total.mean(axis=0).sum())


@pytest.mark.parametrize("law", list(LAWS))
def test_one_guest_slot_and_two_make_every_law_even(law: str) -> None:
    lengths, counts = drawn_counts(law, seed=1)
    for guests, limit in zip((1, 2), LAWS[law], strict=True):
        loads = lent_loads(counts, guests=guests, seed=guests)
        if law == "uniform":
            assert loads is None
            continue
        assert loads is not None
        assert over_perfect(loads) <= limit
        if guests == 1 and law == "law":
            # Packed under the loans: the plan of all replicas and columns, over perfect balance.
            case = Case(lengths=lengths, loads=loads, topology=EIGHT, budget=16384)
            plan = case.plan(BalanceConfig(kind=BalanceKind.anneal, proposals=30_000, seconds=60.0))
            assert plan.after.expert_work is not None
            assert plan.after.expert_work * 16 / loads.sum() <= 1.05


def test_pads_take_the_hashes_of_the_rows_that_they_repeat_and_are_predicted_by_slot() -> None:
    samples = samples_of(4)
    striped = replace(samples_of(1, seed=3)[0], id="image", has_placeholders=True)
    for pack in (samples, [striped]):
        padding, one = Padding(multiple_of=64, experts=LAYOUT), Topology(4, 4)
        experts = expert_loads(pack, layout=LAYOUT, topology=one)
        lent = under(LENDING, samples=pack, experts=experts, layout=LAYOUT, topology=one)
        plan = PackPlan(packs=((tuple(range(len(pack))),),) * 4)
        pads = Pads.of(
            pack,
            padding=padding,
            topology=one,
            loads=lent.slots,
            layout=LAYOUT,
            layer_stride=1,
            table=lent.table,
        )
        assert pads is not None
        row = collate(pack, layout=LAYOUT, topology=one, padding=padding)
        assert row.routes is not None
        assert len(row) == 64 > row.real_tokens
        hashes = row["hashes"].numpy().astype(np.uint16)
        assert (
            hashes.tolist()[row.real_tokens :][: len(pack[0])]
            == row_hashes(pack[0].id, len(pack[0])).tolist()
        )
        received = lent.table.count(row.routes.numpy(), hashes)[0]
        forecast = Forecast.of(
            plan,
            loads=lent.slots,
            layout=LAYOUT,
            topology=one,
            layer_stride=1,
            pads=pads.work(plan),
            slots=lent.table.slots_per_rank,
        )
        assert np.array_equal(forecast.loads[0, 0], 4 * received)  # every rank of the replica has this pack
        by_rank = destination_loads(plan, loads=lent.loads, topology=one, pads=pads.work(plan).by_rank(4))
        assert np.array_equal(folded(forecast.loads, ranks=4), by_rank)


def test_a_mismatch_names_the_slot() -> None:
    loads = np.arange(2 * 1 * 6 * 1).reshape(2, 1, 6, 1)
    observed = loads.copy()
    observed[1, 0, 4, 0] += 3
    found = Forecast(loads=loads, layers=(5,), slots=3).compare(observed)
    assert found["where"] == [
        {"column": 1, "replica": 0, "destination": 1, "slot": 1, "layer": 5, "predicted": 10, "observed": 13}
    ]
    assert (found["ep_degree"], found["world_size"], found["mismatch"], found["equal"]) == (2, 2, 1, False)
    assert found["predicted"] == [[0 + 1 + 2 + 6 + 7 + 8, 3 + 4 + 5 + 9 + 10 + 11]]
    assert (found["predicted_expert_work"], found["expert_work"]) == (12 + 30, 12 + 33)


def test_loans_are_part_of_a_plan_its_digest_and_its_record() -> None:
    samples = samples_of(8)
    experts = expert_loads(samples, layout=LAYOUT, topology=TOPOLOGY)
    lent = under(LENDING, samples=samples, experts=experts, layout=LAYOUT, topology=TOPOLOGY)
    step = StepInput(
        lengths=np.array([len(s) for s in samples]),
        ids=[s.id for s in samples],
        loads=lent.loads,
        budget=64,
        topology=TOPOLOGY,
        balance=BalanceConfig(guests=1),
        lent=lent,
    )
    arrival = PackPlan(packs=tuple(((rank, rank + 4),) for rank in range(4)))
    schedule = known_schedule(arrival, step=step, arrival=arrival, seconds={})
    assert schedule.plan.lending == LENDING
    other = replace(LENDING, layers=((loan(0, 1, below=7),), ()))
    moved = replace(schedule, plan=replace(schedule.plan, lending=other))
    at_home = replace(schedule, plan=replace(schedule.plan, lending=None))
    assert len({schedule_digest(one, ids=step.ids) for one in (schedule, moved, at_home)}) == 3
    for one in (schedule, at_home):
        record = PlanRecord(plan=one.plan, start="arrival", paths={}, settings={})
        pending = Pending(
            source="f", steps_in_collection=1, trained_steps=1, ids=[["a"]], samples=None, plans=[record]
        )
        assert Pending.of_state(pending.state()).plans == [record]
