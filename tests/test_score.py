"""recipe=score over files whose ids meet, and what it leaves out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_cases import LAYOUT, MODEL, SMALL_PACKS, config_of, masked, samples_of, write_files

from olmo_rl.config import BatchConfig, Recipe
from olmo_rl.data.collate import collate
from olmo_rl.data.packs import RouteMode
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.running.ranks import run_ranks
from olmo_rl.types import Sample, Topology
from recipes import score


def logprobs_alone(sample: Sample) -> list[float | None]:
    """Log-probs of one sample in a forward of its own, by the initial weights."""
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.init_weights(0)
    pack = collate([sample], layout=LAYOUT, topology=Topology(1))
    with torch.no_grad():
        logits = decoder(pack["tokens"], pack.context(mode=RouteMode.replay), None).logits
    rows = torch.log_softmax(logits, -1)
    scored = sample.scored
    return [float(rows[t - 1, int(token)]) if scored[t] else None for t, token in enumerate(sample.tokens)]


def test_files_may_share_ids_and_what_is_not_scored_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = samples_of(seed=1)  # ids s0 to s7 in both files
    second = samples_of(seed=2)
    second[:4] = [masked(sample) for sample in second[:4]]  # a step without a token to score
    tail = samples_of(((2, 3), (1, 4), (3, 2)), seed=3, prefix="t")
    write_files(tmp_path / "run", [first, [*second, *tail]])
    config = config_of(
        tmp_path / "run", recipe=Recipe.score, packing=SMALL_PACKS, batch=BatchConfig(samples_per_step=4)
    )
    run_ranks(score.score, config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()]
    assert all(line.keys() == {"file", "sample_id", "policy_logprobs"} for line in lines)
    found = {(Path(line["file"]).name, line["sample_id"]): line["policy_logprobs"] for line in lines}
    names = ["collection-00000.parquet", "collection-00001.parquet"]
    expected = {(names[0], sample.id): sample for sample in first}
    expected |= {(names[1], sample.id): sample for sample in second[4:]}
    assert list(found) == list(expected)
    for key, sample in expected.items():
        assert found[key] == pytest.approx(logprobs_alone(sample), abs=1e-5), key
    assert found[names[0], "s5"] != found[names[1], "s5"]
    output = capsys.readouterr().out
    assert "12 of 19 samples scored, mean |policy - behaviour| " in output
    assert "not scored: 3 in the incomplete last step of their file" in output
    assert "not scored: 4 filtered, or in steps where no token is trained" in output


def test_nothing_is_said_where_everything_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = samples_of(seed=1)
    samples[3] = masked(samples[3])  # in a step with others: its line holds nulls alone
    write_files(tmp_path / "run", [samples])
    config = config_of(tmp_path / "run", packing=SMALL_PACKS)
    run_ranks(score.score, replace(config, recipe=Recipe.score))
    lines = [json.loads(line) for line in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()]
    assert lines[3]["policy_logprobs"] == [None] * len(samples[3])
    output = capsys.readouterr().out
    assert "8 of 8 samples scored" in output
    assert "not scored" not in output
