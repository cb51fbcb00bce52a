"""Floating point operations of training a model on documents, for model FLOPs utilisation (MFU).

Counts what the model needs, not what an implementation spends: matrix products of the weights that a token
uses, attention over the tokens that it sees (squared lengths by document, never of the whole row), the delta
rule as a recurrence, the head for scored tokens only. Nothing for norms, recomputation, or copies. A product
of [m, k] and [k, n] counts 2 m k n; a backward counts twice its forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from olmo_rl.config import LayerType, ModelConfig


def training_flops(model: ModelConfig, *, lengths: Sequence[int], scored: int) -> int:
    """Forward and backward over documents of `lengths` tokens, `scored` of which go through the head."""
    forward = sum(lengths) * 2 * weights_of_token(model) + 2 * scored * model.dim * model.vocab_size
    return 3 * (forward + mixing_flops(model, lengths=lengths))


def weights_of_token(model: ModelConfig) -> int:
    """Elements of the weights that one token is multiplied with, without embedding and head."""
    heads, key_values, kda = model.num_heads, model.num_kv_heads, model.kda_heads * model.kda_head_dim
    attention = model.dim * model.head_dim * (2 * heads + 2 * key_values)
    # q, k, v, output; the low-rank decay and output gates; beta; the short convolutions of q, k, v.
    linear = model.dim * (4 * kda + 2 * model.kda_head_dim + model.kda_heads)
    linear += 2 * model.kda_head_dim * kda + 3 * model.conv_size * kda
    width = model.dim if model.latent_dim is None else model.latent_dim
    routed = model.dim * model.num_experts + model.top_k * 3 * width * model.expert_hidden
    routed += 3 * model.dim * model.shared_hidden
    routed += 0 if model.latent_dim is None else 2 * model.dim * width
    total = 0
    for layer, kind in enumerate(model.layer_types):
        total += linear if kind is LayerType.linear_attention else attention
        total += routed if layer in model.routed_layers else 3 * model.dim * model.dense_hidden
    return total


def mixing_flops(model: ModelConfig, *, lengths: Sequence[int]) -> int:
    """One forward's products between tokens of the same document."""
    total = 0
    for kind in model.layer_types:
        if kind is LayerType.linear_attention:
            # A state [K, V] a head is decayed away from, written to and read from: three products of it.
            total += sum(lengths) * model.kda_heads * 6 * model.kda_head_dim**2
            continue
        window = model.sliding_window if kind is LayerType.sliding_attention else max(lengths, default=0)
        pairs = sum(_pairs(length, window=window) for length in lengths)
        total += pairs * model.num_heads * 4 * model.head_dim  # scores, and the weighted sum of values
    return total


def _pairs(length: int, *, window: int) -> int:
    """Pairs (query, key) of a causal document in which every token sees `window` tokens, itself included."""
    full = min(length, window)
    return full * (full + 1) // 2 + (length - full) * window
