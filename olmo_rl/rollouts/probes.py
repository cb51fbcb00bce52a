"""Questions to engines whose right answers are known: one response whose log-probs the trainer computes too,
and draws of one token that independent sampling repeats rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from olmo_rl.policy.engine import Generation, Request

PROMPT_TOKENS = 6
COMPARED_TOKENS = 8
DRAWS = 12
UNLIKELY = -14.0  # log-probability, about one in a million


def compared_request(*, vocab_size: int, max_seq_len: int) -> tuple[Request, int]:
    """A prompt of fixed random ids, and how many tokens to generate."""
    written = min(COMPARED_TOKENS, max_seq_len - 1)
    read = min(PROMPT_TOKENS, max_seq_len - written)
    ids = np.random.default_rng(0).integers(0, vocab_size, read)
    return Request(id="compared", tokens=ids.tolist()), written


def draw_requests(prompt: Sequence[int]) -> list[Request]:
    """The same prompt, once for each draw of one token."""
    return [Request(id=f"draw-{number}", tokens=list(prompt)) for number in range(DRAWS)]


def chance_of_repeats(draws: Sequence[Generation]) -> float | None:
    """The log-probability of drawing one token every time, by the engine's own log-prob of it; None where
    draws differ. A sampler that takes the likeliest tokens alone repeats what its distribution does not.
    """
    if len({int(draw.tokens[-len(draw.logprobs)]) for draw in draws}) > 1:
        return None
    return (len(draws) - 1) * float(draws[0].logprobs[0])
