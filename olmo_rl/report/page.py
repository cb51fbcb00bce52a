"""report.html: the data of a page, and the page itself, which needs no other file and no network.

Curves are thinned to `MOST_POINTS` by the lowest and the highest value of every stretch, so that a spike of
one update stays visible. Nothing of a run's own texts becomes markup: they travel as JSON, and the page sets
them as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.complete_files import write_complete
from olmo_rl.report.health import health_of, recent, verdict
from olmo_rl.report.reading import RunRecord
from olmo_rl.report.slowness import Slowness, find_slowness
from olmo_rl.types import Refusal

MOST_POINTS = 800  # of one curve
MOST_BARS = 100  # of a chart over updates
MOST_SAMPLES = 96
MOST_TEXT = 4000  # characters of one prompt or response
_DIGITS = 5


def page_of(record: RunRecord, *, other: RunRecord | None = None) -> str:
    """The report of a run, beside another one where it is given."""
    data = run_data(record)
    if other is not None:
        data["other"] = {"name": other.name, "path": str(other.path), "series": series_of(other)}
        data["other"] |= {"verdict": verdict(health_of(other)), "notes": other.notes}
        data["differences"] = differences_of(record, other)
        data["settings_differ"] = settings_differ(record.settings, other.settings)
    return filled(title=f"{record.name}: report", data=data)


def sweep_page(path: Path, records: Sequence[RunRecord]) -> str:
    """One page for the runs of a sweep."""
    keys = changed_keys(records)
    jobs = [
        {
            "name": record.path.name,
            "settings": [_plain(record.settings.get(key)) for key in keys],
            "verdict": verdict(health_of(record)),
            "updates": len(record.steps),
            "values": {name: _rounded(recent(record, name)) for name in SWEEP_METRICS},
            "accuracy": _rounded(_last(record.evaluations.values())),
            "series": {name: curve for name, curve in series_of(record).items() if name in SWEEP_METRICS},
            "notes": record.notes,
        }
        for record in records
    ]
    data = {"kind": "sweep", "name": path.name, "path": str(path), "keys": keys, "jobs": jobs}
    return filled(title=f"{path.name}: sweep", data=data | {"metrics": list(SWEEP_METRICS)})


SWEEP_METRICS = (
    "reward/mean",
    "policy/entropy",
    "rollouts/response_tokens",
    "grad/norm",
    "mismatch/mean",
    "packing/fill",
    "time/update_s",
    "throughput/real_tokens_per_second",
)


def run_data(record: RunRecord) -> dict[str, Any]:
    """What the page of a run shows, as JSON has it."""
    lines, slow = health_of(record), find_slowness(record)
    planned = record.settings.get("trainer.max_steps")
    return {
        "kind": "run",
        "name": record.name,
        "path": str(record.path),
        "status": record.status,
        "updates": int(record.steps[-1]) if len(record.steps) else 0,
        "planned": planned if isinstance(planned, int) else None,
        "verdict": verdict(lines),
        "health": [[line.level, line.title, line.found, line.advice] for line in lines],
        "notes": record.notes,
        "series": series_of(record),
        "evaluations": [[step, _rounded(value)] for step, value in sorted(record.evaluations.items())],
        "time": time_data(record, slow),
        "packs": pack_data(record),
        "experts": expert_data(record),
        "mismatch": mismatch_data(record),
        "samples": sample_data(record),
        "settings": [[key, _plain(value)] for key, value in sorted(record.settings.items())],
        "overrides": record.overrides,
    }


def series_of(record: RunRecord) -> dict[str, list[list[float]]]:
    """Updates and values of every metric that has any, thinned."""
    found = {}
    for name in sorted(record.columns):
        steps, values = record.known(name)
        if name != "step" and len(values):
            kept = thinned(values, most=MOST_POINTS)
            found[name] = [steps[kept].tolist(), rounded(values[kept])]
    return found


def thinned(values: NDArray[np.float64], *, most: int) -> NDArray[np.int64]:
    """Places of at most `most` values: of equal stretches the lowest and the highest one, in order, and both
    ends.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, (most - 2) // 2 + 1).astype(int)
    kept = {0, count - 1}
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        part = values[start:stop]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    return np.array(sorted(kept), dtype=np.int64)


def binned(values: NDArray[np.float64], *, most: int) -> list[float]:
    """Means of at most `most` equal stretches."""
    if len(values) <= most:
        return rounded(values)
    edges = np.linspace(0, len(values), most + 1).astype(int)
    return rounded(np.add.reduceat(values, edges[:-1]) / np.diff(edges))


def time_data(record: RunRecord, slow: Slowness) -> dict[str, Any]:
    """Seconds by phase over updates, ranks, the slowest updates and the one change to try."""
    steps = record.steps
    edges = np.linspace(0, len(steps), min(len(steps), MOST_BARS) + 1).astype(int)[:-1]
    return {
        "seconds": _rounded(slow.seconds),
        "largest": slow.largest,
        "straggler": slow.straggler,
        "advice": slow.advice,
        "gain": _rounded(slow.gain),
        "steps": steps[edges].tolist() if len(steps) else [],
        "phases": {name: binned(values, most=MOST_BARS) for name, values in slow.phases.items()},
        "why": [[step, _rounded(seconds), reason] for step, seconds, reason in slow.why],
        "ranks": [
            {
                "rank": one.rank,
                "late": _rounded(one.late),
                "last": _rounded(one.last),
                "busy": _rounded(one.busy),
                "optimizer": _rounded(one.optimizer),
                "tokens": _rounded(one.tokens),
                "phases": {name: _rounded(value) for name, value in one.phases.items()},
            }
            for one in slow.ranks
        ],
    }


