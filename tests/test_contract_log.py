"""What a run writes: the events of the contract log, and metrics.csv against a script over the samples."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_cases import LAYOUT, MODEL, SHAPES, SMALL_PACKS, Run, config_of, files, fit, write_files

from olmo_rl.config import Config, LossConfig, OptimConfig, PackingConfig, PolicyConfig, TrainerConfig
from olmo_rl.data.collate import collate
from olmo_rl.data.packs import RouteMode
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.run_directory import FORMAT_VERSION, log_fault
from olmo_rl.types import Sample, Topology


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two updates in several packs; the second file holds two policy versions."""
    run_dir = tmp_path_factory.mktemp("logged")
    first, second = files(2)
    for index, sample in enumerate(second):
        sample.policy_version = 1 - index % 2
    write_files(run_dir, [first, second])
    optim = OptimConfig(lr=1e-2, warmup_steps=4, max_grad_norm=0.5)
    trainer = TrainerConfig(max_steps=2)
    return fit(
        config_of(run_dir, packing=SMALL_PACKS, trainer=trainer, optim=optim, loss=LossConfig(tis_high=1.5))
    )


EVENTS = ("packing", "scoring", "replay", "optimizer", "mismatch", "time")


def test_every_record_of_the_contract_log_names_event_step_and_rank(logged: Run) -> None:
    assert logged.records[0] == {"event": "log", "step": 0, "rank": 0, "version": FORMAT_VERSION}
    assert [(r["event"], r["step"], r["rank"]) for r in logged.records[1:]] == [
        (event, step, 0) for step in (1, 2) for event in EVENTS
    ]


def test_only_logs_of_a_known_version_are_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    own = {"event": "log", "step": 0, "rank": 0, "version": FORMAT_VERSION}
    for first, fault in (
        (json.dumps(own), None),
        ('{"event": "packing", "step": 1, "rank": 0}', None),  # of the time before versions
        (json.dumps(own | {"version": 7}), "version 7, this olmo_rl reads versions 0 and 1"),
        ("{", "first line is damaged"),
    ):
        log.write_text(first + "\n")
        found = log_fault(log)
        assert (found is None) if fault is None else (found is not None and fault in found), first


