"""Document-aware attention: values, gradients, isolation, decoding, refusals."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from olmo_rl.backends import (
    ATTENTION_BACKENDS,
    Backend,
    attention_of,
    backends_of,
    importable,
    linear_of,
    missing,
)
from olmo_rl.config import (
    Attention,
    Config,
    Dtype,
    LayerType,
    ModelConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    QkNorm,
    TrainerConfig,
)
from olmo_rl.data.packs import PackContext
from olmo_rl.policy import kernels
from olmo_rl.policy.attention import DocumentAttention, document_attention, rotate, rotation
from olmo_rl.types import Refusal

LENGTHS = (5, 1, 2, 17, 9, 5, 3, 1)  # two lengths twice: short documents share calls


def context_of(lengths: Sequence[int]) -> PackContext:
    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    return PackContext(
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        boundaries=tuple(boundaries),
        max_seqlen=max(lengths),
        real_tokens=boundaries[-1],
    )


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def spelled_out(q: Tensor, *, k: Tensor, v: Tensor, boundaries: Sequence[int], window: int | None) -> Tensor:
    """Softmax over the allowed past, one query token and head at a time."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for start, stop in zip(boundaries, boundaries[1:], strict=False):
        for t in range(start, stop):
            first = start if window is None else max(start, t + 1 - window)
            heads = []
            for h in range(q.shape[1]):
                scores = k[first : t + 1, h // group] @ q[t, h] / math.sqrt(q.shape[2])
                heads.append(torch.softmax(scores, 0) @ v[first : t + 1, h // group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def layer_of(
    *, window: int | None = None, backend: str = "reference", **changes: object
) -> DocumentAttention:
    torch.manual_seed(0)
    config = ModelConfig(**{"dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **changes})
    return DocumentAttention(config, window=window, backend=backend)


def test_without_queries_attention_is_the_mean_of_the_documents_own_past() -> None:
    v = torch.tensor([1.0, 3.0, 10.0, 20.0, 60.0])[:, None, None]
    zeros = torch.zeros(5, 1, 1)
    context = context_of([2, 3])
    full = document_attention(zeros, k=zeros, v=v, context=context, backend="reference", window=None)
    near = document_attention(zeros, k=zeros, v=v, context=context, backend="reference", window=2)
    assert full.flatten().tolist() == [1.0, 2.0, 10.0, 15.0, 30.0]
    assert near.flatten().tolist() == [1.0, 2.0, 10.0, 15.0, 40.0]


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_reference_equals_softmax_spelled_out_in_values_and_gradients(
    window: int | None, kv_heads: int
) -> None:
    total = sum(LENGTHS)
    q, k, v = (
        normal(total, h, 6, seed=h + i).requires_grad_() for i, h in enumerate((4, kv_heads, kv_heads))
    )
    context = context_of(LENGTHS)
    ours = document_attention(q, k=k, v=v, context=context, backend="reference", window=window)
    theirs = spelled_out(q, k=k, v=v, boundaries=context.boundaries, window=window)
    weight = normal(*ours.shape, seed=9)
    assert (ours - theirs).abs().max() < 1e-12
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), weight),
        torch.autograd.grad(theirs, (q, k, v), weight),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_document_moves_no_other_row_by_a_single_bit(changed: int, window: int | None) -> None:
    layer, context = layer_of(window=window), context_of(LENGTHS)
    x = normal(sum(LENGTHS), 24, seed=1, dtype=torch.float32)
    other = x.clone()
    own = slice(context.boundaries[changed], context.boundaries[changed + 1])
    other[own] = normal(LENGTHS[changed], 24, seed=2, dtype=torch.float32)
    difference = (layer(x, context) - layer(other, context)).abs()
    assert difference[own].min(dim=0).values.max() > 0
    difference[own] = 0
    assert difference.max() == 0.0


def test_with_boundaries_withheld_every_later_row_moves() -> None:
    layer = layer_of()
    total = sum(LENGTHS)
    whole = PackContext(
        positions=context_of(LENGTHS).positions,  # restarted positions are no isolation
        cu_seqlens=torch.tensor([0, total], dtype=torch.int32),
        boundaries=(0, total),
        max_seqlen=total,
        real_tokens=total,
    )
    x = normal(total, 24, seed=1, dtype=torch.float32)
    other = x.clone()
    other[: LENGTHS[0]] = normal(LENGTHS[0], 24, seed=2, dtype=torch.float32)
    moved = (layer(x, whole) - layer(other, whole)).abs().amax(1)[LENGTHS[0] :]
    assert moved.min() > 1e-5


def test_a_nan_stays_in_its_document() -> None:
    layer, context = layer_of(), context_of([3, 4, 5])
    x = normal(12, 24, seed=1, dtype=torch.float32)
    x[4] = math.nan
    out = layer(x, context)
    assert out[:3].isfinite().all()
    assert out[7:].isfinite().all()
    assert out[4:7].isnan().all()


@pytest.mark.parametrize("window", [None, 4])
def test_a_packed_row_equals_its_documents_on_their_own(window: int | None) -> None:
    layer = layer_of(window=window).double()
    x = normal(sum(LENGTHS), 24, seed=1)
    packed = layer(x, context_of(LENGTHS))
    alone = torch.cat([layer(part, context_of([len(part)])) for part in x.split(LENGTHS)])
    assert (packed - alone).abs().max() < 1e-12
    weight = normal(*x.shape, seed=3)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    for name, a, b in zip(
        names,
        torch.autograd.grad(packed, parameters, weight),
        torch.autograd.grad(alone, parameters, weight),
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-12 * (1 + b.abs().max()), name


def test_torch_backend_equals_reference_on_a_single_document() -> None:
    for window in (None, 4):
        x = normal(11, 24, seed=1)
        ours = layer_of(window=window).double()(x, context_of([11]))
        plain = layer_of(window=window, backend="torch").double()(x, context_of([11]))
        assert (ours - plain).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("window", "changes"),
    [
        (None, {}),
        (4, {}),
        (None, {"rope_theta": None, "qk_norm": QkNorm.none}),
        (3, {"num_kv_heads": 4}),
    ],
)
def test_decode_steps_equal_the_packed_forward(window: int | None, changes: dict[str, object]) -> None:
    layer = layer_of(window=window, **changes).double()
    x = normal(3, 9, 24, seed=1)
    packed = layer(x.flatten(0, 1), context_of([9, 9, 9])).view(3, 9, 24)
    state = layer.init_state(3, length=9, device=torch.device("cpu"), dtype=torch.float64)
    steps = [layer.step(x[:, t], position=t, state=state) for t in range(9)]
    assert (packed - torch.stack(steps, 1)).abs().max() < 1e-12


def test_rotation_leaves_scores_to_the_distance_alone_and_keeps_lengths() -> None:
    q, k = normal(1, 1, 8, seed=1), normal(1, 1, 8, seed=2)

    def turned(x: Tensor, position: int) -> Tensor:
        return rotate(x, rotation(torch.tensor([position]), head_dim=8, theta=100.0, dtype=x.dtype))

    def score(a: int, b: int) -> Tensor:
        return (turned(q, a) * turned(k, b)).sum()

    assert (score(7, 4) - score(103, 100)).abs() < 1e-12
    assert (score(7, 4) - score(7, 5)).abs() > 1e-3
    assert (turned(q, 5).norm() - q.norm()).abs() < 1e-12
    assert torch.equal(turned(q, 0), q)


def test_the_layer_takes_positions_from_the_context() -> None:
    layer, context = layer_of(), context_of([4, 3])
    x = normal(7, 24, seed=1, dtype=torch.float32)
    stretched = PackContext(
        positions=context.positions * 3,
        cu_seqlens=context.cu_seqlens,
        boundaries=context.boundaries,
        max_seqlen=4,
        real_tokens=7,
    )
    assert (layer(x, context) - layer(x, stretched)).abs().max() > 1e-4
    assert (layer(x, context)[4:] - layer(x[4:], context_of([3]))).abs().max() < 1e-6


def test_torch_backend_refuses_more_than_one_document_naming_both_keys() -> None:
    layer = layer_of(backend="torch")
    with pytest.raises(Refusal, match=r"policy\.attention=torch.*2 documents.*packing\.kind"):
        layer(normal(7, 24, seed=1, dtype=torch.float32), context_of([4, 3]))


def test_backends_that_are_unknown_or_do_not_fit_are_refused_by_name_and_what_to_change() -> None:
    x = normal(3, 1, 8, seed=1)
    with pytest.raises(
        Refusal, match=r"policy\.attention=fastest is unknown: choose .*reference, torch, varlen"
    ):
        document_attention(x, k=x, v=x, context=context_of([3]), backend="fastest", window=None)
    for name in set(ATTENTION_BACKENDS) - {"torch", "reference"}:
        with pytest.raises(
            Refusal, match=rf"={name} does not take heads of 8 .*float64 on cpu: set .*=reference"
        ):
            document_attention(x, k=x, v=x, context=context_of([3]), backend=name, window=None)


# The signatures of `flash_attn_varlen_func` in the releases that the table of backends names.
def signature_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    return None


def signature_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    return None


def signature_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, return_lse=False,
):  # fmt: skip
    return None


KERNELS = [
    ("flash_2", "flash_attn.flash_attn_interface", signature_2, -1),
    ("flash_3", "flash_attn_interface", signature_3, -1),
    ("flash_4", "flash_attn.cute", signature_4, None),
]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("name", "module", "signature", "unbounded"), KERNELS)
def test_boundaries_reach_the_slots_of_every_flash_attention_by_keyword(
    name: str,
    module: str,
    signature: Callable[..., None],
    unbounded: int | None,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = context_of(LENGTHS)
    q, k, v = (normal(sum(LENGTHS), heads, 8, seed=heads) for heads in (4, 2, 2))
    seen: dict[str, Any] = {}

    def record(*positional: Any, **named: Any) -> tuple[Tensor, Tensor]:
        assert len(positional) <= 3, "boundaries travel by keyword"
        seen.update(inspect.signature(signature).bind(*positional, **named).arguments)
        return q * 2, q

    for parent in [module[:i] for i, letter in enumerate(module) if letter == "."]:
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    package = types.ModuleType(module)
    package.flash_attn_varlen_func = record  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, package)
    out = getattr(kernels, name)(q, k, v, context, window)
    assert torch.equal(out, q * 2), "the first of a tuple is the output"
    assert seen.pop("q") is q
    assert seen.pop("k") is k
    assert seen.pop("v") is v
    assert seen.pop("cu_seqlens_q") is context.cu_seqlens
    assert seen.pop("cu_seqlens_k") is context.cu_seqlens
    left = unbounded if window is None else 3
    assert seen == {"max_seqlen_q": 17, "max_seqlen_k": 17, "causal": True, "window_size": (left, 0)}


