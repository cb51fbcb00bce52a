"""Reads and writes the safetensors files of Hugging Face directories.

Reads slices, so that a rank touches only the bytes of its own shard. Writes one file at a time into a
temporary directory, which is renamed when it is complete.

Refused: a directory without weights; files that are missing, cut, or contain other tensors than the index
lists; missing, unexpected or wrongly shaped tensors; integer and 8-bit weights; a directory that exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from olmo_rl.complete_files import complete_directory
from olmo_rl.full_disks import full_disks_refused
from olmo_rl.hf.json_files import read_json
from olmo_rl.hf.names import Piece, refuse_mismatches
from olmo_rl.types import Refusal

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(kw_only=True, slots=True)
class HfFiles:
    """A context manager: the open safetensors files of a directory. `tensors` maps names to open files."""

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
        """Refuse missing, unexpected and wrongly shaped tensors, and those that are not floating point."""
        slices = {name: file.get_slice(name) for name, file in self.tensors.items()}
        expected = {piece.name: piece.shape for piece in pieces}
        refuse_mismatches(
            expected,
            {name: x.get_shape() for name, x in slices.items() if name in expected or name not in optional},
            where=f"{self.key}={self.directory}",
            further=[
                f"{name} has dtype {part.get_dtype()}, weights have one of {', '.join(_FLOATS)}"
                for name, part in slices.items()
                if name in expected and part.get_dtype() not in _FLOATS
            ],
        )

    def part(self, piece: Piece, *, index: Sequence[Tensor]) -> Tensor:
        """Return the elements of `parameter[index[0]][:, index[1]]...` that lie in `piece`, in the dtype of
        the file. `index`: ascending int64 positions along every dimension of our parameter.
        """
        rows = index[0][(index[0] >= piece.start) & (index[0] < piece.stop)] - piece.start
        ours = list(index[1:]) if piece.stacked else [rows, *index[1:]]
        shape = tuple(len(positions) for positions in (rows, *index[1:]))
        if 0 in shape:
            return torch.empty(shape)
        theirs = list(ours)
        for _ in range(len(piece.shape) - len(ours)):
            theirs.insert(1, torch.zeros(1, dtype=torch.int64))  # the axis of length 1 of a convolution
        return read_slice(self.tensors[piece.name].get_slice(piece.name), index=theirs).reshape(shape)


def read_slice(handle: Any, *, index: Sequence[Tensor]) -> Tensor:
    """Return the elements of a tensor of a safetensors file at ascending int64 positions along every
    dimension; only the rows in between are read.
    """
    if any(len(positions) == 0 for positions in index):
        return torch.empty(tuple(len(positions) for positions in index))
    found: Tensor = handle[tuple(slice(int(x[0]), int(x[-1]) + 1) for x in index)]
    for dim, positions in enumerate(index):
        if len(positions) != found.shape[dim]:
            found = found.index_select(dim, positions - positions[0])
    return found


def _weight_map(index: Path, *, key: str) -> dict[str, str]:
    values = read_json(index, where=f"{key}={index.parent}: {INDEX}", fix="fetch it again")
    placed = values.get("weight_map") if isinstance(values, dict) else None
    if placed is None:
        raise Refusal(f"{key}={index.parent}: {INDEX} has no weight_map: fetch it again")
    # A file of another directory would be another model.
    if not isinstance(placed, dict) or any(Path(str(file)).name != file for file in placed.values()):
        raise Refusal(f"{key}={index.parent}: {INDEX} names files outside of the directory: fetch it again")
    return placed


def shard_plan(pieces: Sequence[Piece], *, itemsize: int, limit: int) -> list[list[Piece]]:
    """Group consecutive tensors into files of at most `limit` bytes; a larger tensor gets its own file."""
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
    documents: Mapping[str, Mapping[str, Any]],
    shards: Iterator[dict[str, Tensor]],
    count: int,
    save: Callable[[Path], object] | None,
) -> None:
    """Write JSON `documents` by file name, `count` safetensors files with their index, and the files that
    `save` writes: complete or absent.
    """
    if directory.exists():
        raise Refusal(f"{directory} exists already: choose another directory, or remove it")
    with complete_directory(directory) as scratch:
        for name, content in documents.items():
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        mode = min((scratch / name).stat().st_mode for name in documents)
        placed: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards, start=1):
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            with full_disks_refused(scratch / name, needed=sum(tensor.nbytes for tensor in shard.values())):
                save_file(shard, scratch / name, metadata={"format": "pt"})
            os.chmod(scratch / name, mode)  # safetensors makes it readable for the owner alone
            placed |= dict.fromkeys(shard, name)
            total += sum(tensor.nbytes for tensor in shard.values())
        if count > 1:
            table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
            (scratch / INDEX).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        if save is not None:
            save(scratch)
