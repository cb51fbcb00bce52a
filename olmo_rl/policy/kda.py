"""Kimi Delta Attention: the short convolution, the decay gate and the layer around the delta rule.

Owns the linear-attention mixer. State and convolution start afresh in every document; where documents share
rows, a segment goes on from its parent's end. Refused (`Refusal`): a backend that is unknown or does not take
the device, dtype, head width or shared rows of what it is given.

Shapes: T tokens of a pack, E channels (model width in the layer), W taps of the convolution, H heads, K
channels of a head, B sequences of a decode batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from olmo_rl.backends import LINEAR_BACKENDS
from olmo_rl.config import ModelConfig
from olmo_rl.data.packs import PackContext
from olmo_rl.planning.forest import Forest
from olmo_rl.policy.compiling import region
from olmo_rl.policy.delta_rule import ChunkTable, chunk_table, kda_chunked, kda_step
from olmo_rl.policy.kernels import fla_convolution, fla_delta_rule, refuse_branches
from olmo_rl.policy.norms import RMSNorm
from olmo_rl.policy.sharded import draw_parameter
from olmo_rl.types import Refusal

_CACHED_ROWS = 256  # rows that stay in a core's cache between the taps of the convolution's backward


@dataclass(frozen=True, kw_only=True, slots=True)
class TapTable:
    """A layout with W-1 rows before every segment: zeros before a root, else copies of the last rows of its
    path. `slots` int64 [T] are the tokens' rows of `size`; rows `copies` repeat the tokens `copied` (None
    where every segment is a root).
    """

    slots: Tensor
    size: int
    copies: Tensor | None
    copied: Tensor | None


def tap_table(forest: Forest, *, reach: int, device: torch.device) -> TapTable:
    """The layout for `reach` = W-1 rows before every segment."""
    lengths = np.asarray(forest.lengths, dtype=np.int64)
    shift = np.repeat(np.arange(1, len(lengths) + 1) * reach, lengths)
    slots = np.arange(lengths.sum()) + shift
    copies = copied = None
    if forest.branches and reach:
        taken = [forest.rows_before(s, limit=reach) for s in range(len(lengths))]
        first = np.cumsum(lengths) - lengths + np.arange(1, len(lengths) + 1) * reach
        places = [np.arange(end - len(rows), end) for end, rows in zip(first, taken, strict=True)]
        copies = torch.from_numpy(np.concatenate(places)).to(device, non_blocking=True)
        copied = torch.from_numpy(np.concatenate(taken)).to(device, non_blocking=True)
    rows = torch.from_numpy(slots).to(device, non_blocking=True)
    return TapTable(slots=rows, size=len(slots) + len(lengths) * reach, copies=copies, copied=copied)


class _PaddedConvolution(torch.autograd.Function):
    """A depthwise causal convolution in the layout of a `TapTable`. By hand for speed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, table: TapTable) -> Tensor:
        """x [T, E], weight [E, W]."""
        reach, slots = weight.shape[1] - 1, table.slots
        rows = x.new_zeros(table.size, x.shape[1]).index_copy_(0, slots, x)
        if table.copies is not None and table.copied is not None:
            rows.index_copy_(0, table.copies, x.index_select(0, table.copied))
        taps = weight.t().contiguous()
        mixed = rows[reach:] * taps[reach]
        for i in range(reach):
            mixed.addcmul_(rows[i : i - reach], taps[i])
        ctx.save_for_backward(rows, taps)
        ctx.table = table
        return mixed.index_select(0, slots - reach)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        (rows, taps), table = ctx.saved_tensors, ctx.table
        reach, slots = len(taps) - 1, table.slots
        d_mixed = d_out.new_zeros(len(rows) - reach, d_out.shape[1]).index_copy_(0, slots - reach, d_out)
        d_rows, d_taps = torch.zeros_like(rows), torch.zeros_like(taps)
        for start in range(0, len(d_mixed), _CACHED_ROWS):
            part = d_mixed[start : start + _CACHED_ROWS]
            for i in range(reach + 1):
                span = slice(start + i, start + i + len(part))
                d_rows[span].addcmul_(part, taps[i])
                d_taps[i] += (rows[span] * part).sum(0)
        d_x = d_rows.index_select(0, slots)
        if table.copies is not None:
            d_x.index_add_(0, table.copied, d_rows.index_select(0, table.copies))
        return d_x, d_taps.t(), None


