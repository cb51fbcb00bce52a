"""Kimi Delta Attention: the chunked form against the recurrence, isolation, strong decay, decoding."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from olmo_rl.config import ModelConfig
from olmo_rl.data.packs import PackContext
from olmo_rl.planning.forest import Forest
from olmo_rl.policy import kernels
from olmo_rl.policy.delta_rule import CHUNK, chunk_table, kda_chunked, kda_recurrent, kda_step
from olmo_rl.policy.kda import DecayGate, KimiDeltaAttention, short_convolution, tap_table
from olmo_rl.types import Refusal

LENGTHS = (1, 2, 15, 16, 17, 40, 3, 64, 33)


def bounds(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))


def context_of(lengths: Sequence[int]) -> PackContext:
    return PackContext(
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor(bounds(lengths), dtype=torch.int32),
        boundaries=bounds(lengths),
        max_seqlen=max(lengths),
        real_tokens=sum(lengths),
    )


def chunked(q: Tensor, *, boundaries: Sequence[int], **inputs: Tensor) -> Tensor:
    """The delta rule over documents with these boundaries."""
    return kda_chunked(q, **inputs, table=chunk_table(boundaries, device=q.device))


def convolved(x: Tensor, *, weight: Tensor, boundaries: Sequence[int]) -> Tensor:
    """The convolution of documents with these boundaries."""
    table = tap_table(Forest.roots(boundaries), reach=weight.shape[1] - 1, device=x.device)
    return short_convolution(x, weight=weight, table=table)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draw(
    tokens: int, *, decay: float, seed: int = 0, beta: float = 1.0, dtype: torch.dtype = torch.float64
) -> dict:
    """Inputs of the delta rule: unit q and k, log decays in [-decay, 0], beta below `beta`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, 2, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    inputs = {
        "q": F.normalize(q, dim=-1),
        "k": F.normalize(k, dim=-1),
        "v": v[..., :3],
        "g": -decay * torch.rand(tokens, 2, 5, generator=generator, dtype=torch.float64),
        "beta": beta * torch.rand(tokens, 2, generator=generator, dtype=torch.float64),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}


def gradients(out: Tensor, inputs: dict[str, Tensor]) -> list[Tensor]:
    weight = normal(*out.shape, seed=99).to(out.dtype)
    return list(torch.autograd.grad(out, list(inputs.values()), weight))


def layer_of(**changes: object) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(ModelConfig(**{"dim": 24, "kda_heads": 2, "kda_head_dim": 8, **changes}))


def test_the_recurrence_by_hand() -> None:
    e1, e2 = torch.eye(2, dtype=torch.float64)
    k = torch.stack([e1, e2, e1])[:, None]
    v = torch.tensor([[8.0], [5.0], [2.0]], dtype=torch.float64)[:, None]
    g = torch.full((3, 1, 2), math.log(0.5), dtype=torch.float64)
    beta = torch.tensor([[1.0], [1.0], [0.5]], dtype=torch.float64)
    q = torch.stack([e1, e1, e1])[:, None] * math.sqrt(2)
    # Written 8; decayed to 4; decayed to 2 and moved half way to 2. The last document starts from nothing:
    # half of 2.
    for boundaries, expected in (((0, 3), [8.0, 4.0, 2.0]), ((0, 2, 3), [8.0, 4.0, 1.0])):
        slow, _ = kda_recurrent(q, k=k, v=v, g=g, beta=beta, boundaries=boundaries)
        fast = chunked(q, k=k, v=v, g=g, beta=beta, boundaries=boundaries)
        assert torch.allclose(slow.flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-14)
        assert torch.allclose(fast.flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("decay", [0.01, 1.0, 5.5, 60.0])
def test_chunked_equals_recurrent_in_values_and_all_gradients(decay: float, beta: float) -> None:
    inputs = draw(sum(LENGTHS), decay=decay, beta=beta)
    slow, _ = kda_recurrent(**inputs, boundaries=bounds(LENGTHS))
    fast = chunked(**inputs, boundaries=bounds(LENGTHS))
    assert (slow - fast).abs().max() < 1e-10
    for name, a, b in zip(inputs, gradients(slow, inputs), gradients(fast, inputs), strict=True):
        assert (a - b).abs().max() < 1e-10 * (1 + a.abs().max()), name


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6), seed=st.integers(0, 999))
def test_any_lengths_give_the_recurrence(lengths: list[int], seed: int) -> None:
    inputs = draw(sum(lengths), decay=2.0, seed=seed)
    slow, _ = kda_recurrent(**inputs, boundaries=bounds(lengths))
    fast = chunked(**inputs, boundaries=bounds(lengths))
    assert (slow - fast).abs().max() < 1e-10
    for a, b in zip(gradients(slow, inputs), gradients(fast, inputs), strict=True):
        assert (a - b).abs().max() < 1e-10 * (1 + a.abs().max())


