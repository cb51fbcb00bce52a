"""Ranks of one job, with real processes. Entries stand at module level: children import them by name."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
from bounds import BOUND_SECONDS

from olmo_rl import progress
from olmo_rl.config import Config, TrainerConfig
from olmo_rl.running import heartbeat
from olmo_rl.running.launchers import launched_rank, launched_world, rank_variables
from olmo_rl.running.rank_process import Named, device_variables, threads_per_rank
from olmo_rl.running.ranks import run_ranks
from olmo_rl.types import Interrupted, RankFailed, Refusal


def world(devices: int, *, directory: Path | str = "", nodes: int = 1) -> Config:
    """A configuration whose `run_dir` carries the test's directory to the ranks."""
    return Config(run_dir=str(directory), trainer=TrainerConfig(devices=devices, num_nodes=nodes))


def rank() -> int:
    return int(os.environ["RANK"])


def sleep_until_ended() -> NoReturn:
    while True:
        time.sleep(0.05)


def note(config: Config, name: str, text: str = "") -> None:
    """Leave a file; renaming makes it appear whole."""
    path = Path(config.run_dir) / name
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def ignore_sigterm_and_report_pid(config: Config) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(config, f"pid{rank()}", str(os.getpid()))


def wait_for_files(directory: Path, *names: str) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while not all((directory / name).exists() for name in names):
        assert time.monotonic() < deadline, f"{names} never appeared: {list(directory.iterdir())}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_all_ended(directory: Path, *, ranks: int) -> None:
    pids = [int((directory / f"pid{r}").read_text()) for r in range(ranks)]
    deadline = time.monotonic() + BOUND_SECONDS
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


def sum_ranks(config: Config) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")  # left open on purpose: run_ranks closes it
    value = torch.tensor([10.0 ** rank()])
    dist.all_reduce(value)
    os.environ["LEFT_BEHIND"] = "by the job"
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "OMP_NUM_THREADS")
    note(config, f"rank{rank()}", f"{value.item():.0f} " + " ".join(os.environ[name] for name in names))


def test_two_jobs_in_sequence_reach_every_rank_and_leave_the_environment_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    for job in ("first", "second"):
        (tmp_path / job).mkdir()
        run_ranks(sum_ranks, world(2, directory=tmp_path / job))
        assert (tmp_path / job / "rank0").read_text() == "11 2 2 0 0 1"
        assert (tmp_path / job / "rank1").read_text() == "11 2 2 1 0 1"
    assert dict(os.environ) == before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers


def refuse_within_a_group(config: Config) -> None:
    from olmo_rl.training.strategy import cluster_environment  # imports Lightning, which other ranks need not

    sum_ranks(config)
    environment = cluster_environment()
    assert environment.creates_processes_externally
    raise Refusal(f"ranks {environment.world_size()} {environment.global_rank()} {environment.local_rank()}")


def test_one_rank_runs_in_this_process_and_leaves_no_group_behind(tmp_path: Path) -> None:
    import torch.distributed as dist

    before = dict(os.environ)
    run_ranks(sum_ranks, world(1, directory=tmp_path))
    assert (tmp_path / "rank0").read_text() == "1 1 1 0 0 1"
    assert not dist.is_initialized()
    with pytest.raises(Refusal, match="ranks 1 0 0"):
        run_ranks(refuse_within_a_group, world(1, directory=tmp_path))
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def refuse_in_rank_1(config: Config) -> None:
    ignore_sigterm_and_report_pid(config)
    if rank() == 1:
        wait_for_files(Path(config.run_dir), "pid0")  # or rank 0 may be ended before it has become stubborn
        raise Refusal(["sample 7 is too long: shorten it", "sample 8 too"])
    sleep_until_ended()


