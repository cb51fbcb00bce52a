"""Jobs that a scheduler requeued: the same command goes on with its run, or starts as at first."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from training_cases import SMALL_PACKS, config_of, samples_of, write_files

from olmo_rl import library
from olmo_rl.chosen_checkpoint import settled
from olmo_rl.config import BatchConfig, Config, ExportConfig, Recipe
from olmo_rl.refusals import refusals
from olmo_rl.refusals.runs import RUN_MARKS
from olmo_rl.replaced_runs import recover, replaced
from olmo_rl.requeued_runs import continued, is_requeued, kind_of, note_job
from olmo_rl.types import Refusal
from recipes import export


@pytest.mark.parametrize("recipe", [r for r in RUN_MARKS if r not in (Recipe.train, Recipe.sft)])
def test_files_of_an_earlier_attempt_are_continued_or_replaced_and_never_refused(
    tmp_path: Path, recipe: Recipe
) -> None:
    (tmp_path / RUN_MARKS[recipe][0]).mkdir()
    config = Config(recipe=recipe, run_name="r", run_dir=str(tmp_path))
    earlier = "the run directory holds an earlier run of this recipe"
    assert any(earlier in line for line in refusals(config))
    again = replace(config, ckpt_path="auto")
    about_resuming = [line for line in refusals(again) if earlier in line or "ckpt_path" in line]
    assert about_resuming == []
    assert settled(again).overwrite is (recipe is not Recipe.rollout)
    assert settled(again).ckpt_path is None


def test_a_requeued_score_replaces_its_scores(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [samples_of(seed=1)])
    config = config_of(
        tmp_path / "run", recipe=Recipe.score, packing=SMALL_PACKS, batch=BatchConfig(samples_per_step=4)
    )
    library.run(config)
    scores = tmp_path / "run" / "scores.jsonl"
    before = scores.read_text()
    scores.write_text("cut")
    with pytest.raises(Refusal, match="holds an earlier run"):
        library.run(config)
    library.run(replace(config, ckpt_path="auto"))
    assert scores.read_text() == before
    assert not list((tmp_path / "run").glob(".replaced*"))


def test_a_requeued_export_keeps_a_directory_that_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "hf"
    directory.mkdir()
    config = Config(
        recipe=Recipe.export,
        run_dir=str(tmp_path / "run"),
        init_from=str(tmp_path),
        export=ExportConfig(path=str(directory)),
    )
    assert any("an export never replaces anything" in line for line in refusals(config))
    again = settled(replace(config, ckpt_path="auto"))
    assert not any("an export never replaces anything" in line for line in refusals(again))
    export.run(again)
    assert capsys.readouterr().out == f"{directory}: complete, from an earlier attempt\n"


def started(config: Config, monkeypatch: pytest.MonkeyPatch, *, restarts: int) -> Config:
    """The configuration that a job settles on after so many requeues, as a run of it would."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    with library.prepared(config) as accepted:
        return accepted.config


def test_a_requeued_job_starts_from_the_path_of_its_command_until_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints are those of real runs of one update each, its requeues the variables of SLURM."""
    write_files(tmp_path / "first", [samples_of(seed=1)])
    first = config_of(tmp_path / "first")
    library.run(first)
    path = str(tmp_path / "first" / "checkpoints" / "step-1")
    asks = replace(first, run_dir=str(tmp_path / "second"), ckpt_path=path)
    again = started(asks, monkeypatch, restarts=1)
    assert (again.ckpt_path, again.overwrite) == (path, False), "it had begun nothing"

    note_job(tmp_path / "second", kind="train", environ=dict(os.environ))
    (tmp_path / "second" / "metrics.csv").write_text("step\n1\n")
    again = started(asks, monkeypatch, restarts=2)
    assert (again.ckpt_path, again.overwrite) == (path, True), "without a checkpoint of its own"
    other = replace(asks, ckpt_path=None, init_from=path)
    again = started(other, monkeypatch, restarts=2)
    assert (again.ckpt_path, again.init_from, again.overwrite) == (None, path, True)

    saved = tmp_path / "second" / "checkpoints" / "step-1"
    shutil.copytree(path, saved)
    for command in (asks, other):
        again = started(command, monkeypatch, restarts=2)
        assert (again.ckpt_path, again.init_from, again.overwrite) == (str(saved), None, False)
    with pytest.raises(Refusal, match="holds an earlier run"):
        started(replace(asks, ckpt_path=None), monkeypatch, restarts=1)  # a second command of one start


class Ended(BaseException):
    """A job ends here."""


def replace_and_end(config: Config, *, files: dict[str, str], environ: dict[str, str]) -> None:
    """Replace the run in place, as a job of SLURM that writes these files and is ended."""
    with replaced(config):
        note_job(config.run_dir, kind=kind_of(config), environ=environ)
        for name, text in files.items():
            (Path(config.run_dir) / name).parent.mkdir(exist_ok=True)
            (Path(config.run_dir) / name).write_text(text)
        raise Ended


def test_a_requeued_job_never_takes_the_run_that_it_was_to_replace_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "run", [samples_of(seed=1)])
    config = config_of(tmp_path / "run")
    library.run(config)
    asks = replace(config, overwrite=True)
    old = (tmp_path / "run" / "metrics.csv").read_text()
    assert started(asks, monkeypatch, restarts=1) == asks, "killed before it put the old run aside"
    with pytest.raises(Ended):  # before its first checkpoint: the old run is put back
        replace_and_end(asks, files={"metrics.csv": "step\n1\n"}, environ=dict(os.environ))
    assert (tmp_path / "run" / "metrics.csv").read_text() == old
    assert started(asks, monkeypatch, restarts=2) == asks


def test_a_rollout_that_replaces_another_goes_on_after_its_own_collections(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    (rollouts / "collection-00000.parquet").write_text("old")
    config = Config(recipe=Recipe.rollout, run_dir=str(tmp_path), overwrite=True)
    environ = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "0"}
    with pytest.raises(Ended):
        replace_and_end(config, files={"rollouts/collection-00000.parquet": "new"}, environ=environ)
    assert not recover(config)
    assert is_requeued(tmp_path, kind="rollout", environ={**environ, "SLURM_RESTART_COUNT": "1"})
    again = settled(continued(config))
    assert (again.ckpt_path, again.overwrite) == (None, False)
    assert [path.read_text() for path in rollouts.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".jobs-rollout", "rollouts"]
