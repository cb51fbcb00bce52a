"""The lease of a run directory: one live job at a time reads and writes a run.

The file `.lease` is locked (flock) by the process that runs the job, or supervises its ranks, and contains
who that is. Its modification time is the heartbeat. The kernel drops the lock with its process, so a second
job of one host is refused exactly as long as the first one lives. Locks of other hosts may be invisible on a
shared file system: there the heartbeat decides, against the clock of that file system. No torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_rl.types import Refusal

LEASE = ".lease"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 180.0  # a job of another host without a heartbeat for so long no longer exists


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The job that a lease names. `started`: start time of the process in clock ticks after boot, None where
    the system has no /proc. `restarts`: how often the scheduler requeued the job. `since`: Unix time.
    """

    host: str
    pid: int
    started: int | None
    job: str | None
    restarts: int
    since: float

    @property
    def text(self) -> str:
        """The owner in one phrase."""
        job = "" if self.job is None else f", job {self.job}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on host {self.host}{job}, since {since}"


@contextmanager
def lease(run_dir: str | Path) -> Iterator[None]:
    """Own a run directory for a block. Raises Refusal where another job owns it, naming host, process, job
    and time, and where the directory cannot be written. Takes over the lease of a job that ended without
    releasing it, and prints why.
    """
    path = Path(run_dir) / LEASE
    descriptor = _locked(path)
    try:
        before, age = _read(path), _age(path)
        if before is not None:
            print(f"{path}: {_reason_to_take_over(before, path=path, age=age)}; taken over", flush=True)
        mine = this_process(os.environ)
        _write(descriptor, json.dumps(asdict(mine)))
        ended = threading.Event()
        heartbeat = threading.Thread(target=_beat, args=(path, mine, ended), daemon=True)
        heartbeat.start()
        try:
            yield
        finally:
            ended.set()
            heartbeat.join()
            if _read(path) == mine:
                path.unlink()
    finally:
        os.close(descriptor)


def this_process(environ: Mapping[str, str]) -> Owner:
    """Describe this process and the job of the scheduler that it belongs to."""
    job = environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=started(os.getpid()),
        job=job,
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        since=time.time(),
    )


def started(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks after boot; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _locked(path: Path) -> int:
    """Open and lock the lease file; the descriptor keeps the lock."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise Refusal(
                f"run_name: the run directory {path.parent} cannot be written, {error.strerror}: make it "
                "writable, or choose another run_name"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise _held(path, _read(path)) from None
        except OSError:  # a file system without locks: process and heartbeat decide alone
            pass
        if _same_file(path, descriptor):
            break
        os.close(descriptor)  # its owner ended and removed it in between
    owner = _read(path)
    if owner is not None and _reason_to_take_over(owner, path=path, age=_age(path)) is None:
        os.close(descriptor)
        raise _held(path, owner)
    return descriptor


def _held(path: Path, owner: Owner | None) -> Refusal:
    who = "another process" if owner is None else owner.text
    return Refusal(
        f"run_name: the run directory {path.parent} is in use by {who} (heartbeat {_age(path):.0f} s ago): "
        "wait for that job, end it, or choose another run_name"
    )


def _reason_to_take_over(owner: Owner, *, path: Path, age: float) -> str | None:
    """Return why an owner no longer exists; None where it may. The lock is ours, or there are no locks."""
    if owner.host == socket.gethostname():
        alive = owner.started is not None and started(owner.pid) == owner.started
        return None if alive else f"the lease of {owner.text}, is stale: that process no longer exists"
    mine = this_process(os.environ)
    if owner.job is not None and owner.job == mine.job and owner.restarts < mine.restarts:
        return f"the lease of {owner.text}, is stale: the scheduler requeued that job"
    if age < STALE_SECONDS:
        return None
    return f"the lease of {owner.text}, is stale: no heartbeat for {age:.0f} s (limit {STALE_SECONDS:.0f} s)"


def _age(path: Path) -> float:
    """Seconds since the last heartbeat by the clock of the file system; after a step of that clock, seconds
    between it and the heartbeat. An owner that lives sets it again within `HEARTBEAT_SECONDS`.
    """
    clock = path.with_name(f"{path.name}.clock.{os.getpid()}")
    try:
        clock.touch()
        now = clock.stat().st_mtime
        clock.unlink()
        return abs(now - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0


def _read(path: Path) -> Owner | None:
    """The owner that a lease names; None where it names none, or is being written."""
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _beat(path: Path, mine: Owner, ended: threading.Event) -> None:
    """Set the heartbeat until the lease ends. A job that was stopped for so long that another one took its
    lease over ends here: it must not write any more, and its ranks end with it.
    """
    while not ended.wait(HEARTBEAT_SECONDS):
        owner = _read(path)
        if owner is not None and owner != mine:
            message = f"{path}: taken over by {owner.text}, after no heartbeat of this job: ended\n"
            with suppress(OSError):
                os.write(2, message.encode())
            os._exit(1)
        with suppress(OSError):  # the file system may be away for a while
            os.utime(path)
