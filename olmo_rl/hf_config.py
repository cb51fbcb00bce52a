"""config.json of Hugging Face directories and `model.*` of ours: one from the other, for three architectures.

`olmo3moe` (modeling file in the ai2-olmo-core 3.0.0 wheel), `qwen3_moe` and `olmoe` (transformers 5.24, and
the older spelling of RoPE fields). Every field of a config.json is read, held to the value that our decoder
implements, or listed as one that no forward depends on. Anything else is refused by its name: an unknown
field may change the model. No torch here, and no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from olmo_rl.config import BlockNorms, Config, LayerType, ModelConfig, QkNorm, ScoreFunction
from olmo_rl.hf_fields import Fields
from olmo_rl.types import Refusal

CONFIG_FILE = "config.json"


class HfFormat(Enum):
    """Architectures by their `model_type`."""

    olmo3moe = "olmo3moe"
    qwen3_moe = "qwen3_moe"
    olmoe = "olmoe"


FREE = ("tokenizer", "init_std", "max_seq_len")  # of ModelConfig: not what the weights are


def is_hf_directory(path: str | Path) -> bool:
    """Whether there is a config.json and no checkpoint of ours."""
    return (Path(path) / CONFIG_FILE).is_file() and not (Path(path) / ".metadata").is_file()


def read_config(directory: str | Path, *, key: str = "init_from") -> tuple[HfFormat, ModelConfig]:
    """The architecture and the model of a Hugging Face directory; `tokenizer` is that directory. `key`: what
    refusals call it.
    """
    path = Path(directory) / CONFIG_FILE
    where = f"{key}={directory}: {CONFIG_FILE}"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{where} cannot be read ({error}): give a whole Hugging Face directory") from None
    if not isinstance(values, dict):
        raise Refusal(f"{where} is no JSON object")
    known = [kind.value for kind in HfFormat]
    if values.get("model_type") not in known:
        raise Refusal(
            f"{where} has model_type={values.get('model_type')!r}, which is none of {', '.join(known)}"
        )
    kind = HfFormat(values["model_type"])
    fields = Fields(values=values)
    model = READERS[kind](fields)
    fields.rest()
    if fields.reasons:
        raise Refusal([f"{where}: {reason}" for reason in fields.reasons])
    model.tokenizer = str(directory)
    return kind, model


def _common(fields: Fields) -> dict[str, Any]:
    """What the three architectures spell alike."""
    fields.hold("hidden_act", "silu")
    fields.hold("attention_bias", False, None)
    fields.hold("attention_dropout", 0, None)
    heads = fields.need("num_attention_heads")
    return {
        "vocab_size": fields.need("vocab_size"),
        "dim": fields.need("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads", heads),
        "top_k": fields.need("num_experts_per_tok"),
        "tie_embeddings": fields.get("tie_word_embeddings", False),
        "init_std": float(fields.get("initializer_range", 0.02)),
        "max_seq_len": fields.need("max_position_embeddings"),
    }


def _read_qwen3_moe(fields: Fields) -> ModelConfig:
    fields.hold("use_sliding_window", False, None)
    fields.read.update(("sliding_window", "max_window_layers"))  # of no effect without use_sliding_window
    common, layers = _common(fields), fields.need("num_hidden_layers")
    fields.hold("layer_types", None, ["full_attention"] * layers)
    # Of no effect in transformers; some releases spell them out.
    fields.hold("qkv_bias", False, None)
    fields.hold("use_qk_norm", True, None)
    fields.hold("shared_expert_intermediate_size", 0, None)
    dense, step = fields.get("mlp_only_layers", []), fields.get("decoder_sparse_step", 1)
    # transformers writes the number under its other name.
    name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    experts = fields.need(name, least=0)
    fields.hold("num_experts", experts)
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
    fields.hold("clip_qkv", None)
    common, layers = _common(fields), fields.need("num_hidden_layers")
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
    common, layers = _common(fields), fields.need("num_hidden_layers")
    top_k, eps = common["top_k"], float(fields.get("rms_norm_eps", 1e-5))
    for key, allowed in _OLMO3MOE_HELD.items():
        fields.hold(key, *allowed)
    fields.hold("emo_eval_document_expert_pool", None, fields.values.get("n_routed_experts"))
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
        num_experts=fields.need("n_routed_experts", least=0),
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


# Fields that only their plain value is supported of.
_OLMO3MOE_HELD: Mapping[str, tuple[Any, ...]] = {
    "normalize_expert_weights": (1.0, None),
    "qk_norm_per_head_gains": (False, None),
    "scalable_softmax": (False, None),
    "attention_gate_type": (None,),
    "latent_moe_bias": (False, None),
    "embed_scale": (1.0, None),
    "embed_norm": (False, None),
}


# Of pretraining, of a gate that is not there, and of converters.
_OLMO3MOE_WITHOUT_EFFECT = (
    "emo_min_document_expert_pool",
    "emo_max_document_expert_pool",
    "emo_eos_token_id",
    "global_load_balancing",
    "attention_gate_full_precision",
    "dense_layers_use_shared_expert",
)


def _read_linear(fields: Fields, model: ModelConfig) -> None:
    """The fields of KDA layers; they say nothing where the model has none."""
    if LayerType.linear_attention not in model.layer_types:
        fields.read.update(key for key in fields.values if key.startswith("linear_"))
        return
    model.kda_heads = fields.need("linear_num_key_heads")
    model.kda_head_dim = fields.need("linear_key_head_dim")
    model.conv_size = fields.get("linear_conv_kernel_dim", 4)
    model.kda_negative_eigenvalues = fields.get("linear_allow_neg_eigval", False)
    fields.hold("linear_num_value_heads", None, model.kda_heads)
    fields.need("linear_value_head_dim")
    fields.hold("linear_value_head_dim", model.kda_head_dim)
    if float(fields.get("linear_norm_eps", 1e-5)) != model.norm_eps:
        fields.reasons.append(f"linear_norm_eps differs from rms_norm_eps={model.norm_eps}: ours is one")


READERS: Mapping[HfFormat, Callable[[Fields], ModelConfig]] = {
    HfFormat.qwen3_moe: _read_qwen3_moe,
    HfFormat.olmoe: _read_olmoe,
    HfFormat.olmo3moe: _read_olmo3moe,
}


def meaning(model: ModelConfig) -> dict[str, Any]:
    """The keys of `model` that its weights and its forward depend on, as plain values."""
    values = {name: getattr(model, name) for name in ModelConfig.__dataclass_fields__ if name not in FREE}
    routed = set(model.routed_layers)
    values["dense_layers"] = [i for i in range(len(model.layer_types)) if i not in routed]
    drop: set[str] = set()
    if not values["dense_layers"]:
        drop.add("dense_hidden")
    if not routed:
        drop |= {"expert_hidden", "shared_hidden", "latent_dim", "latent_norm", "top_k"}
        drop |= {"score_function", "route_norm", "route_scale"}
    if model.latent_dim is None:
        drop.add("latent_norm")
    if LayerType.sliding_attention not in model.layer_types:
        drop.add("sliding_window")
    if LayerType.linear_attention not in model.layer_types:
        drop |= {"kda_heads", "kda_head_dim", "conv_size", "kda_negative_eigenvalues"}
    if set(model.layer_types) == {LayerType.linear_attention}:
        drop |= {"num_heads", "num_kv_heads", "head_dim", "qk_norm", "rope_theta"}
    return {name: _plain(value) for name, value in values.items() if name not in drop}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def disagreements(model: ModelConfig, *, directory: str | Path, key: str = "init_from") -> list[str]:
    """Why `model` is not that of a Hugging Face directory: one line a key, with the override to type."""
    try:
        _, stored = read_config(directory, key=key)
    except Refusal as refusal:
        return list(refusal.reasons)
    ours, theirs = meaning(model), meaning(stored)
    lines = [
        f"model.{name}={typed(ours.get(name, getattr(model, name)))}: {key}={directory} has another: set "
        f"model.{name}={typed(theirs.get(name, getattr(stored, name)))}"
        for name in ModelConfig.__dataclass_fields__
        if name not in FREE and ours.get(name) != theirs.get(name)
    ]
    if model.max_seq_len > stored.max_seq_len:
        lines.append(
            f"model.max_seq_len={model.max_seq_len}: {key}={directory} has max_position_embeddings="
            f"{stored.max_seq_len}: lower it"
        )
    if model.tokenizer == "bytes" and (Path(directory) / "tokenizer_config.json").is_file():
        lines.append(f"model.tokenizer=bytes: {key}={directory} has its own: set model.tokenizer={directory}")
    return lines


def directory_reasons(config: Config) -> list[str]:
    """Why the Hugging Face directories that a configuration starts from are not of its model."""
    given = {"init_from": config.init_from, "loss.reference": config.loss.reference}
    return [
        line
        for key, path in given.items()
        if path is not None and is_hf_directory(path)
        for line in disagreements(config.model, directory=path, key=key)
    ]


def typed(value: Any) -> str:
    """A value as one types it on the command line."""
    value = _plain(value)
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)
