"""Writes one checkpoint at a time, in the training thread or beside it.

A save beside training has two parts. The training thread copies the state of this rank (`Snapshot`) and
goes on; a thread of this process writes the copy. All ranks write their shards through a gloo group of
their own, so that collectives of a save and of an update never mix; then rank 0 syncs and hashes the files,
and gives the checkpoint its name. `torch.distributed.checkpoint.async_save` has the same two parts, but ends
before the checksums and the name.

A failure of the thread is raised by `complete`, on all ranks with the same reason.
"""

from __future__ import annotations

import io
import shutil
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from olmo_rl.chosen_checkpoint import best_checkpoint
from olmo_rl.config import Config
from olmo_rl.full_disks import causes, disk_full
from olmo_rl.policy.stored_checkpoint import PLAIN_STATE
from olmo_rl.replaced_runs import discard_replaced
from olmo_rl.run_directory import (
    SCRATCH,
    checkpoint_path,
    complete_checkpoints,
    finish_checkpoint,
    prune_checkpoints,
    set_aside,
)
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import RankFailed, Refusal

_LIMIT = timedelta(hours=2)  # of one save, over all ranks
_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What one rank saves. `tensors`: its shards of weights and optimizer state; `plain`: the rest, as the
    bytes of its file, on rank 0. `needed`: bytes of the tensors of all ranks.
    """

    tensors: dict[str, Any]
    plain: bytes | None
    scratch: Path
    final: Path
    needed: int


class CheckpointWriter:
    """Made by all ranks at the same point of a run. `busy`: whether a save is being written; `failed`:
    whether it failed on this rank.
    """

    def __init__(self, config: Config, trainer: Trainer) -> None:
        self._config = config
        self._strategy = cast(ExpertParallelStrategy, trainer.strategy)
        self._group = dist.new_group(backend="gloo", timeout=_LIMIT)
        # Other ranks await rank 0, which syncs and hashes; a save that does not end still uses its group.
        self._ends = dist.new_group(backend="gloo", timeout=_LIMIT)
        self._writing: Future[None] | None = None
        self._snapshot: Snapshot | None = None

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    @property
    def failed(self) -> bool:
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def save(self, trainer: Trainer, *, beside: bool) -> None:
        """Save the state of this moment, after the save before it is complete. A collective of all ranks.
        `beside`: return when the state is copied.
        """
        self.complete()
        self._snapshot = self._take(trainer, copies=beside)
        self._writing = Future()
        arguments = (self._snapshot, self._writing)
        if beside:
            threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
            return
        self._write(*arguments)
        self.complete()

    def complete(self) -> None:
        """Wait until the last save is complete, where there is one. A collective of all ranks. Raises the
        same on all of them where it failed: Refusal for a full disk, else RankFailed.
        """
        if self._writing is None or self._snapshot is None:
            return
        self.await_end(seconds=_LIMIT.total_seconds())
        error = self._writing.exception() if self._writing.done() else TimeoutError("the save did not end")
        failure = None if error is None else _failure(error, snapshot=self._snapshot)
        snapshot, self._writing, self._snapshot = self._snapshot, None, None
        ends = self._strategy.gather_objects(failure, group=self._ends)
        failures = [found for found in ends if found is not None]
        if failures:
            full = [found for found in failures if found.refused]
            raise (full or failures)[0].exception(snapshot) from error

    def await_end(self, *, seconds: float) -> None:
        """Wait for the thread of this rank, bounded; no collective."""
        deadline = time.monotonic() + seconds
        while self.busy and time.monotonic() < deadline:
            assert self._writing is not None
            _wait(self._writing, seconds=min(_POLL_SECONDS, deadline - time.monotonic()))

    def _take(self, trainer: Trainer, *, copies: bool) -> Snapshot:
        final = checkpoint_path(self._config.run_dir, step=trainer.global_step)
        scratch = final.with_name(final.name + SCRATCH)
        if trainer.is_global_zero:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        state = self._strategy.state_of(trainer)
        tensors = {"state_dict": state.pop("state_dict")}
        for index, optimizer in enumerate(state.pop("optimizer_states", [])):
            tensors[f"optimizer_{index}"] = optimizer
        plain = None
        if trainer.is_global_zero:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            plain = buffer.getvalue()
        trainer.strategy.barrier()  # the directory is there
        return Snapshot(
            tensors=copied(tensors) if copies else tensors,
            plain=plain,
            scratch=scratch,
            final=final,
            needed=state_bytes(trainer),
        )

    def _write(self, snapshot: Snapshot, writing: Future[None]) -> None:
        """Write a snapshot; the future gets its end, whatever it is."""
        try:
            self._write_files(snapshot)
        except BaseException as error:  # CheckpointException is no Exception
            writing.set_exception(error)
        else:
            writing.set_result(None)

    def _write_files(self, snapshot: Snapshot) -> None:
        dcp.save(snapshot.tensors, checkpoint_id=snapshot.scratch, process_group=self._group)
        if snapshot.plain is None:
            return
        (snapshot.scratch / PLAIN_STATE).write_bytes(snapshot.plain)
        if snapshot.final.exists():  # damaged: a complete one would have been resumed from
            set_aside(snapshot.final)
        finish_checkpoint(snapshot.scratch, final=snapshot.final)
        discard_replaced(self._config)
        run_dir, keep = self._config.run_dir, self._config.callbacks.keep_checkpoints
        prune_checkpoints(run_dir, keep=keep, newest=snapshot.final, best=best_checkpoint(run_dir))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """Why a save failed on one rank; `refused`: the user can mend it."""

    reason: str
    refused: bool

    def exception(self, snapshot: Snapshot) -> Exception:
        saved = complete_checkpoints(snapshot.final.parent.parent)
        kept = f"{saved[-1].name} is complete" if saved else "there is no earlier checkpoint"
        if self.refused:
            return Refusal(f"{self.reason}: free space there and continue with ckpt_path=last; {kept}")
        return RankFailed(f"{snapshot.scratch}: the save failed, {self.reason}; {kept}")


def _failure(error: BaseException, *, snapshot: Snapshot) -> _Failure:
    full = disk_full(error, directory=snapshot.scratch.parent, needed=snapshot.needed)
    if full is not None:
        return _Failure(reason=full, refused=True)
    first = causes(error)[-1] if isinstance(error, CheckpointException) else error
    return _Failure(reason=f"{type(first).__name__}: {first}", refused=False)


def _wait(writing: Future[None], *, seconds: float) -> None:
    try:
        writing.exception(timeout=max(0.0, seconds))
    except TimeoutError:
        return


def copied(state: Any) -> Any:
    """Copy every tensor of a nested state."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def state_bytes(trainer: Trainer) -> int:
    """Return the bytes of all tensors of a checkpoint, of all ranks: weights and the optimizer's state."""
    tensors: list[Tensor] = [*trainer.lightning_module.parameters()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
