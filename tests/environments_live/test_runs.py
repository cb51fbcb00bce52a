"""Runs with an environment from the command line: `-m environments`."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from bounds import BOUND_SECONDS

pytestmark = pytest.mark.environments
ROOT = Path(__file__).parents[2]
MODULES = [ROOT / "examples/environments" / name for name in ("calculator_tool", "higher_lower")]
COMMON = (
    "+experiment=tool_use",
    "callbacks=quiet",
    "warm_start.steps=1",
    "warm_start.samples_per_step=4",
    "batch.samples_per_step=16",
    "task.eval_problems=4",
    "model=moe_tiny",
)


def run(directory: Path, *arguments: str, loopback: bool = False) -> str:
    """What the command prints; `loopback`: in a network namespace without anything else."""
    command = [sys.executable, str(ROOT / "train.py"), *COMMON, *arguments]
    if loopback:
        command = [
            "unshare",
            "--net",
            "--map-root-user",
            "sh",
            "-c",
            'ip link set lo up && exec "$@"',
            "sh",
            *command,
        ]
    paths = os.pathsep.join(map(str, [ROOT, *MODULES]))
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def rows(directory: Path, name: str) -> list[dict[str, str]]:
    with (directory / "outputs" / name / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("environment/episodes")]


def test_two_ranks_train_on_episodes_and_a_resumed_run_goes_on_as_one_that_never_stopped(
    tmp_path: Path,
) -> None:
    two = ("trainer=cpu_2", "strategy=expert_parallel")
    run(tmp_path, *two, "run_name=whole", "trainer.max_steps=2")
    run(tmp_path, *two, "run_name=parts", "trainer.max_steps=1")
    run(tmp_path, *two, "run_name=parts", "trainer.max_steps=2", "ckpt_path=last")
    whole, parts = rows(tmp_path, "whole"), rows(tmp_path, "parts")
    assert len(whole) == len(parts) == 2
    for mine, theirs in zip(whole, parts, strict=True):
        for name in ("environment/turns", "environment/tool_calls", "reward/mean", "loss/policy"):
            assert mine[name] == theirs[name], name
        assert float(mine["environment/episodes"]) == 16
        assert float(mine["environment/branches"]) == float(mine["environment/rollouts"]) == 16


def test_a_run_without_a_network_writes_equal_collections_for_equal_seeds(tmp_path: Path) -> None:
    game = (
        "environment.taskset=higher_lower",
        "environment.success=null",
        "recipe=rollout",
        "warm_start.steps=0",
    )
    for name in ("one", "two"):
        run(tmp_path, *game, f"run_name={name}", loopback=True)
    one, two = (
        pq.read_table(tmp_path / "outputs" / name / "rollouts" / "collection-00000.parquet")
        for name in ("one", "two")
    )
    assert one.equals(two)
    assert one.num_rows == 16
    assert len(set(map(tuple, one.column("tokens").to_pylist()))) > 1
    assert one.column("episode_id").to_pylist() == one.column("sample_id").to_pylist()
