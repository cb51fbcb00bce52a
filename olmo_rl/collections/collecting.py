"""From a source to the optimizer batches of one collection: rounds, advantages, filters, the age bound, the
cut into steps, and the count of everything that was left out. Plain arithmetic that agrees on all ranks by
construction; only a generating source communicates while it draws.

`rollouts.max_lag` is judged where a sample would be TRAINED: every step of a collection finds the policy one
update older, so a sample that is young enough for the first step may be too old for the second. Such a
sample is passed over (`batch/over_age`) and the next one takes its place: no step shrinks, the samples that
are then missing at the end are the incomplete tail that is left out and counted. A step is judged as if every
step before it updated the policy; an update that is skipped makes its samples younger than that, never older.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olmo_rl.collections.load_counting import LoadCounts
from olmo_rl.collections.planner import StepPlanner
from olmo_rl.collections.sources import RolloutSource
from olmo_rl.config import Config
from olmo_rl.data.advantages import assign_advantages, can_train, filter_samples
from olmo_rl.data.means import Mean
from olmo_rl.planning.packing import cut_into_steps
from olmo_rl.types import Collection, Refusal, Sample


@dataclass(kw_only=True, slots=True, eq=False)
class Drawn:
    """The samples of a collection that survived the filters, in order, being counted. `facts` go into the
    first row of the collection; `filtered`: filters removed some samples.
    """

    samples: list[Sample]
    counts: LoadCounts
    facts: dict[str, float]
    source: str
    filtered: bool
    notes: tuple[str, ...] = ()


def draw_collection(
    config: Config,
    *,
    source: RolloutSource,
    planner: StepPlanner,
    index: int,
    version: int | None,
    divergences: Callable[[Sequence[Sample]], NDArray[np.float64]] | None = None,
) -> Drawn | None:
    """Draw rounds until the collection is full or attempts end; None where the source is exhausted.
    `divergences`: of all samples from the reference policy, where rewards count them.

    `version` is the policy's, for a source that generates: samples that are too old already are replaced.
    """
    attempts = config.rollouts.max_attempts if source.generates else 1
    size = samples_per_collection(config, generates=source.generates)
    layout = None
    kept: list[Sample] = []
    drawn: list[Sample] = []
    found: dict[str, int] = {}
    asked: dict[str, float] = {}
    latest: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    counts, name, rounds = planner.count(None), "", 0
    while rounds < attempts and (not kept or len(kept) < size):
        groups = -(-(size - len(kept)) // config.rollouts.group_size)
        collection = source.draw(index, attempt=rounds, groups=groups)
        if collection is None:
            return None
        if rounds == 0:
            layout = collection.layout if config.replay else None
            counts, name = planner.count(layout), collection.source
        rounds += 1
        notes += collection.notes
        asked = {name: asked.get(name, 0.0) + count for name, count in collection.counts.items()}
        latest |= collection.facts
        counts.arrive(collection.samples)
        survivors, taken = _filter(collection, config=config, version=version)
        kept += survivors
        drawn += collection.samples
        found = {key: found.get(key, 0) + count for key, count in taken.items()}
    apart = None if divergences is None else divergences(drawn)
    found |= assign_advantages(drawn, config=config.loss, divergences=apart)
    # Those that a filter masked are copies, since divergences are of what was drawn.
    advantages = {sample.id: sample.advantage for sample in drawn}
    for sample in kept:
        sample.advantage = advantages[sample.id]
    facts = {f"batch/{key}": float(count) for key, count in found.items()}
    if apart is not None and len(apart):
        facts["reward/kl"] = float(apart.mean())
    facts |= asked | latest | describe(drawn)
    facts |= {"rollouts/rounds": float(rounds), "rollouts/samples": float(len(drawn))}
    return Drawn(
        samples=kept,
        counts=counts,
        facts=facts,
        source=name,
        filtered=len(kept) < len(drawn),
        notes=notes,
    )


def samples_per_collection(config: Config, *, generates: bool) -> int:
    """Samples that fill a collection; 1 for file sources, whose collections have any size."""
    size = config.batch.samples_per_step
    if not generates:
        return 1
    if size is None:
        raise Refusal(
            "batch.samples_per_step=null needs rollouts=files: a generating source has no file to fill"
        )
    return size * config.batch.steps_per_collection


def _filter(
    collection: Collection, *, config: Config, version: int | None
) -> tuple[list[Sample], dict[str, int]]:
    """The configured filters: over-age, zero variance, truncated."""
    counts: dict[str, int] = {}
    samples, max_lag = collection.samples, config.rollouts.max_lag
    if max_lag is not None and version is not None:
        young = [sample for sample in samples if sample.policy_version >= version - max_lag]
        counts["over_age"] = len(samples) - len(young)
        samples = young
    samples, filtered = filter_samples(samples, config=config.batch)
    return samples, counts | dict(filtered)


def cut(
    drawn: Drawn, *, config: Config, generates: bool, version: int, world_size: int
) -> list[list[Sample]]:
    """The samples of every optimizer step, judged by the policy versions from `version` on. A generating
    source that stayed short trains all its samples in one step. Adds the samples left out to `drawn.facts`.
    """
    size = config.batch.samples_per_step
    samples = drawn.samples
    if generates and size is not None and 0 < len(samples) < size:
        size = len(samples) - len(samples) % world_size
    blocks, over_age = _young_blocks(drawn, size=size, config=config, version=version, world_size=world_size)
    if generates:
        blocks = blocks[: config.batch.steps_per_collection]
    facts = drawn.facts
    if config.rollouts.max_lag is not None:
        facts["batch/over_age"] = facts.get("batch/over_age", 0.0) + over_age
    facts["batch/left_out"] = float(len(samples) - over_age - sum(len(block) for block in blocks))
    return blocks


def _young_blocks(
    drawn: Drawn, *, size: int | None, config: Config, version: int, world_size: int
) -> tuple[list[list[Sample]], int]:
    """Complete steps of `size` samples (None = one of all) that are young enough for it, and how many samples
    were not.
    """
    samples, max_lag = drawn.samples, config.rollouts.max_lag
    if not samples or size == 0:
        return [], 0
    if max_lag is None:
        return _cut_evenly(samples, size=size, filtered=drawn.filtered, world_size=world_size), 0
    blocks: list[list[Sample]] = []
    block: list[Sample] = []
    updates = over_age = 0
    for sample in samples:
        if sample.policy_version < version + updates - max_lag:
            over_age += 1
            continue
        block.append(sample)
        if len(block) == size:
            blocks.append(block)
            updates += can_train(block)
            block = []
    if size is None:
        blocks = _cut_evenly(block, size=None, filtered=drawn.filtered or over_age > 0, world_size=world_size)
    return blocks, over_age


def _cut_evenly(
    samples: Sequence[Sample], *, size: int | None, filtered: bool, world_size: int
) -> list[list[Sample]]:
    """`cut_into_steps`; of a whole file that filters made uneven, as many samples as divide over the
    ranks.
    """
    count = len(samples)
    if size is None and filtered:
        count -= count % world_size
    blocks, _ = cut_into_steps(count, samples_per_step=size, world_size=world_size)
    return [[samples[i] for i in block] for block in blocks]


def describe(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over all samples drawn, before any filter; no reward/mean where no sample was judged."""
    if not samples:
        return {}
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    finite = rewards[np.isfinite(rewards)]
    known = {"reward/mean": float(finite.mean()), "reward/std": float(finite.std())} if finite.size else {}
    lengths = [int(sample.response_mask.sum()) for sample in samples]
    return (
        known
        | _of_groups(samples)
        | _describe_parts(samples)
        | {
            "rollouts/response_tokens": float(np.mean(lengths)),
            "rollouts/response_tokens_p95": float(np.percentile(lengths, 95, method="higher")),
            "rollouts/truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])),
        }
    )


def _of_groups(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over groups of their best and their worst reward (for a reward of 0 or 1: shares of groups that
    some response solves, that all do), and the share of groups whose rewards are all equal. Groups of one
    sample and unknown rewards are left out; nothing where no group is left.
    """
    groups: dict[str, list[float]] = {}
    for sample in samples:
        if np.isfinite(sample.reward):
            groups.setdefault(sample.group, []).append(sample.reward)
    found = [(max(rewards), min(rewards)) for rewards in groups.values() if len(rewards) > 1]
    if not found:
        return {}
    return {
        "reward/best_of_group": float(np.mean([best for best, _ in found])),
        "reward/worst_of_group": float(np.mean([worst for _, worst in found])),
        "reward/constant_groups": float(np.mean([best == worst for best, worst in found])),
    }


def _describe_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of every part of a reward over the samples that it judged, and how many it did not judge."""
    found: dict[str, float] = {}
    parts = [sample.reward_parts for sample in samples if sample.reward_parts is not None]
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part.get(name) for part in parts]
        mean = Mean.of(value for value in values if value is not None)
        if mean.value is not None:
            found[f"reward/{name}"] = mean.value
        found[f"reward/{name}_unjudged"] = float(len(samples) - mean.count)
    return found
