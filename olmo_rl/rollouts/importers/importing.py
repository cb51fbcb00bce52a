"""Rollouts of another program -> collections, and a report of each file.

`IMPORTERS` is the table of readers; any other function is named by its import path. Readers yield
`ForeignSample`s; here every sample gets its id, group and reward, its values are converted by the table of a
sample's fields, and the checks of `data/validation.py` apply. A sample is taken, left out with a counted
reason, or the whole import is refused, naming file, sample, layer and row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import ImportsConfig
from olmo_rl.data.columns import converted
from olmo_rl.data.files import read_collection
from olmo_rl.data.metadata import sampling_of
from olmo_rl.data.validation import check_layout, check_sample, checked_routes, without_surplus
from olmo_rl.rollouts.importers.atif import NAME as TRAJECTORIES
from olmo_rl.rollouts.importers.atif import read_trajectories
from olmo_rl.rollouts.importers.engine_answers import read_completions
from olmo_rl.rollouts.importers.foreign import ForeignSample, Reader, ReadOptions, located
from olmo_rl.rollouts.importers.prime_rl import read_batch
from olmo_rl.rollouts.importers.slime import read_dump
from olmo_rl.rollouts.importers.suspicious_routes import inspect_routes
from olmo_rl.rollouts.wire import RouteAxis, decode_routes
from olmo_rl.types import FIELDS, Collection, ExpertLayout, Kind, Refusal, Sample, Sampling
from olmo_rl.user_code import import_parts, load

_YIELDED = "olmo_rl.rollouts.importers.ForeignSample"
_REPORTED = 20  # faults named one by one; the rest is counted
_EXAMPLES = 5  # samples named for each kind of suspicion
_LACKING = ("group", "reward", "policy_version")  # fields that recordings often lack, for the report


def read_recorded(path: Path, *, options: ReadOptions) -> Iterator[ForeignSample]:
    """Our own rollout files: JSONL becomes parquet, checked on the way. The file's own metadata describe its
    routes, the model where it has none.
    """
    axis = options.axis
    layout = None if axis is None else axis.layout
    collection = read_collection(
        path,
        require_routes=axis is not None,
        layout=layout,
        num_layers=None if axis is None else axis.num_layers,
    )
    check_layout(collection, expected=layout, replay=axis is not None)
    for number, sample in enumerate(collection.samples):
        yield ForeignSample(
            where=f"{path} sample {number}",
            values={entry.name: getattr(sample, entry.name) for entry in FIELDS if entry.stored},
            sampling=collection.sampling,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Importer:
    """A reader and the suffixes of the files it reads; none: of any name. `whole`: files below a directory
    that match this pattern are one collection, and the reader takes the directory.
    """

    read: Reader
    suffixes: tuple[str, ...] = ()
    whole: str | None = None


IMPORTERS: dict[str, Importer] = {
    "olmo_rl": Importer(read=read_recorded, suffixes=(".parquet", ".jsonl")),
    "slime": Importer(read=read_dump, suffixes=(".pt",)),
    "miles": Importer(read=read_dump, suffixes=(".pt",)),
    "prime_rl": Importer(read=read_batch, suffixes=(".bin", ".msgpack")),
    "vllm": Importer(read=read_completions, suffixes=(".jsonl", ".json")),
    "sglang": Importer(read=read_completions, suffixes=(".jsonl", ".json")),
    "atif": Importer(read=read_trajectories, suffixes=(".json", ".jsonl"), whole=TRAJECTORIES),
}


def importer_of(source: str) -> Importer:
    """The importer of a name in `IMPORTERS`, or the function at `package.module.function`."""
    if source in IMPORTERS:
        return IMPORTERS[source]
    if import_parts(source) is None:
        raise Refusal(
            f"imports.source={source}: no importer of that name: choose one of {', '.join(IMPORTERS)}, or "
            "name a reader of your own as package.module.function"
        )
    reader = load(
        source,
        key="imports.source",
        takes="a function (path, *, options) that yields olmo_rl.rollouts.importers.ForeignSample",
    )
    return Importer(read=reader)


def import_paths(path: Path, *, source: str) -> list[Path]:
    """The file itself, or every file of this source in a directory, in name order; the directory where all of
    its files are one collection.
    """
    importer = importer_of(source)
    suffixes = importer.suffixes
    if path.is_dir() and importer.whole is not None:
        if next(path.rglob(importer.whole), None) is None:
            raise Refusal(f"imports.path={path}: no file {importer.whole} in it, or below")
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        found = [p for p in found if not suffixes or p.suffix in suffixes]
        if not found:
            raise Refusal(f"imports.path={path}: the directory holds no {' or '.join(suffixes)} file")
        return found
    if not path.is_file():
        raise Refusal(f"imports.path={path}: there is no such file or directory")
    if suffixes and path.suffix not in suffixes:
        raise Refusal(f"imports.path={path}: imports.source={source} reads {' or '.join(suffixes)}")
    return [path]


@dataclass(kw_only=True, slots=True)
class ImportReport:
    """Counts of one file, of samples unless they name rows; `captures` counts rows by suspicion."""

    file: str
    samples: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    left_out: Counter[str] = field(default_factory=Counter)
    lacks: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    response_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    placeholders: int = 0
    routed: int = 0
    route_rows: int = 0
    surplus_rows: int = 0
    dense_layers_cut: int = 0
    captures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, in a fixed order."""
        sizes = Counter(self.groups.values())
        return {
            "file": self.file,
            "samples": self.samples,
            "sampling": self.sampling.known(),
            "left_out": dict(sorted(self.left_out.items())),
            "missing_fields": dict(sorted(self.lacks.items())),
            "ignored_fields": dict(sorted(self.ignored.items())),
            "groups": {f"of {size}": count for size, count in sorted(sizes.items())},
            "tokens": _spread(self.lengths),
            "response_tokens": self.response_tokens,
            "response_spans": self.turns,
            "with_placeholders": self.placeholders,
            "reward_mean": float(np.mean(self.rewards)) if self.rewards else None,
            "route_coverage": self.routed / self.samples if self.samples else 0.0,
            "route_rows": self.route_rows,
            "surplus_rows_cut": self.surplus_rows,
            "samples_with_dense_layers": self.dense_layers_cut,
            "suspicious_rows": dict(sorted(self.captures.items())),
            "suspicious_samples": {name: ids for name, ids in sorted(self.examples.items())},
        }


