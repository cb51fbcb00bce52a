"""Rows of chat data in an order that a cursor describes: JSONL, parquet or Hugging Face datasets. No torch.

Nothing is held but one buffer of rows. A pass over the data (an epoch) is cut into buffers of consecutive
rows; each is shuffled by (seed, epoch, number of the buffer) alone, and the first one of an epoch is shorter
by chance, so that other rows meet in the next. The cursor holds where the present buffer begins and how many
of its rows are taken: reading goes on there, and the order depends on no rank, clock or earlier process.

Refuses files that are missing, of another format, cut, or without rows, and a cursor of other data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_rl.config import SftConfig, SftFormat
from olmo_rl.data.dataset_tables import load_table
from olmo_rl.data.metadata import unknown_name
from olmo_rl.data.turns import COLUMNS, ChatRow
from olmo_rl.types import Refusal

SUFFIXES = (".jsonl", ".parquet")
_BATCH_ROWS = 64  # rows of a table that are decoded at once
_NO_COLUMN = "no column 'messages', and none 'prompt' and 'response'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Between two rows: `number` rows of file `file` lie before it, for JSONL `offset` bytes and `number`
    lines.
    """

    file: int = 0
    number: int = 0
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Rows given so far: buffer number `buffer` of epoch `epoch` begins at `place`, and `taken` of its rows
    are out.
    """

    epoch: int = 0
    buffer: int = 0
    taken: int = 0
    place: Place = field(default_factory=Place)


class RowFile(Protocol):
    """A file of rows, read on from any place."""

    @property
    def label(self) -> str:
        """Name and size: another label means other rows."""
        ...

    def rows(self, start: Place) -> Iterator[tuple[ChatRow, Place]]:
        """Every row from `start` on, each with the place behind it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlFile:
    """One JSON object a line; blank lines are passed over."""

    path: Path
    ignore: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.path.name} {self.path.stat().st_size}"

    def rows(self, start: Place) -> Iterator[tuple[ChatRow, Place]]:
        number, offset = start.number, start.offset
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                number, offset = number + 1, offset + len(line)
                if line.strip():
                    row = ChatRow(
                        where=f"{self.path}, line {number}",
                        id=f"{self.path.name}:{number}",
                        raw=line,
                        ignore=self.ignore,
                    )
                    yield row, Place(file=start.file, number=number, offset=offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """Columns `messages` or `prompt` and `response`; rows are counted from 0."""

    path: Path
    ignore: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.path.name} {self.path.stat().st_size}"

    def rows(self, start: Place) -> Iterator[tuple[ChatRow, Place]]:
        number = start.number
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                columns = _columns(file.schema_arrow.names, ignore=self.ignore, where=str(self.path))
                groups, skip = _groups_from(file, number)
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
                    fresh = batch.slice(min(skip, batch.num_rows))
                    skip -= batch.num_rows - fresh.num_rows
                    for cells in fresh.to_pylist():
                        number += 1
                        row = _table_row(cells, path=str(self.path), number=number - 1)
                        yield row, Place(file=start.file, number=number)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise Refusal(f"{self.path}: not a sound parquet file: {str(error).splitlines()[0]}") from None


def _groups_from(file: pq.ParquetFile, number: int) -> tuple[list[int], int]:
    """The row groups from row `number` on, and how many rows of the first one lie before it."""
    before = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if before + rows > number:
            return list(range(group, file.num_row_groups)), number - before
        before += rows
    return [], 0


def _columns(names: Sequence[str], *, ignore: Sequence[str], where: str) -> list[str]:
    """The columns of a table that are read; unknown ones are refused."""
    columns = [name for name in names if name not in ignore]
    if not {"messages", "prompt", "response"} & set(columns):
        raise Refusal(f"{where}: {_NO_COLUMN}")
    reasons = [
        f"{where}: {unknown_name(name, COLUMNS)}; rename it, or list it in sft.ignore"
        for name in columns
        if name not in COLUMNS
    ]
    reasons += [
        f"{where}: column {name!r} stands twice" for name in sorted(set(columns)) if columns.count(name) > 1
    ]
    if reasons:
        raise Refusal(reasons)
    return columns


def _table_row(cells: dict[str, Any], *, path: str, number: int) -> ChatRow:
    return ChatRow(where=f"{path}, row {number}", id=f"{Path(path).name}:{number}", raw=cells)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRows:
    """A split of Hugging Face datasets, mapped from disk; rows are counted from 0."""

    name: str
    table: Any

    @property
    def label(self) -> str:
        return f"{Path(self.name).name} {len(self.table)}"

    def rows(self, start: Place) -> Iterator[tuple[ChatRow, Place]]:
        columns = self.table.column_names
        for first in range(start.number, len(self.table), _BATCH_ROWS):
            part = self.table[first : first + _BATCH_ROWS]
            for number, values in enumerate(zip(*(part[name] for name in columns), strict=True), start=first):
                cells = dict(zip(columns, values, strict=True))
                yield (
                    _table_row(cells, path=self.name, number=number),
                    Place(file=start.file, number=number + 1),
                )


