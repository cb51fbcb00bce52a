"""Rows that samples share: the forest by hand, and its loss and gradients against samples one by one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import context_of_forest, tiny_config
from torch import Tensor
from training_cases import config_of, fit, largest_difference, samples_of, write_files

from olmo_rl.config import (
    AuxGrouping,
    CountSource,
    LayerType,
    LossConfig,
    LossKind,
    ModelConfig,
    PackingConfig,
    PackingKind,
    Recompute,
    Reduction,
)
from olmo_rl.data.collate import collate, count_normalisers
from olmo_rl.data.packs import Pack, PackContext, RouteMode, RouteTrace
from olmo_rl.planning.forest import Forest
from olmo_rl.planning.loads import tail_routes
from olmo_rl.planning.schedule import shared_loads
from olmo_rl.planning.sharing import find_sharing, grow
from olmo_rl.policy import attention, delta_rule, kda, loss, moe
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.logprobs import LogprobRequest
from olmo_rl.policy.loss import ScoredSlots, policy_loss
from olmo_rl.policy.moe import RouterTotals, routed_length, router_losses
from olmo_rl.training.strategy import spread
from olmo_rl.types import Padding, Sample, Topology

MODEL = tiny_config()
LAYOUT = MODEL.expert_layout
assert LAYOUT is not None
ONE = Topology(1)


def sample_of(
    number: int,
    tokens: Sequence[int],
    *,
    routes_seed: int = 0,
    mask: Sequence[bool] | None = None,
    changed_routes: int | None = None,
) -> Sample:
    """Routes follow the tokens read so far, as a deterministic engine's would, unless those of one row are
    changed.
    """
    length, rows = len(tokens), []
    for t in range(length - 1):
        rng = np.random.default_rng([routes_seed, *tokens[: t + 1], 7 if t == changed_routes else 0])
        shape = (len(LAYOUT.routed_layers), LAYOUT.num_experts)
        rows.append(rng.random(shape).argsort(-1)[:, : LAYOUT.top_k])
    rng = np.random.default_rng(number)
    chosen = rng.random(length) < 0.6 if mask is None else np.array(mask)
    return Sample(
        id=f"s{number}",
        group="g",
        tokens=np.array(tokens, dtype=np.int32),
        response_mask=chosen,
        behavior_logprobs=rng.normal(-3, 0.3, length).astype(np.float32),
        ref_logprobs=rng.normal(-3, 0.3, length).astype(np.float32),
        reward=1.0,
        advantage=float(rng.normal()),
        routes=np.array(rows, dtype=np.int16).reshape(length - 1, len(LAYOUT.routed_layers), LAYOUT.top_k),
    )


# A prompt of two, a branch of one row, a sample that ends inside another, an equal one, a root of its own.
SIX = ([5, 6, 7, 8, 9], [5, 6, 7], [5, 6, 3, 4], [5, 6, 7], [5, 6, 7, 8, 1], [2, 6])


def six() -> list[Sample]:
    return [sample_of(i, tokens) for i, tokens in enumerate(SIX)]


def decoder_of(config: ModelConfig = MODEL, *, dtype: torch.dtype = torch.float64) -> HybridDecoder:
    decoder = HybridDecoder(config, attention="reference")
    decoder.init_weights(3)
    return decoder.to(dtype)


GRPO = LossConfig(router_z_weight=0.02, router_aux_weight=0.3, router_aux_grouping=AuxGrouping.sequence)
GSPO = LossConfig(
    kind=LossKind.gspo,
    reduction=Reduction.response,
    entropy_coef=0.01,
    kl_coef=0.1,
    router_aux_weight=0.3,
    router_aux_grouping=AuxGrouping.sequence,
    router_aux_reduction=Reduction.response,
    router_z_weight=0.02,
    router_z_reduction=Reduction.response,
    router_count_source=CountSource.current,
)


def loss_of(
    decoder: HybridDecoder,
    packs: Sequence[Pack],
    *,
    samples: Sequence[Sample],
    config: LossConfig,
    mode: RouteMode = RouteMode.replay,
) -> Tensor:
    """The step's loss, summed over its packs."""
    lengths = [routed_length(len(sample), mode=mode) for sample in samples]
    totals = RouterTotals(rows=sum(lengths), documents=sum(count > 0 for count in lengths))
    dtype = next(decoder.parameters()).dtype
    total = torch.zeros((), dtype=dtype)
    for pack in packs:
        slots = loss.scored_slots(pack)
        request = LogprobRequest(targets=pack["tokens"][slots.heads], entropy=config.entropy_coef != 0)
        context = pack.context(mode=mode, trace=RouteTrace())
        out = spread(decoder(pack.row_tokens, context, slots.rows, request), slots=slots)
        assert out.logprobs is not None
        assert out.router is not None
        behavior = pack["behavior_logprobs"][slots.slots].to(dtype)
        result = policy_loss(
            out.logprobs,
            anchor_logprobs=behavior + 0.1,
            behavior_logprobs=behavior,
            ref_logprobs=pack["ref_logprobs"][slots.slots].to(dtype),
            advantages=pack["advantages"][slots.slots],
            slots=slots,
            config=config,
            normalisers=count_normalisers(samples),
            entropies=out.entropies,
        )
        balance, z = router_losses(out.router, config=config, totals=totals)
        total = total + result.loss + config.router_aux_weight * balance + config.router_z_weight * z
    return total


