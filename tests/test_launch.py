"""Launch scripts: resources and environment only, arguments passed through, under stand-ins for SLURM.

The stand-ins set what `srun` of SLURM 22.05 sets, and write down what `scontrol` is asked to do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import BOUND_SECONDS

ROOT = Path(__file__).parents[1]
TORCHRUN, BATCH = ROOT / "launch" / "torchrun.sh", ROOT / "launch" / "slurm.sbatch"
SCRIPTS = [*sorted((ROOT / "launch").iterdir()), ROOT / ".ci" / "run"]

SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
pids=()
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_STEP_TASKS_PER_NODE=$SLURM_NTASKS \\
        SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || { ended=$?; ((ended > code)) && code=$ended; }
done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then
    printf '%s\\n' "$3" node1 node2
else
    echo "$*" >>"$CALLS"
fi
"""
PYTHON = """#!/usr/bin/env bash
printf '%s|' "$SLURM_PROCID" "$MASTER_ADDR" "$MASTER_PORT" "$OMP_NUM_THREADS" "$@" >"$RECORDS/$SLURM_PROCID"
[ "$SLURM_PROCID" = "${FAILING_RANK:-none}" ] && exit "$CODE"
exit 0
"""
SLURM = {
    "SLURM_JOB_ID": "1241",
    "SLURM_JOB_NODELIST": "node0",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_CPUS_PER_TASK": "3",
}


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run_script(script: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *arguments],
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch job of two ranks on one node, with stand-ins first on PATH."""
    programs = {"srun": SRUN, "scontrol": SCONTROL, "python-stand-in": PYTHON}
    for name, text in programs.items():
        write_program(tmp_path / name, text)
    calls = tmp_path / "calls"
    calls.touch()
    return {
        **SLURM,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python-stand-in"),
        "RECORDS": str(tmp_path),
        "CALLS": str(calls),
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_shell_script_is_clean(script: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    assert shellcheck.exists(), "shellcheck comes with the dev extra"
    for command in (["bash", "-n"], [str(shellcheck)]):
        result = subprocess.run([*command, str(script)], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def test_slurm_passes_arguments_through_and_tells_every_rank_where_to_meet(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    result = run_script(BATCH, "+experiment=x", "run_name='a b'", **cluster)
    assert result.returncode == 0, result.stderr
    for rank in "01":
        record = (tmp_path / rank).read_text()
        assert record == f"{rank}|node0|16241|3|train.py|+experiment=x|run_name='a b'|"

    assert (tmp_path / "calls").read_text() == ""


@pytest.mark.parametrize(
    ("array", "requeued"),
    [
        ({}, "requeue 1241\n"),
        ({"SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "7"}, "requeue 1234_7\n"),
    ],
    ids=["job", "array task"],
)
def test_a_job_that_can_be_resumed_is_requeued_once_and_alone(
    cluster: dict[str, str], tmp_path: Path, array: dict[str, str], requeued: str
) -> None:
    for failing_rank in "01":
        (tmp_path / "calls").write_text("")
        result = run_script(BATCH, **cluster, **array, CODE="75", FAILING_RANK=failing_rank)
        assert result.returncode == 75
        assert (tmp_path / "calls").read_text() == requeued


def test_a_job_that_is_signalled_before_it_could_save_is_requeued(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    result = run_script(BATCH, **cluster, CODE="138", FAILING_RANK="1")
    assert result.returncode == 138
    assert (tmp_path / "calls").read_text() == "requeue 1241\n"


@pytest.mark.parametrize("code", ["1", "2", "137"])
def test_a_job_that_failed_keeps_its_exit_code_and_stays_out_of_the_queue(
    cluster: dict[str, str], tmp_path: Path, code: str
) -> None:
    result = run_script(BATCH, **cluster, CODE=code, FAILING_RANK="1")
    assert result.returncode == int(code)
    assert (tmp_path / "calls").read_text() == ""


def test_a_job_that_came_back_is_given_the_same_command(cluster: dict[str, str], tmp_path: Path) -> None:
    run_script(BATCH, "+experiment=x", "ckpt_path=a/step-1", **cluster, SLURM_RESTART_COUNT="1")
    assert (tmp_path / "1").read_text().endswith("|train.py|+experiment=x|ckpt_path=a/step-1|")


def test_slurm_is_asked_for_an_appended_log_a_signal_ahead_of_the_limit_and_leave_to_requeue() -> None:
    options = re.findall(r"^#SBATCH (\S+)$", BATCH.read_text(), re.MULTILINE)
    assert {"--open-mode=append", "--requeue"} <= set(options)
    # Without B: SLURM signals the ranks, not the batch script.
    assert [option for option in options if re.fullmatch(r"--signal=USR1@\d+", option)]


def test_ranks_that_contradict_trainer_devices_are_refused_under_slurm(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    environ = {**cluster, "PYTHON": sys.executable, "SLURM_NTASKS": "1"}
    directory = f"hydra.run.dir={tmp_path / 'run'}"
    arguments = ("+experiment=packed_moe", "trainer.devices=2", "warm_start.steps=0", directory)
    result = run_script(BATCH, *arguments, **environ)
    assert result.returncode == 2, result.stderr
    for words in ("SLURM_NTASKS=1", "SLURM_NTASKS_PER_NODE=2", "trainer.devices=2"):
        assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "run").glob("*.csv"))


def test_torchrun_starts_the_ranks_that_were_asked_for(tmp_path: Path) -> None:
    """A stand-in for Python prints the command that would start the ranks."""
    write_program(tmp_path / "python", '#!/usr/bin/env bash\nprintf "%s|" "$OMP_NUM_THREADS" "$@"\n')
    environ = {"PYTHON": str(tmp_path / "python"), "OMP_NUM_THREADS": "1"}
    one = run_script(TORCHRUN, "+experiment=x", "run_name='a b'", **environ)
    train = ROOT / "train.py"
    rank = f"--max-restarts|0|--no-python|{ROOT}/launch/rank.sh|{tmp_path}/python|{train}"
    assert re.sub(r"rdzv-id\|\d+", "rdzv-id|0", one.stdout) == (
        "1|-m|olmo_rl.running.torchrun|--rdzv-backend|c10d|--rdzv-endpoint|localhost:0|--rdzv-id|0|"
        f"--nnodes|1|--nproc-per-node|2|{rank}|+experiment=x|run_name='a b'|"
    )
    several = run_script(TORCHRUN, "a=1", **environ, NNODES="2", NPROC_PER_NODE="8", MASTER_ADDR="node0")
    assert several.stdout == (
        "1|-m|olmo_rl.running.torchrun|--rdzv-backend|c10d|--rdzv-endpoint|node0:29500|--rdzv-id|olmo_rl|"
        f"--nnodes|2|--nproc-per-node|8|{rank}|a=1|"
    )
    lost = run_script(TORCHRUN, **environ, NNODES="2")
    assert lost.returncode != 0
    assert "MASTER_ADDR" in lost.stderr
    shared = run_script(TORCHRUN, **{**environ, "OMP_NUM_THREADS": "", "NPROC_PER_NODE": "1"})
    assert shared.stdout.startswith(f"{len(os.sched_getaffinity(0))}|-m|")


@pytest.mark.parametrize("script", [TORCHRUN, BATCH], ids=["torchrun", "slurm"])
def test_a_launcher_without_a_python_that_has_the_packages_is_refused(
    script: Path, cluster: dict[str, str], tmp_path: Path
) -> None:
    """A clone without .venv, where the active python3 is the system's."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "launch", site / "launch")
    write_program(tmp_path / "python3", "#!/bin/sh\nexit 1\n")
    environ = {**os.environ, **cluster, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    lacking = {name: value for name, value in environ.items() if name != "PYTHON"}
    for given, reason in (
        (lacking, "no Python with this project's packages"),
        ({**lacking, "PYTHON": "nopython"}, "PYTHON=nopython is no program"),
    ):
        result = subprocess.run(
            ["bash", str(site / "launch" / script.name)], env=given, cwd=site, capture_output=True, text=True
        )
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert reason in result.stderr
        assert "set" in result.stderr


def test_torchrun_runs_train_py_for_real(tmp_path: Path) -> None:
    result = run_script(
        TORCHRUN,
        "+experiment=packed_moe",
        "recipe=validate",
        f"hydra.run.dir={tmp_path}",
        PYTHON=sys.executable,
    )
    assert result.returncode == 0, result.stderr
