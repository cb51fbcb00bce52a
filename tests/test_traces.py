"""Records of episodes to samples, against what the verifiers library makes of the same traces.

`environment_dumps/generate.py` wrote them with the library's own classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray

from olmo_rl.config import LossConfig
from olmo_rl.data.advantages import assign_advantages
from olmo_rl.data.validation import check_sample
from olmo_rl.rollouts.gateway import Session, Slot, digest_of
from olmo_rl.rollouts.traces import Tally, samples_of
from olmo_rl.types import ExpertLayout, Refusal, Sample

DUMPS = Path(__file__).parent / "environment_dumps"
LAYOUT = ExpertLayout(num_experts=4, top_k=2, routed_layers=(0, 1))


@cache
def dumped() -> bytes:
    return (DUMPS / "episodes.msgpack").read_bytes()


def episode_of(name: str) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    found = msgpack.unpackb(dumped())[name]
    return found["record"], found["branches"]


def array(record: Mapping[str, Any]) -> NDArray[np.integer]:
    return np.frombuffer(record["data"], dtype=record["dtype"]).reshape(record["shape"])


def slot_of(
    record: Mapping[str, Any], *, places: Mapping[str, int] | None = None, first_version: int = 3
) -> Slot:
    """What the gateway noted: the turns of a trace were written by one version after another."""
    slot = Slot(name="c0-a0-p0-s0", temperature=1.0, top_p=1.0)
    for place, trace in enumerate(record["traces"]):
        session = Session(place=place if places is None else places[trace["id"]])
        slot.sessions[trace["id"]] = session
        version = first_version
        for branch in trace["branches"]:
            read = np.zeros(0, dtype=np.int32)
            for number in branch["nodes"]:
                node = trace["nodes"][number]
                read = np.concatenate([read, np.frombuffer(node["tokens"], dtype="<i4")])
                if node["sampled"] and digest_of(read) not in session.versions:
                    session.versions[digest_of(read)] = version
                    version += 1
    return slot


def samples(name: str, *, agents: tuple[str, ...] = ("agent",), **options: Any) -> tuple[list[Sample], Tally]:
    record, _ = episode_of(name)
    tally = Tally()
    found = samples_of(
        record,
        slot=slot_of(record, **options),
        group="c0-a0-p0",
        agents=agents,
        layout=LAYOUT,
        tally=tally,
    )
    for sample in found:
        check_sample(sample, vocab_size=259)
    return found, tally


@pytest.mark.parametrize("name", ["tool", "fork", "cut"])
def test_every_sample_is_the_branch_that_the_library_makes(name: str) -> None:
    found, _ = samples(name)
    (branches,) = episode_of(name)[1]
    assert len(found) == len(branches)
    for sample, branch in zip(found, branches, strict=True):
        assert sample.tokens.tolist() == branch["tokens"]
        assert sample.response_mask.tolist() == branch["mask"]
        np.testing.assert_array_equal(sample.behavior_logprobs, np.float32(branch["logprobs"]))
        assert sample.routes is not None
        np.testing.assert_array_equal(sample.routes, array(branch["routes"])[:-1])
        assert (sample.group, sample.episode) == ("c0-a0-p0", "c0-a0-p0-s0")


def test_a_tool_episode_has_interior_masks_and_the_routes_of_each_turn() -> None:
    (sample,), tally = samples("tool")
    text = [*b"37+58=\n", *b"calculator(37+58)", 258, *b"95\n", *b"95", 258]
    assert sample.tokens.tolist() == text
    assert sample.response_mask.tolist() == [False] * 7 + [True] * 18 + [False] * 3 + [True] * 3
    assert sample.loss_mask is None
    assert (sample.reward, sample.policy_version, sample.finish_reason) == (1.0, 3, "stop")
    assert (sample.prompt, sample.response) == ("37+58=", "95")
    # The first turn read its first 24 tokens; the second turn, of other weights, read token 24 first.
    assert sample.routes is not None
    first = [(place + token) % 4 for place, token in enumerate(text)]
    read = [value if place < 24 else (value + 1) % 4 for place, value in enumerate(first)][:-1]
    assert sample.routes[:, 0, 0].tolist() == read
    assert tally.means() == {"environment/metric/length": 4.0}
    assert tally.counted() == {
        "environment/episodes": 1.0,
        "environment/ok": 1.0,
        "environment/failed": 0.0,
        "environment/timeouts": 0.0,
        "environment/empty": 0.0,
        "environment/unaccounted": 0.0,
        "environment/rollouts": 1.0,
        "environment/branches": 1.0,
        "environment/turns": 2.0,
        "environment/truncated": 0.0,
        "environment/tool_calls": 1.0,
        "environment/tool_errors": 0.0,
    }


def test_a_token_that_branches_share_is_trained_once() -> None:
    (left, right), tally = samples("fork")
    assert [left.response_mask.sum(), right.response_mask.sum()] == [7, 5], "ab with its end is in both"
    assert left.loss_mask is None
    assert right.loss_mask is not None
    assert [left.scored.sum(), right.scored.sum()] == [7, 2], "nine tokens were written"
    assert [left.id, right.id] == ["c0-a0-p0-s0-b0", "c0-a0-p0-s0-b1"]
    assert [left.policy_version, right.policy_version] == [3, 3], "as old as the oldest token, trained or not"
    assert tally.counts["branches"] == 2
    other = samples("tool")[0]
    other[0].episode = "another"
    assign_advantages([left, right, *other], config=LossConfig(normalize_advantages=False))
    assert [sample.advantage for sample in (left, right, *other)] == [-0.25, -0.25, 0.25]


def test_a_turn_without_its_end_token_gets_one_that_is_not_trained() -> None:
    (sample,), _ = samples("cut")
    assert sample.tokens.tolist() == [*b"go\n", *b"abcd", 258, *b"more\n", *b"e"]
    assert sample.response_mask.tolist() == [False] * 3 + [True] * 4 + [False] * 6 + [True]
    assert sample.finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "counted"), [("late", "timeouts"), ("failed", "failed"), ("empty", "empty")]
)
def test_what_failed_or_ran_out_of_time_or_wrote_nothing_is_counted_and_not_trained(
    name: str, counted: str
) -> None:
    found, tally = samples(name)
    assert found == []
    ends = {key: tally.counts[key] for key in ("ok", "failed", "timeouts", "empty", "unaccounted")}
    assert ends == dict.fromkeys(ends, 0) | {counted: 1}
    assert tally.counts["episodes"] == 1
    if name == "failed":
        assert tally.faults == {"ProviderError: the engine is gone": 1}


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), 1e31])
def test_a_rollout_without_a_reward_is_not_taken_for_one_of_zero(reward: float | None) -> None:
    record, _ = episode_of("unjudged")
    assert record["traces"][0]["reward"] is None
    record["traces"][0]["reward"] = reward
    (sample,) = samples_of(
        record, slot=slot_of(record), group="g", agents=["agent"], layout=LAYOUT, tally=Tally()
    )
    assert np.isnan(sample.reward)
    assert assign_advantages([sample], config=LossConfig())["failed_rewards"] == 1
    assert not sample.scored.any()


def test_agents_have_groups_of_their_own_and_the_order_of_their_first_calls() -> None:
    (first, second), tally = samples(
        "two", agents=("first", "second", "judge"), places={"first": 0, "second": 1, "judge": 2}
    )
    assert [first.group, second.group] == ["c0-a0-p0-first", "c0-a0-p0-second"]
    assert [first.reward, second.reward] == [1.0, -1.0]
    assert [first.episode, second.episode] == ["c0-a0-p0-s0-t0", "c0-a0-p0-s0-t1"]
    assert tally.counts["rollouts"] == 2, "the judge does not train"


def test_tokens_that_no_answer_accounts_for_are_not_trained() -> None:
    record, _ = episode_of("tool")
    slot = slot_of(record)
    slot.sessions["tool"].versions.popitem()
    tally = Tally()
    assert samples_of(record, slot=slot, group="g", agents=["agent"], layout=LAYOUT, tally=tally) == []
    assert tally.counts["unaccounted"] == 1


def test_a_turn_without_routes_is_refused_where_they_are_replayed() -> None:
    record, _ = episode_of("tool")
    record["traces"][0]["nodes"][-1]["routes"] = None
    with pytest.raises(Refusal, match="c0-a0-p0-s0: a turn without the experts of its tokens"):
        samples_of(record, slot=slot_of(record), group="g", agents=["agent"], layout=LAYOUT, tally=Tally())
    (sample,) = samples_of(
        record, slot=slot_of(record), group="g", agents=["agent"], layout=None, tally=Tally()
    )
    assert sample.routes is None
