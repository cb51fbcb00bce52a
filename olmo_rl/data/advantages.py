"""Rewards -> advantages by group id, and which samples train. NumPy only.

Owns group statistics, the opt-in filters and the question whether a step can train at all. Nothing is left
out without a count. Groups are made by equality of `Sample.group` alone: order, prompts and the spelling of
ids do not matter. Refuses nothing: a reward that is not finite means that judging failed, and such a sample
is never trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import BatchConfig, Filter
from olmo_rl.types import Sample

# Rewards of a group that differ by no more than this share of the largest magnitude are equal: rounding in a
# verifier (0.1 + 0.2 against 0.3) must not become advantages of -1 and 1. It bounds what an offset may hide:
# 1e6 and 1e6 + 0.01 differ, 1e9 and 1e9 + 0.5 do not.
EQUAL_SHARE = 1e-9
_LEAST_SPREAD = 1e-100  # squares of smaller differences underflow, and dividing by their root overflows


def assign_advantages(samples: Sequence[Sample], *, normalize: bool) -> dict[str, int]:
    """Set `advantage` of every sample from the rewards of its group; returns counts.

    A = (reward - mean of the group) / population standard deviation of the group (arXiv 2402.03300, outcome
    supervision); `normalize=False` leaves the division out (Dr.GRPO, arXiv 2503.20783). A group whose rewards
    are all equal, or a group of one, gets exactly 0. A sample whose reward is not finite takes no part in the
    statistics, gets 0 and a loss mask of all false. Statistics are over the samples present, however many the
    group once had.

    Counts: `groups`; `constant_groups` (equal rewards, groups of one included); `single_groups`;
    `failed_rewards` (samples).
    """
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    judged = np.isfinite(rewards)
    counts = {"groups": 0, "constant_groups": 0, "single_groups": 0, "failed_rewards": int((~judged).sum())}
    for positions in _groups(samples).values():
        usable = positions[judged[positions]]
        values = rewards[usable]
        constant = _all_equal(values)
        centred = np.zeros_like(values) if constant else values - values.mean()
        scale = values.std() if normalize and not constant else 1.0
        for position, advantage in zip(usable.tolist(), (centred / scale).tolist(), strict=True):
            samples[position].advantage = advantage
        counts["groups"] += 1
        counts["constant_groups"] += constant
        counts["single_groups"] += len(positions) == 1
    for position in np.flatnonzero(~judged).tolist():
        samples[position].advantage = 0.0
        samples[position].loss_mask = np.zeros(len(samples[position]), dtype=np.bool_)
    if counts["groups"] > 0 and counts["single_groups"] == counts["groups"]:
        warnings.warn(
            f"all {counts['groups']} groups hold one sample, so every advantage is 0 and nothing is learned "
            "from rewards: give the responses of one prompt the same group_id, or raise rollouts.group_size",
            stacklevel=2,
        )
    return counts


def filter_samples(samples: Sequence[Sample], *, config: BatchConfig) -> tuple[list[Sample], dict[str, int]]:
    """The samples that pass the filters, in order, and how many each filter removed.

    `filter_zero_variance` takes all samples of groups whose rewards are all equal, `filter_truncated`
    responses with `finish_reason` "length"; a sample that both would take counts as zero variance. What is
    taken is left out (`drop`) or kept with a loss mask of all false (`mask`). Call it after
    `assign_advantages`: a truncated response still counts in its group's statistics.
    """
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    flat = np.zeros(len(samples), dtype=np.bool_)
    if config.filter_zero_variance:
        for positions in _groups(samples).values():
            values = rewards[positions]
            flat[positions] = _all_equal(values[np.isfinite(values)])
    kept: list[Sample] = []
    counts = {"zero_variance": 0, "truncated": 0}
    for sample, is_flat in zip(samples, flat.tolist(), strict=True):
        truncated = config.filter_truncated and sample.finish_reason == "length"
        if not is_flat and not truncated:
            kept.append(sample)
            continue
        counts["zero_variance" if is_flat else "truncated"] += 1
        if config.filter is Filter.mask:
            kept.append(replace(sample, loss_mask=np.zeros(len(sample), dtype=np.bool_)))
    return kept, counts


def can_train(samples: Sequence[Sample]) -> bool:
    """Whether a step of these samples is an update: any token is scored. Equal rewards make an update whose
    policy gradient is 0; ask for `batch.filter_zero_variance` to leave such groups out.
    """
    return any(bool(sample.scored.any()) for sample in samples)


def _groups(samples: Sequence[Sample]) -> dict[str, NDArray[np.int64]]:
    """Positions of each group's samples, by group id, in order of first appearance."""
    members: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(position)
    return {group: np.array(positions, dtype=np.int64) for group, positions in members.items()}


def _all_equal(rewards: NDArray[np.float64]) -> bool:
    """Whether finite rewards [samples of one group] hold nothing to prefer; true for none or one."""
    if len(rewards) < 2:
        return True
    return bool(np.ptp(rewards) <= max(EQUAL_SHARE * np.abs(rewards).max(), _LEAST_SPREAD))
