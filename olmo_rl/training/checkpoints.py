"""Checkpoints that are complete or absent, and interruption that saves first.

A checkpoint is written into a scratch directory by all ranks and renamed by rank 0 after everybody finished,
so a directory with a final name is whole. Checkpoints fall on collection boundaries, where no plan is
pending.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmo_rl.config import Config
from olmo_rl.types import Refusal

SCRATCH = ".incomplete"
WHOLE = (".metadata", "meta.pt")  # written last: shards lie beside them
EXIT_INTERRUPTED = 75


def checkpoint_directory(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def complete_checkpoints(run_dir: str | Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    directory = checkpoint_directory(run_dir)
    found = [
        path
        for path in directory.glob("step-*")
        if path.name.removeprefix("step-").isdigit() and all((path / name).is_file() for name in WHOLE)
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def resolve_checkpoint(config: Config) -> str | None:
    """The directory that `ckpt_path` names, or None for a fresh run."""
    if config.ckpt_path is None:
        return None
    if config.ckpt_path == "last":
        found = complete_checkpoints(config.run_dir)
        if not found:
            raise Refusal(
                f"ckpt_path=last: {checkpoint_directory(config.run_dir)} holds no complete checkpoint: "
                "start with ckpt_path=null overwrite=true, or give a path"
            )
        return str(found[-1])
    if not (Path(config.ckpt_path) / ".metadata").is_file():
        raise Refusal(
            f"ckpt_path={config.ckpt_path}: not a checkpoint directory (no .metadata): give one, or last"
        )
    return config.ckpt_path


class Checkpoints(Callback):
    """Saves every `callbacks.checkpoint_interval` updates, at the end, and before an interruption ends the
    run.

    SIGINT, SIGTERM and SIGUSR1 set a flag; after the current update all ranks agree on it, save outside the
    handler and stop. `interrupted` then tells the recipe to exit with code 75.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._signalled = False
        self.interrupted = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._last_saved = -1

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > 0:
            self._last_saved = trainer.global_step  # where this run resumes
        # Lightning installs its own handlers before this hook; they would broadcast inside the handler.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, self._on_signal)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if cast(Any, trainer).datamodule.steps_left > 0:
            return
        flag = torch.tensor([float(self._signalled)], device=pl_module.device)
        if trainer.world_size > 1:
            dist.all_reduce(flag)
        self.interrupted = bool(flag.item())
        interval = self._config.callbacks.checkpoint_interval
        step = trainer.global_step  # 0 while the first steps have nothing to train on
        due = interval is not None and step // interval > max(0, self._last_saved) // interval
        if self.interrupted or due:
            self._save(trainer)
        if self.interrupted:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        left = cast(Any, trainer).datamodule.steps_left
        if left == 0:
            self._save(trainer)
        elif trainer.is_global_zero:
            print(
                f"no checkpoint of update {trainer.global_step}: {left} of its collection did not run, "
                "and checkpoints fall on collection boundaries",
                flush=True,
            )
        self._restore_handlers()

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self._last_saved:
            return
        self._last_saved = trainer.global_step
        final = checkpoint_directory(self._config.run_dir) / f"step-{trainer.global_step}"
        scratch = final.with_name(final.name + SCRATCH)
        if trainer.is_global_zero and scratch.exists():
            shutil.rmtree(scratch)
        trainer.strategy.barrier()
        trainer.save_checkpoint(scratch)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            if final.exists():
                shutil.rmtree(final)
            scratch.rename(final)
            for old in complete_checkpoints(self._config.run_dir)[: -self._config.callbacks.keep_checkpoints]:
                shutil.rmtree(old)
        trainer.strategy.barrier()
