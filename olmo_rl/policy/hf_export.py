"""Weights of ours -> a Hugging Face directory: config.json, safetensors files with an index, tokenizer files.

Tensors are read as they are written: beside what the caller holds, memory has one file's tensors and one of
our parameters. The files depend on weights and model alone, not on the topology that trained them.

Refused: a model that no known architecture says, missing, unexpected or wrongly shaped weights, a tokenizer
with more ids than the embedding has rows, a directory that exists.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from olmo_rl.config import Dtype, ExportConfig, ModelConfig
from olmo_rl.data.tokenizers import HfTokenizer, fitting_tokenizer
from olmo_rl.hf_config import HfFormat
from olmo_rl.hf_writing import config_json, format_of
from olmo_rl.policy.hf_files import shard_plan, write_directory
from olmo_rl.policy.hf_names import Piece, pieces
from olmo_rl.policy.interop import CHECKPOINT_PREFIX, parameter_shapes, read_weights
from olmo_rl.policy.sharded import Read
from olmo_rl.types import Refusal

SHARD_BYTES = 4 * 2**30
BUCKET_BYTES = 512 * 2**20  # of the tensors that an engine is sent at once, and holds beside its weights


def written_dtype(options: ExportConfig) -> torch.dtype:
    """Of the weights that leave the trainer."""
    return torch.bfloat16 if options.dtype is Dtype.bfloat16 else torch.float32


def export_hf(
    weights: Mapping[str, Tensor],
    *,
    model: ModelConfig,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> HfFormat:
    """Write full weights by our names, and the files of `model.tokenizer`: complete or absent. Returns the
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
    """The same from a checkpoint directory of a run or a safetensors file, one parameter in memory at a
    time, or from a Hugging Face directory, which is read whole.
    """
    shapes, read = _source(path)
    return export_read(
        shapes, read=read, model=model, directory=directory, dtype=dtype, shard_bytes=shard_bytes
    )


def _source(path: str) -> tuple[Mapping[str, Sequence[int]], Read]:
    """Shapes by name of the weights at `path`, and how to read one."""
    location = Path(path)
    if (location / ".metadata").is_file():
        return _of_checkpoint(location)
    if location.is_file():
        try:
            file = safe_open(location, framework="pt")
        except SafetensorError as error:
            raise Refusal(f"init_from={path}: not a safetensors file ({error})") from None
        return {name: file.get_slice(name).get_shape() for name in list(file.keys())}, file.get_tensor
    weights = read_weights(path)
    return {name: tensor.shape for name, tensor in weights.items()}, weights.__getitem__


def _of_checkpoint(location: Path) -> tuple[Mapping[str, Sequence[int]], Read]:
    prefix = f"state_dict.{CHECKPOINT_PREFIX}"
    stored = {
        name.removeprefix(prefix): entry
        for name, entry in dcp.FileSystemReader(location).read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }

    def read(name: str) -> Tensor:
        tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # meant so
            dcp.load({"state_dict": {CHECKPOINT_PREFIX + name: tensor}}, checkpoint_id=location, no_dist=True)
        return tensor

    return {name: entry.size for name, entry in stored.items()}, read


def export_read(
    shapes: Mapping[str, Sequence[int]],
    *,
    read: Read,
    model: ModelConfig,
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> HfFormat:
    """The same from weights that are read by name, each once, in the order of the files."""
    kind = format_of(model)
    tokenizer = fitting_tokenizer(model)
    expected = parameter_shapes(model)
    if model.tie_embeddings:
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    reasons = [f"export: {name} is missing" for name in expected if name not in shapes]
    reasons += [f"export: {name} is not a weight of this model" for name in shapes if name not in expected]
    reasons += [
        f"export: {name} has shape {tuple(shapes[name])}, the model {tuple(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != tuple(shape)
    ]
    if reasons:
        raise Refusal(reasons)
    parts = pieces(expected, kind=kind)
    plan = shard_plan(parts, itemsize=dtype.itemsize, limit=shard_bytes)
    name_of_dtype = str(dtype).removeprefix("torch.")
    config = config_json(model, kind=kind, eos_id=tokenizer.eos_id) | {"torch_dtype": name_of_dtype}
    backend = tokenizer.backend if isinstance(tokenizer, HfTokenizer) else None
    write_directory(
        directory,
        config=config,
        shards=_shards(plan, read=read, dtype=dtype),
        count=len(plan),
        save=None if backend is None else backend.save_pretrained,
    )
    return kind


def is_single_file(model: ModelConfig) -> bool:
    """Whether engines are given one file with our names: no architecture says what the model is."""
    try:
        format_of(model)
    except Refusal:
        return True
    return False


def engine_pieces(model: ModelConfig) -> list[Piece]:
    """The tensors of `model` by the names that engines know: Hugging Face's, or ours where no architecture
    says what the model is.
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
    """Those tensors, some at a time: at most `limit` bytes, or one. Weights are read by name, each once."""
    return _shards(
        shard_plan(engine_pieces(model), itemsize=dtype.itemsize, limit=limit), read=read, dtype=dtype
    )


def _shards(
    plan: Sequence[Sequence[Piece]], *, read: Read, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """The tensors of one file after another; a parameter is read once, its pieces are neighbours."""
    held: tuple[str, Tensor] | None = None
    for shard in plan:
        tensors = {}
        for piece in shard:
            if held is None or held[0] != piece.parameter:
                held = (piece.parameter, read(piece.parameter).detach().cpu())
            rows = held[1][piece.start : piece.stop]
            tensors[piece.name] = rows.reshape(piece.shape).to(dtype, copy=True).contiguous()
        yield tensors
