"""Reads weights into a decoder, whole or sharded, and writes them: the one reader of stored weights.

Weights are stored as one safetensors file, as the model part of a training checkpoint, or as a Hugging Face
directory. Names and shapes are strict: no parameter silently keeps its initial value. Each rank reads only
the elements of its own shards, one stored tensor at a time, so that no rank ever contains the whole model.

Refused: a path of no such form, weights of another model than the decoder's (each mismatch by name), and a
Hugging Face directory whose config.json differs from `model.*`, key by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from olmo_rl.complete_files import complete_file
from olmo_rl.config import ModelConfig
from olmo_rl.hf.agreement import disagreements
from olmo_rl.hf.formats import is_hf_directory, read_config
from olmo_rl.hf.names import Piece, by_parameter, pieces, refuse_mismatches
from olmo_rl.hf.weight_files import HfFiles, read_slice
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.sharded import local_part, places
from olmo_rl.policy.stored_checkpoint import METADATA, load_tensors, read_metadata
from olmo_rl.types import Refusal

LM_HEAD = "lm_head.weight"  # the same name in Hugging Face directories; tied models may omit it there
# Lightning prefixes the decoder's names with the attribute that it is assigned to.
CHECKPOINT_PREFIX = "decoder."
_ROWS = 4096  # rows of two tensors that are compared at once


class StoredWeights(Protocol):
    """Weights on disk by our parameter names."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]: ...

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy stored weights into parameters by name, each a whole tensor or this rank's shard. No
        collective.
        """
        ...

    def whole(self, name: str) -> Tensor:
        """Return one whole weight on the CPU."""
        ...


@dataclass(kw_only=True, slots=True)
class _SingleFile:
    """One safetensors file with our names."""

    file: Any
    shapes: Mapping[str, torch.Size] = field(init=False)

    def __post_init__(self) -> None:
        names = list(self.file.keys())
        self.shapes = {name: torch.Size(self.file.get_slice(name).get_shape()) for name in names}

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            index = places(parameter)
            local_part(parameter).copy_(read_slice(self.file.get_slice(name), index=index))

    def whole(self, name: str) -> Tensor:
        return torch.as_tensor(self.file.get_tensor(name))


@dataclass(kw_only=True, slots=True)
class _Checkpoint:
    """The model part of a checkpoint directory of a run."""

    directory: Path
    key: str
    shapes: Mapping[str, torch.Size] = field(init=False)
    _dtypes: Mapping[str, torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        prefix = f"state_dict.{CHECKPOINT_PREFIX}"
        stored = {
            name.removeprefix(prefix): entry
            for name, entry in read_metadata(self.directory, key=self.key).state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self.shapes = {name: entry.size for name, entry in stored.items()}
        self._dtypes = {name: entry.properties.dtype for name, entry in stored.items()}

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        weights = {CHECKPOINT_PREFIX + name: parameter for name, parameter in parameters.items()}
        load_tensors({"state_dict": weights}, self.directory, key=self.key, alone=True)

    def whole(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name], dtype=self._dtypes[name])
        self.fill({name: tensor})
        return tensor


@dataclass(kw_only=True, slots=True)
class _HfDirectory:
    """A Hugging Face directory, whose tensors are parts of our parameters; whole weights are float32."""

    files: HfFiles
    shapes: Mapping[str, torch.Size]
    parts: Mapping[str, list[Piece]]

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            local, index, first = local_part(parameter), places(parameter), 0
            for piece in self.parts[name]:
                part = self.files.part(piece, index=index)
                local[first : first + len(part)].copy_(part)
                first += len(part)
                del part  # before the next one is read
            assert first == len(local), f"{name}: {first} of {len(local)} rows were filled"

    def whole(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name])
        self.fill({name: tensor})
        return tensor


@contextmanager
def open_weights(path: str, *, key: str) -> Iterator[StoredWeights]:
    """Open the weights at `path`, of any model. `key` is the configuration key that refusals name."""
    location = Path(path)
    if is_hf_directory(location):
        kind, model = read_config(path, key=key)
        shapes = parameter_shapes(model)
        parts = by_parameter(pieces(shapes, kind=kind))
        with HfFiles(directory=location, key=key) as files:
            _check(files, parts, tied=model.tie_embeddings)
            yield _HfDirectory(files=files, shapes=shapes, parts=parts)
    elif location.is_file():
        try:
            opened = safe_open(location, framework="pt")
        except SafetensorError as error:
            raise Refusal(f"{key}={path}: not a safetensors file ({error})") from None
        with opened as file:
            yield _SingleFile(file=file)
    elif (location / METADATA).is_file():
        yield _Checkpoint(directory=location, key=key)
    else:
        raise Refusal(
            f"{key}={path}: neither a .safetensors file nor a checkpoint directory of a run, nor a Hugging "
            "Face directory: give outputs/<run>/checkpoints/<step>, a weights file, or one with config.json"
        )


@torch.no_grad()
def load_weights(decoder: HybridDecoder, path: str, *, key: str = "init_from") -> None:
    """Fill a decoder, sharded or not, from the weights at `path`. `key` is the configuration key that
    refusals name. No collective.
    """
    if is_hf_directory(path) and (reasons := disagreements(decoder.config, directory=path, key=key)):
        raise Refusal(reasons)
    with open_weights(path, key=key) as stored:
        _refuse_another_model(stored, decoder=decoder, where=f"{key}={path}")
        stored.fill(dict(decoder.named_parameters()))


def check_weights(decoder: HybridDecoder, path: str, *, key: str) -> None:
    """Refuse stored weights of another model than the decoder's, by name. `key` is the configuration key that
    refusals name. No collective.
    """
    with open_weights(path, key=key) as stored:
        _refuse_another_model(stored, decoder=decoder, where=f"{key}={path}")


def _refuse_another_model(stored: StoredWeights, *, decoder: HybridDecoder, where: str) -> None:
    refuse_mismatches(
        {name: parameter.shape for name, parameter in decoder.named_parameters()},
        untied(stored.shapes, model=decoder.config),
        where=where,
    )


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the whole weights at `path` by our names, of any model."""
    with open_weights(path, key="path") as stored:
        return {name: stored.whole(name) for name in stored.shapes}


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write whole weights as one safetensors file: complete or absent."""
    with complete_file(path, needed=sum(tensor.nbytes for tensor in weights.values())) as partial:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, partial)


def parameter_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Return names and shapes of the parameters of `model`, in order; nothing is allocated."""
    with torch.device("meta"):
        decoder = HybridDecoder(model, attention="reference")
    return {name: parameter.shape for name, parameter in decoder.named_parameters()}


def untied(shapes: Mapping[str, torch.Size], *, model: ModelConfig) -> dict[str, torch.Size]:
    """Leave out the head of a model with tied embeddings, which is a second name of the embedding."""
    return {name: shape for name, shape in shapes.items() if name != LM_HEAD or not model.tie_embeddings}


def _check(files: HfFiles, parts: Mapping[str, list[Piece]], *, tied: bool) -> None:
    files.check([piece for group in parts.values() for piece in group], optional=(LM_HEAD,) if tied else ())
    if not tied or LM_HEAD not in files.tensors:
        return
    embedding = next(piece.name for piece in parts["tok_embeddings.weight"])
    head, rows = (files.tensors[name].get_slice(name) for name in (LM_HEAD, embedding))
    size = rows.get_shape()[0]
    same = head.get_shape() == rows.get_shape() and all(
        torch.equal(head[first : first + _ROWS], rows[first : first + _ROWS])
        for first in range(0, size, _ROWS)
    )
    if not same:
        raise Refusal(
            f"{files.key}={files.directory}: config.json has tie_word_embeddings=true, yet {LM_HEAD} differs "
            f"from {embedding}: set it to false there, and model.tie_embeddings=false"
        )