def test_a_refusal_in_rank_1_is_raised_as_that_refusal_and_ends_a_stubborn_rank_0(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    with pytest.raises(Refusal) as refused:
        run_ranks(refuse_in_rank_1, world(2, directory=tmp_path))
    assert refused.value.reasons == ("sample 7 is too long: shorten it", "sample 8 too")
    assert time.monotonic() - started < BOUND_SECONDS
    assert_all_ended(tmp_path, ranks=2)
    assert "Traceback" not in capfd.readouterr().err


def fail_in_rank_1_while_rank_0_waits_for_it(config: Config) -> None:
    import torch.distributed as dist

    note(config, f"pid{rank()}", str(os.getpid()))
    dist.init_process_group("gloo")
    if rank() == 1:
        raise ZeroDivisionError("the cause")
    dist.barrier()


def end_without_a_word(config: Config) -> None:
    note(config, f"pid{rank()}", str(os.getpid()))
    if rank() == 0:
        sleep_until_ended()
    wait_for_files(Path(config.run_dir), "pid0")
    os._exit(0)


def call_sys_exit(config: Config) -> None:
    if rank() == 1:
        sys.exit(0)
    sleep_until_ended()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (end_without_a_word, "rank 1 ended with exit code 0 before its work was done"),
        (call_sys_exit, r"rank 1 failed:(.|\n)*call_sys_exit(.|\n)*ended the process: sys.exit\(0\)"),
    ],
)
def test_a_rank_that_ends_before_its_work_is_done_has_failed_whatever_its_exit_code(
    tmp_path: Path, entry: Callable[[Config], None], message: str
) -> None:
    with pytest.raises(RankFailed, match=message):
        run_ranks(entry, world(2, directory=tmp_path))


def test_one_process_fails_too_where_something_calls_sys_exit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"sys.exit\(0\)"):
        run_ranks(lambda config: sys.exit(0), world(1, directory=tmp_path))


def test_an_entry_given_by_name_is_imported_by_its_ranks_alone(tmp_path: Path) -> None:
    """This process has no such module on its path, and the ranks look where it looks."""
    (tmp_path / "only_ranks.py").write_text(
        "import os, pathlib\n"
        "def entry(config):\n"
        "    pathlib.Path(config.run_dir, 'rank' + os.environ['RANK']).write_text(str(os.getpid()))\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        run_ranks(Named(name="only_ranks:entry"), world(2, directory=tmp_path))
    finally:
        sys.path.remove(str(tmp_path))
    assert "only_ranks" not in sys.modules
    assert len({(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)} | {str(os.getpid())}) == 3


def test_a_failure_in_one_rank_is_shown_once_and_is_not_hidden_by_the_broken_connection_of_the_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed, match="the cause") as failed:
        run_ranks(fail_in_rank_1_while_rank_0_waits_for_it, world(2, directory=tmp_path))
    message = str(failed.value)
    assert message.startswith("rank 1 failed:\nTraceback")
    assert "fail_in_rank_1_while_rank_0_waits_for_it" in message
    assert failed.value.signum is None
    assert "Traceback" not in capfd.readouterr().err
    assert_all_ended(tmp_path, ranks=2)


def kill_rank_1_while_rank_0_waits_for_it(config: Config) -> None:
    import torch.distributed as dist

    note(config, f"pid{rank()}", str(os.getpid()))
    dist.init_process_group("gloo")
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL") as failed:
        run_ranks(kill_rank_1_while_rank_0_waits_for_it, world(2, directory=tmp_path))
    assert failed.value.signum == signal.SIGKILL
    assert_all_ended(tmp_path, ranks=2)


def abort_in_rank_1(config: Config) -> None:
    note(config, f"pid{rank()}", str(os.getpid()))
    if rank() == 1:
        wait_for_files(Path(config.run_dir), "pid0")
        os.abort()  # as glibc does that finds its heap corrupted
    sleep_until_ended()


