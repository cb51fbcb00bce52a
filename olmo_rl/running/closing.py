"""What a run prints when it ends: what its updates show, what to try, and where to look."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from olmo_rl.config import Config
from olmo_rl.report.health import Health, health_of, verdict
from olmo_rl.report.reading import is_run, read_run
from olmo_rl.report.writing import write_last_report


def print_closing(config: Config, *, interrupted: bool) -> None:
    """Print the health of the run on rank 0, and write report.html where `callbacks.report` asks for it."""
    try:
        lines = _health_and_report(config, interrupted=interrupted)
    except Exception as error:  # the run itself has ended: nothing about its report may change its exit code
        reason = " ".join(str(error).split()) or "no reason given"
        lines = [f"warning: no closing report: {type(error).__name__}: {reason}"]
    lines.append(f"run directory: {config.run_dir}")
    console = Console()
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _health_and_report(config: Config, *, interrupted: bool) -> list[str]:
    path = Path(config.run_dir)
    if not is_run(path):
        return []
    record = read_run(path, key="run", status="interrupted" if interrupted else "finished")
    lines = closing_lines(health_of(record))
    if config.callbacks.report:
        lines.append(write_last_report(record))
    return lines


def closing_lines(lines: list[Health]) -> list[str]:
    """The verdict, then what is not good with what to try."""
    found = [f"this run looks {verdict(lines)}"]
    for line in lines:
        if line.level in ("warn", "bad"):
            found.append(f"  {line.title}: {line.found}" + (f". Try: {line.advice}" if line.advice else ""))
    return found
