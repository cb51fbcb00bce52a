"""launch/slurm.sbatch and hydra/launcher=slurm under a real SLURM of two nodes: `pytest -m slurm`.

Runs of two ranks with a tiny model. Whatever strikes one, its job ends with the weights of a run that nothing
struck, bit for bit, or it is refused and loses nothing.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from bounds import BOUND_SECONDS
from slurm_cluster import LIVE, Cluster, missing_programs
from test_with_engines import free_ports, listens

from benchmarks.check_resume import contents, different, rows_of
from olmo_rl.run_directory import checkpoint_path, complete_checkpoints
from olmo_rl.running.metrics_csv import read_metrics

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
UPDATES = 4
RESOURCES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")
RUN = (
    "+experiment=packed_moe",
    "trainer.devices=1",
    "trainer.num_nodes=2",
    f"trainer.max_steps={UPDATES}",
    "warm_start.steps=0",
    "batch.samples_per_step=8",
    "batch.steps_per_collection=2",
    "rollouts.group_size=4",
    "rollouts.max_new_tokens=4",
    "task=jsonl",
    "task.path=problems.jsonl",
    "+task.verifier._target_=benchmarks.check_resume.even_length",
    "task.eval_problems=0",
    "callbacks=quiet",
    "callbacks.checkpoint_interval=1",
    "callbacks.checkpoint_minutes=null",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = missing_programs()
    assert not missing, f"{', '.join(missing)}: apt-get install slurm-wlm munge"
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def site(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project's directory from which jobs are submitted, with outputs of its own."""
    site = tmp_path_factory.mktemp("site")
    for name in ("launch", "train.py"):
        (site / name).symlink_to(ROOT / name)
    lines = [json.dumps({"prompt": f"{'ab' * (i % 4)}{i}?", "answer": str(i)}) for i in range(200)]
    (site / "problems.jsonl").write_text("\n".join(lines) + "\n")
    cluster.environ |= {
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }
    return site


@dataclass(frozen=True, slots=True)
class Run:
    """A run that a test submits, strikes and lets go on."""

    cluster: Cluster
    site: Path
    name: str

    @property
    def directory(self) -> Path:
        return self.site / "outputs" / self.name

    @property
    def watch(self) -> Path:
        return self.site / f"watch-{self.name}"

    def submit(self, *arguments: str, hold: int | None = None, options: tuple[str, ...] = ()) -> str:
        """Submit it; `hold`: the update before which it waits."""
        self.watch.mkdir(exist_ok=True)
        if hold is not None:
            (self.watch / f"hold-{hold}").touch()
        extra = f"callbacks.extra=[{{_target_: slurm_hold.Hold, directory: {self.watch}}}]"
        return self.cluster.submit(
            ROOT / "launch" / "slurm.sbatch",
            *RUN,
            extra,
            f"run_name={self.name}",
            *arguments,
            place=self.site,
            options=(*RESOURCES, *options),
        )

    def reached(self, update: int, *, job: str) -> None:
        """Wait for an update of this job, which must not end before."""

        def there() -> bool:
            live = self.cluster.job(job)["JobState"] in LIVE
            assert live or self.cluster.job(job)["JobState"] == "COMPLETED", self.log(job)
            return (self.watch / f"update-{update}").exists()

        self.cluster.until(there, f"update {update} of {self.name}")

    def release(self, update: int) -> None:
        (self.watch / f"hold-{update}").unlink()

    def log(self, job: str) -> str:
        text = (self.site / f"olmo_rl-{job}.log").read_text()
        return text + "".join(path.read_text() for path in self.site.glob(f"outputs/logs/slurm-{job}/*.log"))

    def assert_equal(self, straight: Path, *, since: int = 1) -> None:
        """The last checkpoint and the metrics from an update on are those of a run that nothing struck."""
        ours, theirs = (checkpoint_path(path, step=UPDATES) for path in (self.directory, straight))
        assert ours in complete_checkpoints(self.directory)
        assert different(contents(ours), contents(theirs)) is None
        expected = {name: values[since - 1 :] for name, values in rows_of(straight).items()}
        assert different(rows_of(self.directory), expected) is None


