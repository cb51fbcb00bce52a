"""A trained temperature: what is drawn, reported and trained at logits over `rollouts.temperature`."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import listening, local_engine, server_of
from test_datamodule import local_config
from test_engine_runs import run_alone
from test_trained_files import config_of, refuse, sample, write
from training_cases import fit

from olmo_rl.config import (
    LogprobKind,
    LossConfig,
    PolicyConfig,
    RolloutsConfig,
    ScoringConfig,
    Source,
    TrainerConfig,
)
from olmo_rl.policy.weights import read_weights
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.types import Refusal, Sampling

COOL = RolloutsConfig(source=Source.local, group_size=4, max_new_tokens=4, temperature=0.6)


@pytest.mark.parametrize("logprobs", [LogprobKind.chunked, LogprobKind.full])
def test_the_trainer_scores_at_the_temperature_that_the_engine_drew_at(
    tmp_path: Path, logprobs: LogprobKind
) -> None:
    """Policy, frozen reference and engine are one model at the first update: they agree on every token."""
    run = fit(
        local_config(
            tmp_path / "run",
            rollouts=COOL,
            policy=PolicyConfig(logprobs=logprobs),
            loss=LossConfig(kl_coef=0.1),
            trainer=TrainerConfig(max_steps=1),
            scoring=ScoringConfig(max_behavior_gap=1e-3),
        )
    )
    assert run.rows[0]["mismatch/mean"] < 1e-6
    assert abs(run.rows[0]["loss/kl"]) < 1e-9
    assert run.recorder.batches[0].samples[0].behavior_logprobs.min() < 0


def test_a_file_is_trained_at_the_temperature_of_its_tokens_or_refused_with_it(tmp_path: Path) -> None:
    cool = Sampling(temperature=0.6, top_p=1.0)
    path = write(tmp_path / "c.parquet", [sample(i) for i in range(8)], sampling=cool)
    refuse(config_of(path, "rollouts.temperature=0.6"))
    with pytest.raises(Refusal, match=r"drawn with temperature=0.6, training computes .* set rollouts.temp"):
        refuse(config_of(path))
    plain = write(tmp_path / "p.parquet", [sample(i) for i in range(8)], sampling=Sampling(temperature=1.0))
    with pytest.raises(Refusal, match=r"rollouts.temperature=0.6 .* set rollouts.temperature=1, or"):
        refuse(config_of(plain, "rollouts.temperature=0.6"))


def test_a_serving_engine_that_reports_log_probs_of_its_temperature_agrees_and_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM without --logprobs-mode processed_logprobs reports those of temperature 1."""
    monkeypatch.chdir(tmp_path)
    server = server_of(local_engine())
    server.load = read_weights
    generate = server.engine.generate
    with listening(server.application()) as url:
        assert run_alone(url, "rollouts.temperature=0.6", "trainer.max_steps=1") == 0
        row = read_metrics(Path("outputs/alone/metrics.csv"))[0]
        assert row["mismatch/published"] < 1e-4
        assert row["mismatch/mean"] < 1e-4
        server.engine.generate = lambda *given, **settings: generate(
            *given, **settings | {"temperature": 1.0}
        )  # type: ignore[method-assign]
        assert run_alone(url, "rollouts.temperature=0.6", "trainer.max_steps=1", "overwrite=true") == 2
    assert "start vLLM with --logprobs-mode processed_logprobs" in capsys.readouterr().err