def test_gradients_agree_with_finite_differences() -> None:
    inputs = draw(CHUNK + 7, decay=1.0)
    rank = list(inputs)

    def run(*values: Tensor) -> Tensor:
        return chunked(**dict(zip(rank, values, strict=True)), boundaries=(0, 4, CHUNK + 7))

    assert torch.autograd.gradcheck(run, tuple(inputs.values()), fast_mode=True)
    x, weight = normal(9, 4, seed=1).requires_grad_(), normal(4, 4, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: convolved(x, weight=w, boundaries=(0, 1, 3, 9)), (x, weight), fast_mode=True
    )


def test_chunked_equals_the_naive_form_of_flash_linear_attention() -> None:
    naive = pytest.importorskip(
        "fla.ops.kda.naive", reason="flash-linear-attention is not installed (extra: fla)"
    )
    inputs = draw(sum(LENGTHS), decay=2.0, dtype=torch.float32)
    ours = chunked(**inputs, boundaries=bounds(LENGTHS))
    parts = []
    for start, stop in pairwise(bounds(LENGTHS)):
        part = {name: x[None, start:stop] for name, x in inputs.items()}
        parts.append(naive.naive_recurrent_kda(**part)[0][0])
    assert (ours - torch.cat(parts)).abs().max() < 1e-5


@pytest.mark.parametrize("decay", [5.5, 200.0])
def test_strong_decay_stays_finite_and_exact_in_float32(decay: float) -> None:
    exact = draw(100, decay=0.0)
    exact["g"] = torch.full_like(exact["g"], -decay).requires_grad_()
    single = {name: x.detach().float().requires_grad_() for name, x in exact.items()}
    slow, _ = kda_recurrent(**exact, boundaries=(0, 100))
    fast = chunked(**single, boundaries=(0, 100))
    assert (slow - fast).abs().max() < 1e-6
    for a, b in zip(gradients(slow, exact), gradients(fast, single), strict=True):
        assert b.isfinite().all()
        assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("changed", [0, 3, 4, 7, len(LENGTHS) - 1])
def test_changing_one_document_moves_no_other_row_by_a_single_bit(changed: int) -> None:
    layer, context = layer_of(), context_of(LENGTHS)
    x = normal(sum(LENGTHS), 24, seed=1, dtype=torch.float32)
    other = x.clone()
    own = slice(context.boundaries[changed], context.boundaries[changed + 1])
    other[own] = normal(LENGTHS[changed], 24, seed=2, dtype=torch.float32)
    difference = (layer(x, context) - layer(other, context)).abs()
    assert difference[own].amax(1).min() > 0
    difference[own] = 0
    assert difference.max() == 0.0


