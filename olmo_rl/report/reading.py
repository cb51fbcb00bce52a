"""A run directory as the report needs it: metrics, the contract logs of its ranks, kept samples, settings.

Everything is read as far as it is whole: a torn last line, a missing file, another version and logs beyond
`MOST_LOG_BYTES` each become a note of the record, and nothing is changed. Refused: a directory without a run.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from olmo_rl.chosen_checkpoint import evaluations_of
from olmo_rl.run_directory import LOG_EVENT, version_fault
from olmo_rl.run_lease import LEASE, STALE_SECONDS
from olmo_rl.types import Refusal

MOST_LOG_BYTES = 256 * 2**20  # of all contract logs together; of longer ones the end is read
MAPPED_UPDATES = 8  # whose packs are drawn
_HEAD = re.compile(rb'\{"event": "(\w+)", "step": (\d+), "rank": (\d+)')
_FEW = ("packing", "expert_schedule", "expert_balance")  # large events, read for a few updates


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """One run. `columns`: float64 [updates] by metric, NaN where absent, `step` among them; `times`: the
    event `time` by rank and update; `packs`, `schedules`, `balances`: events of the `mapped` updates, packs
    by rank; `entropies`: expert entropy of every routed layer by update; `gap_counts`: tokens by bin of
    |trainer - engine| of the first, the last and all updates; `settings`: dotted keys with their values;
    `notes`: what is missing or damaged.
    """

    path: Path
    name: str
    columns: dict[str, NDArray[np.float64]]
    status: str = "ended"
    times: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    packs: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    schedules: dict[int, dict[str, Any]] = field(default_factory=dict)
    balances: dict[int, dict[str, Any]] = field(default_factory=dict)
    entropies: dict[int, list[float]] = field(default_factory=dict)
    gap_counts: dict[str, dict[int, int]] = field(default_factory=dict)
    evaluations: dict[int, float | None] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> NDArray[np.int64]:
        """int64 [updates]: their numbers."""
        return self.columns["step"].astype(np.int64)

    @property
    def ranks(self) -> int:
        """Ranks whose contract logs were found."""
        return max(1, len(self.times), *(len(by_rank) for by_rank in self.packs.values()))

    def known(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Updates with a value of a metric that is a number, and the values; empty where there are none."""
        values = self.columns.get(name)
        if values is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        there = np.isfinite(values)
        return self.steps[there], values[there]


def is_run(path: Path) -> bool:
    """Whether a directory holds metrics or logs of a training run."""
    return (path / "metrics.csv").is_file() or any(path.glob("training_contract_rank*.jsonl"))


def jobs_of(path: Path) -> list[Path]:
    """The runs of a sweep: directories of this one that hold a run, by number."""
    found = [child for child in path.iterdir() if child.is_dir() and is_run(child)]
    return sorted(found, key=lambda child: (not child.name.isdecimal(), child.name.zfill(9)))


def read_run(path: Path, *, key: str, status: str | None = None) -> RunRecord:
    """Read a run. `key`: the key that named it, for refusals; `status`: what the caller knows of its end."""
    if not path.is_dir():
        raise Refusal(f"{key}={path}: no such directory: give the directory of a run, below outputs/")
    if not is_run(path):
        raise Refusal(
            f"{key}={path}: it holds neither metrics.csv nor training_contract_rank0.jsonl: give the "
            "directory of a run that trained, or of a sweep"
        )
    notes: list[str] = []
    columns = read_columns(path / "metrics.csv", notes=notes)
    record = RunRecord(path=path, name=path.name, columns=columns, notes=notes)
    record.settings = _settings(path / ".hydra" / "config.yaml", notes=notes)
    record.overrides = _overrides(path / ".hydra" / "overrides.yaml")
    record.name = str(record.settings.get("run_name", path.name))
    _read_logs(record)
    record.samples = _samples(path / "samples", notes=notes)
    record.status = _status(record) if status is None else status
    return record


def name_apart(record: RunRecord, other: RunRecord) -> None:
    """Name two runs with an equal `run_name` by their directories, in place."""
    if record.name == other.name:
        alike = record.path.resolve().name == other.path.resolve().name
        for one in (record, other):
            one.name = str(one.path) if alike else one.path.resolve().name


def read_columns(path: Path, *, notes: list[str]) -> dict[str, NDArray[np.float64]]:
    """The columns of a metrics.csv; a torn last line is left out, and noted."""
    nothing: dict[str, NDArray[np.float64]] = {"step": np.zeros(0)}
    if not path.is_file():
        notes.append("metrics.csv is missing: no update has been logged")
        return nothing
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        notes.append("the last line of metrics.csv is torn and left out: it is being written, or was cut")
    if whole.count(b"\n") < 2:
        notes.append("metrics.csv has no complete row yet")
        return nothing
    import pyarrow as pa
    from pyarrow import csv

    odd: list[int] = []

    def skip(row: Any) -> str:
        odd.append(row.number or 0)
        return "skip"

    names = whole[: whole.index(b"\n")].decode("utf-8", errors="replace").strip().split(",")
    try:
        table = csv.read_csv(
            BytesIO(whole),
            parse_options=csv.ParseOptions(invalid_row_handler=skip),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.float64()),
                null_values=["", "None"],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        raise Refusal(f"{path}: no metrics of a run: {str(error).splitlines()[0]}") from None
    if odd:
        notes.append(f"{len(odd)} damaged lines of metrics.csv are left out")
    if "step" not in table.column_names:
        raise Refusal(f"{path}: it has no column step: no metrics of a run")
    columns = {name: np.array(table[name].to_numpy(), dtype=np.float64) for name in table.column_names}
    numbered = np.isfinite(columns["step"])
    return {name: values[numbered] for name, values in columns.items()}


