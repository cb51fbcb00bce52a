"""New weights on their way to engines: to that of this process, or from rank 0 to serving engines."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from olmo_rl.config import Config, OnGap, PublicationKind
from olmo_rl.hf.writing import buckets, export_read, is_single_file, written_dtype
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.policy.sharded import ParameterReader, Read, whole_weights
from olmo_rl.policy.weights import save_weights
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.training.engine_agreement import EngineAgreement
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal

Shapes = Mapping[str, torch.Size]
KEPT = 2  # an engine that comes back may still be reading the newest but one


def build_remote(config: Config, *, device: torch.device) -> RemoteEngine:
    """This rank's client, on its device, of the engines that `rollouts.urls` names."""
    layout = config.model.expert_layout if config.replay else None
    axis = None if layout is None else RouteAxis(layout=layout, num_layers=len(config.model.layer_types))
    return RemoteEngine(config.rollouts, axis=axis, vocab_size=config.model.vocab_size, device=device)


class LocalPublication:
    """Whole weights for the engine of this process: every rank generates, and needs a copy of the model."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def __call__(self, decoder: nn.Module, version: int) -> dict[str, float]:
        self._engine.publish(whole_weights(decoder), version)
        return {}


class Publication:
    """Weights to engines, as all ranks call it: rank 0 publishes, the others learn what each engine holds.
    Parameters are read from the shards one by one: no rank holds a copy of the model, except rank 0 of one
    that is written as a single file.

    `rollouts.publication=directory` writes `published/step-<version>` of the run directory and has every
    engine read it: a Hugging Face directory, which any engine reads (`export.dtype` and `export.shard_gib`
    shape it), or one safetensors file in our own naming where no architecture can express the model.
    `collective` broadcasts the same tensors, in `export.dtype`.
    """

    def __init__(self, remote: RemoteEngine, *, config: Config, strategy: ExpertParallelStrategy) -> None:
        self._remote = remote
        self._config = config
        self._strategy = strategy
        self._directory = (Path(config.run_dir) / "published").resolve()
        self._dtype = written_dtype(config.export)
        self._reader: ParameterReader | None = None
        self._agreement = EngineAgreement(remote, config=config, strategy=strategy)

    def __call__(self, decoder: nn.Module, version: int) -> dict[str, float]:
        """Publish, then compare; the metrics of the comparison."""
        if self._reader is None:
            self._reader = ParameterReader(decoder, meet=self._strategy.meet)
        reader = self._reader
        self._remote.hold(wait=self._strategy.meet)  # on every rank before rank 0 writes
        found = reader.on_rank_zero(
            lambda read: outcome(lambda: self._publish(reader, read, version=version))
        )
        (path,) = together([self._strategy.from_rank_zero(lambda: found)])
        versions = self._strategy.from_rank_zero(lambda: self._remote.versions)
        if self._strategy.global_rank > 0:
            self._remote.adopt(path, version, versions=versions)
        if self._config.rollouts.on_gap is OnGap.ignore:
            return {}
        return self._agreement(decoder, version)

    def _publish(self, reader: ParameterReader, read: Read, *, version: int) -> str | None:
        """On rank 0: the path of what engines have now, None where it was broadcast."""
        if self._config.rollouts.publication is PublicationKind.collective:
            parts = buckets(self._config.model, read=read, dtype=self._dtype)
            self._remote.broadcast(parts, version, wait=reader.wait)
            return None
        path = self._write(reader.shapes, read=read, version=version)
        self._remote.publish(path, version, wait=reader.wait)
        return path

    def _write(self, shapes: Shapes, *, read: Read, version: int) -> str:
        """Where the weights lie now, the oldest gone."""
        single = is_single_file(self._config.model)
        path = self._directory / f"step-{version}{'.safetensors' if single else ''}"
        try:
            if single:
                save_weights({name: read(name).to(self._dtype) for name in shapes}, path)
            else:
                shutil.rmtree(path, ignore_errors=True)  # of a run that went as far, and was killed
                export_read(
                    shapes,
                    read=read,
                    model=self._config.model,
                    directory=path,
                    dtype=self._dtype,
                    shard_bytes=int(self._config.export.shard_gib * 2**30),
                )
        except (OSError, SafetensorError) as error:
            raise Refusal(f"{path}: {error}") from error
        self._drop_the_oldest()
        return str(path)

    def _drop_the_oldest(self) -> None:
        """Delete all but the newest, and what killed runs were writing: this process owns the directory. One
        that an engine still has open on another node goes the next time.
        """
        published = list(self._directory.glob("step-*"))
        with suppress(OSError):
            oldest = sorted(published, key=lambda path: path.stat().st_mtime)[:-KEPT]
            for old in (*oldest, *self._directory.glob(".step-*")):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
