"""Does a run that is struck anywhere lose anything? `python -m benchmarks.check_strikes --seed 1`

Small runs of four kinds (GRPO with a warm start, supervised, rollouts, GRPO on four ranks with the planner)
are struck, 40 times by default: a signal to a rank, to the launcher or to all at a file operation anywhere in
the run; a full disk from some operation on; a file of the run directory cut, or a bit of a checkpoint or of
the cache flipped; a second start beside the first. Then the same command runs again with `ckpt_path=auto`.
It must end with the weights, the optimizer's state and the rows of metrics.csv (or the collections) of a run
that was left alone, bit for bit, or be refused by name with nothing lost: the complete checkpoints are there.

One process imports everything and forks each run; ranks are started as torchrun starts them. What strikes is
an event of the interpreter (`sys.addaudithook`): this file is opened, that one renamed. Ends with 1 where a
strike ends otherwise.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

BOUND_SECONDS = 300.0  # for a run that must end; it takes seconds on a quiet machine
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ENVIRONMENT["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # what forks has one thread
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
EQUAL_COLUMNS = ("step", "loss/total", "grad/norm", "reward/mean", "optim/lr", "eval/accuracy")
UPDATES = 4
SHARED = (
    "model=moe_tiny",
    "model.dim=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=8",
    "model.expert_hidden=8",
    "model.num_experts=4",
    "model.max_seq_len=32",
    "task=addition",
    "packing=consecutive",
    "packing.max_tokens=64",
    "batch.samples_per_step=8",
    "rollouts.group_size=4",
    "rollouts.max_new_tokens=4",
    "task.eval_problems=4",
    "task.eval_interval=2",
    f"trainer.max_steps={UPDATES}",
    "callbacks=quiet",
    "callbacks.checkpoint_interval=1",
)
WARM = ("warm_start.steps=2", "warm_start.samples_per_step=8")
PLANNED = ("trainer.devices=4", "strategy.ep_degree=2", "balance=anneal", "balance.seconds=inf")
KINDS: dict[str, tuple[str, ...]] = {
    "train": (*SHARED, *WARM, "batch.steps_per_collection=2"),
    "sft": ("recipe=sft", *SHARED),
    "rollout": ("recipe=rollout", *SHARED, *WARM, "rollouts.collections=3"),
    "planner": (*SHARED, *PLANNED, "balance.proposals=200"),
}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
STRIKES = ("signal", "signal", "signal", "signal", "full disk", "torn", "flipped", "twice")


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What happens to one run. `operation`: before which file operation of `rank`, counted from 1; `whom`:
    rank, launcher or all; `name`: of the signal.
    """

    kind: str
    how: str
    operation: int = 0
    rank: int = 0
    whom: str = "rank"
    name: str = "SIGKILL"
    draw: float = 0.0

    def __str__(self) -> str:
        if self.how == "signal":
            whom = f"rank {self.rank}" if self.whom == "rank" else self.whom
            return (
                f"{self.kind}: {self.name} to {whom} at file operation {self.operation} of rank {self.rank}"
            )
        if self.how == "full disk":
            return f"{self.kind}: disk full from file operation {self.operation} of rank {self.rank}"
        if self.how == "twice":
            return f"{self.kind}: started again at file operation {self.operation}"
        return f"{self.kind}: a {self.how} file after SIGKILL at file operation {self.operation}"


def main() -> None:
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.check_strikes", *sys.argv[1:]])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="of the strikes; fresh where missing")
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    console, place = Console(), Path(tempfile.mkdtemp(prefix="check_strikes-"))
    console.print(f"seed {seed}, {arguments.rounds} strikes", soft_wrap=True)
    passed = strike_runs(
        place, rounds=arguments.rounds, seed=seed, kinds=arguments.kinds.split(","), report=console.print
    )
    console.print(f"{passed} of {arguments.rounds} lost nothing, seed {seed}")
    if passed < arguments.rounds:
        console.print(f"what the runs left is in {place}", soft_wrap=True)
        sys.exit(1)
    shutil.rmtree(place)


def strike_runs(
    place: Path, *, rounds: int, seed: int, kinds: Sequence[str], report: Callable[[str], object]
) -> int:
    """Run every kind straight through, then strike; the number of strikes that lost nothing."""
    import_everything()
    straight = {kind: Runs(place / f"straight-{kind}", kind=kind) for kind in kinds}
    counts: dict[str, list[int]] = {}
    for kind, run in straight.items():
        began = time.monotonic()
        code = run.start(counting=True)
        assert code == 0, f"{kind} straight through ended with {code}: {run.log}"
        counts[kind] = [int(path.read_text()) for path in sorted(run.place.glob("operations*"))]
        told = ", ".join(map(str, counts[kind]))
        report(f"{kind}: {told} file operations of the ranks, {time.monotonic() - began:.1f} s")
    passed = 0
    for number, strike in enumerate(strikes(rounds, seed=seed, kinds=kinds, counts=counts), start=1):
        run = Runs(place / f"round{number}", kind=strike.kind)
        ended, fault = struck(run, strike, straight=straight[strike.kind])
        passed += fault is None
        report(f"{number:>3}  {strike} | {ended} | {fault or 'nothing lost'}")
        if fault is None:
            shutil.rmtree(run.place)
    return passed


