"""Where metrics go beside the terminal: metrics.csv always, Weights & Biases or TensorBoard where the
configuration asks for them, and the user's own loggers.

A run has one identity for life, kept in its directory: a resumed run continues its W&B run, and its
TensorBoard events from the checkpoint on. Jobs of a sweep are named by it and share its group.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from olmo_rl.complete_files import write_complete
from olmo_rl.config import Config, LoggerKind
from olmo_rl.running.metrics_csv import MetricsCsv

IDENTITY = ".logger-id"  # in the run directory
SHOWN = ("step", "reward", "advantage", "prompt", "response", "finish_reason", "tokens", "policy_version")


class WandbRun(WandbLogger):
    """One W&B run for a run directory: it ends with the training, so that the next job of a sweep starts its
    own.
    """

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None

    def log_samples(self, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Show kept samples as a table."""
        data = [[row[name] for name in SHOWN] for row in rows]
        self.log_table("samples", columns=list(SHOWN), data=data, step=step)


class TensorBoardRun(TensorBoardLogger):
    """Events in `tensorboard/` of the run directory. `resumed`: the update of the checkpoint that the run
    continues, whose later events are of updates that it makes again.
    """

    def __init__(self, run_dir: str, *, resumed: int | None) -> None:
        purge: dict[str, Any] = {} if resumed is None else {"purge_step": resumed + 1}
        super().__init__(run_dir, name="", version="tensorboard", default_hp_metric=False, **purge)

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration lies in .hydra/; there is nothing to add here."""

    @rank_zero_only
    def log_samples(self, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Show kept samples as text."""
        lines = [f"reward {row['reward']}\n\n    {row['prompt']}\n\n    {row['response']}" for row in rows]
        self.experiment.add_text("samples", "\n\n---\n\n".join(lines), step)


def build_loggers(config: Config, *, resumed: int | None = None) -> list[Logger]:
    """The loggers that this project makes; `resumed`: the update of the checkpoint that the run continues."""
    loggers: list[Logger] = [MetricsCsv(Path(config.run_dir) / "metrics.csv")]
    if config.logger.kind is LoggerKind.wandb:
        name, group = names_of(config)
        loggers.append(
            WandbRun(
                project=config.logger.project,
                name=name,
                group=group,
                id=identity_of(config.run_dir),
                save_dir=config.run_dir,
                offline=config.logger.offline,
                config=plain(asdict(config)),
            )
        )
    if config.logger.kind is LoggerKind.tensorboard:
        loggers.append(TensorBoardRun(config.run_dir, resumed=resumed))
    return loggers


def names_of(config: Config) -> tuple[str, str | None]:
    """The name of a run for people, and the sweep that it is a job of, None elsewhere."""
    path = Path(config.run_dir)
    if path.name.isdecimal():
        return f"{path.parent.name}-{path.name}", path.parent.name
    return path.name, None


@rank_zero_only
def identity_of(run_dir: str) -> str:
    """The identity of the run in a directory, made when it is first asked for; on rank 0, which logs."""
    path = Path(run_dir) / IDENTITY
    if path.is_file():
        return path.read_text(encoding="utf-8").strip()
    identity = uuid.uuid4().hex[:12]
    write_complete(path, identity)
    return identity


def plain(value: Any) -> Any:
    """A configuration as JSON has it: words in place of the members of an Enum."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value.value if isinstance(value, Enum) else value
