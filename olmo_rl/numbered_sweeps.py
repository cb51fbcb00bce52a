"""A numbered run directory for a sweep that is not named: Hydra calls this before all jobs. It is never taken
for a run: `ckpt_path=last`, `auto` and `overwrite=true` look for directories of runs. After all jobs, what
refused ones left empty is removed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write
from typing_extensions import override

from olmo_rl.numbered_runs import MARK, WITHOUT_FILES, link_newest, new_directory, removed_if_empty
from olmo_rl.overrides import is_named, sets
from olmo_rl.running.launchers import launched_rank, launched_world
from olmo_rl.types import Refusal

RECORD = "multirun.yaml"  # which Hydra writes before the jobs


class NumberedSweep(Callback):
    """Gives a sweep without a name a numbered directory, chosen once; the jobs lie below it."""

    @override
    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        overrides = config.hydra.overrides
        if (world := launched_world(os.environ)) > 1:
            _refuse(
                f"a sweep under a launcher of {world} ranks: start it without torchrun or srun, it starts "
                "the ranks of each job itself, or choose hydra/launcher=slurm"
            )
        if is_named(overrides.task) or sets(overrides.hydra, "hydra.sweep.dir"):
            return
        if config.recipe in WITHOUT_FILES:
            return
        try:
            directory = new_directory(
                Path(config.hydra.runtime.cwd) / "outputs" / config.run_name, kind="sweep"
            )
        except Refusal as refusal:
            _refuse(*refusal.reasons)
        link_newest(directory)
        with read_write(config.hydra), open_dict(config.hydra):
            overrides.hydra.append(f"hydra.sweep.dir='{directory}'")
            config.hydra.sweep.dir = str(directory)

    @override
    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        directory = Path(str(config.hydra.sweep.dir))
        if not directory.is_dir():
            return
        for job in [path for path in directory.iterdir() if path.is_dir() and not any(path.iterdir())]:
            job.rmdir()
        record = directory / RECORD
        if {path.name for path in directory.iterdir()} <= {MARK, RECORD}:
            record.unlink(missing_ok=True)
            removed_if_empty(directory) if (directory / MARK).is_file() else directory.rmdir()


def _refuse(*reasons: str) -> NoReturn:
    """End this command: Hydra turns exceptions of callbacks into warnings."""
    if not launched_rank(os.environ):
        print("refused, one reason:", *reasons, sep="\n  ", file=sys.stderr, flush=True)
    raise SystemExit(2)
