"""A numbered run directory for a sweep that is not named: Hydra calls this before and after all jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write
from typing_extensions import override

from olmo_rl.config import Config
from olmo_rl.numbered_runs import link_newest, unchosen, with_directory
from olmo_rl.overrides import is_named, sets
from olmo_rl.types import Refusal


class NumberedSweep(Callback):
    """Gives a sweep without a name a numbered directory, chosen once; the jobs lie below it."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    @override
    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        overrides = config.hydra.overrides
        if is_named(overrides.task) or sets(overrides.hydra, "hydra.sweep.dir"):
            return
        values = Config(
            recipe=config.recipe,
            ckpt_path=config.ckpt_path,
            overwrite=config.overwrite,
            run_dir=unchosen(config.run_name, root=Path(config.hydra.runtime.cwd) / "outputs"),
        )
        try:
            chosen = with_directory(values, environ=os.environ)[0]
        except Refusal:  # Hydra cannot create its directory either, and reports that
            return
        if chosen.run_dir:
            self._directory = Path(chosen.run_dir)
            with read_write(config.hydra), open_dict(config.hydra):
                overrides.hydra.append(f"hydra.sweep.dir='{self._directory}'")
                config.hydra.sweep.dir = str(self._directory)

    @override
    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if self._directory is not None:
            link_newest(self._directory)
