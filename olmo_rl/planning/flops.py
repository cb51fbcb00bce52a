"""Floating point operations of training a model on documents, for model FLOPs utilisation (MFU).

Counts what the model needs, not what an implementation spends: matrix products of the weights that a token
uses, attention over the tokens that it sees (squared lengths by document, never of the whole row), the delta
rule as a recurrence, the head for scored tokens only. Nothing for norms, recomputation, or copies. A product
of [m, k] and [k, n] counts 2 m k n; a backward counts twice its forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from olmo_rl.config import ModelConfig
from olmo_rl.mixers import mixer_of


def training_flops(model: ModelConfig, *, lengths: Sequence[int], scored: int) -> int:
    """Forward and backward over documents of `lengths` tokens, `scored` of which go through the head."""
    forward = sum(lengths) * 2 * weights_of_token(model) + 2 * scored * model.dim * model.vocab_size
    return 3 * (forward + mixing_flops(model, lengths=lengths))


def weights_of_token(model: ModelConfig) -> int:
    """Elements of the weights that one token is multiplied with, without embedding and head."""
    width = model.dim if model.latent_dim is None else model.latent_dim
    routed = model.dim * model.num_experts + model.top_k * 3 * width * model.expert_hidden
    routed += 3 * model.dim * model.shared_hidden
    routed += 0 if model.latent_dim is None else 2 * model.dim * width
    total = 0
    for layer, kind in enumerate(model.layer_types):
        total += mixer_of(kind).weights(model)
        total += routed if layer in model.routed_layers else 3 * model.dim * model.dense_hidden
    return total


def mixing_flops(model: ModelConfig, *, lengths: Sequence[int]) -> int:
    """One forward's products between tokens of the same document."""
    return sum(mixer_of(kind).flops(model, lengths) for kind in model.layer_types)
