"""A collection in training: its samples by optimizer step -> planned, collated and scored steps.

Owns the order: every rank requests the same steps in the same order, since making one communicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from olmo_rl.collections.collecting import Drawn
from olmo_rl.collections.pending import Pending, anchors_by_sample, anchors_of_pack
from olmo_rl.collections.planner import PlanRecord, PlanTask, StepPlanner, plan_facts
from olmo_rl.config import Config
from olmo_rl.data.advantages import can_train
from olmo_rl.data.collate import empty_step, step_of_rank
from olmo_rl.data.packs import Step
from olmo_rl.planning.objective import destination_loads
from olmo_rl.planning.packing import plan_step
from olmo_rl.planning.schedule import Forecast, Schedule, StepInput, layer_skews
from olmo_rl.progress import note_phase
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import PackPlan, Sample


class OpenCollection:
    """The optimizer steps of one collection from here on, each made when it is first requested, in order: the
    planner works ahead of whoever scores or trains.

    `blocks[i]` are the samples of the i-th step. Those of a collection that a checkpoint left (`pending`) are
    only the rest of `steps_in_collection`, `trained_steps` of which are updates. `facts` go into the row of
    the first step that trains. State: the steps made so far, and how many of them were given to be trained.
    """

    def __init__(
        self,
        drawn: Drawn,
        *,
        blocks: Sequence[list[Sample]],
        config: Config,
        planner: StepPlanner,
        strategy: ExpertParallelStrategy,
        pending: Pending | None = None,
    ) -> None:
        self.source, self.facts, self.notes = drawn.source, dict(drawn.facts), drawn.notes
        self.resumed = pending is not None
        self.trains = [can_train(samples) for samples in blocks]
        self.steps_in_collection = len(blocks) if pending is None else pending.steps_in_collection
        self.trained_steps = sum(self.trains) if pending is None else pending.trained_steps
        self._blocks = blocks
        self._layout = drawn.counts.layout
        self._config, self._planner, self._strategy = config, planner, strategy
        self._records = [None] * len(blocks) if pending is None else list(pending.plans)
        self._known_anchors = {} if pending is None else pending.anchors
        self._tasks: dict[int, PlanTask] = {
            index: planner.begin(
                samples,
                counts=drawn.counts,
                collection_steps=self.trained_steps,
                record=self._records[index],
            )
            for index, samples in enumerate(blocks)
            if self.trains[index]
        }
        self._steps: list[Step] = []
        self._given = 0

    def __iter__(self) -> Iterator[Step]:
        """The steps, to be trained one after another."""
        for index in range(len(self._blocks)):
            step = self._step(index)
            self._given = index + 1
            yield step

    def score(self, score: Callable[[Step], tuple[Tensor, ...]]) -> None:
        """Give every step that trains its anchors by `score`, unless a checkpoint had them: before the first
        of them moves the policy. While one step is scored, the planner works on the next.
        """
        for index in self._tasks:
            step = self._step(index)
            if step.anchors is None:
                self._steps[index] = replace(step, anchors=score(step))

    def pending(self, *, finished: Step | None, generates: bool) -> Pending | None:
        """The steps left to train, as a checkpoint holds them; None where none is left. `finished`: the last
        step whose update ended. A collective of all ranks: anchors lie on the ranks that scored them.
        """
        unfinished = self._given > 0 and self._steps[self._given - 1] is not finished
        done = self._given - unfinished
        blocks = self._blocks[done:]
        if not blocks:
            return None
        return Pending(
            source=self.source,
            steps_in_collection=self.steps_in_collection,
            trained_steps=self.trained_steps,
            ids=[[sample.id for sample in block] for block in blocks],
            samples=[sample for block in blocks for sample in block] if generates else None,
            plans=[self._record(index) for index in range(done, len(self._blocks))],
            anchors=self._anchors(done),
            facts=dict(self.facts) if done <= self._first_trained else {},
        )

    @property
    def _first_trained(self) -> int:
        return min(self._tasks, default=0)

    def _record(self, index: int) -> PlanRecord | None:
        """The plan of a step to come where this rank has it; saving does not wait for a search."""
        made = self._tasks[index].schedule if index in self._tasks else None
        return self._records[index] if made is None else PlanRecord.of(made, config=self._config)

    def _anchors(self, done: int) -> dict[str, Any]:
        """Anchors by sample id of the steps from `done` on, over all ranks; none unless every step has them,
        which is equal on all ranks: they made and scored the same steps.
        """
        coming = [index for index in self._tasks if index >= done]
        made = [self._steps[index] for index in coming if index < len(self._steps)]
        if len(made) < len(coming) or any(step.anchors is None for step in made):
            return {}
        mine: dict[str, Any] = {}
        for step in made:
            mine |= anchors_by_sample(step.packs, anchors=step.anchors or ())
        return {id: values for part in self._strategy.gather_objects(mine) for id, values in part.items()}

    def _step(self, index: int) -> Step:
        while len(self._steps) <= index:
            self._steps.append(self._make(len(self._steps)))
        return self._steps[index]

    def _make(self, index: int) -> Step:
        """Plan and collate one step: a collective of all ranks where the planner searches."""
        facts = dict(self.facts) if index == self._first_trained else {}
        anchors = None
        if index in self._tasks:
            started = time.perf_counter()
            note_phase("plan")
            planned, schedule = self._planner.agree(self._tasks[index])
            waited = time.perf_counter() - started
            step = self._collated(index, planned=planned, schedule=schedule)
            collated = time.perf_counter() - started - waited
            facts |= plan_facts(schedule, step=planned)
            facts |= {"time/plan_ms": 1000 * waited, "time/collate_s": collated}
            if self._known_anchors:
                anchors = tuple(anchors_of_pack(pack, anchors=self._known_anchors) for pack in step.packs)
        else:
            step = empty_step(budget=self._config.budget)
        return replace(
            step,
            anchors=anchors,
            facts=facts,
            steps_in_collection=self.steps_in_collection,
            source=self.source,
        )

    def _arrival(self, planned: StepInput, *, plan: PackPlan) -> tuple[float, ...] | None:
        """Skews of layers in the order that a search moved away from, on rank 0, which reports them."""
        searched = plan.search is not None and self._config.packed
        if planned.loads is None or not searched or self._strategy.global_rank > 0:
            return None
        topology = planned.topology
        arrival = plan_step(planned.lengths, budget=planned.budget, topology=topology, ids=planned.ids)
        return layer_skews(destination_loads(arrival, loads=planned.loads, topology=topology))

    def _collated(self, index: int, *, planned: StepInput, schedule: Schedule) -> Step:
        topology, layout, plan = self._strategy.topology, self._layout, schedule.plan
        step = step_of_rank(
            self._blocks[index],
            plan=plan,
            rank=self._strategy.global_rank,
            layout=layout,
            topology=topology,
            budget=self._config.budget,
            padding=self._config.padding,
            share=self._config.shares,
        )
        forecast = None
        # One EP rank receives everything: nothing to compare.
        if planned.sharing is not None and layout is not None and topology.ep_degree > 1:
            forecast = Forecast.of_shared(
                plan,
                samples=self._blocks[index],
                layout=layout,
                topology=topology,
                layer_stride=self._config.balance.layer_stride,
                padding=self._config.padding,
            )
        elif planned.loads is not None and layout is not None and topology.ep_degree > 1:
            lent = planned.lent
            forecast = Forecast.of(
                plan,
                loads=planned.loads if lent is None else lent.slots,
                layout=layout,
                topology=topology,
                layer_stride=self._config.balance.layer_stride,
                pads=None if planned.pads is None else planned.pads.work(plan),
                slots=1 if lent is None else lent.table.slots_per_rank,
                arrival=self._arrival(planned, plan=plan),
            )
        return replace(step, schedule=schedule, forecast=forecast)