def _spread(lengths: list[int]) -> dict[str, float]:
    if not lengths:
        return {}
    return {"shortest": min(lengths), "mean": float(np.mean(lengths)), "longest": max(lengths)}


def import_file(
    path: Path, *, source: str, options: ImportsConfig, axis: RouteAxis | None, vocab_size: int
) -> tuple[Collection, ImportReport]:
    """One file as one collection. `axis` None: routes are not read. Raises Refusal with every fault."""
    report = ImportReport(file=path.name)
    found = importer_of(source).read(path, options=ReadOptions(axis=axis))
    declared = Sampling(**asdict(options.sampling))
    taken: list[Sample] = []
    reasons: list[str] = []
    seen: dict[str, str] = {}
    settings: dict[str, tuple[float, str]] = {}
    for number, record in enumerate(_grouped(found, size=options.group_size)):
        try:
            with located(record.where):
                sample = _judged(record, number=number, report=report, options=options, axis=axis)
                if sample is None:
                    continue
                check_sample(sample, vocab_size=vocab_size)
                if sample.id in seen:
                    raise Refusal(f"sample {sample.id!r} has the id of {seen[sample.id]}")
                _agree(settings, record, declared=declared)
        except Refusal as refusal:
            reasons += refusal.reasons
            continue
        seen[sample.id] = record.where
        _count(report, sample=sample, surplus=record.surplus_rows)
        taken.append(sample)
    if reasons:
        more = len(reasons) - _REPORTED
        raise Refusal(reasons[:_REPORTED] + ([f"{path}: and {more} more faults"] if more > 0 else []))
    if not taken:
        why = "; ".join(f"{count} x {reason}" for reason, count in report.left_out.items())
        raise Refusal(f"{path}: no sample that could be trained on ({why or 'the file is empty'})")
    agreed: dict[str, Any] = {name: value for name, (value, _) in settings.items()}
    report.sampling = replace(declared, **agreed)
    layout = None if axis is None else axis.layout
    return Collection(samples=taken, layout=layout, source=str(path), sampling=report.sampling), report


def _agree(settings: dict[str, tuple[float, str]], record: ForeignSample, *, declared: Sampling) -> None:
    """Enter the sampling settings of the record, which all samples of a file share."""
    for name, value in sampling_of(record.sampling.known(), where=record.where).known().items():
        given = declared.known().get(name, value)
        if given != value:
            raise Refusal(f"sampled with {name}={value}, but imports.sampling.{name}={given}: leave it null")
        before, where = settings.setdefault(name, (value, record.where))
        if before != value:
            raise Refusal(f"sampled with {name}={value}, {where} with {before}: split the file by settings")


def _grouped(found: Iterable[ForeignSample], *, size: int | None) -> Iterator[ForeignSample]:
    """Groups by position where the configuration requests them: `size` consecutive records are one group."""
    if not isinstance(found, Iterable):
        raise Refusal(f"imports.source: its function returns {type(found).__name__}, expected {_YIELDED}s")
    for position, record in enumerate(found):
        if not isinstance(record, ForeignSample):
            raise Refusal(f"imports.source: its function yields {type(record).__name__}, expected {_YIELDED}")
        if size is not None:
            record.values["group"] = f"group-{position // size}"
        yield record


