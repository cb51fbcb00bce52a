"""The private members of Lightning's trainer that this project uses, each with the reason. Tied to the pinned
version of Lightning.
"""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from typing_extensions import override


class _NoSignalHandlers(_SignalConnector):
    """Lightning's handlers would communicate with other ranks inside the handler; these do not."""

    @override
    def register_signal_handlers(self) -> None:
        """None."""


def without_signal_handlers(trainer: Trainer) -> Trainer:
    """The trainer, which leaves signals to this project."""
    trainer._signal_connector = _NoSignalHandlers(trainer)
    return trainer


def forget_logged(trainer: Trainer) -> None:
    """Drop the values that earlier steps logged: Lightning would repeat them in every later row."""
    cast(Any, trainer)._results.reset()


def write_row(trainer: Trainer) -> None:
    """Hand the values logged since the last row to the loggers. Lightning does so behind the hooks of an
    update, and a run killed between its checkpoint and its row would resume without that row.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    if trainer._results is None or progress.ready == progress.completed:
        return  # between updates: Lightning wrote it
    connector = trainer._logger_connector
    connector.update_train_step_metrics()
    connector.on_batch_end()  # values that other callbacks watch stay
    forget_logged(trainer)  # or the same row is written again
