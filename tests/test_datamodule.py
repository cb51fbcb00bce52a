"""Collections -> optimizer batches: advantages by group, filters, the cut into steps, and what is counted."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from oracle import group_advantages
from torch import Tensor
from training_cases import SHAPES, Run, config_of, fit, masked, samples_of, write_files
from typing_extensions import override

from olmo_rl.collections.collecting import Drawn, cut
from olmo_rl.collections.load_counting import LoadCounter
from olmo_rl.config import (
    BatchConfig,
    Config,
    Filter,
    LossConfig,
    OnVerifierFailure,
    PackingConfig,
    PackingKind,
    RolloutsConfig,
    ScoringConfig,
    Source,
    TaskConfig,
    TaskKind,
    TrainerConfig,
)
from olmo_rl.types import Refusal, Sample, Topology


def trained(run: Run, *, update: int = 0) -> dict[str, Sample]:
    """The samples of one update by id."""
    return {sample.id: sample for sample in run.recorder.batches[update].samples}


def rewarded(rewards: list[float], groups: list[str]) -> list[Sample]:
    samples = samples_of(SHAPES[: len(rewards)])
    for sample, reward, group in zip(samples, rewards, groups, strict=True):
        sample.reward, sample.group = reward, group
    return samples


def run_files(run_dir: Path, collections: list[list[Sample]], **sections: object) -> Run:
    write_files(run_dir, collections)
    return fit(config_of(run_dir, **sections))


# Groups


def test_advantages_follow_group_ids_and_a_group_of_one_gets_zero(tmp_path: Path) -> None:
    rewards = [1.0, 0.25, 0.5, 0.0, 1.0, 7.0, 0.125, 0.0]
    groups = ["math:1:s0", "math:2:s0", "math:1:s0", "math:2:s0", "math:1:s0", "alone", "math:2:s0", "three"]
    samples = rewarded(rewards, groups)
    run = run_files(tmp_path / "run", [samples])
    expected = group_advantages(rewards, groups, normalize=True)
    found = trained(run)
    assert [found[s.id].advantage for s in samples] == pytest.approx(expected)
    assert found["s5"].advantage == 0.0
    assert run.rows[0]["batch/groups"] == 4
    assert run.rows[0]["batch/single_groups"] == 2
    assert run.rows[0]["batch/constant_groups"] == 2
    advantages = {
        id: pack["advantages"][pack.boundaries[d]].item()
        for pack in run.recorder.batches[0].packs
        for d, id in enumerate(pack.ids)
    }
    assert advantages == {s.id: float(np.float32(a)) for s, a in zip(samples, expected, strict=True)}


def test_the_order_of_a_file_does_not_change_an_advantage(tmp_path: Path) -> None:
    rewards = [1.0, 0.25, 0.5, 0.0, 1.0, 7.0, 0.125, 0.5]
    samples = rewarded(rewards, ["a", "b", "a", "b", "a", "b", "b", "a"])
    order = [3, 0, 7, 6, 1, 5, 2, 4]
    first = run_files(tmp_path / "first", [samples])
    second = run_files(tmp_path / "second", [[samples[i] for i in order]])
    assert {id: s.advantage for id, s in trained(first).items()} == {
        id: s.advantage for id, s in trained(second).items()
    }
    assert first.recorder.ids[0] != second.recorder.ids[0]


def test_equal_tokens_under_two_group_ids_are_two_groups(tmp_path: Path) -> None:
    samples = rewarded([1.0, 0.0, 0.0, 1.0], ["a", "a", "b", "b"])
    for sample in samples[1:]:
        for name in ("tokens", "response_mask", "behavior_logprobs", "ref_logprobs", "routes"):
            setattr(sample, name, getattr(samples[0], name))
    run = run_files(tmp_path / "run", [samples])
    assert [s.advantage for s in trained(run).values()] == [1.0, -1.0, -1.0, 1.0]


def test_groups_of_one_throughout_are_a_loud_warning(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [rewarded([1.0, 0.0, 2.0, 5.0], ["a", "b", "c", "d"])])
    with pytest.warns(UserWarning, match="all 4 groups hold one sample"):
        run = fit(config_of(tmp_path / "run"))
    assert run.events("optimizer")[0]["terms"]["loss/policy"] == 0.0


def test_statistics_of_a_group_do_not_divide_by_its_deviation_where_that_is_off(tmp_path: Path) -> None:
    rewards = [1.0, 0.25, 0.5, 0.0]
    run = run_files(
        tmp_path / "run", [rewarded(rewards, ["a"] * 4)], loss=LossConfig(normalize_advantages=False)
    )
    assert [s.advantage for s in trained(run).values()] == [r - 0.4375 for r in rewards]


# Filters


def filterable() -> list[Sample]:
    """Group a is constant, groups b and c are not; one response of b is truncated."""
    samples = rewarded([1.0, 1.0, 0.0, 1.0, 0.5, 0.0, 0.0, 1.0], ["a", "a", "b", "b", "b", "b", "c", "c"])
    samples[4].finish_reason = "length"
    return samples


def test_filtered_samples_leave_the_batch_counted_and_the_rest_keeps_its_advantages(tmp_path: Path) -> None:
    batch = BatchConfig(samples_per_step=None, filter_zero_variance=True, filter_truncated=True)
    run = run_files(tmp_path / "run", [filterable()], batch=batch)
    whole = run_files(tmp_path / "whole", [filterable()])
    assert run.recorder.ids[0] == ["s2", "s3", "s5", "s6", "s7"]
    row = run.rows[0]
    assert (row["batch/zero_variance"], row["batch/truncated"], row["rollouts/samples"]) == (2, 1, 8)
    assert all(trained(run)[id].advantage == trained(whole)[id].advantage for id in run.recorder.ids[0])
    # Means of what was drawn, before any filter.
    assert row["reward/mean"] == pytest.approx(np.mean([s.reward for s in filterable()]))
    assert row["rollouts/truncated"] == 0.125


def test_a_filter_that_masks_keeps_the_samples_and_counts_them(tmp_path: Path) -> None:
    batch = BatchConfig(
        samples_per_step=None, filter=Filter.mask, filter_zero_variance=True, filter_truncated=True
    )
    run = run_files(tmp_path / "run", [filterable()], batch=batch)
    assert len(run.recorder.ids[0]) == 8
    kept = {id for id, sample in trained(run).items() if sample.scored.any()}
    assert kept == {"s2", "s3", "s5", "s6", "s7"}
    advantages = [trained(run)[f"s{i}"].advantage for i in range(6)]
    deviation = np.std([0.0, 1.0, 0.5, 0.0]) if LossConfig().normalize_advantages else 1.0
    assert advantages == pytest.approx([0.0, 0.0, *(np.array([0.0, 1.0, 0.5, 0.0]) - 0.375) / deviation])
    scored = sum(SHAPES[i][1] for i in (2, 3, 5, 6, 7))
    assert run.events("optimizer")[0]["global_scored_tokens"] == scored
    assert (run.rows[0]["batch/zero_variance"], run.rows[0]["batch/truncated"]) == (2, 1)
    assert run.rows[0]["rollouts/response_tokens"] == np.mean([r for _, r in SHAPES]), "before masking"


def test_samples_older_than_the_lag_bound_are_dropped_and_counted(tmp_path: Path) -> None:
    collections = [samples_of(seed=i, prefix=f"f{i}-", version=0) for i in range(2)]
    mixed = samples_of(seed=2, prefix="f2-")
    for index, sample in enumerate(mixed):
        sample.policy_version = index % 3
    stale = samples_of(seed=3, prefix="f3-", version=1)
    run = run_files(
        tmp_path / "run",
        [*collections, mixed, stale],
        rollouts=RolloutsConfig(source=Source.files, path=str(tmp_path / "run" / "files"), max_lag=1),
        trainer=TrainerConfig(max_steps=4),
    )
    assert run.recorder.ids[:3] == [
        [s.id for s in collections[0]],
        [s.id for s in collections[1]],  # lag 1
        ["f2-1", "f2-2", "f2-4", "f2-5", "f2-7"],  # version 2 meets versions 0, 1, 2
    ]
    assert [row["batch/over_age"] for row in run.rows] == [0, 0, 3]
    assert run.recorder.ids[3] == []
    assert run.events("skipped")[0]["facts"]["batch/over_age"] == 8
    assert run.events("optimizer")[2]["policy_versions"] == [1, 2]


def lagging(run_dir: Path, samples: list[Sample], *, max_lag: int) -> Run:
    """One file in updates of two samples."""
    return run_files(
        run_dir,
        [samples],
        rollouts=RolloutsConfig(source=Source.files, path=str(run_dir / "files"), max_lag=max_lag),
        batch=BatchConfig(samples_per_step=2),
        trainer=TrainerConfig(max_steps=9),
    )


def test_a_sample_is_too_old_for_the_step_that_would_train_it_not_for_its_collection(tmp_path: Path) -> None:
    samples = samples_of()
    for sample, version in zip(samples, (0, 0, 0, 0, 1, 0, 1, 1), strict=True):
        sample.policy_version = version
    run = lagging(tmp_path / "run", samples, max_lag=1)
    # The third step finds policy version 2, the fourth version 3; the next young sample takes a place.
    assert run.recorder.ids == [["s0", "s1"], ["s2", "s3"], ["s4", "s6"]]
    assert (run.rows[0]["batch/over_age"], run.rows[0]["batch/left_out"]) == (2, 0)
    versions = [event["policy_versions"] for event in run.events("optimizer")]
    assert all(step - min(found) <= 1 for step, found in enumerate(versions))


def test_a_step_that_trains_nothing_does_not_age_the_next(tmp_path: Path) -> None:
    samples = [masked(s) if i in (0, 1) else s for i, s in enumerate(samples_of())]
    run = lagging(tmp_path / "run", samples, max_lag=1)
    assert run.recorder.ids == [[], ["s2", "s3"], ["s4", "s5"]]
    assert run.rows[0]["batch/over_age"] == 2


# The cut into steps


def test_an_incomplete_tail_is_left_out_and_counted(tmp_path: Path) -> None:
    run = run_files(
        tmp_path / "run",
        [samples_of()],
        batch=BatchConfig(samples_per_step=3),
        trainer=TrainerConfig(max_steps=9),
    )
    assert run.recorder.ids == [["s0", "s1", "s2"], ["s3", "s4", "s5"]]
    assert [row.get("batch/left_out") for row in run.rows] == [2, None], "a fact of the collection"
    assert run.trainer.global_step == 2


@pytest.mark.parametrize(("max_lag", "kept"), [(None, 6), (0, 4)])
def test_a_whole_file_that_filters_or_age_made_uneven_gives_every_rank_as_many(
    max_lag: int | None, kept: int
) -> None:
    samples = samples_of()[:7]  # of eight, one was filtered
    samples[2].policy_version = samples[4].policy_version = -1
    counter = LoadCounter(topology=Topology(2), layer_stride=1)
    drawn = Drawn(samples=samples, counts=counter.collection(None), facts={}, source="f", filtered=True)
    config = Config(
        rollouts=RolloutsConfig(source=Source.files, max_lag=max_lag),
        batch=BatchConfig(samples_per_step=None),
    )
    (block,) = cut(drawn, config=config, generates=False, version=0, world_size=2)
    assert len(block) == kept
    assert drawn.facts["batch/left_out"] == 1
    assert drawn.facts.get("batch/over_age", 0) == (0 if max_lag is None else 2)


def test_a_generated_collection_of_more_samples_than_asked_for_trains_its_own_steps_alone() -> None:
    samples = samples_of()[:6]  # the last round brought a whole group
    counter = LoadCounter(topology=Topology(1), layer_stride=1)
    drawn = Drawn(samples=samples, counts=counter.collection(None), facts={}, source="e", filtered=True)
    config = Config(batch=BatchConfig(samples_per_step=2, steps_per_collection=2))
    blocks = cut(drawn, config=config, generates=True, version=0, world_size=1)
    assert [[sample.id for sample in block] for block in blocks] == [["s0", "s1"], ["s2", "s3"]]
    assert drawn.facts["batch/left_out"] == 2


def test_files_are_read_in_name_order_once_and_then_the_run_ends(tmp_path: Path) -> None:
    collections = [samples_of(seed=i, prefix=f"f{i}-") for i in range(3)]
    run = run_files(tmp_path / "run", collections, trainer=TrainerConfig(max_steps=50))
    assert run.recorder.ids == [[s.id for s in samples] for samples in collections]
    assert run.recorder.steps == [1, 2, 3]


def test_a_sample_longer_than_the_budget_is_refused_by_file_and_name(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [samples_of()])
    config = config_of(tmp_path / "run", packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=10))
    with pytest.raises(Refusal, match=r"'s2' has 11 tokens, more than the budget of 10"):
        fit(config)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_a_file_without_reference_log_probs_is_refused_where_the_kl_term_needs_them(tmp_path: Path) -> None:
    samples = samples_of()
    samples[2].ref_logprobs = None
    samples[6].ref_logprobs = None
    write_files(tmp_path / "run", [samples])
    with pytest.raises(Refusal, match=r"sample 's2' has no ref_logprobs \(2 such samples\)"):
        fit(config_of(tmp_path / "run", loss=LossConfig(kl_coef=0.1)))


# A generating source


def local_config(run_dir: Path, **sections: object) -> Config:
    fields: dict[str, object] = {
        "task": TaskConfig(eval_problems=0),
        "rollouts": RolloutsConfig(source=Source.local, group_size=4, max_new_tokens=4),
        "batch": BatchConfig(samples_per_step=8),
    }
    return config_of(run_dir, **(fields | sections))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit(
        local_config(
            tmp_path_factory.mktemp("local"),
            batch=BatchConfig(samples_per_step=8, steps_per_collection=2),
            trainer=TrainerConfig(max_steps=4),
            scoring=ScoringConfig(max_behavior_gap=1e-3),
        )
    )


def test_a_generated_collection_holds_whole_groups_of_the_published_policy(generated: Run) -> None:
    assert [len(ids) for ids in generated.recorder.ids] == [8] * 4
    groups = [[sample.group for sample in batch.samples] for batch in generated.recorder.batches]
    assert groups == [
        [f"c{collection}-a0-p{prompt}"] * 4 + [f"c{collection}-a0-p{prompt + 1}"] * 4
        for collection in (0, 1)
        for prompt in (0, 2)
    ]
    versions = [event["policy_versions"] for event in generated.events("optimizer")]
    assert versions == [[0, 0], [0, 0], [2, 2], [2, 2]]


def test_the_engine_agrees_with_the_trainer_at_the_first_step_of_each_collection(generated: Run) -> None:
    gaps = [row["mismatch/mean"] for row in generated.rows]
    assert gaps[0] < 1e-6
    assert gaps[2] < 1e-6
    assert [event["mismatches"] for event in generated.events("replay")] == [0] * 4
    assert generated.events("replay")[0]["overlap"] == pytest.approx(1.0, abs=0.01), "tails do not count"
    assert [event["decision"] for event in generated.events("scoring")] == ["standalone"] * 4


def unknown(response: str, answer: str) -> float:
    """A verifier that cannot judge anything."""
    return math.nan


def test_a_run_without_any_reward_is_refused_naming_the_verifier(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(20)))
    verifier = {"_target_": "test_datamodule.unknown"}
    config = local_config(
        tmp_path / "run",
        task=TaskConfig(kind=TaskKind.jsonl, path=str(path), verifier=verifier, eval_problems=0),
        batch=BatchConfig(samples_per_step=8, max_skips=1),
    )
    with pytest.raises(Refusal, match=r"2 steps in a row .* none of the last 8 samples a reward \(NaN"):
        fit(config)


def test_a_source_that_cannot_fill_a_batch_stops_at_its_attempts_and_the_run_is_refused(
    tmp_path: Path,
) -> None:
    config = local_config(
        tmp_path / "run",
        rollouts=RolloutsConfig(source=Source.local, group_size=4, max_new_tokens=4, max_attempts=3),
        batch=BatchConfig(samples_per_step=8, filter_zero_variance=True, max_skips=1),
    )
    with pytest.raises(Refusal, match=r"batch\.max_skips=1: 2 steps in a row"):
        fit(config)  # random weights never answer, so every group is constant
    lines = (tmp_path / "run" / "training_contract_rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["log", "skipped"]
    assert '"rollouts/rounds": 3.0' in lines[1]
    assert '"batch/zero_variance": 24.0' in lines[1]


def failing(response: str, answer: str) -> float:
    raise KeyError(f"{response}/{answer}")


def test_a_failure_of_a_verifier_that_counts_as_zero_is_told_as_a_failure_too(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}?", "answer": "{i}"}}\n' for i in range(40)))
    run = fit(
        local_config(
            tmp_path / "run",
            task=TaskConfig(
                kind=TaskKind.jsonl,
                path=str(problems),
                verifier={"_target_": f"{__name__}.failing"},
                on_verifier_failure=OnVerifierFailure.zero,
                eval_problems=0,
            ),
            trainer=TrainerConfig(max_steps=2),
        )
    )
    for row in run.rows:
        assert row["rollouts/verifier_failures"] == row["rollouts/samples"] == 8
        assert row["rollouts/verifier_timeouts"] == 0
        assert row["reward/mean"] == 0


def test_a_masked_sample_in_a_file_is_not_judged_but_counts_in_its_group(tmp_path: Path) -> None:
    samples = rewarded([1.0, 0.0, 0.5, 0.0], ["a", "a", "a", "a"])
    samples[2] = masked(replace(samples[2], group="a"))
    run = run_files(tmp_path / "run", [samples])
    expected = group_advantages([1.0, 0.0, 0.5, 0.0], ["a"] * 4, normalize=True)
    assert [s.advantage for s in trained(run).values()] == pytest.approx(expected)
    assert run.events("optimizer")[0]["global_responses"] == 3


class Alive(Callback):
    """The collections of which a pack still lives, after each update. Nobody collects cycles meanwhile."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []
        self._tokens: list[tuple[str, weakref.ref[Tensor]]] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += [(batch.source, weakref.ref(pack["tokens"])) for pack in batch.packs]
        self.found.append({source for source, tokens in self._tokens if tokens() is not None})


def test_a_collection_that_was_trained_does_not_outlive_the_next(tmp_path: Path) -> None:
    write_files(tmp_path, [samples_of() for _ in range(6)])
    alive = Alive()
    gc.disable()
    try:
        config = config_of(
            tmp_path, batch=BatchConfig(samples_per_step=4), trainer=TrainerConfig(max_steps=12)
        )
        fit(config, callbacks=[alive], keeps_batches=False)
    finally:
        gc.enable()
    assert len(alive.found) == 12
    assert max(len(sources) for sources in alive.found) <= 2
