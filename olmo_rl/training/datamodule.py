"""Collections -> optimizer batches -> this rank's packs. Owns the data cursor and every count of what was
left out.

All ranks hold all samples of a collection, so filters, denominators and plans are plain arithmetic that
agrees by construction; only drawing and the planner's broadcast communicate. One Lightning batch is one
optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, overload

import numpy as np
from lightning.pytorch import LightningDataModule
from typing_extensions import override

from olmo_rl.config import Config
from olmo_rl.data.advantages import assign_advantages, can_train, filter_samples
from olmo_rl.data.collate import batch_of_rank
from olmo_rl.data.packs import Normalisers, PackedBatch
from olmo_rl.planning.packing import cut_into_steps
from olmo_rl.planning.schedule import Forecast, placement_floor
from olmo_rl.training.planner import PlannedStep, StepPlanner
from olmo_rl.training.sources import Source
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, ExpertLayout, Refusal, Sample

# Lightning prefetches one batch of a loader without a length, which would be one optimizer step of policy
# lag.
UNBOUNDED = 2**31


class Steps(Sequence[PackedBatch]):
    """The optimizer steps of one collection, each made when it is first asked for, in order: the planner
    works ahead of whoever scores or trains. Every rank asks alike, since making one communicates.
    """

    def __init__(self, count: int, *, make: Callable[[int], PackedBatch]) -> None:
        self._count = count
        self._make = make
        self._made: list[PackedBatch] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> PackedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PackedBatch]: ...
    @override
    def __getitem__(self, index: int | slice) -> PackedBatch | Sequence[PackedBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        position = range(self._count)[index]
        while len(self._made) <= position:
            self._made.append(self._make(len(self._made)))
        return self._made[position]


class StepLoader:
    """One endless Lightning epoch: draws a collection when the previous one is used up."""

    def __init__(self, data: RolloutDataModule) -> None:
        self._data = data

    def __len__(self) -> int:
        return UNBOUNDED

    def __iter__(self) -> Iterator[PackedBatch]:
        while (batches := self._data.next_collection()) is not None:
            for batch in batches:
                self._data.steps_left -= 1
                yield batch
        cast(Any, self._data.trainer).should_stop = True


class RolloutDataModule(LightningDataModule):
    """Serves `PackedBatch`es of this rank. State: how many collections were drawn (seeds and files follow
    from it).
    """

    def __init__(self, config: Config, *, source: Source) -> None:
        super().__init__()
        self.config = config
        self.source = source
        self.collections_drawn = 0
        self.steps_left = 0
        self._skips_in_a_row = 0
        self._planner: StepPlanner | None = None
        self._trained: dict[int, int] = {}  # position in the collection -> place among those that train
        self._steps: Sequence[PackedBatch] = ()

    @override
    def setup(self, stage: str) -> None:
        if self._planner is None:
            self._planner = StepPlanner(self.config, strategy=self.strategy)
            self._planner.warm_up()

    @override
    def teardown(self, stage: str) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    @override
    def train_dataloader(self) -> StepLoader:
        return StepLoader(self)

    @override
    def predict_dataloader(self) -> StepLoader:
        return StepLoader(self)

    @override
    def state_dict(self) -> dict[str, int]:
        # Checkpoints fall on collection boundaries, so no pending plan travels with them.
        assert self.steps_left == 0, "a checkpoint inside a collection would lose its remaining steps"
        return {"collections_drawn": self.collections_drawn}

    @override
    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.collections_drawn = state_dict["collections_drawn"]

    def next_collection(self) -> Steps | None:
        """Every optimizer step of the next collection, planned and collated for this rank as it is asked for;
        None at the end.
        """
        started = time.perf_counter()
        drawn = self._draw()
        if drawn is None:
            return None
        kept, layout, facts = drawn
        self.collections_drawn += 1
        facts["time/rollout_s"] = time.perf_counter() - started
        blocks = [[kept[i] for i in block] for block in self._cut(kept, facts=facts)] or [[]]
        steps = Steps(
            len(blocks), make=lambda step: self._batch(step, blocks=blocks, layout=layout, facts=facts)
        )
        trained = [step for step, samples in enumerate(blocks) if can_train(samples)]
        self.planner.begin([blocks[step] for step in trained], layout=layout)
        self._trained = {step: job for job, step in enumerate(trained)}
        self._steps = steps
        self.steps_left = len(steps)
        self._count_skips([step in self._trained for step in range(len(blocks))])
        return steps

    def _count_skips(self, trains: list[bool]) -> None:
        """Refuse to go on drawing for ever where nothing can train."""
        for training in trains:
            self._skips_in_a_row = 0 if training else self._skips_in_a_row + 1
        limit = self.config.batch.max_skips
        if self._skips_in_a_row > limit:
            raise Refusal(
                f"batch.max_skips={limit}: {self._skips_in_a_row} steps in a row had nothing to train on: "
                "every sample was filtered or masked. Warm the policy up (warm_start.steps), choose an "
                "easier task, or turn batch.filter_zero_variance and batch.filter_truncated off"
            )

    def _draw(self) -> tuple[list[Sample], ExpertLayout | None, dict[str, float]] | None:
        """Draw until the collection is full or attempts end; samples that survive the filters, and the
        counts.
        """
        config, source = self.config, self.source
        attempts = config.rollouts.max_attempts if source.generates else 1
        kept: list[Sample] = []
        drawn: list[Sample] = []
        counts: dict[str, float] = {}
        layout: ExpertLayout | None = None
        rounds = 0
        while rounds < attempts and (not kept or len(kept) < self.samples_per_collection):
            missing = self.samples_per_collection - len(kept)
            groups = -(-missing // config.rollouts.group_size)
            collection = source.draw(self.collections_drawn, attempt=rounds, groups=groups)
            if collection is None:
                return None
            rounds += 1
            layout = collection.layout if config.replay else None
            survivors, found = self._filter(collection)
            kept += survivors
            drawn += collection.samples
            for name, count in found.items():
                counts[name] = counts.get(name, 0) + count
        facts = {f"batch/{name}": float(count) for name, count in counts.items()}
        facts |= {"rollouts/rounds": float(rounds), "rollouts/samples": float(len(drawn))} | _describe(drawn)
        return kept, layout, facts

    def _filter(self, collection: Collection) -> tuple[list[Sample], dict[str, int]]:
        """Advantages by group id, then the configured filters: over-age, zero variance, truncated."""
        config = self.config
        counts = dict(assign_advantages(collection.samples, normalize=config.loss.normalize_advantages))
        samples = collection.samples
        if config.rollouts.max_lag is not None:
            oldest = self.policy_version - config.rollouts.max_lag
            young = [sample for sample in samples if sample.policy_version >= oldest]
            counts["over_age"] = len(samples) - len(young)
            samples = young
        samples, filtered = filter_samples(samples, config=config.batch)
        return samples, counts | dict(filtered)

    def _cut(self, samples: list[Sample], *, facts: dict[str, float]) -> list[list[int]]:
        """Positions of each optimizer step. A generating source that stayed short trains what it has in one
        step.
        """
        size = self.config.batch.samples_per_step
        if self.source.generates and size is not None and 0 < len(samples) < size:
            size = len(samples) - len(samples) % self.strategy.world_size
        if not samples or size == 0:
            facts["batch/left_out"] = float(len(samples))
            return []
        blocks, _ = cut_into_steps(len(samples), samples_per_step=size, world_size=self.strategy.world_size)
        if self.source.generates:
            blocks = blocks[: self.config.batch.steps_per_collection]
        facts["batch/left_out"] = float(len(samples) - sum(len(block) for block in blocks))
        return [list(block) for block in blocks]

    def _batch(
        self,
        step: int,
        *,
        blocks: Sequence[list[Sample]],
        layout: ExpertLayout | None,
        facts: dict[str, float],
    ) -> PackedBatch:
        """Step `step` of the collection. The first one that trains carries them all: it scores them."""
        samples, job = blocks[step], self._trained.get(step)
        if job is None:
            batch = self._empty_batch(facts)
        else:
            started = time.perf_counter()
            planned = self.planner.hand_over(job)
            waited = time.perf_counter() - started
            batch = self._collated(samples, planned=planned, layout=layout)
            batch.facts = facts | self._facts(samples, planned=planned) | {"time/plan_ms": 1000 * waited}
        batch.steps_in_collection = len(blocks)
        if job == 0:
            batch.collection = self._steps
        return batch

    def _collated(
        self, samples: list[Sample], *, planned: PlannedStep, layout: ExpertLayout | None
    ) -> PackedBatch:
        topology, plan = self.strategy.topology, planned.schedule.plan
        batch = batch_of_rank(
            samples,
            plan=plan,
            rank=self.strategy.global_rank,
            layout=layout,
            topology=topology,
            budget=self.config.budget,
        )
        batch.schedule = planned.schedule
        # One EP rank receives everything: nothing to compare.
        if planned.loads is not None and layout is not None and topology.ep_degree > 1:
            stride = self.config.balance.layer_stride
            batch.forecast = Forecast.of(
                plan, loads=planned.loads, layout=layout, topology=topology, layer_stride=stride
            )
        return batch

    def _facts(self, samples: list[Sample], *, planned: PlannedStep) -> dict[str, float]:
        plan, work = planned.schedule.plan, planned.schedule.after
        tokens, packs = sum(len(sample) for sample in samples), plan.packs_per_rank * plan.world_size
        facts = {
            "packing/packs": float(plan.packs_per_rank),
            "packing/samples_per_pack": len(samples) / packs,
            "packing/tokens_per_pack": tokens / packs,
            "packing/fill": tokens / (packs * self.config.budget),
        }
        if work.skew_mean is not None and work.skew_max is not None:
            facts["packing/expert_dispatch_skew_mean"] = work.skew_mean
            facts["packing/expert_dispatch_skew_max"] = work.skew_max
        if self.planner.searches:
            facts["balance/gap_before"], facts["balance/gap"] = planned.schedule.gaps
            if planned.loads is not None:
                facts["balance/placement_floor"] = placement_floor(planned.loads)
        return facts

    def _empty_batch(self, facts: dict[str, float]) -> PackedBatch:
        return PackedBatch(
            packs=[],
            normalisers=Normalisers(tokens=0, responses=0),
            plan=None,
            samples=[],
            budget=self.config.budget,
            facts=dict(facts),
        )

    @property
    def planner(self) -> StepPlanner:
        assert self._planner is not None, "Lightning sets the data module up before it asks for batches"
        return self._planner

    @property
    def samples_per_collection(self) -> int:
        """Samples that fill a collection; 1 for file sources, whose collections are what they are."""
        size = self.config.batch.samples_per_step
        if not self.source.generates:
            return 1
        if size is None:
            raise Refusal(
                "batch.samples_per_step=null needs rollouts=files: a generating source has no file to fill"
            )
        return size * self.config.batch.steps_per_collection

    @property
    def strategy(self) -> ExpertParallelStrategy:
        return cast(ExpertParallelStrategy, cast(Any, self.trainer).strategy)

    @property
    def policy_version(self) -> int:
        return int(cast(Any, self.trainer).global_step)


def _describe(samples: list[Sample]) -> dict[str, float]:
    """Means over all samples drawn, before any filter."""
    if not samples:
        return {}
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    finite = rewards[np.isfinite(rewards)]
    return {
        "reward/mean": float(finite.mean()) if finite.size else 0.0,
        "rollouts/response_tokens": float(np.mean([sample.response_mask.sum() for sample in samples])),
        "rollouts/truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])),
    }
