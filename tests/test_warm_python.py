"""Forked Python commands are what started ones are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_python import forked_commands

DESCRIBE = """
import json, os, pathlib, signal, subprocess, sys
if sys.argv[1:2] == ["parent"]:
    subprocess.run([sys.executable, sys.argv[0], "child"], check=True, process_group=0, close_fds=True)
handlers = {s.name: str(signal.getsignal(s)) for s in signal.Signals}
print(json.dumps({
    "main": __name__,
    "argv": sys.argv,
    "path": sys.path,
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "handlers": handlers,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "files": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "threads": len(os.listdir("/proc/self/task")),
    "leads": os.getpgrp() == os.getpid(),
    "warm": "torch" in sys.modules,
}), flush=True)
print("to stderr", file=sys.stderr)
assert os.getppid() != 1
"""
INTERRUPT = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.fixture(params=["started", "forked"])
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "started":
        yield request.param
        return
    with forked_commands():
        yield request.param


def test_a_forked_command_and_its_child_find_what_started_ones_find(tmp_path: Path) -> None:
    script = tmp_path / "describe.py"
    script.write_text(DESCRIBE)
    (tmp_path / "there").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "own"), "MARK": "a=b\nc"}

    def describe() -> list[dict[str, object]]:
        done = subprocess.run(
            [sys.executable, str(script), "parent"],
            cwd=tmp_path / "there",
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == "to stderr\n" * 2
        return [json.loads(line) for line in done.stdout.splitlines()]

    started = describe()
    with forked_commands():
        forked = describe()
    assert [found.pop("warm") for found in started] == [False, False]
    assert [found.pop("warm") for found in forked] == [True, True]
    for mine, theirs in zip(forked, started, strict=True):
        for name, value in theirs.items():
            assert mine[name] == value, name


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("import sys; sys.exit(75)", 75, []),
        ("import sys; sys.exit()", 0, []),
        ("import sys; sys.exit('words')", 1, ["words"]),
        ("print('x', end=''); 1 / 0", 1, ["Traceback", 'File "<string>", line 1', "ZeroDivisionError"]),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, []),
        ("import os; os.abort()", -signal.SIGABRT, []),
        (INTERRUPT, -signal.SIGINT, ["KeyboardInterrupt"]),
        ("import sys; sys.excepthook = lambda *a: print('hooked', file=sys.stderr); 1 / 0", 1, ["hooked"]),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, ["last"]),
    ],
)
def test_every_end_is_that_of_an_interpreter(how: str, code: str, exit_code: int, words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    assert [word for word in words if word not in done.stderr] == []
    assert words or not done.stderr
    assert done.stdout == ("x" if "print('x'" in code else "")


def test_a_forked_command_is_a_child_that_takes_signals_and_passed_files(tmp_path: Path, how: str) -> None:
    code = """
import os, signal, sys, time
def note(number, frame):
    os.write(int(sys.argv[1]), b"caught")
    sys.exit(3)
signal.signal(signal.SIGUSR1, note)
print(os.getpid(), os.getppid(), flush=True)
while True:
    time.sleep(0.01)
"""
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        command = [sys.executable, "-c", code, str(writing)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[writing])
        os.close(writing)
        assert process.stdout is not None
        assert process.stdout.readline().split() == [str(process.pid), str(os.getpid())]
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert pipe.read() == b"caught"
        assert process.wait() == 3
    process.stdout.close()


def test_another_program_is_started_as_ever() -> None:
    with forked_commands():
        done = subprocess.run(["sh", "-c", "echo $0 ran"], capture_output=True, text=True)
        module = subprocess.run([sys.executable, "-m", "this"], capture_output=True, text=True)
    assert done.stdout == "sh ran\n"
    assert module.stdout.startswith("The Zen of Python")
