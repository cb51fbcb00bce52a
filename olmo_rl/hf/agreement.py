"""Compares `model.*` with the model of a Hugging Face directory, key by key. No torch.

`max_seq_len`, `init_std` and `tokenizer` are not properties of the weights and are left out of `meaning`.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

from olmo_rl.config import BlockNorms, Config, LayerType, ModelConfig, QkNorm
from olmo_rl.hf.fields import Fields
from olmo_rl.hf.formats import FORMATS, HfFormat, config_json, is_hf_directory, read_config
from olmo_rl.types import Refusal

FREE = ("tokenizer", "init_std", "max_seq_len")  # fields of ModelConfig that do not describe weights


def meaning(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of `model` that its weights and its forward depend on, as plain values."""
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
    return {name: _without_enums(value) for name, value in values.items() if name not in drop}


def _without_enums(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_enums(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def disagreements(model: ModelConfig, *, directory: str | Path, key: str = "init_from") -> list[str]:
    """List why `model` differs from a Hugging Face directory: one line a key, with the override to type."""
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
    """List where the Hugging Face directories that a configuration starts from differ from its model."""
    given = {"init_from": config.init_from, "loss.reference": config.loss.reference}
    return [
        line
        for key, path in given.items()
        if path is not None and is_hf_directory(path)
        for line in disagreements(config.model, directory=path, key=key)
    ]


def typed(value: Any) -> str:
    """Return a value as typed on the command line."""
    value = _without_enums(value)
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def format_of(model: ModelConfig) -> HfFormat:
    """Return the architecture that expresses `model`; raise a Refusal that names every key it cannot express.

    Decided by reading the written fields back.
    """
    if model.block_norms is not BlockNorms.before:
        kind = HfFormat.olmo3moe
    else:
        kind = HfFormat.olmoe if model.qk_norm is QkNorm.projection else HfFormat.qwen3_moe
    stored = Fields(values=config_json(model, kind=kind, eos_id=None))
    back = FORMATS[kind].read(stored)
    ours, theirs = meaning(model), meaning(back)
    reasons = [
        f"model.{name}={typed(getattr(model, name))}: {kind.value}, the architecture for model.block_norms="
        f"{model.block_norms.value} model.qk_norm={model.qk_norm.value}, cannot express that"
        for name in ModelConfig.__dataclass_fields__
        if name not in FREE and ours.get(name) != theirs.get(name)
    ]
    reasons += [f"{kind.value}: {reason}" for reason in stored.reasons]
    if reasons:
        if kind is not HfFormat.olmo3moe:
            reasons.append("the hybrid architecture olmo3moe needs model.block_norms=after or both")
        raise Refusal(reasons)
    return kind
