"""Programs of the tests: one server per pytest process imports what is slow once, and forks all that runs.

`run_program(directory, STEP, ...)` runs steps one after another: `module:function` calls
`function(directory)` in a process of its own, `module:function*4` calls `function(rank, world, directory)`
in each of four. A program is a process that the server forks: it imports the modules of its steps and loads
the planner's kernels before it forks ranks, so that no rank imports or compiles while another waits for it.

What forks has one thread: threads would leave their locks behind. `ENVIRONMENT` keeps libraries from starting
threads when they are imported.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import json
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import traceback
from pathlib import Path

# Nothing of olmo_rl: programs of mutants.py import it from copies.
SLOW = (
    "lightning.pytorch",
    "matplotlib.figure",
    "numba",
    "pandas",  # pyarrow imports it when it first converts an array
    "omegaconf",
    "pyarrow.parquet",
    "pytest",
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
    "PYTHONPATH": str(Path(__file__).parents[1]),
}


def run_program(directory: Path, *steps: str) -> str:
    """Run the steps in `directory`, and return what they printed. A step that fails, or a rank that dies,
    is an AssertionError with all output: Python's own traceback, or the stacks of all threads at the signal.
    """
    output = directory.with_name(f"{directory.name}.output")
    request = {"directory": str(directory), "output": str(output), "steps": steps}
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
    except BaseException:  # the test's time limit, Ctrl-C: nothing goes on without us
        os.killpg(server.pid, signal.SIGKILL)
        _server.cache_clear()
        raise
    printed = output.read_text()
    assert code == 0, f"{printed[-12000:]}\n{' '.join(steps)} ended with {code}{_cores(directory)}"
    return printed


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The server ends when this process closes its pipe."""
    command = [sys.executable, str(Path(__file__))]
    pipe = subprocess.PIPE
    environment = {**os.environ, **ENVIRONMENT}
    server = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
    )
    atexit.register(server.communicate)
    return server


def _cores(directory: Path) -> str:
    """The core of a rank that died in native code, as far as this system reports it."""
    found = ", ".join(str(path) for path in directory.glob("core*") if path.is_file())
    pattern = Path("/proc/sys/kernel/core_pattern")
    named = pattern.read_text().strip() if pattern.is_file() else "unknown"
    return f"; cores: {found or 'none here'} (core_pattern: {named})"


def serve() -> None:
    """Fork one program a line of stdin, and answer with its exit code."""
    for name in SLOW:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


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
    serve()
