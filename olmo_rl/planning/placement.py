"""How much of the imbalance is the ownership of experts itself: a diagnostic, nothing here moves an expert.

Owns the floor that no packing crosses while every EP rank owns its contiguous block of experts, what a
longest-first placement of the same experts would reach, and the file that this placement is written to.

Shapes: L routed layers, X experts, E expert-parallel ranks; `counts` int64 [L, X] assignments of a batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from olmo_rl.complete_files import write_complete
from olmo_rl.planning.loads import check_routes, refuse_id, tail_routes
from olmo_rl.types import ExpertLayout, Refusal, Sample, Topology


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """`floor` and `reached`: sum over layers of the busiest rank / of the mean rank, as things are and
    after placing the longest expert first. `permutation` int64 [L, X]: the expert to put at each position
    of a layer; contiguous blocks of it are the ranks.
    """

    floor: float
    reached: float
    permutation: NDArray[np.int64]


def expert_counts(
    samples: Sequence[Sample], *, layout: ExpertLayout, topology: Topology
) -> NDArray[np.int64]:
    """int64 [L, X]: assignments of every expert over all samples, tails included. Refuses routes as `loads`
    does.
    """
    layers, experts = len(layout.routed_layers), layout.num_experts
    counts = np.zeros(layers * experts, dtype=np.int64)
    offsets = np.arange(layers)[:, None] * experts
    for sample in samples:
        routes = check_routes(sample, layout=layout)
        bad = (routes < 0) | (routes >= experts)
        if bad.any():
            refuse_id(sample, routes, int(np.argmax(bad)), layout=layout)
        tail = tail_routes(sample.id, layout=layout, topology=topology)
        counts += np.bincount((routes + offsets).ravel(), minlength=len(counts))
        counts += np.bincount((tail + offsets).ravel(), minlength=len(counts))
    return counts.reshape(layers, experts)


def longest_first(counts: NDArray[np.int64], *, topology: Topology) -> Placement:
    """Place the experts of every layer in falling order of their assignments, each on the lightest rank
    with room.
    """
    layers, experts = counts.shape
    room, ranks = topology.experts_per_rank(experts), topology.ep_degree
    permutation = np.empty((layers, experts), dtype=np.int64)
    busiest = 0
    for layer, row in enumerate(counts):
        totals = [0] * ranks
        owned: list[list[int]] = [[] for _ in range(ranks)]
        for expert in np.argsort(-row, kind="stable").tolist():
            rank = min((r for r in range(ranks) if len(owned[r]) < room), key=totals.__getitem__)
            owned[rank].append(expert)
            totals[rank] += int(row[expert])
        permutation[layer] = [expert for rank in owned for expert in rank]
        busiest += max(totals)
    blocks = counts.reshape(layers, ranks, room).sum(axis=2)
    mean = float(blocks.mean(axis=1).sum())
    return Placement(
        floor=float(blocks.max(axis=1).sum()) / mean, reached=busiest / mean, permutation=permutation
    )


class ExpertTotals:
    """Assignments of every expert, added up over the steps of a plan."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._layout: ExpertLayout | None = None
        self._counts: NDArray[np.int64] | None = None

    @property
    def known(self) -> bool:
        return self._counts is not None

    def add(self, samples: Sequence[Sample], *, layout: ExpertLayout) -> None:
        """Refuses collections of different models."""
        if self._layout is not None and layout != self._layout:
            raise Refusal(f"collections of different experts: {self._layout} and {layout}: plan them apart")
        counts = expert_counts(samples, layout=layout, topology=self._topology)
        self._layout, self._counts = layout, counts if self._counts is None else self._counts + counts

    def placement(self) -> tuple[Placement, tuple[int, ...]]:
        """Their longest-first placement, and the global layer ids."""
        assert self._counts is not None, "nothing was added"
        assert self._layout is not None, "nothing was added"
        return longest_first(self._counts, topology=self._topology), self._layout.routed_layers


def write_placement(placement: Placement, *, layers: Sequence[int], topology: Topology, path: Path) -> None:
    """JSON: by global layer id, the expert to put at each position; contiguous blocks are the EP ranks."""
    document = {
        "version": 1,
        "ep_degree": topology.ep_degree,
        "floor": round(placement.floor, 9),
        "reached": round(placement.reached, 9),
        "permutation": {
            str(layer): row for layer, row in zip(layers, placement.permutation.tolist(), strict=True)
        },
    }
    write_complete(path, json.dumps(document) + "\n")
