"""Does killing engines and trainer cost an answer, or train one twice? `python -m benchmarks.check_kills`

Two `recipe=serve` and one training run, one collection ahead, with a checkpoint after every update. Ten
times, after a random time of work, one engine, the trainer, or both are killed with SIGKILL and started
again, the trainer with `ckpt_path=last`. At the end the contract log must show one history: every update
trained its full number of samples, no sample stands in two updates, and every row of metrics.csv has asked =
received + abandoned, with no update missing. Prints one row a kill, and ends with 1 where this does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from olmo_rl.run_directory import complete_checkpoints
from olmo_rl.running.metrics_csv import read_metrics

ROOT = Path(__file__).parents[1]
SAMPLES = 16
BOUND_SECONDS = 900.0  # for one update, on a busy machine
MODEL = ("model=moe_tiny", "model.dim=32", "model.expert_hidden=32")
TARGETS = ("engine", "trainer", "both")


class Program:
    """One command that is killed and started again."""

    def __init__(self, place: Path, name: str, *arguments: str) -> None:
        self.place, self.name, self.arguments = place, name, arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with (self.place / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *self.arguments, *more],
                cwd=self.place,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None


def engines_of(place: Path, *, count: int) -> tuple[list[Program], list[str]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    programs = [
        Program(place, f"engine{n}", "recipe=serve", f"run_name=engine{n}", f"serve.port={port}", *MODEL)
        for n, port in enumerate(ports)
    ]
    return programs, [f"http://127.0.0.1:{port}" for port in ports]


def wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def updates(run: Path) -> int:
    path = run / "metrics.csv"
    return len(read_metrics(path)) if path.is_file() else 0


def wait_for_updates(run: Path, *, at_least: int, trainer: Program) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while updates(run) < at_least:
        if trainer.ended:
            raise SystemExit(f"the trainer ended: {(trainer.place / 'trainer.log').read_text()[-2000:]}")
        if time.monotonic() > deadline:
            raise SystemExit(f"no update {at_least} within {BOUND_SECONDS:g} s")
        time.sleep(0.1)


def trained(run: Path) -> dict[int, list[str]]:
    """Sample ids by update, of the history that the run has now: an update that was made again after a kill
    replaces the one that no checkpoint had.
    """
    found: dict[int, list[str]] = {}
    for line in (run / "training_contract_rank0.jsonl").read_text().splitlines():
        event = json.loads(line) if line.endswith("}") else {}
        if event.get("event") == "packing":
            found[event["step"]] = [id for pack in event["sample_ids"] for id in pack]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        engines, urls = engines_of(place, count=2)
        run = place / "outputs" / "killed"
        trainer = Program(
            place,
            "trainer",
            "+experiment=packed_moe",
            *MODEL,
            "run_name=killed",
            "trainer=cpu",
            "strategy=single",
            "warm_start.steps=0",
            "task.eval_problems=0",
            f"batch.samples_per_step={SAMPLES}",
            "rollouts=vllm",
            f"rollouts.urls=[{','.join(urls)}]",
            "rollouts.group_size=4",
            "rollouts.max_new_tokens=24",
            "rollouts.max_lag=1",
            "callbacks=quiet",
            "callbacks.checkpoint_interval=1",
            "trainer.max_steps=100000",
        )
        try:
            failed = _kill_and_judge(
                dice, kills=options.kills, run=run, trainer=trainer, engines=engines, urls=urls
            )
        finally:
            for program in (trainer, *engines):
                program.kill()
    sys.exit(failed)


def _kill_and_judge(
    dice: random.Random, *, kills: int, run: Path, trainer: Program, engines: list[Program], urls: list[str]
) -> int:
    table = Table(title=f"{kills} kills at random", title_justify="left")
    for heading in ("kill", "target", "updates before", "resumed from", "updates after"):
        table.add_column(heading, justify="right")
    for engine, url in zip(engines, urls, strict=True):
        engine.start()
        wait_until_healthy(url)
    trainer.start()
    wait_for_updates(run, at_least=1, trainer=trainer)
    for number in range(kills):
        target = dice.choice(TARGETS)
        chosen = dice.randrange(len(engines))
        time.sleep(dice.uniform(0.0, 3.0))
        before, start = updates(run), "-"
        if target != "engine":
            trainer.kill()
        if target != "trainer":
            engines[chosen].kill()
            engines[chosen].start()
        if target != "engine":
            saved = complete_checkpoints(str(run))
            start = saved[-1].name if saved else "no checkpoint yet"
            trainer.start("ckpt_path=last" if saved else "overwrite=true")
        at = updates(run)
        wait_for_updates(run, at_least=at + 2, trainer=trainer)
        table.add_row(str(number + 1), target, str(before), start, str(updates(run)))
    assert trainer.process is not None
    trainer.process.send_signal(signal.SIGTERM)
    code = trainer.process.wait(BOUND_SECONDS)
    Console().print(table)
    return _judge(run, code=code)


def _judge(run: Path, *, code: int) -> int:
    rows, history = read_metrics(run / "metrics.csv"), trained(run)
    times = Counter(id for ids in history.values() for id in ids)
    sums = {
        name: sum(int(row[f"rollouts/{name}"]) for row in rows)
        for name in ("asked", "received", "retried", "abandoned")
    }
    twice = [id for id, count in times.items() if count > 1]
    short = [step for step, ids in history.items() if len(ids) != SAMPLES]
    steps = [int(row["step"]) for row in rows]
    missing = sorted(set(range(1, max(steps) + 1)) - set(steps))
    print(f"{len(rows)} updates, exit code {code}, {sums}; trained {sum(times.values())} samples, ", end="")
    print(f"twice: {len(twice)}, updates short of {SAMPLES}: {len(short)}, without a row: {len(missing)}")
    good = (
        code == 75
        and not twice
        and not short
        and not missing
        and sums["asked"] == sums["received"] + sums["abandoned"]
        and sums["received"] == sum(times.values())
    )
    return 0 if good else 1


if __name__ == "__main__":
    main()
