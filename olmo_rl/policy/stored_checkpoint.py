"""Reads distributed checkpoints of anybody: nothing in one can run code, and nothing in one allocates more
than its files hold.

torch describes a checkpoint in a pickle, `.metadata`. An unpickler that knows torch's own records alone reads
it, into records of ours; what torch gets is built from those, after every entry has been compared with the
files. Stored values that are no tensors are pickles too, and are never read; `meta.pt`, where our runs keep
such values, is read with `weights_only`.

Refused, by name: another pickle, files outside of the directory, entries behind the end of a file, tensors
that are larger than their bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from olmo_rl.full_disks import causes
from olmo_rl.types import Refusal

METADATA = ".metadata"
PLAIN_STATE = "meta.pt"  # what Lightning keeps beside tensors
LARGEST_METADATA = 2**30  # bytes
_SHARD = re.compile(r"__\d+_\d+\.distcp")
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
}
_IGNORED = {
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}


class _Record:
    """A record of the pickle: its state, whatever that is."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Unpickler(pickle.Unpickler):
    """Builds records, torch's dtypes and plain values. Every name gets a stand-in of its own, which nothing
    else uses.
    """

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return lambda *values: tuple(*values)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib") and name.endswith("Path"):
            return lambda *parts: "/".join(map(str, parts))
        if (module, name) in _IGNORED:
            return lambda *values: None
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of torch contains")


def read_metadata(directory: str | Path, *, key: str) -> Metadata:
    """Read and check the description of a checkpoint. `key` is the configuration key that refusals name."""
    directory = Path(directory)
    try:
        size = (directory / METADATA).stat().st_size
        if size > LARGEST_METADATA:
            raise ValueError(f"it has {size} bytes, more than {LARGEST_METADATA}")
        record = _Unpickler(io.BytesIO((directory / METADATA).read_bytes())).load()
        return _checked(record, directory=directory)
    except Exception as error:  # of bytes that anybody may have written
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise Refusal(
            f"{key}={directory}: {METADATA} is refused, {reason}: give another checkpoint"
        ) from None


def load_tensors(state: dict[str, Any], directory: str | Path, *, key: str, alone: bool = False) -> None:
    """Fill tensors in place from a checkpoint. `alone`: this process reads for itself, without collectives.

    Raises Refusal where the checkpoint cannot be read: torch's own exception is no Exception, and would end a
    sweep without a message.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended
            dcp.load(state, storage_reader=_Reader(directory, key=key), planner=_Planner(), no_dist=alone)
    except CheckpointException as error:
        first = causes(error)[-1]
        if isinstance(first, Refusal):
            raise first from error
        reason = str(first).partition("\n")[0].partition(". ")[0]  # torch's advice is unsafe here
        raise Refusal(
            f"{key}: {directory} cannot be read, {type(first).__name__}: {reason}: give another checkpoint"
        ) from error


def load_plain_state(directory: Path, *, key: str) -> dict[str, Any]:
    """Read what a checkpoint holds beside its tensors. Raises Refusal for anything but plain values."""
    try:
        return dict(torch.load(directory / PLAIN_STATE, map_location="cpu", weights_only=True))
    except Exception as error:  # of bytes that anybody may have written
        reason = str(error).partition("\n")[0].partition(". ")[0][:200]
        raise Refusal(
            f"{key}: {directory / PLAIN_STATE} cannot be read, {type(error).__name__}: {reason}: give "
            "another checkpoint"
        ) from None


class _Reader(dcp.FileSystemReader):
    """torch's reader of files, with our reader of their description."""

    def __init__(self, path: str | Path, *, key: str) -> None:
        super().__init__(path)
        self._key = key

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path), key=self._key)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Planner(DefaultLoadPlanner):
    """Reads tensors, never pickled values."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        raise Refusal(f"the checkpoint holds {read_item.dest_index.fqn} as a pickled value, not as a tensor")


def _checked(record: Any, *, directory: Path) -> Metadata:
    """Build torch's description from records, each entry held against the files of the directory."""
    sizes: dict[str, int] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for index, info in _items(record, "storage_data"):
        path, offset, length = (info.get(name) for name in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or _SHARD.fullmatch(path) is None:
            raise ValueError(f"it names the file {str(path)[:80]!r}")
        if path not in sizes:
            sizes[path] = (directory / path).stat().st_size
        if not (_whole(offset) and _whole(length) and offset + length <= sizes[path]):
            raise ValueError(f"an entry lies outside of {path}")
        stored[_index(index)] = _StorageInfo(relative_path=path, offset=offset, length=length)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in _items(record, "state_dict_metadata"):
        if not isinstance(name, str):
            raise ValueError("a name is no text")
        is_tensor = type(entry).__name__ == "TensorStorageMetadata"
        entries[name] = _tensor(name, entry, stored=stored) if is_tensor else BytesStorageMetadata()
    return Metadata(state_dict_metadata=entries, storage_data=stored)


def _tensor(name: str, entry: Any, *, stored: dict[MetadataIndex, _StorageInfo]) -> TensorStorageMetadata:
    dtype, size = entry.get("properties").state[0], _shape(entry.get("size"))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    chunks, elements = [], 0
    for chunk in entry.get("chunks"):
        offsets, sizes = _shape(chunk.get("offsets")), _shape(chunk.get("sizes"))
        inside = len(offsets) == len(sizes) == len(size) and all(
            first + count <= whole for first, count, whole in zip(offsets, sizes, size, strict=True)
        )
        info, needed = stored.get(MetadataIndex(name, offsets)), math.prod(sizes) * dtype.itemsize
        if not inside or (needed > 0 and (info is None or needed > info.length)):
            raise ValueError(f"{name} of shape {tuple(size)} is not what its files hold")
        elements += math.prod(sizes)
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
    if elements != math.prod(size):
        raise ValueError(f"{name} of shape {tuple(size)} is stored in part")
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _items(record: Any, name: str) -> list[tuple[Any, Any]]:
    value = record.get(name) if isinstance(record, _Record) else None
    if not isinstance(value, dict):
        raise ValueError(f"it has no {name}")
    return list(value.items())


def _index(record: Any) -> MetadataIndex:
    name, offset = record.get("fqn"), record.get("offset")
    if not isinstance(name, str):
        raise ValueError("an entry without a name")
    return MetadataIndex(name, None if offset is None else _shape(offset), record.get("index"))


def _shape(values: Any) -> torch.Size:
    if not isinstance(values, tuple) or not all(map(_whole, values)):
        raise ValueError("a shape is no tuple of whole numbers")
    return torch.Size(values)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
