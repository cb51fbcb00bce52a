"""A callback that stops a rank before one update until a test lets it go on, or a signal arrives."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from bounds import BOUND_SECONDS
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class Hold(Callback):
    """Leaves `update-<n>` and `pid<rank>` below `directory` when update n begins, and waits there for as long
    as `hold-<n>` exists.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._signalled = False
        self._chained = False

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._chained:
            self._chained = True
            for number in (signal.SIGUSR1, signal.SIGTERM):
                self._chain(number)
        update = trainer.global_step + 1
        (self._directory / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
        if trainer.is_global_zero:
            (self._directory / f"update-{update}").touch()
        deadline = time.monotonic() + BOUND_SECONDS
        while (self._directory / f"hold-{update}").exists() and not self._signalled:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _chain(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)

        def arrived(signum: int, frame: FrameType | None) -> None:
            self._signalled = True
            assert callable(before)
            before(signum, frame)

        signal.signal(number, arrived)