def test_the_packing_event_describes_this_ranks_packs(logged: Run) -> None:
    lengths = [p + r for p, r in SHAPES]
    for event, batch in zip(logged.events("packing"), logged.recorder.batches, strict=True):
        assert batch.plan is not None
        packs = batch.plan.packs[0]
        tokens = [sum(lengths[i] for i in pack) for pack in packs]
        assert event | {"step": 0} == {
            "event": "packing",
            "step": 0,
            "rank": 0,
            "samples": 8,
            "packs": len(packs),
            "real_tokens": sum(lengths),
            "padded_tokens": sum(lengths),
            "max_pack_tokens": max(tokens),
            "token_budget": 20,
            "fill": pytest.approx(sum(lengths) / (len(packs) * 20)),
            "samples_per_pack": [len(pack) for pack in packs],
            "sample_ids": [[batch.samples[i].id for i in pack] for pack in packs],
            "lengths": [[lengths[i] for i in pack] for pack in packs],
            "groups": [[i // 2 for i in pack] for pack in packs],
            "rows": tokens,
            "plan": "planned",
        }


def test_the_replay_event_counts_every_row_and_finds_no_mismatch(logged: Run) -> None:
    tokens = sum(p + r for p, r in SHAPES)
    for event in logged.events("replay"):
        assert event["rows"] == tokens * len(LAYOUT.routed_layers)
        assert (event["mismatches"], event["coverage"]) == (0, 1.0)
        assert 0.2 < event["overlap"] < 0.9


def test_the_optimizer_event_holds_terms_norm_rate_versions_and_denominators(logged: Run) -> None:
    first, second = logged.events("optimizer")
    assert [first["policy_versions"], second["policy_versions"]] == [[0, 0], [0, 1]]
    assert [first["lr"], second["lr"]] == pytest.approx([0.0025, 0.005])
    responses = [r for _, r in SHAPES]
    for event, gradients in zip((first, second), logged.recorder.gradients, strict=True):
        assert event["local_scored_tokens"] == event["global_scored_tokens"] == sum(responses)
        assert event["global_responses"] == len(responses)
        assert event["stepped"] is True
        terms = event["terms"]
        assert terms["loss/total"] == pytest.approx(terms["loss/policy"], rel=1e-6)
        assert {"loss/ratio", "loss/ratio_drift", "loss/clip_low", "loss/clip_high", "loss/tis"} <= set(terms)
        clipped = torch.stack([g.double().norm() for g in gradients.values()]).norm()
        assert event["grad_norm"] > 0.5
        assert float(clipped) == pytest.approx(0.5, rel=1e-4)


def policy_logprobs(weights: dict[str, torch.Tensor], sample: Sample) -> np.ndarray:
    """log p of every scored token of a sample that is alone in its forward."""
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.load_state_dict(weights)
    pack = collate([sample], layout=LAYOUT, topology=Topology(1))
    with torch.no_grad():
        logits = decoder(pack["tokens"], pack.context(mode=RouteMode.replay), None).logits
    logprobs = logits.double().log_softmax(-1)
    slots = np.flatnonzero(sample.scored)
    return logprobs[slots - 1, sample.tokens[slots]].numpy()


def test_every_reported_mean_is_the_one_a_script_computes_from_the_samples(logged: Run) -> None:
    for row, batch, weights in zip(
        logged.rows, logged.recorder.batches, logged.recorder.weights, strict=True
    ):
        samples = batch.samples
        policy = np.concatenate([policy_logprobs(weights, sample) for sample in samples])
        behavior = np.concatenate([s.behavior_logprobs[s.scored] for s in samples]).astype(np.float64)
        gaps = np.abs(policy - behavior)
        lengths, responses = [len(s) for s in samples], [int(s.response_mask.sum()) for s in samples]
        expected = {
            "mismatch/mean": gaps.mean(),
            "loss/tis": np.exp(policy - behavior).mean(),
            "loss/tis_high": (np.exp(policy - behavior) > 1.5).mean(),
            "reward/mean": np.mean([s.reward for s in samples]),
            "rollouts/response_tokens": np.mean(responses),
            "packing/tokens_per_pack": sum(lengths) / len(batch.packs),
            "packing/samples_per_pack": len(samples) / len(batch.packs),
            "packing/fill": sum(lengths) / (20 * len(batch.packs)),
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        exact = np.sort(gaps)[int(np.ceil(0.99 * len(gaps))) - 1]
        assert exact <= row["mismatch/p99"] * (1 + 1e-6) <= exact * 10**0.1 * (1 + 1e-5)


def test_reported_means_do_not_depend_on_the_budget(logged: Run, tmp_path: Path) -> None:
    first, second = files(2)
    write_files(tmp_path / "run", [first, second])
    run = fit(replace_packing(logged.config, tmp_path / "run", PackingConfig()))
    packed_only = ("packing/", "time/", "throughput/", "memory/", "loss/router_balance")
    for packed, unpacked in zip(logged.rows, run.rows, strict=True):
        names = [name for name in packed if not name.startswith(packed_only)]
        assert len(names) > 15
        assert {n: packed[n] for n in names} == pytest.approx(
            {n: unpacked[n] for n in names}, rel=1e-4, abs=1e-6
        )


def replace_packing(config: Config, run_dir: Path, packing: PackingConfig) -> Config:
    rollouts = replace(config.rollouts, path=str(run_dir / "files"))
    return replace(config, run_dir=str(run_dir), run_name=run_dir.name, packing=packing, rollouts=rollouts)


def test_metrics_csv_has_one_row_an_update(logged: Run) -> None:
    assert [row["step"] for row in logged.rows] == [1, 2]
    names = {
        "reward/mean",
        "loss/total",
        "grad/norm",
        "replay/coverage",
        "replay/overlap",
        "mismatch/mean",
        "mismatch/p99",
        "packing/packs",
        "packing/expert_dispatch_skew_mean",
        "packing/expert_dispatch_skew_max",
        "time/plan_ms",
        "memory/peak_allocated_gib",
        "throughput/real_tokens_per_second",
        "throughput/padded_tokens_per_second",
    }
    assert all(names <= set(row) for row in logged.rows)


def test_a_file_with_routes_trains_on_live_routes_where_replay_is_off(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(1))
    run = fit(config_of(tmp_path / "run", policy=PolicyConfig(replay=False)))
    assert "replay/coverage" not in run.rows[0]
    assert run.events("replay")[0]["rows"] == 0
    assert run.recorder.batches[0].packs[0].routes is None


def test_the_table_of_metrics_has_unit_normaliser_and_meaning_of_all_that_a_run_logs(logged: Run) -> None:
    table = (Path(__file__).parents[1] / "docs" / "reference" / "metrics.md").read_text()
    explained: dict[str, list[str]] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        explained |= dict.fromkeys(re.findall(r"`(\w+/\w+)`", cells[0]), cells[1:])
    names = {name for row in logged.rows for name in row} - {"step"}
    assert len(names) > 50
    assert names - set(explained) == set()
    unclear = [name for name in sorted(names - {"optim/lr"}) if not all(explained[name])]
    assert unclear == []
    assert {len(explained[name]) for name in names} == {3}
