"""Collections -> optimizer batches -> this rank's packs. Owns the data cursor and every count of what was
left out.

All ranks hold all samples of a collection, so filters, denominators and plans are plain arithmetic that
agrees by construction; only drawing and the planner's broadcast communicate. One Lightning batch is one
optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from lightning.pytorch import LightningDataModule
from typing_extensions import override

from olmo_rl.config import BalanceKind, Config
from olmo_rl.data.advantages import assign_advantages, can_train, filter_samples
from olmo_rl.data.collate import batch_of_rank
from olmo_rl.data.packs import Normalisers, PackedBatch
from olmo_rl.planning.loads import collection_loads
from olmo_rl.planning.objective import measure
from olmo_rl.planning.packing import cut_into_steps, plan_step, unpacked_plan
from olmo_rl.training.sources import Source
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, ExpertLayout, PackPlan, Refusal, Sample

# Lightning prefetches one batch of a loader without a length, which would be one optimizer step of policy
# lag.
UNBOUNDED = 2**31


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

    def next_collection(self) -> list[PackedBatch] | None:
        """Every optimizer step of the next collection, planned and collated for this rank; None at the
        end.
        """
        started = time.perf_counter()
        drawn = self._draw()
        if drawn is None:
            return None
        kept, layout, facts = drawn
        self.collections_drawn += 1
        facts["time/rollout_s"] = time.perf_counter() - started
        blocks = self._cut(kept, facts=facts)
        batches = [self._batch([kept[i] for i in block], layout=layout, facts=facts) for block in blocks]
        if not batches:
            batches = [self._empty_batch(facts)]
        batches[0].collection = tuple(batches)
        for batch in batches:
            batch.steps_in_collection = len(batches)
        self.steps_left = len(batches)
        self._count_skips(batches)
        return batches

    def _count_skips(self, batches: list[PackedBatch]) -> None:
        """Refuse to go on drawing for ever where nothing can train."""
        for batch in batches:
            self._skips_in_a_row = 0 if batch.packs else self._skips_in_a_row + 1
        limit = self.config.batch.max_skips
        if self._skips_in_a_row > limit:
            raise Refusal(
                f"batch.max_skips={limit}: {self._skips_in_a_row} steps in a row had nothing to train on: "
                "every sample was filtered or masked. Warm the policy up (warm_start.steps), choose an easier "
                "task, or turn batch.filter_zero_variance and batch.filter_truncated off"
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
            size = len(samples)
        if not samples:
            return []
        blocks, _ = cut_into_steps(len(samples), samples_per_step=size, world_size=self.strategy.world_size)
        if self.source.generates:
            blocks = blocks[: self.config.batch.steps_per_collection]
        facts["batch/left_out"] = float(len(samples) - sum(len(block) for block in blocks))
        return [list(block) for block in blocks]

    def _batch(
        self, samples: list[Sample], *, layout: ExpertLayout | None, facts: dict[str, float]
    ) -> PackedBatch:
        if not can_train(samples):
            return self._empty_batch(facts)
        topology, config = self.strategy.topology, self.config
        started = time.perf_counter()
        lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
        loads = None
        if layout is not None:
            loads = collection_loads(samples, layout=layout, topology=topology)
        plan = self._plan(samples, lengths=lengths, loads=loads)
        batch = batch_of_rank(
            samples,
            plan=plan,
            rank=self.strategy.global_rank,
            layout=layout,
            topology=topology,
            budget=config.budget,
        )
        work = measure(plan, lengths=lengths, loads=loads, topology=topology)
        batch.facts = facts | {
            "time/plan_ms": 1000 * (time.perf_counter() - started),
            "packing/packs": float(plan.packs_per_rank),
            "packing/samples_per_pack": len(samples) / (plan.packs_per_rank * plan.world_size),
            "packing/tokens_per_pack": float(lengths.sum()) / (plan.packs_per_rank * plan.world_size),
            "packing/fill": float(lengths.sum()) / (plan.packs_per_rank * plan.world_size * config.budget),
        }
        if work.skew_mean is not None and work.skew_max is not None:
            batch.facts["packing/expert_dispatch_skew_mean"] = work.skew_mean
            batch.facts["packing/expert_dispatch_skew_max"] = work.skew_max
        return batch

    def _plan(self, samples: list[Sample], *, lengths: np.ndarray, loads: np.ndarray | None) -> PackPlan:
        """The step's plan. What a deadline may cut runs on rank 0 only and is broadcast."""
        config, topology = self.config, self.strategy.topology
        ids = [sample.id for sample in samples]
        if not config.packed:
            return unpacked_plan(lengths, topology=topology)
        if config.balance.kind is BalanceKind.none:
            return plan_step(lengths, budget=config.budget, topology=topology, ids=ids)
        plan: PackPlan | None = None
        if self.strategy.global_rank == 0:
            from olmo_rl.planning.search import plan_batch  # numba kernels: loaded where a plan is searched

            plan = plan_batch(
                lengths,
                ids=ids,
                loads=loads,
                budget=config.budget,
                topology=topology,
                balance=config.balance,
            )
        plan = self.strategy.broadcast(plan)
        assert plan is not None
        plan.check(lengths, config.budget)
        return plan

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
