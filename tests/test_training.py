"""Runs of the real trainer over files: what is checked before a step, and what is skipped."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composing import compose_fast
from lightning.pytorch import Callback
from model_cases import context_of
from training_cases import (
    MODEL,
    SMALL_PACKS,
    Run,
    config_of,
    files,
    fit,
    identical,
    masked,
    samples_of,
    write_files,
)

from olmo_rl.config import (
    BatchConfig,
    Config,
    LossConfig,
    OnNonfinite,
    OptimConfig,
    PackingConfig,
    ScoringConfig,
    ScoringMode,
    TrainerConfig,
)
from olmo_rl.data.packs import RouteMode
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.training.module import PolicyModule
from olmo_rl.types import Refusal, Sample

NOTHING = [masked(sample) for sample in samples_of(prefix="masked")]


def refuse_to_step(
    config: Config,
    kind: type[Exception],
    *,
    prepare: Callable[[PolicyModule], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[str, dict[str, Any]]:
    """Train until an exception of `kind`; its message, and the weights and Adam state at that moment."""
    modules: list[PolicyModule] = []

    def keep(module: PolicyModule) -> None:
        modules.append(module)
        if prepare is not None:
            prepare(module)

    with pytest.raises(kind) as caught:
        fit(config, prepare=keep, callbacks=callbacks)
    module = modules[0]
    assert module.trainer.global_step == 0
    return str(caught.value), {
        "weights": {name: p.detach() for name, p in module.policy.named_parameters()},
        "state": module.trainer.optimizers[0].state,
    }


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    decoder = HybridDecoder(config.model, attention="reference")
    decoder.init_weights(config.seed)
    return dict(decoder.named_parameters())


# Scoring


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (2, ["checked", "skipped", "checked", "skipped", "checked"]),
        (0, ["checked", "skipped", "skipped", "skipped", "skipped"]),
    ],
)
def test_the_first_update_and_every_interval_are_checked_however_many_packs_an_update_has(
    tmp_path: Path, interval: int, expected: list[str]
) -> None:
    write_files(tmp_path / "run", files(5))
    run = fit(
        config_of(
            tmp_path / "run",
            packing=SMALL_PACKS,
            trainer=TrainerConfig(max_steps=5),
            scoring=ScoringConfig(check_interval=interval),
        )
    )
    assert run.events("packing")[0]["packs"] > 1
    assert [event["decision"] for event in run.events("scoring")] == expected
    assert [event["scoring"] for event in run.events("optimizer")] == expected
    assert all(event["max_abs"] < 1e-5 for event in run.events("scoring"))


def test_scoring_always_runs_a_pass_of_its_own_for_every_update(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(2))
    always = ScoringConfig(mode=ScoringMode.always)
    run = fit(config_of(tmp_path / "run", trainer=TrainerConfig(max_steps=2), scoring=always))
    assert [event["decision"] for event in run.events("scoring")] == ["standalone", "standalone"]


def test_later_steps_are_anchored_where_the_first_step_of_their_file_had_nothing_to_train(
    tmp_path: Path,
) -> None:
    samples = [*NOTHING, *samples_of(seed=1, prefix="a"), *samples_of(seed=2, prefix="b")]
    write_files(tmp_path / "run", [samples])
    run = fit(
        config_of(tmp_path / "run", batch=BatchConfig(samples_per_step=8), trainer=TrainerConfig(max_steps=2))
    )
    drifts = [event["mean_abs"] for event in run.events("scoring")]
    assert drifts[0] < 1e-5
    assert drifts[1] > 0.01, "the policy moved away from its anchor"
    assert run.events("optimizer")[1]["terms"]["loss/ratio_drift"] == pytest.approx(drifts[1], rel=1e-6)
    assert run.events("optimizer")[1]["max_log_ratio"] == run.events("scoring")[1]["max_abs"] > drifts[1]


def disturb(module: PolicyModule) -> None:
    """Change a weight between two packs, so that scoring pass and training forward differ."""

    def after_pack(done: int, total: int) -> None:
        if done == 1:
            with torch.no_grad():
                module.policy.lm_head.weight[:40] *= 1.5

    module.on_pack = after_pack


def test_a_training_forward_that_differs_from_the_scoring_pass_aborts_before_the_step(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(1))
    config = config_of(tmp_path / "run", packing=SMALL_PACKS)
    message, left = refuse_to_step(config, Refusal, prepare=disturb)
    assert "scoring.tolerance=0.001: nothing was stepped. Most in samples f0-" in message
    assert not left["state"]


def test_the_tolerance_of_the_scoring_check_is_the_configured_one(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(1))
    config = config_of(tmp_path / "run", packing=SMALL_PACKS, scoring=ScoringConfig(tolerance=100.0))
    run = fit(config, prepare=disturb)
    event = run.events("scoring")[0]
    assert 1e-3 < event["mean_abs"] < event["max_abs"] < 100


def test_an_engine_that_disagrees_with_the_trainer_aborts_before_the_step(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(1))
    config = config_of(tmp_path / "run", scoring=ScoringConfig(max_behavior_gap=0.1))
    message, left = refuse_to_step(config, Refusal)
    assert "scoring.max_behavior_gap=0.1: nothing was stepped. Most in samples f0-" in message
    assert identical(left["weights"], initial_weights(config))
    assert not left["state"]


# Values that are not finite


def broken_samples() -> list[Sample]:
    """Sample f0-3 has a behaviour log-prob so low that its importance weight overflows."""
    samples = files(1)[0]
    samples[3].behavior_logprobs[1] = -200.0
    return samples


OVERFLOW = LossConfig(tis_low=0.5)


@pytest.mark.parametrize("packing", [SMALL_PACKS, PackingConfig()])
def test_a_loss_that_is_not_finite_aborts_before_the_step_and_names_its_samples(
    tmp_path: Path, packing: PackingConfig
) -> None:
    write_files(tmp_path / "run", [broken_samples()])
    config = config_of(tmp_path / "run", loss=OVERFLOW, packing=packing)
    message, left = refuse_to_step(config, Refusal)
    assert "update 1: loss" in message
    assert ": samples f0-3. Nothing was stepped" in message
    assert identical(left["weights"], initial_weights(config))
    assert not left["state"]


class Poison(Callback):
    """Weights that are not numbers before the first update."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.policy.lm_head.weight[0, 0] = float("nan")