def strikes(rounds: int, *, seed: int, kinds: Sequence[str], counts: dict[str, list[int]]) -> list[Strike]:
    pick, found = random.Random(seed), []
    for number in range(rounds):
        kind = kinds[number % len(kinds)]
        ranks, how = len(counts[kind]), pick.choice(STRIKES)
        rank = pick.randrange(ranks) if how == "signal" else 0
        found.append(
            Strike(
                kind=kind,
                how=how,
                operation=pick.randint(1, counts[kind][rank]),
                rank=rank,
                whom=pick.choice(("rank", "launcher", "all")) if ranks > 1 else "rank",
                name=pick.choice(SIGNALS),
                draw=pick.random(),
            )
        )
    return found


def struck(run: Runs, strike: Strike, *, straight: Runs) -> tuple[str, str | None]:
    """How the struck run and those after it ended, and what was lost; None: nothing."""
    codes = [run.start(strike=strike)]
    if not (run.place / "struck").is_file():
        return text_of(codes), f"the strike never came: {run.log}"
    if strike.how in ("torn", "flipped"):
        damage(run, strike)
    before = {path.name for path in whole(run)}
    for _ in range(3):
        if codes[-1] == 0 and len(codes) > 1:
            break
        codes.append(run.start(resume=True))
        lost = {name for name in before if step(name) > newest(run)}
        if lost:
            return text_of(codes), f"{sorted(lost)} are gone"
    if codes[-1] == 0:
        return text_of(codes), run.difference(straight)
    refused = codes[-1] == 2 and "refused" in run.log.read_text()
    if refused and strike.how in ("torn", "flipped") and {path.name for path in whole(run)} == before:
        return text_of(codes), None
    return text_of(codes), f"ended with {codes[-1]}: {run.log}"


def whole(run: Runs) -> list[Path]:
    from olmo_rl.run_directory import checkpoint_fault, named_checkpoints

    return [p for p in named_checkpoints(run.run_dir) if checkpoint_fault(p, contents=True) is None]


def step(name: str) -> int:
    return int(name.rpartition("-")[2])


def newest(run: Runs) -> int:
    return max((step(path.name) for path in whole(run)), default=-1)


def text_of(codes: Sequence[int]) -> str:
    return " then ".join(map(str, codes))


def damage(run: Runs, strike: Strike) -> None:
    """Cut a file that the run wrote, or flip one bit of a checkpoint or of the cache."""
    pick = random.Random(strike.draw)
    files = [path for path in run.place.rglob("*") if path.is_file() and path.stat().st_size > 0]
    kept = [
        path for path in files if "run" in path.parts and ".hydra" not in path.parts or "cache" in path.parts
    ]
    if strike.how == "flipped":  # of what has checksums; a digit of a text has none
        kept = [path for path in kept if path.suffix in (".distcp", ".pt", ".safetensors", ".metadata")]
    if not kept:
        return
    path = pick.choice(sorted(kept))
    data = bytearray(path.read_bytes())
    if strike.how == "torn":
        del data[pick.randrange(len(data)) :]
    else:
        data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    path.write_bytes(bytes(data))
    with run.log.open("a") as log:
        log.write(f"{strike.how}: {path}\n")


