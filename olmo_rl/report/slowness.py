"""Why the steps of a run take as long as they do: seconds by phase, ranks that others wait for, and the one
change that would gain most, with the gain that the run's own figures predict.

A rank makes others wait in three ways, each measured without a collective: it begins an update late
(`began`), it has more to compute (`busy` CPU seconds, or more tokens in its packs), or its machine is slower
(its seconds in `optimizer`, the one phase of equal local work).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from olmo_rl.report.reading import RunRecord

# Phases in the order of a step, with the columns of metrics.csv that measure them and their unit in seconds.
PHASES: dict[str, tuple[str, float]] = {
    "rollout": ("time/rollout_s", 1.0),
    "plan": ("time/plan_ms", 1e-3),
    "collate": ("time/collate_s", 1.0),
    "score": ("time/score_s", 1.0),
    "transfer": ("time/transfer_s", 1.0),
    "forward": ("time/forward_s", 1.0),
    "backward": ("time/backward_s", 1.0),
    "clip": ("time/clip_s", 1.0),
    "optimizer": ("time/optimizer_s", 1.0),
    "publish": ("time/publish_s", 1.0),
}
_BEFORE = ("rollout", "plan", "collate", "publish")  # not part of time/update_s
WARM_UP = 2  # updates in which kernels, caches and graphs are made
SLOWEST = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Means of one rank: seconds that it begins after the first one, CPU seconds of an update, seconds of its
    optimizer step, tokens of its packs; None where unknown. `last`: share of updates that it began last.
    """

    rank: int
    late: float | None = None
    last: float | None = None
    busy: float | None = None
    optimizer: float | None = None
    tokens: float | None = None
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Slowness:
    """`seconds`: median of a whole step, None where nothing is known; `largest`: its longest phase in words;
    `phases`: seconds [updates] of each; `ranks`: what each of several did; `straggler`: the rank that others
    wait for, in words, or ""; `why`: the slowest updates and the reason of each; `advice` and `gain`: the one
    change to try and the share of a step that it is predicted to save.
    """

    seconds: float | None = None
    largest: str = ""
    phases: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    ranks: list[RankTimes] = field(default_factory=list)
    straggler: str = ""
    why: list[tuple[int, float, str]] = field(default_factory=list)
    advice: str = "nothing stands out: most time is spent on computing"
    gain: float = 0.0


def find_slowness(record: RunRecord) -> Slowness:
    """Everything about the time of a run that its metrics and logs show."""
    found = Slowness(phases=phases_of(record), ranks=ranks_of(record))
    if not found.phases:
        return found
    total = np.sum(list(found.phases.values()), axis=0)
    settled = slice(WARM_UP, None) if len(total) > 2 * WARM_UP else slice(None)
    found.seconds = float(np.median(total[settled]))
    means = {name: float(values[settled].mean()) for name, values in found.phases.items()}
    whole = sum(means.values())
    largest = max(means, key=lambda name: means[name])
    found.largest = f"{largest} ({means[largest] / whole:.0%})" if whole > 0 else largest
    found.why = slowest(record, found.phases)
    candidates = [*_of_ranks(found, means=means, whole=whole), *_of_phases(record, means=means, whole=whole)]
    if candidates:
        found.gain, found.advice, found.straggler = max(candidates, key=lambda one: (bool(one[2]), one[0]))
    return found


def phases_of(record: RunRecord) -> dict[str, NDArray[np.float64]]:
    """Seconds [updates] by phase, 0 where a phase did not run; `other` is the rest of an update."""
    update = record.columns.get("time/update_s")
    if update is None or not len(update):
        return {}
    found = {
        name: np.nan_to_num(record.columns[column]) * unit
        for name, (column, unit) in PHASES.items()
        if column in record.columns
    }
    inside = np.sum([values for name, values in found.items() if name not in _BEFORE] or [update * 0], axis=0)
    found["other"] = np.maximum(0, np.nan_to_num(update) - inside)
    return {name: values for name, values in found.items() if values.any()}