def gradients(decoder: HybridDecoder, total: Tensor) -> dict[str, Tensor]:
    decoder.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The worst tensor, relative to its largest element."""
    assert ours.keys() == theirs.keys()
    scale = max(1e-9, *(float(g.abs().max()) for g in theirs.values()))
    return max(
        float((ours[name] - g).abs().max() / g.abs().max().clamp(min=1e-3 * scale))
        for name, g in theirs.items()
    )


def tree_of(samples: Sequence[Sample], *, replay: bool = True, multiple: int = 1) -> Pack:
    padding = Padding(multiple_of=multiple)
    return collate(samples, layout=LAYOUT if replay else None, topology=ONE, padding=padding, share=True)


def one_by_one(samples: Sequence[Sample], *, replay: bool = True) -> list[Pack]:
    return [collate([sample], layout=LAYOUT if replay else None, topology=ONE) for sample in samples]


def test_the_forest_of_six_samples_is_the_one_drawn_by_hand() -> None:
    pack = tree_of(six())
    assert pack.shared is not None
    forest = pack.shared.forest
    # [2 6] | [5 6] -> [3 4] and [7] -> [8] -> [1] and [9]
    assert forest.lengths == (2, 2, 2, 1, 1, 1, 1)
    assert forest.parents == (-1, -1, 1, 1, 3, 4, 4)
    assert forest.leaves == (6, 3, 2, 3, 5, 0)
    assert forest.prefix == (0, 0, 2, 2, 3, 4, 4)
    assert forest.rows_before(5).tolist() == [2, 3, 6, 7]
    assert forest.rows_before(5, limit=3).tolist() == [3, 6, 7]
    assert pack.row_tokens.tolist() == [2, 6, 5, 6, 3, 4, 7, 8, 1, 9]
    assert pack.context(mode=RouteMode.replay).positions.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 4]
    assert (len(pack), pack.real_tokens, pack.num_rows) == (22, 22, 10)
    assert pack.shared.row_of.tolist() == [
        2,
        3,
        6,
        7,
        9,
        *[2, 3, 6],
        *[2, 3, 4, 5],
        *[2, 3, 6],
        2,
        3,
        6,
        7,
        8,
        0,
        1,
    ]
    assert (pack.recorded_rows, pack.unshared_routes) == (6, 0)


def test_a_missing_route_takes_what_was_recorded_else_the_first_samples_synthetic_one() -> None:
    samples = six()
    pack = tree_of(samples)
    assert pack.routes is not None
    assert samples[0].routes is not None
    assert np.array_equal(pack.routes[6], samples[0].routes[2])  # samples 1 and 3 end there
    ending = tree_of([samples[3], samples[1]])
    assert ending.routes is not None
    assert np.array_equal(ending.routes[-1], tail_routes("s3", layout=LAYOUT, topology=ONE))


def test_rows_that_no_sample_shares_because_of_the_first_route_are_counted_too() -> None:
    samples = [sample_of(0, [1, 2, 3, 4]), sample_of(1, [1, 2, 3, 4], changed_routes=0)]
    pack = tree_of(samples)
    assert pack.shared is None
    assert pack.unshared_routes == 4


def test_equal_tokens_with_other_routes_are_not_shared_and_are_counted() -> None:
    samples = [sample_of(0, [1, 2, 3, 4]), sample_of(1, [1, 2, 3, 5], changed_routes=1)]
    pack = tree_of(samples)
    assert pack.shared is not None
    assert pack.shared.forest.lengths == (1, 3, 3)
    assert pack.unshared_routes == 2
    reordered = dataclasses.replace(samples[0], id="s2", routes=samples[0].routes[:, :, ::-1].copy())
    both = tree_of([samples[0], reordered])
    assert both.num_rows == 4  # sets of ids, not lists


def test_samples_with_placeholders_share_nothing() -> None:
    samples = [dataclasses.replace(sample, has_placeholders=i == 1) for i, sample in enumerate(six())]
    forest, _ = grow(find_sharing(samples, replayed=True))
    assert forest.parents[forest.leaves[1]] == -1
    assert forest.lengths[forest.leaves[1]] == 3


def test_a_pack_in_which_nothing_is_equal_is_the_flat_pack() -> None:
    samples = [sample_of(i, [i, 1, 2]) for i in (4, 2, 3)]
    pack = tree_of(samples)
    assert pack.shared is None
    assert pack["tokens"].tolist() == collate(samples, layout=LAYOUT, topology=ONE)["tokens"].tolist()


@pytest.mark.parametrize("config", [GRPO, GSPO], ids=["grpo", "gspo"])
@pytest.mark.parametrize("replay", [True, False])
def test_six_samples_give_the_loss_and_the_gradients_of_one_by_one(config: LossConfig, replay: bool) -> None:
    samples, decoder = six(), decoder_of()
    mode = RouteMode.replay if replay else RouteMode.live
    found = [
        (found, gradients(decoder, found))
        for packs in ([tree_of(samples, replay=replay)], one_by_one(samples, replay=replay))
        for found in [loss_of(decoder, packs, samples=samples, config=config, mode=mode)]
    ]
    (ours, our_gradients), (theirs, their_gradients) = found
    assert abs(float(ours.detach() - theirs.detach())) < 1e-12 * max(1.0, abs(float(theirs.detach())))
    assert distance(our_gradients, their_gradients) < 1e-10


def test_pads_repeat_beginnings_of_paths_and_change_no_gradient() -> None:
    samples, decoder = six(), decoder_of()
    bare, padded = tree_of(samples), tree_of(samples, multiple=18)
    assert padded.shared is not None
    assert (padded.num_rows, padded.real_rows, padded.real_tokens) == (18, 10, 22)
    assert padded.row_tokens.tolist() == [*bare.row_tokens.tolist(), *SIX[0], *SIX[1]]
    context = padded.context(mode=RouteMode.replay)
    assert context.positions[10:].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert context.forest.parents[-2:] == (-1, -1)
    assert padded.routes is not None
    assert np.array_equal(padded.routes[10:14], samples[0].routes[:4])
    assert padded.recorded_rows == bare.recorded_rows
    ours, theirs = (
        gradients(decoder, loss_of(decoder, [pack], samples=samples, config=GRPO)) for pack in (padded, bare)
    )
    assert distance(ours, theirs) < 1e-10


def test_loads_of_shared_rows_are_those_of_the_routes_that_the_pack_holds() -> None:
    topology = Topology(4, 4)
    for multiple in (1, 18):
        pack = collate(
            six(), layout=LAYOUT, topology=topology, padding=Padding(multiple_of=multiple), share=True
        )
        assert pack.routes is not None
        found = shared_loads(six(), layout=LAYOUT, topology=topology, padding=Padding(multiple_of=multiple))
        owners = pack.routes // (LAYOUT.num_experts // 4)
        for destination in range(4):
            assert found[destination].tolist() == (owners == destination).sum((0, 2)).tolist()


@st.composite
def groups_of_samples(draw: st.DrawFn) -> list[Sample]:
    """Samples that grow out of each other: two tokens, so that beginnings are equal by chance, up to five
    levels, branches of one row, equal samples, samples that end inside others, masks anywhere.
    """
    stems: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 5))):
        stem = draw(st.sampled_from(stems))
        stems.append(stem + draw(st.lists(st.integers(0, 1), min_size=1, max_size=20)))
    chosen = draw(st.lists(st.sampled_from(stems[1:]), min_size=2, max_size=7))
    samples = []
    for i, stem in enumerate(chosen):
        tokens = stem + draw(st.lists(st.integers(0, 2), max_size=3))
        changed = draw(st.none() | st.integers(0, len(tokens)))
        samples.append(sample_of(i + draw(st.integers(0, 3)) * 10, tokens, changed_routes=changed))
    return [dataclasses.replace(sample, id=f"{i}") for i, sample in enumerate(samples)]


@settings(max_examples=12, deadline=None)
@given(groups_of_samples())
def test_random_forests_give_the_gradients_of_one_by_one(samples: list[Sample]) -> None:
    pack = tree_of(samples)
    sharing = find_sharing(samples, replayed=True)
    assert pack.num_rows == sharing.rows(0, len(samples))
    decoder = decoder_of()
    ours, theirs = (
        loss_of(decoder, packs, samples=samples, config=GRPO) for packs in ([pack], one_by_one(samples))
    )
    assert abs(float(ours.detach() - theirs.detach())) < 1e-11
    assert distance(gradients(decoder, ours), gradients(decoder, theirs)) < 1e-10


@pytest.mark.parametrize("recompute", [Recompute.full, Recompute.selective])
def test_recomputation_changes_no_bit(recompute: Recompute) -> None:
    samples, decoder = six(), decoder_of(dtype=torch.float32)
    plain = gradients(decoder, loss_of(decoder, [tree_of(samples)], samples=samples, config=GSPO))
    decoder.recompute = recompute
    again = gradients(decoder, loss_of(decoder, [tree_of(samples)], samples=samples, config=GSPO))
    assert all(torch.equal(again[name], plain[name]) for name in plain)


@pytest.mark.parametrize("layer_type", list(LayerType))
def test_a_branch_changes_nothing_off_its_path_in_any_mixer(layer_type: LayerType) -> None:
    """Rows of a branch replaced, or not a number: other rows keep every bit."""
    config = dataclasses.replace(MODEL, layer_types=[layer_type], dense_layers=[0])
    mixer = decoder_of(config, dtype=torch.float32).layers["0"].mixer
    forest = Forest(lengths=(20, 17, 1, 5, 3, 4), parents=(-1, 0, 1, 1, 0, -1), leaves=(2, 3, 4, 5))
    context = context_of_forest(forest)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(50, config.dim, generator=generator)
    with torch.no_grad():
        before = mixer(x, context)
        for s in range(1, 6):
            span = slice(forest.boundaries[s], forest.boundaries[s + 1])
            off = torch.tensor([s not in forest.path(t) for t in range(6) for _ in range(forest.lengths[t])])
            for value in (torch.randn(forest.lengths[s], config.dim, generator=generator), float("nan")):
                changed = x.clone()
                changed[span] = value
                after = mixer(changed, context)
                assert torch.equal(after[off], before[off])
                assert not torch.equal(after[~off], before[~off])
    leaf = x.clone().requires_grad_()
    for s in range(6):
        (gradient,) = torch.autograd.grad(
            mixer(leaf, context)[forest.boundaries[s] : forest.boundaries[s + 1]].square().sum(), leaf
        )
        on_path = torch.tensor([t in forest.path(s) for t in range(6) for _ in range(forest.lengths[t])])
        assert gradient[~on_path].abs().max() == 0.0
        assert (gradient[forest.boundaries[s]].abs() > 0).any()


def mutated(module: ModuleType, old: str, new: str) -> Any:
    """The module once more with one change to its text."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, old
    copy = ModuleType(module.__name__)
    exec(compile(text.replace(old, new), module.__file__ or "", "exec"), copy.__dict__)
    return copy


