"""Rollout files, one collection each: parquet is the format of record, JSONL serves small inputs.

Owns paths, JSONL, and reading and writing without loss; `columns.py` owns the columns, `metadata.py` the
metadata, `validation.py` the checks of contents. Every refusal names file, line (JSONL) or row (parquet) and
sample id, then position, layer and route row. A log-prob that is null or not finite is legal only in a slot
that is not scored: NaN in memory, null in a file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from olmo_rl.complete_files import complete_file
from olmo_rl.data.columns import COLUMNS, Record, layer_axis, routes_of, sample_of, written_columns
from olmo_rl.data.json_lines import parse_line
from olmo_rl.data.metadata import Metadata, describe, metadata_of, unknown_name
from olmo_rl.data.parquet import first_has, read_parquet, write_parquet
from olmo_rl.data.validation import check_sample, checked_routes
from olmo_rl.types import FIELDS, Collection, ExpertLayout, Refusal, Sample

SUFFIXES = (".parquet", ".jsonl")
_REPORTED = 20  # faults named one by one; the rest is counted


def collection_paths(path: str | Path) -> list[Path]:
    """The files of `path`, one collection each: the file itself, or those of a directory in name order."""
    path = Path(path)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and not p.name.startswith("."))
        if not found:
            raise Refusal(f"rollouts.path={path}: the directory holds no {' or '.join(SUFFIXES)} file")
        return found
    if not path.is_file():
        raise Refusal(f"rollouts.path={path}: there is no such file or directory")
    _check_suffix(path)
    return [path]


def read_collection(
    path: str | Path,
    *,
    require_routes: bool,
    layout: ExpertLayout | None = None,
    vocab_size: int | None = None,
    num_layers: int | None = None,
) -> Collection:
    """Read and check one file.

    `require_routes` (replay): every sample must carry routes; they are checked against the file's metadata,
    or against `layout` (the model's) where the file has none. Without it routes are not read, which `notes`
    reports if there are any. `vocab_size`: refuse larger token ids. `num_layers`: layers of the model, which
    an axis over all layers must have. Raises Refusal with one reason per faulty sample.
    """
    path = Path(path)
    _check_suffix(path)
    if not path.is_file():
        raise Refusal(f"{path}: there is no such file")
    read = read_parquet if path.suffix == ".parquet" else _read_jsonl
    try:
        metadata, records, has_routes = read(path, require_routes)
    except (KeyError, TypeError, OverflowError, RecursionError, UnicodeDecodeError) as error:
        raise Refusal(
            f"{path}: a value that no rollout file contains ({type(error).__name__}: {error}): "
            "was it written by recipe=rollout or `write_collection`?"
        ) from error
    known = metadata.layout or layout
    if require_routes and known is None:
        raise Refusal(
            f"{path}: routes are needed (policy.replay=true), but neither the file's metadata nor the model "
            "has num_experts, top_k and routed_layers: add the metadata or set policy.replay=false"
        )
    all_layers = None
    if require_routes and metadata.all_layers:
        all_layers = _all_layers(metadata, records, num_layers=num_layers, path=path)
    samples = _samples(
        records,
        layout=known if require_routes else None,
        all_layers=all_layers,
        vocab_size=vocab_size,
        path=path,
    )
    note = f"{path}: recorded routes are ignored because policy.replay=false"
    return Collection(
        samples=samples,
        layout=known if require_routes else metadata.layout,
        source=str(path),
        model=metadata.model,
        tokenizer=metadata.tokenizer,
        sampling=metadata.sampling,
        notes=(note,) if has_routes and not require_routes else (),
    )


def _samples(
    records: list[Record],
    *,
    layout: ExpertLayout | None,
    all_layers: int | None,
    vocab_size: int | None,
    path: Path,
) -> list[Sample]:
    """Every record as a checked sample, or a refusal that names every faulty one."""
    samples: list[Sample] = []
    reasons: list[str] = []
    seen: dict[str, str] = {}
    for record in records:
        try:
            sample = sample_of(record)
            check_sample(sample, vocab_size=vocab_size)
            if layout is not None:
                sample.routes = routes_of(record, tokens=len(sample), layout=layout, all_layers=all_layers)
            if sample.id in seen:
                raise Refusal(f"{seen[sample.id]} has the same sample_id: ids are unique within a collection")
        except Refusal as refusal:
            name = record.cells.get("sample_id")
            who = "" if name is None else f", sample {str(name)!r}"
            reasons += [f"{path} {record.where}{who}: {reason}" for reason in refusal.reasons]
            continue
        seen[sample.id] = record.where
        samples.append(sample)
    if reasons:
        more = len(reasons) - _REPORTED
        raise Refusal(reasons[:_REPORTED] + ([f"{path}: and {more} more faulty samples"] if more > 0 else []))
    if not samples:
        raise Refusal(f"{path}: the file contains no samples")
    return samples


def _all_layers(metadata: Metadata, records: list[Record], *, num_layers: int | None, path: Path) -> int:
    """Layers that an axis over all layers has: the model's, or those of the first sample that has routes."""
    assert metadata.layout is not None, "route_layers comes with the expert counts"
    needed = max(metadata.layout.routed_layers) + 1
    found = num_layers or next((axis for axis in map(layer_axis, records) if axis), needed)
    if found < needed:
        raise Refusal(
            f"{path}: routes have {found} layers, but routed_layers names layer {needed - 1} and "
            "route_layers is 'all': the axis needs one entry per layer of the model"
        )
    return found


def has_reference(path: Path) -> bool:
    """Whether the first sample of a file has reference log-probs; no other sample is read."""
    if path.suffix == ".parquet":
        return first_has(path, column="ref_logprobs")
    with path.open(encoding="utf-8-sig") as lines:
        rows = (json.loads(line) for line in lines if line.strip())
        return next((row.get("ref_logprobs") is not None for row in rows if set(row) != {"meta"}), False)


def write_collection(collection: Collection, path: str | Path) -> None:
    """Write `collection` to a .parquet or .jsonl file. The file is complete or absent."""
    path = Path(path)
    _check_suffix(path)
    for sample in collection.samples:
        try:
            check_sample(sample)
            if sample.routes is not None and collection.layout is not None:
                checked_routes(sample.routes, tokens=len(sample), layout=collection.layout)
        except Refusal as refusal:
            raise Refusal([f"{path}: sample {sample.id!r}: {reason}" for reason in refusal.reasons]) from None
    values = (getattr(sample, field.name) for sample in collection.samples for field in FIELDS)
    needed = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
    with complete_file(path, needed=needed) as partial:
        (write_parquet if path.suffix == ".parquet" else _write_jsonl)(collection, partial)


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise Refusal(f"{path}: rollout files end in {' or '.join(SUFFIXES)}")


def _read_jsonl(path: Path, require_routes: bool) -> tuple[Metadata, list[Record], bool]:
    """Metadata, one record per line, and whether any line has routes."""
    del require_routes  # a line is parsed whole
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}: not UTF-8 text: {error}") from None
    known = (*(entry.column for entry in COLUMNS), "routes")
    metadata: Metadata | None = None
    records: list[Record] = []
    has_routes = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            cells = parse_line(line, where=where)
        except Refusal as refusal:
            reason = str(refusal).removeprefix(f"{where}: ")
            records.append(Record(where=where, cells={}, fault=reason))
            continue
        if not isinstance(cells, dict):
            records.append(Record(where=where, cells={}, fault="not a JSON object with one sample"))
        elif set(cells) == {"meta"} and not records:
            if metadata is not None:
                raise Refusal(f"{path}: {where} is a second line of metadata: join both into one first line")
            metadata = metadata_of(cells["meta"], where=f"{path}: {where}")
        else:
            strange = next((name for name in cells if name not in known), None)
            fault = None if strange is None else unknown_name(strange, known)
            records.append(Record(where=where, cells=cells, fault=fault))
            has_routes |= cells.get("routes") is not None
    return metadata or Metadata(), records, has_routes


def _write_jsonl(collection: Collection, path: Path) -> None:
    columns, meta = written_columns(collection), describe(collection)
    with path.open("w", encoding="utf-8") as file:
        if meta:
            file.write(json.dumps({"meta": meta}) + "\n")
        for sample in collection.samples:
            line = {entry.column: _json_cell(getattr(sample, entry.name)) for entry in columns}
            if sample.routes is not None:
                line["routes"] = sample.routes.tolist()
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def _json_cell(value: Any) -> Any:
    """A cell as JSON: nine significant digits name a float32 exactly."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "f":
        return [float(f"{x:.9g}") if np.isfinite(x) else None for x in value]
    return value.tolist()
