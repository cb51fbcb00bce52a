"""Hugging Face directories on disk: tensors by name from safetensors files, and writing them whole or not.

Reads slices, so that a rank touches the bytes of its own shard. Writes one file at a time into a directory of
another name, which gets its own when everything is in it.

Refused: a directory without weights, shards that are missing, cut or hold other tensors than the index says,
missing, unexpected or wrongly shaped tensors, integer and 8-bit weights, a directory that exists already.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from olmo_rl.policy.hf_names import Piece
from olmo_rl.types import Refusal

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 8  # tensors named in a refusal; more are counted


@dataclass(kw_only=True, slots=True)
class HfFiles:
    """Open safetensors files of a directory: a context manager. `tensors`: file of every tensor."""

    directory: Path
    key: str
    tensors: dict[str, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> HfFiles:
        index = self.directory / INDEX
        if index.is_file():
            placed = _weight_map(index, key=self.key)
        elif (self.directory / SINGLE).is_file():
            placed = None
        else:
            raise Refusal(
                f"{self.key}={self.directory}: neither {SINGLE} nor {INDEX}: give one with safetensors"
            )
        try:
            for name in sorted(set(placed.values())) if placed is not None else [SINGLE]:
                self._open(name, placed)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open(self, name: str, placed: Mapping[str, str] | None) -> None:
        path = self.directory / name
        try:
            file: Any = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise Refusal(
                f"{self.key}={self.directory}: {name} is missing, cut or no safetensors file ({error}): "
                "fetch it again"
            ) from None
        held = set(file.keys())
        expected = held if placed is None else {tensor for tensor, at in placed.items() if at == name}
        if held != expected:
            odd = sorted(held ^ expected)
            raise Refusal(
                f"{self.key}={self.directory}: {name} and {INDEX} disagree about {len(odd)} tensors, "
                f"{odd[0]} first: fetch both again"
            )
        self.tensors |= dict.fromkeys(held, file)

    def check(self, pieces: Sequence[Piece], *, optional: Iterable[str] = ()) -> None:
        """Refuse everything that is missing, unexpected, wrongly shaped or not in floating point."""
        expected = {piece.name: piece for piece in pieces}
        missing = [f"{name} is missing" for name in expected if name not in self.tensors]
        extra = sorted(self.tensors.keys() - expected.keys() - set(optional))
        strange = [f"{name} is not a tensor of this model" for name in extra]
        for name in expected.keys() & self.tensors.keys():
            part = self.tensors[name].get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if shape != expected[name].shape:
                strange.append(f"{name} has shape {shape}, the model {expected[name].shape}")
            elif dtype not in _FLOATS:
                strange.append(f"{name} has dtype {dtype}, weights have one of {', '.join(_FLOATS)}")
        reasons = missing + strange
        if reasons:
            rest = len(reasons) - _SHOWN
            shown = reasons[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
            raise Refusal([f"{self.key}={self.directory}: {reason}" for reason in shown])

    def part(self, piece: Piece, *, index: Sequence[Tensor]) -> Tensor:
        """The elements of `parameter[index[0]][:, index[1]]...` that lie in `piece`, as the file has them.

        `index`: ascending int64 places along every dimension of our parameter.
        """
        rows = index[0][(index[0] >= piece.start) & (index[0] < piece.stop)] - piece.start
        ours = list(index[1:]) if piece.stacked else [rows, *index[1:]]
        theirs = list(ours)
        for _ in range(len(piece.shape) - len(ours)):
            theirs.insert(1, torch.zeros(1, dtype=torch.int64))  # the axis of 1 of a convolution
        handle = self.tensors[piece.name].get_slice(piece.name)
        if any(len(places) == 0 for places in theirs) or len(rows) == 0:
            return torch.empty(tuple(len(places) for places in (rows, *index[1:])))
        spans = [slice(int(places[0]), int(places[-1]) + 1) for places in theirs]
        found: Tensor = handle[tuple(spans)]
        for dim, places in enumerate(theirs):
            if len(places) != found.shape[dim]:
                found = found.index_select(dim, places - places[0])
        return found.reshape(tuple(len(places) for places in (rows, *index[1:])))


def _weight_map(index: Path, *, key: str) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{key}={index.parent}: {INDEX} cannot be read ({error!r}): fetch it again") from None
    # A file of another directory would be another model.
    if not isinstance(placed, dict) or any(Path(str(file)).name != file for file in placed.values()):
        raise Refusal(f"{key}={index.parent}: {INDEX} names files outside of the directory: fetch it again")
    return placed


def shard_plan(pieces: Sequence[Piece], *, itemsize: int, limit: int) -> list[list[Piece]]:
    """Consecutive tensors that share a file of at most `limit` bytes; a larger tensor has one of its own."""
    shards: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        bytes_ = itemsize
        for width in piece.shape:
            bytes_ *= width
        if not shards or size + bytes_ > limit:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += bytes_
    return shards


def write_directory(
    directory: Path,
    *,
    config: Mapping[str, Any],
    shards: Iterator[dict[str, Tensor]],
    count: int,
    save: Callable[[Path], object] | None,
) -> None:
    """config.json, `count` safetensors files with their index, and what `save` (of a tokenizer) writes:
    complete or absent.
    """
    if directory.exists():
        raise Refusal(f"{directory} exists already: choose another directory, or remove it")
    scratch = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        placed: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards, start=1):
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            save_file(shard, scratch / name, metadata={"format": "pt"})
            shutil.copymode(scratch / "config.json", scratch / name)  # safetensors lets the owner read alone
            placed |= dict.fromkeys(shard, name)
            total += sum(tensor.nbytes for tensor in shard.values())
        if count > 1:
            table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
            (scratch / INDEX).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        if save is not None:
            save(scratch)
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
