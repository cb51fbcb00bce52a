"""Destination loads, counted by one background thread as samples arrive, so that planning only searches.

Every rank counts every sample that it received, for itself: that is what makes its rescore of a plan
independent. A sample whose routes are refused is refused when its loads are asked for, so that one which a
filter takes harms nobody. No collectives here.

Shapes: N samples, D destinations, L counted routed layers. Destinations are expert-parallel ranks, or every
single expert where shares of experts are to be chosen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.lending import expert_loads
from olmo_rl.planning.loads import collection_loads
from olmo_rl.types import ExpertLayout, Refusal, Sample, Topology

_CHUNK = 32  # samples of one job: enough to pay for it, few enough to start early


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Chunk:
    """`loads` int32 [chunk, D, L]; `refusals` by place in the chunk; `seconds` that one sample took."""

    loads: NDArray[np.int32]
    refusals: dict[int, Refusal]
    seconds: float


class LoadCounter:
    """State: one worker thread. `by_expert`: destinations are experts."""

    def __init__(self, *, topology: Topology, layer_stride: int, by_expert: bool = False) -> None:
        self.topology = topology
        self.layer_stride = layer_stride
        self.by_expert = by_expert
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loads")

    def collection(self, layout: ExpertLayout | None) -> LoadCounts:
        """The counter of one collection's samples; without a layout there is nothing to count."""
        return LoadCounts(self, layout=layout)

    def submit(self, samples: Sequence[Sample], *, layout: ExpertLayout) -> Future[_Chunk]:
        return self._worker.submit(self._count, samples, layout)

    def _count(self, samples: Sequence[Sample], layout: ExpertLayout) -> _Chunk:
        began = time.perf_counter()
        refusals: dict[int, Refusal] = {}
        try:
            loads = self._loads(samples, layout)
        except Refusal:
            layers = len(range(0, len(layout.routed_layers), self.layer_stride))
            destinations = layout.num_experts if self.by_expert else self.topology.ep_degree
            loads = np.zeros((len(samples), destinations, layers), dtype=np.int32)
            for place, sample in enumerate(samples):
                try:
                    loads[place] = self._loads([sample], layout)[0]
                except Refusal as refusal:
                    refusals[place] = refusal
        spent = time.perf_counter() - began
        return _Chunk(loads=loads, refusals=refusals, seconds=spent / len(samples))

    def _loads(self, samples: Sequence[Sample], layout: ExpertLayout) -> NDArray[np.int32]:
        if self.by_expert:
            return expert_loads(samples, layout=layout, topology=self.topology)
        return collection_loads(
            samples, layout=layout, topology=self.topology, layer_stride=self.layer_stride
        )

    def close(self) -> None:
        """Drop counts that are no longer needed."""
        self._worker.shutdown(wait=False, cancel_futures=True)


class LoadCounts:
    """The loads of one collection's samples, by sample id."""

    def __init__(self, counter: LoadCounter, *, layout: ExpertLayout | None) -> None:
        self.layout = layout
        self._counter = counter
        self._places: dict[str, tuple[Future[_Chunk], int]] = {}

    def arrive(self, samples: Sequence[Sample]) -> None:
        """Start counting these."""
        if self.layout is None:
            return
        routed = [sample for sample in samples if sample.routes is not None]
        for first in range(0, len(routed), _CHUNK):
            chunk = routed[first : first + _CHUNK]
            found = self._counter.submit(chunk, layout=self.layout)
            self._places |= {sample.id: (found, place) for place, sample in enumerate(chunk)}

    def of(self, samples: Sequence[Sample]) -> tuple[NDArray[np.int32] | None, float]:
        """int32 [N, D, L] and the thread's seconds for them; None without routes. Waits for what has not
        been counted, raises the refusal of a sample that could not be.
        """
        if self.layout is None or any(sample.routes is None for sample in samples):
            return None, 0.0
        rows, seconds = [], 0.0
        for sample in samples:
            found, place = self._places[sample.id]
            chunk = found.result()
            if place in chunk.refusals:
                raise chunk.refusals[place]
            rows.append(chunk.loads[place])
            seconds += chunk.seconds
        return np.stack(rows), seconds
