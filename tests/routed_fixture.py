"""Eight documents written by rule, tokens and routes too: what any other implementation can be given as well.

Lengths 17, 87, 19, 13, 23, 89, 29, 11 under a budget of 128; token (position + 11 i) mod 256; four experts,
top-2, where token id t is routed to (t mod 4, (t + 1) mod 4) in both routed layers; responses of
min(7 + i, n - 2) tokens, the second of them not trained; rewards i mod 2 in groups of four.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from training_cases import LAYOUT, MODEL

from olmo_rl.types import Sample

FIXTURE_LENGTHS = (17, 87, 19, 13, 23, 89, 29, 11)
FIXTURE_BUDGET = 128
# Many small KDA heads: with two, the gradient of A_log is the small rest of large terms (matrix_cases.py).
FIXTURE_MODEL = replace(MODEL, max_seq_len=FIXTURE_BUDGET, kda_heads=8, kda_head_dim=4)
CHANGED = 4  # the document of `fixture_samples(changed=True)` that has other tokens


def fixture_samples(prefix: str, *, changed: bool = False) -> list[Sample]:
    """`changed`: one document holds other tokens, with the routes that it had."""
    samples = []
    for i, length in enumerate(FIXTURE_LENGTHS):
        tokens = (np.arange(length) + 11 * i) % 256
        first = tokens[:-1] % LAYOUT.num_experts
        row = np.stack([first, (first + 1) % LAYOUT.num_experts], axis=-1)
        prompt = length - min(7 + i, length - 2)
        loss_mask = np.arange(length) >= prompt
        loss_mask[prompt + 1] = False
        samples.append(
            Sample(
                id=f"{prefix}{i}",
                group=f"{prefix}group{i // 4}",
                tokens=(tokens + (7 if changed and i == CHANGED else 0)).astype(np.int32),
                response_mask=np.arange(length) >= prompt,
                loss_mask=loss_mask,
                # Near a uniform policy, so that weights lie below, inside and above [0.9, 1.1].
                behavior_logprobs=(-5.5 + 0.3 * np.sin(np.arange(length) + i)).astype(np.float32),
                reward=float(i % 2),
                policy_version=0,
                routes=np.stack([row] * len(LAYOUT.routed_layers), axis=1).astype(np.int16),
                finish_reason="stop",
            )
        )
    return samples