@pytest.fixture
def make_run(cluster: Cluster, site: Path) -> Callable[[str], Run]:
    def make(name: str) -> Run:
        return Run(cluster, site, name)

    return make


@pytest.fixture(scope="module")
def straight(cluster: Cluster, site: Path) -> Path:
    """The run directory of a job that nothing strikes."""
    run = Run(cluster, site, "straight")
    job = run.submit()
    assert cluster.ended(job)["ExitCode"] == "0:0", run.log(job)
    return run.directory


@pytest.fixture(scope="module")
def limited(cluster: Cluster, site: Path, straight: Path) -> str:
    """A job that waits for its time limit, 105 to 165 seconds after its start, beside other tests."""
    return Run(cluster, site, "limit").submit(hold=3, options=("--time=3", "--signal=USR1@15"))


def test_a_job_logs_rank_0_and_keeps_the_other_ranks_apart(site: Path, straight: Path, limited: str) -> None:
    assert len(complete_checkpoints(straight)) > 0
    assert "/outputs/straight" in (site / "olmo_rl-1.log").read_text()
    assert [path.name for path in site.glob("outputs/logs/slurm-1/*")] == ["rank-1.log"]


def test_a_job_that_is_requeued_goes_on(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path
) -> None:
    run = make_run("requeued")
    job = run.submit(hold=3)
    run.reached(3, job=job)
    cluster.run("scontrol", "requeue", job)
    run.release(3)
    after = cluster.ended(job, restarts=1)
    assert after["ExitCode"] == "0:0", run.log(job)
    run.assert_equal(straight)


def test_a_job_that_is_requeued_before_it_has_saved_starts_from_the_path_of_its_command(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path
) -> None:
    run, before = make_run("branch"), checkpoint_path(straight, step=UPDATES - 1)
    job = run.submit(f"ckpt_path={before}", hold=UPDATES)
    run.reached(UPDATES, job=job)
    cluster.run("scontrol", "requeue", job)
    run.release(UPDATES)
    after = cluster.ended(job, restarts=1)
    assert after["ExitCode"] == "0:0", run.log(job)
    run.assert_equal(straight, since=UPDATES)


def test_a_job_that_is_signalled_while_it_starts_is_requeued(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path
) -> None:
    run = make_run("early")
    job = run.submit()
    cluster.until(lambda: cluster.run("squeue", "-h", "-s", "-j", job).count(job) > 1, "the step of ranks")
    cluster.run("scancel", "--signal=USR1", job)
    after = cluster.ended(job, restarts=1)
    assert after["ExitCode"] == "0:0", run.log(job)
    run.assert_equal(straight)


def test_an_array_runs_each_task_in_a_directory_of_its_own(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path, site: Path
) -> None:
    run = make_run("array_${oc.env:SLURM_ARRAY_TASK_ID}")
    watch = site / "watch-array"
    watch.mkdir()
    (watch / "hold-2").touch()
    extra = f"callbacks.extra=[{{_target_: slurm_hold.Hold, directory: {watch}}}]"
    job = run.submit(extra, options=("--array=0-1", "--output=olmo_rl-%A_%a.log"))
    cluster.until(lambda: (watch / "update-2").exists(), "update 2 of one task")
    cluster.run("scontrol", "requeue", f"{job}_1")
    (watch / "hold-2").unlink()
    for task in "01":
        after = cluster.ended(f"{job}_{task}", restarts=1 if task == "1" else None)
        assert after["ExitCode"] == "0:0", run.log(f"{job}_{task}")
        Run(cluster, site, f"array_{task}").assert_equal(straight)


def test_a_cancelled_job_stays_out_of_the_queue_and_has_saved(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path
) -> None:
    run = make_run("cancelled")
    job = run.submit(hold=2)
    run.reached(2, job=job)
    cluster.run("scancel", job)
    after = cluster.ended(job)
    assert (after["JobState"], after["Restarts"]) == ("CANCELLED", "0")
    assert [path.name for path in complete_checkpoints(run.directory)][-1] == "step-2", run.log(job)
    again = run.submit("ckpt_path=auto")
    assert cluster.ended(again)["ExitCode"] == "0:0", run.log(again)
    run.assert_equal(straight)