def test_recomputation_gives_the_same_gradients_to_the_bit() -> None:
    layer, context = layer_of(), context_of(LENGTHS)
    x = normal(sum(LENGTHS), 24, seed=1, dtype=torch.float32).requires_grad_()
    inputs = {"x": x, **dict(layer.named_parameters())}
    plain = gradients(layer(x, context), inputs)
    again = gradients(checkpoint(layer, x, context, use_reentrant=False), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_the_gradient_of_one_documents_output_reaches_no_other_input() -> None:
    layer, context = layer_of(), context_of(LENGTHS)
    x = normal(sum(LENGTHS), 24, seed=1, dtype=torch.float32).requires_grad_()
    own = slice(context.boundaries[4], context.boundaries[5])
    (gradient,) = torch.autograd.grad(layer(x, context)[own].square().sum(), x)
    assert gradient[own].abs().amax(1).min() > 0
    gradient[own] = 0
    assert gradient.abs().max() == 0.0


def test_with_boundaries_withheld_from_the_convolution_exactly_its_reach_leaks() -> None:
    x = normal(12, 6, seed=1)
    other = x.clone()
    other[:5] += 1
    weight = normal(6, 4, seed=2)
    kept, leaky = (
        (convolved(x, weight=weight, boundaries=b) - convolved(other, weight=weight, boundaries=b))
        .abs()
        .amax(1)[5:]
        for b in ((0, 5, 12), (0, 12))
    )
    assert kept.max() == 0
    assert leaky[:3].min() > 0.05
    assert leaky[3:].max() == 0


def test_with_boundaries_withheld_from_the_delta_rule_every_later_row_moves() -> None:
    inputs = draw(40, decay=0.05)
    changed = dict(inputs, v=torch.cat([inputs["v"][:5] + 1, inputs["v"][5:]]))
    kept, leaky = (
        (chunked(**inputs, boundaries=b) - chunked(**changed, boundaries=b)).abs().amax((1, 2))[5:]
        for b in ((0, 5, 40), (0, 40))
    )
    assert kept.max() == 0
    assert leaky.min() > 1e-4


def test_a_nan_stays_in_its_document() -> None:
    layer, context = layer_of(), context_of([20, 18, 5])
    x = normal(43, 24, seed=1, dtype=torch.float32)
    x[21] = math.nan
    out = layer(x, context)
    assert out[:20].isfinite().all()
    assert out[38:].isfinite().all()
    assert out[21:38].isnan().all()


def test_the_convolution_by_hand() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [10.0], [20.0]])
    weight = torch.tensor([[1000.0, 100.0, 10.0, 1.0]])
    out = convolved(x, weight=weight, boundaries=(0, 3, 4, 5))
    assert out.flatten().tolist() == [1.0, 12.0, 123.0, 10.0, 20.0]


def test_a_packed_row_equals_its_documents_on_their_own() -> None:
    layer = layer_of().double()
    x = normal(sum(LENGTHS), 24, seed=1)
    packed = layer(x, context_of(LENGTHS))
    alone = torch.cat([layer(part, context_of([len(part)])) for part in x.split(LENGTHS)])
    assert (packed - alone).abs().max() < 1e-12
    names, parameters = zip(*layer.named_parameters(), strict=True)
    inputs = dict(zip(names, parameters, strict=True))
    for name, a, b in zip(names, gradients(packed, inputs), gradients(alone, inputs), strict=True):
        assert a.abs().max() > 0, name
        assert (a - b).abs().max() <= 1e-10 * (1 + b.abs().max()), name


@pytest.mark.parametrize(
    "changes", [{}, {"kda_negative_eigenvalues": True, "conv_size": 2}, {"conv_size": 1}]
)
def test_decode_steps_equal_the_packed_forward(changes: dict[str, object]) -> None:
    layer = layer_of(**changes).double()
    x = normal(3, 37, 24, seed=1)
    packed = layer(x.flatten(0, 1), context_of([37] * 3)).view(3, 37, 24)
    state = layer.init_state(3, length=37, device=torch.device("cpu"), dtype=torch.float64)
    steps = [layer.step(x[:, t], position=t, state=state) for t in range(37)]
    assert (packed - torch.stack(steps, 1)).abs().max() < 1e-12


def test_the_step_ends_in_the_recurrences_state() -> None:
    inputs = {name: x.detach() for name, x in draw(9, decay=1.0).items()}
    out, final = kda_recurrent(**inputs, boundaries=(0, 9))
    state = torch.zeros(1, 2, 5, 3, dtype=torch.float64)
    steps = [kda_step(**{name: x[t : t + 1] for name, x in inputs.items()}, state=state) for t in range(9)]
    assert (torch.cat(steps) - out).abs().max() < 1e-14
    assert (state - final).abs().max() < 1e-14