def _judged(
    record: ForeignSample,
    *,
    number: int,
    report: ImportReport,
    options: ImportsConfig,
    axis: RouteAxis | None,
) -> Sample | None:
    """The record as a sample; None where it is left out, which is counted."""
    values = {name: value for name, value in record.values.items() if value is not None}
    report.ignored.update(record.ignored)
    if record.left_out is not None:
        report.left_out[record.left_out] += 1
        return None
    report.lacks.update(name for name in _LACKING if name not in values)
    if axis is not None and "routes" not in values:
        report.lacks["routes"] += 1
    values.setdefault("id", str(number))
    if (reward := _reward(values.get("reward"), options=options)) is None:
        raise Refusal("no reward: score the file first, or set imports.default_reward for all that have none")
    values["reward"] = reward
    if "group" not in values:
        raise Refusal(
            "no group: advantages compare the answers of one prompt; set imports.group_size if they follow "
            "each other in the file"
        )
    routes = values.pop("routes", None)
    sample = _sample(values)
    if axis is None:
        return sample
    if routes is None:
        _leave_out_unrouted(report, options=options)
        return None
    rows = decode_routes(_on_host(routes), axis=axis, rows=len(sample) - 1)
    rows, surplus = without_surplus(rows, tokens=len(sample))
    record.surplus_rows += surplus
    report.dense_layers_cut += rows.shape[1] != len(axis.layout.routed_layers)
    rows = axis.routed(rows)
    if not _replayable(rows, id=sample.id, layout=axis.layout, report=report, options=options):
        report.left_out["routes that cannot be replayed"] += 1
        return None
    sample.routes = checked_routes(rows, tokens=len(sample), layout=axis.layout)
    return sample


def _sample(values: Mapping[str, Any]) -> Sample:
    """The sample of the values that a reader named, each converted by the kind of its field."""
    known = {entry.name: entry for entry in FIELDS if entry.stored}
    strange = [name for name in values if name not in known]
    if strange:
        raise Refusal(f"the reader names {strange[0]!r}, which is no field of a sample: {', '.join(known)}")
    missing = [
        name
        for name, entry in known.items()
        if entry.required and name not in values and name != "policy_version"
    ]
    if missing:
        raise Refusal(f"no {', '.join(missing)}")
    return Sample(**{n: converted(value, kind=known[n].kind, name=n) for n, value in values.items()})


def _on_host(routes: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    try:
        return routes.numpy() if hasattr(routes, "numpy") else routes
    except (RuntimeError, TypeError) as error:
        raise Refusal(f"routes are a tensor that no array holds: {str(error).splitlines()[0]}") from None


def _reward(value: Any, *, options: ImportsConfig) -> float | None:
    """A reward that is a number, or the entry `imports.reward_key` of one that is a mapping."""
    key = options.reward_key
    if isinstance(value, Mapping):
        entries = ", ".join(sorted(map(repr, value)))
        if key is None:
            raise Refusal(f"reward is a mapping of {entries}: choose one with imports.reward_key")
        if key not in value:
            raise Refusal(f"reward has no entry imports.reward_key={key}, it has {entries}")
        value = value[key]
    if value is None:
        return options.default_reward
    return float(value) if isinstance(value, bool) else converted(value, kind=Kind.number, name="reward")


def _leave_out_unrouted(report: ImportReport, *, options: ImportsConfig) -> None:
    """Never a partial live routing: such a sample is left out by choice, or the import ends."""
    if not options.leave_out_bad_routes:
        raise Refusal(
            "no routes were recorded: turn their recording on in the engine, set policy.replay=false, or "
            "leave such samples out with imports.leave_out_bad_routes=true"
        )
    report.left_out["no routes"] += 1


def _replayable(
    routes: NDArray[np.integer],
    *,
    id: str,
    layout: ExpertLayout,
    report: ImportReport,
    options: ImportsConfig,
) -> bool:
    """Count suspicious rows; False where the sample is to be left out for them."""
    capture = inspect_routes(routes, num_experts=layout.num_experts)
    for name, rows in capture.counts():
        report.captures[name] += rows
        examples = report.examples.setdefault(name, [])
        if len(examples) < _EXAMPLES:
            examples.append(id)
    return capture.replayable or not options.leave_out_bad_routes


def _count(report: ImportReport, *, sample: Sample, surplus: int) -> None:
    report.samples += 1
    report.groups[sample.group] += 1
    report.lengths.append(len(sample))
    report.response_tokens += int(sample.response_mask.sum())
    starts = np.diff(np.concatenate([[False], sample.response_mask]).astype(np.int8)) == 1
    report.turns += int(starts.sum())
    report.placeholders += sample.has_placeholders
    report.rewards.append(sample.reward)
    report.surplus_rows += surplus
    if sample.routes is not None:
        report.routed += 1
        report.route_rows += len(sample.routes)
