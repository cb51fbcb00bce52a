"""Refusals of files before anything starts: how tokens were drawn, and the updates that filters leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composing import compose_fast

from olmo_rl.collections.sources import sampling_of
from olmo_rl.config import Config, RolloutsConfig, Source
from olmo_rl.data.files import has_reference, read_collection, write_collection
from olmo_rl.data.findings import Findings
from olmo_rl.data.preflight import examine, look_into_files
from olmo_rl.types import Collection, Refusal, Sample, Sampling


def refuse(config: Config) -> None:
    """What the preflight finds, as a recipe raises it."""
    if reasons := examine(config).reasons:
        raise Refusal(reasons)


def sample(i: int, *, reward: float | None = None, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "id": f"s{i}",
        "group": str(i // 4),
        "tokens": np.arange(8, dtype=np.int32) + i,
        "response_mask": np.arange(8) >= 3,
        "behavior_logprobs": np.full(8, -0.5, dtype=np.float32),
        "reward": float(i % 2) if reward is None else reward,
    }
    return Sample(**(values | changes))


def write(path: Path, samples: list[Sample], **changes: Any) -> Path:
    write_collection(Collection(samples=samples, layout=None, source="test", **changes), path)
    return path


def config_of(path: Path, *overrides: str) -> Config:
    files = ("rollouts=files", f"rollouts.path={path}", "model=dense_tiny", "packing=consecutive")
    return compose_fast(*files, "batch.samples_per_step=8", *overrides)


def look(path: Path, *overrides: str) -> Findings:
    findings = Findings()
    look_into_files(config_of(path, *overrides), findings, plan=True)
    return findings


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_sampling_settings_survive_a_file_and_those_that_are_unknown_stay_unknown(
    tmp_path: Path, suffix: str
) -> None:
    known = Sampling(temperature=0.5, top_k=20, presence_penalty=0.25)
    path = write(tmp_path / f"c.{suffix}", [sample(0)], sampling=known)
    assert read_collection(path, require_routes=False).sampling == known
    path = write(tmp_path / f"d.{suffix}", [sample(0)])
    assert read_collection(path, require_routes=False).sampling == Sampling()


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=0.5), "tokens were drawn with temperature=0.5"),
        (Sampling(temperature=0.0), "tokens were drawn with temperature=0"),
        (Sampling(temperature=1.0, top_p=0.9), "tokens were drawn with top_p=0.9"),
        (Sampling(temperature=1.0, top_k=20), "tokens were drawn with top_k=20"),
        (Sampling(min_p=0.05, repetition_penalty=1.1), "drawn with min_p=0.05, repetition_penalty=1.1"),
        (Sampling(frequency_penalty=0.5), "tokens were drawn with frequency_penalty=0.5"),
    ],
)
def test_tokens_of_another_distribution_are_not_trained(
    tmp_path: Path, sampling: Sampling, words: str
) -> None:
    path = write(tmp_path / "c.parquet", [sample(i) for i in range(8)], sampling=sampling)
    with pytest.raises(Refusal, match=words) as refusal:
        refuse(config_of(path))
    assert str(refusal.value).startswith(f"{path}: ")
    assert "generate with temperature=1, top_p=1, top_k=0" in str(refusal.value)
    assert look(path, "recipe=score").reasons == []


def test_neutral_settings_are_trained_and_unknown_ones_are_noted_once(tmp_path: Path) -> None:
    neutral = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
    for name in ("a", "b", "c"):
        known = {"sampling": neutral} if name == "a" else {}
        write(tmp_path / f"{name}.parquet", [sample(i) for i in range(8)], **known)
    found = look(tmp_path)
    assert found.reasons == []
    assert found.updates == 3
    (note,) = found.notes
    assert note.startswith(f"{tmp_path / 'b.parquet'} (and 1 more files): sampling settings are unknown")
    assert look(tmp_path / "a.parquet").notes == []


def test_collections_carry_the_settings_under_which_their_engine_drew() -> None:
    local = sampling_of(RolloutsConfig(source=Source.local))
    assert (local.deviations(), len(local.known())) == ({}, 7)
    cool = sampling_of(RolloutsConfig(source=Source.local, temperature=0.5, top_p=0.9))
    assert cool.deviations() == {"temperature": 0.5, "top_p": 0.9}
    served = sampling_of(RolloutsConfig(source=Source.vllm))
    assert served.known() == {"temperature": 1.0, "top_p": 1.0}, "the engine fills in what is not sent"


def test_updates_are_counted_after_the_filters(tmp_path: Path) -> None:
    flat = [sample(i, reward=1.0) for i in range(8)]
    mixed = [sample(i) for i in range(8)]
    path = write(tmp_path / "a.parquet", flat)
    write(tmp_path / "b.parquet", mixed)
    assert look(tmp_path).updates == 2
    assert look(tmp_path, "batch.filter_zero_variance=true").updates == 1
    assert look(path, "batch.filter_zero_variance=true", "batch.filter=mask").updates == 0
    with pytest.raises(Refusal, match="samples_per_step=8 samples of one update after"):
        refuse(config_of(path, "batch.filter_zero_variance=true"))
    assert look(path).reasons == []


def test_survivors_that_do_not_fill_an_update_are_no_update(tmp_path: Path) -> None:
    samples = [sample(i, finish_reason="length" if i == 3 else "stop") for i in range(8)]
    path = write(tmp_path / "a.parquet", samples)
    assert look(path).updates == 1
    (reason,) = look(path, "batch.filter_truncated=true").reasons
    assert "after batch.filter_truncated: lower it, or leave filters out" in reason
    whole = ("batch.filter_truncated=true", "batch.samples_per_step=null")
    assert look(path, *whole).updates == 1


def test_a_file_says_by_its_first_sample_whether_it_carries_a_reference(tmp_path: Path) -> None:
    scored = [sample(i, ref_logprobs=np.full(8, -1, dtype=np.float32)) for i in range(2)]
    for suffix in ("parquet", "jsonl"):
        with_layout = {"model": "tiny"}  # a first line of metadata in JSONL
        assert has_reference(write(tmp_path / f"a.{suffix}", scored, **with_layout))
        assert not has_reference(write(tmp_path / f"b.{suffix}", [sample(0)], **with_layout))
        assert not has_reference(write(tmp_path / f"c.{suffix}", [sample(0), scored[1]]))
