"""When a run saves, and how it ends: after an interruption, or by a refusal in the middle.

A checkpoint is written into a scratch directory by all ranks; rank 0 gives it its name when everybody has
finished (run_directory.py). A run that names an older checkpoint by `ckpt_path` is another run: it has a
directory of its own, and nobody deletes what lies in a directory that is not theirs.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from olmo_rl.chosen_checkpoint import best_checkpoint
from olmo_rl.config import Config
from olmo_rl.replaced_runs import discard_replaced
from olmo_rl.run_directory import (
    SCRATCH,
    causes,
    checkpoint_directory,
    checkpoint_path,
    complete_checkpoints,
    disk_full,
    finish_checkpoint,
    prune_checkpoints,
)
from olmo_rl.running.rank_process import handled_signals, leave_terminal, say
from olmo_rl.training.lightning_internals import write_row
from olmo_rl.types import RankFailed, Refusal

# For ranks that were refused the same to come together; a rank that was not never comes.
_TOGETHER = timedelta(seconds=20)


class Checkpoints(Callback):
    """Saves every `callbacks.checkpoint_interval` updates, `callbacks.checkpoint_minutes` after the last
    save, at the end, and before an interruption or a refusal that met every rank ends the run.

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
            say("a second Ctrl-C: ended at once, updates since the last checkpoint are lost")
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        flags = torch.tensor([max(self._signals, default=0), self._minutes_are_over()])
        flags = flags.to(pl_module.device)
        if trainer.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        number, late = flags.tolist()
        self.interrupted = bool(number)
        interval = self._config.callbacks.checkpoint_interval
        step = trainer.global_step  # 0 while the first steps have nothing to train on
        due = interval is not None and step // interval > max(0, self._last_saved) // interval
        if self.interrupted or due or (late and step > 0):
            self._save(trainer)
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

    def _save(self, trainer: Trainer) -> None:
        """A collective of all ranks: complete or absent, then the oldest go."""
        if trainer.global_step == self._last_saved:
            return
        self._last_saved = trainer.global_step
        write_row(trainer)
        final = checkpoint_path(self._config.run_dir, step=trainer.global_step)
        scratch = final.with_name(final.name + SCRATCH)
        if trainer.is_global_zero and scratch.exists():
            shutil.rmtree(scratch)
        trainer.strategy.barrier()
        needed = state_bytes(trainer)
        try:
            trainer.save_checkpoint(scratch)
            trainer.strategy.barrier()
            if trainer.is_global_zero:
                if final.exists():  # damaged: a complete one would have been resumed from
                    shutil.rmtree(final)
                finish_checkpoint(scratch, final=final)
        except (CheckpointException, OSError, RuntimeError) as error:  # the first is no Exception
            if (failed := self._failed_save(error, scratch=scratch, needed=needed)) is None:
                raise
            raise failed from error
        if trainer.is_global_zero:
            discard_replaced(self._config)
            keep, run_dir = self._config.callbacks.keep_checkpoints, self._config.run_dir
            prune_checkpoints(run_dir, keep=keep, best=best_checkpoint(run_dir))
        trainer.strategy.barrier()
        self._saved_at = time.monotonic()

    def _failed_save(self, error: BaseException, *, scratch: Path, needed: int) -> Exception | None:
        """Return what a failed save raises in place of its error, None: that error. Earlier checkpoints are
        complete and stay.
        """
        saved = complete_checkpoints(self._config.run_dir)
        kept = f"{saved[-1].name} is complete" if saved else "there is no earlier checkpoint"
        if (full := disk_full(error, directory=scratch.parent, needed=needed)) is not None:
            return Refusal(f"{full}: free space there and continue with ckpt_path=last; {kept}")
        if isinstance(error, Exception):
            return None
        first = causes(error)[-1]
        return RankFailed(f"{scratch}: the save failed, {type(first).__name__}: {first}; {kept}")


def state_bytes(trainer: Trainer) -> int:
    """Return the bytes of all tensors of a checkpoint, of all ranks: weights and the optimizer's state."""
    tensors: list[torch.Tensor] = [*trainer.lightning_module.parameters()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
