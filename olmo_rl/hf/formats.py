"""Architectures: config.json of Hugging Face directories <-> our `model.*`, by the table `FORMATS`.

`olmo3moe` (modeling file in the ai2-olmo-core 3.0.0 wheel), `qwen3_moe` and `olmoe` (transformers 5.24, and
the older spelling of RoPE fields). Every field of a config.json is read, compared with the one value that our
decoder implements, or listed as a field that no forward depends on. Any other field is refused by name: an
unknown field may change the model. No torch here, and no transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from olmo_rl.config import BlockNorms, LayerType, ModelConfig, QkNorm, ScoreFunction
from olmo_rl.hf.fields import MOST_EXPERTS, MOST_LAYERS, Fields
from olmo_rl.hf.json_files import read_json
from olmo_rl.types import Refusal

CONFIG_FILE = "config.json"


class HfFormat(Enum):
    """Architectures by their `model_type`."""

    olmo3moe = "olmo3moe"
    qwen3_moe = "qwen3_moe"
    olmoe = "olmoe"


def is_hf_directory(path: str | Path) -> bool:
    """Return whether a directory has a config.json and no checkpoint of olmo_rl."""
    return (Path(path) / CONFIG_FILE).is_file() and not (Path(path) / ".metadata").is_file()


def read_config(directory: str | Path, *, key: str = "init_from") -> tuple[HfFormat, ModelConfig]:
    """Return the architecture and the model of a Hugging Face directory, with `tokenizer` set to that
    directory. `key` is the configuration key that refusals name.
    """
    path = Path(directory) / CONFIG_FILE
    where = f"{key}={directory}: {CONFIG_FILE}"
    values = read_json(path, where=where, fix="give a whole Hugging Face directory")
    if not isinstance(values, dict):
        raise Refusal(f"{where} is not a JSON object")
    known = [kind.value for kind in HfFormat]
    if values.get("model_type") not in known:
        raise Refusal(
            f"{where} has model_type={values.get('model_type')!r}, which is none of {', '.join(known)}"
        )
    kind = HfFormat(values["model_type"])
    fields = Fields(values=values)
    model = FORMATS[kind].read(fields)
    fields.refuse_unread()
    if fields.reasons:
        raise Refusal([f"{where}: {reason}" for reason in fields.reasons])
    model.tokenizer = str(directory)
    return kind, model


def _common(fields: Fields) -> dict[str, Any]:
    """Read the fields that the three architectures name equally."""
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False, None)
    fields.require("attention_dropout", 0, None)
    heads = fields.need("num_attention_heads")
    return {
        "vocab_size": fields.need("vocab_size"),
        "dim": fields.need("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads", heads),
        "top_k": fields.need("num_experts_per_tok", most=MOST_EXPERTS),
        "tie_embeddings": fields.get("tie_word_embeddings", False),
        "init_std": float(fields.get("initializer_range", 0.02)),
        "max_seq_len": fields.need("max_position_embeddings"),
    }


def _read_qwen3_moe(fields: Fields) -> ModelConfig:
    fields.require("use_sliding_window", False, None)
    fields.read.update(("sliding_window", "max_window_layers"))  # of no effect without use_sliding_window
    common, layers = _common(fields), fields.need("num_hidden_layers", most=MOST_LAYERS)
    fields.require("layer_types", None, ["full_attention"] * layers)
    # Of no effect in transformers; some releases spell them out.
    fields.require("qkv_bias", False, None)
    fields.require("use_qk_norm", True, None)
    fields.require("shared_expert_intermediate_size", 0, None)
    dense, step = fields.get("mlp_only_layers", []), fields.get("decoder_sparse_step", 1)
    # transformers writes the number under its other name.
    name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    experts = fields.need(name, least=0, most=MOST_EXPERTS)
    fields.require("num_experts", experts)
    sparse = [i for i in range(layers) if i not in dense and experts > 0 and (i + 1) % step == 0]
    return ModelConfig(
        **common,
        layer_types=[LayerType.full_attention] * layers,
        dense_layers=[i for i in range(layers) if i not in sparse],
        dense_hidden=fields.get("intermediate_size", 6144),
        head_dim=fields.get("head_dim", common["dim"] // common["num_heads"]),
        qk_norm=QkNorm.head,
        rope_theta=fields.theta(10000.0),
        num_experts=experts,
        expert_hidden=fields.need("moe_intermediate_size"),
        route_norm=fields.get("norm_topk_prob", False),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
    )


def _read_olmoe(fields: Fields) -> ModelConfig:
    fields.require("clip_qkv", None)
    common, layers = _common(fields), fields.need("num_hidden_layers", most=MOST_LAYERS)
    return ModelConfig(
        **common,
        layer_types=[LayerType.full_attention] * layers,
        head_dim=common["dim"] // common["num_heads"],
        qk_norm=QkNorm.projection,
        rope_theta=fields.theta(10000.0),
        num_experts=fields.get("num_experts", 64),
        expert_hidden=fields.need("intermediate_size"),
        route_norm=fields.get("norm_topk_prob", False),
        norm_eps=float(fields.get("rms_norm_eps", 1e-5)),
    )


def _read_olmo3moe(fields: Fields) -> ModelConfig:
    common, layers = _common(fields), fields.need("num_hidden_layers", most=MOST_LAYERS)
    top_k, eps = common["top_k"], float(fields.get("rms_norm_eps", 1e-5))
    for key, allowed in _OLMO3MOE_HELD.items():
        fields.require(key, *allowed)
    fields.require("emo_eval_document_expert_pool", None, fields.values.get("n_routed_experts"))
    fields.read.update(_OLMO3MOE_WITHOUT_EFFECT)
    attention = fields.get("attention_hidden_size", 4096, null=common["dim"])
    types = fields.get("layer_types", [("sliding", "full")[i % 2] + "_attention" for i in range(layers)])
    strange = sorted(set(types) - {kind.value for kind in LayerType})
    if strange or len(types) != layers:
        fields.reasons.append(f"layer_types names {len(types)} of {layers} layers, unknown: {strange}")
        types = ["full_attention"] * layers
    scale = float(top_k) if fields.get("restore_weight_scale", True) else 1.0
    scale *= (fields.get("original_num_experts_per_tok", top_k) / top_k) ** 0.5
    theta = fields.theta(10000.0)
    model = ModelConfig(
        **common,
        layer_types=[LayerType(name) for name in types],
        dense_layers=fields.get("dense_layers_indices", [0]),
        dense_hidden=fields.get("dense_mlp_intermediate_size", 11008),
        head_dim=fields.get("head_dim", attention // common["num_heads"]),
        qk_norm=QkNorm.head if fields.get("use_head_qk_norm", False) else QkNorm.projection,
        rope_theta=theta if fields.get("use_rope", True) else None,
        sliding_window=fields.get("sliding_window", 4096),
        num_experts=fields.need("n_routed_experts", least=0, most=MOST_EXPERTS),
        expert_hidden=fields.need("moe_intermediate_size"),
        shared_hidden=fields.get("shared_expert_intermediate_size", 2048, null=0),
        latent_dim=fields.get("latent_moe_dim", None),
        latent_norm=fields.get("latent_moe_up_proj_input_norm", False),
        score_function=ScoreFunction(fields.choose("gating_function", "softmax", "sigmoid")),
        route_norm=fields.get("normalize_expert_weights", 1.0, null=0) != 0,
        route_scale=scale,
        norm_eps=eps,
        block_norms=BlockNorms.both if fields.get("use_peri_ln", False) else BlockNorms.after,
    )
    _read_linear(fields, model)
    return model


# Fields of which only the plain value is supported.
_OLMO3MOE_HELD: Mapping[str, tuple[Any, ...]] = {
    "normalize_expert_weights": (1.0, None),
    "qk_norm_per_head_gains": (False, None),
    "scalable_softmax": (False, None),
    "attention_gate_type": (None,),
    "latent_moe_bias": (False, None),
    "embed_scale": (1.0, None),
    "embed_norm": (False, None),
}


# Fields of pretraining, of an absent gate, and of converters.
_OLMO3MOE_WITHOUT_EFFECT = (
    "emo_min_document_expert_pool",
    "emo_max_document_expert_pool",
    "emo_eos_token_id",
    "global_load_balancing",
    "attention_gate_full_precision",
    "dense_layers_use_shared_expert",
)


def _read_linear(fields: Fields, model: ModelConfig) -> None:
    """Read the fields of KDA layers; they have no effect in a model without such layers."""
    if LayerType.linear_attention not in model.layer_types:
        fields.read.update(key for key in fields.values if key.startswith("linear_"))
        return
    model.kda_heads = fields.need("linear_num_key_heads")
    model.kda_head_dim = fields.need("linear_key_head_dim")
    model.conv_size = fields.get("linear_conv_kernel_dim", 4)
    model.kda_negative_eigenvalues = fields.get("linear_allow_neg_eigval", False)
    fields.require("linear_num_value_heads", None, model.kda_heads)
    fields.need("linear_value_head_dim")
    fields.require("linear_value_head_dim", model.kda_head_dim)
    if float(fields.get("linear_norm_eps", 1e-5)) != model.norm_eps:
        fields.reasons.append(f"linear_norm_eps differs from rms_norm_eps={model.norm_eps}: ours is one")


def config_json(model: ModelConfig, *, kind: HfFormat, eos_id: int | None) -> dict[str, Any]:
    """Return the content of config.json. `format_of` decides whether it describes all of `model`."""
    values: dict[str, Any] = {
        "architectures": [FORMATS[kind].class_name],
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
    return values | FORMATS[kind].write(model)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One architecture: its class in transformers, and both directions between its fields and `model.*`."""

    class_name: str
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]


FORMATS: Mapping[HfFormat, Format] = {
    HfFormat.qwen3_moe: Format(
        class_name="Qwen3MoeForCausalLM", read=_read_qwen3_moe, write=_write_qwen3_moe
    ),
    HfFormat.olmoe: Format(class_name="OlmoeForCausalLM", read=_read_olmoe, write=_write_olmoe),
    HfFormat.olmo3moe: Format(class_name="Olmo3MoeForCausalLM", read=_read_olmo3moe, write=_write_olmo3moe),
}
