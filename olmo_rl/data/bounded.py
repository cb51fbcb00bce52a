"""Calls of what strangers wrote, chat templates above all, with an end and a limit. No torch."""

from __future__ import annotations

import ctypes
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from olmo_rl.types import Refusal

T = TypeVar("T")


class _Late(BaseException):
    """Raised inside of a call whose time is over."""


def within_seconds(call: Callable[[], T], *, seconds: float, what: str) -> T:
    """Return what a call of Python code returns. Raises Refusal, opened by `what`, where it does not end in
    time: a watchdog raises inside of it, at its next step.
    """
    guard, ended = threading.Lock(), [False]
    thread = ctypes.c_ulong(threading.get_ident())

    def strike() -> None:
        with guard:
            if not ended[0]:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Late))

    watchdog = threading.Timer(seconds, strike)
    watchdog.daemon = True
    watchdog.start()
    try:
        try:
            return call()
        finally:
            with guard:
                ended[0] = True
            watchdog.cancel()
    except _Late:
        raise Refusal(f"{what} does not end within {seconds:.0f} s") from None


@contextmanager
def within_memory(extra: int) -> Iterator[None]:
    """Let allocations beyond `extra` further bytes fail with MemoryError for a block, in a process that has
    not imported torch: its threads would meet the limit too. Elsewhere, and where the system does not report
    its use, nothing is limited.
    """
    statm = Path("/proc/self/statm")
    if "torch" in sys.modules or not statm.is_file():
        yield
        return
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + extra
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
