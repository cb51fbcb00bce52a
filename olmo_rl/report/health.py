"""Whether a run is healthy, in ten lines: what was found, how good it is, what to try.

Each check is a function of a run's record in `CHECKS`. It compares the last tenth of the updates with the
first, because single updates are noise, and gives a finding with a level of `LEVELS`. A value that the run
does not log is "unknown", never a number. Thresholds are of nats, shares and ratios, so that rewards of any
scale are judged alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olmo_rl.report.reading import RunRecord
from olmo_rl.report.slowness import find_slowness

LEVELS = ("good", "warn", "bad", "unknown")
_FEWEST = 5  # updates in each of the two ends that are compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """One line: what was looked at, how good it is (of `LEVELS`), what was found, and what to try ("")."""

    title: str
    level: str
    found: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Means of the first and the last tenth of a metric's values, at least `_FEWEST` each; `noise`: what a
    difference of them must exceed to be one, two standard errors, three of few values.
    """

    first: float
    last: float
    noise: float


def ends_of(values: NDArray[np.float64]) -> Ends | None:
    """Both ends of a series; None where there are too few values to compare."""
    size = max(_FEWEST, len(values) // 10)
    if len(values) < 2 * size:
        return None
    first, last = values[:size], values[-size:]
    error = float(np.sqrt(first.var(ddof=1) / size + last.var(ddof=1) / size))
    return Ends(first=float(first.mean()), last=float(last.mean()), noise=(2 if size >= 10 else 3) * error)


def recent(record: RunRecord, name: str) -> float | None:
    """Mean of the last tenth of a metric, at least `_FEWEST` values where there are as many."""
    _, values = record.known(name)
    return float(values[-max(_FEWEST, len(values) // 10) :].mean()) if len(values) else None


def number(value: float) -> str:
    """A value of any scale in four digits."""
    return f"{value:,.4g}"


def check_reward(record: RunRecord) -> Health:
    _, values = record.known("reward/mean")
    if not len(values):
        return _unknown("Reward", "no reward/mean")
    ends, spread = ends_of(values), float(values.max() - values.min())
    if ends is None:
        return Health(title="Reward", level="unknown", found=f"{len(values)} updates show no trend yet")
    change = f"{number(ends.first)} in the first tenth, {number(ends.last)} in the last"
    if spread == 0:
        return Health(
            title="Reward",
            level="bad",
            found=f"every update has {number(ends.first)}",
            advice="look at the generations below, then at the verifier: it may judge all responses alike",
        )
    if ends.last - ends.first > ends.noise:
        return Health(title="Reward", level="good", found=f"rises: {change}")
    if ends.first - ends.last > ends.noise:
        return Health(
            title="Reward",
            level="bad",
            found=f"falls: {change}",
            advice="lower optim.lr, or resume an earlier checkpoint (ckpt_path=best)",
        )
    return Health(
        title="Reward",
        level="warn",
        found=f"flat: {change}",
        advice="more updates, a higher optim.lr, or easier prompts; see the line below",
    )


def check_signal(record: RunRecord) -> Health:
    share = recent(record, "reward/constant_groups")
    if share is None:
        return _unknown("Signal", "no groups of several samples with rewards")
    best, worst = recent(record, "reward/best_of_group"), recent(record, "reward/worst_of_group")
    found = f"{share:.0%} of the prompts give all their responses the same reward"
    if best is not None and worst is not None:
        found += f" (best of a prompt {number(best)}, worst {number(worst)})"
    if share <= 0.5:
        return Health(title="Signal", level="good", found=found)
    return Health(
        title="Signal",
        level="bad" if share > 0.9 else "warn",
        found=found,
        advice="nothing is learned from such prompts: mix in harder or easier ones, or raise "
        "rollouts.group_size",
    )


def check_entropy(record: RunRecord) -> Health:
    _, values = record.known("policy/entropy")
    if not len(values):
        return _unknown("Entropy", "no policy/entropy")
    ends = ends_of(values)
    if ends is None:
        return Health(title="Entropy", level="unknown", found=f"{number(float(values[-1]))} nats at the end")
    found = f"{number(ends.first)} nats in the first tenth, {number(ends.last)} in the last"
    if ends.first <= 0 or ends.last >= 0.4 * ends.first or ends.first - ends.last <= ends.noise:
        grows = ends.first > 0 and ends.last > 3 * ends.first
        if not grows:
            return Health(title="Entropy", level="good", found=found)
        return Health(
            title="Entropy",
            level="warn",
            found=f"grows: {found}",
            advice="responses become random: lower optim.lr or loss.entropy_coef",
        )
    reward = ends_of(record.known("reward/mean")[1])
    rising = reward is not None and reward.last - reward.first > reward.noise
    return Health(
        title="Entropy",
        level="warn" if rising else "bad",
        found=f"collapses: {found}",
        advice="responses become alike: raise loss.clip_high, set loss.entropy_coef=0.001, or lower optim.lr"
        + (" (the reward still rises)" if rising else ""),
    )


def check_length(record: RunRecord) -> Health:
    length, truncated = recent(record, "rollouts/response_tokens"), recent(record, "rollouts/truncated")
    if length is None:
        return _unknown("Length", "no rollouts/response_tokens")
    ends = ends_of(record.known("rollouts/response_tokens")[1])
    found = f"{number(length)} tokens a response"
    if ends is not None:
        found += f" (first tenth {number(ends.first)})"
    if truncated is not None:
        found += f", {truncated:.0%} cut off"
    if truncated is not None and truncated > 0.2:
        return Health(
            title="Length",
            level="bad" if truncated > 0.5 else "warn",
            found=found,
            advice="raise rollouts.max_new_tokens, or set batch.filter_truncated=true",
        )
    if ends is not None and ends.first > 0 and ends.last > 4 * ends.first:
        return Health(
            title="Length",
            level="warn",
            found=found,
            advice="read the longest generations below: longer is not always better",
        )
    return Health(title="Length", level="good", found=found)


def check_engine(record: RunRecord) -> Health:
    gap, tail = recent(record, "mismatch/mean"), recent(record, "mismatch/p99")
    if gap is None:
        return _unknown("Engine", "no mismatch/mean")
    found = f"trainer and engine differ by {number(gap)} nats a token"
    if tail is not None:
        found += f", 1% of the tokens by more than {number(tail)}"
    if gap < 0.02:
        return Health(title="Engine", level="good", found=found)
    return Health(
        title="Engine",
        level="bad" if gap > 0.1 else "warn",
        found=found,
        advice="check that the engine has this run's weights (mismatch/published) and samples at temperature "
        "1; loss.tis_high=2 corrects the rest",
    )


def check_clips(record: RunRecord) -> Health:
    shares = [recent(record, f"loss/clip_{side}") for side in ("low", "high")]
    known = [share for share in shares if share is not None]
    drift = recent(record, "loss/ratio_drift")
    if not known:
        return _unknown("Clips", "no loss/clip_low")
    found = f"{sum(known):.1%} of the tokens are clipped"
    if drift is not None:
        found += f", the policy moves {number(drift)} nats from its anchor"
    if sum(known) < 0.2:
        return Health(title="Clips", level="good", found=found)
    return Health(
        title="Clips",
        level="bad" if sum(known) > 0.5 else "warn",
        found=found,
        advice="lower optim.lr, or batch.steps_per_collection",
    )


def check_gradient(record: RunRecord) -> Health:
    steps, norms = record.known("grad/norm")
    if not len(norms):
        return _unknown("Gradient", "no grad/norm")
    middle, place = float(np.median(norms)), int(norms.argmax())
    found = f"median norm {number(middle)}, highest {number(float(norms[place]))} in update {steps[place]}"
    _, skipped = record.known("batch/skipped_updates")
    if len(skipped) and skipped[-1] > 0:
        return Health(
            title="Gradient",
            level="warn",
            found=f"{found}; {skipped[-1]:,.0f} updates were skipped",
            advice="the contract log says which: filtered samples (Signal), or values that are not finite",
        )
    spikes = int((norms > 10 * middle).sum())
    if not spikes:
        return Health(title="Gradient", level="good", found=found)
    return Health(
        title="Gradient",
        level="warn",
        found=f"{found}; {spikes} updates beyond ten times the median",
        advice="lower optim.max_grad_norm or optim.lr; look at the generations of these updates",
    )


def check_experts(record: RunRecord) -> Health:
    lowest, coverage = recent(record, "replay/expert_entropy_min"), recent(record, "replay/coverage")
    if lowest is None:
        return _unknown("Experts", "no replayed routes")
    found = f"evenness of the least even layer {number(lowest)} (1 is even)"
    if coverage is not None:
        found += f", {coverage:.0%} of the rows replayed"
    if lowest >= 0.6 and (coverage is None or coverage >= 1):
        return Health(title="Experts", level="good", found=found)
    return Health(
        title="Experts",
        level="bad" if lowest < 0.3 else "warn",
        found=found,
        advice="few experts get most tokens: loss.router_aux_weight=0.001 spreads them",
    )


def check_packing(record: RunRecord) -> Health:
    fill = recent(record, "packing/fill")
    if fill is None:
        return _unknown("Packing", "no packing/fill")
    skew = recent(record, "packing/expert_dispatch_skew_mean")
    off = record.settings.get("packing.kind") == "none"  # unknown without the settings of the run
    found = "off: one sample a forward" if off else f"packs are {fill:.0%} full"
    if skew is not None:
        found += f", the busiest expert-parallel rank gets {skew:.2f} times the mean"
    if off:
        return Health(
            title="Packing",
            level="warn",
            found=found,
            advice="packing=consecutive lets short samples share a forward",
        )
    if skew is not None and skew > 1.3:
        return Health(title="Packing", level="warn", found=found, advice="balance=anneal evens ranks out")
    packs = recent(record, "packing/packs")
    if fill < 0.6 and (packs is None or packs > 1):  # one pack for all samples of a rank is as good as full
        return Health(
            title="Packing",
            level="warn",
            found=found,
            advice="choose packing.max_tokens closer to what the samples of a rank add up to",
        )
    return Health(title="Packing", level="good", found=found)


def check_speed(record: RunRecord) -> Health:
    slow = find_slowness(record)
    if slow.seconds is None:
        return _unknown("Speed", "no time/update_s")
    found = f"{number(slow.seconds)} s an update, most of it {slow.largest}"
    if slow.straggler:
        return Health(title="Speed", level="bad", found=f"{found}; {slow.straggler}", advice=slow.advice)
    level = "warn" if slow.gain >= 0.15 else "good"
    return Health(title="Speed", level=level, found=found, advice=slow.advice if level == "warn" else "")


CHECKS: tuple[Callable[[RunRecord], Health], ...] = (
    check_reward,
    check_signal,
    check_entropy,
    check_length,
    check_engine,
    check_clips,
    check_gradient,
    check_experts,
    check_packing,
    check_speed,
)


def health_of(record: RunRecord) -> list[Health]:
    """One line of every check."""
    return [check(record) for check in CHECKS]


def verdict(lines: list[Health]) -> str:
    """The worst of all lines in a phrase."""
    levels = [line.level for line in lines]
    bad = [line.title.lower() for line in lines if line.level == "bad"]
    warned = [line.title.lower() for line in lines if line.level == "warn"]
    if bad:
        return f"unhealthy: {', '.join(bad)}"
    if warned:
        return f"worth a look: {', '.join(warned)}"
    return "healthy" if "good" in levels else "unknown: nothing is logged yet"


def _unknown(title: str, why: str) -> Health:
    return Health(title=title, level="unknown", found=f"{why} in this run")
