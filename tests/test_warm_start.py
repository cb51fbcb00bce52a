"""Recipes over files in one process: the warm start before training, supervised runs, and scoring."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program
from safetensors.torch import load_file
from training_cases import LAYOUT, MODEL, config_of, fit, identical, masked, samples_of, write_files

from olmo_rl.config import (
    BatchConfig,
    BlockNorms,
    Config,
    Dtype,
    LossConfig,
    OptimConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recipe,
    Reduction,
    RolloutsConfig,
    ScoringConfig,
    Source,
    TrainerConfig,
    WarmStartConfig,
)
from olmo_rl.data.collate import collate
from olmo_rl.data.packs import RouteMode
from olmo_rl.hf.writing import export_hf
from olmo_rl.library import run
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import load_weights
from olmo_rl.run_directory import complete_checkpoints, sha256_of
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.ranks import run_ranks
from olmo_rl.running.warm_start import _whole, code_digest, warm_start
from olmo_rl.types import Sample, Topology

WARM = WarmStartConfig(steps=2, lr=5e-3, samples_per_step=6)


def warm_config(run_dir: Path, *, cache: Path, **sections: Any) -> Config:
    fields: dict[str, Any] = {"warm_start": WARM, "cache_dir": str(cache)}
    return config_of(run_dir, **(fields | sections))


def cached(cache: Path) -> list[Path]:
    return sorted((cache / "warm_start").glob("*.safetensors"))


def warmed(config: Config) -> str | None:
    """The path of this configuration's warm start, which is made if it is missing."""
    found: list[str | None] = []
    run_ranks(lambda config: found.append(warm_start(config).init_from), config)
    return found[0]


def weights_of(path: Path | str) -> dict[str, torch.Tensor]:
    decoder = HybridDecoder(MODEL, attention="reference")
    load_weights(decoder, str(path))
    return dict(decoder.named_parameters())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """One GRPO update after a warm start, by the recipe."""
    run_dir = tmp_path_factory.mktemp("warm")
    write_files(run_dir, [samples_of()])
    # The gap of the files is 1.3; a demonstration's log-probs are far below -3.
    scoring = ScoringConfig(max_behavior_gap=3.0)
    config = warm_config(run_dir, cache=run_dir / "cache", scoring=scoring)
    run(config)
    return config


def test_a_warm_start_is_not_part_of_the_updates_and_writes_nothing_into_the_run(trained: Config) -> None:
    rows = read_metrics(Path(trained.run_dir) / "metrics.csv")
    assert [row["step"] for row in rows] == [1]
    assert [path.name for path in complete_checkpoints(trained.run_dir)] == ["step-1"]
    meta = torch.load(complete_checkpoints(trained.run_dir)[0] / "meta.pt", weights_only=True)
    assert meta["global_step"] == 1


def test_training_starts_from_the_warmed_weights(trained: Config, tmp_path: Path) -> None:
    (path,) = cached(Path(trained.cache_dir))
    write_files(tmp_path / "run", [samples_of()])
    warm = weights_of(path)
    run = fit(config_of(tmp_path / "run", init_from=str(path)))
    assert identical(run.recorder.weights[0], warm)
    assert identical(run.weights, weights_of(complete_checkpoints(trained.run_dir)[0]))
    initial = HybridDecoder(MODEL, attention="reference")
    initial.init_weights(trained.seed)
    assert not identical(warm, dict(initial.named_parameters()))


def test_cached_weights_that_changed_are_made_again(trained: Config, tmp_path: Path) -> None:
    (path,) = cached(Path(trained.cache_dir))
    mine = tmp_path / "cache" / "warm_start" / path.name
    shutil.copytree(path.parent, mine.parent)
    data = bytearray(mine.read_bytes())
    data[-5] ^= 1
    mine.write_bytes(data)
    again = warmed(replace(trained, run_dir=str(tmp_path / "run"), cache_dir=str(tmp_path / "cache")))
    assert again == str(mine)
    assert mine.read_bytes() == path.read_bytes()


def warm_at_once(rank: int, world: int, directory: str) -> None:
    """One of two runs that make one warm start at the same time."""
    path = warmed(warm_config(Path(directory) / f"run{rank}", cache=Path(directory) / "cache"))
    weights_of(str(path))
    (Path(directory) / f"found{rank}").write_text(sha256_of([Path(str(path))])[0])


def test_two_runs_that_make_one_warm_start_at_once_find_the_same_whole_weights(tmp_path: Path) -> None:
    run_program(tmp_path, "test_warm_start:warm_at_once*2")
    (path,) = cached(tmp_path / "cache")
    assert _whole(path)
    digest = sha256_of([path])[0]
    assert [(tmp_path / f"found{rank}").read_text() for rank in (0, 1)] == [digest, digest]
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == [f"{path.stem}.safetensors", f"{path.stem}.sha256"], "nothing half"


