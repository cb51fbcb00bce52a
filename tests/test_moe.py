"""Replay and dispatch of the mixture of experts: hand numbers, then oracles in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from model_cases import context_of, random_routes, tiny_config
from torch import Tensor
from torch.nn import functional as F

from olmo_rl.config import LayerType, ScoreFunction
from olmo_rl.data.packs import RouteMode, RouteTrace
from olmo_rl.policy import titan
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.moe import MixtureOfExperts, route_overlap
from olmo_rl.types import Refusal


def router_of(
    weight: list[list[float]],
    *,
    score_function: ScoreFunction = ScoreFunction.softmax,
    route_norm: bool = True,
    route_scale: float = 1.0,
    top_k: int = 2,
) -> titan.ReplayRouter:
    router = titan.build_router(
        len(weight[0]),
        num_experts=len(weight),
        top_k=top_k,
        score_function=score_function,
        route_norm=route_norm,
        route_scale=route_scale,
    ).double()
    with torch.no_grad():
        router.gate.weight.copy_(torch.tensor(weight))
    return router


ONE = torch.ones(1, 1, dtype=torch.float64)
EIGHTHS = [[math.log(1)], [math.log(2)], [math.log(5)]]  # softmax: 1/8, 2/8, 5/8


def test_replayed_gates_are_current_scores_at_the_replayed_ids_normalised_then_scaled() -> None:
    ids = torch.tensor([[0, 1]])
    routed = router_of(EIGHTHS, route_scale=2.0)(ONE, ids)
    torch.testing.assert_close(routed.scores, torch.tensor([[1 / 8, 2 / 8, 5 / 8]], dtype=torch.float64))
    torch.testing.assert_close(routed.gates, torch.tensor([[2 / 3, 4 / 3]], dtype=torch.float64))
    plain = router_of(EIGHTHS, route_norm=False)(ONE, ids)
    torch.testing.assert_close(plain.gates, torch.tensor([[1 / 8, 2 / 8]], dtype=torch.float64))
    swapped = router_of(EIGHTHS, route_norm=False)(ONE, torch.tensor([[2, 0]]))
    torch.testing.assert_close(swapped.gates, torch.tensor([[5 / 8, 1 / 8]], dtype=torch.float64))


def test_gates_of_sigmoid_routers_are_scores_plus_the_released_constant() -> None:
    routed = router_of([[0.0], [2.0], [-2.0]], score_function=ScoreFunction.sigmoid)(
        ONE, torch.tensor([[0, 2]])
    )
    scores = [1 / 2 + 1e-7, 1 / (1 + math.exp(2)) + 1e-7]
    want = torch.tensor([[score / sum(scores) for score in scores]], dtype=torch.float64)
    torch.testing.assert_close(routed.gates, want, rtol=1e-12, atol=0)


def test_saturated_sigmoid_gates_are_equal_and_softmax_gates_are_not() -> None:
    weight = [[-40.0], [-50.0], [-60.0]]  # sigmoid: 4e-18 and less, beside 1e-7
    routed = router_of(weight, score_function=ScoreFunction.sigmoid)(ONE)
    torch.testing.assert_close(routed.gates, torch.full((1, 2), 0.5, dtype=torch.float64))
    gates = router_of(weight)(ONE).gates.sort(descending=True).values
    want = torch.tensor([[1 / (1 + math.exp(-10)), 1 / (1 + math.exp(10))]], dtype=torch.float64)
    torch.testing.assert_close(gates, want)


def test_live_routing_takes_the_best_scores_and_replay_overrules_it() -> None:
    router = router_of(EIGHTHS)
    assert sorted(router(ONE).ids[0].tolist()) == [1, 2]
    assert router(ONE, torch.tensor([[0, 1]])).ids.tolist() == [[0, 1]]


def test_gradients_reach_the_gate_through_replayed_ids() -> None:
    router = router_of(EIGHTHS)
    router(ONE, torch.tensor([[0, 1]])).gates[0, 0].backward()
    # gate 0 = s0 / (s0 + s1) = sigmoid(l0 - l1) = 1/3, so its derivative is 2/9 by l0, -2/9 by l1, 0 by l2
    expected = torch.tensor([[2 / 9], [-2 / 9], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(router.gate.weight.grad, expected)


def test_overlap_is_the_share_of_replayed_ids_among_live_ones_row_by_row() -> None:
    ids, live = torch.tensor([[0, 1], [2, 3], [5, 4]]), torch.tensor([[1, 0], [3, 7], [6, 7]])
    assert route_overlap(ids, live=live).tolist() == [1, 0.5, 0]


def moe_layer(seed: int, *, latent: bool = True, norm: bool = True, shared: bool = True) -> MixtureOfExperts:
    config = dataclasses.replace(
        tiny_config(), latent_dim=16 if latent else None, latent_norm=norm, shared_hidden=16 if shared else 0
    )
    layer = MixtureOfExperts(config, layer=1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer


def oracle(layer: MixtureOfExperts, x: Tensor, ids: Tensor) -> Tensor:
    """Token by token, expert by expert, from the definition."""
    scores = torch.softmax(x @ layer.router.gate.weight.t(), dim=-1)
    experts = layer.routed_experts.inner_experts
    rows = []
    for t in range(len(x)):
        token = x[t] if layer.latent_down is None else layer.latent_down.weight @ x[t]
        total = sum(scores[t, e] for e in ids[t].tolist())
        mixed = torch.zeros_like(token)
        for e in ids[t].tolist():
            hidden = F.silu(experts.w1_EFD[e] @ token) * (experts.w3_EFD[e] @ token)
            mixed = mixed + scores[t, e] / total * (experts.w2_EDF[e] @ hidden)
        if layer.latent_norm is not None:
            norm = layer.latent_norm
            mixed = mixed / torch.sqrt(mixed.square().mean() + norm.eps) * norm.weight
        rows.append(mixed if layer.latent_up is None else layer.latent_up.weight @ mixed)
    out = torch.stack(rows)
    return out if layer.shared_experts is None else out + layer.shared_experts(x)


@pytest.mark.parametrize(
    ("latent", "norm", "shared"), [(True, True, True), (True, False, False), (False, False, True)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_the_layer_and_its_gradients_equal_the_definition(
    latent: bool, norm: bool, shared: bool, dtype: torch.dtype, tolerance: float
) -> None:
    layer = moe_layer(1, latent=latent, norm=norm, shared=shared).to(dtype)
    generator = torch.Generator().manual_seed(2)
    lengths = [5, 1, 7]
    x = torch.randn(13, 32, generator=generator, dtype=torch.float64)
    weight = torch.randn(13, 32, generator=generator, dtype=torch.float64)
    routes = random_routes(tiny_config(), tokens=13, seed=3)
    out, _ = layer(x.to(dtype), context_of(lengths, mode=RouteMode.replay, routes=routes))
    (out * weight.to(dtype)).sum().backward()

    exact = moe_layer(1, latent=latent, norm=norm, shared=shared).double()
    expected = oracle(exact, x, routes[1])
    (expected * weight).sum().backward()
    assert relative(out, expected) < tolerance
    for (name, got), want in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert relative(got.grad, want.grad) < tolerance, name


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_recorded_ids_replayed_give_the_same_output_and_full_overlap() -> None:
    layer = moe_layer(4)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(5))
    trace = RouteTrace()
    live, _ = layer(x, context_of([4, 5], mode=RouteMode.record, trace=trace))
    again = RouteTrace()
    replayed, _ = layer(x, context_of([4, 5], mode=RouteMode.replay, routes=trace.ids, trace=again))
    assert torch.equal(live, replayed)
    assert again.overlap[1].item() == 7  # every row that an engine could have chosen: tails are left out
    assert not again.ids
    assert trace.ids[1].dtype is torch.int64


def test_the_trace_counts_every_dispatched_row_and_sums_overlap_over_recorded_rows_only() -> None:
    layer = moe_layer(4)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(6))
    recorded = RouteTrace()
    layer(x, context_of([5, 3], mode=RouteMode.record, trace=recorded))
    ids = recorded.ids[1].clone()
    absent = [next(e for e in range(8) if e not in row) for row in ids.tolist()]
    ids[0, 0] = absent[0]  # one of eight recorded choices; pads get ids that live routing would not choose
    for row in range(5, 8):
        ids[row] = torch.tensor([e for e in range(8) if e not in recorded.ids[1][row].tolist()][:2])
    trace = RouteTrace()
    layer(x, context_of([5, 3], mode=RouteMode.replay, routes={1: ids}, trace=trace, pads=3))
    assert trace.overlap[1].item() == 3.5
    assert trace.counts[1].tolist() == torch.bincount(ids.view(-1), minlength=8).tolist()
    assert int(trace.counts[1].sum()) == 16


def test_a_duplicated_id_in_one_row_leaves_other_tokens_alone() -> None:
    layer = moe_layer(10).double()
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    ids = random_routes(tiny_config(), tokens=7, seed=12)[1]
    broken = ids.clone()
    broken[3, 1] = broken[3, 0]
    clean, _ = layer(x, context_of([7], mode=RouteMode.replay, routes={1: ids}))
    dirty, _ = layer(x, context_of([7], mode=RouteMode.replay, routes={1: broken}))
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(dirty[others], clean[others], rtol=1e-12, atol=1e-12)


def test_experts_without_rows_get_zero_gradients_and_not_none() -> None:
    for dtype in (torch.float32, torch.float64):
        layer = moe_layer(13).to(dtype)
        x = torch.randn(5, 32, dtype=dtype, generator=torch.Generator().manual_seed(14))
        routes = {1: torch.tensor([[0, 3]]).expand(5, 2).contiguous()}
        out, _ = layer(x, context_of([5], mode=RouteMode.replay, routes=routes))
        out.square().sum().backward()
        for parameter in layer.routed_experts.inner_experts.parameters():
            busy = parameter.grad.flatten(1).abs().sum(1) > 0
            assert busy.tolist() == [True, False, False, True, False, False, False, False]


def test_a_layer_missing_from_the_routes_is_refused_with_its_number() -> None:
    layer = moe_layer(15)
    routes = {2: torch.zeros(4, 2, dtype=torch.int64), 3: torch.zeros(4, 2, dtype=torch.int64)}
    with pytest.raises(Refusal, match=r"layer 1 .* name 2 layers \[2, 3\]"):
        layer(torch.zeros(4, 32), context_of([4], mode=RouteMode.replay, routes=routes))


def test_routes_of_another_shape_are_refused_with_both_shapes() -> None:
    layer = moe_layer(16)
    for shape in ((3, 2), (4, 3)):
        routes = {1: torch.zeros(shape, dtype=torch.int64)}
        with pytest.raises(Refusal, match=rf"layer 1 .*\({shape[0]}, {shape[1]}\).*\(4, 2\)"):
            layer(torch.zeros(4, 32), context_of([4], mode=RouteMode.replay, routes=routes))


def test_widths_that_grouped_products_cannot_take_are_refused_by_key() -> None:
    for change, key in (
        ({"latent_dim": 12}, "model.latent_dim"),
        ({"expert_hidden": 20}, "model.expert_hidden"),
    ):
        with pytest.raises(Refusal, match=f"{key}.* multiple of 8"):
            MixtureOfExperts(dataclasses.replace(tiny_config(), **change), layer=1)


def test_routes_bind_to_global_layer_ids_when_the_first_layer_is_dense() -> None:
    config = dataclasses.replace(
        tiny_config(), layer_types=[LayerType.full_attention] * 3, dense_layers=[0], top_k=1
    )
    model = HybridDecoder(config, attention="reference")
    model.init_weights(0)
    routes = {layer: torch.full((6, 1), layer) for layer in (1, 2)}
    trace = RouteTrace()
    model(torch.arange(6), context_of([2, 4], mode=RouteMode.replay, routes=routes, trace=trace))
    assert {layer: counts.tolist() for layer, counts in trace.counts.items()} == {
        1: [0, 6, 0, 0, 0, 0, 0, 0],
        2: [0, 0, 6, 0, 0, 0, 0, 0],
    }


def test_routes_for_another_set_of_layers_are_refused_with_both_counts() -> None:
    model = HybridDecoder(tiny_config(), attention="reference")
    routes = random_routes(tiny_config(), tokens=4, seed=17)
    for wrong in ({1: routes[1], 2: routes[2]}, {0: routes[1]} | routes):
        with pytest.raises(Refusal, match=rf"cover {len(wrong)} layers .* the model routes 3 layers"):
            model(torch.arange(4), context_of([4], mode=RouteMode.replay, routes=wrong))
