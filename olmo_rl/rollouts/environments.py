"""The environment process as rank 0 holds it: started, asked, watched, ended.

A thread reads its events. Whatever ends the process or the thread, or keeps its event loop from turning for
`stall_seconds`, is a Refusal that names it, in every call that waits and in every later one. Calls return
futures or have limits; none waits inside a collective. A supervisor between both ends every program that an
environment started, also where this process is killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from olmo_rl.environments.environment import GRACE_SECONDS, TOKEN_VARIABLE, Start, one_line
from olmo_rl.environments.process import MAX_FRAME_BYTES
from olmo_rl.types import Refusal

Record = dict[str, Any]
Episode = tuple[int, str, int]  # slot, side, number of the task
_SUPERVISOR = "olmo_rl.environments.supervisor"
_POLL = 1.0  # seconds between looks at the clock
_MARGIN_SECONDS = 60.0
_END_SECONDS = 5.0  # for the process to end by itself, and for its supervisor to end what it started


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What an environment has: tasks of both sides, and the names of its agents."""

    training: int
    held_out: int
    agents: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class _Batch:
    """Episodes that are asked for together; `ends`: when they must all have ended."""

    slots: tuple[int, ...]
    ends: float
    records: dict[int, Record]
    future: Future[list[Record]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A command with one answer; `late`: the reason to give where it does not come before `ends`."""

    ends: float
    late: str
    future: Future[Any]


class EnvironmentProcess:
    """The process of one environment. `stall_seconds`: how long its loop may stand still once it serves;
    `start_seconds`: how long it may take to load tasks, and then to serve.
    """

    def __init__(self, start: Start, *, token: str, start_seconds: float, stall_seconds: float) -> None:
        self._start = start
        self._start_seconds, self._stall_seconds = start_seconds, stall_seconds
        self._failure: Refusal | None = None
        self._lock = threading.Lock()
        self._batches: list[_Batch] = []
        self._calls: dict[str, _Call] = {}  # by the name of their answer
        self._serves = False
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        owned, life = os.pipe()
        self._life: int | None = life  # open as long as this process lives and has not ended the other one
        passed = [str(commands), str(events)]
        serve = [sys.executable, "-m", "olmo_rl.environments.process", *passed]
        self._process = subprocess.Popen(
            [sys.executable, "-m", _SUPERVISOR, str(owned), ",".join(passed), *serve],
            pass_fds=(commands, events, owned),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what environments print goes where their faults go
            env=_variables(token),
            start_new_session=True,
        )
        for descriptor in (commands, events, owned):
            os.close(descriptor)
        self.loaded: Future[Ready] = self._call(
            "loaded", seconds=start_seconds, late=self._slow_start, start=asdict(start)
        )
        self._thread = threading.Thread(target=self._read, name="environment", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def _slow_start(self) -> str:
        return (
            f"environment.start_seconds={self._start_seconds:g}: {self._name} was not ready in time: its log "
            "shows what it waited for"
        )

    @property
    def _name(self) -> str:
        return f"environment.taskset={self._start.taskset}"

    def serve(self, url: str) -> Future[Ready]:
        """Have it start what episodes share, tool servers among it; its model is behind `url`."""
        return self._call("serving", seconds=self._start_seconds, late=self._slow_start, serve=url)

    def demonstrate(self, tasks: Sequence[int], *, seconds: float) -> Future[list[Mapping[str, bytes]]]:
        """Rendered demonstrations of training tasks."""
        late = f"warm_start: {self._name} gave no demonstrations within {seconds:g} s"
        return self._call("demonstrations", seconds=seconds, late=late, demonstrate=list(tasks))

    def run(self, episodes: Sequence[Episode]) -> Future[list[Record]]:
        """The records of all these episodes in their order, or a Refusal once they can no longer come."""
        future: Future[list[Record]] = Future()
        slots = tuple(slot for slot, _, _ in episodes)
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            # Episodes begin in the order in which they were asked for: earlier batches come first.
            open_ones = sum(len(batch.slots) - len(batch.records) for batch in self._batches)
            ends = time.monotonic() + self._seconds(open_ones + len(slots))
            batch = _Batch(slots=slots, ends=ends, records={}, future=future)
            self._batches.append(batch)
        if episodes:
            self._send(run=[list(episode) for episode in episodes])
        self._complete(batch)
        return future

    def _seconds(self, episodes: int) -> float:
        """The longest that so many episodes take, `environment.concurrency` of them at once."""
        rounds = -(-episodes // self._start.concurrency)
        return rounds * (2 * self._start.timeout_seconds + GRACE_SECONDS) + _MARGIN_SECONDS

    def close(self) -> None:
        """End the process and whatever it started."""
        with suppress(OSError):
            os.close(self._commands)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_SECONDS)
        self._kill()
        self._thread.join()

    def _kill(self) -> None:
        """Have the supervisor end everything; end its session, where it does not."""
        with self._lock:
            life, self._life = self._life, None
        if life is not None:
            os.close(life)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_SECONDS)

    def _call(self, answer: str, *, seconds: float, late: str, **command: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._calls[answer] = _Call(ends=time.monotonic() + seconds, late=late, future=future)
        self._send(**command)
        return future

    def _send(self, **command: Any) -> None:
        frame = memoryview(msgpack.packb(command))
        with suppress(BrokenPipeError):  # it is gone, which the thread reports
            while frame:
                frame = frame[os.write(self._commands, frame) :]

    def _read(self) -> None:
        """Take events until there are no more; then everybody who waits learns why, whatever it was."""
        try:
            why = self._watched()
        except Exception as error:  # it would leave every wait without an end
            why = Refusal(f"{self._name}: its events cannot be read: {one_line(error)}")
            why.__cause__ = error
        try:
            os.close(self._events)
            self._kill()
        finally:
            self._fail(why)

    def _watched(self) -> Refusal:
        """Take events until the process ends or must; the reason."""
        unpacker = msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES)
        heard = time.monotonic()
        why: Refusal | None = None
        while why is None:
            readable, _, _ = select.select([self._events], [], [], _POLL)
            if readable:
                chunk = os.read(self._events, 2**20)
                if not chunk:
                    return self._ended()
                heard = time.monotonic()
                unpacker.feed(chunk)
                for event in unpacker:
                    why = why or self._take(event)
            elif self._process.poll() is not None:  # the supervisor was killed, and what it ran was not
                return self._ended()
            why = why or self._overdue(heard)
        return why

    def _take(self, event: Mapping[str, Any]) -> Refusal | None:
        """Note one event; the Refusal where it ends everything."""
        ((name, value),) = event.items()
        if name == "fault":
            return Refusal([str(reason) for reason in value])
        if name == "record":
            return self._note(value)
        if name != "beat":
            with self._lock:
                call = self._calls.pop(name)
            self._serves = self._serves or name == "serving"
            call.future.set_result(_ready(value) if name in ("loaded", "serving") else value)
        return None

    def _note(self, record: Record) -> Refusal | None:
        with self._lock:
            batch = next((batch for batch in self._batches if record["slot"] in batch.slots), None)
            if batch is None or record["slot"] in batch.records:
                return Refusal(
                    f"{self._name}: a record of episode {record['slot']}, which was not asked for or has one"
                )
            batch.records[record["slot"]] = record
        self._complete(batch)
        return None

    def _complete(self, batch: _Batch) -> None:
        with self._lock:
            if len(batch.records) < len(batch.slots) or batch not in self._batches:
                return
            self._batches.remove(batch)
        batch.future.set_result([batch.records[slot] for slot in batch.slots])

    def _overdue(self, heard: float) -> Refusal | None:
        now = time.monotonic()
        if self._serves and now - heard > self._stall_seconds:
            return Refusal(
                f"environment.stall_seconds={self._stall_seconds:g}: the loop of {self._name} stood still "
                "longer: code of the environment blocks it: await there, or call asyncio.to_thread"
            )
        with self._lock:
            slow = next((call for call in self._calls.values() if now > call.ends), None)
            late = next((batch for batch in self._batches if now > batch.ends), None)
        if slow is not None:
            return Refusal(slow.late)
        if late is None:
            return None
        missing = len(late.slots) - len(late.records)
        return Refusal(
            f"environment.timeout_seconds={self._start.timeout_seconds:g}: {missing} of {len(late.slots)} "
            f"episodes of {self._name} did not end in time"
        )

    def _ended(self) -> Refusal:
        try:
            code = self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            return Refusal(f"{self._name}: the environment process (pid {self.pid}) sends nothing more")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return Refusal(f"{self._name}: the environment process (pid {self.pid}) ended {how}")

    def _fail(self, why: Refusal) -> None:
        with self._lock:
            self._failure = why
            waiting: list[Future[Any]] = [call.future for call in self._calls.values()]
            waiting += [batch.future for batch in self._batches]
            self._calls.clear()
            self._batches.clear()
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(why)


def _ready(value: Mapping[str, Any]) -> Ready:
    return Ready(
        training=value["tasks"]["training"],
        held_out=value["tasks"]["held_out"],
        agents=tuple(value["agents"]),
    )


def _variables(token: str) -> dict[str, str]:
    """Variables of the process: modules of this directory are found from any other one, as tool servers
    need.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [os.getcwd(), *(os.path.abspath(path) for path in given if path)]
    return {**os.environ, TOKEN_VARIABLE: token, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
