"""launch/preflight.sh: which nodes are named for what, and the check itself on two ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bounds import BOUND_SECONDS

from olmo_rl.running.node_check import Limits, Report, faults

ROOT = Path(__file__).parents[1]
GOOD = Report(
    rank=0,
    host="n1",
    gpus=True,
    devices=2,
    device="H200",
    driver="570",
    torch="2.13.0",
    memory=2**37,
    disk_free=2**40,
    write=0.1,
    all_reduce=0.01,
    all_to_all=0.01,
    clock=1000.0,
)
LIMITS = Limits(disk_free=2**30)


def four(**changes: object) -> list[Report]:
    """Two ranks on each of two nodes; `changes` are those of the second node."""
    first = [GOOD, replace(GOOD, rank=1)]
    return first + [replace(GOOD, rank=rank, host="n2", **changes) for rank in (2, 3)]  # type: ignore[arg-type]


def test_equal_nodes_have_no_fault() -> None:
    assert faults(four(), limits=LIMITS) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": 1}, ["1 GPUs for 2 ranks", "--gpus-per-node"]),
        ({"write": None}, ["outputs cannot be written", "permissions"]),
        ({"sees_rank_0": False}, ["not the directory that rank 0 writes to", "share"]),
        ({"disk_free": 2**29}, ["0.5 GiB are free under outputs", "1.0 are needed", "FREE_GIB"]),
        ({"clock": 1060.0}, ["its clock is +30.0 s off", "chrony"]),
        ({"driver": "535"}, ["driver 535, elsewhere 570", "use the same"]),
        ({"torch": "2.12.0"}, ["torch 2.12.0, elsewhere 2.13.0"]),
        ({"device": "A100"}, ["device A100, elsewhere H200"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_what_would_break_a_run_is_named_with_node_and_fix(
    changes: dict[str, object], words: list[str]
) -> None:
    lines = [line for line in faults(four(**changes), limits=LIMITS) if line.startswith("n2: ")]
    assert len(lines) == 1
    assert not [word for word in words if word not in lines[0]]


def test_each_rank_with_a_fault_of_its_own_is_named() -> None:
    reports = [
        GOOD,
        replace(GOOD, rank=1, fault="an all-reduce over nccl failed, timeout: check the network"),
    ]
    (line,) = faults(reports, limits=LIMITS)
    assert line == "n1: rank 1: an all-reduce over nccl failed, timeout: check the network"


def preflight(place: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "preflight.sh"), *arguments],
        cwd=place,
        env={**os.environ, "PYTHON": sys.executable, **environ},
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )


def test_two_ranks_of_this_machine_are_checked_and_a_full_disk_is_refused(tmp_path: Path) -> None:
    done = preflight(tmp_path, "--mib=1", FREE_GIB="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on 1 nodes" in done.stdout
    assert "preflight passed" in done.stdout
    assert list((tmp_path / "outputs").iterdir()) == []
    done = preflight(tmp_path, "--mib=1", FREE_GIB="1e9")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "GiB are free under outputs, 1,000,000,000.0 are needed" in done.stdout


def test_a_rank_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "olmo_rl.running.node_check", "--seconds=2", "--free-gib=0"],
        cwd=tmp_path,
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )
    assert done.returncode == 2, done.stderr
    assert "rank 0 waited 2 s in vain for rank 1 of 2" in done.stderr
    assert "Traceback" not in done.stderr
