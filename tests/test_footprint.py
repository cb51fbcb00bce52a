"""What one rank holds, against hand-computed numbers, and what recipe=validate prints of it."""

from __future__ import annotations

import math

import pytest
import torch
from composing import compose_fast

from olmo_rl.config import Source
from olmo_rl.policy.footprint import largest_block, memory_table, parameters_of_rank, publishing
from recipes import validate

SHAPES = {
    "tok_embeddings.weight": torch.Size((10, 4)),
    "layers.0.mixer.wq.weight": torch.Size((8, 4)),
    "layers.0.moe.routed_experts.inner_experts.w1_EFD": torch.Size((4, 6, 4)),
}


def test_the_largest_shard_has_the_rows_that_fsdp_rounds_up_and_the_experts_of_one_rank() -> None:
    # Of 4 ranks: 3 of 10 rows, 2 of 8 rows; with EP2 two experts of 24 elements, shared by two replicas.
    assert parameters_of_rank(SHAPES, world_size=4, ep_degree=2) == 12 + 8 + 24
    assert parameters_of_rank(SHAPES, world_size=1, ep_degree=1) == 40 + 32 + 96


def test_a_gathered_block_is_its_dense_weights_and_one_ranks_experts() -> None:
    assert largest_block(SHAPES, ep_degree=2) == 32 + 48
    assert largest_block(SHAPES, ep_degree=4) == 32 + 24


def test_validate_prints_parameters_and_memory_of_a_released_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    validate.run(compose_fast("+experiment=qwen3_30b_a3b", "recipe=validate", "trainer=nodes"))
    text = capsys.readouterr().out
    assert "30,532,122,624 parameters, 3,353,032,704 active per token" in text
    for name in ("weights", "gradients", "adam", "gathered", "activations", "logits", "publishing", "sum"):
        assert f"memory     {name}" in text


def test_publishing_to_serving_engines_takes_one_parameter_and_one_file_on_rank_0() -> None:
    config = compose_fast("+experiment=qwen3_30b_a3b", "trainer=nodes", "export.shard_gib=2")
    assert config.rollouts.source is Source.vllm
    (line,) = (line for line in memory_table(config, shapes=SHAPES) if line.name == "publishing")
    largest = max(math.prod(shape) for shape in SHAPES.values())
    assert line.bytes == 4 * (2 * largest + sum(math.prod(shape) for shape in SHAPES.values()))
    half = compose_fast("+experiment=qwen3_30b_a3b", "trainer=nodes", "export.dtype=bfloat16")
    assert publishing(half, shapes=SHAPES).bytes == line.bytes - 2 * sum(map(math.prod, SHAPES.values()))
    here = compose_fast("+experiment=packed_moe")
    (line,) = (line for line in memory_table(here, shapes=SHAPES) if line.name == "publishing")
    assert line.how == "full weights on every rank and their gather"


def test_what_is_held_for_engines_is_what_is_sent_at_once_or_a_model_that_is_one_file() -> None:
    wide = {"a": torch.Size((2**15, 2**10)), "b": torch.Size((2**16, 2**12))}  # 0.125 and 1 GiB
    urls = ("rollouts.urls=[http://engine:30000]", "export.shard_gib=0.25")
    named = compose_fast("+experiment=packed_moe", "rollouts=sglang", *urls)
    assert publishing(named, shapes=wide).bytes == (2 + 0.25) * 2**30
    unnamed = compose_fast("+experiment=packed_moe", "rollouts=sglang", *urls, "model.block_norms=before")
    assert publishing(unnamed, shapes=wide).bytes == (2 + 1.125) * 2**30
    sent = compose_fast("+experiment=packed_moe", "rollouts=sglang", *urls, "rollouts.publication=collective")
    assert publishing(sent, shapes=wide).bytes == (2 + 0.5) * 2**30
