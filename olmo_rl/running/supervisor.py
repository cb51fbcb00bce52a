"""The processes that we start ourselves, one a rank of this node, and their reports.

Supervisor and child share one socket: the job goes down, then where to meet; the end of the work or the cause
of a failure comes up, and each side learns from the socket's end that the other is gone. A rank that ends
without a word has failed, whatever its exit code. The supervisor serves the rendezvous store, so no port is
ever guessed; as under torchrun, a rank joins the process group once. Whatever happens to one rank, all of
them end within seconds, and the first cause is what the caller gets.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import FrameType, TracebackType

from olmo_rl.config import Config
from olmo_rl.run_directory import EXIT_INTERRUPTED
from olmo_rl.running.heartbeat import Watcher, beating, interval_of, job_of
from olmo_rl.running.rank_process import (
    Entry,
    Named,
    call,
    device_variables,
    end_with_parent,
    handled_signals,
    identity_of,
    imported,
    leave_process_group,
    leave_terminal,
    print_line,
    rendezvous,
    threads_per_rank,
)
from olmo_rl.types import Interrupted, RankFailed, Refusal

_PATIENCE_SECONDS = 30.0  # for ranks that are still saving when the first has ended of an interruption
_TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.2  # bound on noticing a death whose socket lives on in a grandchild
# Python would turn Ctrl-C into an exception anywhere, also in the middle of an import.
_CHILD = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "from olmo_rl.running.supervisor import child_main; child_main()"
)


@dataclass(slots=True, eq=False)
class _Child:
    """A rank that we started, in a process group of its own: Ctrl-C reaches it through us alone."""

    rank: int
    process: subprocess.Popen[bytes]
    socket: Connection

    def send(self, message: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # already dead: `ended` finds out why
            self.socket.send(message)

    def ended(self, *, readable: bool) -> tuple[bool, _Failure | None]:
        """Whether the rank ended, or reported why it is about to; and the failure, if it is one."""
        if not readable and self.process.poll() is None:
            return False, None
        try:
            report: _Report | None = self.socket.recv() if self.socket.poll() else None
        except (EOFError, OSError):
            report = None
        if report is not None and report.cause is not None:
            if isinstance(report.cause, Refusal):
                return True, _Failure(report.cause, order=(1, report.when))
            failure = RankFailed(f"rank {self.rank} failed:\n{report.cause}")
            return True, _Failure(failure, order=(2, report.when))
        code = self.process.wait()
        if code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            message = f"rank {self.rank} was killed by {signal.Signals(-code).name}{hint}"
            return True, _Failure(RankFailed(message, signum=-code), order=(0, 0.0))
        if code:
            return True, _Failure(SystemExit(code), order=(2, 0.0))
        if report is None:
            message = f"rank {self.rank} ended with exit code 0 before its work was done"
            return True, _Failure(RankFailed(message), order=(2, 0.0))
        return True, None


@dataclass(frozen=True, slots=True)
class _Report:
    """A rank's last word: why it failed (a traceback, or a Refusal), None for done; and when."""

    cause: Refusal | str | None
    when: float  # time.monotonic(), one clock for all processes of a machine


@dataclass(frozen=True, slots=True)
class _Failure:
    """What ended the job, and its order among failures seen together: a killed rank, then a refusal explains
    the others' broken connections; of the rest the earliest does.
    """

    error: Exception | SystemExit
    order: tuple[int, float]


def supervise(entry: Entry | Named, config: Config) -> None:
    """Start the ranks of this node, wait for them, raise the first failure. None outlives this call."""
    assert isinstance(entry, Named) or entry.__module__ != "__main__", "children import the entry by name"
    world_size = config.trainer.devices
    children: list[_Child] = []
    patience = 0.0
    with _forwarded_signals(children) as received, ExitStack() as meeting:
        try:
            for rank in range(world_size):
                children.append(_start(rank, config=config))
                children[-1].send((entry, config))
            if received:  # before there was a rank to pass it on to
                raise Interrupted(128 + received[0])
            variables = meeting.enter_context(rendezvous(world_size=world_size))  # while the ranks import
            for child in children:
                child.send(variables)
            watcher = Watcher(
                config.run_dir,
                ranks=range(world_size),
                job=job_of({**os.environ, **variables}),
                interval=interval_of(world_size),
            )
            meeting.callback(watcher.close)  # once no rank is left
            failure = _first_failure(children, watcher)
            if received or (isinstance(failure, SystemExit) and failure.code == EXIT_INTERRUPTED):
                patience = _PATIENCE_SECONDS
        finally:
            _end(children, patience=patience)
    if failure is not None:
        raise _outcome(failure, received)