def short_convolution(x_TE: Tensor, *, weight: Tensor, table: TapTable) -> Tensor:
    """Causal depthwise convolution along every path: y_t = sum_i weight[:, W-1-i] x_(t-i). weight [E, W].

    The rows before every segment keep each tap away from the neighbour.
    """
    return _PaddedConvolution.apply(x_TE, weight, table)


def _taps(context: PackContext, reach: int) -> TapTable:
    return tap_table(context.forest, reach=reach, device=context.positions.device)


def _chunks(context: PackContext) -> ChunkTable:
    parents = context.forest.parents if context.forest.branches else None
    return chunk_table(context.boundaries, device=context.positions.device, parents=parents)


def gated_delta_rule(
    q: Tensor, *, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: PackContext, backend: str
) -> Tensor:
    """The delta rule in every document by the named backend: q, k, g [T, H, K], v [T, H, V], beta [T, H] ->
    [T, H, V] in v's dtype.
    """
    if backend == "fla":
        return fla_delta_rule(q, k=k, v=v, g=g, beta=beta, context=context)
    return kda_chunked(q, k=k, v=v, g=g, beta=beta, table=context.table(_chunks))


def _unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis, at least in float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class ShortConvolution(nn.Module):
    """The weight [E, W] of a `short_convolution` and its two ways of running: over a pack, and token by
    token.
    """

    def __init__(self, width: int, *, taps: int, backend: str = "reference") -> None:
        super().__init__()
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Uniform within 1/sqrt(W)."""
        bound = self.weight.shape[1] ** -0.5
        draw_parameter(self.weight, lambda whole: whole.uniform_(-bound, bound, generator=generator))

    def forward(self, x_TE: Tensor, context: PackContext) -> Tensor:
        if self.backend == "fla":
            return fla_convolution(x_TE, weight=self.weight, context=context)
        return short_convolution(
            x_TE, weight=self.weight, table=context.table(_taps, self.weight.shape[1] - 1)
        )

    def step(self, x_BE: Tensor, *, position: int, window: Tensor) -> Tensor:
        """[B, E] -> [B, E]. `window` [B, W-1, E] is a ring: token t lies at t mod (W-1), zeros before the
        first.
        """
        reach = window.shape[1]
        taps = self.weight.t().contiguous()
        out = x_BE * taps[reach]
        for age in range(1, reach + 1):
            out.addcmul_(window[:, (position - age) % reach], taps[reach - age])
        if reach:
            window[:, position % reach] = x_BE
        return out


class DecayGate(nn.Module):
    """Log decay per key channel: g = -exp(A_log) softplus(f + dt_bias). f [..., H K] -> g [..., H, K].

    Its parameters steer products of many decays, so they stay float32 under mixed precision (`keep_float32`).
    """

    keep_float32 = True

    def __init__(self, heads: int, *, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads * head_dim, dtype=torch.float32))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """A uniform in [1, 16]; softplus(dt_bias) log-uniform in [1e-3, 1e-1]: slow and fast channels in
        every head.
        """

        def slow_to_fast(whole: Tensor) -> None:
            rate = whole.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
            rate.add_(torch.log(-torch.expm1(-rate)))

        draw_parameter(self.A_log, lambda whole: whole.uniform_(1, 16, generator=generator).log_())
        draw_parameter(self.dt_bias, slow_to_fast)

    @region()
    def forward(self, f: Tensor) -> Tensor:
        dtype = torch.promote_types(f.dtype, self.A_log.dtype)
        rate = F.softplus(f.to(dtype) + self.dt_bias).unflatten(-1, (self.heads, -1))
        return -self.A_log.exp()[:, None] * rate


class KimiDeltaAttention(nn.Module):
    """The layer: q, k, v from projection, short convolution and SiLU (q, k of unit length), low-rank decay
    and output gate, delta rule, W_o(RMSNorm(o) * sigmoid(gate)). Parameters are laid out as in the Kimi
    Linear release, except that the three convolutions are one weight [3 H K, W].
    """

    def __init__(self, config: ModelConfig, *, backend: str = "reference") -> None:
        super().__init__()
        if backend not in LINEAR_BACKENDS:
            raise Refusal(
                f"policy.linear_attention={backend} is unknown: choose one of {', '.join(LINEAR_BACKENDS)}"
            )
        self.backend = backend
        self.heads, self.head_dim = config.kda_heads, config.kda_head_dim
        self.beta_scale = 2.0 if config.kda_negative_eigenvalues else 1.0
        width = self.heads * self.head_dim
        self.wq = nn.Linear(config.dim, width, bias=False)
        self.wk = nn.Linear(config.dim, width, bias=False)
        self.wv = nn.Linear(config.dim, width, bias=False)
        self.conv = ShortConvolution(3 * width, taps=config.conv_size, backend=backend)
        self.f_proj_1 = nn.Linear(config.dim, self.head_dim, bias=False)
        self.f_proj_2 = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(config.dim, self.heads, bias=False)
        self.g_proj_1 = nn.Linear(config.dim, self.head_dim, bias=False)
        self.g_proj_2 = nn.Linear(self.head_dim, width, bias=True)
        self.decay = DecayGate(self.heads, head_dim=self.head_dim)
        self.o_norm = RMSNorm(self.head_dim, eps=config.norm_eps)
        self.wo = nn.Linear(width, config.dim, bias=False)

    def forward(self, x_TE: Tensor, context: PackContext) -> Tensor:
        """[T, E] -> [T, E]; documents end at `context.boundaries`."""
        self._check(x_TE)
        refuse_branches(LINEAR_BACKENDS[self.backend], key="policy.linear_attention", context=context)
        mixed, f, beta = self._inputs(x_TE)
        q, k, v = self._heads(self.conv(mixed, context))
        o = gated_delta_rule(q, k=k, v=v, g=self.decay(f), beta=beta, context=context, backend=self.backend)
        return self._output(o, x_TE)

    def _check(self, x: Tensor) -> None:
        device, dtype = x.device.type, str(x.dtype).removeprefix("torch.")
        if not LINEAR_BACKENDS[self.backend].takes(device=device, dtype=dtype, head_dim=self.head_dim):
            raise Refusal(
                f"policy.linear_attention={self.backend} does not take heads of {self.head_dim} channels in "
                f"{dtype} on {device}: set policy.linear_attention=reference, or change trainer.accelerator, "
                "policy.dtype or model.kda_head_dim"
            )

    def init_state(
        self, batch: int, *, length: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The state of `batch` sequences before their first token; its size does not depend on `length`."""
        del length
        width, taps = self.conv.weight.shape
        core = torch.promote_types(dtype, torch.float32)
        return {
            "conv": torch.zeros(batch, taps - 1, width, device=device, dtype=dtype),
            "recurrent": torch.zeros(
                batch, self.heads, self.head_dim, self.head_dim, device=device, dtype=core
            ),
        }

    @torch.no_grad()
    def step(self, x_BE: Tensor, *, position: int, state: dict[str, Tensor]) -> Tensor:
        """The next token of every sequence, [B, E] -> [B, E]; `state` moves on by one token."""
        mixed, f, beta = self._inputs(x_BE)
        q, k, v = self._heads(self.conv.step(mixed, position=position, window=state["conv"]))
        core = state["recurrent"].dtype
        o = kda_step(q, k=k, v=v.to(core), g=self.decay(f), beta=beta, state=state["recurrent"])
        return self._output(o.to(x_BE.dtype), x_BE)

    @region()
    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., E] -> q, k, v before the convolution [..., 3 H K], the decay's input [..., H K] and beta
        [..., H].
        """
        beta = self.b_proj(x)
        beta = beta.to(torch.promote_types(beta.dtype, torch.float32)).sigmoid() * self.beta_scale
        mixed = torch.cat([self.wq(x), self.wk(x), self.wv(x)], dim=-1)
        return mixed, self.f_proj_2(self.f_proj_1(x)), beta

    @region()
    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = F.silu(mixed).unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
        return _unit(q), _unit(k), v

    @region()
    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.g_proj_2(self.g_proj_1(x)).sigmoid().unflatten(-1, (self.heads, self.head_dim))
        return self.wo((self.o_norm(o) * gate).flatten(-2))


def kimi_delta_attention(config: ModelConfig, backend: str) -> KimiDeltaAttention:
    """The layer of `linear_attention`."""
    return KimiDeltaAttention(config, backend=backend)
