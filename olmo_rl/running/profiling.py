"""A profile of some updates: what torch computed, how long, and where from, rank by rank.

`profile/rank-<r>.json.gz` is a trace for Perfetto or chrome://tracing, `profile/rank-<r>.txt` the table of
operators by their own time. Profiled updates are slower than others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from olmo_rl.complete_files import complete_file, write_complete

WARM_UP = 2  # updates before the first profiled one, in which kernels and caches are made
_ROWS = 40  # of the table


class ProfiledUpdates(Callback):
    """Profiles `count` updates after the first `WARM_UP` of this process, or as many as there are."""

    def __init__(self, run_dir: str, *, count: int) -> None:
        self._directory = Path(run_dir) / "profile"
        self._count = count
        self._begun = self._done = 0
        self._profile: profile | None = None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begun += 1
        if self._begun == WARM_UP + 1:
            activities = [ProfilerActivity.CPU]
            if pl_module.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is not None:
            self._done += 1
            if self._done == self._count:
                self._write(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profile is not None:
            self._write(trainer)
        elif self._done == 0 and trainer.is_global_zero:
            print(
                f"trainer.profile_steps={self._count}: nothing was profiled, the run ended in its first "
                f"{WARM_UP} updates",
                flush=True,
            )

    def _write(self, trainer: Trainer) -> None:
        """Stop, and write the trace and the table of this rank."""
        found, self._profile = self._profile, None
        assert found is not None
        found.stop()
        own = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        base = self._directory / f"rank-{trainer.global_rank}"
        with complete_file(base.with_suffix(".json.gz")) as path:
            trace = path.with_name(f"{path.name}.json.gz")  # torch compresses by the suffix
            found.export_chrome_trace(str(trace))
            trace.replace(path)
        write_complete(base.with_suffix(".txt"), found.key_averages().table(sort_by=own, row_limit=_ROWS))
        if trainer.is_global_zero:
            print(f"profile of {self._done} updates: {base}.txt, {base}.json.gz", flush=True)
