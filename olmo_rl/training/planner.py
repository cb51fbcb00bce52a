"""Plans the optimizer steps of one collection: counts and searches in one background thread, hands over on
the main thread.

Rank 0 searches and broadcasts; every rank counts loads for itself, rescores the plan it was given and
compares digests. Collectives happen at hand-over only, in step order, so their number is equal on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import BalanceKind, Config
from olmo_rl.planning.loads import sample_loads
from olmo_rl.planning.objective import measure
from olmo_rl.planning.packing import unpacked_plan
from olmo_rl.planning.schedule import Schedule, kept_order, schedule_digest, schedule_step, step_loads
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import ExpertLayout, Refusal, Sample, Topology


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedStep:
    """One step on one rank: its schedule, and the loads int32 [N, E, L] that this rank counted."""

    schedule: Schedule
    loads: NDArray[np.int32] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    """What the thread hands to the main one. `outcome` is None where another rank searches."""

    outcome: Schedule | Refusal | None
    loads: NDArray[np.int32] | None


class StepPlanner:
    """State: one worker thread, and the steps of the present collection that it was given."""

    def __init__(self, config: Config, *, strategy: ExpertParallelStrategy) -> None:
        self._config = config
        self._strategy = strategy
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
        self._warm: Future[None] | None = None
        self._jobs: list[Callable[[], _Found]] = []
        self._samples: list[Sequence[Sample]] = []

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
            _warm_kernels, self._config, searching=self._strategy.global_rank == 0
        )

    def begin(self, steps: Sequence[Sequence[Sample]], *, layout: ExpertLayout | None) -> None:
        """Take the steps of a collection. With `balance.overlap` the thread starts on all of them, in
        order.
        """
        self._samples = list(steps)
        jobs = [self._job(samples, layout=layout, steps=len(steps)) for samples in steps]
        if self.searches and self._config.balance.overlap:
            self._jobs = [self._worker.submit(job).result for job in jobs]
        else:
            self._jobs = list(jobs)

    def _job(
        self, samples: Sequence[Sample], *, layout: ExpertLayout | None, steps: int
    ) -> Callable[[], _Found]:
        def find() -> _Found:
            return _find(
                self._config,
                samples=samples,
                layout=layout,
                topology=self._strategy.topology,
                steps=steps,
                searching=not self.searches or self._strategy.global_rank == 0,
            )

        return find

    def hand_over(self, index: int) -> PlannedStep:
        """Step `index`, agreed by all ranks. Called in step order on every rank; raises what rank 0
        refused.
        """
        began = time.perf_counter()
        if self._warm is not None and not self._warm.done() and self._strategy.global_rank == 0:
            print("waiting for the planner's kernels", flush=True)
        if self._warm is not None:
            self._warm.result()
        found = self._jobs[index]()
        waited = time.perf_counter() - began
        if not self.searches:
            return self._own(found)
        # One broadcast and one gather for every step, on every rank, whatever was found.
        outcome = self._strategy.from_rank_zero(lambda: found.outcome)
        if isinstance(outcome, Refusal):
            raise outcome
        assert outcome is not None, "rank 0 searches"
        samples = self._samples[index]
        self._verify(outcome, samples=samples, loads=found.loads)
        total = time.perf_counter() - began
        seconds = outcome.seconds | {"wait": waited, "agree": total - waited}
        return PlannedStep(schedule=replace(outcome, seconds=seconds), loads=found.loads)

    def _own(self, found: _Found) -> PlannedStep:
        if isinstance(found.outcome, Refusal):
            raise found.outcome
        assert found.outcome is not None, "without a search every rank packs for itself"
        return PlannedStep(schedule=found.outcome, loads=found.loads)

    def _verify(
        self, schedule: Schedule, *, samples: Sequence[Sample], loads: NDArray[np.int32] | None
    ) -> None:
        """Rescore the plan with this rank's own counts, then compare digests over ranks."""
        lengths, topology = _lengths(samples), self._strategy.topology
        schedule.plan.check(lengths, self._config.budget)
        mine = replace(
            schedule, after=measure(schedule.plan, lengths=lengths, loads=loads, topology=topology)
        )
        digests = self._strategy.gather_objects(schedule_digest(mine, ids=[s.id for s in samples]))
        expected = schedule_digest(schedule, ids=[s.id for s in samples])
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        assert not others, f"ranks {others} hold another plan, other samples or other routes than rank 0"
        assert digests[self._strategy.global_rank] == expected, (
            f"the plan was reported as {schedule.after}, its rescore gives {mine.after}"
        )

    def close(self) -> None:
        """Let go of plans that nobody will ask for."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def _find(
    config: Config,
    *,
    samples: Sequence[Sample],
    layout: ExpertLayout | None,
    topology: Topology,
    steps: int,
    searching: bool,
) -> _Found:
    """Count, and on the searching rank plan: the same arithmetic in whichever thread it runs."""
    began = time.perf_counter()
    lengths, ids = _lengths(samples), [sample.id for sample in samples]
    balance, loads = config.balance, None
    outcome: Schedule | Refusal | None = None
    try:
        loads = step_loads(samples, layout=layout, topology=topology, balance=balance)
        counted = time.perf_counter() - began
        if searching and not config.packed:
            plan = unpacked_plan(lengths, topology=topology, ids=ids)
            outcome = kept_order(
                plan, lengths=lengths, loads=loads, topology=topology, budget=config.budget, seconds={}
            )
        elif searching:
            # The reference search has one allowance for a collection.
            shared = balance.kind is BalanceKind.reference
            outcome = schedule_step(
                lengths,
                ids=ids,
                loads=loads,
                budget=config.budget,
                topology=topology,
                balance=balance,
                seconds=balance.seconds / steps if shared else None,
            )
    except Refusal as refusal:
        return _Found(outcome=refusal, loads=None)
    if isinstance(outcome, Schedule):
        outcome = replace(outcome, seconds={"count": counted} | outcome.seconds)
    return _Found(outcome=outcome, loads=loads)


def _lengths(samples: Sequence[Sample]) -> NDArray[np.int64]:
    return np.array([len(sample) for sample in samples], dtype=np.int64)


def _warm_kernels(config: Config, *, searching: bool) -> None:
    """Load or compile counting on every rank, the search where it runs."""
    layout = config.model.expert_layout
    if layout is not None:
        routes = np.tile(np.arange(layout.top_k, dtype=np.int16), (1, len(layout.routed_layers), 1))
        sample = Sample(
            id="",
            group="",
            tokens=np.zeros(2, dtype=np.int32),
            response_mask=np.ones(2, dtype=bool),
            behavior_logprobs=np.zeros(2, dtype=np.float32),
            reward=0.0,
            routes=routes,
        )
        topology = Topology(config.world_size, config.ep_degree)
        sample_loads(sample, layout=layout, topology=topology, layer_stride=config.balance.layer_stride)
    if searching:
        from olmo_rl.planning.search import warm_up  # brings compiled kernels

        warm_up(config.balance)
