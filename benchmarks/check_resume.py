"""Does a run that was interrupted anywhere end like one that was not? `python -m benchmarks.check_resume`

One run of two ranks goes straight through. Others of the same configuration are interrupted: killed inside a
save or inside the optimizer step, and signalled or killed at random moments. Each is resumed with
`ckpt_path=last`, or started again where no checkpoint was complete yet, and its last checkpoint must hold the
weights and the Adam state of the straight run, bit for bit. Runs are processes of their own on the training
path that users have. A kill inside a save comes from the killed rank itself, on an event of the interpreter
(`sys.addaudithook`: this file is opened, that one renamed) or of the optimizer (`sys.setprofile`), so that it
strikes at the moment it names. Ends with 1 where a run ends otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from olmo_rl.run_directory import checkpoint_path, complete_checkpoints

if TYPE_CHECKING:
    from olmo_rl.config import Config

UPDATES = 8
KEEP = 2
BOUND_SECONDS = 600.0  # for a process that must end; it takes seconds on a quiet machine
ONE = "from benchmarks.check_resume import run_once; run_once()"
# What rank 0 alone does, and what every rank does, in the order of a save.
OLD_ONES_GO = "old ones go"
OF_RANK_0 = (
    "before the metadata",
    "before the manifest",
    "before the rename",
    "after the rename",
    OLD_ONES_GO,
)
OF_ANY_RANK = ("before the shards", "a shard is opened", "in a shard")
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
EQUAL_COLUMNS = ("step", "loss/total", "grad/norm", "reward/mean", "optim/lr")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a run is interrupted and how.

    `how`: save or step (a rank kills itself inside one), or the signal that is sent. `number` counts saves,
    or updates; `where`: the point of a save; `rank`: -1 stands for all processes, `event`: calls into the
    optimizer step. `delay`: seconds behind the point, or behind the beginning of update `number`, 0 = of the
    run.
    """

    how: str
    number: int = 0
    where: str = ""
    rank: int = 0
    event: int = 0
    delay: float = 0.0

    def __str__(self) -> str:
        whom = "all processes" if self.rank < 0 else f"rank {self.rank}"
        if self.how == "save":
            return f"kill -9 of {whom} in save {self.number}: {self.where}"
        if self.how == "step":
            return f"kill -9 of {whom} in optimizer step {self.number}, call {self.event}"
        what = f"kill -9 of {whom}" if self.how == "SIGKILL" else self.how
        after = f"update {self.number} began" if self.number else "the start"
        return f"{what} {self.delay:.2f} s after {after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; fresh where missing")
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    console, place = Console(), Path(tempfile.mkdtemp(prefix="check_resume-"))
    console.print(f"seed {seed}, {arguments.rounds} rounds, {arguments.devices} ranks", soft_wrap=True)
    check = Check(place=place, devices=arguments.devices, random=random.Random(seed), console=console)
    equal = check.run(arguments.rounds)
    console.print(f"{equal}/{arguments.rounds} ended bit-equal, seed {seed}")
    if equal < arguments.rounds:
        console.print(f"what the runs left is in {place}", soft_wrap=True)
        sys.exit(1)
    shutil.rmtree(place)