def ranks_of(record: RunRecord) -> list[RankTimes]:
    """What each rank did since the run has its present world size; nothing for a run of one."""
    first = record.times.get(0, {})
    clocked = [step for step in sorted(first) if "began" in first[step] and "busy" in first[step]]
    sizes = {step: (len(first[step]["began"]), len(first[step]["busy"])) for step in clocked}
    alike = [step for step in clocked if sizes[step] == sizes[clocked[-1]]]
    if not alike or sizes[alike[-1]][0] < 2 or len(set(sizes[alike[-1]])) > 1:
        return []
    settled = alike[WARM_UP:] or alike
    began = np.array([first[step]["began"] for step in settled])
    busy = np.array([first[step]["busy"] for step in settled])
    late = began - began.min(axis=1, keepdims=True)
    found = []
    for rank in range(began.shape[1]):
        mine = [record.times[rank][step] for step in settled if step in record.times.get(rank, {})]
        names = sorted({name for one in mine for name in one["seconds"]})
        phases = {name: float(np.mean([one["seconds"].get(name, 0.0) for one in mine])) for name in names}
        optimizer = [one["seconds"]["optimizer"] for one in mine if "optimizer" in one["seconds"]]
        tokens = [by_rank[rank]["real_tokens"] for by_rank in record.packs.values() if rank in by_rank]
        found.append(
            RankTimes(
                rank=rank,
                late=float(np.median(late[:, rank])),
                last=float((late.argmax(axis=1) == rank).mean()),
                busy=float(np.median(busy[:, rank])),
                optimizer=float(np.median(optimizer)) if optimizer else None,
                tokens=float(np.mean(tokens)) if tokens else None,
                phases=phases,
            )
        )
    return found


def slowest(record: RunRecord, phases: dict[str, NDArray[np.float64]]) -> list[tuple[int, float, str]]:
    """The slowest updates, each with its seconds and what took longer in it than in the median update."""
    steps, total = record.steps, np.sum(list(phases.values()), axis=0)
    middle = {name: float(np.median(values)) for name, values in phases.items()}
    found = []
    for place in np.argsort(-total)[:SLOWEST]:
        excess = {name: float(values[place]) - middle[name] for name, values in phases.items()}
        name = max(excess, key=lambda one: excess[one])
        if total[place] <= 1.2 * float(np.median(total)):
            continue
        reason = f"{name} took {excess[name]:+.3g} s over its median of {middle[name]:.3g} s"
        found.append((int(steps[place]), float(total[place]), reason + _context(record, int(place), name)))
    return found


def _context(record: RunRecord, place: int, phase: str) -> str:
    """What else was unusual about an update."""
    notes = []
    if place == 0:
        notes.append("the first update loads kernels and caches")
    for name, words in (
        ("rollouts/response_tokens", "responses were {:,.3g} times as long as usual"),
        ("packing/tokens_per_pack", "packs held {:,.3g} times the usual tokens"),
        ("ranks/start_skew_s", "a rank began late, {:,.3g} times the usual skew"),
    ):
        values = record.columns.get(name)
        if values is None or not np.isfinite(values[place]):
            continue
        middle = float(np.nanmedian(values))
        if middle > 0 and values[place] > 1.5 * middle:
            notes.append(words.format(float(values[place]) / middle))
    graphs = record.columns.get("compile/graphs")
    if graphs is not None and place > 0 and graphs[place] > graphs[place - 1]:
        notes.append("new graphs were compiled")
    if phase == "score" and place > 0:
        notes.append("the scoring pass was checked in this update")
    return f"; {'; '.join(notes)}" if notes else ""


