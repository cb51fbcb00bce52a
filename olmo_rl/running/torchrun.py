"""torchrun with signals and exit codes of this project: `python -m olmo_rl.running.torchrun ARGUMENTS`.

torchrun itself is ended by SIGUSR1, which leaves its ranks behind; after another signal it gives ranks that
are saving 30 seconds, and it exits with 1 whatever ranks end with. Here each signal that ends a job reaches
every rank of this node once, the ranks save, and the exit code is theirs: 75 can be resumed, 2 refused.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from olmo_rl.run_directory import EXIT_INTERRUPTED
from olmo_rl.running.rank_process import handled_signals, leave_terminal, print_line

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_SAVING_SECONDS = 120  # that ranks have to end by themselves once the first has ended


def main() -> None:
    """Run the ranks of this node and exit with their code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    config, command, arguments = config_from_args(parse_args(sys.argv[1:]))
    config.signals_to_handle = "SIGQUIT"  # its handlers would replace ours
    config.shutdown_timeout = _SAVING_SECONDS
    for number in handled_signals():
        signal.signal(number, _pass_on)
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as failed:
        failures: Mapping[int, ProcessFailure] = failed.failures
        sys.exit(_report(failures))


def _report(failures: Mapping[int, ProcessFailure]) -> int:
    """Print which rank ended the job and the end of its log; return the exit code of the job. The first rank
    that ended by itself is the cause: torchrun ends the others by SIGTERM, and they may save.
    """
    ours = (EXIT_INTERRUPTED, -signal.SIGTERM)
    causes = [rank for rank, failure in failures.items() if failure.exitcode not in ours]
    if not causes:
        saved = any(failure.exitcode == EXIT_INTERRUPTED for failure in failures.values())
        return EXIT_INTERRUPTED if saved else 128 + signal.SIGTERM
    rank = min(causes, key=lambda rank: (failures[rank].timestamp, rank))
    failure = failures[rank]
    if failure.exitcode < 0:
        print(f"rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
    log = Path(os.environ.get("RANK_LOGS", "")) / f"rank-{rank}.log"
    if rank > 0 and log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        print("\n".join([f"--- the end of {log}:", *lines]), file=sys.stderr, flush=True)
    return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Send a signal to the ranks that run, once each; end where there is none yet."""
    leave_terminal(number)
    ranks = _children()
    if not ranks:
        sys.exit(128 + number)
    print_line(f"{signal.Signals(number).name}: the ranks save and end")
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> list[int]:
    """The processes that this one started, which are its ranks."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found += map(int, path.read_text().split())
    return found


if __name__ == "__main__":
    main()
