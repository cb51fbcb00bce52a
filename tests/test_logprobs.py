"""Log-probs of scored tokens: chunked against whole logits (values and gradients), what that holds in memory,
and what the fused kernel is called with. Shards and tied heads over two ranks stand in test_titan.py.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import context_of, random_tokens, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import SHAPES, Run, config_of, fit, identical, largest_difference, samples_of, write_files

from benchmarks import bench_logprobs as bench
from olmo_rl.config import LogprobKind, LossConfig, PolicyConfig
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.logprobs import (
    Head,
    LogprobRequest,
    Logprobs,
    check_logprobs,
    score_tokens,
    token_entropies,
    token_logprobs,
)
from olmo_rl.types import Refusal

TOKENS, VOCABULARY, WIDTH, CHUNK = 37, 101, 8, 8


def inputs(
    dtype: torch.dtype, *, tokens: int = TOKENS, vocabulary: int = VOCABULARY, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight that want gradients, and targets, all different."""
    generator = torch.Generator().manual_seed(3)
    x = scale * torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return x.to(dtype).requires_grad_(True), weight.to(dtype).requires_grad_(True), targets


def outcome(
    dtype: torch.dtype, request: LogprobRequest, **shape: Any
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Log-probs, entropies and both gradients of a loss that weights every slot differently."""
    x, weight, targets = inputs(dtype, **shape)
    found = score_tokens(x, weight=weight, request=replace(request, targets=targets))
    weights = torch.linspace(-1.0, 2.0, len(x), dtype=found.logprobs.dtype)
    loss = (weights * found.logprobs).sum()
    if found.entropies is not None:
        loss = loss + (0.3 * weights.flip(0) * found.entropies).sum()
    gradients = torch.autograd.grad(loss, [x, weight])
    entropies = None if found.entropies is None else found.entropies.detach()
    return found.logprobs.detach(), entropies, *gradients


def compare(
    dtype: torch.dtype, tolerance: float, *, chunk: int, entropy: bool, temperature: float, **shape: Any
) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    whole = LogprobRequest(targets=none, kind=LogprobKind.full, entropy=entropy, temperature=temperature)
    expected = outcome(dtype, whole, **shape)
    got = outcome(dtype, replace(whole, kind=LogprobKind.chunked, chunk=chunk), **shape)
    assert (got[1] is None) == (expected[1] is None) == (not entropy)
    for a, b in zip(got, expected, strict=True):
        if a is not None:
            assert a.dtype is b.dtype
            assert (a - b).norm() <= tolerance * max(1.0, float(b.norm()))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_values_and_gradients_are_those_of_whole_logits(entropy: bool, temperature: float) -> None:
    compare(torch.float64, 1e-12, chunk=CHUNK, entropy=entropy, temperature=temperature)
    compare(torch.float32, 1e-6, chunk=CHUNK, entropy=entropy, temperature=temperature)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 20),
    vocabulary=st.integers(2, 150),
    chunk=st.integers(1, 25),
    entropy=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_no_chunk_changes_a_value_or_a_gradient(
    tokens: int, vocabulary: int, chunk: int, entropy: bool, scale: float
) -> None:
    compare(
        torch.float64,
        1e-11,
        chunk=chunk,
        entropy=entropy,
        temperature=1.0,
        tokens=tokens,
        vocabulary=vocabulary,
        scale=scale,
    )


def test_chunked_log_probs_are_torchs_cross_entropy_and_numeric_gradients_agree() -> None:
    x, weight, targets = inputs(torch.float64, tokens=5, vocabulary=7)
    request = LogprobRequest(targets=targets, chunk=2, entropy=True)
    found = score_tokens(x, weight=weight, request=request)
    torch.testing.assert_close(
        -found.logprobs, F.linear_cross_entropy(x, weight, targets, reduction="none"), rtol=0, atol=1e-12
    )

    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropies = score_tokens(x, weight=weight, request=request)
        assert entropies is not None
        return logprobs, entropies

    assert torch.autograd.gradcheck(both, (x, weight))


def test_hand_computed_log_probs_and_entropies() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    weight = torch.tensor([[math.log(3.0), 9.0], [0.0, 9.0]])
    request = LogprobRequest(targets=torch.tensor([0, 1]), chunk=1, entropy=True)
    for kind in (LogprobKind.full, LogprobKind.chunked):
        logprobs, entropies = score_tokens(x, weight=weight, request=replace(request, kind=kind))
        assert logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.5)], abs=1e-6)
        expected = [-0.75 * math.log(0.75) - 0.25 * math.log(0.25), math.log(2.0)]
        assert entropies.tolist() == pytest.approx(expected, abs=1e-6)


def test_tokens_of_probability_zero_leave_entropies_and_gradients_finite() -> None:
    x = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    weight = torch.tensor([[300.0], [-300.0], [299.0]], requires_grad=True)
    request = LogprobRequest(targets=torch.tensor([0, 1]), chunk=1, entropy=True)
    logprobs, entropies = score_tokens(x, weight=weight, request=request)
    assert entropies[1].item() == 0.0
    assert logprobs[1].item() == 0.0
    gradients = torch.autograd.grad(logprobs.sum() + entropies.sum(), [x, weight])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_value_that_is_not_finite_stays_in_its_own_slot() -> None:
    x, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        x[5] = float("nan")
    found = score_tokens(x, weight=weight, request=LogprobRequest(targets=targets, chunk=CHUNK))
    assert found.logprobs.isnan().nonzero().flatten().tolist() == [5]


def test_weights_without_gradients_and_scoring_without_a_graph_work() -> None:
    x, weight, targets = inputs(torch.float32)
    request = LogprobRequest(targets=targets, chunk=CHUNK)
    (expected, _) = torch.autograd.grad(
        score_tokens(x, weight=weight, request=request).logprobs.sum(), [x, weight]
    )
    frozen = score_tokens(x, weight=weight.detach(), request=request).logprobs
    assert torch.equal(torch.autograd.grad(frozen.sum(), x)[0], expected)
    with torch.no_grad():
        assert not score_tokens(x, weight=weight, request=request).logprobs.requires_grad
    got = score_tokens(x.detach(), weight=weight, request=request).logprobs
    (only,) = torch.autograd.grad(got.sum(), weight)
    assert only.shape == weight.shape


@pytest.mark.parametrize("kind", [LogprobKind.full, LogprobKind.chunked, LogprobKind.liger])
def test_no_scored_token_gives_zero_gradients_and_not_none(kind: LogprobKind) -> None:
    head = Head(WIDTH, vocab_size=VOCABULARY)
    x = torch.zeros(0, WIDTH, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    found = head(x, LogprobRequest(targets=targets, kind=kind))
    found.logprobs.sum().backward()
    assert found.logprobs.shape == (0,)
    assert torch.equal(head.weight.grad, torch.zeros(VOCABULARY, WIDTH))
    assert x.grad is not None


def test_bfloat16_gradients_are_as_close_to_float32_as_those_of_whole_logits() -> None:
    targets = torch.zeros(0, dtype=torch.int64)
    request = LogprobRequest(targets=targets, chunk=CHUNK, entropy=True)
    exact = outcome(torch.float32, request)
    got = outcome(torch.bfloat16, request)
    whole = outcome(torch.bfloat16, replace(request, kind=LogprobKind.full))
    assert got[0].dtype is got[1].dtype is torch.float32
    assert got[2].dtype is got[3].dtype is torch.bfloat16
    for a, b, c in zip(got, whole, exact, strict=True):
        assert (a.float() - c).norm() <= 1.5 * (b.float() - c).norm() + 1e-3 * c.norm()


class Recorder(TorchDispatchMode):
    """Largest floating tensor that an operation makes: of at least four bytes an element, and of any."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = self.any = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.any = max(self.any, tensor.numel())
                if tensor.element_size() >= 4:
                    self.wide = max(self.wide, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_forward_and_backward_never_hold_more_than_a_chunk_of_logits(
    dtype: torch.dtype, entropy: bool
) -> None:
    sizes = {}
    for kind in (LogprobKind.chunked, LogprobKind.full):
        x, weight, targets = inputs(dtype)
        request = LogprobRequest(targets=targets, kind=kind, chunk=CHUNK, entropy=entropy)
        with Recorder() as recorder:
            found = score_tokens(x, weight=weight, request=request)
            loss = found.logprobs.sum() + (found.entropies.sum() if entropy else 0.0)
            loss.backward()
        sizes[kind] = recorder
    # The weight and its gradient have 101 x 8 elements too, hidden states 37 x 8.
    assert sizes[LogprobKind.chunked].wide <= CHUNK * VOCABULARY
    assert sizes[LogprobKind.chunked].any <= CHUNK * VOCABULARY
    assert sizes[LogprobKind.full].wide == TOKENS * VOCABULARY


def test_only_rows_that_are_scored_reach_the_head() -> None:
    config = tiny_config()
    model = HybridDecoder(config, attention="reference")
    model.init_weights(0)
    tokens = random_tokens(config, tokens=12, seed=1)
    context, rows = context_of([5, 7]), torch.tensor([2, 3, 9])
    seen: list[tuple[int, ...]] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    out = model(tokens, context, rows, LogprobRequest(targets=tokens[rows + 1], chunk=2, entropy=True))
    logits = model(tokens, context, rows).logits
    assert seen == [(3, config.dim)] * 2
    assert out.logits is None
    torch.testing.assert_close(out.logprobs, token_logprobs(logits, targets=tokens[rows + 1]))
    torch.testing.assert_close(out.entropies, token_entropies(logits))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return step(tmp_path_factory.mktemp("whole"), logprobs=LogprobKind.full)


def step(run_dir: Path, **policy: Any) -> Run:
    write_files(run_dir, [samples_of(SHAPES)])
    loss = LossConfig(entropy_coef=0.01)
    return fit(config_of(run_dir, policy=PolicyConfig(**policy), loss=loss), double=True)


def test_an_update_in_chunks_has_the_gradients_and_the_report_of_whole_logits(
    whole: Run, tmp_path: Path
) -> None:
    chunked = step(tmp_path, logprob_chunk=3)
    assert not identical(chunked.recorder.gradients[0], whole.recorder.gradients[0])  # another order of sums
    assert largest_difference(chunked.recorder.gradients[0], whole.recorder.gradients[0]) <= 1e-12
    (a,), (b,) = chunked.rows, whole.rows
    for name in ("loss/policy", "loss/entropy", "loss/mean_entropy", "loss/total", "mismatch/mean"):
        assert a[name] == pytest.approx(b[name], rel=1e-9, abs=1e-12), name
    assert b["loss/entropy"] == pytest.approx(-0.01 * b["loss/mean_entropy"])


def pretend_liger(monkeypatch: pytest.MonkeyPatch, *, version: str) -> list[dict[str, Any]]:
    """A module with the signature of liger-kernel 0.8.5's function, computing in torch; returns its calls."""
    calls: list[dict[str, Any]] = []

    def liger_fused_linear_cross_entropy(
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        chunk_mem_const: int = 1,
    ) -> Tensor:
        calls.append({"bias": bias, "reduction": reduction, "accum_dtype": accum_dtype, "softcap": softcap})
        return F.cross_entropy(F.linear(input, weight), target, reduction=reduction)

    functional = ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = liger_fused_linear_cross_entropy
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    found = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "liger-kernel" else found(name)
    )
    return calls


def test_the_fused_kernel_is_called_for_unreduced_losses_and_sums_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = pretend_liger(monkeypatch, version="0.8.5")
    check_logprobs(LogprobKind.liger)
    targets = torch.zeros(0, dtype=torch.int64)
    request = LogprobRequest(targets=targets, kind=LogprobKind.liger, temperature=0.7)
    got = outcome(torch.float32, request)
    expected = outcome(torch.float32, replace(request, kind=LogprobKind.full))
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    assert calls == [{"bias": None, "reduction": "none", "accum_dtype": torch.float32, "softcap": None}]
    x, weight, targets = inputs(torch.float32)
    with pytest.raises(Refusal, match=r"policy\.logprobs=liger: gives no entropies"):
        score_tokens(x, weight=weight, request=replace(request, targets=targets, entropy=True))


def test_a_fused_kernel_that_is_missing_or_too_old_is_refused_before_weights_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_logprobs(LogprobKind.chunked)
    pretend_liger(monkeypatch, version="0.7.10")
    with pytest.raises(Refusal, match=r"needs liger-kernel 0\.8\.5 or newer, found 0\.7\.10: pip install"):
        check_logprobs(LogprobKind.liger)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Refusal, match=r"found none"):
        check_logprobs(LogprobKind.liger)