def test_a_killed_rank_ends_its_job_and_loses_no_checkpoint(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path
) -> None:
    run = make_run("killed")
    job = run.submit(hold=3)
    run.reached(3, job=job)
    os.kill(int((run.watch / "pid1").read_text()), signal.SIGKILL)
    run.release(3)
    after = cluster.ended(job)
    assert after["JobState"] == "FAILED", run.log(job)
    assert after["Restarts"] == "0"
    assert "Killed" in run.log(job)
    assert [path.name for path in complete_checkpoints(run.directory)][-1] == "step-2"
    again = run.submit("ckpt_path=auto")
    assert cluster.ended(again)["ExitCode"] == "0:0", run.log(again)
    run.assert_equal(straight)


def test_a_second_job_on_one_name_is_refused_by_name(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path
) -> None:
    run = make_run("double")
    first = run.submit(hold=2)
    run.reached(2, job=first)
    second = run.submit("overwrite=true")
    assert cluster.ended(second)["ExitCode"] == "2:0"
    assert "in use by process" in run.log(second)
    assert f"job {first}" in run.log(second)
    run.release(2)
    assert cluster.ended(first)["ExitCode"] == "0:0", run.log(first)
    run.assert_equal(straight)


def test_a_rank_that_stands_still_is_named_before_its_job_ends(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path
) -> None:
    run = make_run("stopped")
    job = run.submit(hold=3)
    run.reached(3, job=job)
    cluster.until((run.watch / "pid1").exists, "rank 1 at update 3")
    os.kill(int((run.watch / "pid1").read_text()), signal.SIGSTOP)
    run.release(3)
    cluster.until(lambda: "rank 1 has not moved since update 2" in run.log(job), "a line on rank 1")
    assert ", stopped by a signal)" in run.log(job)
    os.kill(int((run.watch / "pid1").read_text()), signal.SIGKILL)
    assert cluster.ended(job)["JobState"] == "FAILED"
    assert [path.name for path in complete_checkpoints(run.directory)][-1] == "step-2"


def test_a_full_disk_ends_the_job_with_numbers_and_keeps_what_was_saved(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path, site: Path
) -> None:
    """A file system of 12 MiB, where mounting is allowed, holds two checkpoints and no third."""
    run = make_run("full")
    run.directory.mkdir(parents=True)
    size = sum(file.stat().st_size for file in checkpoint_path(straight, step=UPDATES).rglob("*"))
    options = f"size={5 * size // 2}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(run.directory)]).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        job = run.submit("callbacks.keep_checkpoints=4")
        after = cluster.ended(job)
        assert after["ExitCode"] == "2:0", run.log(job)
        kept = complete_checkpoints(run.directory)
        saves = r"a checkpoint in .* needs [\d,]+ MiB, .* has [\d,]+ MiB free: .*; (step-\d+) is complete"
        lines = r".* cannot be written, [\d,.]+ of [\d,.]+ MiB are free there"  # beside a save
        found = re.search(f"disk full: (?:{saves}|{lines})", run.log(job))
        assert found is not None, run.log(job)
        assert kept
        assert found[1] in (None, kept[-1].name)
        again = run.submit("ckpt_path=auto", "callbacks.keep_checkpoints=1")
        subprocess.run(["mount", "-o", f"remount,size={20 * size}", str(run.directory)], check=True)
        assert cluster.ended(again)["ExitCode"] == "0:0", run.log(again)
        run.assert_equal(straight)
    finally:
        subprocess.run(["umount", "--lazy", str(run.directory)], check=True)


