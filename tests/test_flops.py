"""Operations counted by hand, and what a bench makes of rows and events: pads never count as work done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.bench_train import PHASES, figures
from olmo_rl.config import LayerType, ModelConfig
from olmo_rl.planning.flops import mixing_flops, training_flops, weights_of_token

ATTENTION = ModelConfig(
    vocab_size=11,
    dim=6,
    layer_types=[LayerType.full_attention],
    num_heads=3,
    num_kv_heads=1,
    head_dim=2,
    num_experts=0,
    dense_hidden=5,
)


def test_attention_counts_squared_lengths_of_documents_and_not_of_the_row() -> None:
    three, one = (mixing_flops(ATTENTION, lengths=lengths) for lengths in ([1000] * 3, [3000]))
    assert three == 3 * (1000 * 1001 // 2) * 3 * 4 * 2
    assert one == (3000 * 3001 // 2) * 3 * 4 * 2
    assert one / three == pytest.approx(3, rel=1e-3)
    sliding = replace(ATTENTION, layer_types=[LayerType.sliding_attention], sliding_window=4)
    # Five tokens see 1 + 2 + 3 + 4 + 4, two see 1 + 2.
    assert mixing_flops(sliding, lengths=[5, 2]) == (14 + 3) * 3 * 4 * 2


def test_a_token_counts_the_weights_that_it_is_multiplied_with() -> None:
    attention, dense = 6 * 2 * (3 + 1 + 1 + 3), 3 * 6 * 5
    assert weights_of_token(ATTENTION) == attention + dense
    routed = replace(ATTENTION, num_experts=8, top_k=2, expert_hidden=7, shared_hidden=4, latent_dim=3)
    experts = 6 * 8 + 2 * 3 * 3 * 7 + 3 * 6 * 4 + 2 * 6 * 3
    assert weights_of_token(routed) == attention + experts
    linear = replace(
        ATTENTION, layer_types=[LayerType.linear_attention], kda_heads=2, kda_head_dim=4, conv_size=3
    )
    mixer = 6 * (4 * 8 + 2 * 4 + 2) + 2 * 4 * 8 + 3 * 3 * 8
    assert weights_of_token(linear) == mixer + dense
    assert mixing_flops(linear, lengths=[5, 2]) == 7 * 2 * 6 * 16


def test_training_is_three_forwards_with_the_head_for_scored_tokens_only() -> None:
    lengths, scored = [4, 3], 5
    forward = 7 * 2 * weights_of_token(ATTENTION) + mixing_flops(ATTENTION, lengths=lengths) + 2 * 5 * 6 * 11
    assert training_flops(ATTENTION, lengths=lengths, scored=scored) == 3 * forward
    assert training_flops(ATTENTION, lengths=[], scored=0) == 0


def test_throughput_is_that_of_real_tokens() -> None:
    row = {f"time/{phase}_s": 0.125 for phase in PHASES} | {
        "time/update_s": 2.0,
        "time/rollout_s": 0.5,
        "time/collate_s": 0.25,
        "time/plan_ms": 3.0,
        "memory/peak_allocated_gib": 1.5,
    }
    later = row | {"memory/peak_allocated_gib": 1.75}
    del later["time/rollout_s"]  # only the first step of a collection has read a file
    event = {"real_tokens": 11, "padded_tokens": 16, "packs": 2}
    found = figures([row, later], packing=[event, event])
    assert found["real tokens/s"] == 22 / 4
    assert found["real share of tokens"] == 0.6875
    assert found["seconds an update"] == 2.0
    assert found["peak memory, GiB"] == 1.75
    assert found["data, ms"] == 500.0
    assert found["plan, ms"] == 3.0
    assert found["publish, ms"] == 125.0
    assert found["rest of the update, ms"] == 2000 - 4 * 125