def restarting_positions(pack: Pack, *, mode: RouteMode, trace: RouteTrace | None = None) -> PackContext:
    context = CONTEXT(pack, mode=mode, trace=trace)
    restarted = torch.cat([torch.arange(length) for length in context.forest.lengths])
    return dataclasses.replace(context, positions=restarted)


def without_first_tokens(pack: Pack) -> ScoredSlots:
    slots = SLOTS(pack)
    if pack.shared is None:
        return slots
    starts = torch.tensor(pack.shared.forest.boundaries)
    kept = ~torch.isin(pack.rows_of(slots.slots), starts)
    tokens, documents = slots.slots[kept], slots.documents[kept]
    rows = pack.rows_of(tokens - 1)
    return dataclasses.replace(
        slots, slots=tokens, heads=tokens, head_of=None, rows=rows, documents=documents
    )


CONTEXT, SLOTS = Pack.context, loss.scored_slots
OWN_PARENT = (
    "[np.arange(*forest.boundaries[p : p + 2])[-reach:] if p >= 0 else np.zeros(0, dtype=np.int64) "
    "for p in forest.parents]"
)
WINDOW_OF_ROWS = (
    "past = prefix if window is None else np.array([sum(r > e - window for r in forest.rows_before(s)) "
    "for s, e in enumerate(forest.boundaries[:-1])])"
)
# Faults of shared rows: an owner, the name of what is replaced there, and by what.
FAULTS: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "taps from the parent alone": (
        kda,
        "tap_table",
        lambda: (
            mutated(
                kda, "[forest.rows_before(s, limit=reach) for s in range(len(lengths))]", OWN_PARENT
            ).tap_table
        ),
    ),
    "causality aligned at the first keys": (
        attention,
        "_causal",
        lambda: mutated(attention, "torch.arange(keys - length, keys,", "torch.arange(length,")._causal,
    ),
    "the window counts rows": (
        attention,
        "_batches",
        lambda: (
            mutated(
                attention,
                "past = prefix if window is None else np.minimum(prefix, window - 1)",
                WINDOW_OF_ROWS,
            )._batches
        ),
    ),
    "the gradient of one child's state": (
        kda,
        "kda_chunked",
        lambda: mutated(delta_rule, "d_state.index_add_(0,", "d_state.index_copy_(0,").kda_chunked,
    ),
    "positions restart in a child": (Pack, "context", lambda: restarting_positions),
    "a token is predicted by the row before its own": (
        loss,
        "scored_slots",
        lambda: mutated(loss, "pack.rows_of(heads - 1)", "pack.rows_of(heads) - 1").scored_slots,
    ),
    "a shorter sample counts the row that only others go on from": (
        moe,
        "routed_rows",
        lambda: mutated(moe, "numbers[:-1] if s in cut else numbers", "numbers").routed_rows,
    ),
    "the first token of a child is not scored": (loss, "scored_slots", lambda: without_first_tokens),
}


