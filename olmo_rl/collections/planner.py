"""Plans the optimizer steps of collections: counts and searches in background threads, hands over on the
main thread.

Rank 0 searches and broadcasts; every rank counts loads for itself, rescores the plan it was given and
compares digests. Collectives happen at hand-over only, in step order, so their number is equal on all ranks.
`seconds` of a schedule: `count`, `start`, `search` and `verify` are what the threads spent on the step,
`wait` is how long the step stood still for them, `agree` what the ranks then took to agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.collections.load_counting import Counts, LoadCounter
from olmo_rl.config import BalanceKind, Config
from olmo_rl.planning.packing import plan_step, unpacked_plan
from olmo_rl.planning.pads import Pads, PadWork
from olmo_rl.planning.schedule import (
    Schedule,
    StepInput,
    known_schedule,
    placement_floor,
    schedule_digest,
    schedule_step,
)
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import ExpertLayout, PackPlan, Refusal, Sample, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """A plan that a checkpoint holds, and the settings it was made under."""

    plan: PackPlan
    start: str
    paths: dict[str, int]
    settings: dict[str, Any]


def plan_settings(config: Config) -> dict[str, Any]:
    """What a plan depends on beside its samples, as plain values. Limits of a search are left out: a plan
    stays what it is under others.
    """
    balance = config.balance
    return {
        "world_size": config.world_size,
        "ep_degree": config.ep_degree,
        "budget": config.budget,
        "packing": asdict(config.packing) | {"kind": config.packing.kind.value},
        "balance": [balance.kind.value, balance.layer_stride],
        "max_destination_load": balance.max_destination_load,
    }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedStep:
    """One step on one rank: its schedule, the loads int32 [N, E, L] that this rank counted, and what the pads
    of its plan add.
    """

    schedule: Schedule
    loads: NDArray[np.int32] | None
    pads: PadWork | None

    def facts(self, samples: Sequence[Sample], *, budget: int) -> dict[str, float]:
        """Metrics of the step's plan."""
        plan, work = self.schedule.plan, self.schedule.after
        tokens, packs = sum(len(sample) for sample in samples), plan.packs_per_rank * plan.world_size
        facts = {
            "packing/packs": float(plan.packs_per_rank),
            "packing/samples_per_pack": len(samples) / packs,
            "packing/tokens_per_pack": tokens / packs,
            "packing/fill": tokens / (packs * budget),
        }
        if work.skew_mean is not None and work.skew_max is not None:
            facts["packing/expert_dispatch_skew_mean"] = work.skew_mean
            facts["packing/expert_dispatch_skew_max"] = work.skew_max
        if plan.search is not None:
            facts["balance/gap_before"], facts["balance/gap"] = self.schedule.gaps
            if self.loads is not None:
                facts["balance/placement_floor"] = placement_floor(self.loads)
        return facts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    """What the thread hands to the main one. `outcome` is None where another rank searches."""

    outcome: Schedule | Refusal | None
    step: StepInput | None = None


class _Job:
    """A search that runs once: in `worker`, or where there is none when its result is asked for."""

    def __init__(self, find: Callable[[], _Found], *, worker: ThreadPoolExecutor | None) -> None:
        self._find = find
        self._found: Future[_Found] | None = None if worker is None else worker.submit(find)

    def result(self) -> _Found:
        if self._found is None:
            self._found = Future()
            self._found.set_result(self._find())
        return self._found.result()

    @property
    def done(self) -> bool:
        return self._found is not None and self._found.done()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plans:
    """The plans of the steps of one collection that train, made or being made."""

    steps: Sequence[Sequence[Sample]]
    jobs: Sequence[_Job]

    def made(self, index: int) -> Schedule | None:
        """The plan of step `index` where this rank has found it, without waiting."""
        if not self.jobs[index].done:
            return None
        outcome = self.jobs[index].result().outcome
        return outcome if isinstance(outcome, Schedule) else None


