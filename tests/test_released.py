"""Models of conf/model/ that were released elsewhere, against the config.json of their release.

The values below are those of the files on huggingface.co: of Qwen/Qwen3-30B-A3B, and of
allenai/OLMoE-1B-7B-0924, which leaves rms_norm_eps to the default of transformers, 1e-5; OLMoE-1B-7B-0125
states it and is otherwise equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from composing import compose

from olmo_rl.hf.agreement import disagreements, meaning
from olmo_rl.hf.formats import read_config
from olmo_rl.policy.weights import parameter_shapes
from olmo_rl.refusals import refusals
from olmo_rl.types import Refusal
from recipes import validate

COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN3 = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "transformers_version": "4.51.0",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "sliding_window": None,
    "use_sliding_window": False,
}
OLMOE = COMMON | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "transformers_version": "4.43.0.dev0",
    "eos_token_id": 50279,
    "pad_token_id": 1,
    "vocab_size": 50304,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "intermediate_size": 1024,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
    "rope_theta": 10000.0,
    "clip_qkv": None,
    "max_position_embeddings": 4096,
}
RELEASED = {"qwen3_30b_a3b": QWEN3, "olmoe_1b_7b": OLMOE}
# Parameters in all and active, as counted from the shapes, and as published, in thousand millions.
SIZES = {
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704, 30.5, 3.3),
    "olmoe_1b_7b": (6_919_161_856, 1_282_017_280, 6.9, 1.3),
}


def write(directory: Path, values: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize("name", RELEASED)
def test_every_value_is_that_of_the_release(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path, RELEASED[name])
    kind, released = read_config(directory)
    ours = compose(f"model={name}").model
    assert kind.value == RELEASED[name]["model_type"]
    assert meaning(ours) == meaning(released)
    assert (ours.max_seq_len, ours.init_std) == (released.max_seq_len, released.init_std)
    assert disagreements(ours, directory=directory) == []


@pytest.mark.parametrize("name", RELEASED)
def test_validate_counts_the_parameters_that_were_published(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    total, active, published, published_active = SIZES[name]
    validate.run(compose(f"model={name}", "recipe=validate", "rollouts.max_new_tokens=16"))
    assert f"{total:,} parameters, {active:,} active per token" in capsys.readouterr().out
    assert total / 1e9 == pytest.approx(published, abs=0.05)
    assert active / 1e9 == pytest.approx(published_active, abs=0.06)
    assert sum(shape.numel() for shape in parameter_shapes(compose(f"model={name}").model).values()) == total


def test_spellings_of_other_releases_are_the_same_model(tmp_path: Path) -> None:
    """OLMoE-1B-7B-0125, the fields that Qwen3-Coder-30B-A3B adds, and those of transformers 5."""
    base = meaning(compose("model=qwen3_30b_a3b").model)
    coder = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert meaning(read_config(write(tmp_path, QWEN3 | coder))[1]) == base
    later = QWEN3 | {
        "num_local_experts": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "dtype": "bfloat16",
        "pad_token_id": None,
    }
    for key in ("num_experts", "rope_theta", "rope_scaling", "torch_dtype"):
        del later[key]
    assert meaning(read_config(write(tmp_path, later))[1]) == base
    january = read_config(write(tmp_path, OLMOE | {"rms_norm_eps": 1e-05}))[1]
    assert meaning(january) == meaning(compose("model=olmoe_1b_7b").model)


def test_a_release_of_another_base_of_rope_is_refused_with_the_override(tmp_path: Path) -> None:
    """Qwen3-30B-A3B-Instruct-2507 differs in two values, and one of them changes every logit."""
    later = write(tmp_path, QWEN3 | {"rope_theta": 10000000, "max_position_embeddings": 262144})
    lines = disagreements(compose("model=qwen3_30b_a3b").model, directory=later)
    assert [line.rpartition(": ")[2] for line in lines] == ["set model.rope_theta=10000000.0"]
    config = compose("+experiment=qwen3_30b_a3b", "recipe=validate", f"init_from={later}")
    assert refusals(config) == []
    with pytest.raises(Refusal, match=r"set model\.rope_theta=10000000\.0"):
        validate.run(config)


def test_the_hybrid_of_that_size_is_of_our_own_and_says_so() -> None:
    """No release of olmo3moe has a config.json to hold it against."""
    config = compose("model=olmo3moe_1b_7b")
    total = sum(shape.numel() for shape in parameter_shapes(config.model).values())
    _, active = validate.count_parameters(config, shapes=parameter_shapes(config.model))
    assert total / 1e9 == pytest.approx(7, abs=0.5)
    assert active / 1e9 == pytest.approx(1.2, abs=0.3)
