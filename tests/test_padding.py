"""Pads: what they hold, value by value; that they change nothing of real documents; and that the planner
counts what they send to experts.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import tiny_config

from benchmarks import bench_padding
from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.data.collate import collate, pad_pack, step_of_rank
from olmo_rl.data.packs import TOKEN_FIELDS, Pack, RouteMode, RouteTrace
from olmo_rl.planning.loads import collection_loads, tail_routes
from olmo_rl.planning.objective import destination_loads, measure
from olmo_rl.planning.packing import plan_step
from olmo_rl.planning.pads import Pads, pad_documents
from olmo_rl.planning.planners import padded_schedule, schedule_step
from olmo_rl.planning.schedule import StepInput
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.loss import scored_slots
from olmo_rl.types import ExpertLayout, PackPlan, Padding, Refusal, Sample, Topology

ONE = Topology(1)
MODEL = tiny_config()
LAYOUT = MODEL.expert_layout
assert LAYOUT is not None
EIGHT = Padding(multiple_of=8)


def samples_of(
    *lengths: int, seed: int = 0, layout: ExpertLayout | None = LAYOUT, first: int = 0
) -> list[Sample]:
    """Samples whose every value differs; the first token of each is its prompt."""
    random = np.random.default_rng(seed)
    tokens = iter(range(first, first + sum(lengths)))
    samples = []
    for i, length in enumerate(lengths):
        routes = None
        if layout is not None:
            shape = (length - 1, len(layout.routed_layers), layout.num_experts)
            routes = random.random(shape).argsort(-1)[..., : layout.top_k].astype(np.int16)
        samples.append(
            Sample(
                id=f"s{i}",
                group=f"g{i}",
                tokens=np.array([next(tokens) for _ in range(length)], dtype=np.int32),
                response_mask=np.arange(length) > 0,
                behavior_logprobs=random.uniform(-6, -4, length).astype(np.float32),
                ref_logprobs=random.uniform(-6, -4, length).astype(np.float32),
                reward=float(i),
                advantage=1.0 + i,
                routes=routes,
            )
        )
    return samples


def with_placeholders(samples: list[Sample], *which: int) -> list[Sample]:
    return [replace(s, has_placeholders=i in which) for i, s in enumerate(samples)]


def test_two_and_three_tokens_padded_to_eight_repeat_the_first_document_and_a_beginning_of_the_second() -> (
    None
):
    samples = samples_of(2, 3, first=10)
    bare = collate(samples, layout=LAYOUT, topology=ONE)
    pack = collate(samples, layout=LAYOUT, topology=ONE, padding=EIGHT)
    #                                 a   a   b   b   b | a   a | b
    assert pack["tokens"].tolist() == [10, 11, 12, 13, 14, 10, 11, 12]
    assert pack["positions"].tolist() == [0, 1, 0, 1, 2, 0, 1, 0]
    assert pack.document_ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 3]
    assert pack.cu_seqlens.tolist() == [0, 2, 5, 7, 8] == list(pack.boundaries)
    assert pack.cu_seqlens.dtype is torch.int32
    assert pack["response_mask"].tolist() == [False, True, False, True, True] + [False] * 3
    assert pack["loss_mask"].tolist() == [False, True, False, True, True] + [False] * 3
    for name in ("behavior_logprobs", "ref_logprobs", "advantages"):
        assert pack[name][:5].tolist() == bare[name].tolist()
        assert pack[name][5:].tolist() == [0.0] * 3
    assert pack.ids == ("s0", "s1")
    assert (pack.real_tokens, len(pack)) == (5, 8)
    assert pack.routes is not None
    assert bare.routes is not None
    assert torch.equal(pack.routes, bare.routes[[0, 1, 2, 3, 4, 0, 1, 2]])
    tail = tail_routes("s0", layout=LAYOUT, topology=ONE)
    assert pack.routes[6].tolist() == tail.tolist() == pack.routes[1].tolist()
    slots = scored_slots(pack)
    assert slots.slots.tolist() == [1, 3, 4]
    context = pack.context(mode=RouteMode.replay)
    assert (context.max_seqlen, context.real_tokens, context.pad_routes) == (3, 5, None)


def test_pads_go_round_the_pack_as_often_as_the_row_is_long() -> None:
    pack = collate(samples_of(2, 3), layout=None, topology=ONE, padding=Padding(multiple_of=16))
    assert pack["tokens"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    assert pack.boundaries == (0, 2, 5, 7, 10, 12, 15, 16)
    assert pack.document_ids[-1] == 6


def test_five_and_six_tokens_padded_to_a_multiple_of_eight_are_16_rows_in_every_array() -> None:
    pack = collate(samples_of(5, 6), layout=LAYOUT, topology=ONE, padding=EIGHT)
    assert pack.routes is not None
    arrays = {**pack.fields, "documents": pack.document_ids, "routes": pack.routes}
    assert {name: len(array) for name, array in arrays.items()} == dict.fromkeys(arrays, 16)
    assert set(pack.fields) == {row.name for row in TOKEN_FIELDS}
    assert {name: tensor.dtype for name, tensor in pack.fields.items()} == {
        row.name: row.dtype for row in TOKEN_FIELDS
    }
    assert pack.context(mode=RouteMode.live).boundaries[-1] == 16
    moved = pack.to(torch.device("cpu"))
    assert {name: len(moved[name]) for name in moved.fields} == {name: 16 for name in pack.fields}


def test_a_pack_that_fills_its_row_is_not_touched_and_padding_twice_changes_nothing() -> None:
    full = collate(samples_of(3, 5), layout=LAYOUT, topology=ONE)
    assert pad_pack(full, padding=EIGHT, layout=LAYOUT, topology=ONE) is full
    pack = collate(samples_of(5, 6), layout=LAYOUT, topology=ONE, padding=EIGHT)
    assert pad_pack(pack, padding=EIGHT, layout=LAYOUT, topology=ONE) is pack
    with pytest.raises(ValueError, match="16 rows was padded before, now to 20"):
        pad_pack(pack, padding=Padding(multiple_of=10), layout=LAYOUT, topology=ONE)


def test_a_field_that_the_table_does_not_know_is_an_error_and_so_is_one_of_another_length() -> None:
    pack = collate(samples_of(5, 6), layout=LAYOUT, topology=ONE)

    def pad(fields: dict[str, torch.Tensor]) -> Pack:
        return pad_pack(replace(pack, fields=fields), padding=EIGHT, layout=LAYOUT, topology=ONE)

    with pytest.raises(ValueError, match=r"fields \['temperatures'\] have no pad rule"):
        pad(pack.fields | {"temperatures": torch.ones(11)})
    with pytest.raises(ValueError, match=r"fields \['advantages'\]"):
        pad({name: tensor for name, tensor in pack.fields.items() if name != "advantages"})
    with pytest.raises(ValueError, match="field advantages has 12 rows, the pack 11"):
        pad(pack.fields | {"advantages": torch.ones(12)})


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    multiple=st.integers(1, 40),
    replay=st.booleans(),
)
def test_boundaries_cover_every_row_and_every_pad_is_a_row_of_a_document_from_its_start(
    lengths: list[int], multiple: int, replay: bool
) -> None:
    samples = samples_of(*lengths)
    layout = LAYOUT if replay else None
    bare = collate(samples, layout=layout, topology=ONE)
    pack = collate(samples, layout=layout, topology=ONE, padding=Padding(multiple_of=multiple))
    rows, real = len(pack), sum(lengths)
    assert rows % multiple == 0
    assert real <= rows < real + multiple
    assert pack.cu_seqlens.tolist() == list(pack.boundaries)
    assert pack.cu_seqlens[0] == 0
    assert pack.cu_seqlens[-1] == rows
    assert (pack.cu_seqlens.diff() > 0).all()
    assert real in pack.boundaries, "no pad belongs to a real document"
    context, before = pack.context(mode=RouteMode.live), bare.context(mode=RouteMode.live)
    assert context.max_seqlen == before.max_seqlen, "pads never make the longest document longer"
    for name, tensor in bare.fields.items():
        assert torch.equal(pack[name][:real], tensor), name
    documents = itertools.cycle(range(len(lengths)))
    for start, stop in itertools.pairwise(pack.boundaries[len(lengths) :]):
        d = next(documents)
        assert stop - start == lengths[d] or stop == rows
        span = slice(bare.boundaries[d], bare.boundaries[d] + stop - start)
        for name in ("tokens", "positions"):
            assert torch.equal(pack[name][start:stop], bare[name][span])
        if replay:
            assert torch.equal(pack.routes[start:stop], bare.routes[span])
    assert not pack["loss_mask"][real:].any()
    assert not pack["response_mask"][real:].any()


@pytest.mark.parametrize(
    ("experts", "top_k", "pads", "ep"), [(8, 2, 12, 2), (8, 2, 12, 1), (64, 6, 66, 8), (64, 6, 66, 4)]
)
@pytest.mark.parametrize("replay", [True, False])
def test_a_pack_made_only_of_placeholders_gets_the_pad_id_and_striped_distinct_routes(
    experts: int, top_k: int, pads: int, ep: int, replay: bool
) -> None:
    layout = ExpertLayout(num_experts=experts, top_k=top_k, routed_layers=(1, 3))
    samples = with_placeholders(samples_of(5, 6, layout=layout, first=40), 0, 1)
    padding = Padding(multiple_of=11 + pads, pad_id=7, experts=layout)
    topology = Topology(ep, ep)
    pack = collate(samples, layout=layout if replay else None, topology=topology, padding=padding)
    assert pack["tokens"][11:].tolist() == [7] * pads
    assert pack["positions"][:17].tolist() == [*range(5), *range(6), *range(5), 0]
    assert pack.context(mode=RouteMode.live).max_seqlen == 6
    rows = pack.routes[11:] if replay else pack.pad_routes
    assert rows is not None
    assert rows.shape == (pads, 2, top_k)
    for layer in range(2):
        assert all(len(set(row)) == top_k for row in rows[:, layer].tolist())
        counts = torch.bincount(rows[:, layer].flatten(), minlength=experts)
        assert counts.max() - counts.min() <= 1
        assert int(counts.max()) == -(-pads * top_k // experts) == (3 if experts == 8 else 7)
        by_rank = counts.reshape(ep, -1).sum(1)
        assert by_rank.max() - by_rank.min() <= 1
    context = pack.context(mode=RouteMode.live)
    assert context.pad_routes is not None
    assert torch.equal(context.pad_routes[3], rows[:, 1])
    moved = pack.to(torch.device("cpu"))
    assert moved.pad_routes is not None
    assert pad_pack(moved, padding=padding, layout=None, topology=topology) is moved


def test_pads_pass_over_documents_with_placeholders_where_others_can_be_repeated() -> None:
    samples = with_placeholders(samples_of(2, 3, 1), 0, 2)
    pack = collate(samples, layout=LAYOUT, topology=ONE, padding=Padding(multiple_of=11, pad_id=30))
    assert pack["tokens"].tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 2, 3]
    assert pack.boundaries == (0, 2, 5, 6, 9, 11)
    assert pack.pad_routes is None
    assert pack.routes is not None
    assert torch.equal(pack.routes[6:], pack.routes[[2, 3, 4, 2, 3]])


def test_a_dense_model_pads_placeholders_without_routes() -> None:
    samples = with_placeholders(samples_of(3, layout=None), 0)
    pack = collate(samples, layout=None, topology=ONE, padding=Padding(multiple_of=8, pad_id=9))
    assert pack["tokens"].tolist() == [0, 1, 2, 9, 9, 9, 9, 9]
    assert pack.boundaries == (0, 3, 6, 8)
    assert (pack.routes, pack.pad_routes) == (None, None)


def decoder_of(dtype: torch.dtype = torch.float32) -> HybridDecoder:
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.init_weights(3)
    return decoder.to(dtype)


def hidden_states(decoder: HybridDecoder, pack: Pack, *, mode: RouteMode) -> list[torch.Tensor]:
    """[T, D] after every block."""
    found: list[torch.Tensor] = []
    hooks = [
        block.register_forward_hook(lambda module, args, output: found.append(output[0].detach()))
        for block in decoder.blocks
    ]
    decoder(pack["tokens"], pack.context(mode=mode))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("mode", [RouteMode.replay, RouteMode.live])
def test_a_repeated_whole_document_has_exactly_the_hidden_states_of_the_original(mode: RouteMode) -> None:
    samples = samples_of(6, 3, 17, 1, 21)
    pack = collate(
        [replace(s, tokens=s.tokens % MODEL.vocab_size) for s in samples],
        layout=LAYOUT,
        topology=ONE,
        padding=Padding(multiple_of=96),
    )
    assert pack.boundaries[5:] == (48, 54, 57, 74, 75, 96), "every document once more"
    with torch.no_grad():
        states = hidden_states(decoder_of(), pack, mode=mode)
    assert len(states) == 4
    for x in states:
        assert (x[48:] - x[:48]).abs().max().item() == 0.0


@pytest.mark.parametrize("mode", [RouteMode.replay, RouteMode.live])
def test_a_repeated_beginning_computes_what_the_original_does(mode: RouteMode) -> None:
    pack = collate(samples_of(6, 3, 17), layout=LAYOUT, topology=ONE, padding=Padding(multiple_of=40))
    assert pack.boundaries == (0, 6, 9, 26, 32, 35, 40)
    with torch.no_grad():
        for x in hidden_states(decoder_of(torch.float64), pack, mode=mode):
            assert (x[26:40] - x[0:14]).abs().max().item() < 1e-12


def test_real_rows_do_not_change_at_all_when_pads_hold_other_tokens() -> None:
    samples = samples_of(5, 9, 2)
    pack = collate(samples, layout=LAYOUT, topology=ONE, padding=Padding(multiple_of=24))
    other = pack.fields | {"tokens": pack["tokens"].clone()}
    other["tokens"][16:] = (other["tokens"][16:] + 11) % MODEL.vocab_size
    decoder = decoder_of()
    found = []
    for one in (pack, replace(pack, fields=other)):
        decoder.zero_grad()
        logits = decoder(one["tokens"], one.context(mode=RouteMode.replay)).logits
        assert logits is not None
        real = torch.arange(24) < 16
        (logits[real].square().sum()).backward()
        gradients = [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
        found.append((logits.detach(), gradients))
    (a, first), (b, second) = found
    assert not torch.equal(a[16:], b[16:]), "other pads must matter to pads"
    assert (a[:16] - b[:16]).abs().max().item() == 0.0
    assert all(g.isfinite().all() for g in first + second)
    assert all(torch.equal(x, y) for x, y in zip(first[1:], second[1:], strict=True))


def test_pads_of_placeholders_are_dispatched_evenly_where_routing_is_live() -> None:
    padding = Padding(multiple_of=5 + 12, pad_id=4, experts=LAYOUT)
    decoder, counts = decoder_of(), []
    samples = samples_of(5, layout=None)
    for one in (samples, with_placeholders(samples, 0)):
        pack = collate(one, layout=None, topology=ONE, padding=padding)
        bare = collate(one, layout=None, topology=ONE)
        total, alone = RouteTrace(), RouteTrace()
        decoder(pack["tokens"], pack.context(mode=RouteMode.record, trace=total))
        decoder(bare["tokens"], bare.context(mode=RouteMode.record, trace=alone))
        assert all(torch.equal(total.ids[layer][:5], alone.ids[layer]) for layer in LAYOUT.routed_layers)
        added = [total.counts[layer] - alone.counts[layer] for layer in LAYOUT.routed_layers]
        counts.append([count.tolist() for count in added])
    repeated, striped = counts
    assert striped == [[3] * 8] * 3
    assert repeated != striped


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=12),
    multiple=st.sampled_from([1, 2, 4, 16, 32]),
    placed=st.sets(st.integers(0, 11)),
    stride=st.sampled_from([1, 2]),
)
def test_predicted_loads_are_those_of_the_routes_that_packs_hold_pads_included(
    lengths: list[int], multiple: int, placed: set[int], stride: int
) -> None:
    topology = Topology(4, 2)
    samples = with_placeholders(samples_of(*lengths[: len(lengths) // 4 * 4]), *placed)
    plan = plan_step([len(s) for s in samples], budget=32, topology=topology)
    padding = Padding(multiple_of=multiple, pad_id=3, experts=LAYOUT)
    loads = collection_loads(samples, layout=LAYOUT, topology=topology, layer_stride=stride)
    pads = Pads(
        samples=samples,
        padding=padding,
        topology=topology,
        loads=loads,
        layout=LAYOUT,
        layer_stride=stride,
    ).work(plan)
    predicted = destination_loads(plan, loads=loads, topology=topology, pads=pads)
    expected = np.zeros_like(predicted)
    tokens = np.zeros((4, plan.packs_per_rank), dtype=np.int64)
    pairs = np.zeros_like(tokens)
    for rank in range(4):
        batch = step_of_rank(
            samples, plan=plan, rank=rank, layout=LAYOUT, topology=topology, budget=32, padding=padding
        )
        for column, pack in enumerate(batch.packs):
            assert pack.routes is not None
            for index, layer in enumerate(range(0, len(LAYOUT.routed_layers), stride)):
                owners = pack.routes[:, layer].flatten() // 4
                expected[column, rank // 2, :, index] += torch.bincount(owners, minlength=2).numpy()
            tokens[rank, column] = len(pack)
            pairs[rank, column] = int(pack.cu_seqlens.long().diff().square().sum())
    assert (predicted == expected).all()
    work = measure(
        plan, lengths=np.array([len(s) for s in samples]), loads=loads, topology=topology, pads=pads
    )
    assert work.token_work == tokens.max(axis=0).sum()
    assert work.pair_work == pairs.max(axis=0).sum()
    assert work.expert_work == expected.max(axis=(1, 2)).sum()
    assert work.max_destination_load == expected.max()


def step_of(samples: list[Sample], *, multiple: int, balance: BalanceConfig, budget: int = 16) -> StepInput:
    topology = Topology(4, 2)
    loads = collection_loads(samples, layout=LAYOUT, topology=topology)
    return StepInput(
        lengths=np.array([len(s) for s in samples]),
        ids=[s.id for s in samples],
        loads=loads,
        budget=budget,
        topology=topology,
        balance=balance,
        pads=Pads.of(
            samples,
            padding=Padding(multiple_of=multiple, experts=LAYOUT),
            topology=topology,
            loads=loads,
            layout=LAYOUT,
            layer_stride=1,
        ),
    )


@pytest.mark.parametrize("kind", [BalanceKind.none, BalanceKind.anneal, BalanceKind.reference])
def test_a_schedule_counts_pads_before_and_after_and_its_bounds_do_not(kind: BalanceKind) -> None:
    samples = samples_of(*(3 + i % 7 for i in range(24)))
    balance = BalanceConfig(kind=kind, seconds=float("inf"), proposals=8)
    bare, padded = (schedule_step(step_of(samples, multiple=m, balance=balance)) for m in (1, 16))
    assert padded.plan == bare.plan, "pads move no sample"
    assert padded.bounds == bare.bounds
    columns = padded.plan.packs_per_rank
    assert padded.after.token_work == 16 * columns > bare.after.token_work
    assert padded.before.token_work == 16 * padded.before.packs_per_rank
    assert padded.after.expert_work is not None
    assert bare.after.expert_work is not None
    assert padded.after.expert_work > bare.after.expert_work


def test_a_cap_on_destinations_that_only_pads_exceed_is_refused_by_name() -> None:
    samples = samples_of(*(3 + i % 7 for i in range(24)))
    free = BalanceConfig(kind=BalanceKind.anneal, proposals=0)
    bare, padded = (schedule_step(step_of(samples, multiple=m, balance=free)).after for m in (1, 16))
    assert bare.max_destination_load is not None
    capped = replace(free, max_destination_load=bare.max_destination_load)
    schedule_step(step_of(samples, multiple=1, balance=capped))
    with pytest.raises(Refusal, match=f"with pads the plan sends {padded.max_destination_load} assignments"):
        schedule_step(step_of(samples, multiple=16, balance=capped))


def test_a_plan_whose_pads_cost_more_than_it_gains_gives_way_to_the_order_of_arrival() -> None:
    step = step_of(samples_of(8, 8, 8, 8, 8, 8, 8, 8), multiple=16, balance=BalanceConfig())
    arrival = schedule_step(step)
    assert arrival.plan.packs_per_rank == 1
    # Two packs of eight tokens take 32 rows, one of sixteen takes 16.
    split = PackPlan(packs=tuple(tuple((i,) for i in rank[0]) for rank in arrival.plan.packs))
    chosen = padded_schedule(replace(arrival, plan=split, start="split"), step=step)
    assert (chosen.plan.packs, chosen.start) == (arrival.plan.packs, "arrival")
    assert chosen.after == chosen.before
    kept = padded_schedule(replace(arrival, start="same"), step=step)
    assert (kept.plan.packs, kept.start) == (arrival.plan.packs, "same")


def test_without_padding_nothing_is_made_for_pads() -> None:
    step = step_of(samples_of(3, 4, 5, 6), multiple=1, balance=BalanceConfig())
    assert step.pads is None


def test_every_row_of_a_step_padded_to_the_budget_has_the_same_shape() -> None:
    samples = samples_of(*(2 + i % 9 for i in range(24)))
    plan = plan_step([len(s) for s in samples], budget=24, topology=Topology(2))
    packs = [
        pack
        for rank in range(2)
        for pack in step_of_rank(
            samples,
            plan=plan,
            rank=rank,
            layout=LAYOUT,
            topology=Topology(2),
            budget=24,
            padding=Padding(multiple_of=24),
        ).packs
    ]
    assert len({len(pack.ids) for pack in packs}) > 1
    assert {tuple(t.shape) for pack in packs for t in pack.fields.values()} == {(24,)}
    assert {tuple(pack.routes.shape) for pack in packs if pack.routes is not None} == {(24, 3, 2)}


def test_documents_of_pads_by_hand() -> None:
    assert pad_documents([2, 3], rows=5, placeholders=[False, False]) == []
    assert pad_documents([2, 3], rows=12, placeholders=[False, False]) == [(0, 2), (1, 3), (0, 2)]
    assert pad_documents([2, 3], rows=10, placeholders=[True, False]) == [(1, 3), (1, 2)]
    assert pad_documents([2, 3], rows=9, placeholders=[True, True]) == [(0, 2), (1, 2)]
    with pytest.raises(AssertionError, match="5 tokens do not fit a row of 4"):
        pad_documents([2, 3], rows=4, placeholders=[False, False])


def test_the_benchmark_counts_what_each_kind_of_pads_sends_to_the_busiest_rank() -> None:
    case = bench_padding.law_case("small", experts=16, ep=4, layers=3, width=8, hidden=4)
    (pack,) = bench_padding.law_packs(case, count=1, budget=16000)
    tokens = sum(len(sample) for sample in pack.samples)
    loads = collection_loads(pack.samples, layout=case.layout, topology=case.topology)
    added = {
        kind: bench_padding.pad_loads(kind, pack=pack, case=case, loads=loads, rows=tokens + 1000)
        for kind in bench_padding.KINDS
    }
    assert {int(load.sum()) for load in added.values()} == {1000 * 3 * 8}
    # Four experts a rank: ids of zeros lie on rank 0, eight consecutive ones on ranks 0 and 1.
    assert added["zeros"].tolist() == [[8000] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert added["arange"].tolist() == [[4000] * 3, [4000] * 3, [0] * 3, [0] * 3]
    assert (added["constant token"] % 1000 == 0).all()
    first = pack.samples[0].routes
    assert first is not None
    assert len(first) > 1000
    own = [[int((first[:1000, layer] // 4 == rank).sum()) for layer in range(3)] for rank in range(4)]
    assert added["ours"].tolist() == own
    results = bench_padding.measure(case, packs=iter([pack]))
    assert results[1.0, "no pads"][1] == int(loads.sum(axis=0).max()) * 4 * (2 * 8 + 3 * 4) * 2
    assert bench_padding.within_limits(results[0.7, "ours"][0])
    assert not bench_padding.within_limits(results[0.7, "zeros"][0])