class StepPlanner:
    """State: the threads that count and search."""

    def __init__(self, config: Config, *, strategy: ExpertParallelStrategy) -> None:
        self._config = config
        self._strategy = strategy
        self._counter = LoadCounter(topology=strategy.topology, layer_stride=config.balance.layer_stride)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
        self._warm: Future[None] | None = None

    @property
    def searches(self) -> bool:
        return self._config.balance.kind is not BalanceKind.none

    def warm_up(self) -> None:
        """Compile in the background what planning needs, with a line that says so."""
        if not self.searches or self._warm is not None:
            return
        if self._strategy.global_rank == 0:
            print(
                f"balance={self._config.balance.kind.value}: compiling the planner's kernels in the "
                "background, or loading them from the cache",
                flush=True,
            )
        self._warm = self._worker.submit(
            _compile_kernels, self._config, searches=self._strategy.global_rank == 0
        )

    def count(self, layout: ExpertLayout | None) -> Counts:
        """Where the samples of one collection arrive to be counted."""
        return self._counter.collection(layout)

    def begin(
        self,
        steps: Sequence[Sequence[Sample]],
        *,
        counts: Counts,
        collection_steps: int,
        records: Sequence[PlanRecord | None],
    ) -> Plans:
        """Take steps of a collection of `collection_steps` that train, and what a checkpoint knows of their
        plans. With `balance.overlap` the thread starts on all of them, in order.
        """
        worker = self._worker if self.searches and self._config.balance.overlap else None
        jobs = [
            _Job(
                self._finder(samples, counts=counts, collection_steps=collection_steps, record=record),
                worker=worker,
            )
            for samples, record in zip(steps, records, strict=True)
        ]
        return Plans(steps=steps, jobs=jobs)

    def _finder(
        self, samples: Sequence[Sample], *, counts: Counts, collection_steps: int, record: PlanRecord | None
    ) -> Callable[[], _Found]:
        def find() -> _Found:
            return _find(
                self._config,
                samples=samples,
                counts=counts,
                topology=self._strategy.topology,
                collection_steps=collection_steps,
                searching=not self.searches or self._strategy.global_rank == 0,
                record=record,
            )

        return find

    def hand_over(self, plans: Plans, *, index: int) -> PlannedStep:
        """Step `index`, agreed by all ranks. Called in step order on every rank; raises what rank 0
        refused.
        """
        began = time.perf_counter()
        if self._warm is not None and not self._warm.done() and self._strategy.global_rank == 0:
            print("waiting for the planner's kernels", flush=True)
        if self._warm is not None:
            self._warm.result()
        found = plans.jobs[index].result()
        waited = time.perf_counter() - began
        if not self.searches:
            return _own(found)
        # One broadcast and one gather for every step, on every rank, whatever was found.
        outcome = self._strategy.from_rank_zero(lambda: found.outcome)
        if isinstance(outcome, Refusal):
            raise outcome
        assert outcome is not None, "rank 0 searches"
        assert found.step is not None, "what cannot be counted is refused on every rank alike"
        self._verify(outcome, step=found.step)
        total = time.perf_counter() - began
        seconds = outcome.seconds | {"wait": waited, "agree": total - waited}
        return _handed_over(replace(outcome, seconds=seconds), step=found.step)

    def _verify(self, schedule: Schedule, *, step: StepInput) -> None:
        """Rescore the plan with this rank's own counts, then compare digests over ranks."""
        schedule.plan.check(step.lengths, self._config.budget)
        mine = replace(schedule, after=step.work(schedule.plan))
        digests = self._strategy.gather_objects(schedule_digest(mine, ids=step.ids))
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        assert not others, f"ranks {others} hold another plan, other samples or other routes than rank 0"
        assert digests[self._strategy.global_rank] == schedule_digest(schedule, ids=step.ids), (
            f"the plan was reported as {schedule.after}, its rescore gives {mine.after}"
        )

    def close(self) -> None:
        """Let go of plans that nobody will ask for."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._counter.close()


def _own(found: _Found) -> PlannedStep:
    if isinstance(found.outcome, Refusal):
        raise found.outcome
    assert found.outcome is not None, "without a search every rank packs for itself"
    assert found.step is not None
    return _handed_over(found.outcome, step=found.step)


def _handed_over(schedule: Schedule, *, step: StepInput) -> PlannedStep:
    pads = None if step.pads is None else step.pads.work(schedule.plan)
    return PlannedStep(schedule=schedule, loads=step.loads, pads=pads)


def _find(
    config: Config,
    *,
    samples: Sequence[Sample],
    counts: Counts,
    topology: Topology,
    collection_steps: int,
    searching: bool,
    record: PlanRecord | None,
) -> _Found:
    """Take the counts, and on the searching rank plan: the same arithmetic in whichever thread it runs."""
    # The reference search has one allowance for a collection.
    shared = config.balance.kind is BalanceKind.reference
    outcome: Schedule | None = None
    try:
        loads, counted = counts.of(samples)
        step = StepInput(
            lengths=_lengths(samples),
            ids=[sample.id for sample in samples],
            loads=loads,
            budget=config.budget,
            topology=topology,
            balance=config.balance,
            seconds=config.balance.seconds / collection_steps if shared else None,
            pads=Pads.of(
                samples,
                padding=config.padding,
                topology=topology,
                loads=loads,
                layout=counts.layout,
                layer_stride=config.balance.layer_stride,
            ),
        )
        if searching:
            outcome = _plan(step, config=config, record=record)
    except Refusal as refusal:
        return _Found(outcome=refusal)
    if outcome is not None:
        outcome = replace(outcome, seconds={"count": counted} | outcome.seconds)
    return _Found(outcome=outcome, step=step)


def _plan(step: StepInput, *, config: Config, record: PlanRecord | None) -> Schedule:
    """The plan of a checkpoint where it was made for this; else a plan of our own."""
    if record is None or record.settings != plan_settings(config):
        origin = "planned" if record is None else "replanned"
        if config.packed:
            return replace(schedule_step(step), origin=origin)
        plan = unpacked_plan(step.lengths, topology=step.topology, ids=step.ids)
        return known_schedule(plan, step=step, arrival=plan, seconds={}, origin=origin)
    arrival = record.plan
    if config.packed:
        arrival = plan_step(step.lengths, budget=step.budget, topology=step.topology, ids=step.ids)
    record.plan.check(step.lengths, config.budget)
    return known_schedule(
        record.plan,
        step=step,
        arrival=arrival,
        seconds={"start": 0.0, "search": 0.0, "verify": 0.0},
        start=record.start,
        paths=record.paths,
        origin="resumed",
    )


def _lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    return np.array([len(sample) for sample in samples], dtype=np.int64)


def _compile_kernels(config: Config, *, searches: bool) -> None:
    """Counting on every rank, the search where it runs."""
    from olmo_rl.planning.search import compile_kernels  # imports numba

    topology = Topology(config.world_size, config.ep_degree)
    compile_kernels(config.balance, layout=config.model.expert_layout, topology=topology, searches=searches)
