"""Programs of the tests: one server per pytest process imports what is slow once, and forks all that runs.

`run_program(directory, STEP, ...)` runs steps one after another: `module:function` calls
`function(directory)` in a process of its own, `module:function*4` calls `function(rank, world, directory)`
in each of four. A program is a process that the server forks: it imports the modules of its steps and loads
the planner's kernels before it forks ranks, so that no rank imports or compiles while another waits for it.

warm_python.py uses the same server to start Python commands.

What forks has one thread: threads would leave their locks behind. `ENVIRONMENT` keeps libraries from starting
threads when they are imported.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
# Nothing of olmo_rl: programs of mutants.py import it from copies.
SLOW = (
    "hydra",
    "lightning.pytorch",
    "matplotlib.figure",
    "numba",
    "pandas",  # pyarrow imports it when it first converts an array
    "omegaconf",
    "pyarrow.parquet",
    "pytest",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.multiprocessing",
    "torchtitan.distributed.fsdp",
    "torchtitan.models.common.moe",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
LARGEST_REQUEST = 2**17  # bytes


def run_program(directory: Path, *steps: str) -> str:
    """Run the steps in `directory`, and return what they printed. A step that fails, or a rank that dies,
    is an AssertionError with all output: Python's own traceback, or the stacks of all threads at the signal.
    """
    output = directory.with_name(f"{directory.name}.output")
    code = server().ask({"directory": str(directory), "output": str(output), "steps": steps})
    printed = output.read_text()
    assert code == 0, f"{printed[-12000:]}\n{' '.join(steps)} ended with {code}{_cores(directory)}"
    return printed


@dataclass(kw_only=True, eq=False)
class Server:
    """The process that forks. It ends when this process closes its socket."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, request: dict[str, Any], *, fds: Sequence[int] = ()) -> int:
        """Send a request with file descriptors, and wait for its answer."""
        try:
            with self.lock:
                socket.send_fds(self.socket, [json.dumps(request).encode()], fds)
                answer = self.socket.recv(LARGEST_REQUEST)
        except BaseException:  # the test's time limit, Ctrl-C: nothing goes on without us
            os.killpg(self.process.pid, signal.SIGKILL)
            server.cache_clear()
            raise
        assert answer, "the server of programs.py ended"
        return int(answer)


@functools.cache
def server() -> Server:
    """Start the server. Processes that it forks twice become children of this process."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    from warm_python import started_commands

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, started_commands():
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    started = Server(process=process, socket=ours)
    atexit.register(_stop, started)
    return started


def _stop(started: Server) -> None:
    started.socket.close()
    started.process.wait()


def _cores(directory: Path) -> str:
    """The core of a rank that died in native code, as far as this system reports it."""
    found = ", ".join(str(path) for path in directory.glob("core*") if path.is_file())
    pattern = Path("/proc/sys/kernel/core_pattern")
    named = pattern.read_text().strip() if pattern.is_file() else "unknown"
    return f"; cores: {found or 'none here'} (core_pattern: {named})"


def serve(control: socket.socket) -> None:
    """Fork one program a request, and answer with its exit code, or a command, and answer with its pid."""
    import warm_python

    for name in SLOW:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or every process would copy all of it when it first collects
    warm_python.kept_open |= warm_python.open_files() - {control.fileno()}
    while True:
        message, fds, _, _ = socket.recv_fds(control, LARGEST_REQUEST, 64)
        if not message:
            return
        request = json.loads(message)
        if "command" in request:
            answer = _start_command(request, fds=fds, control=control)
        else:
            answer = _wait_for_program(request)
        control.send(str(answer).encode())


def _wait_for_program(request: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        sys.path.insert(0, str(TESTS.parent))
        _run(**request)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _start_command(request: dict[str, Any], *, fds: Sequence[int], control: socket.socket) -> int:
    """Fork twice, so that the command becomes a child of whoever asked."""
    import warm_python

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        between = os.getpid()
        command = os.fork()
        if command:
            os.write(writing, str(command).encode())
            os._exit(0)
        warm_python.wait_for_other_parent(between)
        warm_python.become(request["command"], files=dict(zip(request["targets"], fds, strict=True)))
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        pid = int(pipe.read())
    for number in fds:
        os.close(number)
    return pid


def _run(*, directory: str, output: str, steps: list[str]) -> None:
    """A program from its first step to its exit."""
    code = 1
    try:
        _redirect(output)
        os.chdir(directory)  # where cores are left
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        faulthandler.enable()
        for step in steps:
            fork(step, directory)
        code = 0
    except BaseException:  # the server must not run on as a second one
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


def fork(step: str, directory: str) -> None:
    """One step. Raises if a process of it fails."""
    import torch.multiprocessing as mp

    target, _, world = step.partition("*")
    ranks = int(world or 0)
    function = pkgutil.resolve_name(target)
    if ranks:
        pkgutil.resolve_name("gloo_world:load_kernels")()
    threads = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").glob("*")]
    assert len(threads) <= 1, f"a process with threads would fork: {threads}"
    mp.start_processes(_call, args=(function, ranks, directory), nprocs=max(ranks, 1), start_method="fork")


def _call(number: int, function: object, ranks: int, directory: str) -> None:
    assert callable(function)
    if ranks:
        function(number, ranks, directory)
    else:
        function(directory)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
