"""Weights in and out of a decoder: one safetensors file, the model part of a training checkpoint, or a
Hugging Face directory.

Names and shapes are strict: nothing is left at its initial value silently. A Hugging Face directory fills
sharded parameters too, tensor by tensor: a rank reads the elements of its own shards and holds one tensor's
share beside them. The other two forms fill an unsharded decoder.

Refused: a path of neither form, and a Hugging Face directory of another model than the decoder's, key by key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from olmo_rl.config import ModelConfig
from olmo_rl.hf_config import disagreements, is_hf_directory, read_config
from olmo_rl.policy.hf_files import HfFiles
from olmo_rl.policy.hf_names import Piece, pieces
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.sharded import local_part, places
from olmo_rl.types import Refusal

HEAD = "lm_head.weight"  # the same in Hugging Face directories; tied models may leave it out there
# Lightning prefixes the decoder's names with the attribute that holds it.
CHECKPOINT_PREFIX = "decoder."


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write full weights as one safetensors file: complete or absent, never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, scratch)
    scratch.replace(path)


def load_weights(decoder: HybridDecoder, path: str, *, key: str = "init_from") -> None:
    """Fill an unsharded decoder from what `path` is. `key`: what refusals call the path."""
    location = Path(path)
    if is_hf_directory(location):
        fill(decoder, path, key=key)
        return
    expected = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    tied = decoder.state_dict().keys() - expected.keys()  # further names of weights that are there already
    if location.is_file():
        try:
            found = load_file(location)
        except SafetensorError as error:
            raise Refusal(f"{key}={path}: not a safetensors file ({error})") from None
    elif (location / ".metadata").is_file():
        found = _read_checkpoint(location, expected, key=key)
    else:
        raise Refusal(
            f"{key}={path}: neither a .safetensors file nor a checkpoint directory of a run, nor a Hugging "
            "Face directory: give outputs/<run>/checkpoints/<step>, a weights file, or one with config.json"
        )
    found = {name: tensor for name, tensor in found.items() if name not in tied}
    _check_names(expected, found, path=path, key=key)
    for name, parameter in expected.items():
        parameter.copy_(found[name])


@torch.no_grad()
def fill(decoder: HybridDecoder, path: str, *, key: str = "init_from") -> None:
    """Fill a decoder, sharded or not, from a Hugging Face directory of its model. No collective."""
    if reasons := disagreements(decoder.config, directory=path, key=key):
        raise Refusal(reasons)
    kind, _ = read_config(path, key=key)
    parameters = dict(decoder.named_parameters())
    parts = _grouped(pieces({name: p.shape for name, p in parameters.items()}, kind=kind))
    with HfFiles(directory=Path(path), key=key) as files:
        _check(files, parts, tied=decoder.config.tie_embeddings)
        for name, parameter in parameters.items():
            local, index, first = local_part(parameter), places(parameter), 0
            for piece in parts[name]:
                part = files.part(piece, index=index)
                local[first : first + len(part)].copy_(part)
                first += len(part)
            assert first == len(local), f"{name}: {first} of {len(local)} rows were filled"


def parameter_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of the parameters of `model`, in order; nothing is allocated."""
    with torch.device("meta"):
        decoder = HybridDecoder(model, attention="reference")
    return {name: parameter.shape for name, parameter in decoder.named_parameters()}


def _grouped(found: list[Piece]) -> dict[str, list[Piece]]:
    grouped: dict[str, list[Piece]] = {}
    for piece in found:
        grouped.setdefault(piece.parameter, []).append(piece)
    return grouped


def _check(files: HfFiles, parts: Mapping[str, list[Piece]], *, tied: bool) -> None:
    files.check([piece for group in parts.values() for piece in group], optional=(HEAD,) if tied else ())
    if not tied or HEAD not in files.tensors:
        return
    embedding = next(piece.name for piece in parts["tok_embeddings.weight"])
    if not torch.equal(files.tensors[HEAD].get_tensor(HEAD), files.tensors[embedding].get_tensor(embedding)):
        raise Refusal(
            f"{files.key}={files.directory}: config.json has tie_word_embeddings=true, yet {HEAD} differs "
            f"from {embedding}: set it to false there, and model.tie_embeddings=false"
        )


def _read_hf(path: str, *, key: str) -> dict[str, Tensor]:
    """Full weights of a Hugging Face directory under our names, in float32."""
    kind, model = read_config(path, key=key)
    shapes = parameter_shapes(model)
    parts = _grouped(pieces(shapes, kind=kind))
    with HfFiles(directory=Path(path), key=key) as files:
        _check(files, parts, tied=model.tie_embeddings)
        found = {}
        for name, shape in shapes.items():
            index = [torch.arange(size) for size in shape]
            whole = [files.part(piece, index=index).float() for piece in parts[name]]
            found[name] = torch.cat(whole).view(shape)
    return found


def read_weights(path: str) -> dict[str, Tensor]:
    """Full weights by our names from a .safetensors file, a checkpoint directory of a run, or a Hugging Face
    directory, of any model.
    """
    location = Path(path)
    if is_hf_directory(location):
        return _read_hf(path, key="path")
    if location.is_file():
        try:
            return load_file(location)
        except SafetensorError as error:
            raise Refusal(f"{path}: not a safetensors file ({error})") from None
    if not (location / ".metadata").is_file():
        raise Refusal(
            f"{path}: neither a .safetensors file nor a checkpoint directory of a run, nor a Hugging Face "
            "directory"
        )
    stored = dcp.FileSystemReader(location).read_metadata().state_dict_metadata
    prefix = f"state_dict.{CHECKPOINT_PREFIX}"
    model = {
        name.removeprefix("state_dict."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    dcp.load({"state_dict": model}, checkpoint_id=location, no_dist=True)
    return {name.removeprefix(CHECKPOINT_PREFIX): tensor for name, tensor in model.items()}


def _read_checkpoint(location: Path, expected: Mapping[str, Tensor], *, key: str) -> dict[str, Tensor]:
    stored = dcp.FileSystemReader(location).read_metadata().state_dict_metadata
    prefix = f"state_dict.{CHECKPOINT_PREFIX}"
    names = [name.removeprefix(prefix) for name in stored if name.startswith(prefix)]
    shapes = {name: getattr(stored[prefix + name], "size", None) for name in names}
    strange = [name for name in names if name in expected and expected[name].shape != shapes[name]]
    if strange:
        name = strange[0]
        raise Refusal(
            f"{key}={location}: {name} has shape {tuple(shapes[name] or ())}, the model "
            f"{tuple(expected[name].shape)} ({len(strange)} such weights): they are of another model"
        )
    model = {CHECKPOINT_PREFIX + name: torch.empty_like(expected[name]) for name in names if name in expected}
    dcp.load({"state_dict": model}, checkpoint_id=location, no_dist=True)
    found = {name.removeprefix(CHECKPOINT_PREFIX): tensor for name, tensor in model.items()}
    return found | {name: torch.empty(0) for name in names if name not in expected}


def _check_names(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], *, path: str, key: str) -> None:
    reasons = [f"{key}={path}: {name} is missing" for name in expected if name not in found]
    reasons += [
        f"{key}={path}: {name} is not a weight of this model" for name in found if name not in expected
    ]
    reasons += [
        f"{key}={path}: {name} has shape {tuple(found[name].shape)}, the model {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if reasons:
        raise Refusal(reasons)
