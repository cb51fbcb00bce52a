"""Samples -> packs: every row is at its place in the sample, every document has its own replay tail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import LAYOUT, masked, samples_of

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.data.collate import collate, count_normalisers, step_of_rank
from olmo_rl.data.packs import TOKEN_FIELDS, Pack, RouteMode
from olmo_rl.planning.lending import row_hashes
from olmo_rl.planning.loads import collection_loads, tail_routes
from olmo_rl.planning.packing import plan_step
from olmo_rl.planning.planners import plan_batch
from olmo_rl.planning.schedule import StepInput
from olmo_rl.policy.loss import scored_slots
from olmo_rl.types import ExpertLayout, PackPlan, Refusal, Sample, SearchLog, Topology

ONE = Topology(1)
TINY = ExpertLayout(num_experts=8, top_k=2, routed_layers=(1, 3))


def five_tokens(id: str, *, first: int) -> Sample:
    """Five tokens and their four recorded rows; every row of every layer names other experts."""
    rows = np.array([[[first + t, (first + t + 3) % 8], [(first + t + 1) % 8, 7 - t]] for t in range(4)])
    return Sample(
        id=id,
        group="g",
        tokens=np.arange(10 * first, 10 * first + 5, dtype=np.int32),
        response_mask=np.array([False, False, True, True, True]),
        behavior_logprobs=np.zeros(5, dtype=np.float32),
        reward=0.0,
        routes=(rows % 8).astype(np.int16),
    )


def test_two_samples_of_five_tokens_get_synthetic_rows_exactly_at_rows_4_and_9() -> None:
    a, b = five_tokens("a", first=0), five_tokens("b", first=3)
    pack = collate([a, b], layout=TINY, topology=ONE)
    assert pack.routes is not None
    assert pack.routes.shape == (10, 2, 2)
    assert pack.routes.dtype is torch.int64
    assert pack.routes[0:4].tolist() == a.routes.tolist()
    assert pack.routes[5:9].tolist() == b.routes.tolist()
    assert pack.routes[4].tolist() == tail_routes("a", layout=TINY, topology=ONE).tolist()
    assert pack.routes[9].tolist() == tail_routes("b", layout=TINY, topology=ONE).tolist()
    assert pack.routes[4].tolist() != pack.routes[9].tolist()
    assert all(len(set(row)) == 2 for layer in pack.routes[[4, 9]].tolist() for row in layer)


def test_every_document_brings_as_many_route_rows_as_tokens() -> None:
    pack = collate([five_tokens("a", first=0), five_tokens("b", first=3)], layout=TINY, topology=ONE)
    assert pack.routes is not None
    for first in (0, 5):
        for layer in range(2):
            counts = torch.bincount(pack.routes[first : first + 5, layer].flatten(), minlength=8)
            assert int(counts.sum()) == 5 * TINY.top_k


def test_no_tail_row_scores_a_token() -> None:
    a, b = five_tokens("a", first=0), five_tokens("b", first=3)
    everything = np.ones(5, dtype=np.bool_)
    pack = collate(
        [replace(a, response_mask=everything), replace(b, response_mask=everything)],
        layout=TINY,
        topology=ONE,
    )
    assert scored_slots(pack).rows.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]


def test_the_row_of_a_second_turn_replaces_the_tail_of_the_first() -> None:
    first = five_tokens("a", first=0)
    prefill = np.array([[[6, 2], [0, 5]], [[1, 7], [4, 3]], [[2, 0], [6, 1]]], dtype=np.int16)
    second = replace(
        first,
        tokens=np.arange(8, dtype=np.int32),
        response_mask=np.array([False] * 2 + [True] * 3 + [False] + [True] * 2),
        behavior_logprobs=np.zeros(8, dtype=np.float32),
        routes=np.concatenate([first.routes, prefill]),
    )
    routes = collate([second], layout=TINY, topology=ONE).routes
    assert routes is not None
    assert routes[:4].tolist() == first.routes.tolist()
    assert routes[4:7].tolist() == prefill.tolist()
    assert routes[7].tolist() == tail_routes("a", layout=TINY, topology=ONE).tolist()


def test_targets_of_1_2_3_and_4_5_never_cross_documents() -> None:
    samples = []
    for id, tokens in (("a", [1, 2, 3]), ("b", [4, 5])):
        length = len(tokens)
        samples.append(
            Sample(
                id=id,
                group=id,
                tokens=np.array(tokens, dtype=np.int32),
                response_mask=np.ones(length, dtype=np.bool_),
                behavior_logprobs=np.zeros(length, dtype=np.float32),
                reward=0.0,
            )
        )
    pack = collate(samples, layout=None, topology=ONE)
    slots = scored_slots(pack)
    assert dict(zip(slots.rows.tolist(), pack["tokens"][slots.slots].tolist(), strict=True)) == {
        0: 2,
        1: 3,
        3: 5,
    }
    assert count_normalisers(samples).tokens == 3


def test_boundaries_are_int32_strictly_increasing_and_end_at_the_last_row() -> None:
    pack = collate(samples_of(((3, 1), (1, 1), (4, 7))), layout=LAYOUT, topology=ONE)
    assert pack.cu_seqlens.dtype is torch.int32
    assert pack.cu_seqlens.tolist() == [0, 4, 6, 17] == list(pack.boundaries)
    assert pack.document_ids.tolist() == [0] * 4 + [1] * 2 + [2] * 11
    assert pack["positions"].tolist() == [0, 1, 2, 3, 0, 1, *range(11)]
    context = pack.context(mode=RouteMode.replay)
    assert context.max_seqlen == 11
    assert context.real_tokens == 17
    assert context.routes is not None
    assert sorted(context.routes) == [1, 2]
    assert torch.equal(context.routes[2], pack.routes[:, 1])


def expected_fields(sample: Sample) -> dict[str, list[object]]:
    """The expected fields of one document, defined a second time, without the table."""
    length, value = len(sample), 0.0 if sample.advantage is None else sample.advantage
    active = [bool(m) and (sample.loss_mask is None or bool(sample.loss_mask[t])) and t > 0
              for t, m in enumerate(sample.response_mask)]  # fmt: skip

    def known(values: np.ndarray | None) -> list[object]:
        return [0.0 if values is None or not active[t] else float(values[t]) for t in range(length)]

    return {
        "tokens": sample.tokens.tolist(),
        "positions": list(range(length)),
        "response_mask": sample.response_mask.tolist(),
        "loss_mask": active,
        "behavior_logprobs": known(sample.behavior_logprobs),
        "ref_logprobs": known(sample.ref_logprobs),
        "advantages": [float(np.float32(value))] * length,
        "hashes": row_hashes(sample.id, length).tolist(),
    }


def unpacked(packs: list[Pack]) -> dict[str, dict[str, object]]:
    """Every document of the packs by sample id: its fields and routes."""
    found: dict[str, dict[str, object]] = {}
    for pack in packs:
        for document, id in enumerate(pack.ids):
            span = slice(pack.boundaries[document], pack.boundaries[document + 1])
            assert id not in found, "a sample is packed once"
            found[id] = {name: tensor[span].tolist() for name, tensor in pack.fields.items()}
            found[id]["routes"] = None if pack.routes is None else pack.routes[span].tolist()
            assert set(pack.document_ids[span].tolist()) == {document}
    return found


def marked_samples() -> list[Sample]:
    """Advantage = sample index, every recorded route row of sample i = (i mod E, i + 1 mod E)."""
    samples = samples_of(((3, 1), (2, 3), (4, 7), (1, 2), (5, 5), (2, 6), (6, 4), (3, 3)))
    samples[2] = masked(samples[2], keep=(5, 7))
    for index, sample in enumerate(samples):
        sample.advantage = float(index)
        sample.policy_version = index
        assert sample.routes is not None
        pair = [index % LAYOUT.num_experts, (index + 1) % LAYOUT.num_experts]
        sample.routes = np.broadcast_to(np.array(pair, dtype=np.int16), sample.routes.shape).copy()
    return samples


def check_pairing(plan: PackPlan, *, topology: Topology) -> None:
    """All ranks' packs together hold every sample once, each with exactly its own values."""
    samples = marked_samples()
    batches = [
        step_of_rank(samples, plan=plan, rank=rank, layout=LAYOUT, topology=topology, budget=64)
        for rank in range(topology.world_size)
    ]
    found = unpacked([pack for batch in batches for pack in batch.packs])
    assert sorted(found) == sorted(sample.id for sample in samples)
    for index, sample in enumerate(samples):
        routes = found[sample.id].pop("routes")
        assert found[sample.id] == expected_fields(sample)
        assert found[sample.id]["advantages"] == [float(index)] * len(sample)
        pair = [index % LAYOUT.num_experts, (index + 1) % LAYOUT.num_experts]
        tail = tail_routes(sample.id, layout=LAYOUT, topology=topology).tolist()
        assert routes == [[pair, pair]] * (len(sample) - 1) + [tail]
    for rank, batch in enumerate(batches):
        assert [pack.ids for pack in batch.packs] == [
            tuple(samples[i].id for i in pack) for pack in plan.packs[rank]
        ]
        assert list(batch.samples) == samples, "every rank keeps the step in order of arrival"
        assert batch.normalisers == count_normalisers(samples)


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(8)), cuts=st.sets(st.integers(1, 3)))
def test_no_permutation_or_cut_parts_a_sample_from_its_advantage_log_probs_and_routes(
    order: list[int], cuts: set[int]
) -> None:
    edges = [0, *sorted(cuts), 4]
    packs = tuple(
        tuple(tuple(half[a:b]) for a, b in zip(edges, edges[1:], strict=False))
        for half in (order[:4], order[4:])
    )
    log = SearchLog(seed=0, proposals=0, accepted=0, stop_reason="none", rejected={})
    check_pairing(PackPlan(packs=packs, search=log), topology=Topology(2, 2))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_consecutive_plans_keep_every_sample_with_its_own_values(world: int) -> None:
    lengths = [len(sample) for sample in marked_samples()]
    check_pairing(plan_step(lengths, budget=20, topology=Topology(world)), topology=Topology(world))