def test_a_sweep_of_two_ranks_a_job_goes_on_after_a_requeue_and_reports_a_refused_point(
    cluster: Cluster, site: Path, straight: Path
) -> None:
    watch = site / "watch-sweep"
    watch.mkdir()
    (watch / "hold-2").touch()
    command = [sys.executable, "train.py", "-m", *RUN, "run_name=sweep", "hydra/launcher=slurm"]
    command += ["hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1"]
    command += [f"callbacks.extra=[{{_target_: slurm_hold.Hold, directory: {watch}}}]"]
    command += ["batch.samples_per_step=8,7"]
    pipe = subprocess.PIPE
    sweep = subprocess.Popen(command, cwd=site, env=cluster.environ, stdout=pipe, stderr=pipe, text=True)
    try:
        cluster.until(lambda: (watch / "update-2").exists(), "update 2 of the sweep")
        ids = cluster.run("squeue", "--noheader", "--array", "--format=%i", "--name=olmo_rl", "--states=R")
        (job,) = [line for line in ids.split() if line.endswith("_0")]
        cluster.run("scancel", "--signal=USR1", job)
        _, err = sweep.communicate(timeout=BOUND_SECONDS)
    finally:
        sweep.kill()
    assert sweep.returncode == 2, err
    assert "job 0 (batch.samples_per_step=8, SLURM" in err
    assert ": done" in err
    assert re.search(r"job 1 \(batch.samples_per_step=7, SLURM \d+_1\): ended with 2; logs in ", err)
    assert "multiple of rollouts.group_size" in err
    assert "sweep: 2 jobs, 1 refused, 0 failed" in err
    assert int(cluster.job(job)["Restarts"]) >= 1
    Run(cluster, site, "sweep/0").assert_equal(straight)


def test_preflight_checks_two_nodes(cluster: Cluster, site: Path) -> None:
    script = ROOT / "launch" / "preflight.sh"
    options = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")
    job = cluster.submit(script, "--free-gib=0", "--mib=1", place=site, options=options)
    log = site / f"preflight-{job}.log"
    assert cluster.ended(job)["ExitCode"] == "0:0", log.read_text()
    assert "2 ranks on 2 nodes" in log.read_text()
    assert all(f"127.0.0.{number} " in log.read_text() for number in (1, 2))
    assert "preflight passed" in log.read_text()
    job = cluster.submit(script, "--free-gib=1e9", "--mib=1", place=site, options=options)
    log = site / f"preflight-{job}.log"
    assert cluster.ended(job)["ExitCode"] == "2:0", log.read_text()
    assert log.read_text().count("GiB are free under outputs") == 2


def test_a_requeued_rollout_goes_on_after_its_collections(cluster: Cluster, site: Path) -> None:
    script, options = ROOT / "launch" / "slurm.sbatch", (*RESOURCES, "--job-name=rollout")
    arguments = ("recipe=rollout", "run_name=rollout", "rollouts.collections=200")
    job = cluster.submit(script, *RUN, *arguments, place=site, options=options)
    rollouts, log = site / "outputs" / "rollout" / "rollouts", site / f"rollout-{job}.log"
    first = rollouts / "collection-00001.parquet"
    cluster.until(first.exists, "the second collection")
    cluster.run("scancel", "--signal=USR1", job)
    cluster.until(lambda: int(cluster.job(job)["Restarts"]) > 0, "the requeue")
    written, there = first.stat().st_mtime_ns, len(list(rollouts.glob("*.parquet")))
    assert there < 200, "the job was requeued in the middle"
    assert cluster.ended(job, restarts=1)["ExitCode"] == "0:0", log.read_text()
    assert len(list(rollouts.glob("*.parquet"))) == 200
    assert first.stat().st_mtime_ns == written


def test_a_job_at_its_time_limit_saves_and_goes_on(
    cluster: Cluster, site: Path, straight: Path, limited: str
) -> None:
    run = Run(cluster, site, "limit")
    after = cluster.ended(limited, restarts=1)
    assert after["ExitCode"] == "0:0", run.log(limited)
    assert "interrupted by SIGUSR1, saved after update 3" in run.log(limited)
    run.assert_equal(straight)


