"""Samples that a run keeps for people to read: which ones, their gaps, their pieces of text, their number."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from training_cases import SMALL_PACKS, Run, config_of, files, fit, samples_of, write_files

from olmo_rl.config import CallbacksConfig, TrainerConfig
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.running import sample_files
from olmo_rl.running.sample_files import SampleFiles, pieces_of, thin
from olmo_rl.running.sample_files import sample_files as files_of
from olmo_rl.training.kept_samples import KeptSamples, chosen, differences_of


def test_kept_samples_lie_evenly_over_the_order_by_reward_with_both_ends() -> None:
    assert chosen([0.5, -2.0, 7.0, 1.0, 0.0], count=3) == (1, 0, 2)
    assert chosen([1.0, 0.0], count=8) == (1, 0)
    assert chosen([0.0, 3.0, 1.0], count=1) == (1,)
    assert chosen([], count=4) == ()
    assert chosen([2.0, math.nan, 1.0], count=2) == (1, 0), "an unknown reward comes first"


def test_gaps_of_a_sample_are_cut_out_of_its_pack_and_come_back_in_order() -> None:
    samples = samples_of(((2, 3), (1, 2), (3, 1)))
    by_id = {sample.id: sample for sample in samples}
    difference = torch.arange(6, dtype=torch.float64)  # 3 + 2 + 1 scored tokens
    found = differences_of(["s0", "s1", "s2"], difference, samples=by_id, wanted={"s1", "s2"})
    assert {name: part.tolist() for name, part in found.items()} == {"s1": [3.0, 4.0], "s2": [5.0]}
    kept = KeptSamples(positions=(2, 0, 1), scored=(1, 3, 2))
    here, elsewhere = found, {"s0": torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)}
    total = kept.block(here, samples=samples) + kept.block(elsewhere, samples=samples)
    assert kept.split(total) == ([5.0], [0.5, 0.25, 0.125], [3.0, 4.0])


def test_pieces_add_up_to_the_text_and_a_character_belongs_to_its_last_token() -> None:
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode("é=7€"), tokenizer.eos_id]
    pieces = pieces_of(ids, tokenizer=tokenizer)
    assert pieces == ["", "é", "=", "7", "", "", "€", ""]
    broken = [0xC3, *tokenizer.encode("ab")]
    assert len(pieces_of(broken, tokenizer=tokenizer)) == 3
    assert "".join(pieces_of(broken, tokenizer=tokenizer)) == tokenizer.decode(broken)


def test_beyond_the_limit_every_second_older_file_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_files, "MOST_FILES", 4)
    for step in (1, 2, 9, 10, 11):
        (tmp_path / f"step-{step}.parquet").touch()
    thin(tmp_path)
    assert [path.name for path in files_of(tmp_path)] == [
        "step-1.parquet",
        "step-9.parquet",
        "step-11.parquet",
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("kept") / "run"
    first, second = files(2)
    write_files(directory, [first, second])
    config = config_of(
        directory,
        packing=SMALL_PACKS,
        trainer=TrainerConfig(max_steps=2),
        callbacks=CallbacksConfig(progress=False, pictures=False, samples=3),
    )
    (directory / "samples").mkdir()
    (directory / "samples" / "step-7.parquet").touch()  # of an update that this run makes again
    return fit(config, callbacks=[SampleFiles(config, tokenizer=ByteTokenizer())])


def test_a_run_keeps_lowest_middle_and_highest_reward_of_every_update_with_gaps(kept: Run) -> None:
    directory = Path(kept.config.run_dir) / "samples"
    assert [path.name for path in files_of(directory)] == ["step-1.parquet", "step-2.parquet"]
    for path, batch, row in zip(files_of(directory), kept.recorder.batches, kept.rows, strict=True):
        table = pq.read_table(path).to_pylist()
        samples = sorted(batch.samples, key=lambda sample: sample.reward)
        assert [line["sample_id"] for line in table] == [samples[0].id, samples[4].id, samples[-1].id]
        assert [line["reward"] for line in table] == [samples[i].reward for i in (0, 4, -1)]
        assert all(line["step"] == row["step"] for line in table)
    tables = [pq.read_table(path).to_pylist() for path in files_of(directory)]
    everything = [gap for table in tables for line in table for gap in line["gaps"]]
    assert all(gap is None or 0 < abs(gap) < 20 for gap in everything)


def test_gaps_of_all_kept_samples_have_the_mean_that_metrics_report(tmp_path: Path) -> None:
    samples = samples_of(seed=5)
    untrained = np.arange(len(samples[3])) == 2
    samples[3] = replace(samples[3], loss_mask=samples[3].response_mask & ~untrained)
    write_files(tmp_path / "run", [samples])
    config = config_of(
        tmp_path / "run",
        packing=SMALL_PACKS,
        callbacks=CallbacksConfig(progress=False, pictures=False, samples=99),
    )
    run = fit(config, callbacks=[SampleFiles(config, tokenizer=ByteTokenizer())])
    (path,) = files_of(tmp_path / "run" / "samples")
    table = {line["sample_id"]: line for line in pq.read_table(path).to_pylist()}
    gaps = [gap for line in table.values() for gap in line["gaps"] if gap is not None]
    assert len(gaps) == sum(int(sample.scored.sum()) for sample in samples)
    (row,) = run.rows
    assert np.mean(np.abs(gaps)) == pytest.approx(row["mismatch/mean"], rel=1e-6)
    difference = np.array(gaps)
    assert np.mean(np.expm1(difference) - difference) == pytest.approx(row["mismatch/kl"], rel=1e-4)
    behavior = np.concatenate([sample.behavior_logprobs[sample.scored] for sample in samples])
    assert -(behavior.sum() + difference.sum()) / len(gaps) == pytest.approx(row["policy/entropy"], rel=1e-5)
    masked = table["s3"]["gaps"]
    start = int(np.argmax(samples[3].response_mask))
    assert [place + start for place, gap in enumerate(masked) if gap is None] == [2]
    assert row["batch/masked_share"] == pytest.approx(1 / sum(int(s.response_mask.sum()) for s in samples))
    assert row["grad/norm"] == pytest.approx(
        math.sqrt(sum(row[f"grad/norm_{part}"] ** 2 for part in ("dense", "experts", "router"))), rel=1e-6
    )
    weights = run.weights
    moved = math.sqrt(
        sum(
            float((weights[n].double() - run.recorder.weights[0][n].double()).square().sum()) for n in weights
        )
    )
    assert row["update/norm"] == pytest.approx(moved, rel=1e-5)
    assert 0 < row["update/relative_experts"] < 1
    (mismatch,) = run.events("mismatch")
    assert sum(count for _, count in mismatch["counts"]) == len(gaps)
    (time,) = run.events("time")
    assert set(time["seconds"]) >= {"forward", "backward", "optimizer"}
    assert len(time["began"]) == len(time["busy"]) == 1
