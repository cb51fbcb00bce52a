"""What a plan costs: work proxies, skew, lower bounds, J and its gap. Plain NumPy.

This module verifies what the searches return, so it shares no code with them. Counts are exact integers.

Shapes: N samples, W ranks, C columns (packs of a rank), R replicas, E expert-parallel ranks, L routed layers.
`lengths` int64 [N], `loads` int32 [N, E, L] as `loads.collection_loads` counts them, or None where nothing is
known about experts; then every expert field is None. `pads` is what the pads of exactly this plan add
(`pads.Pads.work`); without it only real tokens count. Bounds are of real work, always.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.pads import PadWork
from olmo_rl.types import PackPlan, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of one plan. Columns run together, so every proxy sums the busiest member of each column.

    `expert_work`: sum over columns and layers of the busiest destination's assignments. `token_work`: sum
    over columns of the busiest rank's tokens. `pair_work`: the same for squared document lengths. Skew of
    one (column, replica): sum over layers of the busiest destination / sum over layers of the mean
    destination.
    """

    expert_work: int | None
    token_work: int
    pair_work: int
    skew_mean: float | None
    skew_max: float | None
    max_destination_load: int | None
    packs_per_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Lower bounds of every plan. Samples count as divisible: an optimum is certified only where a bound is
    met.
    """

    expert_work: int | None
    token_work: int
    pair_work: int
    packs_per_rank: int


def _lengths(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.asarray(lengths, dtype=np.int64)


def _cell_sums(plan: PackPlan, values: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 [W, C, ...]: sum of `values` [N, ...] over the samples of every cell."""
    cells = [pack for rank in plan.packs for pack in rank]
    assert all(cells), "a cell without samples has no work to measure"
    starts = np.cumsum([0] + [len(cell) for cell in cells[:-1]])
    ordered = values[np.array(plan.positions, dtype=np.int64)]
    sums = np.add.reduceat(ordered, starts, axis=0, dtype=np.int64)
    return sums.reshape(plan.world_size, plan.packs_per_rank, *values.shape[1:])


def destination_loads(
    plan: PackPlan, *, loads: NDArray[np.int32], topology: Topology, pads: PadWork | None = None
) -> NDArray[np.int64]:
    """int64 [C, R, E, L]: assignments of every destination while a column runs."""
    cells = _cell_sums(plan, loads)
    if pads is not None:
        assert pads.loads is not None, "pads of samples with routes have loads"
        cells = cells + pads.loads
    columns, (ep_degree, layers) = plan.packs_per_rank, loads.shape[1:]
    by_replica = cells.reshape(topology.num_replicas, topology.ep_degree, columns, ep_degree, layers)
    return by_replica.sum(axis=1).transpose(1, 0, 2, 3)


def measure(
    plan: PackPlan,
    *,
    lengths: NDArray[np.integer],
    loads: NDArray[np.int32] | None,
    topology: Topology,
    pads: PadWork | None = None,
) -> Work:
    """The exact work of `plan`, computed from scratch."""
    assert plan.world_size == topology.world_size, "the plan belongs to another world size"
    n = _lengths(lengths)
    tokens, pairs = _cell_sums(plan, n), _cell_sums(plan, n * n)
    if pads is not None:
        tokens, pairs = tokens + pads.rows, pairs + pads.pairs
    token_work, pair_work = int(tokens.max(axis=0).sum()), int(pairs.max(axis=0).sum())
    if loads is None:
        return Work(
            expert_work=None,
            token_work=token_work,
            pair_work=pair_work,
            skew_mean=None,
            skew_max=None,
            max_destination_load=None,
            packs_per_rank=plan.packs_per_rank,
        )
    load = destination_loads(plan, loads=loads, topology=topology, pads=pads)
    skew = load.max(axis=2).sum(axis=-1) / load.mean(axis=2).sum(axis=-1)
    return Work(
        expert_work=int(load.max(axis=(1, 2)).sum()),
        token_work=token_work,
        pair_work=pair_work,
        skew_mean=float(skew.mean()),
        skew_max=float(skew.max()),
        max_destination_load=int(load.max()),
        packs_per_rank=plan.packs_per_rank,
    )


def lower_bounds(
    *, lengths: NDArray[np.integer], loads: NDArray[np.int32] | None, topology: Topology, budget: int
) -> Bounds:
    """Bounds of every plan of these samples: perfect division over replicas, ranks and budget."""
    n = _lengths(lengths)
    world = topology.world_size
    expert_work = None
    if loads is not None:
        busiest = loads.sum(axis=0, dtype=np.int64).max(axis=0)
        expert_work = int((-(-busiest // topology.num_replicas)).sum())
    return Bounds(
        expert_work=expert_work,
        token_work=-(-int(n.sum()) // world),
        pair_work=-(-int((n * n).sum()) // world),
        packs_per_rank=-(-int(n.sum()) // (world * budget)),
    )


def objective(work: Work | Bounds, *, base: Work) -> float:
    """J: expert, token and pair work as shares of `base`, the order of arrival (J is 3, or 2 without
    experts).
    """
    terms = [(work.token_work, base.token_work), (work.pair_work, base.pair_work)]
    if work.expert_work is not None and base.expert_work is not None:
        terms.append((work.expert_work, base.expert_work))
    return sum(value / reference for value, reference in terms)


def gap(work: Work, *, bounds: Bounds, base: Work) -> float:
    """J of `work` over J of its bounds, minus 1. How much of a positive gap can be closed is unknown."""
    return objective(work, base=base) / objective(bounds, base=base) - 1.0


def token_straggler(work: Work, *, lengths: NDArray[np.integer], topology: Topology) -> float:
    """Tokens of the busiest ranks over tokens of the mean rank, summed over columns; 1 is even."""
    return work.token_work * topology.world_size / int(_lengths(lengths).sum())


def pair_straggler(work: Work, *, lengths: NDArray[np.integer], topology: Topology) -> float:
    """Squared document lengths of the busiest ranks over the mean rank's, summed over columns; 1 is even."""
    n = _lengths(lengths)
    return work.pair_work * topology.world_size / int((n * n).sum())
