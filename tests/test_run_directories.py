"""Run directories: who owns one, and what `overwrite=true` may delete when."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bounds import BOUND_SECONDS
from training_cases import config_of, files, write_files

from olmo_rl import library
from olmo_rl.config import Config, Recipe, TrainerConfig
from olmo_rl.replaced_runs import recover, replaced
from olmo_rl.run_directory import finish_checkpoint
from olmo_rl.run_lease import LEASE, STALE_SECONDS, Owner, lease, started, this_process
from olmo_rl.types import Refusal

OLD = {
    "metrics.csv": "step\n9\n",
    "checkpoints/step-9/weights": "old",
    "training_contract_rank0.jsonl": "{}\n",
}


def make_run(run_dir: Path, *, files: dict[str, str] = OLD) -> None:
    for name, text in files.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(text)


def contents(run_dir: Path, *names: str) -> dict[str, str]:
    return {name: (run_dir / name).read_text() for name in names}


def replacing(run_dir: Path, recipe: Recipe = Recipe.train) -> Config:
    return Config(recipe=recipe, run_dir=str(run_dir), overwrite=True)


def save_checkpoint(run_dir: Path, *, step: int) -> None:
    scratch = run_dir / "checkpoints" / f"step-{step}.incomplete"
    scratch.mkdir(parents=True)
    (scratch / "weights").write_text("new")
    finish_checkpoint(scratch, final=scratch.with_name(f"step-{step}"))


# overwrite=true


def test_a_refused_run_leaves_the_run_that_it_was_to_replace(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(1))
    make_run(tmp_path / "run")
    nodes = TrainerConfig(max_steps=1, num_nodes=2)  # refused without a launcher, after every check of files
    config = replace(config_of(tmp_path / "run"), overwrite=True, trainer=nodes)
    with pytest.raises(Refusal, match="needs a launcher"):
        library.run(config)
    assert contents(tmp_path / "run", *OLD) == OLD
    bad = tmp_path / "run" / "files" / "collection-00000.parquet"
    bad.write_bytes(b"no parquet")
    with pytest.raises(Refusal):
        library.run(replace(config, trainer=TrainerConfig(max_steps=1)))
    assert contents(tmp_path / "run", *OLD) == OLD


def test_the_replaced_run_is_deleted_when_the_new_one_has_a_checkpoint(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(1))
    make_run(tmp_path / "run")
    library.run(replace(config_of(tmp_path / "run"), overwrite=True))
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [
        "checkpoints",
        "files",
        "metrics.csv",
        "report.html",
        "samples",
        "training_contract_rank0.jsonl",
    ]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]


def interrupted_replacement(run_dir: Path) -> None:
    with replaced(replacing(run_dir)):
        assert not (run_dir / "metrics.csv").exists()
        make_run(run_dir, files={"metrics.csv": "step\n1\n", "checkpoints/step-1.incomplete/weights": "new"})
        raise SystemExit(143)


def test_a_run_that_ends_before_its_first_checkpoint_puts_the_replaced_one_back(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(SystemExit):
        interrupted_replacement(tmp_path)
    assert contents(tmp_path, *OLD) == OLD
    assert (tmp_path / ".ended-train" / "metrics.csv").read_text() == "step\n1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".ended-train",
        "checkpoints",
        "metrics.csv",
        "training_contract_rank0.jsonl",
    ]


class Killed(BaseException):
    """Stands for the end of the process at one file operation."""


def killed_replacement(config: Config, *, left: list[int], saved: bool) -> None:
    """Replace a run until the file operations that are left are used up; of those that put the old run back
    in place there are at most three.
    """
    with replaced(config):
        if saved:
            save_checkpoint(Path(config.run_dir), step=1)
        left[0] = min(left[0], 3)
        raise Killed


@pytest.mark.parametrize("saved", [False, True])
def test_wherever_a_replacing_run_is_killed_the_next_command_finds_one_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    rename = Path.rename
    old = {**OLD, ".jobs-train": "{}\n"}
    for strike in range(14):
        run_dir = tmp_path / f"{saved}-{strike}"
        make_run(run_dir, files=old)
        left = [strike]

        def counted(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return rename(self, target)

        config = replacing(run_dir)
        monkeypatch.setattr(Path, "rename", counted)
        with pytest.raises(Killed):
            killed_replacement(config, left=left, saved=saved)
        monkeypatch.setattr(Path, "rename", rename)
        recover(config)
        if (run_dir / "checkpoints" / "step-1").exists():
            assert sorted(path.name for path in run_dir.iterdir()) == ["checkpoints"]
        else:
            assert contents(run_dir, *old) == old, strike
        assert not [path for path in run_dir.iterdir() if path.name.startswith((".replaced", ".moving"))]


def test_overwriting_replaces_what_this_recipe_left_and_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path, files={**OLD, "rollouts/a": "", "mine.txt": ""})
    with replaced(replacing(tmp_path, Recipe.plan)):
        assert (tmp_path / "metrics.csv").exists()
    with replaced(replacing(tmp_path)):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "rollouts"]
    with replaced(replacing(tmp_path, Recipe.rollout)):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt"]


def test_a_linked_directory_is_replaced_without_touching_its_target(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "kept").touch()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(target)
    with replaced(replacing(run_dir)):
        assert list(run_dir.glob("checkpoints")) == []
    assert list(run_dir.iterdir()) == []
    assert (target / "kept").exists()


# Leases


def owner_elsewhere(**changes: object) -> Owner:
    mine = this_process({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "0"})
    return replace(mine, host="far-away", pid=4242, **changes)  # type: ignore[arg-type]


def write_lease(run_dir: Path, owner: Owner, *, age: float = 0.0) -> None:
    (run_dir / LEASE).write_text(json.dumps(asdict(owner)))
    heartbeat = time.time() - age
    os.utime(run_dir / LEASE, (heartbeat, heartbeat))


def test_a_second_live_process_is_refused_by_host_process_and_time(tmp_path: Path) -> None:
    with lease(tmp_path):
        with pytest.raises(Refusal) as caught, lease(tmp_path):
            pass
        (reason,) = caught.value.reasons
        assert f"in use by process {os.getpid()} on host {socket.gethostname()}, since 20" in reason
        with pytest.raises(Refusal, match="in use by process"):
            library.run(replace(config_of(tmp_path), overwrite=True))
        link = tmp_path.with_name(tmp_path.name + "-link")
        link.symlink_to(tmp_path)
        with pytest.raises(Refusal, match="in use by process"), lease(link):
            pass
    assert list(tmp_path.iterdir()) == []
    with lease(tmp_path):
        pass


def test_the_lease_of_a_killed_process_is_explained_and_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
        import sys, time
        from olmo_rl.run_lease import lease
        with lease(sys.argv[1]):
            print("owned", flush=True)
            time.sleep(1000)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"owned\n"
        with pytest.raises(Refusal, match=f"in use by process {process.pid} on"), lease(tmp_path):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=BOUND_SECONDS)
    with lease(tmp_path):
        out = capsys.readouterr().out
        assert f"the lease of process {process.pid} on host" in out
        assert "that process no longer exists; taken over" in out


def test_a_process_number_that_the_system_gave_to_another_process_is_no_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = this_process({})
    assert mine.started is not None
    assert mine.started == started(os.getpid())
    write_lease(tmp_path, replace(mine, started=mine.started - 1))
    with lease(tmp_path):
        assert "no longer exists; taken over" in capsys.readouterr().out
    write_lease(tmp_path, mine)  # on a file system without locks
    with pytest.raises(Refusal, match="in use by process"), lease(tmp_path):
        pass


def test_the_lease_of_another_host_is_stale_without_a_heartbeat_or_after_a_requeue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lease(tmp_path, owner_elsewhere(), age=STALE_SECONDS - 60)
    with pytest.raises(Refusal, match="process 4242 on host far-away, job 77, since"), lease(tmp_path):
        pass
    for age in (STALE_SECONDS + 60, -STALE_SECONDS - 60):  # the second: a clock that went back
        write_lease(tmp_path, owner_elsewhere(), age=age)
        with lease(tmp_path):
            assert "no heartbeat for" in capsys.readouterr().out
    write_lease(tmp_path, owner_elsewhere())
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(Refusal, match="in use by"), lease(tmp_path):
        pass
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with lease(tmp_path):
        assert "the scheduler requeued that job; taken over" in capsys.readouterr().out


def test_a_damaged_lease_belongs_to_nobody(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"host": 1}'):
        (tmp_path / LEASE).write_text(text)
        with lease(tmp_path):
            pass


def test_a_run_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "far")
    for run_dir in (tmp_path / "file", Path("/proc/1/run"), tmp_path / "link"):
        with pytest.raises(Refusal, match=f"the run directory {run_dir} cannot be written, "), lease(run_dir):
            pass


def test_the_reasons_of_configuration_data_and_run_directory_come_together(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    write_files(tmp_path / "run", files(1))
    (tmp_path / "run" / "files" / "collection-00000.parquet").write_bytes(b"no parquet")
    with pytest.raises(Refusal) as caught:
        library.run(config_of(tmp_path / "run"))
    assert len(caught.value.reasons) == 2
    assert "the run directory holds an earlier run" in caught.value.reasons[0]
    assert "collection-00000.parquet" in caught.value.reasons[1]