def mapped_updates(columns: dict[str, NDArray[np.float64]]) -> list[int]:
    """The updates whose packs are drawn: first, last, slowest, and some evenly between."""
    steps = columns["step"].astype(int)
    if not len(steps):
        return []
    places = set(
        np.linspace(0, len(steps) - 1, min(len(steps), MAPPED_UPDATES - 1)).round().astype(int).tolist()
    )
    seconds = columns.get("time/update_s")
    if seconds is not None and np.isfinite(seconds).any():
        places.add(int(np.nanargmax(seconds)))
    return sorted({int(steps[place]) for place in places})


def _read_logs(record: RunRecord) -> None:
    paths = {}
    for path in record.path.glob("training_contract_rank*.jsonl"):
        number = path.stem.removeprefix("training_contract_rank")
        if number.isdecimal():
            paths[int(number)] = path
    if 0 not in paths:
        record.notes.append("training_contract_rank0.jsonl is missing: no packs, ranks, experts")
    mapped = set(mapped_updates(record.columns))
    held_out: list[dict[str, Any]] = []
    for rank, path in sorted(paths.items()):
        share = MOST_LOG_BYTES // len(paths)
        for event, step, line in _lines(path, most=share, notes=record.notes):
            if event in _FEW and step not in mapped:
                continue
            if event == "optimizer" and rank == 0:
                held_out.append({"event": event, "step": step})  # later updates undo evaluations
                continue
            if event not in (*_FEW, "time", "mismatch", "replay", "evaluation", LOG_EVENT) or (
                rank > 0 and event not in ("packing", "time")
            ):
                continue
            try:
                values = json.loads(line)
            except ValueError:
                record.notes.append(f"{path.name}: a damaged line is left out")
                continue
            if event == "evaluation":
                held_out.append(values)
            else:
                _keep(record, event, values, rank=rank, step=step)
    record.evaluations = evaluations_of(held_out)


def _lines(path: Path, *, most: int, notes: list[str]) -> Iterator[tuple[str, int, bytes]]:
    """Event, update and text of every whole line of a contract log, of its last `most` bytes."""
    size = path.stat().st_size
    with path.open("rb") as lines:
        if size > most:
            lines.seek(size - most)
            lines.readline()
            notes.append(f"{path.name}: of {size / 2**20:,.0f} MiB the last {most / 2**20:,.0f} are read")
        for line in lines:
            if not line.endswith(b"\n"):
                notes.append(f"the last line of {path.name} is torn and left out")
            elif (head := _HEAD.match(line)) is not None:
                yield head[1].decode(), int(head[2]), line


def _keep(record: RunRecord, event: str, values: dict[str, Any], *, rank: int, step: int) -> None:
    match event:
        case "log":
            if (fault := version_fault(values.get("version"))) is not None:
                record.notes.append(f"training_contract_rank{rank}.jsonl: {fault}")
        case "time":
            record.times.setdefault(rank, {})[step] = values
        case "packing":
            record.packs.setdefault(step, {})[rank] = values
        case "expert_schedule":
            record.schedules[step] = values
        case "expert_balance":
            record.balances[step] = values
        case "replay":
            if values.get("expert_entropy"):
                record.entropies[step] = values["expert_entropy"]
        case "mismatch":
            counts = {int(edge): int(count) for edge, count in values.get("counts", [])}
            total = record.gap_counts.setdefault("all", {})
            for edge, count in counts.items():
                total[edge] = total.get(edge, 0) + count
            record.gap_counts.setdefault("first", counts)
            record.gap_counts["last"] = counts


def _samples(directory: Path, *, notes: list[str]) -> list[dict[str, Any]]:
    """Kept samples of a few updates: the first, the last, and some between."""
    numbered = {
        int(path.stem.removeprefix("step-")): path
        for path in directory.glob("step-*.parquet")
        if path.stem.removeprefix("step-").isdecimal()
    }
    if not numbered:
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    steps = sorted(numbered)
    wanted = {steps[int(place)] for place in np.linspace(0, len(steps) - 1, min(len(steps), 12)).round()}
    rows: list[dict[str, Any]] = []
    for step in sorted(wanted):
        try:
            rows += pq.read_table(numbered[step]).to_pylist()
        except (pa.ArrowException, OSError) as error:
            notes.append(f"samples/{numbered[step].name} is left out: {str(error).splitlines()[0]}")
    return rows


def _settings(path: Path, *, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append(".hydra/config.yaml is missing: settings are unknown")
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        notes.append(f".hydra/config.yaml is left out: {str(error).splitlines()[0]}")
        return {}
    return dict(flattened(values)) if isinstance(values, dict) else {}


def flattened(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings with their values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _overrides(path: Path) -> list[str]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return []  # the settings themselves are known or noted
    return [str(value) for value in values] if isinstance(values, list) else []


def _status(record: RunRecord) -> str:
    lease = record.path / LEASE
    if lease.is_file() and lease.stat().st_size and time.time() - lease.stat().st_mtime < STALE_SECONDS:
        return "running"
    return "ended"
