"""Rollout files in parquet: per-token lists as arrays, routes as bytes, metadata as one JSON key.

Owns the Arrow types of the kinds of a sample's fields. Refuses a file that is cut or damaged (pages carry
checksums) and unknown, missing or mistyped columns, all at once. Rows become `Record`s, whose contents are
judged elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from olmo_rl.data.columns import COLUMNS, ROUTE_COLUMNS, Record, written_columns
from olmo_rl.data.metadata import Metadata, describe, metadata_of, unknown_name
from olmo_rl.types import Collection, Kind, Refusal, Sample, SampleField

MOST_ROWS, MOST_VALUES = 2**24, 2**31  # of a file; of one column in one row group
_METADATA_KEY = b"olmo_rl"
_ROW_GROUP = 64  # samples written at once, so that routes are never held twice
_ARROW_TYPES = {
    Kind.name: pa.string(),
    Kind.text: pa.string(),
    Kind.integer: pa.int64(),
    Kind.number: pa.float64(),
    Kind.flag: pa.bool_(),
    Kind.tokens: pa.list_(pa.int32()),
    Kind.mask: pa.list_(pa.bool_()),
    Kind.logprobs: pa.list_(pa.float32()),
}
_ELEMENTS = {
    Kind.tokens: (pa.types.is_integer,),
    Kind.mask: (pa.types.is_boolean, pa.types.is_integer),
    Kind.logprobs: (pa.types.is_floating, pa.types.is_integer, pa.types.is_null),
}


def read_parquet(path: Path, require_routes: bool) -> tuple[Metadata, list[Record], bool]:
    """Metadata, one record per row, whether the file has routes. Routes stay views of the file's buffers."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            _check_schema(schema, path=path)
            _check_size(file.metadata, path=path)
            skipped = () if require_routes else ROUTE_COLUMNS
            table = file.read(columns=[name for name in schema.names if name not in skipped])
            has_routes = "routes" in schema.names
    except (pa.ArrowException, OSError) as error:
        raise Refusal(f"{path}: not a complete parquet file: {str(error).splitlines()[0]}") from None
    raw = (schema.metadata or {}).get(_METADATA_KEY, b"{}")
    try:
        metadata = metadata_of(json.loads(raw), where=str(path))
    except ValueError as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{path}: the metadata key 'olmo_rl' is not JSON: {error}") from None
    cells: dict[str, list[Any]] = {}
    for entry in COLUMNS:
        if entry.column in table.column_names:
            cells[entry.column] = _cells(table[entry.column], entry.kind)
    if require_routes and has_routes:
        cells["routes"] = [x.as_buffer() if x.is_valid else None for x in table["routes"]]
        cells["routes_shape"] = table["routes_shape"].to_pylist()
        cells["routes_dtype"] = table["routes_dtype"].to_pylist()
    rows = (dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True))
    return metadata, [Record(where=f"row {i}", cells=row) for i, row in enumerate(rows)], has_routes


def _check_size(metadata: pq.FileMetaData, *, path: Path) -> None:
    """Refuse a file that announces more than a collection holds, before anything of that size is allocated:
    a few bytes can stand for any number of equal values.
    """
    values = [
        metadata.row_group(group).column(column).num_values
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    ]
    if metadata.num_rows > MOST_ROWS or max(values, default=0) > MOST_VALUES:
        raise Refusal(
            f"{path}: it announces {metadata.num_rows} rows and {max(values, default=0)} values of a column "
            f"in one row group; at most {MOST_ROWS} and {MOST_VALUES} are read: split it"
        )


def first_has(path: Path, *, column: str) -> bool:
    """Whether the first row of a file that was read before has a value in `column`; reads that column of one
    row group.
    """
    with pq.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            return False
        batch = next(file.iter_batches(batch_size=1, columns=[column]), None)
        return batch is not None and batch[column][0].is_valid


