"""Writes weights as a Hugging Face directory: config.json, generation_config.json, safetensors files with an
index, and the files of the tokenizer, its chat template included.

Tensors are read while they are written: memory contains the tensors of one file and one of our parameters,
beside the weights of the caller. The files depend on weights and model alone, not on the topology.

Refused: a model that no known architecture expresses; missing, unexpected or wrongly shaped weights; a
tokenizer with more ids than the embedding has rows; a directory that exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from olmo_rl.config import ExportConfig, ModelConfig, WrittenDtype
from olmo_rl.data.tokenizers import HfTokenizer, fitting_tokenizer
from olmo_rl.hf.agreement import format_of
from olmo_rl.hf.formats import CONFIG_FILE, HfFormat, config_json
from olmo_rl.hf.names import Piece, pieces, refuse_mismatches
from olmo_rl.hf.weight_files import shard_plan, write_directory
from olmo_rl.policy.weights import open_weights, parameter_shapes, untied
from olmo_rl.types import Refusal

GENERATION_FILE = "generation_config.json"
# Sampling from the distribution that was trained, which engines use where a request names no settings.
NEUTRAL_SAMPLING: Mapping[str, Any] = {
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
}
Read = Callable[[str], Tensor]
SHARD_BYTES = 4 * 2**30
BUCKET_BYTES = 512 * 2**20  # of the tensors that an engine receives at once, and stores beside its weights


def written_dtype(options: ExportConfig) -> torch.dtype:
    """Return the dtype of the weights that leave the trainer."""
    return torch.bfloat16 if options.dtype is WrittenDtype.bfloat16 else torch.float32


def export_hf(
    weights: Mapping[str, Tensor],
    *,
    model: ModelConfig,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> HfFormat:
    """Write whole weights by our names, and the files of `model.tokenizer`: complete or absent. Returns the
    architecture, which follows from the model.
    """
    return export_read(
        {name: tensor.shape for name, tensor in weights.items()},
        read=lambda name: weights[name],
        model=model,
        directory=directory,
        dtype=dtype,
        shard_bytes=shard_bytes,
    )


def export_run(
    path: str, *, model: ModelConfig, directory: Path, dtype: torch.dtype, shard_bytes: int
) -> HfFormat:
    """Export the weights stored at `path`, one parameter in memory at a time."""
    with open_weights(path, key="init_from") as stored:
        return export_read(
            stored.shapes,
            read=stored.whole,
            model=model,
            directory=directory,
            dtype=dtype,
            shard_bytes=shard_bytes,
        )


def export_read(
    shapes: Mapping[str, torch.Size],
    *,
    read: Read,
    model: ModelConfig,
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> HfFormat:
    """Export weights that `read` returns by name, each once, in the order of the files."""
    kind = format_of(model)
    tokenizer = fitting_tokenizer(model)
    expected = parameter_shapes(model)
    refuse_mismatches(expected, untied(shapes, model=model), where="export")
    parts = pieces(expected, kind=kind)
    plan = shard_plan(parts, itemsize=dtype.itemsize, limit=shard_bytes)
    name_of_dtype = str(dtype).removeprefix("torch.")
    config = config_json(model, kind=kind, eos_id=tokenizer.eos_id) | {"torch_dtype": name_of_dtype}
    backend = tokenizer.backend if isinstance(tokenizer, HfTokenizer) else None
    write_directory(
        directory,
        documents={
            CONFIG_FILE: config,
            GENERATION_FILE: {**NEUTRAL_SAMPLING, "eos_token_id": tokenizer.eos_id},
        },
        shards=_shards(plan, read=read, dtype=dtype),
        count=len(plan),
        save=None if backend is None else backend.save_pretrained,
    )
    return kind


def is_single_file(model: ModelConfig) -> bool:
    """Return whether engines receive one file with our names: no architecture expresses the model."""
    try:
        format_of(model)
    except Refusal:
        return True
    return False


def engine_pieces(model: ModelConfig) -> list[Piece]:
    """Return the tensors of `model` by the names that engines use: those of Hugging Face, or our own where no
    architecture expresses the model.
    """
    shapes = parameter_shapes(model)
    if not is_single_file(model):
        return pieces(shapes, kind=format_of(model))
    return [
        Piece(name=name, shape=tuple(shape), parameter=name, start=0, stop=shape[0])
        for name, shape in shapes.items()
    ]


def buckets(
    model: ModelConfig, *, read: Read, dtype: torch.dtype, limit: int = BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Yield those tensors in groups of at most `limit` bytes, or of one. `read` is called once a weight."""
    return _shards(
        shard_plan(engine_pieces(model), itemsize=dtype.itemsize, limit=limit), read=read, dtype=dtype
    )


def _shards(
    plan: Sequence[Sequence[Piece]], *, read: Read, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one file after another; each parameter is read once, its pieces are adjacent."""
    last: tuple[str, Tensor] | None = None
    for shard in plan:
        tensors = {}
        for piece in shard:
            if last is None or last[0] != piece.parameter:
                last = (piece.parameter, read(piece.parameter).detach().cpu())
            rows = last[1][piece.start : piece.stop]
            tensors[piece.name] = rows.reshape(piece.shape).to(dtype, copy=True).contiguous()
        yield tensors
