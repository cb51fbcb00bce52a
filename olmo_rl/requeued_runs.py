"""Which run a job of a scheduler goes on with when it was requeued: its own, or the start that was asked for.

`.jobs-<kind>` in a run directory has one line for every start of a job whose files of that kind are in place
there; it is put aside and put back with these files. A job that the scheduler started again is given the
same command. Where a start of it is recorded it resumes its newest checkpoint; without one it starts as its
command says, in place of what the earlier attempt left. Where none is recorded the command counts as it is.
No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from olmo_rl.config import Config
from olmo_rl.run_directory import named_checkpoints
from olmo_rl.run_lease import this_process


def kind_of(config: Config) -> str:
    """Return the kind of a run: train and sft write the same files."""
    return "train" if config.trains else config.recipe.value


def jobs_file(run_dir: str | Path, *, kind: str) -> Path:
    """Return the file that lists the starts of jobs in a run directory."""
    return Path(run_dir) / f".jobs-{kind}"


def note_job(run_dir: str | Path, *, kind: str, environ: Mapping[str, str]) -> None:
    """Record this start of the job that this process belongs to, where it belongs to one."""
    owner, path = this_process(environ), jobs_file(run_dir, kind=kind)
    if owner.job is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(owner)) + "\n")


def is_requeued(run_dir: str | Path, *, kind: str, environ: Mapping[str, str]) -> bool:
    """Return whether the scheduler requeued this job after it had begun a run here, to which it has not
    returned since.
    """
    mine = this_process(environ)
    if mine.job is None:
        return False
    starts = [line["restarts"] for line in _starts(jobs_file(run_dir, kind=kind)) if line["job"] == mine.job]
    return bool(starts) and max(starts) < mine.restarts


def continued(config: Config) -> Config:
    """Return the configuration with which a requeued job goes on in the run directory that it owns: resumed
    where it has saved, else as its command says, in place of what the earlier attempt left.
    """
    saved = config.trains and named_checkpoints(config.run_dir)
    if saved or not config.trains or config.ckpt_path == "auto":
        return replace(config, ckpt_path="auto", overwrite=False)
    return replace(config, overwrite=True)


def _starts(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of starts; one that a killed process left unfinished is none."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            start = json.loads(line)
        except ValueError:
            continue
        if isinstance(start, dict) and isinstance(start.get("restarts"), int) and "job" in start:
            yield start