def test_an_equal_configuration_uses_the_cached_weights_and_says_so(
    trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = cached(Path(trained.cache_dir))
    before = path.stat().st_mtime_ns
    write_files(tmp_path / "run", [samples_of(seed=4)])
    unrelated = LossConfig(clip_high=0.4, tis_high=2.0)
    again = warm_config(tmp_path / "run", cache=Path(trained.cache_dir), loss=unrelated)
    assert warmed(again) == str(path)
    assert "made earlier by the same configuration" in capsys.readouterr().out
    assert cached(Path(trained.cache_dir)) == [path]
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "sections",
    [
        {"warm_start": replace(WARM, lr=1e-3)},
        {"loss": LossConfig(reduction=Reduction.response)},
        {"loss": LossConfig(router_aux_weight=0.01)},
        {"seed": 3},
        {"optim": OptimConfig(lr=1e-2, warmup_steps=0, max_grad_norm=0.1)},
        {"policy": PolicyConfig(expert_dtype=Dtype.bfloat16)},
    ],
    ids=["rate", "reduction", "router", "seed", "clipping", "experts"],
)
def test_whatever_shapes_the_warmed_weights_makes_new_ones(
    trained: Config, tmp_path: Path, sections: dict[str, Any]
) -> None:
    (path,) = cached(Path(trained.cache_dir))
    other = warmed(warm_config(tmp_path / "run", cache=tmp_path / "cache", **sections))
    assert other is not None
    assert Path(other).name != path.name
    assert not identical(load_file(other), load_file(path))


def test_other_code_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = code_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("no code")
    assert code_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2")
    after = code_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({before, after, code_digest(tmp_path)}) == 3


def test_other_weights_in_the_same_place_make_new_ones(tmp_path: Path) -> None:
    model = replace(MODEL, block_norms=BlockNorms.both)
    found = []
    for seed in (1, 2):
        decoder = HybridDecoder(model, attention="reference")
        decoder.init_weights(seed)
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        export_hf(dict(decoder.named_parameters()), model=model, directory=tmp_path / "hf")
        config = warm_config(
            tmp_path / "run", cache=tmp_path / "cache", model=model, init_from=str(tmp_path / "hf")
        )
        found.append(warmed(config))
    assert None not in found
    assert len(set(found)) == len(cached(tmp_path / "cache")) == 2


def test_a_resumed_run_is_not_warmed_again(trained: Config, tmp_path: Path) -> None:
    resumed = replace(trained, ckpt_path="last", cache_dir=str(tmp_path / "cache"))
    assert warmed(resumed) is None
    assert cached(tmp_path / "cache") == []


def test_supervised_updates_lower_the_cross_entropy_and_report_no_engine_agreement(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run",
        recipe=Recipe.sft,
        rollouts=RolloutsConfig(source=Source.local),
        batch=BatchConfig(samples_per_step=8),
        packing=PackingConfig(kind=PackingKind.consecutive),
        trainer=TrainerConfig(max_steps=8),
        scoring=ScoringConfig(max_behavior_gap=0.01),
    )
    run(config)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss/cross_entropy"] < rows[0]["loss/cross_entropy"] - 0.3
    assert rows[0]["loss/total"] == rows[0]["loss/cross_entropy"]
    assert not any(name.startswith(("mismatch/", "replay/")) for name in rows[0])
    assert rows[0]["packing/packs"] < 8


def logprobs_alone(decoder: HybridDecoder, sample: Sample) -> list[float | None]:
    pack = collate([sample], layout=LAYOUT, topology=Topology(1))
    with torch.no_grad():
        logits = decoder(pack["tokens"], pack.context(mode=RouteMode.replay), None).logits
    logprobs = logits.double().log_softmax(-1)
    return [
        float(logprobs[t - 1, token]) if sample.scored[t] else None
        for t, token in enumerate(sample.tokens.tolist())
    ]


def test_scoring_writes_one_line_a_sample_with_the_policys_log_probs(tmp_path: Path) -> None:
    first, second = samples_of(seed=1, prefix="a"), samples_of(seed=2, prefix="b")
    first[2] = masked(first[2], keep=(5, 7))
    first[4] = masked(first[4])
    write_files(tmp_path / "run", [first, second])
    config = config_of(
        tmp_path / "run",
        recipe=Recipe.score,
        packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=20),
        batch=BatchConfig(samples_per_step=4),
    )
    run(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == [sample.id for sample in [*first, *second]]
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.init_weights(config.seed)
    for line, sample in zip(lines, [*first, *second], strict=True):
        expected = logprobs_alone(decoder, sample)
        found = line["policy_logprobs"]
        assert [value is None for value in found] == [value is None for value in expected]
        both = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
        assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in both)
    assert not (tmp_path / "run" / "metrics.csv").exists()
