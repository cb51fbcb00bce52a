"""One table of a sample's fields: every field survives every path that a sample can take."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from olmo_rl.collections.pending import sample_of_state, sample_state
from olmo_rl.data.columns import COLUMNS, filled
from olmo_rl.data.files import read_collection, write_collection
from olmo_rl.types import FIELDS, Collection, ExpertLayout, Kind, Sample, SampleField

LAYOUT = ExpertLayout(num_experts=8, top_k=2, routed_layers=(1, 2))
RESPONSE = [False, False, True, True, True]
SUBSET = [False, False, True, False, True]


def value_of(entry: SampleField) -> Any:
    """A value of the field's kind that is not its default."""
    if entry.kind in (Kind.name, Kind.text):
        return f"{entry.name} é"
    if entry.kind is Kind.mask:
        return np.array(RESPONSE if entry.name == "response_mask" else SUBSET)
    return {
        Kind.integer: 7,
        Kind.number: -0.75,
        Kind.flag: not entry.default,
        Kind.parts: {"letters": 0.5, "length_penalty": None},
        Kind.tokens: np.array([3, 1, 4, 1, 5], dtype=np.int32),
        Kind.logprobs: np.array([-0.5, -0.25, -0.125, -1, -2], dtype=np.float32),
        Kind.routes: np.array(
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[7, 0], [1, 2]], [[3, 6], [5, 4]]], "int16"
        ),
    }[entry.kind]


def full_sample() -> Sample:
    sample = Sample(**{entry.name: value_of(entry) for entry in FIELDS})
    assert all(filled(sample, entry) for entry in FIELDS)
    return sample


def by_file(suffix: str) -> Callable[[Sample, Path], Sample]:
    def travel(sample: Sample, directory: Path) -> Sample:
        path = directory / f"c.{suffix}"
        write_collection(Collection(samples=[sample], layout=LAYOUT, source="test"), path)
        return read_collection(path, require_routes=True).samples[0]

    return travel


def by_import(sample: Sample, directory: Path) -> Sample:
    from test_importers import imported

    by_file("parquet")(sample, directory)
    return imported(directory / "c.parquet", "olmo_rl")[0].samples[0]


def by_checkpoint(sample: Sample, directory: Path) -> Sample:
    torch.save(sample_state(sample), directory / "s.pt")
    return sample_of_state(torch.load(directory / "s.pt", weights_only=True))


def by_broadcast(sample: Sample, directory: Path) -> Sample:
    """Ranks exchange samples as pickles."""
    del directory
    return pickle.loads(pickle.dumps(sample))


PATHS = {
    "parquet": (by_file("parquet"), False),
    "jsonl": (by_file("jsonl"), False),
    "import": (by_import, False),
    "checkpoint": (by_checkpoint, True),
    "broadcast": (by_broadcast, True),
}


@pytest.mark.parametrize("name", PATHS)
def test_no_field_of_a_sample_is_lost_on_the_way(tmp_path: Path, name: str) -> None:
    travel, computed_too = PATHS[name]
    sample = full_sample()
    found = travel(sample, tmp_path)
    for entry in FIELDS:
        if not entry.stored and not computed_too:
            continue
        mine, theirs = getattr(found, entry.name), getattr(sample, entry.name)
        if isinstance(theirs, np.ndarray):
            assert mine.dtype == theirs.dtype, entry.name
            np.testing.assert_array_equal(mine, theirs, err_msg=entry.name)
        else:
            assert (mine, type(mine)) == (theirs, type(theirs)), entry.name


def test_files_store_all_fields_but_those_that_a_run_computes() -> None:
    assert {entry.name for entry in FIELDS if not entry.stored} == {"advantage", "reward_parts"}
    assert [entry.column for entry in COLUMNS if entry.required] == [
        "sample_id",
        "group_id",
        "tokens",
        "response_mask",
        "behavior_logprobs",
        "reward",
        "policy_version",
    ]
