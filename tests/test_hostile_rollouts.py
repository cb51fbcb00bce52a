"""Rollouts whose files nobody of this project wrote: each is refused with its place, or read as meant."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_files import META, make_collection, make_sample, refusal, row, write_lines
from test_importers import (
    PROMPT,
    TOKENS,
    choice,
    dump,
    dumped,
    example,
    imported,
    logprobs_of,
    pack,
    refused,
    routes_of,
    tokens_of,
)

from olmo_rl.config import LossConfig
from olmo_rl.data.advantages import assign_advantages
from olmo_rl.data.files import read_collection, write_collection
from olmo_rl.rollouts.importers import ForeignSample
from olmo_rl.types import Refusal, Sampling


@pytest.mark.parametrize("routes", ["AAAA", {"data": "AAAA"}, False, 7])
def test_routes_of_a_line_that_are_no_list_are_refused(tmp_path: Path, routes: Any) -> None:
    assert "line 2, sample 'a': routes are " in refusal(write_lines(tmp_path / "f.jsonl", row(routes=routes)))


@pytest.mark.parametrize("shape", [["4", "2", "2"], [4.0, 2.0, 2.0]])
def test_a_shape_of_routes_that_holds_no_integers_is_refused(tmp_path: Path, shape: list[Any]) -> None:
    collection = make_collection()
    write_collection(collection, tmp_path / "f.parquet")
    table = pq.read_table(tmp_path / "f.parquet")
    shapes = pa.array([shape] * len(collection.samples))
    place = table.column_names.index("routes_shape")
    pq.write_table(table.set_column(place, "routes_shape", shapes), tmp_path / "f.parquet")
    assert "row 0, sample 's0': routes_shape is " in refusal(tmp_path / "f.parquet")


def test_counts_of_metadata_allocate_nothing_that_the_rows_do_not_hold(tmp_path: Path) -> None:
    meta = {"num_experts": 2**31 - 1, "top_k": 2**31 - 1, "routed_layers": [1, 3]}
    message = refusal(write_lines(tmp_path / "f.jsonl", row(), meta=meta))
    assert f"experts [0, 1] are 2, top_k is {2**31 - 1}" in message
    wide = write_lines(tmp_path / "f.jsonl", row(), meta=meta | {"num_experts": 2**31})
    assert "expected an integer in 1..2147483647" in refusal(wide)  # wider ids would wrap in memory


def test_a_second_line_of_metadata_is_refused(tmp_path: Path) -> None:
    hot = META | {"sampling": {"temperature": 0.7}}
    path = write_lines(tmp_path / "f.jsonl", {"meta": META | {"sampling": {}}}, row(), meta=hot)
    assert "line 2 is a second line of metadata" in refusal(path)


def test_a_name_that_stands_twice_in_an_object_is_refused(tmp_path: Path) -> None:
    twice = json.dumps(row())[:-1] + ', "reward": 0}'
    assert "line 2: 'reward' stands twice in one object" in refusal(write_lines(tmp_path / "f.jsonl", twice))


def test_a_null_in_one_row_refuses_that_row_alone(tmp_path: Path) -> None:
    table = pa.table(
        {
            "sample_id": ["a", "b"],
            "group_id": ["g", "g"],
            "tokens": pa.array([[1, 2], [1, None]], pa.list_(pa.int32())),
            "response_mask": pa.array([[False, True], [None, True]]),
            "behavior_logprobs": pa.array([[None, -1.0], [None, -1.0]]),
            "reward": [1.0, 0.0],
            "policy_version": [0, 0],
        }
    )
    pq.write_table(table, tmp_path / "f.parquet")
    message = refusal(tmp_path / "f.parquet", require_routes=False)
    assert message == f"{tmp_path}/f.parquet row 1, sample 'b': tokens[1] is None: expected an integer"


@pytest.mark.parametrize("name", ["behavior_logprobs", "ref_logprobs"])
def test_probabilities_in_the_place_of_log_probs_are_refused(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / "f.jsonl", row(**{name: [None, None, 0.05, 0.9, 0.5]}))
    assert f"{name}[3] is 0.9: a log-prob is at most 0" in refusal(path)  # 0.05: rounding of bfloat16
    far = write_lines(tmp_path / "f.jsonl", row(**{name: [None, None, -1, -1e30, -1]}))
    assert f"{name}[3] is -1e+30, below -10000: a token that was drawn is likelier" in refusal(far)
    masked = row(behavior_logprobs=[None, 0.9, -1, -1, -1])
    assert read_collection(write_lines(tmp_path / "f.jsonl", masked), require_routes=True).samples


def test_rewards_whose_squares_overflow_are_refused_and_tiny_differences_are_none(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", row(reward=1e200))
    assert "reward is 1e+200: advantages of such rewards overflow float32" in refusal(path)
    assert "reward is -1e+31: " in refusal(write_lines(tmp_path / "f.jsonl", row(reward=-1e31)))
    tiny = [replace(make_sample(i, length=4), group="g", reward=(i + 1) * 1e-200) for i in range(2)]
    assign_advantages(tiny, config=LossConfig(normalize_advantages=True))
    assert [sample.advantage for sample in tiny] == [0.0, 0.0]
    large = [replace(make_sample(i, length=4), group="g", reward=(-1) ** i * 1e30) for i in range(2)]
    assign_advantages(large, config=LossConfig(normalize_advantages=True))
    assert [sample.advantage for sample in large] == [1.0, -1.0]
    assign_advantages(large, config=LossConfig(normalize_advantages=False))
    assert np.isfinite(np.float32([1e6 * (sample.advantage or 0) for sample in large])).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index": [1]}, "index is [1]"),
        ({"index": True}, "index is True"),
        ({"rollout_id": {"a": 1}}, "rollout_id is {'a': 1}"),
        ({"reward": {1: 0.5, "a": 1.0}}, "reward is a mapping of 'a', 1"),
        ({"remove_sample": torch.tensor([True, False])}, "remove_sample is tensor"),
        ({"rollout_routed_experts": torch.zeros(6, 2, 2, dtype=torch.bfloat16)}, "a tensor that no array"),
        ({"rollout_routed_experts": torch.zeros(6, 2, 2).to_sparse()}, "a tensor that no array holds"),
    ],
)
def test_a_dump_with_a_value_of_another_type_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = dump(tmp_path / "d.pt", dumped(0, **changes))
    message = refused(path, "slime")
    assert message.startswith(f"{path} sample 0: ")
    assert words in message


def test_scalars_and_images_of_a_dump_may_be_arrays(tmp_path: Path) -> None:
    scalars = dumped(0, reward=np.float32(0.5), group_index=np.int64(7), weight_versions=["9" * 5000])
    images = dumped(1, multimodal_train_inputs=torch.zeros(3), multimodal_inputs={})
    collection, report = imported(dump(tmp_path / "d.pt", scalars, images), "slime")
    first, second = collection.samples
    assert (first.reward, first.group, first.has_placeholders) == (0.5, "7", False)
    assert second.has_placeholders
    assert report.lacks == {"policy_version": 1}  # a version of 5000 digits counts no steps


def test_a_damaged_dump_is_refused_whatever_the_unpickler_meets(tmp_path: Path) -> None:
    old = tmp_path / "d.pt"
    torch.save({"samples": [dumped(0)]}, old, _use_new_zipfile_serialization=False)
    whole = old.read_bytes()
    rng = np.random.default_rng(0)
    refusals = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=3):
            damaged[place] = rng.integers(256)
        old.write_bytes(damaged)
        try:
            imported(old, "slime")
        except Refusal:
            refusals += 1
    assert refusals > 50


def test_a_key_without_a_hash_and_a_temperature_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(b"\x81\x90\x01")
    assert "not one whole msgpack value" in refused(path, "prime_rl")
    endless = example(0, completion_temperatures=[float("inf")] * 4)
    message = refused(pack(path, list(endless.values())), "prime_rl", group_size=1)
    assert "sampling.temperature is inf: expected a number" in message


def line(tmp_path: Path, record: dict[str, Any]) -> Path:
    path = tmp_path / "v.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return path


def body(**changes: Any) -> dict[str, Any]:
    routed = {"routed_experts": routes_of(0).tolist()} | changes
    return {"prompt_token_ids": tokens_of(0)[:PROMPT], "choices": [choice(0, **routed)]}


def npy(shape: str) -> str:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return base64.b64encode(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.encode()).decode()


def turn(tokens: list[int], *, layers: int) -> dict[str, Any]:
    """An answer of one token to all others."""
    routes = routes_of(0, rows=len(tokens) - 1, layers=layers).tolist()
    answer = choice(0, token_ids=tokens[-1:], logprobs={"token_logprobs": [-1.0]}, routed_experts=routes)
    return {"prompt_token_ids": tokens[:-1], "choices": [answer]}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"response": body(), "turns": []}, "response and turns exclude each other"),
        ({"response": body(), "prompt_token_ids": [9, 9, 9]}, "the prompt is another one than was sent"),
        ({"turns": [body()], "prompt_token_ids": [9]}, "prompt_token_ids beside turns"),
        ({"response": body(), "policy_version": 3.0}, "policy_version is 3.0: it counts optimizer steps"),
        ({"response": body(), "policy_version": "step-3"}, "policy_version is 'step-3'"),
        ({"response": body(), "sample_id": {"a": 1}}, "sample_id is {'a': 1}"),
        ({"response": body(), "sampling": []}, "sampling is []"),
        ({"response": body(), "sampling": {"top_p": 10**400}}, "sampling.top_p is 1000"),
        ({"response": body(logprobs={"token_logprobs": [-(10**400)] * 4})}, "a log-prob that no float holds"),
        ({"response": body(routed_experts=npy(f"({10**18},)"))}, "damaged .npy"),
        ({"response": body(routed_experts=npy("(((((("))}, "damaged .npy"),
        ({"response": body(routed_experts=npy(f"({2**70}, 2, 2)"))}, "damaged .npy"),
        (
            {"turns": [turn([1, 2, 3], layers=2), turn([1, 2, 3, 4], layers=3)]},
            "(layers, top_k) (2, 2), (3, 2)",
        ),
        (
            {
                "response": {
                    "prompt_token_ids": [1],
                    "output_ids": [7],
                    "meta_info": {"output_token_logprobs": [[-1.0, 8, None]], "finish_reason": "stop"},
                }
            },
            "output_ids are other tokens than those of meta_info.output_token_logprobs",
        ),
    ],
)
def test_a_record_of_an_answer_that_contradicts_itself_is_refused(
    tmp_path: Path, record: dict[str, Any], words: str
) -> None:
    message = refused(line(tmp_path, {"reward": 1.0} | record), "vllm", group_size=1)
    assert message.startswith(f"{tmp_path}/v.jsonl line 1")
    assert words in message


def test_an_answer_without_choices_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    lines = [{"response": body(), "reward": 1.0}, {"response": {"choices": []}, "reward": 1.0}]
    path.write_text("\n".join(map(json.dumps, lines)))
    _, report = imported(path, "vllm", group_size=1)
    assert (report.samples, report.left_out) == (1, {"no choices": 1})


def test_a_turn_without_a_row_of_routes_joins_turns_over_all_layers(tmp_path: Path) -> None:
    first = {"prompt_token_ids": [], "choices": turn([1], layers=2)["choices"]}
    path = line(tmp_path, {"turns": [first, turn([1, 2, 3], layers=3)], "reward": 1.0})
    (sample,) = imported(path, "vllm", group_size=1)[0].samples
    assert sample.routes is not None
    np.testing.assert_array_equal(sample.routes, routes_of(0, rows=2, layers=3)[:, 1:])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "its function returns NoneType, expected olmo_rl.rollouts.importers.ForeignSample"),
        ("sampling", "w: sampling.temperature is '1': expected a number"),
    ],
)
def test_a_reader_that_returns_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str | None, words: str
) -> None:
    values = {
        "group": "g",
        "tokens": tokens_of(0),
        "response_mask": [False] * PROMPT + [True] * (TOKENS - PROMPT),
        "behavior_logprobs": [None] * PROMPT + logprobs_of(0),
        "reward": 1.0,
        "routes": routes_of(0),
    }
    hot: Any = Sampling(temperature="1")  # type: ignore[arg-type]
    found = None if returned is None else [ForeignSample(where="w", values=values, sampling=hot)]
    module = ModuleType("a_reader")
    module.read = lambda path, *, options: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_reader", module)
    (tmp_path / "any").write_text("")
    assert words in refused(tmp_path / "any", "a_reader:read")
