"""Which rank does not move: every rank of several reports its place, and others read the reports.

A thread of each rank writes `<run_dir>/.heartbeat/rank-<n>` once a second (large worlds less often); its work
pays for notes alone (progress.py). Who watches: the process that started the ranks; under a launcher rank 0
watches all, and rank 1 watches rank 0. Only the watcher's clock counts, between changes that it sees: clocks
of hosts play no part. A rank is reported that shows no sign of life (it is stopped, its host is gone), or
that works on alone while others wait for it in a collective. A report ends nothing: the limit of the
collective does. No torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from olmo_rl.progress import Progress, follow

DIRECTORY = ".heartbeat"
BEAT_SECONDS = 1.0
RANKS_A_SECOND = 64  # that write, at most: the file system is shared
STOPPED_SECONDS = 15.0  # without a sign of life, of a world that reports every second
BUSY_SECONDS = 60.0  # at one place, while another rank waits
# A rank whose innermost frame of Python is in one of these waits for other ranks.
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "_fsdp_collectives.py")
_WRAPPERS = ("c10d_logger.py", "_ops.py", "contextlib.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One report of a rank. `beats` counts them; `notes` changes when the rank moves; `waits`: it is in a
    collective; `job`: which start of the job wrote it.
    """

    job: str
    host: str
    pid: int
    beats: int
    notes: int
    place: str
    code: str
    waits: bool


@dataclass(slots=True)
class _Seen:
    """What a watcher knows of one rank, with times of its own clock."""

    beat: Beat
    beat_since: float
    place_since: float
    reported: float = 0.0  # the duration that was reported last, 0: none is open


class Watcher:
    """Reads the reports of ranks and prints which of them do not move."""

    def __init__(self, run_dir: str | Path, *, ranks: Sequence[int], job: str, interval: float) -> None:
        self._directory = Path(run_dir) / DIRECTORY
        self._ranks = ranks
        self._interval = interval
        self._stopped = max(STOPPED_SECONDS, 5 * interval)
        self._job = job
        self._seen: dict[int, _Seen] = {}
        self._looked = 0.0

    def look(self, report: Callable[[str], None]) -> None:
        """Read what is new, once an interval, and report one line for each rank that newly stands still,
        again when that time has doubled, and when it moves again.
        """
        now = time.monotonic()
        if now - self._looked < self._interval:
            return
        self._looked = now
        self._read(now)
        stalled = self._stalled(now)
        for rank, seen in self._seen.items():
            if rank not in stalled and seen.reported:
                seen.reported = 0.0
                report(f"rank {rank} moves again: {seen.beat.place}")
            elif rank in stalled and stalled[rank] >= max(2 * seen.reported, self._stopped):
                seen.reported = stalled[rank]
                report(self._line(rank, seconds=stalled[rank]))

    def lines(self) -> list[str]:
        """One line for each rank that stands still now."""
        now = time.monotonic()
        return [self._line(rank, seconds=seconds) for rank, seconds in self._stalled(now).items()]

    def close(self) -> None:
        """Remove reports that killed ranks left behind."""
        for rank in self._ranks:
            with suppress(OSError):
                (self._directory / f"rank-{rank}").unlink()
        with suppress(OSError):
            self._directory.rmdir()

    def _read(self, now: float) -> None:
        for rank in self._ranks:
            path, seen = self._directory / f"rank-{rank}", self._seen.get(rank)
            beat = _read(path)
            if beat is None and seen is not None and path.exists():
                continue  # it is being written
            if beat is None or beat.job != self._job:
                self._seen.pop(rank, None)  # not begun, or ended well
                continue
            if seen is None or seen.beat.pid != beat.pid:
                self._seen[rank] = _Seen(beat, now, now)
                continue
            if beat.beats != seen.beat.beats:
                seen.beat_since = now
            if (beat.notes, beat.code) != (seen.beat.notes, seen.beat.code):
                seen.place_since = now
            seen.beat = beat

    def _stalled(self, now: float) -> dict[int, float]:
        """Seconds for which ranks have stood still, of those to report."""
        waiting = [rank for rank, seen in self._seen.items() if seen.beat.waits]
        stalled = {}
        for rank, seen in self._seen.items():
            if now - seen.beat_since >= self._stopped:
                stalled[rank] = now - seen.beat_since
            elif waiting and not seen.beat.waits and now - seen.place_since >= BUSY_SECONDS:
                stalled[rank] = now - seen.place_since
        return stalled

    def _line(self, rank: int, *, seconds: float) -> str:
        beat = self._seen[rank].beat
        return (
            f"rank {rank} has not moved since {beat.place}, in {beat.code}, for {seconds:.0f} s on host "
            f"{beat.host} (process {beat.pid}{_state(beat)})"
        )


