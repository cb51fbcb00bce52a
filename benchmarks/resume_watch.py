"""A callback that kills its own rank where check_resume wants it killed, and reports how far the run is.

It uses what any callback may: Lightning's hooks, the interpreter's audit events and its profiler.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from benchmarks.check_resume import OLD_ONES_GO, Moment
from olmo_rl.run_directory import MANIFEST, SCRATCH


class Watch(Callback):
    """Leaves `pid<rank>`, `update-<n>` when update n begins, and `counts<rank>` (calls into every optimizer
    step, saves) below `directory`.
    """

    def __init__(self, moment: Moment | None, *, directory: Path) -> None:
        self._moment = moment
        self._directory = directory
        self._rank = 0
        self._saves = 0
        self._calls = 0
        self._step_calls: list[int] = []
        self._armed = False
        self._removing = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._rank = trainer.global_rank
        self._leave(f"pid{self._rank}", str(os.getpid()))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(self._after_step)
        if self._strikes("save"):
            sys.addaudithook(self._on_event)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._rank == 0:
            self._leave(f"update-{trainer.global_step + 1}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The save that ends the run comes after this hook.
        counts = {"step_calls": self._step_calls, "saves": self._saves}
        self._leave(f"counts{self._rank}", json.dumps(counts))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._calls = 0
        sys.setprofile(self._on_call)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        self._calls += 1
        moment = self._moment
        if (
            moment is not None
            and self._calls == moment.event
            and len(self._step_calls) + 1 == moment.number
            and self._strikes("step")
        ):
            self._kill()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if sys.getprofile() is None:
            return  # a step at rate 0 that only creates the state
        sys.setprofile(None)
        self._step_calls.append(self._calls)
        moment = self._moment
        if moment is not None and self._strikes("step") and len(self._step_calls) == moment.number:
            self._kill()  # it took fewer calls than in the straight run

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saves += 1
        moment = self._moment
        self._armed = moment is not None and self._strikes("save") and self._saves == moment.number
        if moment is not None and self._armed and moment.where == "before the shards":
            self._kill()

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook of this process: the interpreter reports every operation before it runs."""
        if not self._armed or event not in ("open", "os.rename", "os.remove", "shutil.rmtree"):
            return
        assert self._moment is not None
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        name, where = os.path.basename(path), self._moment.where
        strikes = {
            "a shard is opened": event == "open" and name.endswith(".distcp"),
            "in a shard": event == "open" and name.endswith(".distcp"),
            "before the metadata": event == "open" and name.startswith(".metadata"),
            "before the manifest": event == "open" and name == MANIFEST,
            "before the rename": event == "os.rename" and name.endswith(SCRATCH),
            "after the rename": event == "open" and name == "checkpoints",
            OLD_ONES_GO: event == "os.remove" and self._removing,
        }
        self._removing = self._removing or event == "shutil.rmtree"
        if strikes.get(where, False):
            if where == "in a shard":
                threading.Thread(target=self._kill_soon, daemon=True).start()
                self._armed = False
            else:
                self._kill()

    def _kill_soon(self) -> None:
        assert self._moment is not None
        time.sleep(self._moment.delay)
        self._kill()

    def _strikes(self, how: str) -> bool:
        moment = self._moment
        return moment is not None and moment.how == how and self._rank == max(0, moment.rank)

    def _kill(self) -> NoReturn:
        if self._moment is not None and self._moment.rank < 0:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes no further")

    def _leave(self, name: str, text: str = "") -> None:
        part = self._directory / f".{name}"
        part.write_text(text)
        part.rename(self._directory / name)
