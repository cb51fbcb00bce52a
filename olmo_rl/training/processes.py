"""Ranks of one job: who this process is, and the processes that we start ourselves.

A launcher (torchrun, srun) names every rank in its environment: then this process is one rank and runs the
entry. Without a launcher one process is a world of its own, and several devices of one node become child
processes that this process supervises. Refused: a launcher whose world is not `trainer.devices` x
`trainer.num_nodes`, and several nodes without a launcher. Nothing here joins a process group: the entry does.

Supervisor and child share one socket: the job goes down, the cause of a failure comes up, and its end tells
either side that the other is gone. The supervisor serves the rendezvous store, so no port is ever guessed; as
under torchrun, a rank joins the process group once. Torch and Lightning are imported where they are used: a
process pays for what its part needs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from olmo_rl.config import Config
from olmo_rl.types import RankFailed, Refusal

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

Entry = Callable[[Config], None]

RESUMABLE = 75  # exit code: interrupted, checkpoint saved
_PATIENCE_SECONDS = 30.0  # for ranks that are still saving when the first has ended of an interruption
_TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.2  # bound on noticing a death whose socket lives on in a grandchild
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_CHILD = "from olmo_rl.training.processes import child_main; child_main()"


def run_ranks(entry: Entry, config: Config) -> None:
    """Run `entry(config)` on every rank of the job and return when all ended well.

    Raises what one process would raise: the Refusal of a rank, SystemExit with a rank's exit code (75 = can
    be resumed), SystemExit(128 + signal) where ranks ended of a signal sent to us, RankFailed for the rest.
    The first cause wins; the other ranks are ended. `entry` must be importable by name.
    """
    launched = launched_rank(os.environ, config=config)
    if launched is not None:
        _run_launched(entry, config, variables=launched)
    elif config.trainer.world_size == 1:
        _run_alone(entry, config)
    elif config.trainer.num_nodes == 1:
        _supervise(entry, config)
    else:
        raise Refusal(
            f"trainer.num_nodes={config.trainer.num_nodes} needs a launcher that starts the ranks of every "
            "node: use launch/slurm.sbatch or launch/torchrun.sh, or set trainer.num_nodes=1"
        )


def cluster_environment() -> ClusterEnvironment:
    """What Lightning asks who this process is.

    Every rank under `run_ranks` carries torchrun's variables, also one that srun started: Lightning's own
    SLURM class would save and requeue inside a signal handler.
    """
    from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

    return TorchElasticEnvironment() if "RANK" in os.environ else LightningEnvironment()


def launched_rank(environ: Mapping[str, str], *, config: Config) -> dict[str, str] | None:
    """torchrun's variables for the rank that a launcher made of this process; None where no launcher did.

    Raises Refusal where the launcher's world contradicts the configuration: ranks would wait for absent ones.
    """
    trainer = config.trainer
    ours = f"trainer.devices={trainer.devices} x trainer.num_nodes={trainer.num_nodes}"
    if "RANK" in environ and "WORLD_SIZE" in environ:
        missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise Refusal(
                f"RANK is set but not {', '.join(missing)}: start the ranks with launch/torchrun.sh"
            )
        local = environ.get("LOCAL_WORLD_SIZE", str(trainer.devices))
        if int(environ["WORLD_SIZE"]) != trainer.world_size or int(local) != trainer.devices:
            raise Refusal(
                f"the launcher started WORLD_SIZE={environ['WORLD_SIZE']} ranks, {local} of them here, but "
                f"{ours}: give the launcher and trainer.devices, trainer.num_nodes the same numbers"
            )
        return {}
    # A batch script and an interactive shell in an allocation carry SLURM's variables too, but are no ranks.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or "SLURM_PTY_PORT" in environ:
        return None
    tasks = int(environ["SLURM_NTASKS"])
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", str(trainer.devices))
    if tasks != trainer.world_size or not re.fullmatch(rf"{trainer.devices}(\(x\d+\))?", layout):
        per_node = environ.get("SLURM_NTASKS_PER_NODE", layout)
        raise Refusal(
            f"srun started SLURM_NTASKS={tasks} ranks (SLURM_NTASKS_PER_NODE={per_node}), but {ours}: "
            "give --ntasks-per-node and trainer.devices, --nodes and trainer.num_nodes the same numbers"
        )
    if trainer.num_nodes > 1 and "MASTER_ADDR" not in environ:
        raise Refusal("MASTER_ADDR is not set: start the ranks of several nodes with launch/slurm.sbatch")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(trainer.devices),
        "GROUP_RANK": environ.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": environ.get("MASTER_PORT", str(15000 + int(environ["SLURM_JOB_ID"]) % 10000)),
    }


def threads_per_rank(local_ranks: int) -> int:
    """The cores this process may use, shared out over the ranks of its node: more threads slow them all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_ranks)


def _run_launched(entry: Entry, config: Config, *, variables: Mapping[str, str]) -> None:
    with _environment(variables):
        if "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(threads_per_rank(config.trainer.devices))
        entry(config)
        _leave_process_group()


def _run_alone(entry: Entry, config: Config) -> None:
    with _rendezvous(world_size=1) as variables, _environment({**variables, **_identity(0, world_size=1)}):
        try:
            entry(config)
        finally:  # the next job of a sweep starts with no group, also after a refusal
            _leave_process_group()


