"""Packed against unpacked training on this machine: `python -m benchmarks.bench_packing`.

The same samples in both arms: the recorded lengths of 512 GRPO samples, scaled down 8 times for the tiny
hybrid model, with random tokens and routes. Each arm is a process of its own (so that its peak memory is its
own), one after the other: one warm-up update, then measured ones. Real tokens only: neither arm has padding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.bench_train import samples_of
from olmo_rl.config import Config
from olmo_rl.data.files import write_collection
from olmo_rl.library import compose
from olmo_rl.planning.synthetic import recorded_lengths
from olmo_rl.types import Collection, ExpertLayout

SCALE = 8
SAMPLES_PER_STEP = 128
LENGTHS = Path(__file__).resolve().parent.parent / "tests" / "data" / "grpo_lengths.json"
ARMS = {
    "packed": ("packing=consecutive", "packing.max_tokens=2048"),
    "unpacked": ("packing=none", "policy.attention=torch"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=3, help="measured updates of each arm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rollouts = Path(scratch) / "rollouts"
        for step in range(arguments.updates + 1):
            config = arm_config("packed", rollouts=rollouts, run_dir=scratch, updates=1)
            layout = config.model.expert_layout
            assert layout is not None, "the tiny hybrid model has experts"
            write_collection(collection(step, layout=layout), rollouts / f"collection-{step:05d}.parquet")
        results = {}
        for arm in ARMS:
            print(f"{arm} ...", flush=True)
            config = arm_config(
                arm, rollouts=rollouts, run_dir=f"{scratch}/{arm}", updates=arguments.updates + 1
            )
            results[arm] = measure(config)
    Console().print(report(results))


def arm_config(arm: str, *, rollouts: Path, run_dir: str, updates: int) -> Config:
    """One process, the tiny hybrid model, one arm's packing."""
    overrides = [
        "model=hybrid_tiny",
        "model.max_seq_len=1024",
        *ARMS[arm],
        "rollouts=files",
        f"rollouts.path='{rollouts}'",
        f"batch.samples_per_step={SAMPLES_PER_STEP}",
        f"trainer.max_steps={updates}",
        "scoring.check_interval=0",
        "callbacks.progress=false",
        "callbacks.pictures=false",
    ]
    return compose(overrides, run_dir=run_dir)


def collection(step: int, *, layout: ExpertLayout) -> Collection:
    """`SAMPLES_PER_STEP` consecutive recorded lengths, scaled; the list repeats when it is used up."""
    lengths = np.maximum(2, recorded_lengths(LENGTHS, case="mbu_157_percent") // SCALE)
    samples = list(samples_of(lengths, step=step, count=SAMPLES_PER_STEP, layout=layout))
    return Collection(samples=samples, layout=layout, source="scaled recorded lengths")


def measure(config: Config) -> dict[str, float]:
    """Train in a fresh process; means over the updates after the first, and the process's peak memory."""
    process = multiprocessing.get_context("spawn").Process(target=train_quietly, args=(config,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(process.exitcode or 1)
    from olmo_rl.running.metrics_csv import read_metrics

    rows = read_metrics(Path(config.run_dir) / "metrics.csv")[1:]
    contract = (Path(config.run_dir) / "training_contract_rank0.jsonl").read_text().splitlines()
    packing = [event for event in map(json.loads, contract) if event["event"] == "packing"][1:]
    seconds = sum(row["time/update_s"] for row in rows)
    return {
        "real tokens/s": sum(event["real_tokens"] for event in packing) / seconds,
        "seconds an update": seconds / len(rows),
        "forwards an update": sum(event["packs"] for event in packing) / len(rows),
        "samples a forward": sum(event["samples"] for event in packing)
        / sum(event["packs"] for event in packing),
        "peak memory, GiB": max(row["memory/peak_allocated_gib"] for row in rows),
    }


def train_quietly(config: Config) -> None:
    """One arm, without its closing table."""
    from olmo_rl.library import run

    Path(config.run_dir).mkdir(parents=True)
    with open(Path(config.run_dir) / "out", "w") as out:
        import contextlib

        with contextlib.redirect_stdout(out):
            run(config)


def report(results: dict[str, dict[str, float]]) -> Table:
    table = Table(title="packed against unpacked, same samples, one process", title_justify="left")
    for heading in ("", *results, "packed / unpacked"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in results["packed"]:
        packed, unpacked = results["packed"][name], results["unpacked"][name]
        table.add_row(name, f"{packed:,.2f}", f"{unpacked:,.2f}", f"{packed / unpacked:.2f}x")
    return table


if __name__ == "__main__":
    main()
