"""How programs.py starts what forks, and what it makes of a rank that dies in native code."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest

ABORTED = "ProcessExitedException: process 1 terminated with signal SIGABRT"


def answering(
    monkeypatch: pytest.MonkeyPatch, directory: Path, *answers: tuple[int, str]
) -> Iterator[tuple[int, str]]:
    """Stand-ins for the interpreter, which each leave a file; those that were not started are left over."""
    left = iter(answers)

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        assert not (directory / "found").exists()
        (directory / "found").touch()
        code, told = next(left)
        return subprocess.CompletedProcess(command, code, "", told)

    monkeypatch.setattr(programs.subprocess, "run", run)
    return left


def test_a_program_whose_rank_died_in_native_code_is_told_and_runs_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "given").touch()
    answering(monkeypatch, tmp_path, (1, ABORTED), (0, ""))
    with pytest.warns(UserWarning, match="process 1 terminated with signal SIGABRT"):
        programs.run_program(tmp_path, "any:step")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found", "given"]


def test_a_program_whose_ranks_die_in_native_code_twice_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answering(monkeypatch, tmp_path, (1, ABORTED), (1, ABORTED))
    with pytest.warns(match="runs again"), pytest.raises(AssertionError, match="SIGABRT"):
        programs.run_program(tmp_path, "any:step")


@pytest.mark.parametrize("told", ["AssertionError", "terminated with signal SIGKILL", "signal SIGTERM"])
def test_any_other_failure_is_a_failure_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str
) -> None:
    left = answering(monkeypatch, tmp_path, (1, told), (0, ""))
    with pytest.raises(AssertionError, match=told):
        programs.run_program(tmp_path, "any:step")
    assert list(left) == [(0, "")]


def test_what_forks_has_one_thread_and_a_step_that_fails_is_told(tmp_path: Path) -> None:
    """Importing what is slow starts no thread, or `fork` would refuse before the step is looked for."""
    with pytest.raises(AssertionError, match="No module named 'nowhere'"):
        programs.run_program(tmp_path, "nowhere:step*2")
