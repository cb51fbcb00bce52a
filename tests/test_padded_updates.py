"""Updates over padded rows through the real trainer: the loss and gradients of the same update without pads,
real and padded tokens counted separately, rows of one shape, plans that print what they pad.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from training_cases import (
    LAYOUT,
    Run,
    config_of,
    fit,
    largest_difference,
    masked,
    samples_of,
    write_files,
)

from olmo_rl.config import (
    BatchConfig,
    LossConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recipe,
    Recompute,
    RolloutsConfig,
    ScoringConfig,
    ScoringMode,
    TrainerConfig,
)
from olmo_rl.data.files import read_collection, write_collection
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.ranks import run_ranks
from olmo_rl.types import Collection, Refusal, Sample
from recipes import plan, score, sft

BUDGET = 20


def packing(multiple: int = 1, *, budget: int = BUDGET, whole: bool = False) -> PackingConfig:
    return PackingConfig(
        kind=PackingKind.consecutive, max_tokens=budget, pad_to_multiple_of=multiple, pad_to_budget=whole
    )


def step_samples() -> list[Sample]:
    samples = samples_of()
    samples[2] = masked(samples[2], keep=(4, 5, 8, 10))
    samples[5] = masked(samples[5])
    return samples


def run_step(run_dir: Path, samples: list[Sample], *, double: bool = True, **sections: Any) -> Run:
    write_files(run_dir, [samples])
    return fit(config_of(run_dir, **sections), double=double)


def total(run: Run) -> float:
    return float(run.events("optimizer")[0]["terms"]["loss/total"])


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-5)])
def test_a_padded_update_has_the_loss_and_the_gradients_of_the_unpadded_one(
    tmp_path: Path, replay: bool, double: bool, tolerance: float
) -> None:
    sections: dict[str, Any] = {
        "policy": PolicyConfig(replay=replay),
        "loss": LossConfig(router_aux_weight=0.3, router_z_weight=0.02),
    }
    runs = [
        run_step(tmp_path / name, step_samples(), double=double, packing=rows, **sections)
        for name, rows in (
            ("bare", packing()),
            ("eights", packing(4)),
            ("whole", packing(whole=True)),
        )
    ]
    bare = runs[0]
    for run in runs[1:]:
        event = run.events("packing")[0]
        assert event["padded_tokens"] > event["real_tokens"] == bare.events("packing")[0]["real_tokens"]
        assert total(run) == pytest.approx(total(bare), rel=tolerance, abs=tolerance)
        assert largest_difference(run.recorder.gradients[0], bare.recorder.gradients[0]) < tolerance
        terms, expected = (r.events("optimizer")[0]["terms"] for r in (run, bare))
        assert terms == pytest.approx(expected, rel=tolerance, abs=tolerance)
        for name in ("rows", "mismatches", "coverage"):
            assert run.events("replay")[0][name] == bare.events("replay")[0][name]
        assert run.events("replay")[0]["overlap"] == pytest.approx(bare.events("replay")[0]["overlap"])
        assert run.events("optimizer")[0]["grad_norm"] == pytest.approx(
            bare.events("optimizer")[0]["grad_norm"], rel=max(tolerance, 1e-6)
        )


def test_recomputation_and_a_scoring_pass_see_the_same_pads(tmp_path: Path) -> None:
    plain = run_step(tmp_path / "plain", step_samples(), packing=packing(whole=True))
    again = run_step(
        tmp_path / "again",
        step_samples(),
        packing=packing(whole=True),
        policy=PolicyConfig(recompute=Recompute.full),
        scoring=ScoringConfig(mode=ScoringMode.always),
    )
    assert again.events("scoring")[0]["max_abs"] == 0.0
    assert largest_difference(again.recorder.gradients[0], plain.recorder.gradients[0]) < 1e-12


def test_every_forward_of_a_run_padded_to_the_budget_has_the_same_shape(tmp_path: Path) -> None:
    shapes: set[tuple[int, ...]] = set()
    documents: set[int] = set()

    class Watch(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            pl_module.policy.register_forward_pre_hook(self.see)

        def see(self, decoder: torch.nn.Module, args: tuple[Any, ...]) -> None:
            shapes.add(tuple(args[0].shape))
            documents.add(len(args[1].boundaries))

    write_files(tmp_path, [step_samples()])
    fit(config_of(tmp_path, packing=packing(whole=True)), callbacks=[Watch()])
    assert shapes == {(BUDGET,)}
    assert len(documents) > 1


def test_eleven_real_rows_padded_to_sixteen_are_told_apart(tmp_path: Path) -> None:
    run = run_step(tmp_path, samples_of([(2, 3), (3, 3)]), packing=packing(8, budget=16))
    (event,) = run.events("packing")
    assert (event["real_tokens"], event["padded_tokens"], event["fill"]) == (11, 16, 0.6875)
    (row,) = run.rows
    seconds = row["time/update_s"]
    assert row["throughput/real_tokens_per_second"] * seconds == pytest.approx(11)
    assert row["throughput/padded_tokens_per_second"] * seconds == pytest.approx(16)
    assert row["packing/fill"] == 0.6875
    assert row["packing/tokens_per_pack"] == 11


def test_samples_with_placeholders_train_from_a_file_and_their_pads_repeat_nothing(tmp_path: Path) -> None:
    samples = [replace(sample, has_placeholders=True) for sample in step_samples()]
    constant = PackingConfig(kind=PackingKind.consecutive, max_tokens=BUDGET, pad_to_budget=True, pad_id=256)
    bare = run_step(tmp_path / "bare", samples, packing=packing())
    run = run_step(tmp_path / "run", samples, packing=constant)
    assert largest_difference(run.recorder.gradients[0], bare.recorder.gradients[0]) < 1e-10
    packs = run.recorder.batches[0].packs
    assert all(pack.placeholders == (True,) * len(pack.ids) for pack in packs)
    assert {token for pack in packs for token in pack["tokens"][pack.real_tokens :].tolist()} == {256}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_files_keep_which_samples_have_placeholders(tmp_path: Path, suffix: str) -> None:
    samples = [replace(s, has_placeholders=i == 1) for i, s in enumerate(samples_of()[:3])]
    path = tmp_path / f"c.{suffix}"
    write_collection(Collection(samples=samples, layout=LAYOUT, source="test"), path)
    found = read_collection(path, require_routes=True).samples
    assert [sample.has_placeholders for sample in found] == [False, True, False]
    bare = tmp_path / f"bare.{suffix}"
    write_collection(Collection(samples=samples_of()[:3], layout=LAYOUT, source="test"), bare)
    assert b"has_placeholders" not in bare.read_bytes()


def test_a_flag_that_is_none_is_refused_by_sample(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_collection(
        Collection(samples=[replace(samples_of()[0], has_placeholders=True)], layout=LAYOUT, source="test"),
        path,
    )
    path.write_text(path.read_text().replace('"has_placeholders": true', '"has_placeholders": "yes"'))
    with pytest.raises(Refusal, match="sample 's0': has_placeholders is 'yes': expected true, false, 0 or 1"):
        read_collection(path, require_routes=True)


def test_a_plan_prints_padded_rows_and_its_file_changes_only_where_rows_are_padded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = samples_of(((3, 1), (2, 3), (4, 7), (1, 2), (5, 5), (2, 6), (6, 4), (3, 3)))
    write_files(tmp_path / "bare", [samples])
    documents = {}
    for name, rows in (("bare", packing()), ("padded", packing(10))):
        config = config_of(tmp_path / "bare", recipe=Recipe.plan, packing=rows)
        (tmp_path / name).mkdir(exist_ok=True)
        plan.run(replace(config, run_dir=str(tmp_path / name)))
        (documents[name],) = json.loads((tmp_path / name / "plan.json").read_text())["blocks"]
    out = capsys.readouterr().out
    bare, padded = documents["bare"], documents["padded"]
    lengths = [sum(len(s) for s in samples if s.id in pack) for pack in bare["ranks"][0]]
    rows_of = [-(-length // 10) * 10 for length in lengths]
    assert padded["padded_tokens"] == sum(rows_of)
    assert "padded_tokens" not in bare
    assert padded["after"]["token_work"] == sum(rows_of)
    assert bare["after"]["token_work"] == sum(lengths)
    same = ("step", "ranks", "packs_per_rank", "fill", "lower_bounds", "search")
    assert {name: padded[name] for name in same} == {name: bare[name] for name in same}
    assert out.count("padded rows") == 1
    assert f"Step 0: {sum(lengths)} tokens in {sum(rows_of)} padded rows" in out
    assert padded["after"]["expert_work"] == sum(rows_of) * LAYOUT.top_k * len(LAYOUT.routed_layers)
    assert np.isclose(padded["fill"], sum(lengths) / (len(lengths) * BUDGET))


def test_supervised_updates_and_scores_do_not_change_under_pads(tmp_path: Path) -> None:
    write_files(tmp_path / "scores", [step_samples()])
    losses, scores = [], []
    for name, rows in (("bare", packing(budget=64)), ("padded", packing(16, budget=64))):
        supervised = config_of(
            tmp_path / name,
            recipe=Recipe.sft,
            rollouts=RolloutsConfig(),
            batch=BatchConfig(samples_per_step=9),
            packing=rows,
            trainer=TrainerConfig(max_steps=2),
        )
        run_ranks(sft.train, supervised)
        losses.append([row["loss/total"] for row in read_metrics(tmp_path / name / "metrics.csv")])
        log = (tmp_path / name / "training_contract_rank0.jsonl").read_text().splitlines()
        (event, _) = [json.loads(line) for line in log if '"packing"' in line]
        assert (event["padded_tokens"] > event["real_tokens"]) == (name == "padded")
        recorded = config_of(tmp_path / "scores", recipe=Recipe.score, packing=rows)
        run_ranks(score.score, replace(recorded, run_dir=str(tmp_path / name)))
        lines = (tmp_path / name / "scores.jsonl").read_text().splitlines()
        scores.append({line["sample_id"]: line["policy_logprobs"] for line in map(json.loads, lines)})
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert scores[0].keys() == scores[1].keys()
    for id, values in scores[0].items():
        assert [value is None for value in scores[1][id]] == [value is None for value in values]
        known = [value for value in values if value is not None]
        assert [value for value in scores[1][id] if value is not None] == pytest.approx(known, abs=1e-5)