@dataclass(kw_only=True)
class Check:
    """One straight run, then rounds against it."""

    place: Path
    devices: int
    random: random.Random
    console: Console
    launch_seconds: float = 0.0
    update_seconds: float = 0.0
    step_calls: list[int] = field(default_factory=list)
    saves: int = 0

    def run(self, rounds: int) -> int:
        """The number of rounds that ended like the straight run."""
        lines = [json.dumps({"prompt": f"{'ab' * (i % 4)}{i}?", "answer": str(i)}) for i in range(200)]
        (self.place / "problems.jsonl").write_text("\n".join(lines) + "\n")
        self._straight()
        table = Table(title="interrupted and resumed", title_justify="left")
        for heading in ("round", "interrupted by", "ended with", "went on from", "its end"):
            table.add_column(heading)
        equal = 0
        for number, moment in enumerate(self._moments(rounds), start=1):
            row = self._round(number, moment)
            equal += row[-1] == "equal"
            table.add_row(str(number), *row)
            self.console.print(f"{number:>3}  " + " | ".join(row), soft_wrap=True)
        self.console.print(table)
        return equal

    def _straight(self) -> None:
        began = time.monotonic()
        process = self._start("straight", moment=None)
        starts = []
        for update in range(1, UPDATES + 1):
            self._await(process, self._watch("straight") / f"update-{update}")
            starts.append(time.monotonic())
        code = ended(process)
        if code:
            raise SystemExit(f"the straight run ended with {code}: {self._log('straight')}")
        self.launch_seconds = starts[0] - began
        self.update_seconds = (starts[-1] - starts[0]) / (UPDATES - 1)
        counted = json.loads((self._watch("straight") / "counts0").read_text())
        self.step_calls, self.saves = counted["step_calls"], counted["saves"]
        self.console.print(
            f"straight: {UPDATES} updates, {self.saves} saves, the first update after "
            f"{self.launch_seconds:.1f} s, {self.update_seconds:.2f} s each"
        )

    def _moments(self, rounds: int) -> Iterator[Moment]:
        """Three of ten inside a save, three of twenty inside the optimizer step, the rest at random."""
        pick = self.random
        in_save, in_step = -(-3 * rounds // 10), -(-3 * rounds // 20)
        points = [*OF_RANK_0, *OF_ANY_RANK]
        pick.shuffle(points)
        hows = [*SIGNALS, "SIGKILL", "SIGKILL of all"]
        for number in range(rounds):
            if number < in_save:
                point = points[number % len(points)]
                rank = pick.choice([-1, *(range(self.devices) if point in OF_ANY_RANK else [0])])
                first = KEEP + 1 if point == OLD_ONES_GO else 1
                save = pick.randint(first, max(first, self.saves - 1))
                yield Moment(how="save", number=save, where=point, rank=rank, delay=pick.uniform(0, 0.01))
            elif number < in_save + in_step:
                update = pick.randint(1, UPDATES)
                call = pick.randint(1, self.step_calls[update - 1])
                yield Moment(how="step", number=update, event=call, rank=pick.choice(range(-1, self.devices)))
            else:
                how = hows[(number - in_save - in_step) % len(hows)]
                # The last of them strikes before the first update: while ranks import, join or load.
                update = 0 if number == rounds - 1 else pick.randint(1, UPDATES - 1)
                yield Moment(
                    how=how.split()[0],
                    number=update,
                    rank=pick.randrange(self.devices) if how == "SIGKILL" else -1,
                    delay=pick.uniform(0, self.update_seconds if update else self.launch_seconds),
                )

    def _round(self, number: int, moment: Moment) -> list[str]:
        name = f"round{number}"
        run_dir = self.place / name
        while (code := self._interrupted(name, moment)) == 0:
            if moment.how in ("save", "step") or moment.number <= 1:
                return [str(moment), str(code), "-", "the run was not interrupted"]
            moment = dataclasses.replace(moment, number=moment.number - 1)  # it came too late
        row = [str(moment), str(code)]
        found = complete_checkpoints(run_dir)
        again = self._start(name, moment=None, resume=bool(found))
        row.append(found[-1].name if found else "the beginning")
        if (code := ended(again)) != 0:
            return [*row, f"resuming ended with {code}: {self._log(name)}"]
        difference = self._difference(run_dir)
        if difference is None:
            shutil.rmtree(run_dir)
        return [*row, difference or "equal"]

    def _interrupted(self, name: str, moment: Moment) -> int:
        """Start a run, interrupt it, wait until all of it has ended; its exit code."""
        process = self._start(name, moment=moment)
        if moment.how not in ("save", "step"):
            if moment.number:
                self._await(process, self._watch(name) / f"update-{moment.number}")
            time.sleep(moment.delay)
            self._interrupt(process, moment, name=name)
        code = ended(process)
        self._await_end(name)
        return code

    def _interrupt(self, process: subprocess.Popen[bytes], moment: Moment, *, name: str) -> None:
        pids = [process.pid]
        if moment.how == "SIGKILL":
            ranks = [self._watch(name) / f"pid{rank}" for rank in range(self.devices)]
            rank_pids = [int(path.read_text()) for path in ranks if path.is_file()]
            pids = (
                [process.pid, *rank_pids]
                if moment.rank < 0 or not rank_pids
                else [rank_pids[moment.rank % len(rank_pids)]]
            )
        for pid in pids:
            try:
                os.kill(pid, signal.Signals[moment.how])
            except ProcessLookupError:
                continue  # it has just ended

    def _difference(self, run_dir: Path) -> str | None:
        ours, theirs = (checkpoint_path(path, step=UPDATES) for path in (run_dir, self.place / "straight"))
        if ours not in complete_checkpoints(run_dir):
            return f"no whole {ours.name}"
        return different(contents(ours), contents(theirs)) or different(
            rows_of(run_dir), rows_of(self.place / "straight")
        )

    def _start(self, name: str, *, moment: Moment | None, resume: bool = False) -> subprocess.Popen[bytes]:
        watch = self._watch(name)
        shutil.rmtree(watch, ignore_errors=True)
        watch.mkdir()
        overrides = (*overrides_of(self.place, devices=self.devices), f"run_name={name}")
        job = {
            "overrides": [*overrides, "ckpt_path=last" if resume else "overwrite=true"],
            "run_dir": str(self.place / name),
            "watch": str(watch),
            "moment": None if moment is None else dataclasses.asdict(moment),
        }
        with self._log(name).open("a") as log:
            command, nothing = [sys.executable, "-c", ONE, json.dumps(job)], subprocess.DEVNULL
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=nothing, process_group=0)

    def _await(self, process: subprocess.Popen[bytes], path: Path) -> None:
        deadline = time.monotonic() + BOUND_SECONDS
        while not path.is_file() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)

    def _await_end(self, name: str) -> None:
        """No rank may be left when the run goes on: those of a killed supervisor end by themselves."""
        deadline = time.monotonic() + BOUND_SECONDS
        for path in self._watch(name).glob("pid*"):
            while Path(f"/proc/{path.read_text()}").exists():
                if time.monotonic() > deadline:
                    raise SystemExit(f"rank {path.name} of {name} outlived its supervisor")
                time.sleep(0.02)

    def _watch(self, name: str) -> Path:
        return self.place / f"{name}.watch"

    def _log(self, name: str) -> Path:
        return self.place / f"{name}.log"


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. A process that does not end is killed, and its ranks end with it."""
    try:
        return process.wait(timeout=BOUND_SECONDS)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"a run did not end within {BOUND_SECONDS:.0f} s") from None
    finally:
        process.kill()


def overrides_of(place: Path, *, devices: int) -> Sequence[str]:
    """A small run of everything: generation with routes, evaluation, several updates a collection."""
    return (
        "+experiment=packed_moe",
        "model=hybrid_tiny",
        f"trainer.devices={devices}",
        f"strategy.ep_degree={min(2, devices)}",
        f"trainer.max_steps={UPDATES}",
        "warm_start.steps=0",
        "batch.samples_per_step=16",
        "batch.steps_per_collection=2",
        "rollouts.group_size=4",
        "rollouts.max_new_tokens=6",
        "task=jsonl",
        f"task.path={place / 'problems.jsonl'}",
        "+task.verifier._target_=benchmarks.check_resume.even_length",
        "task.eval_problems=8",
        "task.eval_interval=2",
        "callbacks=quiet",
        "callbacks.checkpoint_interval=1",
        f"callbacks.keep_checkpoints={KEEP}",
    )


def even_length(response: str, answer: str) -> float:
    """A verifier that an untrained policy satisfies now and then."""
    return float(len(response) % 2 == 0)


def contents(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint by name, without a process group."""
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from olmo_rl.policy.stored_checkpoint import load_tensors, read_metadata

    stored = read_metadata(checkpoint, key="checkpoint").state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load_tensors(tensors, checkpoint, key="checkpoint", alone=True)
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def rows_of(run_dir: Path) -> dict[str, Any]:
    from olmo_rl.running.metrics_csv import read_metrics

    rows = read_metrics(run_dir / "metrics.csv")
    return {name: [row.get(name) for row in rows] for name in EQUAL_COLUMNS}


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first difference; None where all is equal."""
    if ours.keys() != theirs.keys():
        return f"other names: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    names = [name for name in ours if ours[name] != theirs[name]]
    return f"{len(names)} of {len(ours)} differ, {names[0]} first" if names else None


def run_once() -> None:
    """A process of its own: compose the run that the argument describes, then start its ranks."""
    from olmo_rl.library import compose
    from olmo_rl.replaced_runs import recover, replaced
    from olmo_rl.running.ranks import run_ranks

    job = json.loads(sys.argv[1])
    config = compose(job["overrides"], run_dir=job["run_dir"])
    recover(config)
    moment = None if job["moment"] is None else Moment(**job["moment"])
    with replaced(config):
        run_ranks(functools.partial(watched, moment=moment, watch=job["watch"]), config)


def watched(config: Config, *, moment: Moment | None, watch: str) -> None:
    """The work of every rank: training, watched by a callback that reports to the driver and may end it."""
    from benchmarks.resume_watch import Watch
    from recipes.train import train

    train(config, watchers=[Watch(moment, directory=Path(watch))])


if __name__ == "__main__":
    main()
