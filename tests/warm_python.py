"""Python commands that are forked from a process that has imported what is slow, instead of started.

Within `forked_commands()`, `subprocess` starts `python -c ...` and `python script ...` in this way. Such a
process is what it would be otherwise: a child of the caller, with its own pid, process group, environment,
working directory, files, search path and signal handlers. It runs the same code, and its exit code, traceback
or end by a signal are those of an interpreter. What differs is that torch, Lightning and other libraries are
imported already. test_processes.py, test_launch.py and parts of other files start real interpreters.

A forked command starts others in the same way, as a supervisor does with its ranks, while libraries have no
threads in it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

start_really = subprocess._fork_exec  # type: ignore[attr-defined]  # the call below all of `subprocess`
installed = sys.path[1:]  # in the process that forks: the search path of every interpreter
kept_open: set[int] = set()  # files of libraries, in the process that forks
_forked = False  # whether this process is a forked command


@contextmanager
def forked_commands() -> Iterator[None]:
    """Let `subprocess` fork the Python commands that this process starts."""
    subprocess._fork_exec = start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = start_really  # type: ignore[attr-defined]


@contextmanager
def started_commands() -> Iterator[None]:
    """Let `subprocess` start interpreters, within `forked_commands()` too."""
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = start_really  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]


def start(
    arguments: Sequence[str | bytes],
    executables: Sequence[bytes],
    close_others: bool,
    keep: Sequence[int],
    directory: str | None,
    environment: Sequence[bytes] | None,
    *rest: Any,
) -> int:
    """What `_posixsubprocess.fork_exec` does: start a process and return its pid."""
    stdin, _, _, stdout, _, stderr, _, failure = rest[:8]
    session, group = rest[9:11]
    texts = [os.fsdecode(argument) for argument in arguments]
    is_code = texts[0] == sys.executable and texts[1:2] and (texts[1] == "-c" or not texts[1].startswith("-"))
    if not is_code or (_forked and _native_threads()):
        return int(start_really(arguments, executables, close_others, keep, directory, environment, *rest))
    entries = [f"{k}={v}".encode() for k, v in os.environ.items()] if environment is None else environment
    command = {
        "arguments": texts[1:],
        "environment": dict(os.fsdecode(entry).split("=", 1) for entry in entries),
        "directory": str(Path(directory or "").absolute()),
        "session": bool(session),
        "group": group,
    }
    given = {number: ours if ours >= 0 else number for number, ours in enumerate((stdin, stdout, stderr))}
    given |= {number: number for number in keep if number != failure}
    if not _forked:
        request = {"command": command, "targets": list(given)}
        return _server().ask(request, fds=list(given.values()))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        become(command, files=given)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _server() -> Any:
    import programs

    return programs.server()


def wait_for_other_parent(parent: int) -> None:
    """Return when this process has become the child of the process above `parent`."""
    while os.getppid() == parent:
        time.sleep(0.001)


def become(command: Mapping[str, Any], *, files: Mapping[int, int]) -> NoReturn:
    """Be the process that the command describes; `files` are open here by the numbers that it expects."""
    global _forked
    code: object = 1
    try:
        _forked = True
        subprocess._fork_exec = start  # type: ignore[attr-defined]
        _take_over(command, files=files)
        code = _run(command["arguments"])
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
    ctypes.pythonapi.Py_Exit(code)  # ends this process as an interpreter ends
    raise AssertionError("unreachable")


def _take_over(command: Mapping[str, Any], *, files: Mapping[int, int]) -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)  # what is ignored stays ignored
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.excepthook = sys.__excepthook__
    if command["session"]:
        os.setsid()
    if command["group"] >= 0:
        os.setpgid(0, command["group"])
    moved = {target: fcntl.fcntl(number, fcntl.F_DUPFD, 1000) for target, number in files.items()}
    for number in open_files() - kept_open - set(moved.values()):
        with suppress(OSError):
            os.close(number)
    for target, number in moved.items():
        os.dup2(number, target)
        os.close(number)
    os.chdir(command["directory"])
    os.environ.clear()
    os.environ.update(command["environment"])


def open_files() -> set[int]:
    listed = os.listdir("/proc/self/fd")  # and the directory itself, which is closed by now
    return {int(name) for name in listed if os.path.exists(f"/proc/self/fd/{name}")}


def _native_threads() -> int:
    """The number of threads that Python does not know, which may hold locks of libraries."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def _run(arguments: Sequence[str]) -> int:
    """Run the code as `__main__`; return the exit code."""
    script, *others = arguments
    here = "" if script == "-c" else str(Path(script).resolve().parent)
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [here, *(path for path in added if path), *installed]
    try:
        if script == "-c":
            code, *others = others
            sys.argv = ["-c", *others]
            main = ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(code, "<string>", "exec"), main.__dict__)
        else:
            sys.argv = [script, *others]
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0
