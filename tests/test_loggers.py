"""Loggers beside metrics.csv: one identity for the life of a run, sweeps as groups, no update twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training_cases import config_of, files, fit, write_files

from olmo_rl.config import CallbacksConfig, Config, LoggerConfig, LoggerKind, TrainerConfig
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.running.loggers import TensorBoardRun, WandbRun, build_loggers, identity_of, names_of
from olmo_rl.running.sample_files import SampleFiles


def test_a_run_keeps_its_identity_and_every_directory_has_its_own(tmp_path: Path) -> None:
    first = identity_of(str(tmp_path / "a"))
    assert first == identity_of(str(tmp_path / "a"))
    assert first != identity_of(str(tmp_path / "b"))


def test_jobs_of_a_sweep_are_named_by_it_and_share_its_group() -> None:
    assert names_of(Config(run_dir="outputs/rates/3")) == ("rates-3", "rates")
    assert names_of(Config(run_dir="outputs/packed_moe-12")) == ("packed_moe-12", None)


def test_wandb_gets_identity_name_and_group(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = Config(run_dir=str(tmp_path / "rates" / "3"), logger=LoggerConfig(kind=LoggerKind.wandb))
    for _ in range(2):  # as a resumed run does
        (_, run) = build_loggers(config)
        assert isinstance(run, WandbRun)
        asked = run._wandb_init
        assert (asked["name"], asked["group"], asked["resume"]) == ("rates-3", "rates", "allow")
        assert asked["id"] == identity_of(config.run_dir)


def test_tensorboard_shows_each_update_of_a_resumed_run_once_and_its_samples(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_files(tmp_path / "run", files(4))
    config = config_of(
        tmp_path / "run",
        trainer=TrainerConfig(max_steps=2),
        logger=LoggerConfig(kind=LoggerKind.tensorboard),
        callbacks=CallbacksConfig(progress=False, pictures=False, checkpoint_interval=1),
    )
    run = fit(config, callbacks=[SampleFiles(config, tokenizer=ByteTokenizer())])
    later = TensorBoardRun(config.run_dir, resumed=1)  # continues after update 1, which it makes again
    later.log_metrics({"loss/total": 9.0}, step=2)
    later.log_metrics({"loss/total": 8.0}, step=3)
    later.finalize("success")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss/total")]
    assert losses == [(1, pytest.approx(run.rows[0]["loss/total"], rel=1e-5)), (2, 9.0), (3, 8.0)]
    assert len(events.Scalars("reward/mean")) >= 1
    assert "samples/text_summary" in events.Tags()["tensors"]


def test_a_run_of_csv_alone_leaves_no_identity(tmp_path: Path) -> None:
    config = replace(Config(), run_dir=str(tmp_path / "run"))
    assert len(build_loggers(config)) == 1
    assert not (tmp_path / "run").exists()