def open_chat(path: str, *, config: SftConfig, key: str, split: str) -> list[RowFile]:
    """The files that `path` names, in the order of their names; `key` is the key that holds it."""
    if config.format is SftFormat.datasets:
        return [_open_dataset(path, config=config, key=key, split=split)]
    suffixes = SUFFIXES if config.format is SftFormat.auto else (f".{config.format.value}",)
    place = Path(path)
    if place.is_dir():
        found = sorted(p for p in place.iterdir() if p.suffix in suffixes and not p.name.startswith("."))
        if not found:
            raise Refusal(
                f"{key}={path}: no {' or '.join(suffixes)} file in it: name another directory, or set "
                "sft.format=datasets for a directory that datasets saved"
            )
        if stray := [p.name for p in found if not p.is_file()]:
            raise Refusal(f"{key}={path}: {stray[0]} is no file: remove it, or name another directory")
    elif place.is_file():
        found = [place]
        if config.format is SftFormat.auto and place.suffix not in SUFFIXES:
            raise Refusal(f"{key}={path}: neither .jsonl nor .parquet: name it with sft.format")
    else:
        raise Refusal(
            f"{key}={path}: no such file or directory; a dataset of the Hugging Face Hub needs "
            "sft.format=datasets"
        )
    parquet, ignore = config.format is SftFormat.parquet, tuple(config.ignore)
    return [
        ParquetFile(path=file, ignore=ignore)
        if parquet or (config.format is SftFormat.auto and file.suffix == ".parquet")
        else JsonlFile(path=file, ignore=ignore)
        for file in found
    ]


def _open_dataset(path: str, *, config: SftConfig, key: str, split: str) -> DatasetRows:
    where = f"{key}={path} sft.format=datasets"
    table = load_table(path, subset=config.subset, split=split, where=where)
    columns = _columns(table.column_names, ignore=tuple(config.ignore), where=f"{key}={path}")
    return DatasetRows(name=path, table=table.select_columns(columns))


class ChatStream:
    """Rows in shuffled order, epoch after epoch. State: the cursor."""

    def __init__(
        self, files: Sequence[RowFile], *, seed: int, shuffle_buffer: int, epochs: int | None
    ) -> None:
        self._files = files
        self._seed = seed
        self._size = shuffle_buffer
        self._epochs = epochs
        self.cursor = Cursor()
        self._buffer: list[ChatRow] | None = None  # None: still to be read, at the cursor
        self._end = Place()  # of the buffered rows
        self._reader: Iterator[tuple[ChatRow, Place]] = iter(())

    def take(self, count: int) -> list[ChatRow]:
        """The next `count` rows; fewer only where the last epoch ends. An id names epoch, file and line."""
        taken: list[ChatRow] = []
        while len(taken) < count and (buffer := self._filled()) is not None:
            cursor = self.cursor
            part = buffer[cursor.taken : cursor.taken + count - len(taken)]
            taken += [replace(row, id=f"{cursor.epoch}:{row.id}") for row in part]
            self.cursor = Cursor(
                epoch=cursor.epoch, buffer=cursor.buffer, taken=cursor.taken + len(part), place=cursor.place
            )
        return taken

    def _filled(self) -> list[ChatRow] | None:
        """The present buffer, or the next one where that is used up; None where the last epoch is over."""
        if self._buffer is None:
            self._reader = self._read(self.cursor.place)
            self._fill()
        while self._buffer is not None and self.cursor.taken >= len(self._buffer):
            cursor = self.cursor
            if self._buffer:
                self.cursor = Cursor(epoch=cursor.epoch, buffer=cursor.buffer + 1, place=self._end)
            else:
                if cursor.buffer == 0:
                    raise Refusal(f"{', '.join(file.label for file in self._files)}: no row in it")
                if self._epochs is not None and cursor.epoch + 1 >= self._epochs:
                    return None
                self.cursor = Cursor(epoch=cursor.epoch + 1)
                self._reader = self._read(Place())
            self._fill()
        return self._buffer

    def _fill(self) -> None:
        cursor = self.cursor
        size = self._size
        if cursor.buffer == 0 and size > 1:
            size = int(self._generator(cursor.epoch).integers(1, size + 1))
        read = list(islice(self._reader, size))
        self._end = read[-1][1] if read else cursor.place
        rows = [row for row, _ in read]
        if self._size > 1:
            order = self._generator(cursor.epoch, cursor.buffer).permutation(len(rows))
            rows = [rows[i] for i in order.tolist()]
        self._buffer = rows

    def _read(self, start: Place) -> Iterator[tuple[ChatRow, Place]]:
        for index in range(start.file, len(self._files)):
            yield from self._files[index].rows(start if index == start.file else Place(file=index))

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self._seed, *numbers], spawn_key=(2,)))

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the cursor, and what makes its order."""
        return {"cursor": asdict(self.cursor)} | self._order()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, ours in self._order().items():
            if state[name] != ours:
                raise Refusal(
                    f"sft.path: {name} is {ours}, it was {state[name]} when the checkpoint was saved, so the "
                    "run cannot go on where it was: restore it, or start from the weights with init_from"
                )
        cursor = state["cursor"]
        self.cursor = Cursor(**(cursor | {"place": Place(**cursor["place"])}))
        self._buffer = None

    def _order(self) -> dict[str, Any]:
        labels = [file.label for file in self._files]
        return {"seed": self._seed, "sft.shuffle_buffer": self._size, "files and sizes": labels}


def rows_in_order(files: Sequence[RowFile]) -> ChatStream:
    """All rows once, in the order of the files."""
    return ChatStream(files, seed=0, shuffle_buffer=1, epochs=1)