@pytest.mark.parametrize("kind", [BalanceKind.reference, BalanceKind.anneal])
def test_a_planner_that_permutes_the_batch_keeps_every_sample_with_its_own_values(kind: BalanceKind) -> None:
    samples, topology = marked_samples(), Topology(4, 2)
    lengths = np.array([len(sample) for sample in samples])
    plan = plan_batch(
        StepInput(
            lengths=lengths,
            ids=[sample.id for sample in samples],
            loads=collection_loads(samples, layout=LAYOUT, topology=topology),
            budget=20,
            topology=topology,
            balance=BalanceConfig(kind=kind, seconds=60.0),
        )
    ).plan
    assert plan.positions != plan_step(lengths, budget=20, topology=topology).positions
    check_pairing(plan, topology=topology)


def test_the_table_of_fields_is_what_a_pack_holds_in_the_dtypes_it_says() -> None:
    pack = collate(samples_of(), layout=LAYOUT, topology=ONE)
    assert {name: tensor.dtype for name, tensor in pack.fields.items()} == {
        row.name: row.dtype for row in TOKEN_FIELDS
    }
    assert {tuple(tensor.shape) for tensor in pack.fields.values()} == {(len(pack),)}


def test_arrays_of_unequal_length_are_never_patched_over() -> None:
    sample = samples_of()[1]
    with pytest.raises((AssertionError, ValueError)):
        collate([replace(sample, response_mask=sample.response_mask[:-1])], layout=None, topology=ONE)
    with pytest.raises((AssertionError, ValueError)):
        collate([replace(sample, behavior_logprobs=sample.behavior_logprobs[:-1])], layout=None, topology=ONE)


