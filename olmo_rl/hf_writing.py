"""`model.*` of ours -> config.json of a Hugging Face directory: the architecture follows from the model.

Refused: what no architecture says, key by key. Whether one does is found by reading the written fields back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from olmo_rl.config import BlockNorms, LayerType, ModelConfig, QkNorm
from olmo_rl.hf_config import FREE, READERS, HfFormat, meaning, typed
from olmo_rl.hf_fields import Fields
from olmo_rl.types import Refusal

_CLASSES = {
    HfFormat.olmo3moe: "Olmo3MoeForCausalLM",
    HfFormat.qwen3_moe: "Qwen3MoeForCausalLM",
    HfFormat.olmoe: "OlmoeForCausalLM",
}


def format_of(model: ModelConfig) -> HfFormat:
    """The one architecture that says what `model` is; a Refusal that names what none can say."""
    if model.block_norms is not BlockNorms.before:
        kind = HfFormat.olmo3moe
    else:
        kind = HfFormat.olmoe if model.qk_norm is QkNorm.projection else HfFormat.qwen3_moe
    stored = Fields(values=config_json(model, kind=kind, eos_id=None))
    back = READERS[kind](stored)
    ours, theirs = meaning(model), meaning(back)
    reasons = [
        f"model.{name}={typed(getattr(model, name))}: {kind.value}, the architecture for "
        f"model.block_norms={model.block_norms.value} model.qk_norm={model.qk_norm.value}, cannot say that"
        for name in ModelConfig.__dataclass_fields__
        if name not in FREE and ours.get(name) != theirs.get(name)
    ]
    reasons += [f"{kind.value}: {reason}" for reason in stored.reasons]
    if reasons:
        if kind is not HfFormat.olmo3moe:
            reasons.append("the hybrid architecture olmo3moe needs model.block_norms=after or both")
        raise Refusal(reasons)
    return kind


def config_json(model: ModelConfig, *, kind: HfFormat, eos_id: int | None) -> dict[str, Any]:
    """The content of config.json. Whether it says all of `model` is for `format_of` to judge."""
    values: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind.value,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layer_types),
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "num_experts_per_tok": model.top_k,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": None,
    }
    if model.rope_theta is not None:
        values["rope_theta"] = model.rope_theta
    return values | _WRITERS[kind](model)


def _write_qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": model.head_dim,
        "intermediate_size": model.dense_hidden,
        "moe_intermediate_size": model.expert_hidden,
        "num_experts": model.num_experts,
        "mlp_only_layers": sorted(model.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": model.route_norm,
        "use_sliding_window": False,
    }


def _write_olmoe(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.expert_hidden,
        "num_experts": model.num_experts,
        "norm_topk_prob": model.route_norm,
        "clip_qkv": None,
    }


def _write_olmo3moe(model: ModelConfig) -> dict[str, Any]:
    routed = set(model.routed_layers)
    values: dict[str, Any] = {
        "attention_hidden_size": model.num_heads * model.head_dim,
        "head_dim": model.head_dim,
        "dense_mlp_intermediate_size": model.dense_hidden,
        "moe_intermediate_size": model.expert_hidden,
        "shared_expert_intermediate_size": model.shared_hidden or None,
        "n_routed_experts": model.num_experts,
        "gating_function": model.score_function.value,
        "normalize_expert_weights": 1.0 if model.route_norm else None,
        "restore_weight_scale": model.route_scale == model.top_k,
        "sliding_window": model.sliding_window,
        "use_head_qk_norm": model.qk_norm is QkNorm.head,
        "use_rope": model.rope_theta is not None,
        "latent_moe_dim": model.latent_dim,
        "latent_moe_up_proj_input_norm": model.latent_norm,
        "layer_types": [kind.value for kind in model.layer_types],
        "dense_layers_indices": [i for i in range(len(model.layer_types)) if i not in routed],
        "use_peri_ln": model.block_norms is BlockNorms.both,
    }
    if LayerType.linear_attention in model.layer_types:
        for key in ("linear_num_key_heads", "linear_num_value_heads"):
            values[key] = model.kda_heads
        for key in ("linear_key_head_dim", "linear_value_head_dim"):
            values[key] = model.kda_head_dim
        values["linear_conv_kernel_dim"] = model.conv_size
        values["linear_allow_neg_eigval"] = model.kda_negative_eigenvalues
        values["linear_norm_eps"] = model.norm_eps
    return values


_WRITERS: Mapping[HfFormat, Callable[[ModelConfig], dict[str, Any]]] = {
    HfFormat.qwen3_moe: _write_qwen3_moe,
    HfFormat.olmoe: _write_olmoe,
    HfFormat.olmo3moe: _write_olmo3moe,
}