def test_a_rank_that_dies_in_native_code_is_named_and_tells_where_its_threads_were(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGABRT"):
        run_ranks(abort_in_rank_1, world(2, directory=tmp_path))
    output = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in output
    assert "in abort_in_rank_1" in output
    assert_all_ended(tmp_path, ranks=2)


def stop_rank_1_while_rank_0_waits_for_it(config: Config) -> None:
    import torch.distributed as dist

    note(config, f"pid{rank()}", str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    progress.note_update(12, packs=5)
    progress.note_pack(3)
    progress.note_phase("backward")
    progress.note_collective("sum_over_ranks")
    time.sleep(2 * heartbeat.BEAT_SECONDS)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def test_a_stopped_rank_is_named_with_its_place_before_the_job_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STOPPED_SECONDS", 1.0)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.5)
    with pytest.raises(RankFailed) as failed:
        run_ranks(stop_rank_1_while_rank_0_waits_for_it, world(2, directory=tmp_path))
    assert_all_ended(tmp_path, ranks=2)
    place = (
        "rank 1 has not moved since update 12, pack 3 of 5, phase backward, last collective sum_over_ranks"
    )
    for text in (capfd.readouterr().err, str(failed.value)):
        assert place in text
        assert f"s on host {socket.gethostname()} (process {(tmp_path / 'pid1').read_text()}" in text
        assert ", stopped by a signal)" in text
    assert "rank 0 failed" in str(failed.value)
    assert not (tmp_path / heartbeat.DIRECTORY).exists()


def fill_the_disk(config: Config) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), config.run_dir)


def test_a_full_disk_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"disk full: .* [\d,.]+ of [\d,.]+ MiB are free there: free"):
        run_ranks(fill_the_disk, world(1, directory=tmp_path))


def test_ranks_on_gpus_get_an_allocator_and_words_of_nccl_unless_the_environment_has_its_own() -> None:
    gpu = Config(trainer=TrainerConfig(accelerator="gpu"))
    ours = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_DEBUG": "WARN"}
    assert device_variables({}, config=gpu) == ours
    assert device_variables({"NCCL_DEBUG": "INFO", "PYTORCH_CUDA_ALLOC_CONF": "x"}, config=gpu) == {}
    assert device_variables({}, config=Config()) == {}


def save_and_exit_75(config: Config) -> None:
    note(config, f"pid{rank()}", str(os.getpid()))
    wait_for_files(Path(config.run_dir), "pid0")
    if rank() == 1:
        rank_0 = int((Path(config.run_dir) / "pid0").read_text())
        while is_running(rank_0):
            time.sleep(0.02)
        time.sleep(1.0)  # rank 0 has gone; this rank is still saving and is given the time
        note(config, "saved")
    wait_for_files(Path(config.run_dir), "pid1")
    sys.exit(75)


