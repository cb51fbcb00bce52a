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
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.collections.load_counting import LoadCounter, LoadCounts
from olmo_rl.config import BalanceKind, Config
from olmo_rl.planning.lending import Lent, folded, lend, ranks_of_a_node, under
from olmo_rl.planning.packing import plan_step, unpacked_plan
from olmo_rl.planning.pads import Pads
from olmo_rl.planning.planners import compile_kernels, schedule_step
from olmo_rl.planning.schedule import (
    Schedule,
    StepInput,
    known_schedule,
    placement_floor,
    schedule_digest,
)
from olmo_rl.planning.sharing import find_sharing
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import ExpertLayout, PackPlan, Refusal, Sample, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """A plan that a checkpoint holds, and the settings it was made under."""

    plan: PackPlan
    start: str
    paths: dict[str, int]
    settings: dict[str, Any]

    @classmethod
    def of(cls, schedule: Schedule, *, config: Config) -> PlanRecord:
        return cls(
            plan=schedule.plan, start=schedule.start, paths=schedule.paths, settings=plan_settings(config)
        )


def plan_settings(config: Config) -> dict[str, Any]:
    """Settings that a plan depends on, as plain values. Limits of a search are left out: they do not
    change a finished plan.
    """
    balance = config.balance
    return (
        {
            "world_size": config.world_size,
            "ep_degree": config.ep_degree,
            "budget": config.budget,
            "packing": asdict(config.packing) | {"kind": config.packing.kind.value},
            "balance": [balance.kind.value, balance.layer_stride],
            "max_destination_load": balance.max_destination_load,
        }
        | ({"replay": config.policy.replay} if config.shares else {})
        | (  # routes decide which rows are shared
            {"guests": balance.guests} if config.lends else {}
        )
    )


# A step as the planner sees it, and its schedule: None where another rank searches.
Planned = tuple[StepInput, Schedule | None]


class PlanTask:
    """The search for one step's plan. It runs once: in `worker`, or without one when its result is asked for.

    `find` gives the step as the planner sees it and its schedule, None where another rank searches; it raises
    the Refusal of a step that cannot be planned.
    """

    def __init__(self, find: Callable[[], Planned], *, worker: ThreadPoolExecutor | None) -> None:
        self._find = find
        self._future: Future[Planned] | None = None if worker is None else worker.submit(find)

    def result(self) -> Planned:
        if self._future is None:
            self._future = Future()
            try:
                self._future.set_result(self._find())
            except Refusal as refusal:
                self._future.set_exception(refusal)
        return self._future.result()

    @property
    def schedule(self) -> Schedule | None:
        """The plan where this rank has found one, without waiting."""
        if self._future is None or not self._future.done() or self._future.exception() is not None:
            return None
        return self._future.result()[1]