def pack_data(record: RunRecord) -> list[dict[str, Any]]:
    """Packs of some updates: of every rank its packs, each with the length and the group of its documents and
    its padding in tokens.
    """
    found = []
    for step in sorted(record.packs):
        by_rank = record.packs[step]
        if not all("lengths" in event for event in by_rank.values()):
            continue  # a log from before lengths were part of it
        first = by_rank[min(by_rank)]
        found.append(
            {
                "step": step,
                "budget": first["token_budget"],
                "fill": _rounded(sum(event["fill"] for event in by_rank.values()) / len(by_rank)),
                "ranks": [
                    {
                        "rank": rank,
                        "packs": [
                            {"lengths": lengths, "groups": groups, "rows": rows}
                            for lengths, groups, rows in zip(
                                event["lengths"], event["groups"], event["rows"], strict=True
                            )
                        ],
                    }
                    for rank, event in sorted(by_rank.items())
                ],
            }
        )
    return found


def expert_data(record: RunRecord) -> dict[str, Any]:
    """Imbalance of every layer before and after planning, loads by destination, entropies over updates."""
    loads = [
        {
            "step": step,
            "layers": event["layers"],
            "observed": event["observed"],
            "before": event.get("layer_skew_before"),
            "after": event.get("layer_skew"),
            "planned": record.schedules.get(step, {}).get("search") is not None,
        }
        for step, event in sorted(record.balances.items())
    ]
    steps = sorted(record.entropies)
    entropies: list[list[float]] = []
    if steps and len({len(record.entropies[step]) for step in steps}) == 1:
        by_layer = np.array([record.entropies[step] for step in steps]).T
        entropies = [binned(layer, most=60) for layer in by_layer]
    return {"loads": loads, "entropies": entropies, "ends": [steps[0], steps[-1]] if steps else []}


def mismatch_data(record: RunRecord) -> dict[str, Any]:
    """Shares of tokens by bin of |trainer - engine|, of the first, the last and all updates."""
    return {
        name: [[edge, _rounded(count / total)] for edge, count in sorted(counts.items())]
        for name, counts in record.gap_counts.items()
        if (total := sum(counts.values()))
    }


def sample_data(record: RunRecord) -> list[dict[str, Any]]:
    """Kept samples, evenly thinned to `MOST_SAMPLES`, without what no page could show."""
    rows = record.samples
    if len(rows) > MOST_SAMPLES:
        rows = [rows[int(place)] for place in np.linspace(0, len(rows) - 1, MOST_SAMPLES).round()]
    found = []
    for row in rows:
        gaps = [None if gap is None else _rounded(gap) for gap in row["gaps"] or []]
        found.append(
            {name: _plain(value) for name, value in row.items() if name not in ("pieces", "gaps")}
            | {"pieces": row["pieces"], "gaps": gaps}
            | {name: _cut(row[name]) for name in ("prompt", "response")}
            | {name: _rounded(row[name]) for name in ("reward", "advantage")}
        )
    return found


def differences_of(record: RunRecord, other: RunRecord) -> list[list[Any]]:
    """Last tenths of every metric of two runs; null where one of them lacks it."""
    names = sorted((set(record.columns) | set(other.columns)) - {"step"})
    return [[name, _rounded(recent(record, name)), _rounded(recent(other, name))] for name in names]


def settings_differ(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[list[Any]]:
    """Keys whose values differ, with both."""
    keys = sorted(set(ours) | set(theirs))
    return [
        [key, _plain(ours.get(key)), _plain(theirs.get(key))]
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]


def changed_keys(records: Sequence[RunRecord]) -> list[str]:
    """Settings that are not equal in all runs."""
    keys = sorted({key for record in records for key in record.settings} - {"run_name"})
    return [key for key in keys if len({repr(record.settings.get(key)) for record in records}) > 1]


def filled(*, title: str, data: Mapping[str, Any]) -> str:
    """The page with its data, style and scripts in one text."""
    assets = files("olmo_rl.report")
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    parts = {
        "@TITLE@": title.replace("&", "&amp;").replace("<", "&lt;"),
        "@STYLE@": assets.joinpath("page.css").read_text(encoding="utf-8"),
        "@SCRIPT@": "".join(
            assets.joinpath(name).read_text(encoding="utf-8") for name in ("charts.js", "page.js")
        ),
        # A closing tag inside of a text would end the element; JSON may spell < in another way.
        "@DATA@": text.replace("<", "\\u003c"),
    }
    page = assets.joinpath("page.html").read_text(encoding="utf-8")
    for mark, part in parts.items():
        page = page.replace(mark, part, 1)
    return page


def write_page(page: str, path: Path, *, key: str) -> None:
    """Write a page. Raises Refusal where it cannot be written."""
    try:
        write_complete(path, page)
    except OSError as error:
        raise Refusal(
            f"{key}: {path} cannot be written: {error.strerror or error}: name another file with report_path"
        ) from error


def rounded(values: Iterable[float]) -> list[float]:
    """Finite numbers in a few digits."""
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def _rounded(value: float | None) -> float | None:
    """A number in a few digits; None where it is unknown or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else json.dumps(value, default=str)


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]} [{len(text) - MOST_TEXT:,} more characters]"


def _last(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None
