"""Rewards -> advantages, and which samples train. NumPy only.

Owns baselines and who votes in them (`assign_advantages`), the opt-in filters and the question whether a step
can train at all. Nothing is left out without a count. Groups are made by equality of `Sample.group` alone:
order, prompts and the spelling of ids do not matter. Refuses nothing: a reward that is not finite means that
judging failed, and such a sample is never trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import AdvantageKind, BatchConfig, Filter, LossConfig
from olmo_rl.types import Sample

# Rewards of a group that differ by no more than this share of the largest magnitude are equal: rounding in a
# verifier (0.1 + 0.2 against 0.3) must not become advantages of -1 and 1. It bounds what an offset may hide:
# 1e6 and 1e6 + 0.01 differ, 1e9 and 1e9 + 0.5 do not.
EQUAL_SHARE = 1e-9
_LEAST_SPREAD = 1e-100  # squares of smaller differences underflow, and dividing by their root overflows


def assign_advantages(
    samples: Sequence[Sample], *, config: LossConfig, divergences: NDArray[np.float64] | None = None
) -> dict[str, int]:
    """Set `advantage` of every sample from the rewards of all samples; returns counts. `samples`: everything
    that was drawn for one collection, before any filter.

    `divergences` [samples], in nats: log-probs under the behaviour minus those under the reference policy,
    summed over the trained tokens of a response; `loss.kl_reward_coef` times it is taken from the reward, for
    samples of one episode times their sum. What remains becomes an advantage by `loss.advantage` (`_group`,
    `_leave_one_out`, `_batch`).

    Who votes in a baseline, and in a deviation: every sample that was judged, whatever filter, mask or age
    bound takes it afterwards, and however many members its group once had. A sample whose reward is not
    finite, because a verifier failed or cannot judge, does not vote: it gets 0 and a loss mask of all false.
    With `loss.truncated_votes=false` responses cut at the length limit do not vote either; they still get an
    advantage from the votes of others. The samples of one episode have one vote, and share its advantage;
    it counts as cut where one of them is.

    Counts: `groups`; `constant_groups` (equal rewards, groups of one included); `single_groups`;
    `failed_rewards` (samples).
    """
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    judged = np.isfinite(rewards)
    leaders = _leaders(samples, judged=judged)
    if divergences is not None:
        rewards = rewards - config.kl_reward_coef * _over_episodes(divergences, leaders=leaders)
    ended = np.array([sample.finish_reason == "length" for sample in samples], dtype=np.float64)
    cut = _over_episodes(ended, leaders=leaders) > 0
    votes = (judged if config.truncated_votes else judged & ~cut) & (leaders == np.arange(len(samples)))
    counts = {"groups": 0, "constant_groups": 0, "single_groups": 0, "failed_rewards": int((~judged).sum())}
    advantages = np.zeros(len(samples), dtype=np.float64)
    for positions in _groups(samples).values():
        usable = positions[judged[positions]]
        values, voting = rewards[usable], votes[usable]
        if config.advantage is AdvantageKind.group:
            advantages[usable] = _group(values, voting, normalize=config.normalize_advantages)
        elif config.advantage is AdvantageKind.rloo:
            advantages[usable] = _leave_one_out(values, voting)
        counts["groups"] += 1
        counts["constant_groups"] += _all_equal(values)
        counts["single_groups"] += len(set(leaders[positions].tolist())) == 1
    if config.advantage is AdvantageKind.batch:
        advantages[judged] = _batch(rewards[judged], votes[judged])
    advantages[judged] = advantages[leaders[judged]]
    for position, advantage in enumerate(advantages.tolist()):
        samples[position].advantage = advantage
    for position in np.flatnonzero(~judged).tolist():
        samples[position].loss_mask = np.zeros(len(samples[position]), dtype=np.bool_)
    alone = counts["groups"] > 0 and counts["single_groups"] == counts["groups"]
    if alone and config.advantage is not AdvantageKind.batch:
        warnings.warn(
            f"all {counts['groups']} groups hold one sample, so every advantage is 0 and nothing is learned "
            "from rewards: give the responses of one prompt the same group_id, or raise rollouts.group_size",
            stacklevel=2,
        )
    return counts


def _group(values: NDArray[np.float64], votes: NDArray[np.bool_], *, normalize: bool) -> NDArray[np.float64]:
    """A = (reward - mean of the group) / population standard deviation of the group (arXiv 2402.03300,
    outcome supervision); `normalize=False` leaves the division out (Dr.GRPO, arXiv 2503.20783). Exactly 0 in
    a group whose votes are all equal, or one.
    """
    voting = values[votes]
    if _all_equal(voting):
        return np.zeros_like(values)
    scale = voting.std() if normalize else 1.0
    centred: NDArray[np.float64] = (values - voting.mean()) / scale
    return centred


def _leave_one_out(values: NDArray[np.float64], votes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A = reward - mean of the other votes of the group (RLOO, arXiv 2402.14740). Exactly 0 in a group whose
    rewards are all equal, and where nobody else votes.
    """
    others = votes.sum() - votes
    if _all_equal(values):
        return np.zeros_like(values)
    sums = values[votes].sum() - np.where(votes, values, 0.0)
    return np.where(others > 0, values - sums / np.maximum(others, 1), 0.0)


def _batch(values: NDArray[np.float64], votes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A = (reward - mean of all votes) / population standard deviation of all votes, over the whole
    collection (REINFORCE++, arXiv 2501.03262). Exactly 0 where the votes are all equal.
    """
    voting = values[votes]
    if _all_equal(voting):
        return np.zeros_like(values)
    centred: NDArray[np.float64] = (values - voting.mean()) / voting.std()
    return centred


def filter_samples(samples: Sequence[Sample], *, config: BatchConfig) -> tuple[list[Sample], dict[str, int]]:
    """The samples that pass the filters, in order, and how many each filter removed.

    `filter_zero_variance` takes all samples of groups whose rewards are all equal, `filter_truncated`
    responses with `finish_reason` "length"; a sample that both would take counts as zero variance. What is
    taken is left out (`drop`) or kept with a loss mask of all false (`mask`). What is filtered has a vote
    (`assign_advantages`).
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


def _leaders(samples: Sequence[Sample], *, judged: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64 [samples]: of each sample the first one of its episode, a judged one where there is any."""
    first: dict[str, int] = {}
    for position, sample in enumerate(samples):
        known = None if sample.episode is None else first.get(sample.episode)
        if sample.episode is not None and (known is None or (judged[position] and not judged[known])):
            first[sample.episode] = position
    leaders = [i if sample.episode is None else first[sample.episode] for i, sample in enumerate(samples)]
    return np.array(leaders, dtype=np.int64)


def _over_episodes(values: NDArray[np.float64], *, leaders: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [samples]: of each sample the sum of `values` [samples] over all samples of its episode."""
    sums = np.zeros_like(values)
    np.add.at(sums, leaders, values)
    return sums[leaders]


def _all_equal(rewards: NDArray[np.float64]) -> bool:
    """Whether finite rewards [samples of one group] hold nothing to prefer; true for none or one."""
    if len(rewards) < 2:
        return True
    return bool(np.ptp(rewards) <= max(EQUAL_SHARE * np.abs(rewards).max(), _LEAST_SPREAD))