def _outcome(failure: Exception | SystemExit, received: Sequence[int]) -> Exception | SystemExit:
    """What the user sees: ranks that ended of a signal sent to us end this process as that signal would."""
    if received.count(signal.SIGINT) > 1:
        return Interrupted(128 + signal.SIGINT)
    ended_by_signal = isinstance(failure, SystemExit) or getattr(failure, "signum", None) in received
    resumable = isinstance(failure, SystemExit) and failure.code == EXIT_INTERRUPTED
    return Interrupted(128 + received[0]) if received and ended_by_signal and not resumable else failure


def _start(rank: int, *, config: Config) -> _Child:
    ours, theirs = Pipe()
    world_size = config.trainer.devices
    threads = str(threads_per_rank(world_size))
    search_path = os.pathsep.join(path for path in sys.path if path)  # so that it imports what we can import
    identity = identity_of(rank, world_size=world_size)
    environ = {"OMP_NUM_THREADS": threads, **os.environ, **identity, "PYTHONPATH": search_path}
    environ |= device_variables(os.environ, config=config)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(theirs.fileno()), str(os.getpid())],
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
        leave_terminal(signum)
        at_once = received.count(signal.SIGINT) > 1
        if at_once:
            print_line("a second Ctrl-C: ended at once, updates since the last checkpoint are lost")
        else:
            name = signal.Signals(signum).name
            print_line(
                f"{name}: the ranks save and end; a second Ctrl-C ends them at once, and loses updates"
            )
        for child in children:
            child.process.send_signal(signal.SIGKILL if at_once else signum)

    if threading.current_thread() is not threading.main_thread():
        yield received  # Python hands signals to the main thread only
        return
    before = {signum: signal.signal(signum, forward) for signum in handled_signals()}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _first_failure(children: Sequence[_Child], watcher: Watcher) -> Exception | SystemExit | None:
    """Wait until one rank failed or all ended well. Ranks that do not move are named meanwhile, and beside a
    failure that they may have caused.
    """
    running = list(children)
    while running:
        ready = wait([child.socket for child in running], timeout=_POLL_SECONDS)
        outcomes = [(child, *child.ended(readable=child.socket in ready)) for child in running]
        failures = [failure for _, _, failure in outcomes if failure is not None]
        watcher.look(print_line)
        if failures:
            error = min(failures, key=lambda failure: failure.order).error
            if isinstance(error, RankFailed) and (lines := watcher.lines()):
                return RankFailed("\n".join([*lines, str(error)]), signum=error.signum)
            return error
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
    """What a started rank runs: take the job, report why it failed, end when the supervisor does."""
    end_with_parent(int(sys.argv[2]))
    supervisor = Connection(int(sys.argv[1]))

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cause = error if isinstance(error, Refusal) else "".join(traceback.format_exception(error))
        supervisor.send(_Report(cause, time.monotonic()))

    sys.excepthook = report  # the interpreter then ends this process as it always does
    entry, config = supervisor.recv()
    entry = imported(entry)  # takes seconds, in which the supervisor prepares the meeting
    os.environ.update(supervisor.recv())
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    with beating(config.run_dir, environ=os.environ, watches=False):
        call(entry, config)
    leave_process_group()
    supervisor.send(_Report(None, time.monotonic()))


def _end_with(supervisor: Connection) -> None:
    """The supervisor sends nothing after the job: anything readable is the end of its process."""
    wait([supervisor])
    os._exit(1)