def _check_schema(schema: pa.Schema, *, path: Path) -> None:
    """Refuse unknown, missing and mistyped columns, all at once."""
    known = (*(entry.column for entry in COLUMNS), *ROUTE_COLUMNS)
    reasons = [unknown_name(name, known) for name in schema.names if name not in known]
    reasons += [
        f"column {name!r} stands twice" for name in sorted(set(schema.names)) if schema.names.count(name) > 1
    ]
    for entry in COLUMNS:
        if entry.column not in schema.names:
            if entry.required:
                reasons.append(f"column {entry.column!r} is missing")
        elif entry.kind.per_token:
            kind = schema.field(entry.column).type
            listed = (
                pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            )
            if not listed or not any(test(kind.value_type) for test in _ELEMENTS[entry.kind]):
                reasons.append(
                    f"column {entry.column!r} has type {kind}: expected {_ARROW_TYPES[entry.kind]}"
                )
    if "routes" in schema.names:
        reasons += [
            f"column {name!r} is missing beside routes" for name in ROUTE_COLUMNS if name not in schema.names
        ]
        kind = schema.field("routes").type
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            reasons.append(
                f"column 'routes' has type {kind}: expected the bytes of an integer array in C order"
            )
    if reasons:
        raise Refusal([f"{path}: {reason}" for reason in reasons])


def _cells(values: pa.ChunkedArray, kind: Kind) -> list[Any]:
    if not kind.per_token:
        return values.to_pylist()
    return list(_lists(values, nullable=kind is Kind.logprobs))


def _lists(values: pa.ChunkedArray, *, nullable: bool) -> Iterator[Any]:
    """One array per row, None for a missing row. A row with a null where none may be comes as a list, to be
    refused.
    """
    for chunk in values.chunks:
        if pa.types.is_fixed_size_list(chunk.type):
            chunk = chunk.cast(pa.list_(chunk.type.value_type))
        present = chunk.is_valid().to_numpy(zero_copy_only=False)
        # With nulls among them NumPy has integers as floats, also in rows that have none.
        filled = (
            chunk.values if nullable else chunk.values.fill_null(pa.scalar(0).cast(chunk.type.value_type))
        )
        elements = filled.to_numpy(zero_copy_only=False)
        null = chunk.values.is_null().to_numpy(zero_copy_only=False)
        for i, (start, stop) in enumerate(pairwise(chunk.offsets.to_numpy())):
            if not present[i]:
                yield None
            elif not nullable and null[start:stop].any():
                yield chunk[i].as_py()
            else:
                yield elements[start:stop]


def write_parquet(collection: Collection, path: Path) -> None:
    columns = written_columns(collection)
    fields = [pa.field(entry.column, _ARROW_TYPES[entry.kind]) for entry in columns]
    routed = any(sample.routes is not None for sample in collection.samples)
    if routed:
        fields += [
            pa.field("routes", pa.large_binary()),
            pa.field("routes_shape", pa.list_(pa.int32())),
            pa.field("routes_dtype", pa.string()),
        ]
    metadata = {_METADATA_KEY: json.dumps(describe(collection)).encode()}
    with pq.ParquetWriter(
        path,
        pa.schema(fields, metadata=metadata),
        compression="zstd",
        use_dictionary=["group_id"],
        write_page_checksum=True,
    ) as writer:
        for start in range(0, len(collection.samples), _ROW_GROUP):
            samples = collection.samples[start : start + _ROW_GROUP]
            arrays = [_arrow(samples, entry) for entry in columns]
            if routed:
                arrays += _arrow_routes(samples)
            writer.write_batch(pa.record_batch(arrays, schema=writer.schema))


def _arrow(samples: Sequence[Sample], entry: SampleField) -> pa.Array:
    values = [getattr(sample, entry.name) for sample in samples]
    kind = _ARROW_TYPES[entry.kind]
    if not entry.kind.per_token:
        return pa.array(values, type=kind)
    present: list[NDArray[Any]] = [value for value in values if value is not None]
    flat = np.concatenate(present) if present else np.zeros(0)
    null = ~np.isfinite(flat) if entry.kind is Kind.logprobs else None
    offsets = np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int32)
    missing = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(
        offsets, pa.array(flat, type=kind.value_type, mask=null), type=kind, mask=missing
    )


def _arrow_routes(samples: Sequence[Sample]) -> list[pa.Array]:
    routes = [sample.routes for sample in samples]
    little = [
        None if r is None else r.astype(r.dtype.newbyteorder("<"), copy=False).tobytes() for r in routes
    ]
    return [
        pa.array(little, type=pa.large_binary()),
        pa.array([None if r is None else list(r.shape) for r in routes], type=pa.list_(pa.int32())),
        pa.array([None if r is None else r.dtype.name for r in routes], type=pa.string()),
    ]