@pytest.fixture(scope="module")
def true_gradients() -> dict[str, Tensor]:
    samples, decoder = six(), decoder_of()
    return gradients(decoder, loss_of(decoder, one_by_one(samples), samples=samples, config=GRPO))


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_every_known_fault_of_shared_rows_changes_the_gradients(
    fault: str | None, true_gradients: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is not None:
        owner, name, make = FAULTS[fault]
        monkeypatch.setattr(owner, name, make())
    samples, decoder = six(), decoder_of()
    found = gradients(decoder, loss_of(decoder, [tree_of(samples)], samples=samples, config=GRPO))
    assert (distance(found, true_gradients) < 1e-10) == (fault is None)
    assert fault is None or distance(found, true_gradients) > 1e-4


def sharing_samples() -> list[Sample]:
    """Four groups of two: the two prompts of a group and their routes are equal."""
    samples = samples_of(((5, 4), (5, 2), (3, 3), (3, 6), (7, 2), (7, 2), (4, 5), (4, 1)), seed=2)
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        prompt = int((~first.response_mask).sum())
        assert first.routes is not None
        assert second.routes is not None
        second.tokens[:prompt], second.routes[:prompt] = first.tokens[:prompt], first.routes[:prompt]
    return samples


def test_an_update_on_trees_is_the_update_on_flat_packs_and_reports_its_rows(tmp_path: Path) -> None:
    samples = sharing_samples()
    runs = {}
    for kind, budget in ((PackingKind.consecutive, 64), (PackingKind.trees, 64), (PackingKind.trees, 12)):
        directory = tmp_path / f"{kind.value}-{budget}"
        write_files(directory, [samples])
        packing = PackingConfig(kind=kind, max_tokens=budget, pad_to_budget=budget == 12)
        runs[kind, budget] = fit(config_of(directory, packing=packing, loss=GSPO), double=True)
    flat = runs.pop((PackingKind.consecutive, 64))
    for (_, budget), run in runs.items():
        assert largest_difference(run.recorder.gradients[0], flat.recorder.gradients[0]) < 1e-9
        row, event = run.rows[0], run.events("packing")[0]
        assert row["loss/total"] == pytest.approx(flat.rows[0]["loss/total"], rel=1e-9)
        assert row["replay/overlap"] > 0
        assert run.events("replay")[0]["mismatches"] == 0
        rows = row["packing/rows"] if budget == 64 else 12 * event["packs"]
        assert (event["real_tokens"], event["padded_tokens"]) == (63, rows)
        assert event["max_pack_tokens"] <= budget
        assert event["fill"] == row["packing/rows"] / (budget * event["packs"])
        assert row["packing/fill"] == pytest.approx(event["fill"])
        assert row["packing/sharing"] == pytest.approx(63 / row["packing/rows"])
        assert row["packing/unshared_routes"] == 0
        ratio = row["throughput/real_tokens_per_second"] / row["throughput/rows_per_second"]
        assert ratio == pytest.approx(row["packing/sharing"])
    whole, cut = (run.rows[0] for run in runs.values())
    assert (whole["packing/packs"], whole["packing/rows"]) == (1, 63 - 5 - 3 - 7 - 4)
    assert cut["packing/packs"] > 2
    assert "throughput/rows_per_second" not in flat.rows[0]