def _leave_process_group() -> None:
    """Everything is saved by now: a group that ends before a save corrupts the checkpoint."""
    if "torch.distributed" not in sys.modules:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _identity(rank: int, *, world_size: int) -> dict[str, str]:
    """torchrun's variables for one rank of a world on this node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
    }


@contextmanager
def _rendezvous(*, world_size: int) -> Iterator[dict[str, str]]:
    """A store that this process serves on a port of the system's choice; every rank is a client of it."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a block; afterwards the environment is what it was, whatever the block did to it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@dataclass(slots=True, eq=False)
class _Child:
    """A rank that we started, in a process group of its own: Ctrl-C reaches it through us alone."""

    rank: int
    process: subprocess.Popen[bytes]
    socket: Connection

    def ended(self, *, readable: bool) -> tuple[bool, Exception | SystemExit | None]:
        """Whether the rank ended, or told why it is about to; and the failure, if it is one."""
        if not readable and self.process.poll() is None:
            return False, None
        try:
            report = self.socket.recv() if self.socket.poll() else None
        except (EOFError, OSError):
            report = None
        if isinstance(report, Refusal):
            return True, report
        if report is not None:
            return True, RankFailed(f"rank {self.rank} failed:\n{report}")
        code = self.process.wait()
        if code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            message = f"rank {self.rank} was killed by {signal.Signals(-code).name}{hint}"
            return True, RankFailed(message, signum=-code)
        return True, SystemExit(code) if code else None


def _supervise(entry: Entry, config: Config) -> None:
    """Start the ranks of this node, wait for them, raise the first failure. None outlives this call."""
    assert entry.__module__ != "__main__", "children import the entry by name"
    world_size = config.trainer.devices
    children: list[_Child] = []
    patience = 0.0
    with _rendezvous(world_size=world_size) as variables, _forwarded_signals(children) as received:
        try:
            for rank in range(world_size):
                identity = _identity(rank, world_size=world_size)
                children.append(_start(rank, variables={**variables, **identity}))
                with suppress(BrokenPipeError):  # already dead: _first_failure finds out why
                    children[-1].socket.send((entry, config))
            failure = _first_failure(children)
            if received or (isinstance(failure, SystemExit) and failure.code == RESUMABLE):
                patience = _PATIENCE_SECONDS
        finally:
            _end(children, patience=patience)
    if failure is not None:
        raise _outcome(failure, received)


def _outcome(failure: Exception | SystemExit, received: Sequence[int]) -> Exception | SystemExit:
    """What the user sees: ranks that ended of a signal sent to us end this process as that signal would."""
    ended_by_signal = isinstance(failure, SystemExit) or getattr(failure, "signum", None) in received
    resumable = isinstance(failure, SystemExit) and failure.code == RESUMABLE
    return SystemExit(128 + received[0]) if received and ended_by_signal and not resumable else failure


def _start(rank: int, *, variables: Mapping[str, str]) -> _Child:
    ours, theirs = Pipe()
    threads = threads_per_rank(int(variables["LOCAL_WORLD_SIZE"]))
    search_path = os.pathsep.join(path for path in sys.path if path)  # so that it imports what we can import
    environ = {"OMP_NUM_THREADS": str(threads), **os.environ, **variables, "PYTHONPATH": search_path}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(theirs.fileno())],
            env=environ,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    return _Child(rank, process, ours)


@contextmanager
def _forwarded_signals(children: Sequence[_Child]) -> Iterator[list[int]]:
    """Hand each signal that reaches us to every child, once; a second Ctrl-C kills. Yields the signals."""
    received: list[int] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        for child in children:
            child.process.send_signal(signal.SIGKILL if received.count(signal.SIGINT) > 1 else signum)

    if threading.current_thread() is not threading.main_thread():
        yield received  # Python hands signals to the main thread only
        return
    before = {signum: signal.signal(signum, forward) for signum in _FORWARDED}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _first_failure(children: Sequence[_Child]) -> Exception | SystemExit | None:
    """Wait until one rank failed or all ended well.

    Where several failed at once, a killed rank, then a refusal, explains the others' broken connections.
    """

    def severity(failure: Exception | SystemExit) -> int:
        killed = isinstance(failure, RankFailed) and failure.signum is not None
        return 0 if killed else 1 if isinstance(failure, Refusal) else 2

    running = list(children)
    while running:
        ready = wait([child.socket for child in running], timeout=_POLL_SECONDS)
        outcomes = [(child, *child.ended(readable=child.socket in ready)) for child in running]
        failures = [failure for _, _, failure in outcomes if failure is not None]
        if failures:
            return min(failures, key=severity)
        running = [child for child, ended, _ in outcomes if not ended]
    return None


def _end(children: Sequence[_Child], *, patience: float) -> None:
    """Leave no rank and no process of a rank behind: wait `patience` seconds, then SIGTERM, then SIGKILL."""
    _wait_for(children, seconds=patience)
    for child in children:
        child.process.terminate()
    _wait_for(children, seconds=_TERMINATE_SECONDS)
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
        child.socket.close()


def _wait_for(children: Sequence[_Child], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))


def child_main() -> None:
    """What a started rank runs: take the job, say why it failed, end when the supervisor does."""
    supervisor = Connection(int(sys.argv[1]))

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Refusal):
            supervisor.send(error)
        elif not isinstance(error, KeyboardInterrupt):
            supervisor.send("".join(traceback.format_exception(error)))

    sys.excepthook = report  # the interpreter then ends this process as it always does
    entry, config = supervisor.recv()
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    entry(config)
    _leave_process_group()


def _end_with(supervisor: Connection) -> None:
    """The supervisor says nothing after the job: whatever can be read is the end of its process."""
    wait([supervisor])
    os._exit(1)