def test_broken_weights_are_called_not_finite_and_not_a_failed_scoring_check(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(1))
    config = config_of(tmp_path / "run", scoring=ScoringConfig(max_behavior_gap=5.0))
    message, left = refuse_to_step(config, Refusal, callbacks=[Poison()])
    assert all(f"f0-{i}" in message for i in range(8))
    assert not left["state"]


def test_an_update_that_is_not_finite_can_be_skipped_counted_and_leaves_no_trace(tmp_path: Path) -> None:
    good = files(3)[1:]
    optim = OptimConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1)
    loss = replace(OVERFLOW, on_nonfinite=OnNonfinite.skip)
    runs = {}
    for name, collections in {"clean": good, "broken": [good[0], broken_samples(), good[1]]}.items():
        write_files(tmp_path / name, collections)
        trainer = TrainerConfig(max_steps=2)
        runs[name] = fit(config_of(tmp_path / name, loss=loss, optim=optim, trainer=trainer))
    assert runs["broken"].module.skipped_updates == 1
    stepped = [(event["step"], event["stepped"]) for event in runs["broken"].events("optimizer")]
    assert stepped == [(1, True), (1, False), (2, True)]
    check_same_training(runs["broken"], runs["clean"])
    assert [row["step"] for row in runs["broken"].rows] == [1, 2]
    assert [row["batch/skipped_updates"] for row in runs["broken"].rows] == [0, 1]


def test_updates_that_are_not_finite_are_not_skipped_for_ever(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [broken_samples()] * 3)
    batch = BatchConfig(samples_per_step=None, max_skips=1)
    config = config_of(tmp_path / "run", loss=replace(OVERFLOW, on_nonfinite=OnNonfinite.skip), batch=batch)
    message, left = refuse_to_step(config, Refusal)
    assert "samples f0-3" in message
    assert not left["state"]
    log = (tmp_path / "run" / "training_contract_rank0.jsonl").read_text()
    assert log.count('"stepped": false') == 1


def check_same_training(run: Run, other: Run) -> None:
    """Equal weights, Adam state and learning rates, to the last bit."""
    assert identical(run.weights, other.weights)
    assert len(run.optimizer) == len(other.optimizer) > 0
    assert all(identical(a, b) for a, b in zip(run.optimizer, other.optimizer, strict=True))
    assert [e["lr"] for e in run.events("optimizer") if e["stepped"]] == [
        e["lr"] for e in other.events("optimizer") if e["stepped"]
    ]


def test_the_contract_log_stays_json_where_a_loss_is_not_finite(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [broken_samples(), files(2)[1]])
    fit(config_of(tmp_path / "run", loss=replace(OVERFLOW, on_nonfinite=OnNonfinite.skip)))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (tmp_path / "run" / "training_contract_rank0.jsonl").read_text()
    records = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    broken = next(record for record in records if record["event"] == "optimizer")
    assert broken["terms"]["loss/total"] is None


def test_a_nan_in_a_slot_that_is_not_scored_changes_nothing(tmp_path: Path) -> None:
    runs = {}
    for name in ("clean", "nan"):
        samples = files(1)[0]
        samples[2] = masked(samples[2], keep=(4, 5, 8, 10))
        if name == "nan":
            samples[2].behavior_logprobs[[0, 6, 9]] = (np.nan, np.nan, -np.inf)
            samples[0].behavior_logprobs[:3] = np.nan
        write_files(tmp_path / name, [samples])
        runs[name] = fit(config_of(tmp_path / name, packing=SMALL_PACKS, loss=LossConfig(tis_high=2.0)))
    assert identical(runs["nan"].recorder.gradients[0], runs["clean"].recorder.gradients[0])
    check_same_training(runs["nan"], runs["clean"])
    assert runs["nan"].rows[0]["mismatch/mean"] == runs["clean"].rows[0]["mismatch/mean"]


