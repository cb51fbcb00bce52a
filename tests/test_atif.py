"""Trajectories in ATIF, written by Harbor's own classes (importer_dumps/atif.py, atif/SOURCE.json)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_importers import AXIS, imported, refused

from olmo_rl.rollouts.importers.importing import import_paths
from olmo_rl.types import Collection, Refusal, Sample, Sampling

DUMPS = Path(__file__).parent / "importer_dumps" / "atif"
TWO_TURNS = [5, 6, 7, 10, 11, 20, 21, 22, 12, 13, 14]
GENERATED = [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
LOGPROBS = [0, 0, 0, -0.25, -0.5, 0, 0, 0, -0.25, -0.5, -0.75]


def by_id(collection: Collection) -> dict[str, Sample]:
    return {sample.id: sample for sample in collection.samples}


def changed(tmp_path: Path, change: dict[str, Any], *, step: int | None = None) -> Path:
    """alone.json with other values at its root, or in a step."""
    document = json.loads((DUMPS / "alone.json").read_text())
    (document if step is None else document["steps"][step]).update(change)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    return path


def test_dumps_are_those_of_a_named_release_of_harbor() -> None:
    source = json.loads((DUMPS / "SOURCE.json").read_text())
    assert (source["package"], source["version"]) == ("harbor", "0.26.0")
    assert len(source["sha256"]) == 64


def test_turns_of_a_trajectory_are_one_sample_in_which_completions_alone_are_generated() -> None:
    collection, report = imported(DUMPS / "job", "atif", axis=None)
    sample = by_id(collection)["count__a"]
    assert sample.tokens.tolist() == TWO_TURNS
    assert sample.response_mask.tolist() == GENERATED
    np.testing.assert_array_equal(sample.behavior_logprobs, np.float32(LOGPROBS))
    assert (sample.group, sample.reward, sample.prompt) == ("count", 1.0, "Count.")
    assert report.sampling == Sampling(temperature=1.0)
    assert report.lacks == {"policy_version": len(collection.samples)}


def test_trials_of_a_task_are_a_group_and_each_history_and_subagent_is_a_sample() -> None:
    collection, report = imported(DUMPS / "job", "atif", axis=None)
    found = {id: (s.group, s.reward, s.tokens.tolist()) for id, s in by_id(collection).items()}
    assert found == {
        "count__a": ("count", 1.0, TWO_TURNS),
        "count__b": ("count", 0.0, [5, 6, 7, 10, 11]),
        "count__b.1": ("count", 0.0, [5, 40, 41, 15]),
        "sum__a": ("sum", 0.5, TWO_TURNS),
        "sum__a/sub-1": ("sum", 0.5, [8, 9, 16, 17]),
    }
    assert report.left_out == {"subagent of another model": 1, "trial ended with AgentTimeoutError": 1}


def test_steps_of_a_trial_have_rewards_and_groups_of_their_own() -> None:
    collection, _ = imported(DUMPS / "steps", "atif", axis=None)
    found = {id: (s.group, s.reward) for id, s in by_id(collection).items()}
    assert found == {"t:x": ("stepped:x", 0.0), "t:y": ("stepped:y", 1.0)}


def test_a_file_alone_names_reward_group_and_version_under_extra() -> None:
    assert "reward is a mapping of 'exact', 'style'" in refused(DUMPS / "alone.json", "atif", axis=None)
    (sample,) = imported(DUMPS / "alone.json", "atif", axis=None, reward_key="style")[0].samples
    assert (sample.id, sample.group, sample.reward, sample.policy_version) == ("s", "g", 0.5, 3)
    collection, report = imported(DUMPS / "continued.json", "atif", axis=None, reward_key="exact")
    assert report.ignored == {"continued_trajectory_ref": 1}
    lines, _ = imported(DUMPS / "lines.jsonl", "atif", axis=None, reward_key="exact")
    assert [s.id for s in lines.samples] == ["s0", "s1"]


def test_a_continuation_in_a_file_of_its_own_is_a_sample_of_its_own(tmp_path: Path) -> None:
    shutil.copytree(DUMPS / "job" / "count__a", tmp_path / "job" / "count__a")
    agent = tmp_path / "job" / "count__a" / "agent"
    shutil.copy(agent / "trajectory.json", agent / "trajectory.cont-1.json")
    collection, _ = imported(tmp_path / "job", "atif", axis=None)
    found = {id: (s.group, s.reward) for id, s in by_id(collection).items()}
    assert found == {"count__a": ("count", 1.0), "count__a/cont-1": ("count", 1.0)}


def test_routes_of_turns_are_joined_and_their_lack_is_refused() -> None:
    (sample,) = imported(DUMPS / "routed.json", "atif", reward_key="exact")[0].samples
    rows = [[[t % 8, (t + 1) % 8], [(t + 2) % 8, (t + 4) % 8]] for t in range(10)]
    assert sample.routes is not None
    assert sample.routes.tolist() == rows
    assert "no routes were recorded" in refused(DUMPS / "alone.json", "atif", axis=AXIS, reward_key="exact")


def test_images_among_the_tokens_are_placeholders_and_sampling_settings_are_those_of_the_agent() -> None:
    (sample,) = imported(DUMPS / "image.json", "atif", axis=None, reward_key="exact")[0].samples
    assert sample.has_placeholders
    collection, _ = imported(DUMPS / "cold.json", "atif", axis=None, reward_key="exact")
    assert collection.sampling == Sampling(temperature=0.5, top_p=0.9)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text", "text.json step 2: no metrics, so no token ids"),
        ("counted", "step 2: metrics have no prompt_token_ids, completion_token_ids, logprobs"),
        ("several", "step 2: llm_call_count is 2: the metrics of several calls are added up"),
    ],
)
def test_a_trajectory_without_the_tokens_of_every_turn_is_refused_by_step(name: str, words: str) -> None:
    assert words in refused(DUMPS / f"{name}.json", "atif", axis=None, reward_key="exact")


@pytest.mark.parametrize(
    ("change", "step", "words"),
    [
        ({"schema_version": "ATIF-v1.3"}, None, "schema_version is 'ATIF-v1.3': known are ATIF-v1.4"),
        ({"schema_version": "ATIF-v2.0"}, None, "schema_version is 'ATIF-v2.0'"),
        ({"agent": None}, None, "agent is no object"),
        ({"steps": []}, None, "steps is no list with entries"),
        ({"tokens": []}, None, "unknown name 'tokens'"),
        ({"extra": 3}, None, "extra is 3: expected an object"),
        ({"subagent_trajectories": [{}]}, None, "an embedded subagent without trajectory_id"),
        ({"subagent_trajectories": {}}, None, "subagent_trajectories is {}: expected a list of objects"),
        ({"step_id": 7}, 1, "step 2 has another step_id"),
        ({"source": "tool"}, 0, "step 1: source is 'tool'"),
        ({"observation": "x"}, 1, "observation is 'x': expected an object"),
        ({"metrics": []}, 1, "metrics is []: expected an object"),
        ({"metrics": {"completion_ids": [1]}}, 1, "unknown name 'completion_ids'"),
        (
            {"metrics": {"prompt_token_ids": [1], "completion_token_ids": [2, 3], "logprobs": [-1.0]}},
            1,
            "1 logprobs for 2 completion_token_ids",
        ),
        (
            {"metrics": {"prompt_token_ids": [1], "completion_token_ids": ["a"], "logprobs": [-1.0]}},
            1,
            "completion_token_ids[0] is 'a': expected an integer",
        ),
    ],
)
def test_what_is_no_trajectory_is_refused_by_name_and_place(
    tmp_path: Path, change: dict[str, Any], step: int | None, words: str
) -> None:
    assert words in refused(changed(tmp_path, change, step=step), "atif", axis=None, reward_key="exact")


def test_a_directory_without_trajectories_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"no file trajectory\*\.json in it, or below"):
        import_paths(tmp_path, source="atif")
    assert import_paths(DUMPS / "job", source="atif") == [DUMPS / "job"]
