"""Mixture of experts as this project uses it: where expert ids come from, what routers report, the latent
layer.

Owns the rules of replay. Under `RouteMode.replay` ids come from `context.routes[layer]` and gate weights from
the CURRENT scores at those ids, so gradients reach the gate; selection-only terms play no part. Routing is
never live where replay was asked for: a missing layer or a row count that does not fit is refused. Ids
themselves (range, duplicates) are validated where samples are read.

Shapes: T tokens of a pack (pads included), D model width, L latent width, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from olmo_rl.config import ModelConfig
from olmo_rl.data.packs import PackContext, RouteMode
from olmo_rl.policy import titan
from olmo_rl.types import Refusal


class RouterLosses(NamedTuple):
    """Unweighted router losses of one layer and pack, scalars. `balance`: the penalty of `balance_penalty`, a
    mean over the pack's real tokens; `z`: SUM over real tokens. The loss weights and normalises both.
    """

    balance: Tensor
    z: Tensor


_COMMUNICATION = (
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.wait_tensor.default,
)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`, run again in the backward; what all-to-all delivered is kept, not communicated
    twice.
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _COMMUNICATION else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        early_stop=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)`: dense feed-forward and shared expert."""

    def __init__(self, dim: int, *, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtureOfExperts(nn.Module):
    """Router and shared expert at model width; routed tokens at latent width where the model has one:
    down-projected before dispatch, combined in latent space, normalised on request, up-projected.
    """

    def __init__(self, config: ModelConfig, *, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.router = titan.build_router(
            config.dim,
            num_experts=config.num_experts,
            top_k=config.top_k,
            score_function=config.score_function,
            route_norm=config.route_norm,
            route_scale=config.route_scale,
        )
        width = config.dim if config.latent_dim is None else config.latent_dim
        self.routed_experts = titan.build_experts(
            width, hidden=config.expert_hidden, num_experts=config.num_experts, top_k=config.top_k
        )
        self.shared_experts = (
            SwiGLU(config.dim, hidden=config.shared_hidden) if config.shared_hidden else None
        )
        latent = config.latent_dim is not None
        self.latent_down = nn.Linear(config.dim, width, bias=False) if latent else None
        self.latent_norm = nn.RMSNorm(width, eps=config.norm_eps) if latent and config.latent_norm else None
        self.latent_up = nn.Linear(width, config.dim, bias=False) if latent else None

    def forward(
        self, x: Tensor, context: PackContext, *, recompute: bool = False
    ) -> tuple[Tensor, RouterLosses]:
        """`x` [T, D] -> output [T, D] and this layer's router losses. Writes `context.trace` where there is
        one.

        `recompute`: the experts run again in the backward instead of keeping their activations.
        """
        replayed = replayed_ids(context, layer=self.layer, top_k=self.router.top_k)
        routed = self.router(x, replayed)
        counts = count_assignments(routed.ids, num_experts=self.router.num_experts)
        self._report(routed, counts, context)
        real = slice(0, context.real_tokens)
        losses = RouterLosses(
            balance=balance_penalty(routed.scores[real], ids=routed.ids[real]), z=z_sum(routed.logits[real])
        )
        experts = partial(recomputed, self._experts) if recompute else self._experts
        return experts(x, routed, counts), losses

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Decoding: `x` [B, D] -> output [B, D] and the live ids int64 [B, K]."""
        routed = self.router(x)
        counts = count_assignments(routed.ids, num_experts=self.router.num_experts)
        return self._experts(x, routed, counts), routed.ids

    def _experts(self, x: Tensor, routed: titan.Routed, counts: Tensor) -> Tensor:
        y = x if self.latent_down is None else self.latent_down(x)
        y = self.routed_experts(y, routed.gates, routed.ids, counts)
        if self.latent_norm is not None:
            y = self.latent_norm(y)
        if self.latent_up is not None:
            y = self.latent_up(y)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    @torch.no_grad()
    def _report(self, routed: titan.Routed, counts: Tensor, context: PackContext) -> None:
        trace = context.trace
        if trace is None:
            return
        trace.counts[self.layer] = counts
        if context.mode is RouteMode.record:
            trace.ids[self.layer] = routed.ids
        if context.mode is RouteMode.replay:
            recorded = torch.ones(context.real_tokens, dtype=torch.bool, device=routed.ids.device)
            tails = context.cu_seqlens[1:].long() - 1
            recorded[tails[tails < context.real_tokens]] = False  # a tail was never chosen by anybody
            rows = recorded.nonzero().flatten()
            live = self.router.choose(routed.scores[rows])
            trace.overlap[self.layer] = route_overlap(routed.ids[rows], live=live).sum()


def replayed_ids(context: PackContext, *, layer: int, top_k: int) -> Tensor | None:
    """int64 [T, K] that this layer must use, or None where it chooses for itself."""
    if context.mode is not RouteMode.replay:
        return None
    assert context.routes is not None
    ids = context.routes.get(layer)
    if ids is None:
        raise Refusal(
            f"replay: layer {layer} routes tokens but the recorded routes name {len(context.routes)} layers "
            f"{sorted(context.routes)}: record routes with this model, or set policy.replay=false"
        )
    expected = (context.boundaries[-1], top_k)
    if tuple(ids.shape) != expected:
        raise Refusal(
            f"replay: layer {layer} has routes of shape {tuple(ids.shape)}, this pack and model.top_k need "
            f"{expected}: record routes with this model"
        )
    return ids.contiguous()  # a layer's slice of [T, layers, K] is strided


def count_assignments(ids: Tensor, *, num_experts: int) -> Tensor:
    """int64 [E]: rows each expert gets from `ids` [T, K]. Counted from the ids themselves (not from a boolean
    map), so counts and dispatched rows agree whatever the ids are.
    """
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids.reshape(-1), torch.ones_like(ids).reshape(-1))


def balance_penalty(scores: Tensor, *, ids: Tensor) -> Tensor:
    """E * sum_e f_e P_e over the tokens given: f_e the share of assignments that expert e received (`ids` [T,
    K], no gradient), P_e the mean of its normalised score (`scores` [T, E]). 1 at perfect balance. Switch
    Transformer, eq. 4.
    """
    num_experts = scores.shape[-1]
    share = count_assignments(ids, num_experts=num_experts).to(scores.dtype) / max(ids.numel(), 1)
    mean_score = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)
    return num_experts * (share * mean_score).sum()


def z_sum(logits: Tensor) -> Tensor:
    """Sum over tokens of logsumexp(logits [T, E])^2 (ST-MoE, eq. 5, before its mean)."""
    return torch.logsumexp(logits, dim=-1).square().sum()


def route_overlap(ids: Tensor, *, live: Tensor) -> Tensor:
    """[T]: the share of each row of `ids` [T, K] that also is in that row of `live` [T, K]."""
    return (ids.unsqueeze(-1) == live.unsqueeze(-2)).any(dim=-1).to(torch.float32).mean(-1)