@dataclass(frozen=True)
class Runs:
    """The runs of one run directory, one after another."""

    place: Path
    kind: str

    @property
    def run_dir(self) -> Path:
        return self.place / "run"

    @property
    def log(self) -> Path:
        return self.place / "log"

    def start(self, *, strike: Strike | None = None, resume: bool = False, counting: bool = False) -> int:
        """Start all ranks and wait; the exit code of the first rank, or of the signal that ended it."""
        from olmo_rl.library import compose

        self.place.mkdir(exist_ok=True)
        overrides = [*KINDS[self.kind], f"cache_dir={self.place / 'cache'}"]
        config = compose([*overrides, "ckpt_path=auto"] if resume else overrides, run_dir=self.run_dir)
        world = config.trainer.devices
        launcher = os.fork()
        if launcher == 0:
            os._exit(self._launch(config, world=world, strike=strike, counting=counting))
        return ended(launcher)

    def _launch(self, config: Any, *, world: int, strike: Strike | None, counting: bool) -> int:
        """What torchrun does: start the ranks, pass signals on, end all when one has failed."""
        os.setpgid(0, 0)
        for number in (1, 2):
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        ranks: list[int] = []

        def forward(number: int, frame: object) -> None:
            for rank in ranks:
                os.kill(rank, number)

        for name in SIGNALS[1:]:
            signal.signal(signal.Signals[name], forward)
        for rank in range(world):
            child = os.fork()
            if child == 0:
                os._exit(
                    self._rank(config, rank=rank, world=world, port=port, strike=strike, counting=counting)
                )
            ranks.append(child)
        codes: dict[int, int] = {}
        while len(codes) < world:
            pid, status = os.wait()
            if pid not in ranks:
                continue
            codes[ranks.index(pid)] = os.waitstatus_to_exitcode(status)
            if os.waitstatus_to_exitcode(status) not in (0, 75):
                deadline = threading.Timer(20.0, end_all, args=(ranks,))
                deadline.daemon = True
                deadline.start()
        return max(codes.values(), key=lambda code: (code != 0, code == 2, abs(code))) & 0xFF

    def _rank(
        self, config: Any, *, rank: int, world: int, port: str, strike: Strike | None, counting: bool
    ) -> int:
        for name in SIGNALS[1:]:
            signal.signal(signal.Signals[name], signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if world > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
        counter = Counter(self, strike=strike, rank=rank)
        sys.addaudithook(counter.on_event)
        try:
            code = run_once(config)
        except BaseException:
            traceback.print_exc()
            code = 1
        if counting:
            (self.place / f"operations{rank}").write_text(str(counter.seen))
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def difference(self, straight: Runs) -> str | None:
        """What differs from the straight run; None: nothing."""
        if self.kind == "rollout":
            return different(collections_of(self.run_dir), collections_of(straight.run_dir))
        from benchmarks.check_resume import contents
        from olmo_rl.run_directory import checkpoint_path

        ours, theirs = (checkpoint_path(run.run_dir, step=UPDATES) for run in (self, straight))
        if ours not in whole(self):
            return f"no whole {ours.name}"
        return different(contents(ours), contents(theirs)) or different(
            rows_of(self.run_dir), rows_of(straight.run_dir)
        )


class Counter:
    """Counts file operations in the run directory and the cache, and strikes at one of them."""

    def __init__(self, run: Runs, *, strike: Strike | None, rank: int) -> None:
        self.seen = 0
        self._run = run
        self._strike = strike if strike is not None and strike.rank == rank else None
        self._places = (str(run.run_dir), str(run.place / "cache"))
        self._launcher = os.getppid()

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (
            event not in OPERATIONS
            or not arguments
            or not isinstance(arguments[0], str | bytes | os.PathLike)
        ):
            return
        if not os.fsdecode(arguments[0]).startswith(self._places):
            return
        writes = event != "open" or (
            isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not writes:
            return
        self.seen += 1
        strike = self._strike
        if strike is None or self.seen < strike.operation:
            return
        if strike.how == "full disk":
            if event in ("open", "os.mkdir"):
                self._note()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif self.seen == strike.operation:
            self._hit(strike)

    def _note(self) -> None:
        descriptor = os.open(self._run.place / "struck", os.O_WRONLY | os.O_CREAT, 0o644)
        os.close(descriptor)

    def _hit(self, strike: Strike) -> None:
        self._note()
        if strike.how == "twice":
            self._strike = None
            again = os.fork()
            if again == 0:
                from olmo_rl.library import compose

                config = compose([*KINDS[self._run.kind], f"cache_dir={self._run.place / 'cache'}"])
                os._exit(run_once(replace(config, run_dir=str(self._run.run_dir), overwrite=True)))
            code = ended(again)
            assert code == 2, f"the second start ended with {code}"
            return
        number = signal.Signals[strike.name] if strike.how == "signal" else signal.SIGKILL
        whom = strike.whom if strike.how == "signal" else "all"
        if whom == "all":
            os.killpg(os.getpgid(0), number)
        else:
            os.kill(self._launcher if whom == "launcher" else os.getpid(), number)


def run_once(config: Any) -> int:
    """A command in this process: its exit code."""
    from olmo_rl import cli
    from olmo_rl.library import run

    try:
        return cli.attempt(lambda: run(config), name="")
    except SystemExit as end:
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def end_all(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def ended(pid: int) -> int:
    """The exit code of a child; one that does not end is killed with its process group."""
    deadline = time.monotonic() + BOUND_SECONDS
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGALRM
        time.sleep(0.01)


def import_everything() -> None:
    """Import what runs import, and load the planner's kernels, before anything forks."""
    import lightning.pytorch  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch.distributed.checkpoint

    import recipes.rollout
    import recipes.sft
    import recipes.train  # noqa: F401
    from olmo_rl.library import compose
    from olmo_rl.planning.planners import compile_kernels
    from olmo_rl.types import Topology

    torch.set_num_threads(1)
    config = compose(KINDS["planner"])
    compile_kernels(config.balance, layout=config.model.expert_layout, topology=Topology(4, 2))


def collections_of(run_dir: Path) -> dict[str, Any]:
    """Every collection by name, as a hash of its file."""
    files = sorted((run_dir / "rollouts").glob("*.parquet"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows_of(run_dir: Path) -> dict[str, Any]:
    from olmo_rl.running.metrics_csv import read_metrics

    rows = read_metrics(run_dir / "metrics.csv")
    return {name: [row.get(name) for row in rows] for name in EQUAL_COLUMNS}


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first difference; None where all is equal."""
    if ours.keys() != theirs.keys():
        return f"other names: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    names = [name for name in ours if ours[name] != theirs[name]]
    if not names:
        return None
    values = json.dumps([str(ours[names[0]])[:80], str(theirs[names[0]])[:80]])
    return f"{len(names)} of {len(ours)} differ, {names[0]} first: {values}"


if __name__ == "__main__":
    main()
