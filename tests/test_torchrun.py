"""olmo_rl.running.torchrun with real processes: signals, exit codes, ranks that end with their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bounds import BOUND_SECONDS

from olmo_rl.running import torchrun

ROOT = Path(__file__).parents[1]
RANK = """
import os, signal, sys, time
from pathlib import Path
from olmo_rl.running.rank_process import end_with_launcher

end_with_launcher(os.environ)
place, rank, seen = Path(sys.argv[1]), os.environ["RANK"], []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: seen.append(number))
print(f"rank {rank} begins", flush=True)
(place / f"part{rank}").write_text(str(os.getpid()))
(place / f"part{rank}").rename(place / f"pid{rank}")
while not seen:
    if (place / "end1").exists() and rank == "1":
        print("Traceback: the reason", flush=True)
        sys.exit(2)
    time.sleep(0.02)
time.sleep(0.5)  # saving
(place / f"seen{rank}").write_text(str([int(number) for number in seen]))
sys.exit(75)
"""
STILL = """
import os, sys, time
from pathlib import Path
from olmo_rl import progress
from olmo_rl.running import heartbeat

heartbeat.STOPPED_SECONDS = 3.0
place, rank = Path(sys.argv[1]), os.environ["RANK"]
with heartbeat.beating(str(place), environ=os.environ, watches=True):
    while not (place / ".heartbeat" / f"rank-{rank}").exists():
        time.sleep(0.02)
    progress.note_update(12, packs=5)
    while "update 12" not in (place / ".heartbeat" / f"rank-{rank}").read_text():
        time.sleep(0.02)
    (place / f"part{rank}").write_text(str(os.getpid()))
    (place / f"part{rank}").rename(place / f"pid{rank}")
    while not (place / "end").exists():
        time.sleep(0.02)
"""


def launch(place: Path, *, program: str = RANK) -> subprocess.Popen[str]:
    """Two ranks under the launcher, which run a program."""
    (place / "rank.py").write_text(program)
    command = [sys.executable, "-m", "olmo_rl.running.torchrun", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", f"--rdzv-id={place.name}", "--nproc-per-node=2", "--no-python"]
    command += [str(ROOT / "launch" / "rank.sh"), sys.executable, str(place / "rank.py"), str(place)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANK_LOGS": str(place / "logs")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=place, env=environ)


def test_a_thread_that_ends_while_ranks_are_listed_does_not_end_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "children"
    there.write_text("12 34 ")
    monkeypatch.setattr(Path, "glob", lambda *_: iter([tmp_path / "gone" / "children", there]))
    assert torchrun._children() == [12, 34]


def pids_of(place: Path) -> list[int]:
    deadline = time.monotonic() + BOUND_SECONDS
    while not all((place / f"pid{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int((place / f"pid{rank}").read_text()) for rank in (0, 1)]


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=BOUND_SECONDS)
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_to_the_launcher_reaches_each_rank_once_and_the_job_can_be_resumed(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = launch(tmp_path)
    pids = pids_of(tmp_path)
    process.send_signal(number)
    out, err = end_of(process)
    if number is signal.SIGHUP:  # these ranks leave its default action in place
        assert process.returncode == 128 + number
        assert all(map(ended, pids))
        return
    assert process.returncode == 75, err
    assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == [f"[{int(number)}]"] * 2
    assert out == "rank 0 begins\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "rank 1 begins\n"


def test_ranks_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    process = launch(tmp_path)
    pids = pids_of(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + BOUND_SECONDS
    while not all(map(ended, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.glob("seen*"))
    end_of(process)


def test_the_exit_code_and_the_reason_of_a_rank_are_those_of_the_job(tmp_path: Path) -> None:
    process = launch(tmp_path)
    pids = pids_of(tmp_path)
    (tmp_path / "end1").touch()
    _, err = end_of(process)
    assert process.returncode == 2, err
    assert "rank-1.log:" in err
    assert "Traceback: the reason" in err
    assert all(map(ended, pids))


def test_a_rank_that_is_stopped_is_named_by_another_rank(tmp_path: Path) -> None:
    process = launch(tmp_path, program=STILL)
    _, stopped = pids_of(tmp_path)
    os.kill(stopped, signal.SIGSTOP)
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")  # `end_of` bounds a launcher that ends without the line
        line = next(line for line in lines if line.startswith("rank 1 has not moved"))
        assert " since update 12, phase start, in " in line
        assert line.endswith(f"(process {stopped}, stopped by a signal)\n")
        os.kill(stopped, signal.SIGCONT)
        assert next(lines) == "rank 1 moves again: update 12, phase start\n"
    finally:
        os.kill(stopped, signal.SIGCONT)
        (tmp_path / "end").touch()
        end_of(process)
    assert process.returncode == 0
