"""Rollout files: exact round trips, and every kind of bad input refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_rl.data.files import collection_paths, read_collection, write_collection
from olmo_rl.data.validation import check_layout
from olmo_rl.types import Collection, ExpertLayout, Refusal, Sample

LAYOUT = ExpertLayout(num_experts=8, top_k=2, routed_layers=(1, 3))
META = {"num_experts": 8, "top_k": 2, "routed_layers": [1, 3]}


def random_routes(rng: np.random.Generator, rows: int, layout: ExpertLayout, dtype: str) -> np.ndarray:
    scores = rng.random((rows, len(layout.routed_layers), layout.num_experts))
    return np.argsort(scores, axis=-1)[..., : layout.top_k].astype(dtype)


def make_sample(i: int, *, length: int, layout: ExpertLayout | None = LAYOUT, dtype: str = "int16") -> Sample:
    rng = np.random.default_rng(100 + i)
    response = np.arange(length) >= max(1, length // 2)
    logprobs = rng.normal(-1, 0.3, length).astype(np.float32)
    return Sample(
        id=f"s{i}",
        group=f"math:{i // 2}",
        tokens=rng.integers(0, 200, length).astype(np.int32),
        response_mask=response,
        behavior_logprobs=np.where(response, logprobs, np.float32(np.nan)),
        reward=float(rng.normal()),
        policy_version=i,
        routes=None if layout is None else random_routes(rng, length - 1, layout, dtype),
    )


def make_collection(**changes: Any) -> Collection:
    samples = [make_sample(i, length=n, **changes) for i, n in enumerate([5, 1, 7, 3])]
    layout = changes.get("layout", LAYOUT)
    return Collection(samples=samples, layout=layout, source="test", model="tiny", tokenizer="bytes")


def assert_equal(found: Collection, expected: Collection, *, route_dtype: bool = True) -> None:
    assert (found.layout, found.model, found.tokenizer) == (
        expected.layout,
        expected.model,
        expected.tokenizer,
    )
    assert len(found.samples) == len(expected.samples)
    for a, b in zip(found.samples, expected.samples, strict=True):
        for field in fields(Sample):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(y, np.ndarray):
                if field.name != "routes" or route_dtype:
                    assert x.dtype == y.dtype, field.name
                np.testing.assert_array_equal(x, y, err_msg=field.name)
            else:
                assert x == y, field.name
                assert type(x) is type(y), field.name


def row(**changes: Any) -> dict[str, Any]:
    """A correct JSONL line of five tokens, changed as asked; a value of ... removes the key."""
    line: dict[str, Any] = {
        "sample_id": "a",
        "group_id": "g",
        "tokens": [5, 6, 7, 8, 9],
        "response_mask": [0, 0, 1, 1, 1],
        "behavior_logprobs": [None, None, -0.5, -0.25, -1.5],
        "reward": 1,
        "policy_version": 3,
        "routes": [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[1, 0], [3, 2]], [[5, 4], [7, 6]]],
    }
    line |= changes
    return {name: value for name, value in line.items() if value is not ...}


def write_lines(path: Path, *lines: Any, meta: dict[str, Any] | None = META) -> Path:
    head = [] if meta is None else [{"meta": meta}]
    text = [x if isinstance(x, str) else json.dumps(x) for x in (*head, *lines)]
    path.write_text("\n".join(text) + "\n")
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(Refusal) as caught:
        read_collection(path, **({"require_routes": True} | options))
    return "\n".join(caught.value.reasons)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64"])
def test_parquet_gives_back_exactly_what_was_written(tmp_path: Path, dtype: str) -> None:
    collection = make_collection(dtype=dtype)
    first = collection.samples[0]
    first.loss_mask = first.response_mask & (np.arange(5) != 3)
    first.ref_logprobs = np.array([np.nan, -0.1, -0.2, np.nan, -0.4], dtype=np.float32)
    first.finish_reason, first.prompt, first.response = "stop", "12+34=", "46 é \u2028 日"
    write_collection(collection, tmp_path / "c.parquet")
    assert_equal(read_collection(tmp_path / "c.parquet", require_routes=True), collection)
    assert [p.name for p in tmp_path.iterdir()] == ["c.parquet"]


def test_jsonl_gives_back_what_was_written_but_for_the_route_dtype(tmp_path: Path) -> None:
    collection = make_collection(dtype="uint8")
    collection.samples[2].ref_logprobs = np.linspace(-3, -1, 7, dtype=np.float32)
    collection.samples[3].response = "tab\tline\nend \u2028"
    write_collection(collection, tmp_path / "c.jsonl")
    found = read_collection(tmp_path / "c.jsonl", require_routes=True)
    assert_equal(found, collection, route_dtype=False)
    assert found.samples[0].routes is not None
    assert found.samples[0].routes.dtype == np.int16


def test_a_collection_without_experts_has_neither_routes_nor_expert_metadata(tmp_path: Path) -> None:
    collection = make_collection(layout=None)
    for name in ("c.parquet", "c.jsonl"):
        write_collection(collection, tmp_path / name)
        found = read_collection(tmp_path / name, require_routes=False)
        assert_equal(found, collection)
        assert found.notes == ()


lines = st.builds(
    lambda n, seed, masked: (n, seed, masked),
    st.integers(1, 12),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(lines, min_size=1, max_size=80), st.sampled_from(["parquet", "jsonl"]))
def test_any_valid_collection_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, bool]], suffix: str
) -> None:
    samples = []
    for i, (length, seed, masked) in enumerate(drawn):
        rng = np.random.default_rng(seed)
        response = np.zeros(length, bool) if masked else rng.random(length) < 0.5
        samples.append(
            Sample(
                id=f"{i}:{seed}",
                group=str(seed % 3),
                tokens=rng.integers(0, 2**31, length).astype(np.int32),
                response_mask=response,
                behavior_logprobs=np.where(response, -rng.exponential(size=length), np.nan).astype(
                    np.float32
                ),
                reward=float(rng.normal() * 10.0 ** rng.integers(-300, 29)),
                policy_version=int(seed),
                loss_mask=response & (rng.random(length) < 0.5) if seed % 2 else None,
                routes=random_routes(rng, length - 1, LAYOUT, "int16"),
            )
        )
    collection = Collection(samples=samples, layout=LAYOUT, source="drawn")
    path = tmp_path_factory.mktemp("round") / f"c.{suffix}"
    write_collection(collection, path)
    assert_equal(read_collection(path, require_routes=True), collection)


def test_log_probs_that_are_not_finite_are_null_in_files_where_nothing_is_scored(tmp_path: Path) -> None:
    collection = make_collection()
    collection.samples[0].behavior_logprobs[:2] = [np.inf, np.nan]
    write_collection(collection, tmp_path / "c.jsonl")
    line = json.loads((tmp_path / "c.jsonl").read_text().splitlines()[1])
    assert line["behavior_logprobs"][:2] == [None, None]
    write_collection(collection, tmp_path / "c.parquet")
    assert pq.read_table(tmp_path / "c.parquet")["behavior_logprobs"][0].as_py()[:2] == [None, None]
    found = read_collection(tmp_path / "c.parquet", require_routes=True)
    assert np.isnan(found.samples[0].behavior_logprobs[:2]).all()


def test_ids_stay_strings_and_integers_become_decimal_strings(tmp_path: Path) -> None:
    ids = ["010", "1E5", "1:30", "no", "math:1:s0", 10, 2**70]
    path = write_lines(tmp_path / "f.jsonl", *(row(sample_id=x, group_id=x) for x in ids))
    expected = ["010", "1E5", "1:30", "no", "math:1:s0", "10", str(2**70)]
    found = read_collection(path, require_routes=True)
    assert [s.id for s in found.samples] == expected
    assert [s.group for s in found.samples] == expected
    write_collection(found, tmp_path / "f.parquet")
    assert [s.id for s in read_collection(tmp_path / "f.parquet", require_routes=True).samples] == expected


def test_groups_are_what_the_file_says_whatever_their_names_or_prompts(tmp_path: Path) -> None:
    lines = [
        row(sample_id=f"s{i}", group_id=g) for i, g in enumerate(["math:1:s0", "math:2:s0", "math:1:s0"])
    ]
    found = read_collection(write_lines(tmp_path / "f.jsonl", *lines), require_routes=True)
    assert [s.group for s in found.samples] == ["math:1:s0", "math:2:s0", "math:1:s0"]


def test_an_axis_over_all_layers_gives_the_same_routes_as_one_over_routed_layers(tmp_path: Path) -> None:
    collection = make_collection()
    everywhere = []
    for sample in collection.samples:
        assert sample.routes is not None
        full = np.full((len(sample) - 1, 5, 2), -1, dtype=np.int16)  # dense rows hold nothing legal
        full[:, [1, 3]] = sample.routes
        everywhere.append(full)
    write_collection(collection, tmp_path / "routed.parquet")
    table = pq.read_table(tmp_path / "routed.parquet")
    meta = json.loads(table.schema.metadata[b"olmo_rl"]) | {"route_layers": "all"}
    table = table.set_column(
        table.schema.get_field_index("routes"), "routes", pa.array([x.tobytes() for x in everywhere])
    ).set_column(
        table.schema.get_field_index("routes_shape"),
        "routes_shape",
        pa.array([list(x.shape) for x in everywhere]),
    )
    pq.write_table(table.replace_schema_metadata({"olmo_rl": json.dumps(meta)}), tmp_path / "all.parquet")
    assert_equal(read_collection(tmp_path / "all.parquet", require_routes=True), collection)

    write_collection(collection, tmp_path / "routed.jsonl")
    head, *body = (json.loads(x) for x in (tmp_path / "routed.jsonl").read_text().splitlines())
    for line, full in zip(body, everywhere, strict=True):
        line["routes"] = full.tolist()
    path = write_lines(tmp_path / "all.jsonl", *body, meta=head["meta"] | {"route_layers": "all"})
    assert_equal(read_collection(path, require_routes=True), collection)
    assert "5 layers, expected 6" in refusal(path, num_layers=6)
    assert "have 3 layers, but routed_layers names layer 3" in refusal(path, num_layers=3)


def test_a_layer_axis_of_another_length_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", row(), meta=META | {"routed_layers": [1, 3, 4]})
    assert "routes have 2 layers, routed_layers names 3" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behavior_logprobs": [None, None, -1, -1]}, "behavior_logprobs has 4 entries, tokens has 5"),
        ({"response_mask": [0, 1, 1, 1, 1, 1]}, "response_mask has 6 entries, tokens has 5"),
        ({"loss_mask": [0, 0, 1]}, "loss_mask has 3 entries"),
        ({"ref_logprobs": [-1, -1, -1]}, "ref_logprobs has 3 entries"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [5, 6, -7, 8, 9]}, r"tokens[2] is -7, outside"),
        ({"tokens": [5, 6, 7, 8, 2**31]}, r"tokens[4] is 2147483648, outside"),
        ({"tokens": [5, 6, 7, 8, 10**30]}, r"tokens[4] is 1000"),
        ({"tokens": [5, 6, 7.0, 8, 9]}, "tokens[2] is 7.0: expected an integer"),
        ({"tokens": [5, 6, True, 8, 9]}, "tokens[2] is True: expected an integer"),
        ({"tokens": [5, 6, None, 8, 9]}, "tokens[2] is None"),
        ({"tokens": "56789"}, "tokens is '56789': expected a list"),
        ({"response_mask": [0, 0, 1, 1, 2]}, "response_mask[4] is 2"),
        ({"response_mask": [0, 0, 1, 1, None]}, "response_mask[4] is None"),
        ({"behavior_logprobs": [None, None, -1, None, -1]}, "behavior_logprobs[3] is nan in an active slot"),
        ({"behavior_logprobs": [None, None, -1, float("nan"), -1]}, "behavior_logprobs[3] is nan"),
        ({"behavior_logprobs": [None, None, -1, -1, float("-inf")]}, "behavior_logprobs[4] is -inf"),
        ({"behavior_logprobs": [None, None, -1, -1, -1e300]}, "behavior_logprobs[4] is -inf"),
        ({"behavior_logprobs": [None, None, -1, -1, -(10**400)]}, "behavior_logprobs[4]"),
        ({"behavior_logprobs": [None, None, -1, -1, "-1"]}, "behavior_logprobs[4] is '-1'"),
        ({"ref_logprobs": [None, None, -1, -1, None]}, "ref_logprobs[4] is nan in an active slot"),
        ({"loss_mask": [0, 1, 1, 1, 1]}, "loss_mask is true at position 1 where response_mask is false"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": None}, "reward is missing"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"reward": "1"}, "reward is '1'"),
        ({"reward": True}, "reward is True"),
        ({"policy_version": -1}, "policy_version is -1"),
        ({"policy_version": 1.0}, "policy_version is 1.0: expected"),
        ({"policy_version": ...}, "policy_version is missing"),
        ({"sample_id": ""}, "sample_id is ''"),
        ({"sample_id": 1e5}, "sample_id is 100000.0: ids are non-empty strings"),
        ({"sample_id": True}, "sample_id is True"),
        ({"group_id": None}, "group_id is missing"),
        ({"response": "\ud800"}, "expected text"),
        ({"behaviour_logprobs": []}, "unknown name 'behaviour_logprobs': did you mean 'behavior_logprobs'?"),
        ({"advantage": 1}, "unknown name 'advantage'"),
        ({"routes_dtype": "int16"}, "unknown name 'routes_dtype'"),
        ({"routes": ...}, "routes are missing"),
        ({"routes": None}, "routes are missing"),
    ],
)
def test_a_bad_line_is_refused_by_file_line_sample_and_position(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    good = row(sample_id="good")
    path = write_lines(tmp_path / "f.jsonl", good, row(**changes))
    text = refusal(path)
    assert message in text
    assert text.startswith(f"{path} line 3")
    assert "\n" not in text
    if "sample_id" not in changes:
        assert "sample 'a'" in text


R = row()["routes"]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([*R[:2], [[1, 0], [3, 3]], R[3]], "row 2, layer 3: expert 3 appears more than once in [3, 3]"),
        ([[[0, 0], [0, 0]]] * 4, "row 0, layer 1: expert 0 appears more than once"),
        ([*R[:3], [[5, 4], [7, 8]]], "row 3, layer 3: expert id 8 is outside 0..7"),
        ([*R[:1], [[-1, 4], [7, 6]], *R[2:]], "row 1, layer 1: expert id -1 is outside 0..7"),
        ([*R[:3], [[5, 4], [7, 65536]]], "row 3, layer 3: expert id 65536"),
        ([*R[:3], [[5, 4], [7, 2**64]]], "row 3, layer 3: experts [7, 18446744073709551616]"),
        ([*R[:3], [[5, 4], [7, 6.0]]], "row 3, layer 3: experts[1] is 6.0: expected an integer"),
        ([*R[:3], [[5, 4], [7, True]]], "row 3, layer 3: experts[1] is True"),
        ([*R[:3], [[5, 4], [7]]], "row 3, layer 3: experts [7] are 1, top_k is 2"),
        ([*R[:3], [[5, 4]]], "routes row 3 is not a list of 2 layers"),
        ([*R[:3], [5, 4]], "routes row 3, layer 1: experts is 5: expected a list"),
        (R[:3], "routes have 3 rows for 5 tokens, expected 4"),
        ([*R, R[0]], "routes have 5 rows for 5 tokens, expected 4"),
        ([[*x, [0, 1]] for x in R], "routes have 3 layers, routed_layers names 2: write route_layers: all"),
        ([], "routes have 0 rows for 5 tokens"),
    ],
)
def test_bad_routes_are_refused_by_sample_row_and_layer(tmp_path: Path, routes: Any, message: str) -> None:
    text = refusal(write_lines(tmp_path / "f.jsonl", row(sample_id="x7", routes=routes)))
    assert message in text
    assert "line 2, sample 'x7'" in text


def test_with_one_expert_per_token_all_zero_routes_are_legal(tmp_path: Path) -> None:
    meta = {"num_experts": 4, "top_k": 1, "routed_layers": [0]}
    path = write_lines(tmp_path / "f.jsonl", row(routes=[[[0]]] * 4), meta=meta)
    routes = read_collection(path, require_routes=True).samples[0].routes
    assert routes is not None
    assert routes.shape == (4, 1, 1)
    assert not routes.any()


def test_duplicate_sample_ids_name_both_lines_even_as_number_and_string(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", row(sample_id="7"), row(sample_id="b"), row(sample_id=7))
    assert (
        refusal(path)
        == f"{path} line 4, sample '7': line 2 has the same sample_id: ids are unique within a collection"
    )


def test_every_faulty_sample_is_named_at_once_and_a_flood_is_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", *(row(sample_id=f"s{i}", reward=None) for i in range(25)))
    reasons = refusal(path).split("\n")
    assert len(reasons) == 21
    assert "sample 's19'" in reasons[19]
    assert reasons[20] == f"{path}: and 5 more faulty samples"


def test_one_sample_of_eight_without_routes_is_named_and_not_routed_live(tmp_path: Path) -> None:
    lines = [row(sample_id=f"s{i}", routes=None if i == 5 else R) for i in range(8)]
    text = refusal(write_lines(tmp_path / "f.jsonl", *lines))
    assert "line 7, sample 's5': routes are missing" in text
    assert "\n" not in text
    collection = make_collection()
    collection.samples[2].routes = None
    write_collection(collection, tmp_path / "f.parquet")
    assert "row 2, sample 's2': routes are missing" in refusal(tmp_path / "f.parquet")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_without_replay_routes_are_left_unread_and_that_is_said(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f.{suffix}"
    write_collection(make_collection(), path)
    found = read_collection(path, require_routes=False)
    assert all(sample.routes is None for sample in found.samples)
    assert found.notes == (f"{path}: recorded routes are ignored because policy.replay=false",)
    assert read_collection(path, require_routes=True).notes == ()


def test_expert_counts_come_from_the_file_else_from_the_model_else_the_file_is_refused(
    tmp_path: Path,
) -> None:
    bare = write_lines(tmp_path / "bare.jsonl", row(), meta=None)
    assert "neither the file's metadata nor the model" in refusal(bare)
    assert read_collection(bare, require_routes=True, layout=LAYOUT).layout == LAYOUT
    assert read_collection(bare, require_routes=False).layout is None
    other = ExpertLayout(num_experts=6, top_k=2, routed_layers=(1, 3))
    assert "row 1, layer 3: expert id 6 is outside 0..5" in refusal(bare, layout=other)
    full = write_lines(tmp_path / "full.jsonl", row())
    assert read_collection(full, require_routes=True, layout=other).layout == LAYOUT


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"num_experts": 8, "top_k": 2}, "metadata lacks routed_layers"),
        ({"route_layers": "all"}, "metadata lacks num_experts, top_k, routed_layers"),
        (META | {"route_layers": "dense"}, "route_layers is 'dense'"),
        (META | {"num_expert": 8}, "unknown name 'num_expert': did you mean 'num_experts'?"),
        (META | {"top_k": 9}, "top_k is 9: expected an integer in 1..num_experts=8"),
        (META | {"num_experts": "8"}, "num_experts is '8'"),
        (META | {"routed_layers": [1, 1]}, "routed_layers is [1, 1]"),
        (META | {"routed_layers": [1.0, 3]}, "routed_layers is [1.0, 3]"),
        (META | {"routed_layers": 2}, "routed_layers is 2"),
        (META | {"model": 7}, "model is 7"),
        ([1], "the metadata is [1]"),
    ],
)
def test_bad_metadata_is_refused_in_both_formats(tmp_path: Path, meta: Any, message: str) -> None:
    assert message in refusal(write_lines(tmp_path / "f.jsonl", row(), meta=meta))
    write_collection(make_collection(), tmp_path / "f.parquet")
    table = pq.read_table(tmp_path / "f.parquet").replace_schema_metadata({"olmo_rl": json.dumps(meta)})
    pq.write_table(table, tmp_path / "f.parquet")
    assert message in refusal(tmp_path / "f.parquet")


def test_text_that_is_not_json_is_refused_by_line(tmp_path: Path) -> None:
    cut = json.dumps(row(sample_id="b"))[:60]
    assert f"{tmp_path}/f.jsonl line 3: not JSON (" in refusal(write_lines(tmp_path / "f.jsonl", row(), cut))
    assert "line 3: not a JSON object" in refusal(write_lines(tmp_path / "f.jsonl", row(), "[1, 2]"))
    assert "line 3: unknown name 'meta'" in refusal(write_lines(tmp_path / "f.jsonl", row(), {"meta": META}))
    (tmp_path / "f.jsonl").write_bytes(b"\xff\xfe{}")
    assert "not UTF-8" in refusal(tmp_path / "f.jsonl")
    (tmp_path / "f.jsonl").write_text("")
    assert "contains no samples" in refusal(tmp_path / "f.jsonl", require_routes=False)


def rewrite(path: Path, **columns: pa.Array | None) -> Path:
    """The correct parquet file with columns replaced, added (or, for None, removed)."""
    write_collection(make_collection(), path)
    table = pq.read_table(path)
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        if values is None:
            table = table.remove_column(index)
        elif index < 0:
            table = table.append_column(name, values)
        else:
            table = table.set_column(index, name, values)
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokns": pa.array([1, 2, 3, 4])}, "unknown name 'tokns': did you mean 'tokens'?"),
        ({"tokens": None}, "column 'tokens' is missing"),
        ({"tokens": pa.array(["a"] * 4)}, "column 'tokens' has type string: expected list<"),
        ({"tokens": pa.array([[1.0]] * 4)}, "column 'tokens' has type list<"),
        ({"routes": pa.array(["a"] * 4)}, "column 'routes' has type string"),
        ({"routes_shape": None}, "column 'routes_shape' is missing beside routes"),
        ({"routes_dtype": pa.array(["float32"] * 4)}, "row 0, sample 's0': routes_dtype is 'float32'"),
        (
            {"routes_dtype": pa.array(["int32"] * 4)},
            "routes hold 32 bytes, routes_shape [4, 2, 2] of int32 needs 64",
        ),
        ({"routes_shape": pa.array([[4, 4]] * 4)}, "routes_shape is [4, 4]"),
        ({"routes_shape": pa.array([None] * 4, pa.list_(pa.int32()))}, "routes_shape is None"),
        ({"routes_shape": pa.array([[2, 4, 2]] * 4)}, "routes have 2 rows for 5 tokens"),
        ({"reward": pa.array([1.0, None, 2.0, float("nan")])}, "row 1, sample 's1': reward is missing"),
        ({"reward": pa.array([1.0, 1.0, 2.0, float("nan")])}, "row 3, sample 's3': reward is nan"),
        ({"sample_id": pa.array(["a", "b", "c", "a"])}, "row 3, sample 'a': row 0 has the same sample_id"),
        ({"sample_id": pa.array([1.5, 2.5, 3.5, 4.5])}, "row 0, sample '1.5': sample_id is 1.5"),
        (
            {"response_mask": pa.array([[0] * 5, [None], [0] * 7, [0] * 3], pa.list_(pa.int8()))},
            "row 1, sample 's1': response_mask[0] is None",
        ),
        (
            {"response_mask": pa.array([[0] * 5, [0], [0] * 7, [0, 0, 3]], pa.list_(pa.int8()))},
            "row 3, sample 's3': response_mask[2] is 3",
        ),
        (
            {"response_mask": pa.array([[False] * 5, [False], [False] * 6, [False] * 3])},
            "response_mask has 6 entries",
        ),
    ],
)
def test_bad_parquet_is_refused_by_row_and_sample(
    tmp_path: Path, columns: dict[str, pa.Array | None], message: str
) -> None:
    text = refusal(rewrite(tmp_path / "f.parquet", **columns))
    assert message in text
    assert text.startswith(str(tmp_path / "f.parquet"))


def test_other_list_types_and_chunks_of_a_producer_are_read_alike(tmp_path: Path) -> None:
    collection = make_collection()
    samples = collection.samples
    path = rewrite(
        tmp_path / "f.parquet",
        tokens=pa.array([s.tokens.tolist() for s in samples], pa.large_list(pa.int64())),
        response_mask=pa.array([s.response_mask.astype(int).tolist() for s in samples], pa.list_(pa.uint8())),
        behavior_logprobs=pa.array([s.behavior_logprobs.tolist() for s in samples], pa.list_(pa.float64())),
    )
    pq.write_table(pq.read_table(path), path, row_group_size=1)
    assert_equal(read_collection(path, require_routes=True), collection)
    equal = Collection(samples=[make_sample(i, length=4) for i in range(3)], layout=LAYOUT, source="equal")
    write_collection(equal, path)
    table = pq.read_table(path)
    fixed = pa.array([s.tokens.tolist() for s in equal.samples], pa.list_(pa.int32(), 4))
    pq.write_table(table.set_column(table.schema.get_field_index("tokens"), "tokens", fixed), path)
    assert_equal(read_collection(path, require_routes=True), equal)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_parquet_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "f.parquet"
    write_collection(make_collection(), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    assert "not a complete parquet file" in refusal(path)


def test_a_flipped_byte_in_any_data_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    write_collection(make_collection(), path)
    data = path.read_bytes()
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(2)
    assert chunk.path_in_schema.startswith("tokens")
    last = chunk.data_page_offset + chunk.total_compressed_size - 2
    path.write_bytes(data[:last] + bytes([data[last] ^ 0xFF]) + data[last + 1 :])
    assert "not a complete parquet file" in refusal(path)


def test_a_dtype_too_narrow_for_the_expert_count_is_refused_before_ids_can_wrap(tmp_path: Path) -> None:
    wide = ExpertLayout(num_experts=512, top_k=2, routed_layers=(1, 3))
    rng = np.random.default_rng(0)
    sample = make_sample(0, length=5)
    sample.routes = random_routes(rng, 4, LAYOUT, "uint8")
    with pytest.raises(Refusal, match=r"sample 's0': routes have dtype uint8, which holds ids up to 255"):
        write_collection(Collection(samples=[sample], layout=wide, source="x"), tmp_path / "f.parquet")
    write_collection(Collection(samples=[sample], layout=LAYOUT, source="x"), tmp_path / "f.parquet")
    table = pq.read_table(tmp_path / "f.parquet")
    meta = json.dumps({"num_experts": 512, "top_k": 2, "routed_layers": [1, 3]})
    pq.write_table(table.replace_schema_metadata({"olmo_rl": meta}), tmp_path / "f.parquet")
    assert "dtype uint8, which holds ids up to 255, but num_experts is 512" in refusal(tmp_path / "f.parquet")


def test_an_id_of_minus_one_that_wrapped_in_an_unsigned_type_is_out_of_range(tmp_path: Path) -> None:
    routes = [make_sample(i, length=n).routes for i, n in enumerate([5, 1, 7, 3])]
    assert routes[2] is not None
    routes[2][5, 1, 0] = -1
    path = rewrite(
        tmp_path / "f.parquet",
        routes=pa.array([r.astype("uint16").tobytes() for r in routes if r is not None]),
        routes_dtype=pa.array(["uint16"] * 4),
    )
    assert "sample 's2': routes row 5, layer 3: expert id 65535 is outside 0..7" in refusal(path)


def test_duplicates_are_found_in_any_pair_of_slots_and_any_block_of_rows(tmp_path: Path) -> None:
    layout = ExpertLayout(num_experts=64, top_k=8, routed_layers=tuple(range(40)))
    rng = np.random.default_rng(1)
    base = make_sample(0, length=2000, layout=layout)
    assert base.routes is not None
    for _ in range(6):
        t, layer = int(rng.integers(1999)), int(rng.integers(40))
        i, j = (int(x) for x in rng.choice(8, 2, replace=False))
        sample = make_sample(0, length=2000, layout=layout)
        assert sample.routes is not None
        sample.routes[t, layer, i] = sample.routes[t, layer, j]
        with pytest.raises(
            Refusal, match=rf"routes row {t}, layer {layer}: expert {base.routes[t, layer, j]} appears"
        ):
            write_collection(Collection(samples=[sample], layout=layout, source="x"), tmp_path / "f.parquet")


def test_token_ids_are_taken_as_they_are_and_checked_against_a_vocabulary_only_when_one_is_given(
    tmp_path: Path,
) -> None:
    line = row(prompt="abc", response="not what these ids decode to", tokens=[5, 6, 7, 8, 900])
    path = write_lines(tmp_path / "f.jsonl", line)
    assert read_collection(path, require_routes=True).samples[0].tokens.tolist() == [5, 6, 7, 8, 900]
    assert "sample 'a': tokens[4] is 900, outside 0..258 (model.vocab_size=259)" in refusal(
        path, vocab_size=259
    )
    assert read_collection(path, require_routes=True, vocab_size=901).samples[0].id == "a"


def test_values_in_masked_slots_cannot_refuse_a_sample(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    path = write_lines(
        tmp_path / "f.jsonl",
        row(sample_id="prompt", behavior_logprobs=[nan, -inf, -1, -1, -1]),
        row(sample_id="tool", loss_mask=[0, 0, 1, 0, 1], behavior_logprobs=[None, None, -1, None, -1]),
        row(sample_id="nothing", response_mask=[0] * 5, behavior_logprobs=[None] * 5),
        row(sample_id="first", response_mask=[1] * 5, behavior_logprobs=[None, -1, -1, -1, -1]),
    )
    found = read_collection(path, require_routes=True)
    assert [int(s.scored.sum()) for s in found.samples] == [3, 2, 0, 4]


def test_a_directory_is_read_in_name_order_without_what_is_still_being_written(tmp_path: Path) -> None:
    for name in (
        "c-2.parquet",
        "c-10.jsonl",
        "c-1.parquet",
        ".c-0.parquet.partial",
        ".x.parquet",
        "notes.txt",
    ):
        (tmp_path / name).write_text("")
    (tmp_path / "deeper").mkdir()
    assert [p.name for p in collection_paths(tmp_path)] == ["c-1.parquet", "c-10.jsonl", "c-2.parquet"]
    assert collection_paths(tmp_path / "c-2.parquet") == [tmp_path / "c-2.parquet"]
    for path, message in [
        (tmp_path / "missing", "there is no such file"),
        (tmp_path / "deeper", "holds no .parquet or .jsonl"),
        (tmp_path / "notes.txt", "end in .parquet or .jsonl"),
    ]:
        with pytest.raises(Refusal, match=message):
            collection_paths(path)
    with pytest.raises(Refusal, match="no such file"):
        read_collection(tmp_path / "gone.parquet", require_routes=False)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_half_written(tmp_path: Path, suffix: str) -> None:
    path, collection = tmp_path / f"c.{suffix}", make_collection()
    write_collection(collection, path)
    before = path.read_bytes()
    collection.samples[3].response = "\ud800"  # cannot be encoded: fails after the first rows
    with pytest.raises((UnicodeEncodeError, pa.ArrowException)):
        write_collection(collection, path)
    collection.samples[3].response = None
    collection.samples[3].reward = float("nan")
    with pytest.raises(Refusal, match="sample 's3': reward is nan"):
        write_collection(collection, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_of_another_model_is_refused_with_both_numbers_and_all_reasons() -> None:
    collection = make_collection()
    check_layout(collection, expected=LAYOUT, replay=True, max_seq_len=7)
    other = ExpertLayout(num_experts=16, top_k=4, routed_layers=(1, 2, 3))
    with pytest.raises(Refusal) as caught:
        check_layout(collection, expected=other, replay=True, max_seq_len=6)
    experts, top_k, layers, length = caught.value.reasons
    assert "num_experts is 8 in the file, 16 in the model (model.num_experts)" in experts
    assert "top_k is 2 in the file, 4 in the model" in top_k
    assert "routed_layers is 2 layers [1, 3] in the file, 3 layers [1, 2, 3] in the model" in layers
    assert "sample 's2' has 7 tokens, more than model.max_seq_len=6" in length
    with pytest.raises(Refusal, match="8 experts, the model has none"):
        check_layout(collection, expected=None, replay=True)
    check_layout(collection, expected=other, replay=False)


def test_files_are_read_without_torch(tmp_path: Path) -> None:
    write_collection(make_collection(), tmp_path / "c.parquet")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from olmo_rl.data.files import read_collection\n"
        f"print(len(read_collection({str(tmp_path / 'c.parquet')!r}, require_routes=True).samples))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "4"), done.stderr
