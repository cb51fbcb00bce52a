"""Softmax attention within documents: backends behind one call, and the layer.

Owns full and sliding-window attention over a packed row. Boundaries come from `PackContext.boundaries` and
nowhere else; positions (they restart per document) only turn the rotary embedding.

Refused (`Refusal`): a backend that is unknown or does not take the device, dtype or head width of what it is
given, and more than one document in a row under a backend that does not honour documents.

Shapes: T tokens of a pack, H query heads, G key/value heads (H is a multiple of G), d head dimension, E model
width, B sequences of a decode batch, M the longest sequence of a decode state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from olmo_rl.backends import ATTENTION_BACKENDS
from olmo_rl.config import ModelConfig, QkNorm
from olmo_rl.data.packs import PackContext
from olmo_rl.planning.forest import Forest
from olmo_rl.policy import kernels
from olmo_rl.policy.compiling import region
from olmo_rl.policy.norms import RMSNorm
from olmo_rl.types import Refusal

# Documents below so many tokens share a call; batches of longer ones cost more in copies than they save.
_SHORT = 32

Kernel = Callable[[Tensor, Tensor, Tensor, PackContext, int | None], Tensor]


def document_attention(
    q: Tensor, *, k: Tensor, v: Tensor, context: PackContext, backend: str, window: int | None
) -> Tensor:
    """Causal attention inside every document. q [T, H, d], k and v [T, G, d] -> [T, H, d], scaled by
    1/sqrt(d).

    `window`: tokens that a token sees, itself included; None = its whole past.
    """
    row = ATTENTION_BACKENDS.get(backend)
    if row is None:
        raise Refusal(f"policy.attention={backend} is unknown: choose one of {', '.join(sorted(_KERNELS))}")
    device, dtype = q.device.type, str(q.dtype).removeprefix("torch.")
    if not row.takes(device=device, dtype=dtype, head_dim=q.shape[-1], sliding=window is not None):
        raise Refusal(
            f"policy.attention={backend} does not take heads of {q.shape[-1]} channels in {dtype} "
            f"on {device}: set policy.attention=reference, or change trainer.accelerator, policy.dtype, "
            "model.head_dim"
        )
    documents = len(context.boundaries) - 1
    if documents > 1 and not row.documents:
        raise Refusal(
            f"policy.attention={backend} does not honour document boundaries and this row holds {documents} "
            "documents: set packing.kind=none (packing=none) or policy.attention=reference"
        )
    kernels.refuse_branches(row, key="policy.attention", context=context)
    return _KERNELS[backend](q, k, v, context, window)


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Segments of one length: q [n, H, length, d], k and v [n, G, keys, d] -> [n, H, length, d]. The last
    keys are those of the queries' own rows.
    """
    length, keys, grouped = q.shape[-2], k.shape[-2], q.shape[-3] != k.shape[-3]
    if length == keys and (window is None or length <= window):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    own = torch.arange(keys - length, keys, device=q.device)
    age = own[:, None] - torch.arange(keys, device=q.device)
    seen = age >= 0 if window is None else (age >= 0) & (age < window)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)


class _Batch(NamedTuple):
    """Segments that share a call: their number, the rows of each, and the keys that each row may see."""

    segments: int
    length: int
    keys: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batches:
    """The calls of one forward: `order` [T] of the rows that ask and its `inverse` (None: as they lie),
    `keys`: the rows that they may see, batch by batch (None: the rows that ask).
    """

    calls: tuple[_Batch, ...]
    order: Tensor | None
    inverse: Tensor | None
    keys: Tensor | None


