"""How the tokens of a response are drawn: settings, random numbers, and the choice itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from olmo_rl.types import Refusal

StopTokens = int | Sequence[int] | None  # ids that end a response and belong to it: one, several, or none


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen; `seed` and `draw` of the random numbers."""

    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    temperature: float
    top_p: float
    greedy: bool
    seed: int
    draw: int

    def __post_init__(self) -> None:
        reasons = []
        if self.max_new_tokens < 1:
            reasons.append(f"rollouts.max_new_tokens={self.max_new_tokens}: generate at least one token")
        if not self.temperature > 0:
            reasons.append(
                f"rollouts.temperature={self.temperature} is not positive: ask for greedy decoding instead"
            )
        if not 0 < self.top_p <= 1:
            reasons.append(
                f"rollouts.top_p={self.top_p} is outside (0, 1]: 1 samples from the whole vocabulary"
            )
        if reasons:
            raise Refusal(reasons)


def stop_ids(stop: StopTokens) -> tuple[int, ...]:
    """The ids that end a response."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, int) else tuple(stop)


def choose_tokens(logprobs: Tensor, *, uniforms: Tensor | None, temperature: float, top_p: float) -> Tensor:
    """int64 [B] from `logprobs` [B, V]: the likeliest where `uniforms` is None, else by inverse distribution
    function at `uniforms` [B] in [0, 1). top-p keeps the smallest set of likeliest tokens that reaches it,
    after the temperature.
    """
    if uniforms is None:
        return logprobs.argmax(dim=-1)
    weights = torch.softmax(logprobs.double() / temperature, dim=-1)
    order = None
    if top_p < 1:
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        before = weights.cumsum(dim=-1) - weights
        weights = weights.masked_fill(before >= top_p, 0.0)
    reached = weights.cumsum(dim=-1)
    index = torch.searchsorted(reached, uniforms[:, None] * reached[:, -1:], right=True)
    index = index.clamp(max=logprobs.shape[-1] - 1)
    return (index if order is None else order.gather(1, index))[:, 0]


def uniforms_of(ids: Sequence[str], *, sampling: Sampling) -> Tensor:
    """float64 [B, max_new_tokens] in [0, 1): one row per request, a function of (seed, draw, request id)."""
    out = np.empty((len(ids), sampling.max_new_tokens))
    for row, id in zip(out, ids, strict=True):
        digest = hashlib.blake2b(f"{sampling.seed}/{sampling.draw}/{id}".encode(), digest_size=16).digest()
        np.random.Generator(np.random.PCG64(int.from_bytes(digest))).random(out=row)
    return torch.from_numpy(out)
