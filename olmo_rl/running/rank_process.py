"""What every process of a job shares, rank or supervisor: an entry and its call, who a rank is, where ranks
meet, what a signal does.

SIGINT, SIGTERM, SIGHUP and SIGUSR1 end a rank at once, unless it holds them to save first (checkpoints.py).
Torch is imported where it is used: a process pays for what its part needs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NoReturn, cast

from olmo_rl.config import Config
from olmo_rl.full_disks import full_disks_refused
from olmo_rl.run_directory import EXIT_INTERRUPTED
from olmo_rl.types import Interrupted

Entry = Callable[[Config], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """An entry by name, `module:function`, imported by ranks only, and what it takes beside the
    configuration: plain values, which are sent to processes.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # end a job; passed on to its ranks


def threads_per_rank(local_ranks: int) -> int:
    """The cores this process may use, shared out over the ranks of its node: more threads slow them all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_ranks)


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free, up to 1 GiB, instead of handing every freed megabyte back to the
    system and having the pages of the next tensor faulted in again (measured in benchmarks/README.md).
    Environment variables that are set win; other C libraries are left alone.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that glibc takes


def device_variables(environ: Mapping[str, str], *, config: Config) -> dict[str, str]:
    """Variables of the GPU allocator and of NCCL that ranks need unless the environment sets them itself:
    segments that grow do not fragment under packs of changing shapes, and NCCL prints why it failed.
    """
    if config.trainer.accelerator == "cpu":
        return {}
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_DEBUG": "WARN"}
    if "PYTORCH_CUDA_ALLOC_CONF" in environ:  # the older name of the first
        del wanted["PYTORCH_ALLOC_CONF"]
    return {name: value for name, value in wanted.items() if name not in environ}


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """Under torchrun, end when it ends: its death by SIGKILL would leave this rank behind. A step of SLURM
    ends with its daemon by itself.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        end_with_parent(os.getppid())


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, also where no Python code could notice. Linux
    alone has this; elsewhere the end of the supervisor's socket does it within a fraction of a second.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def call(entry: Entry | Named, config: Config) -> None:
    """Run the entry. What it calls may not end the process: a verifier's exit(0) would look like success. A
    death in native code prints the stack of every thread on stderr.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    if config.trainer.accelerator == "cpu":
        keep_freed_memory()
    try:
        with full_disks_refused(config.run_dir):
            imported(entry)(config)
    except SystemExit as end:
        if isinstance(end, Interrupted) or end.code == EXIT_INTERRUPTED:
            raise
        raise RuntimeError(f"something that this job called ended the process: sys.exit({end.code})") from end


def imported(entry: Entry | Named) -> Entry:
    if not isinstance(entry, Named):
        return entry
    module, _, name = entry.name.partition(":")
    return cast(Entry, partial(getattr(importlib.import_module(module), name), **entry.arguments))


def handled_signals() -> list[signal.Signals]:
    """List the signals that end this job. SIGHUP is left out where it is ignored, as under nohup."""
    return [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


def leave_terminal(number: int) -> None:
    """After SIGHUP, send further output nowhere: the terminal is closed, and a write to it would fail."""
    if number != signal.SIGHUP:
        return
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM, SIGHUP and SIGUSR1 raise Interrupted in the main thread; afterwards they do what they
    did. A library that turns it into an error of its own, as torch does while it loads a checkpoint, changes
    nothing: the block ends by Interrupted.
    """
    received: list[int] = []

    def end(signum: int, _frame: FrameType | None) -> NoReturn:
        leave_terminal(signum)
        received.append(signum)
        raise Interrupted(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python hands signals to the main thread only
        return
    before = {signum: signal.signal(signum, end) for signum in handled_signals()}
    try:
        yield
    except Exception as error:
        if received:
            raise Interrupted(128 + received[0]) from error
        raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def print_line(line: str) -> None:
    """A line on the terminal from inside a signal handler, where print may be in the middle of a line."""
    os.write(2, f"{line}\n".encode())


def leave_process_group() -> None:
    """Everything is saved by now: a group that ends before a save corrupts the checkpoint."""
    if "torch.distributed" not in sys.modules:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def identity_of(rank: int, *, world_size: int) -> dict[str, str]:
    """torchrun's variables for one rank of a world on this node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
    }


@contextmanager
def rendezvous(*, world_size: int) -> Iterator[dict[str, str]]:
    """A store that this process serves on a port of the system's choice; every rank is a client of it."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
