"""Writes weights of a run as a Hugging Face directory for transformers and serving engines. No GPU, one
process.

The architecture follows from the model: olmo3moe for hybrid models, qwen3_moe and olmoe for theirs.
"""

from __future__ import annotations

from pathlib import Path

from olmo_rl.config import Config
from olmo_rl.hf.writing import export_run, written_dtype


def run(config: Config) -> None:
    """Export `init_from` to `export.path`, tensor by tensor. A directory that an earlier attempt of a
    requeued job wrote (ckpt_path=auto) is complete, and stays.
    """
    assert config.init_from is not None, "refusals require init_from"
    options = config.export
    directory = Path(config.run_dir) / "hf" if options.path is None else Path(options.path)
    if config.ckpt_path == "auto" and directory.is_dir():
        print(f"{directory}: complete, from an earlier attempt")
        return
    kind = export_run(
        config.init_from,
        model=config.model,
        directory=directory,
        dtype=written_dtype(options),
        shard_bytes=int(options.shard_gib * 2**30),
    )
    print(f"{kind.value}: {directory}")
