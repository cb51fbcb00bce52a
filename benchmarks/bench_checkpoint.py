"""How long a save keeps training waiting, beside it and in it: `python -m benchmarks.bench_checkpoint`

One process, supervised updates of a mixture of experts of 100 MB and more, a save after every update: the
weights and both moments of Adam, synced and hashed. Runs with `callbacks.checkpoint_async` on and off
alternate in this process; each is a run of its own. A save that has to wait for the one before it counts that
wait. CPU time is that of all threads, over a whole run. Ends with 1 where saving beside training blocks more
than a fifth of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from olmo_rl.config import Config
from olmo_rl.library import compose

LIMIT = 0.2  # of the blocking time of a save that training waits for
ARMS = {"in training": "callbacks.checkpoint_async=false", "beside it": "callbacks.checkpoint_async=true"}
SHARED = (
    "recipe=sft",
    "task=addition",
    "model=moe_tiny",
    "model.dim=384",
    "model.expert_hidden=1024",
    "packing=consecutive_2k",
    "trainer=cpu",
    "strategy=single",
    "callbacks=quiet",
    "callbacks.checkpoint_interval=1",
)


@dataclass(kw_only=True, slots=True)
class Arm:
    """What the runs of one arm took, in seconds; the first save of a run, which allocates, is left out."""

    blocked: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=6, help="of each run")
    parser.add_argument("--turns", type=int, default=2, help="runs of each arm")
    parser.add_argument("--samples", type=int, default=512, help="of one update, which must outlast a save")
    arguments = parser.parse_args()
    arms, size = {name: Arm() for name in ARMS}, 0
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(arguments.turns):
            for name, override in ARMS.items():
                sizes = [
                    f"trainer.max_steps={arguments.updates}",
                    f"batch.samples_per_step={arguments.samples}",
                ]
                config = compose([*SHARED, override, *sizes], run_dir=f"{scratch}/{turn}-{name}")
                size = run(config, arm=arms[name])
                print(f"turn {turn + 1}, {name}: {median(arms[name].blocked):.3f} s a save", flush=True)
    Console().print(report(arms, size=size))
    ratio = median(arms["beside it"].blocked) / median(arms["in training"].blocked)
    print(f"blocking time beside training / in training: {ratio:.3f} (limit {LIMIT})")
    sys.exit(0 if ratio <= LIMIT else 1)


def run(config: Config, *, arm: Arm) -> int:
    """Train once; return the bytes of the weights."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from olmo_rl.running.checkpoint_writer import CheckpointWriter
    from olmo_rl.running.ranks import run_ranks
    from recipes.sft import train

    blocked: list[float] = []
    sizes: list[int] = []

    class Sizes(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            sizes.append(sum(p.numel() * p.element_size() for p in pl_module.parameters()))

    save = CheckpointWriter.save

    def timed(writer: CheckpointWriter, trainer: Trainer, *, beside: bool) -> None:
        began = time.perf_counter()
        save(writer, trainer, beside=beside)
        if trainer.global_step < config.trainer.max_steps:  # the last one is awaited in both arms
            blocked.append(time.perf_counter() - began)

    def entry(settings: Config) -> None:
        train(settings, watchers=[Sizes()])

    Path(config.run_dir).mkdir(parents=True)
    began, cpu = time.perf_counter(), time.process_time()
    CheckpointWriter.save = timed  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run_ranks(entry, config)
    finally:
        CheckpointWriter.save = save  # type: ignore[method-assign]
    arm.wall.append(time.perf_counter() - began)
    arm.cpu.append(time.process_time() - cpu)
    arm.blocked += blocked[1:]
    return sizes[0]


def report(arms: dict[str, Arm], *, size: int) -> Table:
    table = Table(
        title=f"saves of a model of {size / 1e6:.0f} MB, one after every update", title_justify="left"
    )
    for heading in ("", *arms):
        table.add_column(heading, justify="right" if heading else "left")
    rows: dict[str, Any] = {
        "blocked a save, median s": lambda arm: median(arm.blocked),
        "blocked a save, longest s": lambda arm: max(arm.blocked),
        "CPU of a run, median s": lambda arm: median(arm.cpu),
        "wall of a run, median s": lambda arm: median(arm.wall),
    }
    for name, value in rows.items():
        table.add_row(name, *(f"{value(arm):.3f}" for arm in arms.values()))
    return table


if __name__ == "__main__":
    main()
