"""Rollouts of other systems: every reader against files written here in its format, faults by name.

The model of these tests: layer 0 dense, layers 1 and 2 routed, 8 experts, top-2. Sample n has its own tokens,
log-probs and routes, so that a value in a wrong place shows.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from olmo_rl.cli import run as run_command
from olmo_rl.config import ImportsConfig, ImportSource
from olmo_rl.data.files import read_collection
from olmo_rl.rollouts.captures import inspect_routes
from olmo_rl.rollouts.importers import ImportReport, import_file, import_paths
from olmo_rl.rollouts.turns import join_turns
from olmo_rl.rollouts.wire import Completion, RouteAxis, completions_of, decode_routes
from olmo_rl.types import Collection, ExpertLayout, Refusal

LAYOUT = ExpertLayout(num_experts=8, top_k=2, routed_layers=(1, 2))
AXIS = RouteAxis(layout=LAYOUT, num_layers=3)
PROMPT, RESPONSE = 3, 4
TOKENS = PROMPT + RESPONSE
VOCABULARY = 100


def tokens_of(n: int, *, count: int = TOKENS) -> list[int]:
    return [(10 * n + t) % VOCABULARY for t in range(count)]


def logprobs_of(n: int) -> list[float]:
    return [-0.125 * (n + 1) - 0.5 * t for t in range(RESPONSE)]


def routes_of(n: int, *, rows: int = TOKENS - 1, layers: int = 2) -> np.ndarray:
    """Distinct by sample, row and layer; the two ids of a row differ."""
    first = (n + np.arange(rows)[:, None] + 3 * np.arange(layers)) % 8
    return np.stack([first, (first + 1 + np.arange(rows)[:, None] % 6) % 8], axis=-1).astype(np.int32)


def imported(
    path: Path, source: ImportSource, *, axis: RouteAxis | None = AXIS, **options: Any
) -> tuple[Collection, ImportReport]:
    return import_file(
        path, source=source, options=ImportsConfig(**options), axis=axis, vocab_size=VOCABULARY
    )


def refused(path: Path, source: ImportSource, **options: Any) -> str:
    with pytest.raises(Refusal) as refusal:
        imported(path, source, **options)
    return str(refusal.value)


def dumped(n: int, **changes: Any) -> dict[str, Any]:
    """One sample as `Sample.to_dict` of slime and miles gives it."""
    return {
        "group_index": n // 2,
        "index": n,
        "prompt": f"prompt {n // 2}",
        "tokens": tokens_of(n),
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": f"response {n}",
        "response_length": RESPONSE,
        "label": "7",
        "reward": float(n % 2),
        "loss_mask": [1] * RESPONSE,
        "weight_versions": ["5", "4"],
        "rollout_log_probs": logprobs_of(n),
        "rollout_routed_experts": routes_of(n),
        "remove_sample": False,
        "status": "completed",
        "metadata": {"domain": "math"},
        "generate_function_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {},
        "prefix_cache_info": {},
    } | changes


def dump(path: Path, *samples: dict[str, Any], rollout_id: int = 3) -> Path:
    torch.save({"rollout_id": rollout_id, "samples": list(samples)}, path)
    return path


def test_a_dump_of_miles_becomes_samples_with_every_value_where_it_belongs(tmp_path: Path) -> None:
    path = dump(tmp_path / "rollout_3.pt", *(dumped(n) for n in range(4)))
    collection, report = imported(path, ImportSource.miles)
    assert [sample.id for sample in collection.samples] == ["3:0", "3:1", "3:2", "3:3"]
    assert [sample.group for sample in collection.samples] == ["0", "0", "1", "1"]
    assert [sample.reward for sample in collection.samples] == [0, 1, 0, 1]
    for n, sample in enumerate(collection.samples):
        assert sample.tokens.tolist() == tokens_of(n)
        assert sample.response_mask.tolist() == [False] * PROMPT + [True] * RESPONSE
        assert sample.behavior_logprobs[PROMPT:].tolist() == logprobs_of(n)
        assert sample.routes is not None
        np.testing.assert_array_equal(sample.routes, routes_of(n))
        assert sample.policy_version == 4  # the oldest weights that wrote part of it
        assert (sample.finish_reason, sample.response) == ("stop", f"response {n}")
    assert report.as_json()["groups"] == {"of 2": 2}
    assert report.as_json()["route_coverage"] == 1.0
    assert report.as_json()["missing_fields"] == {}
    assert report.as_json()["ignored_fields"] == {}


def test_fields_in_another_order_and_a_field_more_change_nothing_and_are_told(tmp_path: Path) -> None:
    plain, _ = imported(dump(tmp_path / "a.pt", dumped(0), dumped(1)), ImportSource.slime)
    shuffled = [dict(reversed(dumped(n).items())) for n in range(2)]
    for n, sample in enumerate(shuffled):
        sample["opd_domain"] = f"new {n}"
    again, report = imported(dump(tmp_path / "b.pt", *shuffled), ImportSource.slime)
    for one, other in zip(plain.samples, again.samples, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.behavior_logprobs.tolist() == other.behavior_logprobs.tolist()
        assert one.routes is not None
        assert other.routes is not None
        np.testing.assert_array_equal(one.routes, other.routes)
    assert report.ignored == {"opd_domain": 2}


def test_tools_removed_samples_and_unfinished_ones_are_told_apart(tmp_path: Path) -> None:
    tool = dumped(0, loss_mask=[1, 0, 0, 1])
    removed = dumped(1, remove_sample=True)
    aborted = dumped(2, status="aborted")
    empty = dumped(3, response_length=0, loss_mask=[], rollout_log_probs=[], status="failed")
    collection, report = imported(dump(tmp_path / "d.pt", tool, removed, aborted, empty), ImportSource.miles)
    first, second = collection.samples
    assert first.response_mask.tolist() == [False] * 3 + [True, False, False, True]
    assert second.response_mask.sum() == RESPONSE
    assert not second.scored.any()
    assert report.left_out == {"status aborted": 1, "status failed, no response": 1}
    assert report.turns == 3  # two spans around the tool's answer, one of the removed sample


def test_dense_layers_and_a_surplus_row_leave_the_routes_and_are_counted(tmp_path: Path) -> None:
    whole = routes_of(0, rows=TOKENS, layers=3)
    path = dump(tmp_path / "d.pt", dumped(0, rollout_routed_experts=torch.from_numpy(whole)))
    collection, report = imported(path, ImportSource.miles)
    assert collection.samples[0].routes is not None
    np.testing.assert_array_equal(collection.samples[0].routes, whole[:-1, 1:])
    assert (report.surplus_rows, report.dense_layers_cut) == (1, 1)


def test_a_dump_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return (Path.touch, (tmp_path / "sprung",))

    path = tmp_path / "d.pt"
    torch.save({"samples": [dumped(0, metadata=Trap())]}, path)
    assert "could run its author's code" in refused(path, ImportSource.miles)
    path.write_bytes(pickle.dumps(Trap()))
    assert "d.pt" in refused(path, ImportSource.miles)
    whole = dump(tmp_path / "whole.pt", dumped(0)).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a file of torch.save, or a cut one" in refused(path, ImportSource.miles)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_log_probs": logprobs_of(0)[:-1]}, "rollout_log_probs has 3 entries, response_length is 4"),
        ({"rollout_log_probs": None}, "no rollout_log_probs"),
        (
            {"rollout_log_probs": [0.0, float("nan"), 0.0, 0.0]},
            "behavior_logprobs[4] is nan in an active slot",
        ),
        ({"loss_mask": [1, 1, 2, 1]}, "loss_mask holds something other than 0 and 1"),
        ({"tokens": [*tokens_of(0)[:-1], 1.5]}, "tokens is float64, expected integers"),
        ({"tokens": [*tokens_of(0)[:-1], VOCABULARY]}, f"tokens[6] is {VOCABULARY}, outside"),
        ({"response_length": 9}, "response_length is 9 for 7 tokens"),
        ({"reward": None}, "imports.default_reward"),
        ({"reward": {"accuracy": 1.0, "format": 0.5}}, "imports.reward_key"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"group_index": None}, "imports.group_size"),
        ({"rollout_routed_experts": None}, "no routes were recorded"),
        ({"rollout_routed_experts": routes_of(0)[:-1]}, "5 rows for 7 tokens"),
        ({"rollout_routed_experts": routes_of(0)[..., :1]}, "1 experts per token, top_k is 2"),
        ({"rollout_routed_experts": routes_of(0, layers=4)}, "4 layers, the model has 2 or 3"),
        ({"rollout_routed_experts": routes_of(0) * 0}, "row 0, layer 1: expert 0 appears more than once"),
        ({"rollout_routed_experts": routes_of(0) - 1}, "is outside 0..7; logical ids are needed"),
        ({"rollout_routed_experts": routes_of(0) + 1}, "is outside 0..7; logical ids are needed"),
        ({"rollout_routed_experts": routes_of(0).astype(float)}, "expert ids are integers"),
    ],
)
def test_what_is_wrong_with_a_sample_is_said_with_its_place(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = dump(tmp_path / "d.pt", dumped(1), dumped(0, **changes))
    message = refused(path, ImportSource.miles)
    assert words in message
    assert message.startswith(f"{path} sample 1: ")


def test_two_samples_of_one_id_are_refused_by_both_places(tmp_path: Path) -> None:
    path = dump(tmp_path / "d.pt", dumped(0), dumped(0))
    assert f"{path} sample 1: sample '3:0' has the id of {path} sample 0" in refused(path, ImportSource.miles)


def test_options_answer_what_a_file_leaves_open(tmp_path: Path) -> None:
    bare = {"group_index": None, "index": None, "reward": {"accuracy": 0.25}, "weight_versions": []}
    path = dump(tmp_path / "d.pt", *(dumped(n, **bare) for n in range(4)))
    collection, report = imported(path, ImportSource.miles, group_size=2, reward_key="accuracy")
    assert [sample.id for sample in collection.samples] == ["0", "1", "2", "3"]
    assert [sample.group for sample in collection.samples] == ["group-0", "group-0", "group-1", "group-1"]
    assert {sample.reward for sample in collection.samples} == {0.25}
    assert report.lacks == {"weight_versions": 4}
    broken_file = dump(
        tmp_path / "e.pt", dumped(0), dumped(1, rollout_routed_experts=None), dumped(2, reward=None)
    )
    collection, report = imported(
        broken_file, ImportSource.miles, leave_out_bad_routes=True, default_reward=0.5
    )
    assert [sample.reward for sample in collection.samples] == [0.0, 0.5]
    assert report.left_out == {"no routes": 1}
    collection, _ = imported(broken_file, ImportSource.miles, axis=None, default_reward=0.5)
    assert [sample.routes for sample in collection.samples] == [None, None, None]


def test_suspicious_captures_are_counted_by_kind_and_sample(tmp_path: Path) -> None:
    stuck = np.repeat(routes_of(0)[:1], 11, axis=0)
    assert inspect_routes(stuck, num_experts=8).repeated == 11
    assert inspect_routes(stuck[:7], num_experts=8).repeated == 0
    assert inspect_routes(routes_of(0), num_experts=8).replayable
    holes = routes_of(1)
    holes[2] = -1
    capture = inspect_routes(holes, num_experts=8)
    assert (capture.unfilled, capture.duplicated, capture.replayable) == (1, 1, False)
    physical = routes_of(2) + 4
    assert inspect_routes(physical, num_experts=8).out_of_range == (physical >= 8).any(axis=(1, 2)).sum()
    path = dump(
        tmp_path / "d.pt",
        dumped(0),
        dumped(1, rollout_routed_experts=holes),
        dumped(2, rollout_routed_experts=routes_of(2) * 0),
    )
    collection, report = imported(path, ImportSource.miles, leave_out_bad_routes=True)
    assert [sample.id for sample in collection.samples] == ["3:0"]
    assert report.left_out == {"routes that cannot be replayed": 2}
    assert report.captures == {"unfilled": 1, "zero": 6, "duplicated": 7}
    assert report.examples == {"unfilled": ["3:1"], "zero": ["3:2"], "duplicated": ["3:1", "3:2"]}


def example(n: int, **changes: Any) -> dict[str, Any]:
    """The named fields of one example of prime-rl."""
    whole = np.concatenate([routes_of(n), np.zeros((1, 2, 2), dtype=np.int32)])
    return {
        "prompt_ids": tokens_of(n)[:PROMPT],
        "prompt_mask": [False] * PROMPT,
        "completion_ids": tokens_of(n)[PROMPT:],
        "completion_mask": [True, True, n % 2 == 0, True],
        "completion_logprobs": logprobs_of(n),
        "completion_temperatures": [1.0] * RESPONSE,
        "env_name": "math",
        "ref_logprobs": None,
        "advantage": 0.75,
        "reward": 2.0 + n,
        "mm_kwargs": None,
        "routed_experts": [whole.astype(np.uint8).tobytes(), list(whole.shape), "uint8"],
    } | changes


def assert_examples(collection: Collection, *, count: int) -> None:
    assert len(collection.samples) == count
    for n, sample in enumerate(collection.samples):
        assert sample.tokens.tolist() == tokens_of(n)
        assert sample.response_mask.tolist() == [False] * 3 + [True, True, n % 2 == 0, True]
        assert sample.behavior_logprobs[PROMPT:].tolist() == logprobs_of(n)
        assert sample.reward == 2.0 + n
        assert sample.routes is not None
        np.testing.assert_array_equal(sample.routes, routes_of(n))


def pack(path: Path, *examples: Any) -> Path:
    path.write_bytes(msgpack.packb([list(examples), 17]))
    return path


def test_a_batch_of_prime_rl_is_read_by_what_stands_where(tmp_path: Path) -> None:
    path = pack(tmp_path / "rank_0.bin", *(list(example(n).values()) for n in range(2)))
    collection, report = imported(path, ImportSource.prime_rl, group_size=2)
    assert_examples(collection, count=2)
    assert [sample.id for sample in collection.samples] == ["17:0", "17:1"]
    assert report.surplus_rows == 2
    assert report.lacks == {}
    # A version before temperatures and environment names, with routes as nested lists.
    older = [
        [
            v
            for name, v in example(n).items()
            if name not in ("completion_temperatures", "env_name", "mm_kwargs")
        ]
        for n in range(2)
    ]
    for n, fields in enumerate(older):
        fields[-1] = routes_of(n).tolist()
    collection, _ = imported(pack(tmp_path / "old.bin", *older), ImportSource.prime_rl, group_size=2)
    assert_examples(collection, count=2)


def test_later_versions_with_named_shuffled_or_additional_fields_are_read_too(tmp_path: Path) -> None:
    named = [dict(reversed(example(n).items())) for n in range(2)]
    path = tmp_path / "named.msgpack"
    path.write_bytes(msgpack.packb({"step": 17, "run_idx": None, "examples": named}))
    collection, _ = imported(path, ImportSource.prime_rl, group_size=2)
    assert_examples(collection, count=2)
    longer = [[*example(n).values(), "a field of tomorrow"] for n in range(2)]
    collection, report = imported(pack(tmp_path / "new.bin", *longer), ImportSource.prime_rl, group_size=2)
    assert_examples(collection, count=2)
    assert report.ignored == {"field 12": 2}
    flat = [
        [
            tokens_of(n),
            [False] * 3 + [True, True, n % 2 == 0, True],
            [0.0] * 3 + logprobs_of(n),
            [1.0] * TOKENS,
            "math",
            None,
            None,
            None,
            example(n)["routed_experts"],
        ]
        for n in range(2)
    ]
    path = pack(tmp_path / "flat.bin", *flat)
    collection, report = imported(path, ImportSource.prime_rl, group_size=2, default_reward=2.0)
    assert [sample.tokens.tolist() for sample in collection.samples] == [tokens_of(0), tokens_of(1)]
    assert report.lacks == {"reward": 2}


def test_a_batch_of_prime_rl_without_groups_or_cut_in_two_is_refused(tmp_path: Path) -> None:
    path = pack(tmp_path / "rank_0.bin", list(example(0).values()))
    assert "imports.group_size" in refused(path, ImportSource.prime_rl)
    path.write_bytes(path.read_bytes()[:-20])
    assert "is the file cut?" in refused(path, ImportSource.prime_rl, group_size=1)
    trained = pack(tmp_path / "b.bin", list(example(0, prompt_mask=[False, True, False]).values()))
    assert "prompt_mask is true at token 1" in refused(trained, ImportSource.prime_rl, group_size=1)


def npy(routes: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def choice(n: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": n,
        "text": f"response {n}",
        "token_ids": tokens_of(n)[PROMPT:],
        "logprobs": {"token_logprobs": logprobs_of(n), "tokens": ["a"] * RESPONSE},
        "finish_reason": "stop",
    } | changes


ENCODINGS: dict[str, Any] = {
    "vllm 0.22": lambda r: {"routed_experts": npy(r.astype(np.uint8))},
    "sglang openai": lambda r: {"sgl_ext": {"routed_experts": base64.b64encode(r.tobytes()).decode()}},
    "nested lists": lambda r: {"routed_experts": r.tolist()},
    "parts": lambda r: {
        "routed_experts": {
            "encoding": "base64",
            "dtype": "int16",
            "shape": list(r.shape),
            "data": base64.b64encode(r.astype(np.int16).tobytes()).decode(),
        }
    },
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("surplus", [0, 1])
def test_every_spelling_of_routes_gives_the_same_rows(encoding: str, layers: int, surplus: int) -> None:
    routes = routes_of(5, rows=TOKENS - 1 + surplus, layers=layers)
    body = {"prompt_token_ids": tokens_of(5)[:PROMPT], "choices": [choice(5, **ENCODINGS[encoding](routes))]}
    (completion,) = completions_of(body, axis=AXIS)
    assert completion.routes is not None
    np.testing.assert_array_equal(completion.routes, routes[: TOKENS - 1])
    assert completion.surplus_rows == surplus
    assert completion.logprobs.tolist() == logprobs_of(5)
    np.testing.assert_array_equal(AXIS.routed(completion.routes), routes[: TOKENS - 1, layers - 2 :])


def test_prompt_routes_beside_the_choices_come_before_those_of_each_choice() -> None:
    routes = routes_of(1)
    body = {
        "prompt_token_ids": tokens_of(1)[:PROMPT],
        "prompt_routed_experts": routes[:PROMPT].tolist(),
        "choices": [choice(1, routed_experts=routes[PROMPT:].tolist())],
    }
    (completion,) = completions_of(body, axis=AXIS)
    assert completion.routes is not None
    np.testing.assert_array_equal(completion.routes, routes)
    body["prompt_routed_experts"] = routes[: PROMPT - 1].tolist()
    with pytest.raises(Refusal, match="5 route rows, expected 6"):
        completions_of(body, axis=AXIS)


def test_an_answer_of_generate_is_a_completion_too() -> None:
    routes = routes_of(2)
    body = {
        "text": "response 2",
        "meta_info": {
            "output_token_logprobs": [
                [p, t, None] for p, t in zip(logprobs_of(2), tokens_of(2)[PROMPT:], strict=True)
            ],
            "finish_reason": {"type": "length", "length": RESPONSE},
            "weight_version": "9",
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
        },
    }
    (completion,) = completions_of([body], axis=AXIS, prompt=tokens_of(2)[:PROMPT])
    assert completion.tokens.tolist() == tokens_of(2)[PROMPT:]
    assert (completion.finish_reason, completion.policy_version) == ("length", 9)
    np.testing.assert_array_equal(completion.routes, routes)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "neither choices"),
        ({"choices": {}}, "choices is dict"),
        ({"choices": [choice(0)]}, "no prompt_token_ids"),
        ({"choices": [choice(0, token_ids=None)], "prompt_token_ids": [1]}, "no token_ids"),
        (
            {"choices": [choice(0, token_ids=[1, -2])], "prompt_token_ids": [1]},
            "token_ids holds an id outside",
        ),
        ({"choices": [choice(0, logprobs=None)], "prompt_token_ids": [1]}, "no logprobs"),
        (
            {"choices": [choice(0, token_ids=[1])], "prompt_token_ids": [1]},
            "4 log-probs for 1 generated tokens",
        ),
    ],
)
def test_an_answer_that_lacks_something_says_what(body: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        completions_of(body, axis=None)


def test_routes_that_are_no_routes_are_refused() -> None:
    for payload, words in (
        ("not base64!", "no base64"),
        (base64.b64encode(b"\x93NUMPY broken").decode(), "damaged .npy"),
        (base64.b64encode(bytes(4 * 7)).decode(), "no int32"),
        ([[[1, 2]], [[1, 2], [3, 4]]], "unequal lengths"),
        ({"dtype": "int16", "shape": [1, 2, 2], "data": "AAAA"}, "do not fit"),
        ({"dtype": "O", "shape": [1, 2, 2], "data": "AAAA"}, "do not fit"),
    ):
        with pytest.raises(Refusal, match=words):
            decode_routes(payload, axis=AXIS, rows=6)


def turn(prompt: list[int], tokens: list[int], *, seed: int, version: int) -> Completion:
    return Completion(
        prompt=np.array(prompt, dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array([-float(token) for token in tokens], dtype=np.float32),
        routes=routes_of(seed, rows=len(prompt) + len(tokens) - 1),
        finish_reason="stop",
        policy_version=version,
    )


def test_the_prefill_of_the_second_turn_supplies_the_row_that_the_first_could_not_have() -> None:
    first = turn([1, 2], [3, 4], seed=0, version=7)
    second = turn([1, 2, 3, 4, 50, 51], [6], seed=3, version=8)
    joined = join_turns([first, second])
    assert joined.tokens.tolist() == [1, 2, 3, 4, 50, 51, 6]
    assert joined.response_mask.tolist() == [False, False, True, True, False, False, True]
    assert joined.logprobs.tolist() == [0, 0, -3, -4, 0, 0, -6]
    assert joined.policy_version == 7
    assert joined.routes is not None
    assert first.routes is not None
    assert second.routes is not None
    np.testing.assert_array_equal(joined.routes[:3], first.routes)
    np.testing.assert_array_equal(joined.routes[3:], second.routes[3:])
    with pytest.raises(Refusal, match="turn 1 does not continue the tokens of turn 0"):
        join_turns([first, turn([1, 2, 9, 4, 50], [6], seed=3, version=8)])


def test_lines_of_completions_become_groups_of_their_choices_and_conversations(tmp_path: Path) -> None:
    body = {
        "id": "cmpl-1",
        "prompt_token_ids": tokens_of(0)[:PROMPT],
        "choices": [choice(n, **ENCODINGS["vllm 0.22"](routes_of(n))) for n in range(2)],
        "weight_version": 6,
    }
    turns = [
        {
            "prompt_token_ids": tokens_of(4, count=3),
            "choices": [choice(4, routed_experts=npy(routes_of(4)))],
        },
        {
            "prompt_token_ids": tokens_of(4, count=9),
            "choices": [
                choice(
                    4,
                    token_ids=[1],
                    logprobs={"token_logprobs": [-1.0]},
                    routed_experts=npy(routes_of(4, rows=9)),
                )
            ],
        },
    ]
    lines = [
        {"response": body, "reward": [0.5, 1.5], "prompt": "lone \ud800 surrogate"},
        {"turns": turns, "reward": 3.0, "sample_id": "talk", "group_id": "g", "policy_version": 2},
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    collection, report = imported(path, ImportSource.vllm)
    assert [s.id for s in collection.samples] == ["cmpl-1:0", "cmpl-1:1", "talk"]
    assert [s.group for s in collection.samples] == ["cmpl-1", "cmpl-1", "g"]
    assert [s.reward for s in collection.samples] == [0.5, 1.5, 3.0]
    assert [s.policy_version for s in collection.samples] == [6, 6, 2]
    assert collection.samples[0].prompt == "lone ? surrogate"
    assert collection.samples[2].response_mask.tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True]
    assert report.turns == 4
    path.write_text(json.dumps(body))
    assert "imports.default_reward" in refused(path, ImportSource.sglang)
    path.write_text(json.dumps(lines[1])[:-9])
    assert "line 1: not a JSON value" in refused(path, ImportSource.sglang)


def test_a_directory_is_read_in_name_order_and_a_wrong_suffix_is_refused(tmp_path: Path) -> None:
    for name in ("b.pt", "a.pt", ".hidden.pt", "notes.txt"):
        (tmp_path / name).touch()
    assert [p.name for p in import_paths(tmp_path, source=ImportSource.slime)] == ["a.pt", "b.pt"]
    with pytest.raises(Refusal, match="source=vllm reads .jsonl or .json"):
        import_paths(tmp_path / "a.pt", source=ImportSource.vllm)
    with pytest.raises(Refusal, match="holds no .bin or .msgpack file"):
        import_paths(tmp_path, source=ImportSource.prime_rl)


MODEL = ("model=moe_tiny", "model.num_experts=8", "model.top_k=2")


def test_the_command_writes_files_that_a_plan_and_training_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    from composing import compose_fast

    layers = len(compose_fast(*MODEL).model.routed_layers)
    samples = [dumped(n, rollout_routed_experts=routes_of(n, layers=layers)) for n in range(4)]
    dump(tmp_path / "rollout_0.pt", *samples)
    arguments = ["recipe=import", "imports.source=miles", "imports.path=rollout_0.pt", "run_name=i", *MODEL]
    assert run_command(arguments) == 0
    out = capsys.readouterr().out
    assert "outputs/i/rollouts" in out
    (file,) = (tmp_path / "outputs/i/rollouts").iterdir()
    collection = read_collection(file, require_routes=True)
    assert [sample.id for sample in collection.samples] == ["3:0", "3:1", "3:2", "3:3"]
    report = json.loads((tmp_path / "outputs/i/import_report.json").read_text())
    assert report["files"][0]["samples"] == 4
    files = ["rollouts=files", "rollouts.path=outputs/i/rollouts", "packing=consecutive", *MODEL]
    assert run_command(["recipe=plan", "run_name=p", "batch.samples_per_step=4", *files]) == 0
    training = ["callbacks=quiet", "batch.samples_per_step=4", "trainer.max_steps=1"]
    assert run_command(["run_name=t", *training, *files]) == 0
    assert (tmp_path / "outputs/t/metrics.csv").exists()


def test_a_refused_import_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dump(tmp_path / "a.pt", dumped(0))
    dump(tmp_path / "b.pt", dumped(0, reward=None))
    arguments = [
        "recipe=import",
        "imports.source=miles",
        "imports.path=.",
        "run_name=i",
        "policy.replay=false",
        *MODEL,
    ]
    assert run_command(arguments) == 2
    assert "b.pt sample 0: " in capsys.readouterr().err
    assert not (tmp_path / "outputs/i/rollouts").exists()
    assert not (tmp_path / "outputs/i/import_report.json").exists()