# Nothing to train on


@pytest.mark.parametrize("first", [True, False])
def test_a_step_without_anything_to_train_on_is_skipped_counted_and_leaves_no_trace(
    tmp_path: Path, first: bool
) -> None:
    good = files(2)
    collections = [NOTHING, *good] if first else [good[0], NOTHING, good[1]]
    optim = OptimConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1)
    runs = {}
    for name, content in {"clean": good, "gap": collections}.items():
        write_files(tmp_path / name, content)
        runs[name] = fit(config_of(tmp_path / name, optim=optim, trainer=TrainerConfig(max_steps=2)))
    check_same_training(runs["gap"], runs["clean"])
    skipped = runs["gap"].events("skipped")
    assert [event["step"] for event in skipped] == [0 if first else 1]
    assert skipped[0]["facts"]["rollouts/samples"] == 8
    assert runs["gap"].module.skipped_updates == 1
    assert [row["step"] for row in runs["gap"].rows] == [1, 2]
    assert [row["batch/skipped_updates"] for row in runs["gap"].rows] == [float(first), 1]
    for ours, theirs in zip(runs["gap"].rows, runs["clean"].rows, strict=True):
        for name in ("loss/total", "reward/mean", "rollouts/samples", "packing/fill"):
            assert ours[name] == theirs[name]


def test_steps_without_anything_to_train_on_do_not_go_on_for_ever(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [NOTHING] * 3)
    config = config_of(tmp_path / "run", batch=BatchConfig(samples_per_step=None, max_skips=2))
    with pytest.raises(Refusal, match=r"batch\.max_skips=2: 3 steps in a row"):
        fit(config)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_a_step_that_trains_starts_the_count_of_skips_again(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [NOTHING, NOTHING, files(1)[0], NOTHING, NOTHING])
    run = fit(
        config_of(
            tmp_path / "run",
            batch=BatchConfig(samples_per_step=None, max_skips=2),
            trainer=TrainerConfig(max_steps=9),
        )
    )
    assert run.module.skipped_updates == 4
    assert run.trainer.global_step == 1


@pytest.mark.parametrize("recipe", ["train", "rollout"])
def test_a_run_that_is_refused_lets_go_of_its_engines(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job of a sweep may ask the same ones, from the same process."""
    closed: list[str] = []
    config = replace(
        compose_fast("+experiment=packed_moe", "model=hybrid_tiny", "warm_start.steps=0", f"recipe={recipe}"),
        run_dir=str(tmp_path),
    )
    module = importlib.import_module(f"recipes.{recipe}")
    build = module.build_parts

    def parts_of(*arguments: Any, **named: Any) -> Any:
        return replace(build(*arguments, **named), close=lambda: closed.append(recipe))

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise Refusal("engines took no weights")

    monkeypatch.setattr(module, "build_parts", parts_of)
    monkeypatch.setattr(module, "fit" if recipe == "train" else "build_trainer", refuse)
    run = module.train if recipe == "train" else module.generate
    with pytest.raises(Refusal, match="took no weights"):
        run(config)
    assert closed == [recipe]


def scores_of(weights: dict[str, torch.Tensor], sample: Sample) -> torch.Tensor:
    """Log-probs of the response tokens of one sample, alone in its row, under replayed routes."""
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.load_state_dict(weights)
    assert sample.routes is not None
    tail = np.arange(MODEL.top_k)  # the row of the last token predicts nothing
    routes = {
        layer: torch.from_numpy(np.vstack([sample.routes[:, i], tail]).astype(np.int64))
        for i, layer in enumerate(MODEL.routed_layers)
    }
    context = context_of([len(sample)], mode=RouteMode.replay, routes=routes)
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    with torch.no_grad():
        logits = decoder(tokens, context).logits
    logprobs = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logprobs[torch.from_numpy(sample.response_mask[1:])]


def test_packs_of_equally_many_tokens_are_each_anchored_at_their_own_scores(tmp_path: Path) -> None:
    samples = samples_of(((3, 3),) * 12, seed=5, group_size=3)
    write_files(tmp_path / "run", [samples])
    run = fit(
        config_of(
            tmp_path / "run",
            packing=SMALL_PACKS,
            batch=BatchConfig(samples_per_step=6),
            trainer=TrainerConfig(max_steps=2),
        )
    )
    packs = run.events("packing")[1]["samples_per_pack"]
    assert packs == [3, 3]
    before, after = run.recorder.weights
    anchors = [scores_of(before, sample) for sample in samples[6:]]
    moved = [scores_of(after, sample) for sample in samples[6:]]

    def drift(anchors: list[torch.Tensor]) -> float:
        return float((torch.cat(moved) - torch.cat(anchors)).abs().mean())

    assert run.rows[1]["loss/ratio_drift"] == pytest.approx(drift(anchors), rel=1e-4)
    assert drift(anchors[3:] + anchors[:3]) > 2 * drift(anchors) > 0
