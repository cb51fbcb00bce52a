"""What the length of a response takes from its reward. No torch here."""

from __future__ import annotations

import math

from olmo_rl.config import RolloutsConfig
from olmo_rl.tasks.rewards import Judged
from olmo_rl.types import Sample

ROUNDING = 1e-9  # of a verdict that a penalty was taken from and added to again
PENALTY, VERIFIER = "length_penalty", "verifier"


def length_penalty(tokens: int, *, longest: int, buffer: int) -> float:
    """Soft overlong punishment of DAPO (arXiv 2503.14476): 0 up to `longest - buffer` generated tokens, then
    a straight line to -1 at `longest`.
    """
    return -min(1.0, max(0, tokens - (longest - buffer)) / buffer)


def shaped(verdict: Judged, *, tokens: int, rollouts: RolloutsConfig) -> Judged:
    """The verdict with the length penalty of a response of `tokens` tokens, where there is one; an unknown
    verdict stays unknown.
    """
    if rollouts.length_penalty == 0:
        return verdict
    longest = rollouts.max_new_tokens
    buffer = max(1, longest // 4) if rollouts.length_buffer is None else rollouts.length_buffer
    penalty = length_penalty(tokens, longest=longest, buffer=buffer)
    known = {VERIFIER: None if math.isnan(verdict.reward) else verdict.reward}
    return Judged(
        reward=verdict.reward + rollouts.length_penalty * penalty,
        parts={**(verdict.parts or known), PENALTY: penalty},
    )


def verdict_of(sample: Sample, *, rollouts: RolloutsConfig) -> float:
    """The reward without the length penalty; NaN where it is unknown."""
    penalty = (sample.reward_parts or {}).get(PENALTY) or 0.0
    return sample.reward - rollouts.length_penalty * penalty
