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
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from olmo_rl.backends import ATTENTION_BACKENDS
from olmo_rl.config import ModelConfig, QkNorm
from olmo_rl.data.packs import PackContext
from olmo_rl.policy import kernels
from olmo_rl.policy.compiling import region
from olmo_rl.types import Refusal

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
    return _KERNELS[backend](q, k, v, context, window)


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One document on its own: q [H, n, d], k and v [G, n, d] -> [H, n, d]."""
    length = q.shape[-2]
    grouped = q.shape[-3] != k.shape[-3]
    q, k, v = q[None], k[None], v[None]
    if window is None or length <= window:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)[0]
    age = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    seen = (age >= 0) & (age < window)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)[0]


def _by_document(q: Tensor, k: Tensor, v: Tensor, context: PackContext, window: int | None) -> Tensor:
    """The reference: one call per document. `split`, not slices: the gradient of a slice fills the whole
    row.
    """
    lengths = [b - a for a, b in zip(context.boundaries, context.boundaries[1:], strict=False)]
    documents = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([_causal(dq, dk, dv, window) for dq, dk, dv in documents], dim=1).transpose(0, 1)


def _whole_row(q: Tensor, k: Tensor, v: Tensor, context: PackContext, window: int | None) -> Tensor:
    """The row as one document; `document_attention` has refused any other."""
    return _causal(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), window).transpose(0, 1)


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


def rotate(x: Tensor, *, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [..., heads, d] at integer `positions` [...]: channel i turns with channel i +
    d/2.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    rate = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = (positions.to(dtype)[..., None] * rate)[..., None, :]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.to(dtype).split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _qk_norm(config: ModelConfig, *, heads: int) -> nn.RMSNorm | None:
    """The norm of queries or keys: of one head's channels, of all `heads` at once, or none."""
    if config.qk_norm is QkNorm.none:
        return None
    width = config.head_dim * (1 if config.qk_norm is QkNorm.head else heads)
    return nn.RMSNorm(width, eps=config.norm_eps)


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
            q = rotate(q, positions=positions, theta=self.rope_theta)
            k = rotate(k, positions=positions, theta=self.rope_theta)
        return q, k, v


def full_attention(config: ModelConfig, backend: str) -> DocumentAttention:
    """The layer of `full_attention`."""
    return DocumentAttention(config, window=None, backend=backend)


def sliding_attention(config: ModelConfig, backend: str) -> DocumentAttention:
    """The layer of `sliding_attention`."""
    return DocumentAttention(config, window=config.sliding_window, backend=backend)
