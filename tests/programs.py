"""Programs of the tests: one interpreter imports what is slow and forks all that runs.

`python programs.py DIRECTORY STEP ...` takes steps one after another: `module:function` calls
`function(directory)` in a process of its own, `module:function*4` calls `function(rank, world, directory)` in
each of four. The modules are imported by the processes that are forked: what forks has one thread, and holds
nothing of a library that starts threads when it is imported, as pyarrow does.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

SLOW = (
    "lightning.pytorch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.multiprocessing",
    "torchtitan.distributed.fsdp",
    "torchtitan.models.common.moe",
)
NATIVE = re.compile(r"terminated with signal SIG(ABRT|BUS|FPE|ILL|SEGV)")


def run_program(directory: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    """Run the steps; what they leave in `directory` is theirs, what was there before they only read.

    Twice in some hundred runs glibc found the heap of a rank corrupted and aborted it; no memory checker has
    shown by what. Nothing of ours is native but numba's kernels, so such a death is no verdict on what is
    tested: a warning tells the stacks of all threads, and the program runs once more.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, str(Path(__file__)), str(directory), *steps]
    before = set(directory.iterdir())
    for last in (False, True):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
        if last or not NATIVE.search(done.stderr):
            break
        warnings.warn(f"a rank died in native code, runs again: {done.stderr[-8000:]}", stacklevel=2)
        for path in set(directory.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done


def fork(step: str, directory: str) -> None:
    """One step. Raises if a process of it fails."""
    import torch.multiprocessing as mp

    threads = Path("/proc/self/task")
    assert not threads.is_dir() or len(list(threads.iterdir())) == 1, "a process with threads would fork"
    target, _, world = step.partition("*")
    ranks = int(world or 0)
    mp.start_processes(_call, args=(target, ranks, directory), nprocs=max(ranks, 1), start_method="fork")


def _call(number: int, target: str, ranks: int, directory: str) -> None:
    function = pkgutil.resolve_name(target)
    if ranks:
        function(number, ranks, directory)
    else:
        function(directory)


if __name__ == "__main__":
    for name in SLOW:
        importlib.import_module(name)
    for given in sys.argv[2:]:
        fork(given, sys.argv[1])
