"""How much of the imbalance is the ownership of experts itself: a diagnostic, nothing here moves an expert.

Owns the floor that no packing crosses while every EP rank owns its contiguous block of experts, and what a
longest-first placement of the same experts would reach.

Shapes: L routed layers, X experts, E expert-parallel ranks; `counts` int64 [L, X] assignments of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.loads import check_routes, refuse_id, tail_routes
from olmo_rl.types import ExpertLayout, Sample, Topology


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
