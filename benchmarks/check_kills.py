"""Does killing engines and trainer cost an answer, or train one twice? `python -m benchmarks.check_kills`

Two `recipe=serve` and one training run, one collection ahead or with `--continuous`, with a checkpoint after
every update. Ten times, after a random time of work, one engine, the trainer, or both are killed with SIGKILL
and started again, the trainer with `ckpt_path=last`. At the end the contract log must show one history: every
update trained its full number of samples, no sample stands in two updates, no row of metrics.csv is missing,
and requests add up: collections have asked = received + abandoned in every row; continuous generation has
asked = received + abandoned + cancelled + under way over all rows and the last checkpoint, every answer that
was received trained, queued or counted as wasted, and every group that a resumed checkpoint had finished
trained or queued. Prints one row a kill, and ends with 1 where this does not hold.
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
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from olmo_rl.collections.group_queue import Ticket
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
    parser.add_argument("--continuous", action="store_true")
    options = parser.parse_args()
    mode = (
        ["rollouts.mode=continuous", "rollouts.max_lag=2"] if options.continuous else ["rollouts.max_lag=1"]
    )
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
            *mode,
            "callbacks=quiet",
            "callbacks.checkpoint_interval=1",
            "trainer.max_steps=100000",
        )
        try:
            code, finished = _kill(
                dice, kills=options.kills, run=run, trainer=trainer, engines=engines, urls=urls
            )
            failed = (
                _judge_continuous(run, code=code, finished=finished)
                if options.continuous
                else _judge(run, code=code)
            )
        finally:
            for program in (trainer, *engines):
                program.kill()
    sys.exit(failed)


def _kill(
    dice: random.Random, *, kills: int, run: Path, trainer: Program, engines: list[Program], urls: list[str]
) -> tuple[int, set[str]]:
    """The exit code after the kills and a SIGTERM, and the groups that resumed checkpoints had finished."""
    finished: set[str] = set()
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
            finished |= {name for path in saved[-1:] for name in finished_groups(state_of(path))}
            trainer.start("ckpt_path=last" if saved else "overwrite=true")
        at = updates(run)
        wait_for_updates(run, at_least=at + 2, trainer=trainer)
        table.add_row(str(number + 1), target, str(before), start, str(updates(run)))
    assert trainer.process is not None
    trainer.process.send_signal(signal.SIGTERM)
    code = trainer.process.wait(BOUND_SECONDS)
    Console().print(table)
    return code, finished


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The state of the data side in a checkpoint."""
    return dict(torch.load(checkpoint / "meta.pt", weights_only=True)["RolloutDataModule"])


def finished_groups(state: dict[str, Any]) -> list[str]:
    """Names of the groups in its queue; none without one."""
    queue = state.get("queue", {"queue": {"finished": []}})
    return [Ticket.of_state(group["ticket"]).name for group in queue["queue"]["finished"]]


def _judge_continuous(run: Path, *, code: int, finished: set[str]) -> int:
    rows, history = read_metrics(run / "metrics.csv"), trained(run)
    state = state_of(complete_checkpoints(str(run))[-1])
    queue, ledger = state["queue"]["queue"], state["queue"]["ledger"]
    names = ("asked", "received", "retried", "abandoned", "cancelled", "wasted")
    sums = {name: sum(int(row[f"rollouts/{name}"]) for row in rows) for name in names}
    sums = {name: count + int(ledger["counts"].get(name, 0)) for name, count in sums.items()}
    times = Counter(id for ids in history.values() for id in ids)
    queued = sum(len(group["samples"]) for part in ("finished", "under_way") for group in queue[part])
    pending = state["pending"]
    queued += 0 if pending is None else sum(len(ids) for ids in pending["ids"])
    groups = {id.rpartition("-")[0] for id in times} | set(finished_groups(state))
    steps = [int(row["step"]) for row in rows]
    tests = {
        "exit code 75": code == 75,
        "no sample trained twice": max(times.values()) == 1,
        f"{SAMPLES} samples in every update": all(len(ids) == SAMPLES for ids in history.values()),
        "a row of every update": sorted(steps) == list(range(1, max(steps) + 1)),
        "asked = received + abandoned + cancelled + under way": sums["asked"]
        == sums["received"] + sums["abandoned"] + sums["cancelled"] + ledger["open"],
        "received = trained + queued + wasted": sums["received"]
        == sum(times.values()) + queued + sums["wasted"],
        "every finished group trained or queued": finished <= groups,
        "no sample older than the bound": max(row["rollouts/max_lag"] for row in rows) <= 2,
    }
    print(
        f"{len(rows)} updates, {sums}, under way {ledger['open']}; trained {sum(times.values())} samples, "
        f"queued {queued}; {len(finished)} groups were finished in resumed checkpoints"
    )
    for text, holds in tests.items():
        print(f"{'ok' if holds else 'NOT'}: {text}")
    return 0 if all(tests.values()) else 1


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
