"""Upcycles weights before a recipe and caches them by everything that determines them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

from olmo_rl.config import Config
from olmo_rl.policy.upcycling import REPORT, WEIGHTS, Upcycling, dense_files, read_report, write_upcycled
from olmo_rl.running.trainer import build_trainer
from olmo_rl.training.strategy import ExpertParallelStrategy


def upcycled(config: Config) -> Config:
    """Return the configuration with `init_from` set to upcycled weights; unchanged where `upcycle.dense` is
    null or the run resumes.

    A collective of all ranks: rank 0 creates the weights, or finds them in the cache, while the others wait.
    """
    if config.upcycle.dense is None or config.ckpt_path is not None:
        return config
    strategy = ExpertParallelStrategy(config)
    trainer = build_trainer(config, strategy=strategy, max_steps=-1, callbacks=[], loggers=[])
    strategy.join()
    directory, report = strategy.from_rank_zero(lambda: _made(config))
    if trainer.is_global_zero:
        print("\n".join([*report.lines(), f"upcycled weights: {directory}"]), flush=True)
    return replace(config, init_from=str(directory / WEIGHTS))


def _made(config: Config) -> tuple[Path, Upcycling]:
    directory = Path(config.cache_dir) / "upcycled" / _digest(config)
    if (directory / REPORT).is_file():
        return directory, read_report(directory)
    return directory, write_upcycled(config, directory=directory)


def _digest(config: Config) -> str:
    """Hash the files of the dense model and every value that determines the weights."""
    assert config.upcycle.dense is not None, "called only where it is set"
    digest = hashlib.sha256()
    for file in dense_files(config.upcycle.dense):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    parts = {"seed": config.seed, "model": asdict(config.model), "upcycle": asdict(config.upcycle)}
    digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
