"""hydra/launcher=slurm: every point of a sweep is a SLURM job of several ranks, submitted by submitit.

A job that a signal ended is requeued, as by launch/slurm.sbatch, and continues. The terminal that submitted
waits for all jobs and prints why one failed; the exit code of the sweep is that of its failures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

if TYPE_CHECKING:
    from submitit import Job

# Parameters of every executor of submitit; the others belong to SLURM.
_GENERAL = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name")
_POLL_SECONDS = 2.0
_GRACE_SECONDS = 30.0  # between the end of a job and its results on a shared file system
_LINES = 15  # of a failed rank that the terminal shows
_END = re.compile(r"JobEnded: exit code (\d+)")
# After `srun`. 75: saved; 138: SIGUSR1 before there was anything to save.
_REQUEUE = (
    "code=$?",
    "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}",
    'case $code in 75 | 138) scontrol requeue "${job:-$SLURM_JOB_ID}" ;; esac',
    "exit $code",
)


class JobEnded(Exception):
    """A rank ended with this exit code, and printed why."""


class SlurmSweep(SlurmLauncher):  # type: ignore[misc]
    """Submits the jobs of a sweep and waits for them."""

    def __call__(self, sweep_overrides: list[str], *arguments: Any) -> JobReturn:
        """One rank of one job."""
        overrides = [*sweep_overrides]
        if int(os.environ.get("SLURM_PROCID", "0")) > 0:  # rank 0 writes the records of the run directory
            overrides += ["hydra.output_subdir=null"]
        try:
            return super().__call__(overrides, *arguments)
        except SystemExit as end:
            if end.code in (75, 138):
                raise  # the batch script requeues the job
            raise JobEnded(f"exit code {end.code}") from None

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit all jobs, wait for them, print what failed. Raises SystemExit with the code of the failures,
        1 where they differ.
        """
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        assert self.config is not None
        if shutil.which("sbatch") is None:
            _refuse("there is no sbatch here: submit from a host of the cluster, or drop hydra/launcher")
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        params = {name: value for name, value in self.params.items() if value is not None}
        executor = submitit.AutoExecutor(cluster="slurm", folder=params.pop("submitit_folder"))
        params |= {"teardown": list(_REQUEUE), "srun_args": ["--kill-on-bad-exit=0", "--wait=120"]}
        executor.update_parameters(
            **{name if name in _GENERAL else f"slurm_{name}": value for name, value in params.items()}
        )
        numbers = [initial_job_idx + index for index in range(len(job_overrides))]
        try:
            jobs = executor.map_array(
                self,
                [list(overrides) for overrides in job_overrides],
                ["hydra.sweep.dir" for _ in numbers],
                numbers,
                [f"job_id_for_{number}" for number in numbers],
                [Singleton.get_state() for _ in numbers],
            )
        except (FailedJobError, FailedSubmissionError) as error:
            reason = str(error).strip().splitlines()[-1:]
            _refuse(f"sbatch takes no job: {''.join(reason)}: correct hydra.launcher.*")
        shared = set.intersection(*(set(overrides) for overrides in job_overrides))
        points = [" ".join(one for one in overrides if one not in shared) for overrides in job_overrides]
        names = [
            f"job {number} ({point}, SLURM {job.job_id})"
            for number, point, job in zip(numbers, points, jobs, strict=True)
        ]
        _say(*(f"{name}: submitted" for name in names))
        codes = _wait(dict(zip(names, jobs, strict=True)))
        if failures := [code for code in codes if code]:
            refused = failures.count(2)
            _say(f"sweep: {len(codes)} jobs, {refused} refused, {len(failures) - refused} failed")
            raise SystemExit(failures[0] if len(set(failures)) == 1 else 1)
        return [job.results()[0] for job in jobs]


def _wait(jobs: dict[str, Job[JobReturn]]) -> list[int]:
    """Exit codes of jobs in their order, each reported when it ends."""
    codes: dict[str, int] = {}
    absent: dict[str, float] = {}  # since when a job without results has been out of the queue
    while len(codes) < len(jobs):
        time.sleep(_POLL_SECONDS)
        queued = _queued([job.job_id for name, job in jobs.items() if name not in codes])
        for name, job in jobs.items():
            if name in codes:
                continue
            code = _code(job)
            if code is None:
                if queued is None or job.job_id in queued:
                    absent.pop(name, None)
                    continue
                if time.monotonic() - absent.setdefault(name, time.monotonic()) < _GRACE_SECONDS:
                    continue
            codes[name] = 1 if code is None else code
            _report(name, job=job, code=code)
    return [codes[name] for name in jobs]


def _queued(ids: Sequence[str]) -> set[str] | None:
    """The jobs of these that wait or run; None where SLURM does not answer."""
    command = ["squeue", "--noheader", "--array", "--format=%i|%F|%T", "--me", "--states=all"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    over = (
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
    )
    found = [line.split("|") for line in done.stdout.split()]
    return {id for id, _, state in found if state not in over} & {*ids}


def _code(job: Job[JobReturn]) -> int | None:
    """The exit code of a job whose ranks have all written results; None where one has not."""
    tasks = [job.task(number) for number in range(job.num_tasks)]
    if not all(task.paths.result_pickle.exists() for task in tasks):
        return None
    errors = [error for task in tasks if (error := task.exception()) is not None]
    codes = [int(found.group(1)) if (found := _END.search(str(error))) else 1 for error in errors]
    return max(codes, default=0)


def _report(name: str, *, job: Job[JobReturn], code: int | None) -> None:
    """Print how a job ended, and where it failed the last lines of a rank that printed something."""
    if code == 0:
        _say(f"{name}: done")
        return
    ended = (
        "ended without a result: cancelled, killed, or out of time" if code is None else f"ended with {code}"
    )
    logs = [job.task(number).paths.stderr for number in range(job.num_tasks)]
    texts = [
        path.read_text(errors="replace").partition("submitit ERROR")[0] for path in logs if path.exists()
    ]
    lines = next((lines for text in texts if (lines := text.strip().splitlines())), [])
    _say(f"{name}: {ended}; logs in {job.paths.folder}", *(f"  {line}" for line in lines[-_LINES:]))


def _refuse(reason: str) -> NoReturn:
    _say("refused, one reason:", f"  hydra/launcher=slurm: {reason}")
    raise SystemExit(2)


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)
