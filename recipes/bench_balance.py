"""Update time with and without balancing: `python -m recipes.bench_balance [--updates N]`.

The model and topology of `+experiment=balanced_moe`: four processes, EP2, the same files in every arm, whose
lengths and routes follow the planner's synthetic law, scaled to the model's context. Rounds: every arm once,
then every arm again in another order, so that a slow moment of the machine does not fall on one arm. A round
leaves out its first update. Time of one update: planning that the update waits for, forward, backward, step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from olmo_rl.cli import compose
from olmo_rl.config import BalanceKind, Config
from olmo_rl.data.files import write_collection
from olmo_rl.planning.search import warm_up
from olmo_rl.planning.synthetic import synthetic_collection

ARMS = tuple(kind.value for kind in BalanceKind)
CONTEXT = 256  # tokens of the longest sample
SAMPLES = 64
ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One measured update: seconds of planning that it waited for and of computing, and its counts."""

    planning: float
    computing: float
    expert_work: int
    token_work: int
    columns: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench_balance", description=__doc__)
    parser.add_argument("--updates", type=int, default=3, help="measured updates of each arm in each round")
    options = parser.parse_args(arguments)
    found: dict[str, list[Update]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as scratch:
        rollouts = Path(scratch) / "rollouts"
        for step in range(options.updates + 1):
            write_step(step, rollouts=rollouts)
        for turn in range(ROUNDS):
            for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
                print(f"round {turn + 1} of {ROUNDS}: {arm} ...", flush=True)
                run_dir = f"{scratch}/{arm}-{turn}"
                config = arm_config(arm, rollouts=rollouts, run_dir=run_dir, updates=options.updates + 1)
                warm_up(config.balance)  # compile here, once, so that no arm waits for a cold cache
                found[arm] += measure(config)
    Console(width=110).print(report(found))


def arm_config(arm: str, *, rollouts: Path, run_dir: str, updates: int) -> Config:
    """`balanced_moe` over files with a context that holds the scaled law, and one arm's planner."""
    overrides = [
        "+experiment=balanced_moe",
        f"balance={arm}",
        f"model.max_seq_len={CONTEXT}",
        "packing.max_tokens=1024",
        "rollouts=files",
        f"rollouts.path='{rollouts}'",
        f"batch.samples_per_step={SAMPLES}",
        f"trainer.max_steps={updates}",
        "warm_start.steps=0",
        "scoring.check_interval=0",
        "callbacks.progress=false",
        "callbacks.pictures=false",
    ]
    return compose(overrides, run_dir=run_dir)


def write_step(step: int, *, rollouts: Path) -> None:
    config = arm_config("none", rollouts=rollouts, run_dir="", updates=1)
    layout = config.model.expert_layout
    assert layout is not None, "balanced_moe has experts"
    collection = synthetic_collection(
        SAMPLES, layout=layout, seed=step, group_size=config.rollouts.group_size, longest=CONTEXT
    )
    write_collection(collection, rollouts / f"collection-{step:05d}.parquet")


def measure(config: Config) -> list[Update]:
    """Train in fresh processes; every update after the first."""
    process = multiprocessing.get_context("spawn").Process(target=train_quietly, args=(config,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(process.exitcode or 1)
    from olmo_rl.training.metrics_csv import read_metrics

    directory = Path(config.run_dir)
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


def train_quietly(config: Config) -> None:
    """One arm, without its closing table."""
    from recipes.train import run

    Path(config.run_dir).mkdir(parents=True)
    with open(Path(config.run_dir) / "out", "w") as out, contextlib.redirect_stdout(out):
        run(config)


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
