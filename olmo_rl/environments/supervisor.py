"""The process between rank 0 and an environment: it ends whatever the environment started, in any session.

`python -m olmo_rl.environments.supervisor LIFE PASSED COMMAND...` runs a command, which inherits the file
descriptors PASSED (numbers with commas between them). Once the command ends, or the other end of LIFE is
closed, or rank 0 is gone (a fork of it may hold LIFE), every descendant gets SIGKILL: programs of the library
lead sessions of their own, so no group has them all. Then this process ends as the command did.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SIGNAL_OF_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER


def supervise(life: int, passed: Sequence[int], command: Sequence[str]) -> int:
    """Run the command to its end; its status, as `os.waitpid` returns it."""
    parent = os.getppid()
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    with suppress(OSError, AttributeError):  # the end of rank 0 wakes the loop as that of a child does
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENT, signal.SIGCHLD)
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    os.set_inheritable(life, False)
    pid = os.posix_spawn(command[0], list(command), os.environ)
    for descriptor in passed:
        os.close(descriptor)
    status = None
    while status is None:
        readable, _, _ = select.select([life, woken], [], [])
        if life in readable or os.getppid() != parent:
            break
        with suppress(BlockingIOError):
            os.read(woken, 2**12)
        status = _ended(pid)
    return _end_all(pid, status)


def _ended(pid: int) -> int | None:
    """Take note of children that ended, adopted ones among them; the status of `pid` if it did."""
    found = None
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            found = child[1] if child[0] == pid else found
    return found


def _end_all(pid: int, status: int | None) -> int:
    """End every descendant: children of one that ends become children of this process."""
    while True:
        for child in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            ended, code = os.waitpid(-1, 0)
        except ChildProcessError:
            return signal.SIGKILL if status is None else status
        status = code if ended == pid else status


def _children() -> list[int]:
    """Processes whose parent is this one, as /proc has them."""
    own, found = os.getpid(), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == own:
                found.append(int(path.parent.name))
    return found


def _end_as(status: int) -> None:
    """Exit with the code of a status, or by its signal, without another memory dump."""
    if os.WIFEXITED(status):
        sys.exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    with suppress(OSError):  # of SIGKILL, which nobody handles
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def main() -> None:
    """Supervise the command of the arguments."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # signals to the job are rank 0's to handle
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    passed = [int(number) for number in sys.argv[2].split(",") if number]
    _end_as(supervise(int(sys.argv[1]), passed, sys.argv[3:]))


if __name__ == "__main__":
    main()
