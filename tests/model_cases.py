"""Shared by the model's tests: a tiny hybrid, contexts from lengths, routes per token and layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from olmo_rl.config import LayerType, ModelConfig
from olmo_rl.data.packs import PackContext, RouteMode, RouteTrace
from olmo_rl.planning.forest import Forest

HYBRID = [
    LayerType.linear_attention,
    LayerType.linear_attention,
    LayerType.full_attention,
    LayerType.sliding_attention,
]


def tiny_config() -> ModelConfig:
    """Every mixer, a dense first layer, latent experts and a shared expert; 34 thousand parameters."""
    return ModelConfig(
        vocab_size=31,
        dim=32,
        layer_types=list(HYBRID),
        dense_layers=[0],
        dense_hidden=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        sliding_window=4,
        kda_heads=2,
        kda_head_dim=16,
        num_experts=8,
        top_k=2,
        expert_hidden=24,
        shared_hidden=16,
        latent_dim=16,
        latent_norm=True,
        init_std=0.15,
    )


def context_of(
    lengths: Sequence[int],
    *,
    mode: RouteMode = RouteMode.live,
    routes: dict[int, Tensor] | None = None,
    trace: RouteTrace | None = None,
    pads: int = 0,
) -> PackContext:
    """Documents of `lengths`; the last `pads` rows are padding (whole trailing documents)."""
    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    return PackContext(
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        boundaries=tuple(boundaries),
        max_seqlen=max(lengths),
        real_tokens=boundaries[-1] - pads,
        mode=mode,
        routes=routes,
        trace=trace,
    )


def context_of_forest(
    forest: Forest, *, mode: RouteMode = RouteMode.live, routes: dict[int, Tensor] | None = None
) -> PackContext:
    """Rows that documents share."""
    positions = [
        torch.arange(start, start + length)
        for start, length in zip(forest.prefix, forest.lengths, strict=True)
    ]
    return PackContext(
        positions=torch.cat(positions),
        cu_seqlens=torch.tensor(forest.boundaries, dtype=torch.int32),
        boundaries=forest.boundaries,
        max_seqlen=max(forest.lengths),
        real_tokens=forest.boundaries[-1],
        mode=mode,
        routes=routes,
        shared=forest,
    )


def random_routes(config: ModelConfig, *, tokens: int, seed: int) -> dict[int, Tensor]:
    """Distinct ids per row, int64 [T, K] by layer."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: torch.rand(tokens, config.num_experts, generator=generator).argsort(-1)[:, : config.top_k]
        for layer in config.routed_layers
    }


def random_tokens(config: ModelConfig, *, tokens: int, seed: int) -> Tensor:
    return torch.randint(config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed))
