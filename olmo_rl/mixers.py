"""The token mixers, one row each: cost, memory, backends, and where the layer is built. No torch here.

Adding a mixer changes two files beside the module that computes it: config.py gets a member of `LayerType`
and its keys, this file a row in `mixer_of`. The type checker reports a member without a row. FLOPs, memory
estimates, rules and backends follow from the row.

Shapes: T tokens of documents, H heads, K channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from olmo_rl.config import LayerType, ModelConfig


class Family(Enum):
    """Mixers that share a key for their backend."""

    softmax = "policy.attention"
    linear = "policy.linear_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """One mixer.

    `build`: the function `module:name` that makes the layer from (config, backend). `weights`: elements that
    one token is multiplied with. `flops`: products between tokens of the same document in one forward over
    documents of the given lengths. `activations`: elements that one token leaves for the backward.
    `windowed`: a token sees the last tokens only.
    """

    family: Family
    build: str
    weights: Callable[[ModelConfig], int]
    flops: Callable[[ModelConfig, Sequence[int]], int]
    activations: Callable[[ModelConfig], int]
    windowed: bool = False


def mixer_of(kind: LayerType) -> Mixer:
    """The row of a layer type."""
    match kind:
        case LayerType.linear_attention:
            return _LINEAR
        case LayerType.full_attention:
            return _FULL
        case LayerType.sliding_attention:
            return _SLIDING


def families(model: ModelConfig) -> frozenset[Family]:
    """The families of a model's layers."""
    return frozenset(mixer_of(kind).family for kind in model.layer_types)


def has_window(model: ModelConfig) -> bool:
    """Whether a layer sees the last tokens only."""
    return any(mixer_of(kind).windowed for kind in model.layer_types)


def _softmax_weights(model: ModelConfig) -> int:
    """Queries, keys, values, output."""
    return model.dim * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)


def _softmax_activations(model: ModelConfig) -> int:
    """The input twice; queries, keys and values projected, normed and rotated; output."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return 2 * model.dim + 5 * queries + 6 * keys


def _softmax_flops(model: ModelConfig, lengths: Sequence[int], *, window: int) -> int:
    """Scores, and the weighted sum of values."""
    return sum(_pairs(length, window=window) for length in lengths) * model.num_heads * 4 * model.head_dim


def _full_flops(model: ModelConfig, lengths: Sequence[int]) -> int:
    return _softmax_flops(model, lengths, window=max(lengths, default=0))


def _sliding_flops(model: ModelConfig, lengths: Sequence[int]) -> int:
    return _softmax_flops(model, lengths, window=model.sliding_window)


def _pairs(length: int, *, window: int) -> int:
    """Pairs (query, key) of a causal document in which every token sees `window` tokens, itself included."""
    full = min(length, window)
    return full * (full + 1) // 2 + (length - full) * window


def _kda_weights(model: ModelConfig) -> int:
    """Queries, keys, values, output; low-rank decay and output gates; beta; the convolutions of q, k, v."""
    width = model.kda_heads * model.kda_head_dim
    projections = model.dim * (4 * width + 2 * model.kda_head_dim + model.kda_heads)
    return projections + 2 * model.kda_head_dim * width + 3 * model.conv_size * width


def _kda_activations(model: ModelConfig) -> int:
    """The input twice; q, k, v around convolution and norm, decays, gate, output."""
    return 2 * model.dim + 14 * model.kda_heads * model.kda_head_dim


def _kda_flops(model: ModelConfig, lengths: Sequence[int]) -> int:
    """A state [K, K] of each head decays, is written to and read from: three products with it a token."""
    return sum(lengths) * model.kda_heads * 6 * model.kda_head_dim**2


_FULL = Mixer(
    family=Family.softmax,
    build="olmo_rl.policy.attention:full_attention",
    weights=_softmax_weights,
    flops=_full_flops,
    activations=_softmax_activations,
)
_SLIDING = Mixer(
    family=Family.softmax,
    build="olmo_rl.policy.attention:sliding_attention",
    weights=_softmax_weights,
    flops=_sliding_flops,
    activations=_softmax_activations,
    windowed=True,
)
_LINEAR = Mixer(
    family=Family.linear,
    build="olmo_rl.policy.kda:kimi_delta_attention",
    weights=_kda_weights,
    flops=_kda_flops,
    activations=_kda_activations,
)