@contextmanager
def beating(run_dir: str, *, environ: Mapping[str, str], watches: bool) -> Iterator[None]:
    """Report this rank while a block works. `watches`: no process of ours supervises the ranks, so that ranks
    watch each other. A world of one rank and a job without a directory report nothing.
    """
    rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    if world == 1 or not run_dir:
        yield
        return
    watched = [*range(world)] if rank == 0 else [0] if rank == 1 else []
    job, interval = job_of(environ), interval_of(world)
    watcher = None
    if watches and watched:
        watcher = Watcher(run_dir, ranks=watched, job=job, interval=interval)
    progress, ended = Progress(), threading.Event()
    follow(progress)
    path = Path(run_dir) / DIRECTORY / f"rank-{rank}"
    arguments = {"progress": progress, "job": job, "interval": interval, "watcher": watcher, "ended": ended}
    thread = threading.Thread(target=_beat, args=(path,), kwargs=arguments, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        if watcher is not None:
            for line in watcher.lines():
                _tell(line)
        raise
    finally:
        ended.set()
        thread.join(timeout=5 * BEAT_SECONDS)
        follow(None)


def interval_of(world: int) -> float:
    """Seconds between two reports of a rank."""
    return max(BEAT_SECONDS, world / RANKS_A_SECOND)


def job_of(environ: Mapping[str, str]) -> str:
    """A word for this start of a job, the same on all of its ranks."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    return "/".join(environ.get(name, "") for name in names)


def _beat(
    path: Path,
    *,
    progress: Progress,
    job: str,
    interval: float,
    watcher: Watcher | None,
    ended: threading.Event,
) -> None:
    """The thread of a rank: write, watch, and in the end remove what it wrote."""
    main, beats = threading.main_thread().ident, 0
    while True:
        beats += 1
        code, waits = _code(sys._current_frames().get(main or 0))
        beat = Beat(
            job=job,
            host=socket.gethostname(),
            pid=os.getpid(),
            beats=beats,
            notes=progress.notes,
            place=progress.text,
            code=code,
            waits=waits,
        )
        with suppress(OSError):  # the file system may be full, or away for a while
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(asdict(beat)), encoding="utf-8")
        if watcher is not None:
            watcher.look(_tell)
        if ended.wait(interval):
            break
    with suppress(OSError):
        path.unlink()
        path.parent.rmdir()  # by the last rank


def _code(frame: FrameType | None) -> tuple[str, bool]:
    """The line of this project that the main thread is in, and whether it waits for other ranks."""
    waits, innermost = False, True
    while frame is not None:
        file = frame.f_code.co_filename
        name = file.rpartition(os.sep)[2]
        if innermost and name not in _WRAPPERS:
            waits, innermost = name in _COLLECTIVES, False
        package = next((part for part in ("olmo_rl", "recipes") if f"{os.sep}{part}{os.sep}" in file), None)
        if package is not None:
            short = file[file.rindex(f"{os.sep}{package}{os.sep}") + 1 :]
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}", waits
        frame = frame.f_back
    return "other code", waits


def _read(path: Path) -> Beat | None:
    """The report in a file; None where there is none, or half of one."""
    try:
        return Beat(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _state(beat: Beat) -> str:
    """The state that the system reports of a process of this host that shows no sign of life."""
    if beat.host != socket.gethostname():
        return ""
    try:
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ", which no longer exists"
    return {"T": ", stopped by a signal", "t": ", stopped by a debugger", "D": ", waiting for a disk"}.get(
        state, ""
    )


def _tell(line: str) -> None:
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())
