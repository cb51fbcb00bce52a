"""Rollouts of another system -> collections of ours, and a report of what was found on the way.

`READERS` says who reads what; here every sample gets its id and group, dense layers leave the routes, and the
checks of `data/validation.py` judge. Nothing is repaired silently: a sample is taken, left out with a counted
reason, or the whole import is refused, naming file, sample, layer and row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import ImportsConfig, ImportSource
from olmo_rl.data.validation import check_sample, checked_routes
from olmo_rl.rollouts.captures import inspect_routes
from olmo_rl.rollouts.completions import read_completions
from olmo_rl.rollouts.dumps import read_dump
from olmo_rl.rollouts.found import FoundSample, Reader
from olmo_rl.rollouts.prime_rl import read_batch
from olmo_rl.rollouts.recorded import read_recorded
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.types import Collection, ExpertLayout, Refusal, Sample

READERS: dict[ImportSource, tuple[Reader, tuple[str, ...]]] = {
    ImportSource.olmo_rl: (read_recorded, (".parquet", ".jsonl")),
    ImportSource.slime: (read_dump, (".pt",)),
    ImportSource.miles: (read_dump, (".pt",)),
    ImportSource.prime_rl: (read_batch, (".bin", ".msgpack")),
    ImportSource.vllm: (read_completions, (".jsonl", ".json")),
    ImportSource.sglang: (read_completions, (".jsonl", ".json")),
}
_REPORTED = 20  # faults named one by one; the rest is counted
_EXAMPLES = 5  # samples named for each kind of suspicion


@dataclass(kw_only=True, slots=True)
class ImportReport:
    """What one file held. Counts are samples unless they say rows; `captures` counts rows by suspicion."""

    file: str
    samples: int = 0
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


def import_paths(path: Path, *, source: ImportSource) -> list[Path]:
    """The file itself, or every file of this source in a directory, in name order."""
    _, suffixes = READERS[source]
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in suffixes and not p.name.startswith("."))
        if not found:
            raise Refusal(f"imports.path={path}: the directory holds no {' or '.join(suffixes)} file")
        return found
    if not path.is_file():
        raise Refusal(f"imports.path={path}: there is no such file or directory")
    if path.suffix not in suffixes:
        raise Refusal(f"imports.path={path}: imports.source={source.value} reads {' or '.join(suffixes)}")
    return [path]


def import_file(
    path: Path,
    *,
    source: ImportSource,
    options: ImportsConfig,
    axis: RouteAxis | None,
    vocab_size: int,
) -> tuple[Collection, ImportReport]:
    """One file as one collection. `axis` None: routes are not read. Raises Refusal with every fault."""
    reader, _ = READERS[source]
    report = ImportReport(file=path.name)
    found = reader(path, axis=axis, reward_key=options.reward_key)
    taken: list[Sample] = []
    reasons: list[str] = []
    seen: dict[str, str] = {}
    for number, record in enumerate(_grouped(found, size=options.group_size)):
        try:
            sample = _judged(record, number=number, report=report, options=options, axis=axis)
            if sample is None:
                continue
            check_sample(sample, vocab_size=vocab_size)
            if sample.id in seen:
                raise Refusal(f"sample {sample.id!r} has the id of {seen[sample.id]}")
        except Refusal as refusal:
            reasons += [r if r.startswith(record.where) else f"{record.where}: {r}" for r in refusal.reasons]
            continue
        seen[sample.id] = record.where
        _count(report, sample=sample, record=record)
        taken.append(sample)
    if reasons:
        more = len(reasons) - _REPORTED
        raise Refusal(reasons[:_REPORTED] + ([f"{path}: and {more} more faults"] if more > 0 else []))
    if not taken:
        why = "; ".join(f"{count} x {reason}" for reason, count in report.left_out.items())
        raise Refusal(f"{path}: no sample that could be trained on ({why or 'the file is empty'})")
    layout = None if axis is None else axis.layout
    return Collection(samples=taken, layout=layout, source=str(path)), report


def _grouped(found: Iterable[FoundSample], *, size: int | None) -> Iterable[FoundSample]:
    """Groups by position where the configuration says so: `size` consecutive records are one group."""
    for position, record in enumerate(found):
        if size is not None:
            record.group = f"group-{position // size}"
            record.lacks = [name for name in record.lacks if "group" not in name]
        yield record


def _judged(
    record: FoundSample,
    *,
    number: int,
    report: ImportReport,
    options: ImportsConfig,
    axis: RouteAxis | None,
) -> Sample | None:
    """The record as a sample; None where it is left out, which is counted."""
    report.lacks.update(record.lacks)
    report.ignored.update(record.ignored)
    if record.left_out is not None:
        report.left_out[record.left_out] += 1
        return None
    reward = options.default_reward if record.reward is None else record.reward
    if reward is None:
        raise Refusal("no reward: score the file first, or set imports.default_reward for all that have none")
    if record.group is None:
        raise Refusal(
            "no group: advantages compare the answers of one prompt; set imports.group_size if they follow "
            "each other in the file"
        )
    routes = record.routes
    id = record.id or str(number)
    if axis is not None:
        if routes is None:
            _leave_out_unrouted(report, options=options)
            return None
        report.dense_layers_cut += routes.shape[1] != len(axis.layout.routed_layers)
        routes = axis.routed(routes)
        if not _replayable(routes, id=id, layout=axis.layout, report=report, options=options):
            report.left_out["routes that cannot be replayed"] += 1
            return None
        checked_routes(routes, tokens=len(record.tokens), layout=axis.layout)
    return Sample(
        id=id,
        group=record.group,
        tokens=record.tokens,
        response_mask=record.response_mask,
        behavior_logprobs=record.logprobs,
        reward=reward,
        policy_version=record.policy_version or 0,
        loss_mask=record.loss_mask,
        ref_logprobs=record.ref_logprobs,
        routes=routes,
        finish_reason=record.finish_reason,
        prompt=record.prompt,
        response=record.response,
        has_placeholders=record.has_placeholders,
    )


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
    """Count what is suspicious; False where the sample is to be left out for it."""
    capture = inspect_routes(routes, num_experts=layout.num_experts)
    for name, rows in capture.counts():
        report.captures[name] += rows
        examples = report.examples.setdefault(name, [])
        if len(examples) < _EXAMPLES:
            examples.append(id)
    return capture.replayable or not options.leave_out_bad_routes


def _count(report: ImportReport, *, sample: Sample, record: FoundSample) -> None:
    report.samples += 1
    report.groups[sample.group] += 1
    report.lengths.append(len(sample))
    report.response_tokens += int(sample.response_mask.sum())
    starts = np.diff(np.concatenate([[False], sample.response_mask]).astype(np.int8)) == 1
    report.turns += int(starts.sum())
    report.placeholders += record.has_placeholders
    report.rewards.append(sample.reward)
    report.surplus_rows += record.surplus_rows
    if sample.routes is not None:
        report.routed += 1
        report.route_rows += len(sample.routes)
