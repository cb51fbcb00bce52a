"""When a run saves, and how it ends: after an interruption, or by a refusal in the middle.

A checkpoint is written into a scratch directory by all ranks; rank 0 gives it its name when everybody has
finished (checkpoint_writer.py). A run that names an older checkpoint by `ckpt_path` is another run: it has a
directory of its own, and nobody deletes what lies in a directory that is not theirs.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmo_rl.config import Config
from olmo_rl.progress import note_phase
from olmo_rl.run_directory import SCRATCH, checkpoint_directory
from olmo_rl.running.checkpoint_writer import CheckpointWriter
from olmo_rl.running.rank_process import handled_signals, leave_terminal, print_line
from olmo_rl.training.lightning_internals import write_row
from olmo_rl.types import Refusal

# For ranks that were refused the same to come together; a rank that was not never comes.
_TOGETHER = timedelta(seconds=20)


class Checkpoints(Callback):
    """Saves every `callbacks.checkpoint_interval` updates, `callbacks.checkpoint_minutes` after the last
    save, at the end, and before an interruption or a refusal that met every rank ends the run.

    Between updates a save is written beside the training that goes on; one at a time: a save that an interval
    asks for waits for the one before it, one that minutes ask for follows it. Its failure ends the run after
    the update in which it happens. The last save of a run is awaited.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 set a flag; after the current update all ranks agree on it, save
    outside the handler and stop. `interrupted` then makes the recipe exit with code 75. A second SIGINT ends
    at once.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._signals: list[int] = []
        self.interrupted = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._last_saved = -1
        self._saved_at = time.monotonic()
        self._leavers: dist.ProcessGroup | None = None
        self._writer: CheckpointWriter | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > 0:
            self._last_saved = trainer.global_step  # where this run resumes
        self._saved_at = time.monotonic()
        if trainer.world_size > 1:
            # Apart from the group that updates use: a rank may be in the middle of a collective there.
            # Its own timeout too: a rank other than 0 waits in the barrier for as long as its group allows.
            self._leavers = dist.new_group(backend="gloo", timeout=_TOGETHER)
        if trainer.is_global_zero:  # what a killed run was writing
            for scratch in checkpoint_directory(self._config.run_dir).glob(f"step-*{SCRATCH}"):
                shutil.rmtree(scratch)
        self._writer = CheckpointWriter(self._config, trainer)
        for number in handled_signals():
            self._handlers[number] = signal.signal(number, self._on_signal)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Refusal) and self._unsaved(trainer) and self._everybody_leaves(trainer):
            self._save(trainer)
            if trainer.is_global_zero:
                print(
                    f"refused after update {trainer.global_step}, which is saved: change what is refused and "
                    f"continue {self._config.run_dir} with ckpt_path=last",
                    flush=True,
                )
        if self._writer is not None:  # a save beside training, of updates before the failure
            self._writer.await_end(seconds=_TOGETHER.total_seconds())
        self._restore_handlers()

    def _unsaved(self, trainer: Trainer) -> bool:
        """Whether a save now would keep updates that no checkpoint holds."""
        return 0 < trainer.global_step != self._last_saved

    def _everybody_leaves(self, trainer: Trainer) -> bool:
        """Whether all ranks got here, bounded: a refusal may be one rank's alone."""
        if self._leavers is None:
            return True
        try:
            dist.monitored_barrier(group=self._leavers, timeout=_TOGETHER)
        except RuntimeError:
            return False
        return True

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        leave_terminal(number)
        if self._signals.count(signal.SIGINT) > 1:
            print_line("a second Ctrl-C: ended at once, updates since the last checkpoint are lost")
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._writer is not None
        events = [
            max(self._signals, default=0),
            self._minutes_are_over(),
            self._writer.failed,
            self._writer.busy,
        ]
        flags = torch.tensor(events).to(pl_module.device)
        if trainer.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        number, late, failed, busy = flags.tolist()
        if failed:
            self._writer.complete()  # raises
        self.interrupted = bool(number)
        interval = self._config.callbacks.checkpoint_interval
        step = trainer.global_step  # 0 while the first steps have nothing to train on
        due = interval is not None and step // interval > max(0, self._last_saved) // interval
        if self.interrupted:
            self._save(trainer)
        elif due or (late and step > 0 and not busy):
            self._save(trainer, beside=self._config.callbacks.checkpoint_async)
        if self.interrupted:
            trainer.should_stop = True
            if trainer.is_global_zero:
                print(
                    f"interrupted by {signal.Signals(number).name}, saved after update {step}: continue "
                    f"{self._config.run_dir} with ckpt_path=last",
                    flush=True,
                )

    def _minutes_are_over(self) -> bool:
        minutes = self._config.callbacks.checkpoint_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)
        self._restore_handlers()

    def _save(self, trainer: Trainer, *, beside: bool = False) -> None:
        """A collective of all ranks: complete or absent, then the oldest go."""
        assert self._writer is not None, "training has started"
        note_phase("save")
        if trainer.global_step == self._last_saved:
            self._writer.complete()
            return
        self._last_saved = trainer.global_step
        write_row(trainer)
        self._writer.save(trainer, beside=beside)
        self._saved_at = time.monotonic()
