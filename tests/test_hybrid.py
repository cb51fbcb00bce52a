"""The hybrid decoder: shapes, initial weights, decoding, packing parity, recomputation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_cases import context_of, random_routes, random_tokens, tiny_config
from torch import Tensor

from olmo_rl.config import LayerType, LossConfig, ModelConfig, Recompute
from olmo_rl.data.packs import RouteMode, RouteTrace
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.moe import RouterTotals, router_losses

LENGTHS = [17, 1, 5, 33, 2, 3]
TOKENS = sum(LENGTHS)


def build(config: ModelConfig, *, seed: int = 0, attention: str = "reference") -> HybridDecoder:
    model = HybridDecoder(config, attention=attention)
    model.init_weights(seed)
    return model


def gradients(model: HybridDecoder) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_logits_and_router_losses_have_their_shapes_and_only_asked_rows_are_scored() -> None:
    model = build(tiny_config())
    tokens = random_tokens(tiny_config(), tokens=TOKENS, seed=1)
    context = context_of(LENGTHS)
    out = model(tokens, context)
    assert out.logits.shape == (TOKENS, 31)
    assert out.router is not None
    assert out.router.scores.shape == (3, len(LENGTHS), 8)
    assert out.router.z.shape == (3, len(LENGTHS))
    rows = torch.tensor([3, 0, 40])
    torch.testing.assert_close(model(tokens, context, rows=rows).logits, out.logits[rows])


def test_no_rows_still_run_the_head_so_that_its_gradient_exists() -> None:
    model = build(tiny_config())
    out = model(torch.arange(4), context_of([4]), rows=torch.zeros(0, dtype=torch.int64))
    assert out.logits.shape == (0, 31)
    out.logits.sum().backward()
    assert torch.equal(model.lm_head.weight.grad, torch.zeros(31, 32))
    assert torch.equal(model.tok_embeddings.weight.grad, torch.zeros(31, 32))


def test_a_dense_model_has_no_router_losses_and_no_routes() -> None:
    model = build(dataclasses.replace(tiny_config(), num_experts=0))
    out = model(torch.arange(4), context_of([4]))
    assert out.router is None
    state = model.init_state(2, length=1, device=torch.device("cpu"), dtype=torch.float32)
    assert model.step(torch.tensor([1, 2]), position=0, state=state)[1] is None


def test_initial_weights_depend_on_the_seed_and_the_name_alone() -> None:
    first, again, other = build(tiny_config()), build(tiny_config()), build(tiny_config(), seed=1)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert name.endswith(("norm.weight", "bias")) or not torch.equal(a, c), name
        assert torch.isfinite(a).all(), name
    changed = build(dataclasses.replace(tiny_config(), dense_hidden=64, vocab_size=40))
    torch.testing.assert_close(
        changed.layers["3"].moe.latent_up.weight, first.layers["3"].moe.latent_up.weight
    )


def test_weights_that_write_to_the_residual_stream_start_smaller() -> None:
    config = dataclasses.replace(tiny_config(), dim=128, shared_hidden=64, dense_hidden=256)
    model = build(config)
    plain = model.layers["0"].feed_forward.w1.weight.std().item()
    assert plain == pytest.approx(0.15, rel=0.05)
    for weight in (
        model.layers["0"].feed_forward.w2.weight,
        model.layers["0"].mixer.wo.weight,
        model.layers["2"].mixer.wo.weight,
        model.layers["1"].moe.latent_up.weight,
        model.layers["1"].moe.shared_experts.w2.weight,
        model.layers["1"].moe.routed_experts.inner_experts.w2_EDF,
    ):
        assert weight.std().item() == pytest.approx(0.15 / 8**0.5, rel=0.1)


def test_tied_embeddings_are_one_parameter_with_gradients_from_both_ends() -> None:
    config = dataclasses.replace(tiny_config(), tie_embeddings=True)
    model = build(config)
    assert model.lm_head.weight is model.tok_embeddings.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    untied = build(tiny_config())
    assert torch.equal(model.tok_embeddings.weight, untied.tok_embeddings.weight)
    model(torch.tensor([5, 5, 6]), context_of([3])).logits.square().sum().backward()
    assert (model.tok_embeddings.weight.grad.abs().sum(1) > 0).all()


def test_decoding_token_by_token_equals_the_forward_and_reports_the_same_routes() -> None:
    config = tiny_config()
    model = build(config, seed=3).double()
    batch, length = 5, 37  # longer than a KDA chunk and the window
    tokens = random_tokens(config, tokens=batch * length, seed=4).view(batch, length)
    trace = RouteTrace()
    context = context_of([length] * batch, mode=RouteMode.record, trace=trace)
    logits = model(tokens.reshape(-1), context).logits.view(batch, length, -1)
    recorded = torch.stack([trace.ids[i] for i in config.routed_layers], dim=1).view(batch, length, 3, 2)

    state = model.init_state(batch, length=length, device=torch.device("cpu"), dtype=torch.float64)
    for position in range(length):
        step_logits, routes = model.step(tokens[:, position], position=position, state=state)
        torch.testing.assert_close(step_logits, logits[:, position], rtol=1e-10, atol=1e-10)
        assert torch.equal(routes.sort(-1).values, recorded[:, position].sort(-1).values)


def weighted_loss(model: HybridDecoder, documents: list[int], *, dtype: torch.dtype) -> Tensor:
    """Sum over the given documents of `LENGTHS`, as one row, of weighted logits: additive over documents."""
    config = tiny_config()
    tokens = random_tokens(config, tokens=TOKENS, seed=5)
    weight = torch.randn(TOKENS, 31, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    routes = random_routes(config, tokens=TOKENS, seed=7)
    starts = [sum(LENGTHS[:d]) for d in range(len(LENGTHS))]
    rows = torch.cat([torch.arange(starts[d], starts[d] + LENGTHS[d]) for d in documents])
    context = context_of(
        [LENGTHS[d] for d in documents],
        mode=RouteMode.replay,
        routes={layer: ids[rows] for layer, ids in routes.items()},
    )
    out = model(tokens[rows], context)
    return (torch.log_softmax(out.logits, -1) * weight[rows].to(dtype)).sum() / TOKENS


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_packed_and_unpacked_losses_and_gradients_agree(dtype: torch.dtype, tolerance: float) -> None:
    plans = ([[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[4, 0], [3, 1, 5, 2]])
    losses, found = [], []
    for plan in plans:
        # one document a row also runs the attention without document boundaries
        model = build(tiny_config(), attention="torch" if len(plan) == 6 else "reference").to(dtype)
        total = 0.0
        for documents in plan:
            loss = weighted_loss(model, documents, dtype=dtype)
            loss.backward()
            total += loss.item()
        losses.append(total)
        found.append(gradients(model))
    for loss, grads in zip(losses[1:], found[1:], strict=True):
        assert abs(loss - losses[0]) <= tolerance * abs(losses[0])
        for name, want in found[0].items():
            assert (grads[name] - want).norm() <= tolerance * want.norm(), name


@pytest.mark.parametrize("layer_type", list(LayerType))
def test_recomputation_changes_no_gradient_over_several_packs_and_after_a_scoring_pass(
    layer_type: LayerType,
) -> None:
    config = dataclasses.replace(tiny_config(), layer_types=[layer_type] * 3)
    packs = [[9, 20], [3, 1, 30], [2]]
    found = {}
    for recompute in Recompute:
        model = build(config)
        model.recompute = recompute
        traces = [RouteTrace() for _ in packs]
        losses = []
        for score_first in (True, False):
            for seed, lengths in enumerate(packs):
                tokens = random_tokens(config, tokens=sum(lengths), seed=seed)
                routes = random_routes(config, tokens=sum(lengths), seed=seed)
                trace = traces[seed]
                context = context_of(lengths, mode=RouteMode.replay, routes=routes, trace=trace)
                if score_first:
                    with torch.no_grad():
                        model(tokens, context)
                    continue
                out = model(tokens, context)
                totals = RouterTotals(rows=sum(lengths), documents=len(lengths))
                balance, z = router_losses(out.router, config=LossConfig(), totals=totals)
                loss = out.logits.square().mean() + balance + 0.1 * z
                loss.backward()
                losses.append(loss.item())
        counts = [{layer: n.tolist() for layer, n in trace.counts.items()} for trace in traces]
        found[recompute] = (losses, gradients(model), counts)
    for recompute in (Recompute.full, Recompute.selective):
        assert found[recompute][0] == found[Recompute.none][0]
        assert found[recompute][2] == found[Recompute.none][2]
        for name, want in found[Recompute.none][1].items():
            assert torch.equal(found[recompute][1][name], want), (recompute, name)
    assert sum(found[Recompute.full][2][1][1]) == 34 * 2


def test_recomputation_keeps_fewer_activations() -> None:
    config = dataclasses.replace(tiny_config(), expert_hidden=256)
    kept = {}
    for recompute in Recompute:
        model = build(config)
        model.recompute = recompute
        sizes: list[int] = []
        own = {parameter.data_ptr() for parameter in model.parameters()}

        def pack(tensor: Tensor, sizes: list[int] = sizes, own: set[int] = own) -> Tensor:
            if tensor.data_ptr() not in own:
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(random_tokens(config, tokens=60, seed=0), context_of([20, 40]))
        kept[recompute] = sum(sizes)
    assert kept[Recompute.full] < 0.5 * kept[Recompute.selective] < 0.45 * kept[Recompute.none]