def test_exit_code_75_of_the_ranks_is_the_exit_code_of_the_job_and_slow_ranks_finish_saving(
    tmp_path: Path,
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_ranks(save_and_exit_75, world(2, directory=tmp_path))
    assert ended.value.code == 75
    assert (tmp_path / "saved").exists()


def count_signals(config: Config) -> None:
    counts = dict.fromkeys((signal.SIGINT, signal.SIGUSR1, signal.SIGTERM), 0)

    def count(signum: int, _frame: object) -> None:
        counts[signal.Signals(signum)] += 1
        note(config, f"got-{signum}-rank{rank()}")

    for signum in counts:
        signal.signal(signum, count)
    note(config, f"pid{rank()}", str(os.getpid()))
    while not counts[signal.SIGTERM]:
        time.sleep(0.02)
    note(config, f"counts{rank()}", str([counts[s] for s in counts]))


def sleep(config: Config) -> None:
    note(config, f"pid{rank()}", str(os.getpid()))
    sleep_until_ended()


def supervisor(directory: Path, *entries: Callable[[Config], None]) -> subprocess.Popen[str]:
    """A process that runs jobs of two ranks one after the other and prints the exit code of each.

    It leads a process group of its own, as under a terminal.
    """
    names = [entry.__name__ for entry in entries]
    code = f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        import test_processes as t
        for name in {names!r}:
            try:
                t.run_ranks(getattr(t, name), t.world(2, directory={str(directory)!r} + "/" + name))
            except SystemExit as ended:
                print(ended.code, flush=True)
            else:
                print(0, flush=True)
        """
    for name in names:
        (directory / name).mkdir()
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0)


def test_each_signal_to_the_supervisor_reaches_each_rank_once_even_from_a_terminal(tmp_path: Path) -> None:
    process = supervisor(tmp_path, count_signals)
    ranks = tmp_path / "count_signals"
    try:
        wait_for_files(ranks, "pid0", "pid1")
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: the whole foreground group gets it
        wait_for_files(ranks, "got-2-rank0", "got-2-rank1")
        process.send_signal(signal.SIGUSR1)
        wait_for_files(ranks, "got-10-rank0", "got-10-rank1")
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=BOUND_SECONDS)
    finally:
        process.kill()
    assert output[0] == "0\n"  # the ranks took the signals and ended well
    assert [line.partition(":")[0] for line in output[1].splitlines()] == ["SIGINT", "SIGUSR1", "SIGTERM"]
    assert output[1].count("a second Ctrl-C ends them at once") == 3
    assert [(ranks / f"counts{r}").read_text() for r in (0, 1)] == ["[1, 1, 1]"] * 2
    assert_all_ended(ranks, ranks=2)


def be_terminated(config: Config) -> None:
    note(config, f"pid{rank()}", str(os.getpid()))
    sleep_until_ended()


def be_interrupted(config: Config) -> None:
    be_terminated(config)


def resist_sigterm(config: Config) -> None:
    ignore_sigterm_and_report_pid(config)
    sleep_until_ended()


def save_for_ever(config: Config) -> None:
    signal.signal(signal.SIGINT, lambda *_: note(config, f"saving{rank()}"))
    note(config, f"pid{rank()}", str(os.getpid()))
    sleep_until_ended()


def test_a_second_ctrl_c_ends_ranks_at_once_that_are_still_saving(tmp_path: Path) -> None:
    process = supervisor(tmp_path, save_for_ever)
    ranks = tmp_path / "save_for_ever"
    try:
        wait_for_files(ranks, "pid0", "pid1")
        process.send_signal(signal.SIGINT)
        wait_for_files(ranks, "saving0", "saving1")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=BOUND_SECONDS)
    finally:
        process.kill()
    assert output == f"{128 + signal.SIGINT}\n"
    assert errors.splitlines()[-1].startswith("a second Ctrl-C: ended at once")
    assert_all_ended(ranks, ranks=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_outside_of_updates_ends_one_process_with_128_and_its_number(
    tmp_path: Path, number: signal.Signals
) -> None:
    handler = signal.getsignal(number)
    with pytest.raises(Interrupted) as ended:
        run_ranks(lambda config: os.kill(os.getpid(), number), world(1, directory=tmp_path))
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == handler


def hide_the_signal(config: Config) -> None:
    """As torch does where a signal arrives while a checkpoint is read."""
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(BOUND_SECONDS)
    except BaseException as error:
        raise Refusal("ckpt_path: the checkpoint cannot be read: give another") from error


def test_a_signal_is_no_refusal_where_a_library_wraps_it(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as ended:
        run_ranks(hide_the_signal, world(1, directory=tmp_path))
    assert ended.value.code == 128 + signal.SIGUSR1


def test_ranks_end_of_signals_without_a_traceback_and_with_a_killed_supervisor(tmp_path: Path) -> None:
    process = supervisor(tmp_path, be_terminated, be_interrupted, resist_sigterm)
    try:
        for name, signum in (
            ("be_terminated", signal.SIGTERM),
            ("be_interrupted", signal.SIGINT),
            ("resist_sigterm", signal.SIGKILL),
        ):
            wait_for_files(tmp_path / name, "pid0", "pid1")
            process.send_signal(signum)
            if signum != signal.SIGKILL:
                assert process.stdout is not None
                assert int(process.stdout.readline()) == 128 + signum
        _, errors = process.communicate(timeout=BOUND_SECONDS)
    finally:
        process.kill()
    assert [line.partition(":")[0] for line in errors.splitlines()] == ["SIGTERM", "SIGINT"]
    for name in ("be_terminated", "be_interrupted", "resist_sigterm"):
        assert_all_ended(tmp_path / name, ranks=2)


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "9",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "MASTER_ADDR": "node0",
}


def test_a_process_without_a_launcher_is_no_rank() -> None:
    assert rank_variables({}, config=world(2)) is None
    assert launched_rank({}) is None
    assert launched_world({}) == 1
    batch_script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    interactive = {**SRUN, "SLURM_PTY_PORT": "5000"}
    for environ in (batch_script, interactive):
        assert rank_variables(environ, config=world(2)) is None
        assert launched_rank(environ) is None


def test_a_rank_of_torchrun_keeps_its_environment() -> None:
    assert rank_variables(TORCHRUN, config=world(2)) == {}
    assert launched_rank(TORCHRUN) == 1
    assert launched_world(TORCHRUN) == 2


def test_a_rank_of_srun_gets_the_variables_that_torchrun_would_set() -> None:
    assert launched_rank(SRUN) == 3
    assert launched_world(SRUN) == 4
    assert rank_variables(SRUN, config=world(2, nodes=2)) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "18456",
    }


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("gpu[03-05,9],login", "gpu03"),
        ("a,b[1-2]", "a"),
        ("r[1-2]-ib", "r1-ib"),
        ("127.0.0.[1-2]", "127.0.0.1"),
    ],
)
def test_ranks_that_srun_starts_without_our_script_meet_on_the_first_host(hosts: str, first: str) -> None:
    environ = {name: value for name, value in SRUN.items() if name != "MASTER_ADDR"}
    environ |= {"SLURM_STEP_NODELIST": hosts, "SLURM_STEP_ID": "1"}
    found = rank_variables(environ, config=world(2, nodes=2))
    assert found is not None
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == (first, "18553")


@pytest.mark.parametrize(
    ("environ", "devices", "nodes", "words"),
    [
        (
            {**SRUN, "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "1"},
            2,
            1,
            ["SLURM_NTASKS=1", "SLURM_NTASKS_PER_NODE=2", "trainer.devices=2", "trainer.num_nodes=1"],
        ),
        (SRUN, 4, 1, ["SLURM_NTASKS=4", "2(x2)", "trainer.devices=4", "--ntasks-per-node"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, 2, 2, ["3,1", "trainer.devices=2"]),
        (TORCHRUN, 4, 1, ["WORLD_SIZE=2", "trainer.devices=4 x trainer.num_nodes=1"]),
        (TORCHRUN, 1, 2, ["WORLD_SIZE=2", "2 of them here", "trainer.devices=1 x trainer.num_nodes=2"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2, 1, ["LOCAL_RANK", "MASTER_ADDR", "launch/torchrun.sh"]),
        ({}, 8, 2, ["trainer.num_nodes=2", "launch/slurm.sbatch"]),
    ],
)
def test_a_launcher_that_contradicts_the_configuration_is_refused_before_any_rank_waits(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], devices: int, nodes: int, words: list[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal) as refused:
        run_ranks(sum_ranks, world(devices, nodes=nodes))
    assert not [word for word in words if word not in str(refused.value)]


def test_the_cores_of_a_node_are_shared_out_over_its_ranks() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores
    assert threads_per_rank(2 * cores) == 1


def note_kernels(config: Config) -> None:
    """The compiled kernels on disk when this rank starts, by name."""
    kernels = sorted(path.name for path in Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbc"))
    Path(config.run_dir, f"kernels-rank{rank()}").write_text("\n".join(kernels))


@pytest.mark.timeout(900)
def test_the_planners_kernels_are_compiled_before_there_is_a_rank_that_could_wait(tmp_path: Path) -> None:
    code = f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        from dataclasses import replace
        import test_processes as t
        from olmo_rl.config import BalanceConfig, BalanceKind
        reference = BalanceConfig(kind=BalanceKind.reference)  # counts with kernels, searches without
        t.run_ranks(t.note_kernels, replace(t.world(2, directory={str(tmp_path)!r}), balance=reference))
        """
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = [(tmp_path / f"kernels-rank{number}").read_text().splitlines() for number in range(2)]
    assert found[0] == found[1]
    assert found[0], "kernels are there before a rank asks for them"
    assert done.stdout.count("balance=reference: compiling the planner's kernels") == 1
