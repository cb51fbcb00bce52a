"""Update time with and without balancing: `python -m benchmarks.bench_balance [--updates N]`.

The model and topology of `+experiment=balanced_moe`: four processes, EP2, the same files in every arm, whose
lengths and routes follow the planner's synthetic law, scaled to the model's context. The same ranks train all
arms in turns, each turn in another order, so that a slow moment of the machine does not fall on one arm. Each
arm leaves out its first update of a turn. Time of one update: planning that the update waits for,
forward, backward, step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from olmo_rl.config import BalanceConfig, BalanceKind, Config
from olmo_rl.data.files import write_collection
from olmo_rl.library import compose
from olmo_rl.planning.planners import compile_kernels
from olmo_rl.planning.synthetic import synthetic_collection
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.ranks import run_ranks
from olmo_rl.types import Topology
from recipes.train import train

ARMS = tuple(kind.value for kind in BalanceKind)
CONTEXT = 256  # tokens of the longest sample
SAMPLES = 64
TURNS = len(ARMS)  # every arm runs once at every place of a turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One measured update: seconds of planning that it waited for and of computing, and its counts."""

    planning: float
    computing: float
    expert_work: int
    token_work: int
    columns: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_balance", description=__doc__)
    parser.add_argument("--updates", type=int, default=2, help="measured updates of each arm in each turn")
    options = parser.parse_args(arguments)
    updates = options.updates + 1
    with tempfile.TemporaryDirectory() as scratch:
        for step in range(updates):
            write_step(step, directory=scratch)
        config = arm_config("none", turn=0, directory=scratch, updates=updates)
        bench = importlib.import_module("benchmarks.bench_balance")  # by a name that the ranks can import
        run_ranks(bench.train_arms, config)
        found = {
            arm: [update for turn in range(TURNS) for update in read_updates(Path(scratch) / f"{arm}-{turn}")]
            for arm in ARMS
        }
    Console(width=110).print(report(found))


def train_arms(config: Config) -> None:
    """One rank: every arm, without its closing table. Kernels are compiled before, once."""
    for kind in BalanceKind:
        compile_kernels(
            BalanceConfig(kind=kind),
            layout=config.model.expert_layout,
            topology=Topology(config.world_size, config.ep_degree),
        )
    directory, updates = str(Path(config.run_dir).parent), config.trainer.max_steps
    for turn in range(TURNS):
        for arm in (*ARMS[turn:], *ARMS[:turn]):
            if int(os.environ.get("RANK", "0")) == 0:
                print(f"turn {turn + 1} of {TURNS}: {arm}", flush=True)
            with contextlib.redirect_stdout(io.StringIO()):
                train(arm_config(arm, turn=turn, directory=directory, updates=updates))


def arm_config(arm: str, *, turn: int, directory: str, updates: int) -> Config:
    """`balanced_moe` over files with a context that holds the scaled law, and one arm's planner."""
    overrides = [
        "+experiment=balanced_moe",
        f"balance={arm}",
        f"model.max_seq_len={CONTEXT}",
        "packing.max_tokens=1024",
        "rollouts=files",
        f"rollouts.path='{directory}/rollouts'",
        f"batch.samples_per_step={SAMPLES}",
        f"trainer.max_steps={updates}",
        "warm_start.steps=0",
        "scoring.check_interval=0",
        "callbacks.progress=false",
        "callbacks.pictures=false",
    ]
    return compose(overrides, run_dir=f"{directory}/{arm}-{turn}")


def write_step(step: int, *, directory: str) -> None:
    config = arm_config("none", turn=0, directory=directory, updates=1)
    layout = config.model.expert_layout
    assert layout is not None, "balanced_moe has experts"
    collection = synthetic_collection(
        SAMPLES, layout=layout, seed=step, group_size=config.rollouts.group_size, longest=CONTEXT
    )
    write_collection(collection, Path(directory) / "rollouts" / f"collection-{step:05d}.parquet")


def read_updates(directory: Path) -> list[Update]:
    """Every update of one turn of one arm after the first."""
    rows = read_metrics(directory / "metrics.csv")[1:]
    lines = (directory / "training_contract_rank0.jsonl").read_text().splitlines()
    balance = [event for event in map(json.loads, lines) if event["event"] == "expert_balance"][1:]
    return [
        Update(
            planning=row["time/plan_ms"] / 1000,
            computing=row["time/update_s"],
            expert_work=event["expert_work"],
            token_work=event["token_work"],
            columns=event["columns"],
        )
        for row, event in zip(rows, balance, strict=True)
    ]


def report(found: dict[str, list[Update]]) -> Table:
    title = f"update time, planning included: medians of {len(found['none'])} updates, ratios to none"
    table = Table(title=title, title_justify="left")
    headings = ("balance", "update s", "ratio", "planning s", "expert work", "ratio", "token work", "columns")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "balance" else "right")

    def median(arm: str, name: str) -> float:
        return float(np.median([getattr(update, name) for update in found[arm]]))

    def whole(arm: str) -> float:
        return float(np.median([update.planning + update.computing for update in found[arm]]))

    for arm in found:
        table.add_row(
            arm,
            f"{whole(arm):.3f}",
            f"{whole(arm) / whole('none'):.3f}",
            f"{median(arm, 'planning'):.3f}",
            f"{median(arm, 'expert_work'):,.0f}",
            f"{median(arm, 'expert_work') / median('none', 'expert_work'):.3f}",
            f"{median(arm, 'token_work'):,.0f}",
            f"{median(arm, 'columns'):.0f}",
        )
    return table


if __name__ == "__main__":
    main()