def _batches(context: PackContext, window: int | None) -> _Batches:
    """Segments below `_SHORT` rows that agree in rows and keys share a call, behind the others. It follows
    lengths and parents alone, never values.
    """
    forest, device = context.forest, context.positions.device
    lengths, prefix = np.asarray(forest.lengths), np.asarray(forest.prefix)
    # Rows before a segment that its first row may see.
    past = prefix if window is None else np.minimum(prefix, window - 1)
    sizes = np.stack([lengths, past], axis=1)
    kinds, kind_of, counts = np.unique(sizes, axis=0, return_inverse=True, return_counts=True)
    kind_of = kind_of.reshape(-1)
    together = (counts[kind_of] > 1) & (lengths < _SHORT)
    order = np.argsort(np.where(together, 1 + kind_of, 0), kind="stable")
    alone = int((~together).sum())
    calls = [_Batch(1, int(lengths[s]), int(lengths[s] + past[s])) for s in order[:alone]]
    shared, numbers = np.unique(kind_of[together], return_counts=True)
    calls += [
        _Batch(int(n), int(kinds[kind, 0]), int(kinds[kind].sum()))
        for kind, n in zip(shared, numbers, strict=True)
    ]
    rows = keys = inverse = None
    if together.any():
        edges = context.boundaries
        placed = np.concatenate([np.arange(edges[s], edges[s + 1]) for s in order])
        rows = torch.from_numpy(placed).to(device, non_blocking=True)
        inverse = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=device))
    if past.any():
        keys = torch.from_numpy(_seen_rows(forest, order=order, past=past)).to(device, non_blocking=True)
    return _Batches(calls=tuple(calls), order=rows, inverse=inverse, keys=keys)


