"""Run directories with a known course, for tests of the report: what a run of this project would have logged.

Rows go through the logger of runs, log lines have the form of the contract log, samples the schema of kept
samples. `FAULTS` names what is wrong with each prepared run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_rl.running.metrics_csv import MetricsCsv
from olmo_rl.running.sample_files import SCHEMA

RANKS = 4
Row = dict[str, float]


def prepared_run(
    directory: Path,
    *,
    updates: int = 60,
    change: Callable[[int, float, Row], Row] | None = None,
    late: dict[int, float] | None = None,
    busy: dict[int, float] | None = None,
    optimizer: dict[int, float] | None = None,
    config: str = "",
) -> Path:
    """A healthy run of `RANKS` ranks. `change` replaces a row, given its update and the share of the run that
    is done; `late` seconds that a rank begins after the others; `busy` and `optimizer`: factors of a rank.
    """
    random = np.random.default_rng(0)
    directory.mkdir(parents=True, exist_ok=True)
    rows = [_row(step, updates=updates, random=random, change=change) for step in range(1, updates + 1)]
    _write_rows(directory, rows)
    for rank in range(RANKS):
        lines = _log_of(
            rank, rows=rows, random=random, late=late or {}, busy=busy or {}, optimizer=optimizer or {}
        )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"training_contract_rank{rank}.jsonl").write_text(text)
    _write_samples(directory / "samples", updates=updates, random=random)
    (directory / ".hydra").mkdir(exist_ok=True)
    (directory / ".hydra" / "config.yaml").write_text(
        f"run_name: {directory.name}\ntrainer:\n  max_steps: {updates}\n  devices: 4\npacking:\n"
        f"  kind: consecutive\n  max_tokens: 2048\nbalance:\n  kind: none\n"
        f"rollouts:\n  source: local\n{config}"
    )
    (directory / ".hydra" / "overrides.yaml").write_text(f"- run_name={directory.name}\n")
    return directory


def collapsing(directory: Path) -> Path:
    """A run whose entropy collapses while its reward stays flat."""

    def change(step: int, done: float, row: Row) -> Row:
        entropy = row["policy/entropy"] * float(np.exp(-5 * done))
        return row | {
            "policy/entropy": entropy,
            "reward/mean": 0.3 + 0.02 * (step % 2),
            "reward/constant_groups": 0.7,
        }

    return prepared_run(directory, change=change)


def straggling(directory: Path) -> Path:
    """A run whose rank 2 begins every update half a second late."""
    return prepared_run(directory, late={2: 0.5})


def write_many(directory: Path, *, updates: int) -> Path:
    """A long run of one rank, quickly."""
    prepared_run(directory, updates=20)
    random = np.random.default_rng(1)
    first = _row(1, updates=updates, random=random, change=None)
    head = ",".join([*first, *(f"more/metric_{number}" for number in range(60))])
    rest = ",".join(repr(value) for name, value in first.items() if name not in ("step", "reward/mean"))
    rewards = random.random(updates).tolist()
    lines = [f"{step},{reward!r},{rest}{f',{reward!r}' * 60}" for step, reward in enumerate(rewards, start=1)]
    (directory / "metrics.csv").write_text("\n".join([head, *lines, ""]))
    log = directory / "training_contract_rank0.jsonl"
    version, *events = log.read_text().splitlines()
    of_one = [event for event in events if '"step": 12,' in event]
    many = [
        event.replace('"step": 12,', f'"step": {step},', 1)
        for step in range(1, updates + 1)
        for event in of_one
    ]
    log.write_text("\n".join([version, *many, ""]))
    return directory


def _row(
    step: int, *, updates: int, random: np.random.Generator, change: Callable[[int, float, Row], Row] | None
) -> Row:
    done = step / updates
    noise = float(random.normal())
    row: Row = {
        "step": float(step),
        "reward/mean": 0.2 + 0.6 * done + 0.03 * noise,
        "reward/std": 0.4,
        "reward/best_of_group": 0.9,
        "reward/worst_of_group": 0.1 + 0.4 * done,
        "reward/constant_groups": 0.2 + 0.1 * done,
        "policy/entropy": 1.2 - 0.4 * done + 0.02 * noise,
        "rollouts/response_tokens": 180 + 40 * done + 3 * noise,
        "rollouts/truncated": 0.02,
        "mismatch/mean": 0.004,
        "mismatch/p99": 0.05,
        "mismatch/kl": 1e-4,
        "loss/clip_low": 0.01,
        "loss/clip_high": 0.02,
        "loss/ratio_drift": 0.01,
        "loss/total": -0.01 * noise,
        "grad/norm": 0.5 + 0.05 * abs(noise),
        "batch/skipped_updates": 0.0,
        "replay/expert_entropy": 0.93,
        "replay/expert_entropy_min": 0.88,
        "replay/coverage": 1.0,
        "packing/fill": 0.91,
        "packing/tokens_per_pack": 1860.0,
        "throughput/real_tokens_per_second": 4000 + 50 * noise,
        "throughput/padded_tokens_per_second": 4100 + 50 * noise,
        "time/update_s": 2.05,
        "time/rollout_s": 0.9 + 0.02 * noise,
        "time/plan_ms": 2.0,
        "time/collate_s": 0.01,
        "time/transfer_s": 0.01,
        "time/forward_s": 0.7,
        "time/backward_s": 1.2 + 0.02 * noise,
        "time/clip_s": 0.02,
        "time/optimizer_s": 0.1,
        "time/publish_s": 0.05,
        "ranks/start_skew_s": 0.002,
    }
    return row if change is None else change(step, done, row)


def _write_rows(directory: Path, rows: list[Row]) -> None:
    logger = MetricsCsv(directory / "metrics.csv")
    for row in rows:
        logger.log_metrics(
            {name: value for name, value in row.items() if name != "step"}, step=int(row["step"])
        )


def _log_of(
    rank: int,
    *,
    rows: list[Row],
    random: np.random.Generator,
    late: dict[int, float],
    busy: dict[int, float],
    optimizer: dict[int, float],
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"event": "log", "step": 0, "rank": rank, "version": 1}]
    for row in rows:
        step = int(row["step"])
        lines.append(_packing(step, rank=rank))
        seconds = {
            "rollout": row["time/rollout_s"],
            "forward": row["time/forward_s"],
            "backward": row["time/backward_s"],
            "optimizer": row["time/optimizer_s"] * optimizer.get(rank, 1.0),
        }
        clocks: dict[str, Any] = {}
        if rank == 0:
            clocks = {
                "began": [1000.0 + 3 * step + late.get(one, 0.001 * one) for one in range(RANKS)],
                "busy": [1.9 * busy.get(one, 1.0) for one in range(RANKS)],
            }
            counts = [[bin, int(1 + 400 * np.exp(-(((bin - 55) / 9) ** 2)))] for bin in range(30, 80)]
            lines.append({"event": "mismatch", "step": step, "rank": 0, "counts": counts})
            lines.append(
                {
                    "event": "replay",
                    "step": step,
                    "rank": 0,
                    "expert_entropy": [0.95, 0.9, 0.97, 0.88 - 0.002 * (step % 9)],
                }
            )
            lines += _balance(step, random=random) if step % 5 == 1 else []
        lines.append(
            {
                "event": "time",
                "step": step,
                "rank": rank,
                "update_s": row["time/update_s"],
                "seconds": seconds,
                **clocks,
            }
        )
    lines += [{"event": "evaluation", "step": 0, "rank": rank, "accuracy": 0.25}] if rank == 0 else []
    return lines


def _packing(step: int, *, rank: int) -> dict[str, Any]:
    random = np.random.default_rng(100 * step + rank)
    packs = [random.integers(100, 320, 8).tolist() for _ in range(3)]
    groups = [sorted(random.integers(0, 12, 8).tolist()) for _ in range(3)]
    tokens = sum(map(sum, packs))
    return {
        "event": "packing", "step": step, "rank": rank, "samples": 24, "packs": 3, "real_tokens": tokens,
        "padded_tokens": tokens, "max_pack_tokens": max(map(sum, packs)), "token_budget": 2560,
        "fill": tokens / 7680, "lengths": packs, "groups": groups, "rows": [sum(pack) for pack in packs],
    }  # fmt: skip


def _balance(step: int, *, random: np.random.Generator) -> list[dict[str, Any]]:
    observed = random.integers(800, 1300, (4, 4)).tolist()
    balance = {"layers": [1, 2, 4, 5], "observed": observed, "predicted": observed}
    skews = {"layer_skew_before": [1.41, 1.36, 1.52, 1.3], "layer_skew": [1.08, 1.05, 1.12, 1.06]}
    return [
        {"event": "expert_schedule", "step": step, "rank": 0, "before": {}, "after": {}, "search": {}},
        {"event": "expert_balance", "step": step, "rank": 0, **balance, **skews},
    ]


def _write_samples(directory: Path, *, updates: int, random: np.random.Generator) -> None:
    directory.mkdir(exist_ok=True)
    words = [
        "<b>Step</b>",
        "by",
        "step",
        ":",
        "12",
        "+",
        "30",
        "is",
        "42",
        ",",
        "so",
        "the",
        "answer",
        "is",
        "42",
        ".",
    ]
    for step in np.unique(np.linspace(1, updates, 12).astype(int)):
        rows = []
        for number in range(8):
            pieces = [f"{word} " for word in words[: 6 + number]] + [""]
            rows.append(
                {
                    "step": int(step), "sample_id": f"c{step}-{number}", "group_id": f"g{number // 4}",
                    "prompt": "What is 12 + 30? </script> A number.", "response": "".join(pieces),
                    "pieces": pieces, "gaps": [*random.normal(0, 0.1, len(pieces) - 1).tolist(), None],
                    "tokens": len(pieces), "reward": number / 7, "advantage": number / 7 - 0.5,
                    "finish_reason": "stop", "policy_version": int(step) - 1,
                }
            )  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), directory / f"step-{step}.parquet")
