"""Commands and recipes on two ranks as torchrun starts them: one process a rank, each with the whole job.

programs.py forks the ranks, so that none imports anything again.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from programs import run_program

from olmo_rl.config import Config


def train_on_two_ranks(*arguments: str, place: Path) -> tuple[int, str]:
    """`torchrun train.py ...` in `place`, whose modules can be imported: the exit code, what was printed."""
    codes, printed = _launch("run_command", arguments, place)
    (code,) = set(codes)
    return code, printed


def recipe_on_two_ranks(config: Config, *, place: Path) -> None:
    """The recipe of a configuration in `place`. Raises AssertionError where a rank fails."""
    _launch("run_recipe", config, place)


def _launch(function: str, job: object, place: Path) -> tuple[list[int], str]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "ranks"
        directory.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (directory / "job").write_bytes(pickle.dumps((job, str(place), port)))
        printed = run_program(directory, f"launched:{function}*2")
        return [int(path.read_text()) for path in sorted(directory.glob("code*"))], printed


def run_command(number: int, world: int, directory: str) -> None:
    from olmo_rl.cli import run

    arguments = _join(number, world=world, directory=directory)
    Path(directory, f"code{number}").write_text(str(run(arguments)))


def run_recipe(number: int, world: int, directory: str) -> None:
    from olmo_rl.library import run

    run(_join(number, world=world, directory=directory))


def _join(number: int, *, world: int, directory: str) -> Any:
    """The job, once this process has the environment of its rank."""
    job, place, port = pickle.loads(Path(directory, "job").read_bytes())
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(place)
    sys.path.insert(0, place)
    return job
