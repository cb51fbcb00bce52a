"""How programs.py starts what forks, and what it makes of a step that fails or a rank that dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import run_program


def note(number: int, world: int, directory: str) -> None:
    import pyarrow

    assert pyarrow.default_memory_pool() is not None
    Path(directory, f"rank{number}").write_text(f"{world} {os.getpid()} {os.getppid()}")
    print(f"rank {number} was here")


def abort_in_rank_1(number: int, world: int, directory: str) -> None:
    if number == 1:
        os.abort()  # as glibc does that finds its heap corrupted


def fail(directory: str) -> None:
    raise ZeroDivisionError("the cause")


def test_ranks_are_forked_by_a_process_without_threads_that_has_imported_everything(tmp_path: Path) -> None:
    """Importing what is slow starts no thread, or the program would end before the first rank."""
    printed = run_program(tmp_path, "test_programs:note*2")
    found = [(tmp_path / f"rank{number}").read_text().split() for number in (0, 1)]
    assert [world for world, _, _ in found] == ["2", "2"]
    assert len({pid for _, pid, _ in found}) == 2
    assert len({parent for _, _, parent in found} - {str(os.getpid())}) == 1
    assert sorted(line for line in printed.splitlines() if "was here" in line) == [
        "rank 0 was here",
        "rank 1 was here",
    ]


def test_a_rank_that_dies_in_native_code_is_a_failure_at_once_that_names_its_stack_and_its_core(
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError) as failed:
        run_program(tmp_path, "test_programs:abort_in_rank_1*2")
    message = str(failed.value)
    assert "process 1 terminated with signal SIGABRT" in message
    assert "Fatal Python error: Aborted" in message
    assert "in abort_in_rank_1" in message
    assert "core_pattern: " in message
    for core in tmp_path.glob("core*"):
        core.unlink()  # hundreds of megabytes


def test_a_step_that_fails_ends_the_program_with_its_traceback_and_the_next_program_runs(
    tmp_path: Path,
) -> None:
    for step, cause in {
        "test_programs:fail": "ZeroDivisionError: the cause",
        "nowhere:step*2": "No module named 'nowhere'",
    }.items():
        with pytest.raises(AssertionError, match=cause):
            run_program(tmp_path, step, "test_programs:note*2")
        assert list(tmp_path.glob("rank*")) == []
    run_program(tmp_path, "test_programs:note*1")
    assert [path.name for path in tmp_path.glob("rank*")] == ["rank0"]