def test_a_pack_without_routes_is_never_replayed() -> None:
    pack = collate(samples_of()[:2], layout=None, topology=ONE)
    with pytest.raises(AssertionError, match="replay needs recorded routes"):
        pack.context(mode=RouteMode.replay)


def test_a_nan_in_a_slot_that_is_not_scored_reads_zero() -> None:
    sample = masked(samples_of(((2, 3),))[0], keep=(2, 4))
    for values in (sample.behavior_logprobs, sample.ref_logprobs):
        values[[0, 1, 3]] = (np.nan, -np.inf, np.nan)
    pack = collate([sample], layout=LAYOUT, topology=ONE)
    for name, values in (
        ("behavior_logprobs", sample.behavior_logprobs),
        ("ref_logprobs", sample.ref_logprobs),
    ):
        assert pack[name].tolist() == [0.0, 0.0, float(values[2]), 0.0, float(values[4])]


def test_five_of_thirty_response_tokens_in_a_masked_sample_leave_a_denominator_of_25() -> None:
    samples = samples_of(((2, 10), (3, 5), (2, 15)))
    samples[1] = masked(samples[1])
    normalisers = count_normalisers(samples)
    assert (normalisers.tokens, normalisers.responses) == (25, 2)
    gradients_possible = sum(
        len(scored_slots(collate([sample], layout=LAYOUT, topology=ONE)).slots) for sample in samples
    )
    assert gradients_possible == 25


def test_missing_routes_are_refused_by_sample_with_what_was_expected() -> None:
    samples = samples_of(((2, 3), (3, 3)))
    samples[1].routes = None
    with pytest.raises(Refusal, match=r"sample s1: routes none, expected \(5, 2, 2\)"):
        collate(samples, layout=LAYOUT, topology=ONE)


def test_routes_of_another_length_are_refused_and_not_cut() -> None:
    samples = samples_of(((2, 3), (3, 3)))
    assert samples[0].routes is not None
    samples[0].routes = np.concatenate([samples[0].routes, samples[0].routes[-1:]])
    with pytest.raises(Refusal, match=r"sample s0: routes \(5, 2, 2\), expected \(4, 2, 2\)"):
        collate(samples, layout=LAYOUT, topology=ONE)


def test_a_tail_depends_on_the_sample_and_not_on_its_place_in_the_pack() -> None:
    samples = samples_of()
    forwards = unpacked([collate(samples, layout=LAYOUT, topology=ONE)])
    backwards = unpacked([collate(samples[::-1], layout=LAYOUT, topology=ONE)])
    assert forwards == backwards
