"""Advantages by group id, filters, and whether a step can train."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import batch_advantages, group_advantages, rloo_advantages

from olmo_rl.config import AdvantageKind, BatchConfig, Filter, LossConfig
from olmo_rl.data.advantages import assign_advantages, can_train, filter_samples
from olmo_rl.types import Sample


def make_samples(
    rewards: list[float], groups: list[str], *, finish: list[str] | None = None, response: int = 2
) -> list[Sample]:
    return [
        Sample(
            id=f"s{i}",
            group=group,
            tokens=np.arange(1 + response, dtype=np.int32),
            response_mask=np.arange(1 + response) > 0,
            behavior_logprobs=np.zeros(1 + response, dtype=np.float32),
            reward=reward,
            finish_reason=None if finish is None else finish[i],
        )
        for i, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]


def advantages(samples: list[Sample]) -> dict[str, float | None]:
    return {sample.id: sample.advantage for sample in samples}


def test_advantages_are_centred_and_divided_by_the_population_deviation() -> None:
    samples = make_samples([1.0, 0.0, 0.0, 1.0, 5.0, 1.0], ["a"] * 4 + ["b"] * 2)
    counts = assign_advantages(samples, config=LossConfig(normalize_advantages=True))
    assert [sample.advantage for sample in samples] == [1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
    assert counts == {"groups": 2, "constant_groups": 0, "single_groups": 0, "failed_rewards": 0}


def test_without_normalisation_advantages_are_centred_rewards() -> None:
    samples = make_samples([1.0, 0.0, 0.0, 0.0], ["a"] * 4)
    assign_advantages(samples, config=LossConfig(normalize_advantages=False))
    assert [sample.advantage for sample in samples] == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [0.1 + 0.2, 0.3], [1e9, 1e9 + 0.5], [0.0] * 4])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_constant_group_gets_exactly_zero(rewards: list[float], normalize: bool) -> None:
    samples = make_samples(rewards, ["a"] * len(rewards))
    counts = assign_advantages(samples, config=LossConfig(normalize_advantages=normalize))
    assert all(sample.advantage == 0.0 for sample in samples)
    assert counts["constant_groups"] == 1


@pytest.mark.parametrize("rewards", [[1e6, 1e6 + 1], [-1e8, -1e8 + 1], [1e6 + 0.1, 1e6 + 0.2]])
def test_a_common_offset_does_not_hide_a_difference(rewards: list[float]) -> None:
    samples = make_samples(rewards, ["a", "a"])
    counts = assign_advantages(samples, config=LossConfig(normalize_advantages=True))
    assert counts["constant_groups"] == 0
    assert [sample.advantage for sample in samples] == pytest.approx([-1.0, 1.0])


def test_small_rewards_are_not_taken_for_equal() -> None:
    samples = make_samples([1e-9, 2e-9], ["a", "a"])
    assign_advantages(samples, config=LossConfig(normalize_advantages=True))
    assert [sample.advantage for sample in samples] == pytest.approx([-1.0, 1.0])


def test_a_group_of_one_gets_zero_and_is_counted() -> None:
    samples = make_samples([3.0, 1.0, 0.0], ["alone", "pair", "pair"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = assign_advantages(samples, config=LossConfig(normalize_advantages=True))
    assert [sample.advantage for sample in samples] == [0.0, 1.0, -1.0]
    assert counts["single_groups"] == 1


def test_the_branches_of_an_episode_count_once_and_share_its_advantage() -> None:
    samples = make_samples([1.0, 1.0, 1.0, 0.0], groups=["g"] * 4)
    for sample, episode in zip(samples, ["e", "e", "e", None], strict=True):
        sample.episode = episode
    counts = assign_advantages(samples, config=LossConfig(normalize_advantages=False))
    assert [sample.advantage for sample in samples] == [0.5, 0.5, 0.5, -0.5], "0.25 if branches counted"
    assert (counts["groups"], counts["constant_groups"], counts["single_groups"]) == (1, 0, 0)
    assert assign_advantages(samples[:3], config=LossConfig())["single_groups"] == 1
    assert [sample.advantage for sample in samples[:3]] == [0.0, 0.0, 0.0]


@given(data=st.data())
def test_an_episode_of_two_branches_is_one_vote_in_every_baseline(data: st.DataObject) -> None:
    """The oracles know episodes alone: one reward each, less the divergence of all its trained tokens."""
    size = data.draw(st.integers(1, 6))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, math.nan]), min_size=size, max_size=size))
    groups = data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=size, max_size=size))
    drift = data.draw(st.lists(st.sampled_from([0.0, 0.5, -2.0]), min_size=2 * size, max_size=2 * size))
    cut = data.draw(st.lists(st.sampled_from(["stop", "length"]), min_size=2 * size, max_size=2 * size))
    everyone, normalize = data.draw(st.booleans()), data.draw(st.booleans())
    order = data.draw(st.permutations(range(2 * size)))
    votes = [everyone or cut[2 * e : 2 * e + 2] == ["stop", "stop"] for e in range(size)]
    shaped = [reward - 0.125 * (drift[2 * e] + drift[2 * e + 1]) for e, reward in enumerate(rewards)]
    expected = {
        AdvantageKind.rloo: rloo_advantages(shaped, groups, votes=votes),
        AdvantageKind.batch: batch_advantages(shaped, votes=votes),
    }
    if everyone:
        expected[AdvantageKind.group] = group_advantages(shaped, groups, normalize=normalize)
    for kind, values in expected.items():
        samples = make_samples(
            [reward for reward in rewards for _ in range(2)],
            [group for group in groups for _ in range(2)],
            finish=cut,
        )
        for place, sample in enumerate(samples):
            sample.episode = f"e{place // 2}"
        config = LossConfig(
            advantage=kind,
            truncated_votes=everyone,
            normalize_advantages=normalize or kind is not AdvantageKind.group,
            kl_reward_coef=0.125,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assign_advantages(
                [samples[i] for i in order], config=config, divergences=np.array([drift[i] for i in order])
            )
        twice = [value for value in values for _ in range(2)]
        assert [sample.advantage for sample in samples] == pytest.approx(twice, abs=1e-12)


def test_only_groups_of_one_is_a_loud_warning() -> None:
    samples = make_samples([1.0, 0.0], ["a", "b"])
    with pytest.warns(UserWarning, match="all 2 groups hold one sample"):
        counts = assign_advantages(samples, config=LossConfig(normalize_advantages=True))
    assert counts["single_groups"] == 2


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_failed_reward_leaves_the_statistics_and_is_not_trained(broken: float) -> None:
    samples = make_samples([1.0, 0.0, broken, 1.0, 2.0, 4.0], ["a"] * 4 + ["b"] * 2)
    counts = assign_advantages(samples, config=LossConfig(normalize_advantages=False))
    expected = [1 / 3, -2 / 3, 0.0, 1 / 3, -1.0, 1.0]
    assert [sample.advantage for sample in samples] == pytest.approx(expected)
    assert counts["failed_rewards"] == 1
    assert not samples[2].scored.any()
    assert all(sample.scored.sum() == 2 for sample in samples if sample.id != "s2")


def test_a_group_of_failed_rewards_only_is_untrained_and_poisons_nothing() -> None:
    samples = make_samples([math.nan, math.nan, 1.0, 0.0], ["a", "a", "b", "b"])
    counts = assign_advantages(samples, config=LossConfig(normalize_advantages=True))
    assert [sample.advantage for sample in samples] == [0.0, 0.0, 1.0, -1.0]
    assert counts["failed_rewards"] == 2


def test_ids_with_colons_are_whole_names() -> None:
    samples = make_samples([1.0, 0.0, 5.0, 1.0], ["math:1:s0", "math:1:s0", "math:2:s0", "math:2:s0"])
    counts = assign_advantages(samples, config=LossConfig(normalize_advantages=False))
    assert counts["groups"] == 2
    assert [sample.advantage for sample in samples] == [0.5, -0.5, 2.0, -2.0]


def test_equal_prompts_under_two_group_ids_are_not_merged() -> None:
    # All samples of make_samples hold the same tokens.
    samples = make_samples([1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"])
    assert assign_advantages(samples, config=LossConfig(normalize_advantages=True))["constant_groups"] == 2
    assert all(sample.advantage == 0.0 for sample in samples)


def test_a_group_with_missing_members_uses_those_present() -> None:
    samples = make_samples([1.0, 0.0, 0.0], ["a"] * 3)
    assign_advantages(samples, config=LossConfig(normalize_advantages=False))
    assert [sample.advantage for sample in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@given(data=st.data(), normalize=st.booleans())
def test_any_order_gives_every_sample_the_advantage_of_the_oracle(
    data: st.DataObject, normalize: bool
) -> None:
    size = data.draw(st.integers(2, 12))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, math.nan]), min_size=size, max_size=size))
    groups = data.draw(st.lists(st.sampled_from(["a", "b", "a:0"]), min_size=size, max_size=size))
    expected = group_advantages(rewards, groups, normalize=normalize)
    order = data.draw(st.permutations(range(size)))
    samples = make_samples(rewards, groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assign_advantages([samples[i] for i in order], config=LossConfig(normalize_advantages=normalize))
    assert [sample.advantage for sample in samples] == pytest.approx(expected, abs=1e-12)


RLOO = LossConfig(advantage=AdvantageKind.rloo)
BATCH = LossConfig(advantage=AdvantageKind.batch)


def test_the_baseline_of_a_sample_is_the_mean_of_the_others() -> None:
    samples = make_samples([1.0, 0.0, 0.0, 4.0, 2.0], ["a"] * 3 + ["b"] * 2)
    assign_advantages(samples, config=RLOO)
    assert [sample.advantage for sample in samples] == [1.0, -0.5, -0.5, 2.0, -2.0]


def test_a_whole_collection_is_centred_and_divided_by_its_deviation() -> None:
    samples = make_samples([1.0, 1.0, 3.0, 3.0], ["a", "a", "b", "alone"])
    counts = assign_advantages(samples, config=BATCH)
    assert [sample.advantage for sample in samples] == [-1.0, -1.0, 1.0, 1.0]
    assert counts["constant_groups"] == 3


def test_groups_of_one_are_no_reason_to_warn_where_the_collection_is_the_baseline() -> None:
    samples = make_samples([1.0, 0.0], ["a", "b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assign_advantages(samples, config=BATCH)
    assert [sample.advantage for sample in samples] == [1.0, -1.0]


@pytest.mark.parametrize("config", [RLOO, BATCH, LossConfig()])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [0.1 + 0.2, 0.3]])
def test_equal_rewards_give_exactly_zero_by_every_baseline(config: LossConfig, rewards: list[float]) -> None:
    samples = make_samples(rewards, ["a"] * len(rewards))
    assign_advantages(samples, config=config)
    assert all(sample.advantage == 0.0 for sample in samples)


def test_truncated_responses_vote_unless_a_key_says_otherwise_and_get_an_advantage_anyway() -> None:
    rewards, finish = [2.0, 0.0, 7.0], ["stop", "stop", "length"]
    expected = {
        AdvantageKind.group: ([-1.0, -3.0, 4.0], [1.0, -1.0, 6.0]),
        AdvantageKind.rloo: ([-1.5, -4.5, 6.0], [2.0, -2.0, 6.0]),
    }
    for kind, (voting, silent) in expected.items():
        for votes, advantages in ((True, voting), (False, silent)):
            samples = make_samples(rewards, ["a"] * 3, finish=finish)
            normalize = kind is not AdvantageKind.group  # no effect elsewhere
            config = LossConfig(advantage=kind, truncated_votes=votes, normalize_advantages=normalize)
            assign_advantages(samples, config=config)
            assert [sample.advantage for sample in samples] == advantages


@given(data=st.data())
def test_every_baseline_is_the_oracles_whoever_votes_and_in_any_order(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, math.nan]), min_size=size, max_size=size))
    groups = data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=size, max_size=size))
    finish = data.draw(st.lists(st.sampled_from(["stop", "length"]), min_size=size, max_size=size))
    drift = data.draw(st.lists(st.sampled_from([0.0, 0.5, -2.0]), min_size=size, max_size=size))
    everyone = data.draw(st.booleans())
    votes = [everyone or reason == "stop" for reason in finish]
    shaped = [reward - 0.125 * d for reward, d in zip(rewards, drift, strict=True)]
    expected = {
        AdvantageKind.rloo: rloo_advantages(shaped, groups, votes=votes),
        AdvantageKind.batch: batch_advantages(shaped, votes=votes),
    }
    if everyone:
        expected[AdvantageKind.group] = group_advantages(shaped, groups, normalize=True)
    order = data.draw(st.permutations(range(size)))
    for kind, values in expected.items():
        samples = make_samples(rewards, groups, finish=finish)
        config = LossConfig(advantage=kind, truncated_votes=everyone, kl_reward_coef=0.125)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assign_advantages(
                [samples[i] for i in order], config=config, divergences=np.array([drift[i] for i in order])
            )
        assert [sample.advantage for sample in samples] == pytest.approx(values, abs=1e-12)


def filtered(config: BatchConfig) -> tuple[list[Sample], dict[str, int]]:
    """Groups a (mixed), b (constant), c (constant but for a failed reward); s1 and s2 are truncated."""
    samples = make_samples(
        [1.0, 0.0, 1.0, 1.0, 1.0, math.nan],
        ["a", "a", "b", "b", "c", "c"],
        finish=["stop", "length", "length", "stop", "stop", "stop"],
    )
    assign_advantages(samples, config=LossConfig(normalize_advantages=True))
    return filter_samples(samples, config=config)


def test_filters_are_off_by_default() -> None:
    kept, counts = filtered(BatchConfig())
    assert [sample.id for sample in kept] == ["s0", "s1", "s2", "s3", "s4", "s5"]
    assert counts == {"zero_variance": 0, "truncated": 0}


def test_zero_variance_groups_are_dropped_and_counted() -> None:
    kept, counts = filtered(BatchConfig(filter_zero_variance=True))
    assert [sample.id for sample in kept] == ["s0", "s1"]
    assert counts == {"zero_variance": 4, "truncated": 0}


def test_truncated_responses_are_dropped_but_count_in_their_groups_statistics() -> None:
    kept, counts = filtered(BatchConfig(filter_truncated=True))
    assert [sample.id for sample in kept] == ["s0", "s3", "s4", "s5"]
    assert counts == {"zero_variance": 0, "truncated": 2}
    assert kept[0].advantage == 1.0


def test_a_sample_that_two_filters_take_is_counted_once() -> None:
    _, counts = filtered(BatchConfig(filter_zero_variance=True, filter_truncated=True))
    assert counts == {"zero_variance": 4, "truncated": 1}


def test_masking_keeps_samples_in_place_without_scored_tokens() -> None:
    kept, counts = filtered(BatchConfig(filter=Filter.mask, filter_zero_variance=True, filter_truncated=True))
    assert [sample.id for sample in kept] == ["s0", "s1", "s2", "s3", "s4", "s5"]
    assert [bool(sample.scored.any()) for sample in kept] == [True] + [False] * 5
    assert [int(sample.response_mask.sum()) for sample in kept] == [2] * 6
    assert sum(counts.values()) == 5


def test_a_step_trains_where_any_token_is_scored() -> None:
    samples = make_samples([1.0, 0.0], ["a", "a"])
    assert can_train(samples)
    assert can_train(make_samples([1.0, 1.0], ["a", "a"]))  # an update whose policy gradient is 0
    assert not can_train(make_samples([1.0, 0.0], ["a", "a"], response=0))
    assert not can_train([])


def test_an_advantage_on_a_masked_sample_does_not_make_a_step() -> None:
    samples = make_samples([1.0, 0.0], ["a", "a"])
    assign_advantages(samples, config=LossConfig(normalize_advantages=True))
    for sample in samples:
        sample.loss_mask = np.zeros(len(sample), dtype=np.bool_)
    assert not can_train(samples)
