"""Runs that check_strikes strikes: forked from one process, with ranks as torchrun starts them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


def whole(run: Runs) -> list[Path]:
    from olmo_rl.run_directory import checkpoint_fault, named_checkpoints

    return [p for p in named_checkpoints(run.run_dir) if checkpoint_fault(p, contents=True) is None]


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
