"""Collections -> optimizer batches -> this rank's packs. Owns the data cursor, also inside a collection.

All ranks hold all samples of a collection, so filters, denominators and plans are plain arithmetic that
agrees by construction; only drawing and the planner's broadcast communicate. One Lightning batch is one
optimizer step.

With `balance.overlap` every step of a collection is planned while earlier ones are scored or trained, and a
recorded collection is read, counted and planned while the one before it trains (with `rollouts.max_lag` it is
only read and counted: what is too old follows from updates that have not happened). A source that generates
on policy cannot be ahead of the weights that it generates with.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from olmo_rl.collections.collecting import Drawn, cut, draw
from olmo_rl.collections.pending import Pending, anchors_by_sample, anchors_of_pack
from olmo_rl.collections.planner import PlannedStep, PlanRecord, Plans, StepPlanner, plan_settings
from olmo_rl.collections.sources import Source
from olmo_rl.collections.steps import StepLoader, Steps
from olmo_rl.config import Config
from olmo_rl.data.advantages import can_train
from olmo_rl.data.collate import batch_of_rank
from olmo_rl.data.packs import Normalisers, PackedBatch
from olmo_rl.planning.schedule import Forecast
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample


@dataclass(kw_only=True, slots=True, eq=False)
class OpenCollection:
    """A collection with its steps from here on: `blocks[i]` are the samples of the i-th, `jobs[i]` is its
    place among the `plans`, which are those of the steps that train. What `pending` of a checkpoint left is
    only the rest of `steps_in_collection`, `trained_steps` of which are updates.
    """

    drawn: Drawn
    blocks: list[list[Sample]]
    jobs: dict[int, int]
    plans: Plans
    records: list[PlanRecord | None]
    steps_in_collection: int
    trained_steps: int
    pending: Pending | None = None

    @property
    def told_by(self) -> int:
        """The step whose row tells the facts of the collection: the first that trains."""
        return min(self.jobs, default=0)


class RolloutDataModule(LightningDataModule):
    """Serves `PackedBatch`es of this rank. State: how many collections were opened (seeds and files follow
    from it), and what is left of the present one.
    """

    def __init__(self, config: Config, *, source: Source) -> None:
        super().__init__()
        self.config = config
        self.source = source
        self.collections_drawn = 0
        self.given: list[PackedBatch] = []  # steps of the present collection, the last one perhaps unfinished
        self._skips_in_a_row = 0
        self._planner: StepPlanner | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: Future[Drawn | OpenCollection | None] | None = None
        self._open: OpenCollection | None = None
        self._steps = Steps(0, make=self._batch)
        self._resumed: Pending | None = None

    @override
    def setup(self, stage: str) -> None:
        if self._planner is None:
            self._planner = StepPlanner(self.config, strategy=self.strategy)
            self._planner.warm_up()
            self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")

    @override
    def teardown(self, stage: str) -> None:
        if self._planner is not None and self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._planner.close()
            self._planner = self._reader = self._ahead = None

    @override
    def train_dataloader(self) -> StepLoader:
        return StepLoader(self)

    @override
    def predict_dataloader(self) -> StepLoader:
        return StepLoader(self)

    # State

    @override
    def state_dict(self) -> dict[str, Any]:
        """The cursor, and the steps of the present collection that were not trained. All ranks call it: the
        log-probs of samples lie on the ranks that scored them, and rank 0 saves what all of them hold.
        """
        pending = self._pending()
        return {
            "collections_drawn": self.collections_drawn,
            "skips_in_a_row": self._skips_in_a_row,
            "pending": None if pending is None else pending.state(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.collections_drawn = state_dict["collections_drawn"]
        self._skips_in_a_row = state_dict["skips_in_a_row"]
        pending = state_dict["pending"]
        self._resumed = None if pending is None else Pending.of_state(pending)

    @property
    def steps_done(self) -> int:
        """Steps of the present collection whose update ended."""
        unfinished = bool(self.given) and not self.given[-1].finished
        return len(self.given) - unfinished

    def _pending(self) -> Pending | None:
        if self._open is None:
            return self._resumed
        opened, done = self._open, self.steps_done
        blocks = opened.blocks[done:]
        if not blocks:
            return None
        return Pending(
            source=opened.drawn.source,
            steps_in_collection=opened.steps_in_collection,
            trained_steps=opened.trained_steps,
            ids=[[sample.id for sample in block] for block in blocks],
            samples=[sample for block in blocks for sample in block] if self.source.generates else None,
            plans=[self._record(step) for step in range(done, len(opened.blocks))],
            anchors=self._anchors(done),
            facts=dict(opened.drawn.facts) if done <= opened.told_by else {},
        )

    def _record(self, step: int) -> PlanRecord | None:
        """The plan of a step to come where this rank has it; nobody waits for a search to save."""
        opened = self._open
        assert opened is not None
        if step not in opened.jobs:
            return None
        made = opened.plans.made(opened.jobs[step])
        if made is None:
            return opened.records[step]
        return PlanRecord(
            plan=made.plan, start=made.start, paths=made.paths, settings=plan_settings(self.config)
        )

    def _anchors(self, done: int) -> dict[str, Any]:
        """Log-probs by sample id that a scoring pass found for every step to come, over all ranks."""
        assert self._open is not None
        made = self._steps.made
        scored = [made[step].anchors for step in self._open.jobs if done <= step < len(made)]
        wanted = sum(step >= done for step in self._open.jobs)
        # Equal on all ranks: they made and scored the same steps.
        if len(scored) < wanted or any(anchors is None for anchors in scored):
            return {}
        mine: dict[str, Any] = {}
        for batch in made[done:]:
            mine |= anchors_by_sample(batch.packs, anchors=batch.anchors or [])
        return {id: values for part in self.strategy.gather_objects(mine) for id, values in part.items()}

    # Collections

    def next_collection(self) -> Steps | None:
        """Every optimizer step of the next collection, planned and collated for this rank as it is asked for;
        None at the end.
        """
        opened = self._next_open()
        if opened is None:
            return None
        self._open, self._resumed, self.given = opened, None, []
        self._steps = Steps(len(opened.blocks), make=self._batch)
        self._read_ahead()
        if opened.pending is None:
            self._count_skips([step in opened.jobs for step in range(len(opened.blocks))])
        return self._steps

    def _next_open(self) -> OpenCollection | None:
        if self._resumed is not None:
            return self._reopened(self._resumed)
        started = time.perf_counter()
        if self._ahead is None:
            found: Drawn | OpenCollection | None = self._draw(self.collections_drawn)
        else:
            ahead, self._ahead = self._ahead, None
            found = ahead.result()
        if found is None:
            return None
        if isinstance(found, Drawn):
            found = self._opened(found, version=self.policy_version)
        self.collections_drawn += 1
        _tell(found.drawn.notes)
        found.drawn.facts["time/rollout_s"] = time.perf_counter() - started
        return found

    def _draw(self, index: int) -> Drawn | None:
        version = self.policy_version if self.source.generates else None
        return draw(self.config, source=self.source, planner=self.planner, index=index, version=version)

    def _opened(self, drawn: Drawn, *, version: int) -> OpenCollection:
        """Cut a collection into steps and let the planner start on them."""
        blocks = cut(
            drawn,
            config=self.config,
            generates=self.source.generates,
            version=version,
            world_size=self.strategy.world_size,
        )
        return self._planned(drawn, blocks=blocks or [[]])

    def _planned(
        self, drawn: Drawn, *, blocks: list[list[Sample]], pending: Pending | None = None
    ) -> OpenCollection:
        trained = [step for step, samples in enumerate(blocks) if can_train(samples)]
        records = [None] * len(blocks) if pending is None else pending.plans
        trained_steps = len(trained) if pending is None else pending.trained_steps
        plans = self.planner.begin(
            [blocks[step] for step in trained],
            counts=drawn.counts,
            collection_steps=trained_steps,
            records=[records[step] for step in trained],
        )
        return OpenCollection(
            drawn=drawn,
            blocks=blocks,
            jobs={step: job for job, step in enumerate(trained)},
            plans=plans,
            records=list(records),
            steps_in_collection=len(blocks) if pending is None else pending.steps_in_collection,
            trained_steps=trained_steps,
            pending=pending,
        )

    def _reopened(self, pending: Pending) -> OpenCollection:
        """What a checkpoint left of a collection: from the checkpoint itself, or from its file."""
        if pending.samples is not None:
            counts = self.planner.count(self.config.model.expert_layout if self.config.replay else None)
            counts.arrive(pending.samples)
            drawn = Drawn(
                index=self.collections_drawn - 1,
                samples=pending.samples,
                counts=counts,
                facts={},
                source=pending.source,
                filtered=False,
            )
        elif self.source.generates:
            raise Refusal(
                f"ckpt_path: the checkpoint lies inside {pending.source}, and this run generates: resume it "
                "with rollouts=files and the same rollouts.path"
            )
        else:
            found = self._draw(self.collections_drawn - 1)
            if found is None:
                raise Refusal(
                    f"ckpt_path: the checkpoint lies inside {pending.source}, file "
                    f"{self.collections_drawn} of rollouts.path, which holds fewer now: restore it"
                )
            drawn = found
            _tell(drawn.notes)
        blocks, left_out = pending.blocks(drawn.samples, world_size=self.strategy.world_size)
        drawn.facts = dict(pending.facts)
        if left_out:
            drawn.facts["batch/left_out"] = drawn.facts.get("batch/left_out", 0.0) + left_out
        return self._planned(drawn, blocks=blocks, pending=pending)

    def _read_ahead(self) -> None:
        """Start on the next file, where one may still be trained."""
        opened, steps = self._open, cast(Any, self.trainer).max_steps
        assert opened is not None
        assert self._reader is not None
        wanted = steps in (-1, None) or self.policy_version + len(opened.jobs) < steps
        if self.source.generates or not (self.planner.searches and self.config.balance.overlap) or not wanted:
            return
        index = self.collections_drawn

        def read() -> Drawn | OpenCollection | None:
            drawn = self._draw(index)
            if drawn is None or self.config.rollouts.max_lag is not None:
                return drawn
            return self._opened(drawn, version=0)  # nothing is too old

        self._ahead = self._reader.submit(read)

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

    # Batches

    def _batch(self, step: int) -> PackedBatch:
        """Step `step` of the open collection. The first one that trains carries them all: it scores them,
        unless a checkpoint brought their scores.
        """
        opened = self._open
        assert opened is not None
        samples, job = opened.blocks[step], opened.jobs.get(step)
        facts = dict(opened.drawn.facts) if step == opened.told_by else {}
        if job is None:
            batch = self._empty_batch(facts)
        else:
            started = time.perf_counter()
            planned = self.planner.hand_over(opened.plans, index=job)
            waited = time.perf_counter() - started
            batch = self._collated(samples, planned=planned, drawn=opened.drawn)
            facts |= planned.facts(samples, budget=self.config.budget)
            collated = time.perf_counter() - started - waited
            batch.facts = facts | {"time/plan_ms": 1000 * waited, "time/collate_s": collated}
        batch.source = opened.drawn.source
        batch.steps_in_collection = opened.steps_in_collection
        anchors = {} if opened.pending is None else opened.pending.anchors
        if anchors:
            batch.anchors = [anchors_of_pack(pack, anchors=anchors) for pack in batch.packs]
        elif job == 0:
            batch.collection = self._steps
        return batch

    def _collated(self, samples: list[Sample], *, planned: PlannedStep, drawn: Drawn) -> PackedBatch:
        topology, plan, layout = self.strategy.topology, planned.schedule.plan, drawn.counts.layout
        batch = batch_of_rank(
            samples,
            plan=plan,
            rank=self.strategy.global_rank,
            layout=layout,
            topology=topology,
            budget=self.config.budget,
            padding=self.config.padding,
        )
        batch.schedule = planned.schedule
        # One EP rank receives everything: nothing to compare.
        if planned.loads is not None and layout is not None and topology.ep_degree > 1:
            batch.forecast = Forecast.of(
                plan,
                loads=planned.loads,
                layout=layout,
                topology=topology,
                layer_stride=self.config.balance.layer_stride,
                pads=planned.pads,
            )
        return batch

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
    def strategy(self) -> ExpertParallelStrategy:
        return cast(ExpertParallelStrategy, cast(Any, self.trainer).strategy)

    @property
    def policy_version(self) -> int:
        return int(cast(Any, self.trainer).global_step)


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        rank_zero_only(print)(note, flush=True)