def test_an_engine_on_a_node_of_its_own_serves_a_job_before_and_after_a_requeue(
    cluster: Cluster, site: Path
) -> None:
    run = Run(cluster, site, "served")
    run.watch.mkdir()
    (run.watch / "hold-2").touch()
    port = free_ports(1)
    serve = f"{sys.executable} train.py {RUN[0]} recipe=serve serve.host=0.0.0.0 serve.port={{port}}"
    environ = {"ENGINE": serve, "PORT": str(port)}
    arguments = [one for one in RUN if not one.startswith("trainer.num_nodes")]
    arguments += ["strategy=single", "rollouts=vllm", "run_name=served"]
    arguments += [f"callbacks.extra=[{{_target_: slurm_hold.Hold, directory: {run.watch}}}]"]
    script = ROOT / "launch" / "slurm.sbatch"
    job = cluster.submit(script, *arguments, place=site, options=RESOURCES, environ=environ)
    run.reached(2, job=job)
    cluster.run("scancel", "--signal=USR1", job)  # to the engine too
    run.release(2)
    after = cluster.ended(job, restarts=1)
    assert after["ExitCode"] == "0:0", run.log(job)
    assert "interrupted by SIGUSR1, saved after update 2" in run.log(job)
    assert [row["step"] for row in read_metrics(run.directory / "metrics.csv")] == [1, 2, 3, 4]
    assert f"http://127.0.0.2:{port}" in (run.directory / ".hydra" / "overrides.yaml").read_text()
    assert [path.name for path in site.glob(f"outputs/logs/slurm-{job}/engine-*")] == [
        "engine-127.0.0.2-0.log"
    ]
    cluster.until(lambda: not listens(port), "the end of the engine")


def strike(run: Run, job: str, *, chance: random.Random) -> str:
    """One blow to a job at a moment of chance; its name."""
    cluster = run.cluster
    time.sleep(chance.uniform(0, 12))
    how = chance.choice(("USR1", "requeue", "scancel", "kill rank", "kill launcher", "TERM"))
    commands = {
        "USR1": ("scancel", "--signal=USR1"),
        "TERM": ("scancel", "--signal=TERM"),
        "requeue": ("scontrol", "requeue"),
        "scancel": ("scancel",),
    }
    match how:
        case "USR1" | "TERM" | "requeue" | "scancel":
            with suppress(AssertionError):  # refused by SLURM: the job waits, or has ended
                cluster.run(*commands[how], job)
        case "kill rank" | "kill launcher":
            program = "python" if how == "kill rank" else "srun"
            found = processes_of(job, program=program, conf=cluster.environ["SLURM_CONF"])
            for pid in found[: chance.choice((1, 2))]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return how


def processes_of(job: str, *, program: str, conf: str) -> list[int]:
    """Processes of a job of this cluster that run a program of this name."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environ = (path / "environ").read_bytes().split(b"\0")
            mine = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={conf}".encode()} <= {*environ}
            command = (path / "cmdline").read_bytes().partition(b"\0")[0].decode()
            if mine and Path(command).name.startswith(program):
                found.append(int(path.name))
    return sorted(found)


@pytest.mark.parametrize("seed", [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "0").split(",")])
def test_a_run_that_is_struck_at_random_ends_like_one_that_is_not(
    make_run: Callable[[str], Run], cluster: Cluster, straight: Path, seed: int
) -> None:
    """Three blows at random moments; a job that is out of the queue is submitted again. Other seeds:
    `CHAOS_SEEDS=1,2,3 make test-services ARGS='-k random'`.
    """
    chance, run, blows = random.Random(seed), make_run(f"chaos-{seed}"), []
    job = run.submit()
    while True:
        if len(blows) < 3:
            blows.append(strike(run, job, chance=chance))
        else:
            after = cluster.ended(job)
            if after["ExitCode"] == "0:0" and after["JobState"] == "COMPLETED":
                break
            blows.append("again")
            assert len(blows) < 8, run.log(job)
        if cluster.job(job)["JobState"] not in LIVE:
            job = run.submit("ckpt_path=auto")
    print(f"seed {seed}: {', '.join(blows)}; restarts of the last job {cluster.job(job)['Restarts']}")
    run.assert_equal(straight)
