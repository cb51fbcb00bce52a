"""CUDA kernels that others wrote, behind the calls of our mixers: torch's variable-length attention, flash
attention 2, 3 and 4, and the delta rule and short convolution of flash-linear-attention.

Every boundary argument is passed by keyword: flash attention 4 has another fourth parameter than its elders,
and a boundary that lands in a wrong slot is an error of the worst kind, a silent one. Packages are imported
when a kernel is first used. Boundaries are `context.cu_seqlens`: int32, contiguous, a fresh tensor per pack
(flash-linear-attention keeps what it derives from a tensor by the tensor's identity).

Refused (`Refusal`): a GPU that is older or newer than what a kernel was written for, and rows that several
documents share, which these kernels do not know.

Shapes: T tokens of a pack, H query heads, G key/value heads, d head width, K key and V value channels, W
taps, E channels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from olmo_rl.backends import Backend
from olmo_rl.data.packs import PackContext
from olmo_rl.types import Refusal


def boundaries_of(context: PackContext) -> Tensor:
    """`cu_seqlens` as kernels want them, held to the contract before they read out of bounds."""
    edges = context.cu_seqlens
    assert edges.dtype is torch.int32, "cu_seqlens is int32"
    assert edges.is_contiguous(), "cu_seqlens is contiguous"
    assert len(edges) == len(context.boundaries), "cu_seqlens and boundaries are the same numbers"
    return edges


def refuse_branches(row: Backend, *, key: str, context: PackContext) -> None:
    """Refuse rows that several documents share under a backend that knows documents side by side alone."""
    if context.forest.branches and not row.branches:
        raise Refusal(
            f"{key}={row.name} does not compute rows that several documents share: set {key}=reference, or "
            "packing=consecutive"
        )


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, context: PackContext, window: int | None) -> Tensor:
    """`torch.nn.attention.varlen`: it is bidirectional unless the window limits it."""
    from torch.nn.attention.varlen import varlen_attn

    edges = boundaries_of(context)
    out = varlen_attn(
        q,
        k,
        v,
        cu_seq_q=edges,
        cu_seq_k=edges,
        max_q=context.max_seqlen,
        max_k=context.max_seqlen,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def flash_attention(
    q: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    context: PackContext,
    window: int | None,
    function: Callable[..., Any],
    unbounded: int | None,
) -> Tensor:
    """A `flash_attn_varlen_func` of any version: causal, documents by boundaries; `unbounded` is how its
    window means "all of the past".
    """
    edges = boundaries_of(context)
    out = function(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=edges,
        cu_seqlens_k=edges,
        max_seqlen_q=context.max_seqlen,
        max_seqlen_k=context.max_seqlen,
        causal=True,
        window_size=(unbounded if window is None else window - 1, 0),
    )
    return out[0] if isinstance(out, tuple) else out  # flash attention 4 adds the log of the softmax's sum


def _flash(module: str, *, unbounded: int | None) -> Callable[..., Tensor]:
    def kernel(q: Tensor, k: Tensor, v: Tensor, context: PackContext, window: int | None) -> Tensor:
        function = importlib.import_module(module).flash_attn_varlen_func
        return flash_attention(
            q, k=k, v=v, context=context, window=window, function=function, unbounded=unbounded
        )

    return kernel


flash_2 = _flash("flash_attn.flash_attn_interface", unbounded=-1)
flash_3 = _flash("flash_attn_interface", unbounded=-1)
flash_4 = _flash("flash_attn.cute", unbounded=None)


def _host_boundaries(context: PackContext) -> Tensor:
    """The boundaries on the host, one tensor per pack, so that no kernel copies them back from the device."""
    host = context.cu_seqlens_cpu
    return torch.tensor(context.boundaries, dtype=torch.int32) if host is None else host


def fla_delta_rule(
    q: Tensor, *, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: PackContext
) -> Tensor:
    """`chunk_kda`: q, k, g [T, H, K], v [T, H, V], beta [T, H] -> o [T, H, V] in v's dtype; q and k of unit
    length, g and beta float32.
    """
    from fla.ops.kda import chunk_kda

    out, _ = chunk_kda(
        q=q.to(v.dtype)[None],
        k=k.to(v.dtype)[None],
        v=v[None],
        g=g[None],
        beta=beta[None],
        cu_seqlens=boundaries_of(context),
        cu_seqlens_cpu=_host_boundaries(context),
    )
    return out[0]


def fla_convolution(x_TE: Tensor, *, weight: Tensor, context: PackContext) -> Tensor:
    """`causal_conv1d` of flash-linear-attention: x [T, E], weight [E, W] -> [T, E]."""
    from fla.modules.causal_conv1d import causal_conv1d

    out, _ = causal_conv1d(
        x=x_TE[None],
        weight=weight,
        cu_seqlens=boundaries_of(context),
        cu_seqlens_cpu=_host_boundaries(context),
    )
    return out[0]


def refuse_gpu(backends: Mapping[str, Backend], *, capability: tuple[int, int]) -> None:
    """Refuse backends, given by the key that chose them, that this GPU cannot run."""
    for key, row in backends.items():
        lowest, highest = row.computes
        if not lowest <= capability < highest:
            have, need = ".".join(map(str, capability)), ".".join(map(str, lowest))
            until = "" if highest[0] == 99 else f" and below {'.'.join(map(str, highest))}"
            raise Refusal(
                f"{key}: {row.name} needs compute capability {need} or more{until}, this GPU has {have}: set "
                f"{key}=reference"
            )