def test_the_chunk_table_places_every_token_once_and_leads_with_the_longest_documents() -> None:
    table = chunk_table(bounds([3, 40, 16, 17]), device=torch.device("cpu"))
    assert table.counts == (4, 2, 1)
    slots = table.slots.tolist()
    assert len(set(slots)) == 76
    # First chunks: 40, 17, 3, 16 tokens long documents; then the second of 40 and of 17; then the third of
    # 40.
    assert slots[:3] == [32, 33, 34]
    assert slots[3:43] == [*range(16), *range(64, 80), *range(96, 104)]
    assert slots[43:59] == list(range(48, 64))
    assert slots[59:] == [*range(16, 32), 80]


def test_decay_parameters_are_named_float32_and_decays_are_never_positive() -> None:
    layer = layer_of()
    kept = [module for module in layer.modules() if getattr(module, "keep_float32", False)]
    assert kept == [layer.decay]
    assert {name for name, _ in layer.decay.named_parameters()} == {"A_log", "dt_bias"}
    g = DecayGate(2, head_dim=8)(normal(50, 16, seed=1, dtype=torch.float32) * 10)
    assert g.shape == (50, 2, 8)
    assert g.max() <= 0


def test_boundaries_reach_the_kernels_of_flash_linear_attention_by_keyword(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = pytest.importorskip("fla.ops.kda", reason="flash-linear-attention is not installed (extra: fla)")
    convolutions = importlib.import_module("fla.modules.causal_conv1d")
    context, calls = context_of(LENGTHS), []
    total = sum(LENGTHS)

    def recorder(function: Callable[..., Any], result: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def record(**named: Any) -> tuple[Tensor, None]:
            calls.append(signature.bind(**named).arguments)
            return named[result] * 2, None

        return record

    monkeypatch.setattr(ops, "chunk_kda", recorder(ops.chunk_kda, "v"))
    monkeypatch.setattr(convolutions, "causal_conv1d", recorder(convolutions.causal_conv1d, "x"))
    inputs = draw(total, decay=1.0)
    v = inputs["v"].to(torch.bfloat16)
    out = kernels.fla_delta_rule(**(inputs | {"v": v}), context=context)
    x, weight = normal(total, 6, seed=1), normal(6, 4, seed=2)
    mixed = kernels.fla_convolution(x, weight=weight, context=context)
    assert torch.equal(out, v * 2)
    assert torch.equal(mixed, x * 2)
    delta, convolution = calls
    for call in calls:
        assert call["cu_seqlens"] is context.cu_seqlens
        assert call["cu_seqlens_cpu"].tolist() == list(context.boundaries)
    assert delta["q"].shape == (1, total, 2, 5)
    assert {delta[name].dtype for name in "qkv"} == {torch.bfloat16}
    assert delta["g"].dtype is inputs["g"].dtype
    assert set(delta) == {"q", "k", "v", "g", "beta", "cu_seqlens", "cu_seqlens_cpu"}
    assert convolution["x"].shape == (1, total, 6)
    assert convolution["weight"] is weight


def test_a_backend_that_is_unknown_or_does_not_fit_is_refused_by_name() -> None:
    config = ModelConfig(dim=24, kda_heads=2, kda_head_dim=5)
    with pytest.raises(
        Refusal, match=r"policy.linear_attention=fast is unknown: choose one of reference, fla"
    ):
        KimiDeltaAttention(config, backend="fast")
    layer = KimiDeltaAttention(config, backend="fla")
    message = r"linear_attention=fla does not take heads of 5 channels in float32 on cpu: set .*=reference"
    with pytest.raises(Refusal, match=message):
        layer(normal(7, 24, seed=1, dtype=torch.float32), context_of([4, 3]))


def test_bfloat16_weights_keep_a_float32_core() -> None:
    layer = layer_of()
    x = normal(sum(LENGTHS), 24, seed=1, dtype=torch.float32)
    exact = layer(x, context_of(LENGTHS))
    layer.to(torch.bfloat16)
    layer.decay.to(torch.float32)
    out = layer(x.to(torch.bfloat16), context_of(LENGTHS))
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() < 0.05 * exact.norm()
    state = layer.init_state(1, length=9, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert state["recurrent"].dtype == torch.float32
    assert layer.step(x[:1].to(torch.bfloat16), position=0, state=state).dtype == torch.bfloat16