class StepPlanner:
    """State: the threads that count and search."""

    def __init__(self, config: Config, *, strategy: ExpertParallelStrategy) -> None:
        self._config = config
        self._strategy = strategy
        self._counter = LoadCounter(
            topology=strategy.topology, layer_stride=config.balance.layer_stride, by_expert=config.lends
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
        if self.agrees:
            self._worker.submit(_load_kernels, config, searches=self.searches and strategy.global_rank == 0)

    @property
    def searches(self) -> bool:
        return self._config.balanced

    @property
    def agrees(self) -> bool:
        """Whether ranks compare their plans: where one searches for all, and where experts are lent."""
        return self.searches or self._config.lends

    def count(self, layout: ExpertLayout | None) -> LoadCounts:
        """The counter of one collection's samples."""
        return self._counter.collection(layout)

    def begin(
        self,
        samples: Sequence[Sample],
        *,
        counts: LoadCounts,
        collection_steps: int,
        record: PlanRecord | None,
    ) -> PlanTask:
        """Take a step of a collection with `collection_steps` that train, and the plan that a checkpoint has
        for it. With `balance.overlap` the thread starts on it, in the order of the calls.
        """
        find = partial(
            _find,
            self._config,
            samples=samples,
            counts=counts,
            topology=self._strategy.topology,
            collection_steps=collection_steps,
            searching=not self.searches or self._strategy.global_rank == 0,
            record=record,
        )
        return PlanTask(find, worker=self._worker if self.agrees and self._config.balance.overlap else None)

    def agree(self, task: PlanTask) -> tuple[StepInput, Schedule]:
        """The step and its schedule, agreed by all ranks. Called in step order on every rank; raises the
        Refusal of rank 0.
        """
        began = time.perf_counter()
        if not self.agrees:  # every rank packs for itself
            step, schedule = task.result()
            assert schedule is not None, "without a search every rank plans"
            return step, schedule
        found: Planned | Refusal
        try:
            found = task.result()
        except Refusal as refusal:
            found = refusal
        waited = time.perf_counter() - began
        # One broadcast and one gather for every step, on every rank, whatever was found.
        outcome = self._strategy.from_rank_zero(lambda: found if isinstance(found, Refusal) else found[1])
        if isinstance(outcome, Refusal):
            raise outcome
        assert outcome is not None, "rank 0 has a plan"
        assert not isinstance(found, Refusal), "a step that cannot be counted is refused on every rank alike"
        step, _ = found
        self._verify(outcome, step=step)
        total = time.perf_counter() - began
        return step, replace(outcome, seconds=outcome.seconds | {"wait": waited, "agree": total - waited})

    def _verify(self, schedule: Schedule, *, step: StepInput) -> None:
        """Rescore the plan with this rank's own counts and loans, then compare digests over ranks."""
        schedule.plan.check(step.lengths, self._config.budget)
        plan = replace(schedule.plan, lending=step.lending)
        mine = replace(schedule, plan=plan, after=step.work(plan))
        digests = self._strategy.gather_objects(schedule_digest(mine, ids=step.ids))
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        assert not others, f"ranks {others} hold another plan, other samples or other routes than rank 0"
        assert digests[self._strategy.global_rank] == schedule_digest(schedule, ids=step.ids), (
            f"the plan was reported as {schedule.after}, its rescore gives {mine.after}"
        )

    def close(self) -> None:
        """Drop plans that are no longer needed."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._counter.close()


def plan_facts(schedule: Schedule, *, step: StepInput) -> dict[str, float]:
    """Metrics of a step's plan."""
    plan, work = schedule.plan, schedule.after
    tokens, packs = int(step.lengths.sum()), plan.packs_per_rank * plan.world_size
    rows = None if plan.rows is None else sum(map(sum, plan.rows))
    facts = {
        "packing/packs": float(plan.packs_per_rank),
        "packing/samples_per_pack": len(step.lengths) / packs,
        "packing/tokens_per_pack": tokens / packs,
        "packing/fill": (tokens if rows is None else rows) / (packs * step.budget),
    }
    if rows is not None:
        facts |= {"packing/rows": float(rows), "packing/sharing": tokens / rows}
    if work.skew_mean is not None and work.skew_max is not None:
        facts["packing/expert_dispatch_skew_mean"] = work.skew_mean
        facts["packing/expert_dispatch_skew_max"] = work.skew_max
    if plan.search is not None:
        facts["balance/gap_before"], facts["balance/gap"] = schedule.gaps
    if step.loads is not None and (plan.search is not None or step.balance.guests):
        home = step.loads if step.lent is None else step.lent.home
        facts["balance/placement_floor"] = placement_floor(home)
        if step.balance.guests:
            facts["balance/lent_floor"] = placement_floor(step.loads)
            loans = () if step.lending is None else step.lending.layers
            facts["balance/loans"] = sum(map(len, loans)) / step.loads.shape[2]
    return facts


def _find(
    config: Config,
    *,
    samples: Sequence[Sample],
    counts: LoadCounts,
    topology: Topology,
    collection_steps: int,
    searching: bool,
    record: PlanRecord | None,
) -> Planned:
    """Take the counts, and on the searching rank plan: the same arithmetic in whichever thread it runs."""
    loads, counted = counts.of(samples)
    known = None if record is None or record.settings != plan_settings(config) else record
    lent = None
    if config.lends and loads is not None and counts.layout is not None:
        experts, began = loads, time.perf_counter()
        lent = _lend(samples, experts=experts, layout=counts.layout, config=config, known=known)
        loads = folded(experts, ranks=topology.ep_degree) if lent is None else lent.loads
        counted += time.perf_counter() - began
    sharing = None
    if config.shares:
        sharing = find_sharing(samples, replayed=counts.layout is not None)
        loads = None  # they add up over samples only where no row is shared
    # The reference search has one allowance for a collection.
    shared = config.balance.kind is BalanceKind.reference
    step = StepInput(
        lengths=_lengths(samples),
        ids=[sample.id for sample in samples],
        loads=loads,
        budget=config.budget,
        topology=topology,
        balance=config.balance,
        seconds=config.balance.seconds / collection_steps if shared else None,
        # Plans of shared rows count these themselves.
        pads=None
        if sharing is not None
        else Pads.of(
            samples,
            padding=config.padding,
            topology=topology,
            loads=loads if lent is None else lent.slots,
            layout=counts.layout,
            layer_stride=config.balance.layer_stride,
            table=None if lent is None else lent.table,
        ),
        sharing=sharing,
        lent=lent,
    )
    if not searching:
        return step, None
    origin = "planned" if record is None else "replanned" if known is None else "resumed"
    schedule = _plan(step, config=config, record=known, origin=origin)
    return step, replace(schedule, seconds={"count": counted} | schedule.seconds)


def _lend(
    samples: Sequence[Sample],
    *,
    experts: NDArray[np.int32],
    layout: ExpertLayout,
    config: Config,
    known: PlanRecord | None,
) -> Lent | None:
    """The loans of the plan of a checkpoint where it was made for this; else those chosen from `experts`
    [N, X, L].
    """
    topology = Topology(config.world_size, config.ep_degree)
    if known is None:
        return lend(
            samples,
            experts=experts,
            layout=layout,
            topology=topology,
            guests=config.balance.guests,
            node_ranks=ranks_of_a_node(topology, devices=config.trainer.devices),
        )
    lending = known.plan.lending
    if lending is None:
        return None
    return under(lending, samples=samples, experts=experts, layout=layout, topology=topology)


def _plan(step: StepInput, *, config: Config, record: PlanRecord | None, origin: str) -> Schedule:
    """The plan of a checkpoint where it was made for this; else a plan of our own."""
    if record is None:
        if config.packed:
            return replace(schedule_step(step), origin=origin)
        plan = unpacked_plan(step.lengths, topology=step.topology, ids=step.ids)
        return known_schedule(plan, step=step, arrival=plan, seconds={}, origin=origin)
    arrival = record.plan
    if config.packed and not config.shares:
        arrival = plan_step(step.lengths, budget=step.budget, topology=step.topology, ids=step.ids)
    record.plan.check(step.lengths, config.budget)
    return known_schedule(
        record.plan,
        step=step,
        arrival=arrival,
        seconds={"start": 0.0, "search": 0.0, "verify": 0.0},
        start=record.start,
        paths=record.paths,
        origin=origin,
    )


def _lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    return np.array([len(sample) for sample in samples], dtype=np.int64)


def _load_kernels(config: Config, *, searches: bool) -> None:
    """Load kernels from the cache on disk; `run_ranks` compiled them before ranks wait for each other."""
    layout = config.model.expert_layout if config.replay else None
    topology = Topology(config.world_size, config.ep_degree)
    compile_kernels(config.balance, layout=layout, topology=topology, searches=searches)
