"""Commands on several ranks as torchrun starts them: one process a rank, each with the whole command line.

programs.py forks the ranks, so that none imports anything anew.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from programs import run_program


def train_on_two_ranks(*arguments: str, place: Path) -> tuple[int, str]:
    """`torchrun train.py ...` in `place`, whose modules can be imported: the exit code, what was printed."""
    with tempfile.TemporaryDirectory() as scratch, socket.create_server(("127.0.0.1", 0)) as free:
        directory, port = Path(scratch) / "ranks", free.getsockname()[1]
        free.close()
        directory.mkdir()
        command = {"arguments": arguments, "place": str(place), "port": port}
        (directory / "command.json").write_text(json.dumps(command))
        printed = run_program(directory, "launched:run_rank*2")
        (code,) = {int((directory / f"code{rank}").read_text()) for rank in range(2)}
        return code, printed


def run_rank(number: int, world: int, directory: str) -> None:
    from olmo_rl.cli import run

    command = json.loads(Path(directory, "command.json").read_text())
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(command["port"])}
    os.chdir(command["place"])
    sys.path.insert(0, command["place"])
    code = run(command["arguments"])
    Path(directory, f"code{number}").write_text(str(code))