@pytest.mark.parametrize(("window", "expected"), [(None, (-1, 0)), (4, (3, 0)), (1, (0, 0))])
def test_varlen_attention_is_told_to_look_back_only(
    window: int | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(LENGTHS)
    q, k, v = (normal(sum(LENGTHS), heads, 8, seed=heads) for heads in (4, 2, 2))
    signature, seen = inspect.signature(varlen.varlen_attn), {}

    def record(*positional: Any, **named: Any) -> Tensor:
        assert len(positional) <= 3, "boundaries travel by keyword"
        seen.update(signature.bind(*positional, **named).arguments)
        return q

    monkeypatch.setattr(varlen, "varlen_attn", record)
    assert kernels.varlen_attention(q, k, v, context, window) is q
    edges = (seen.pop("cu_seq_q"), seen.pop("cu_seq_k"))
    assert edges[0] is context.cu_seqlens
    assert edges[1] is context.cu_seqlens
    assert (seen.pop("query") is q, seen.pop("key") is k, seen.pop("value") is v) == (True, True, True)
    assert seen == {"max_q": 17, "max_k": 17, "window_size": expected, "enable_gqa": True}


def test_kernels_are_given_no_boundaries_that_break_their_contract() -> None:
    context = context_of(LENGTHS)
    strided = torch.stack([context.cu_seqlens, context.cu_seqlens], 1)[:, 0]
    for edges in (context.cu_seqlens.long(), strided, context.cu_seqlens[:-1]):
        with pytest.raises(AssertionError, match="cu_seqlens"):
            kernels.boundaries_of(dataclasses.replace(context, cu_seqlens=edges))


def configured(*types: LayerType, packed: bool = True, **policy: Any) -> Config:
    """A model of these layers for one GPU in bfloat16, heads of 64 channels."""
    model = ModelConfig(layer_types=list(types), head_dim=64, kda_head_dim=64)
    return Config(
        model=model,
        trainer=TrainerConfig(accelerator=policy.pop("accelerator", "gpu")),
        policy=PolicyConfig(**({"dtype": Dtype.bfloat16} | policy)),
        packing=PackingConfig(kind=PackingKind.consecutive if packed else PackingKind.none),
    )


def test_auto_takes_kernels_where_they_fit_and_the_reference_elsewhere() -> None:
    both = (LayerType.linear_attention, LayerType.full_attention)
    expected = [
        (configured(*both), ("varlen", "fla")),
        (configured(*both, packed=False), ("torch", "fla")),
        (configured(*both, dtype=Dtype.float32), ("reference", "reference")),
        (configured(*both, accelerator="cpu"), ("reference", "reference")),
        (configured(*both, attention=Attention.flash_4), ("flash_4", "fla")),
    ]
    for config, names in expected:
        assert (attention_of(config), linear_of(config)) == names
    wide = configured(*both)
    wide.model.head_dim = 260
    assert attention_of(wide) == "reference"
    assert list(backends_of(configured(LayerType.full_attention))) == ["policy.attention"]


def test_a_row_without_windows_takes_no_sliding_layer() -> None:
    row = Backend(
        name="x", devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), documents=True, sliding=False
    )
    assert row.takes(device="cpu", dtype="float32", head_dim=8)
    assert not row.takes(device="cpu", dtype="float32", head_dim=8, sliding=True)


