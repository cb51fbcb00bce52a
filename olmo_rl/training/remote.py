"""Serving engines of a run with several ranks: rank 0 publishes to all, every rank asks for its share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from olmo_rl.config import Config
from olmo_rl.policy.interop import save_weights
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal

KEPT = 2  # an engine that comes back may still be reading the newest but one


def build_remote(config: Config) -> RemoteEngine:
    """This rank's client of the engines that `rollouts.urls` names."""
    layout = config.model.expert_layout if config.replay else None
    axis = None if layout is None else RouteAxis(layout=layout, num_layers=len(config.model.layer_types))
    directory = (Path(config.run_dir) / "published").resolve()

    def save(weights: Mapping[str, Tensor], version: int) -> str:
        path = directory / f"step-{version}.safetensors"
        save_weights(weights, path)
        for old in sorted(directory.glob("step-*"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        return str(path)

    return RemoteEngine(config.rollouts, axis=axis, save=save)


def shared_publication(
    remote: RemoteEngine, *, strategy: ExpertParallelStrategy
) -> Callable[[dict[str, Tensor], int], None]:
    """Publish as all ranks call it: rank 0 writes and updates, the others learn what every engine holds."""

    def publish(weights: dict[str, Tensor], version: int) -> None:
        def on_rank_zero() -> tuple[str, dict[str, int | None]] | Refusal:
            try:
                path = remote.publish(weights, version)
            except Refusal as refusal:
                return refusal
            return path, remote.versions

        outcome = strategy.from_rank_zero(on_rank_zero)
        if isinstance(outcome, Refusal):
            raise outcome
        if strategy.global_rank > 0:
            path, versions = outcome
            remote.adopt(path, version, versions=versions)

    return publish