def _of_ranks(found: Slowness, *, means: dict[str, float], whole: float) -> list[tuple[float, str, str]]:
    """Gains of making ranks alike: share, advice, and the rank that others wait for."""
    if len(found.ranks) < 2 or whole <= 0:
        return []
    gains = []
    late = max(found.ranks, key=lambda one: one.late or 0.0)
    if late.late and late.last and late.late > 0.05 * whole and late.last > 0.5:
        gains.append(
            (
                late.late / whole,
                f"find out what rank {late.rank} does before an update (callbacks, disk, another job on its "
                f"host): predicted gain {late.late / whole:.0%} of a step",
                f"rank {late.rank} begins {late.late:.3g} s after the first one and is last in "
                f"{late.last:.0%} of the updates: all others wait for it",
            )
        )
    slow = _outlier([one.optimizer for one in found.ranks], ratio=1.5)
    if slow is not None:
        rank, factor = slow
        share = (1 - 1 / factor) * (means.get("forward", 0.0) + means.get("backward", 0.0)) / whole
        gains.append(
            (
                share,
                f"look at the machine of rank {rank} with launch/preflight.sh (clocks, other jobs): "
                f"predicted gain {share:.0%} of a step",
                f"rank {rank} takes {factor:.2g} times as long for the same optimizer step: its machine is "
                "slower, and all others wait for it",
            )
        )
    heavy = _outlier([one.busy for one in found.ranks], ratio=1.25)
    if heavy is not None and slow is None:
        rank, factor = heavy
        share = (1 - 1 / factor) * (means.get("forward", 0.0) + means.get("backward", 0.0)) / whole
        tokens = _outlier([one.tokens for one in found.ranks], ratio=1.1)
        because = f", {tokens[1]:.2g} times the tokens" if tokens is not None and tokens[0] == rank else ""
        gains.append(
            (
                share,
                f"balance=anneal gives ranks equal work: predicted gain {share:.0%} of a step",
                f"rank {rank} computes {factor:.2g} times the others{because}: they wait for it",
            )
        )
    return gains


def _outlier(values: Sequence[float | None], *, ratio: float) -> tuple[int, float] | None:
    """The largest value's place and its ratio to the median of the others, where that is at least `ratio`."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len(known) < 2:
        return None
    place = int(np.argmax(known))
    others = float(np.median([value for i, value in enumerate(known) if i != place]))
    if others <= 0 or known[place] < ratio * others:
        return None
    return place, known[place] / others


def _of_phases(record: RunRecord, *, means: dict[str, float], whole: float) -> list[tuple[float, str, str]]:
    """Gains of changing settings: share, advice, and no straggler."""
    if whole <= 0:
        return []
    compute = means.get("forward", 0.0) + means.get("backward", 0.0)
    gains = []
    rollout = means.get("rollout", 0.0) / whole
    if rollout > 0.5 and record.settings.get("rollouts.source") != "files":
        gains.append(
            (
                rollout / 2,
                f"generation is {rollout:.0%} of a step: more or faster engines (rollouts=vllm) or a lower "
                f"rollouts.max_new_tokens; half of its time would save {rollout / 2:.0%}",
                "",
            )
        )
    score = means.get("score", 0.0) / whole
    if score > 0.1 and record.settings.get("scoring.mode") == "always":
        gains.append(
            (score, f"scoring.mode=auto leaves out a pass: predicted gain {score:.0%} of a step", "")
        )
    if record.settings.get("packing.kind") == "none" and compute > 0:
        gains.append((0.3 * compute / whole, "packing=consecutive lets samples share a forward", ""))
    skew = record.known("packing/expert_dispatch_skew_mean")[1]
    if len(skew) and record.settings.get("balance.kind") == "none":
        share = (1 - 1 / max(1.0, float(skew.mean()))) * compute / whole
        gains.append(
            (share, f"balance=anneal evens expert-parallel ranks out: predicted gain up to {share:.0%}", "")
        )
    padded, real = (record.known(f"throughput/{kind}_tokens_per_second")[1] for kind in ("padded", "real"))
    if len(padded) and len(padded) == len(real):
        waste = float(1 - (real / padded).mean())
        gains.append(
            (
                waste * compute / whole,
                f"{waste:.0%} of the rows are padding: a lower packing.pad_to_multiple_of, or budgets closer "
                "to what packs hold",
                "",
            )
        )
    return [gain for gain in gains if gain[0] > 0.02]