def _seen_rows(forest: Forest, *, order: NDArray[np.int64], past: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that each segment of `order` may see: the last `past` of its path, then its own."""
    edges = forest.boundaries
    spans = [
        span
        for s in order
        for span in (forest.rows_before(int(s), limit=int(past[s])), np.arange(edges[s], edges[s + 1]))
    ]
    return np.concatenate(spans)


class _Permuted(torch.autograd.Function):
    """Rows [T, ...] in another order. The gradient is the inverse permutation, not a sum into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return d_out.index_select(0, inverse), None, None


def _by_document(q: Tensor, k: Tensor, v: Tensor, context: PackContext, window: int | None) -> Tensor:
    """The reference: one call per segment, and per size of short ones. Keys and values of a path are gathered
    once a segment. `split`, not slices: the gradient of a slice fills the whole row.
    """
    batches = context.table(_batches, window)
    order, inverse, keys = batches.order, batches.inverse, batches.keys
    if order is not None:
        q = _Permuted.apply(q, order, inverse)
    if keys is not None:
        k, v = k.index_select(0, keys), v.index_select(0, keys)
    elif order is not None:
        k, v = (_Permuted.apply(x, order, inverse) for x in (k, v))
    queries = q.split([call.segments * call.length for call in batches.calls])
    seen = [x.split([call.segments * call.keys for call in batches.calls]) for x in (k, v)]
    outputs = []
    for call, dq, dk, dv in zip(batches.calls, queries, *seen, strict=True):
        dq = dq.unflatten(0, (call.segments, call.length)).transpose(1, 2)
        dk, dv = (x.unflatten(0, (call.segments, call.keys)).transpose(1, 2) for x in (dk, dv))
        outputs.append(_causal(dq, dk, dv, window).transpose(1, 2).flatten(0, 1))
    out = torch.cat(outputs)
    return out if order is None else _Permuted.apply(out, inverse, order)


def _whole_row(q: Tensor, k: Tensor, v: Tensor, context: PackContext, window: int | None) -> Tensor:
    """The row as one document; `document_attention` has refused any other."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return _causal(q, k, v, window)[0].transpose(0, 1)


_KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "reference": _by_document,
        "torch": _whole_row,
        "varlen": kernels.varlen_attention,
        "flash_2": kernels.flash_2,
        "flash_3": kernels.flash_3,
        "flash_4": kernels.flash_4,
    }
)


class Rotation(NamedTuple):
    """Rotary embedding at T positions: `cos` and `sin` [T, 1, d], channel i turning with channel i + d/2."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The angles of integer `positions` [...] for heads of `head_dim` channels, at least in float32."""
    half, dtype = head_dim // 2, torch.promote_types(dtype, torch.float32)
    rate = theta ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)
    angle = (positions.to(dtype)[..., None] * rate)[..., None, :]
    cos, sin = angle.cos(), angle.sin()
    return Rotation(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """x [..., heads, d] turned by its rows' angles, in x's dtype."""
    wide = x.to(by.cos.dtype)
    return (wide * by.cos + wide.roll(x.shape[-1] // 2, dims=-1) * by.sin).to(x.dtype)


def _qk_norm(config: ModelConfig, *, heads: int) -> RMSNorm | None:
    """The norm of queries or keys: of one head's channels, of all `heads` at once, or none."""
    if config.qk_norm is QkNorm.none:
        return None
    width = config.head_dim * (1 if config.qk_norm is QkNorm.head else heads)
    return RMSNorm(width, eps=config.norm_eps)


class DocumentAttention(nn.Module):
    """The layer: projections without bias, optional RMSNorm of queries and keys, rotary embedding
    (`rope_theta` None = none), grouped key/value heads.
    """

    def __init__(self, config: ModelConfig, *, window: int | None, backend: str) -> None:
        super().__init__()
        self.window, self.backend, self.rope_theta = window, backend, config.rope_theta
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.wq = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)
        self.q_norm = _qk_norm(config, heads=self.heads)
        self.k_norm = _qk_norm(config, heads=self.kv_heads)
        self.by_head = config.qk_norm is QkNorm.head

    def forward(self, x_TE: Tensor, context: PackContext) -> Tensor:
        """[T, E] -> [T, E]; documents end at `context.boundaries`."""
        q, k, v = self._project(x_TE, context.positions)
        out = document_attention(q, k=k, v=v, context=context, backend=self.backend, window=self.window)
        return self._output(out)

    def init_state(
        self, batch: int, *, length: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Room for the keys and values [B, G, M, d] of `batch` sequences of at most `length` tokens."""
        shape = (batch, self.kv_heads, length, self.head_dim)
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("keys", "values")}

    @torch.no_grad()
    def step(self, x_BE: Tensor, *, position: int, state: dict[str, Tensor]) -> Tensor:
        """The next token of every sequence, all at `position`: [B, E] -> [B, E]; `state` gains its key and
        value.
        """
        q, k, v = self._project(x_BE, torch.full((len(x_BE),), position, device=x_BE.device))
        state["keys"][:, :, position], state["values"][:, :, position] = k, v
        start = 0 if self.window is None else max(0, position + 1 - self.window)
        past = slice(start, position + 1)
        # The query heads of one key/value head are the rows of one small attention: no repeated keys.
        rows = q.view(len(q), self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        out = scaled_dot_product_attention(rows, state["keys"][:, :, past], state["values"][:, :, past])
        return self.wo(out.flatten(1))

    @region()
    def _output(self, out: Tensor) -> Tensor:
        """[T, H, d] -> [T, E]."""
        return self.wo(out.flatten(-2))

    @region()
    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., E] -> q [..., H, d], k and v [..., G, d]."""
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.q_norm is not None and self.k_norm is not None and not self.by_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (self.heads, self.head_dim))
        k = k.unflatten(-1, (self.kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None and self.by_head:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            angles = rotation(positions, head_dim=self.head_dim, theta=self.rope_theta, dtype=q.dtype)
            q, k = rotate(q, angles), rotate(k, angles)
        return q, k, v


def full_attention(config: ModelConfig, backend: str) -> DocumentAttention:
    """The layer of `full_attention`."""
    return DocumentAttention(config, window=None, backend=backend)


def sliding_attention(config: ModelConfig, backend: str) -> DocumentAttention:
    """The layer of `sliding_attention`."""
    return DocumentAttention(config, window=config.sliding_window, backend=backend)