def test_the_bench_measures_every_arm_and_says_what_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TOKENS", 32), ("DOCUMENT", 8), ("VOCABULARY", 50), ("WIDTH", 8)):
        monkeypatch.setattr(bench, name, value)
    kinds = (LogprobKind.full, LogprobKind.chunked)
    arms = [bench.Arm(kind=kind, scored=scored) for scored in (False, True) for kind in kinds]
    seconds, differences = bench.measure(arms, chunk=4, device="cpu", rounds=1)
    assert list(seconds) == list(differences) == arms
    assert all(differences[arm] == 0 for arm in arms if arm.kind is LogprobKind.full)
    assert all(0 <= differences[arm] <= 1e-6 for arm in arms)
    assert [len(bench.inputs(arm, device="cpu")[0]) for arm in arms] == [32, 32, 16, 16]
    one_chunk = 4 * 4 * 50 / 2**30
    memory = dict.fromkeys(arms, 2 * one_chunk)
    times = dict(zip(arms, (2.0, 2.6, 1.0, 1.5), strict=True))
    lines = bench.verdicts(times, memory=memory, differences=dict.fromkeys(arms, 3e-7), chunk=4)
    assert [line.partition(":")[0] for line in lines] == ["met", "NOT MET", "met", "met"]
    assert [line.rpartition(": ")[2] for line in lines] == [
        "2, at most 3",
        "1.5, at most 1.4",
        "0.75, at most 1",
        "3e-07, at most 1e-06",
    ]


def test_a_request_is_answered_by_the_head_and_logits_without_one() -> None:
    head = Head(WIDTH, vocab_size=VOCABULARY)
    x, _, targets = inputs(torch.float32)
    assert isinstance(head(x), Tensor)
    assert isinstance(head(x, LogprobRequest(targets=targets)), Logprobs)
