"""Upcycles weights before a recipe and caches them by everything that determines them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

from olmo_rl.config import Config
from olmo_rl.policy.upcycling import REPORT, WEIGHTS, Upcycling, dense_files, read_report, write_upcycled


def upcycled(config: Config) -> Config:
    """Return the configuration with `init_from` set to upcycled weights, which are created or found in the
    cache; unchanged where `upcycle.dense` is null or the run resumes. One process of a job calls it, before
    ranks wait for each other.
    """
    if config.upcycle.dense is None or config.ckpt_path is not None:
        return config
    directory, report = _made(config)
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
