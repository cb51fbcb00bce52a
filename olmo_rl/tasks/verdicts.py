"""One call of a user's verifier, in this process or in one of its own. No torch here.

Whatever a verifier does becomes a `Verdict` of plain values where it is called: none of its objects or
exceptions crosses to another process. `VerifierProcess` leads a process group, which ends as a whole,
programs that a verifier started included, when its owner closes it or is gone.
"""

from __future__ import annotations

import math
import multiprocessing
import numbers
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

from olmo_rl.data.validation import LARGEST_REWARD
from olmo_rl.types import Interrupted

Verifier = Callable[..., Any]
_POLL = 0.05  # seconds between looks at whether the process still runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Arguments of one call of a verifier, plain values. `count`: values that it must return in a sequence,
    None where it returns one.
    """

    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    count: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Finite rewards of the responses of a call, NaN where the verifier does not judge; `fault`: why there is
    no verdict.
    """

    rewards: tuple[float, ...] = ()
    fault: str | None = None
    timed_out: bool = False


def verdict_of(verify: Verifier, call: Call) -> Verdict:
    """Call the verifier. Raises what ends this process (an interruption), never what the verifier raises."""
    try:
        return _checked(verify(*call.positional, **call.named), count=call.count)
    except (Interrupted, KeyboardInterrupt):
        raise
    except SystemExit as end:
        return Verdict(fault=f"it called sys.exit({end.code})")
    except BaseException as failure:  # any exception of a user's function means that it did not judge
        first = (_message(failure).splitlines() or [""])[0]
        return Verdict(fault=f"{type(failure).__name__}: {first}")


def _checked(value: object, *, count: int | None) -> Verdict:
    """A verifier's value as rewards; a fault, or OverflowError, for anything else."""
    if count is None:
        values: Sequence[object] = (value,)
    else:
        listed = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(listed, list | tuple) or len(listed) != count:
            return Verdict(
                fault=f"it returned {value!r:.200}: return a list of {count} numbers, one for each response"
            )
        values = listed
    if odd := [one for one in values if not _is_reward(one)]:
        return Verdict(
            fault=f"it returned {odd[0]!r:.200}: return a finite number within {LARGEST_REWARD:g}, or None "
            "where the response cannot be judged"
        )
    return Verdict(rewards=tuple(math.nan if one is None else float(cast(Any, one)) for one in values))


def _is_reward(value: object) -> bool:
    if value is None or type(value).__name__ in ("bool", "bool_"):  # NumPy's is no Real
        return True
    return isinstance(value, numbers.Real) and not abs(float(value)) > LARGEST_REWARD


def _message(failure: BaseException) -> str:
    try:
        return str(failure)
    except Exception:  # the user's __str__
        return "(its message cannot be shown)"


class VerifierProcess:
    """A spawned process that calls verifiers, one at a time: a fork would copy the threads of torch.

    A call that exceeds its seconds, or ends the process, leaves none; the next call starts one.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection | None = None
        self._life: Connection | None = None  # open as long as this process lives and has not closed it
        self._known: dict[int, int] = {}  # verifiers that the process has, by identity: their place there

    @property
    def runs(self) -> bool:
        return self._process is not None

    def call(self, verify: Verifier, call: Call, *, start: float, seconds: float) -> Verdict:
        """The verdict within `seconds`, after `start` seconds at most for the process to come up, and as many
        for it to import the verifier.
        """
        if self._process is None:
            self._start()
            if (ready := self._received(start)).fault is not None:
                return ready
        if id(verify) not in self._known:
            if (ready := self._answer(verify, seconds=start)).fault is not None:
                return ready
            self._known[id(verify)] = len(self._known)
        return self._answer((self._known[id(verify)], call), seconds=seconds)

    def close(self) -> None:
        """End the process and whatever it started."""
        if self._process is not None:
            assert self._connection is not None
            assert self._life is not None
            with suppress(ProcessLookupError, PermissionError):  # it is gone, or leads no group yet
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._life.close()
            self._process = self._connection = self._life = None
            self._known.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        owned, self._life = context.Pipe(duplex=False)
        arguments = (theirs, owned)
        self._process = context.Process(target=_serve, args=arguments, name="verifiers", daemon=True)
        self._process.start()
        self._connection = ours
        theirs.close()
        owned.close()

    def _answer(self, message: object, *, seconds: float) -> Verdict:
        assert self._connection is not None
        with suppress(ConnectionError):  # of a process that is gone, which waiting reports
            self._connection.send(message)
        return self._received(seconds)

    def _received(self, seconds: float) -> Verdict:
        assert self._connection is not None
        ends = time.monotonic() + seconds
        while not self._connection.poll(_POLL):
            if not self._process.is_alive() and not self._connection.poll(0):
                return self._ended()
            if time.monotonic() > ends:
                self.close()
                return Verdict(timed_out=True, fault="it ran out of time")
        try:
            verdict: Verdict = self._connection.recv()
        except (EOFError, ConnectionError):  # it closed its end, or is gone
            return self._ended()
        return verdict

    def _ended(self) -> Verdict:
        self._process.join(1.0)
        code = self._process.exitcode
        self.close()
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        return Verdict(fault=f"its process {how}")


def _serve(connection: Connection, owned: Connection) -> None:
    """Judge until the owner is gone. Signals to the job are the owner's to handle."""
    os.setpgid(0, 0)
    if os.fork() == 0:  # a process, because a verifier may never let another thread run
        connection.close()
        _end_group_with(owned)
    owned.close()
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        signal.signal(signal.Signals[name], lambda *_: None)  # programs that a verifier starts keep theirs
    own = os.getpid()
    known: list[Verifier] = []
    connection.send(Verdict())
    with suppress(EOFError, ConnectionError):
        while True:
            verdict = _answered(connection.recv_bytes(), known)
            if os.getpid() != own:  # a fork of the verifier's that returned as well
                os._exit(0)
            connection.send(verdict)


def _end_group_with(owned: Connection) -> NoReturn:
    """End this process group once the other end of `owned`, to which nothing is written, is closed."""
    try:
        owned.poll(None)
    finally:
        os.killpg(0, signal.SIGKILL)
    raise AssertionError("this process is of the group")


def _answered(message: bytes, known: list[Verifier]) -> Verdict:
    """A verifier to keep, or a call of one: (its place, call)."""
    try:
        read = pickle.loads(message)
        if isinstance(read, tuple):
            return verdict_of(known[read[0]], read[1])
        known.append(read)
    except BaseException as failure:  # of an import, or of a verifier; nobody interrupts this process
        return Verdict(fault=f"{type(failure).__name__}: {_message(failure)}")
    return Verdict()