def test_a_package_that_is_missing_is_told_at_the_start_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = (LayerType.full_attention,)
    assert missing(configured(*full)) == []
    (line,) = missing(configured(*full, attention=Attention.flash_2))
    assert line.startswith("policy.attention: flash_2 needs flash_attn.flash_attn_interface, which is not")
    assert "pip install flash-attn==2.8.3 --no-build-isolation, or set policy.attention=reference" in line
    monkeypatch.setenv("CXX", "no-such-compiler")
    (line,) = missing(configured(*full, accelerator="cpu", dtype=Dtype.float32, compile=True))
    assert line.startswith("policy.compile=true needs a C++ compiler, and no-such-compiler is not installed")


def test_a_namespace_of_flash_attention_4_is_not_taken_for_flash_attention_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importable("flash_attn.cute")
    assert not importable("flash_attn.flash_attn_interface")
    monkeypatch.delitem(sys.modules, "flash_attn")


def test_a_gpu_outside_a_kernels_range_is_refused_with_both_numbers() -> None:
    rows = {"policy.attention": ATTENTION_BACKENDS["flash_3"]}
    kernels.refuse_gpu(rows, capability=(9, 0))
    with pytest.raises(
        Refusal, match=r"policy.attention: flash_3 needs .* 9.0 or more and below 10.0, .*has 8.0"
    ):
        kernels.refuse_gpu(rows, capability=(8, 0))
    with pytest.raises(Refusal, match=r"this GPU has 10.0"):
        kernels.refuse_gpu(rows, capability=(10, 0))
