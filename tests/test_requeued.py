"""Requeued jobs of recipes that do not train: given again with ckpt_path=auto they go on or start again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training_cases import SMALL_PACKS, config_of, samples_of, write_files

from olmo_rl import library
from olmo_rl.chosen_checkpoint import settled
from olmo_rl.config import BatchConfig, Config, ExportConfig, Recipe
from olmo_rl.refusals import refusals
from olmo_rl.refusals.runs import RUN_MARKS
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
