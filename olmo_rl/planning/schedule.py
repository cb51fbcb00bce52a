"""One optimizer step as planned: the plan with its evidence, the loads predicted for every destination, and
their comparison with the counts of the dispatcher. No torch.

Owns the values of the `expert_schedule` and `expert_balance` events. Shapes: N samples, C columns, R
replicas, E expert-parallel ranks, L counted routed layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import BalanceConfig
from olmo_rl.planning.lending import Lent, folded
from olmo_rl.planning.loads import collection_loads, placeholder_routes, tail_routes
from olmo_rl.planning.objective import Bounds, Work, destination_loads, gap, lower_bounds, measure
from olmo_rl.planning.pads import Pads, PadWork, stripes
from olmo_rl.planning.sharing import Sharing, lay
from olmo_rl.types import NO_PADDING, ExpertLayout, Lending, Loan, PackPlan, Padding, Sample, Topology

_NAMED = 8  # destinations that a mismatch names


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepInput:
    """One optimizer batch as the planner sees it.

    `lengths` [N] tokens in order of arrival, N a multiple of the world size; `ids` seed a search; `loads`
    int32 [N, E, L], or None to plan by length alone; `seconds` overrides `balance.seconds`; `source` (a file)
    serves messages. `pads`: how rows are padded, None where they are not. Searches look at real tokens; the
    work that is reported, and the cap on destinations, count pads. `sharing`: which rows the samples have in
    common, None where every token is a row. `lent`: the loans that the step runs under, which `loads` count;
    None where every expert stays at home.
    """

    lengths: NDArray[np.int64]
    ids: Sequence[str]
    loads: NDArray[np.int32] | None
    budget: int
    topology: Topology
    balance: BalanceConfig
    seconds: float | None = None
    source: str | None = None
    pads: Pads | None = None
    sharing: Sharing | None = None
    lent: Lent | None = None

    @property
    def lending(self) -> Lending | None:
        return None if self.lent is None else self.lent.lending

    @property
    def at_home(self) -> StepInput:
        """The same step with every expert at home."""
        if self.lent is None:
            return self
        pads = None if self.pads is None else replace(self.pads, loads=self.lent.home, table=None)
        return replace(self, loads=self.lent.home, pads=pads, lent=None)

    def work(self, plan: PackPlan) -> Work:
        """The exact work of `plan`, pads included."""
        added = None if self.pads is None else self.pads.work(plan).by_rank(self.topology.ep_degree)
        return measure(plan, lengths=self.lengths, loads=self.loads, topology=self.topology, pads=added)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A plan with its work and its bounds. `before`: work of the order of arrival; `start`: name of the
    search's best start; `paths`: proposals by the path on which they were scored; `seconds`: time of each
    part; `origin`: planned; resumed from a checkpoint; or replanned, where a checkpoint held a plan of
    another topology or of other settings. Rank 0 sends it to all others.
    """

    plan: PackPlan
    before: Work
    after: Work
    bounds: Bounds
    start: str
    paths: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)
    origin: str = "planned"

    @property
    def gaps(self) -> tuple[float, float]:
        """J over its bound, minus 1: of the order of arrival and of the plan."""
        return (
            gap(self.before, bounds=self.bounds, base=self.before),
            gap(self.after, bounds=self.bounds, base=self.before),
        )

    def event(self, *, ids: Sequence[str]) -> dict[str, Any]:
        """Values of `expert_schedule`. `order`: positions rank by rank, column by column."""
        before, after = self.gaps
        return {
            "before": asdict(self.before),
            "after": asdict(self.after),
            "lower_bounds": asdict(self.bounds),
            "gap_before": before,
            "gap": after,
            "start": self.start,
            "origin": self.origin,
            "search": None if self.plan.search is None else asdict(self.plan.search),
            "paths": self.paths,
            "loans": None if self.plan.lending is None else loan_rows(self.plan.lending),
            "digest": schedule_digest(self, ids=ids),
            "order": self.plan.positions,
            "seconds": self.seconds,
        }


def loan_rows(lending: Lending) -> list[list[list[int]]]:
    """The loans of every routed layer as plain numbers: expert, host, slot, first, below."""
    return [
        [[loan.expert, loan.host, loan.slot, loan.first, loan.below] for loan in loans]
        for loans in lending.layers
    ]


def lending_of(rows: Sequence[Sequence[Sequence[int]]], *, guests: int) -> Lending:
    """The lending that `loan_rows` described."""
    layers = tuple(
        tuple(
            Loan(expert=expert, host=host, slot=slot, first=first, below=below)
            for expert, host, slot, first, below in loans
        )
        for loans in rows
    )
    return Lending(guests=guests, layers=layers)


def schedule_digest(schedule: Schedule, *, ids: Sequence[str]) -> str:
    """A hash that all ranks compare: of the samples in every cell, by id, of the loans and of the work of the
    plan.
    """
    cells = [[[ids[i] for i in pack] for pack in rank] for rank in schedule.plan.packs]
    lending = () if schedule.plan.lending is None else (schedule.plan.lending,)
    return hashlib.sha256(repr((cells, schedule.after, *lending)).encode()).hexdigest()


def step_loads(
    samples: Sequence[Sample], *, layout: ExpertLayout | None, topology: Topology, balance: BalanceConfig
) -> NDArray[np.int32] | None:
    """int32 [N, E, L]: destination loads of the layers that `balance.layer_stride` leaves; None without
    routes.
    """
    if layout is None or any(sample.routes is None for sample in samples):
        return None
    return collection_loads(samples, layout=layout, topology=topology, layer_stride=balance.layer_stride)


def known_schedule(
    plan: PackPlan,
    *,
    step: StepInput,
    arrival: PackPlan,
    seconds: dict[str, float],
    start: str = "arrival",
    paths: dict[str, int] | None = None,
    origin: str = "planned",
) -> Schedule:
    """The schedule of a plan that needs no search, under the loans of the step; `arrival` keeps the order of
    arrival.
    """
    after = step.work(plan)
    return Schedule(
        plan=replace(plan, lending=step.lending),
        before=after if plan is arrival else step.work(arrival),
        after=after,
        bounds=lower_bounds(
            lengths=step.lengths, loads=step.loads, topology=step.topology, budget=step.budget
        ),
        start=start,
        paths={} if paths is None else paths,
        seconds=seconds,
        origin=origin,
    )


def placement_floor(loads: NDArray[np.int32]) -> float:
    """Sum over layers of the busiest destination / of the mean one, all samples together: the lowest
    imbalance that any packing can reach without moving experts. 1 is even.
    """
    total = loads.sum(axis=0, dtype=np.int64)
    return float(total.max(axis=0).sum() / total.mean(axis=0).sum())


def shared_loads(
    samples: Sequence[Sample],
    *,
    layout: ExpertLayout,
    topology: Topology,
    padding: Padding = NO_PADDING,
) -> NDArray[np.int64]:
    """int64 [E, L]: assignments to every destination from the rows of one pack of samples that share rows."""
    laid = lay(samples, replayed=True, padding=padding)
    owner = topology.destinations(layout.num_experts)
    loads = np.zeros((topology.ep_degree, len(layout.routed_layers)), dtype=np.int64)
    first = laid.first
    if stripes([sample.has_placeholders for sample in samples]):
        pads = placeholder_routes(len(first) - laid.real_rows, layout=layout, topology=topology)
        _add_loads(loads, pads, owner=owner)
        first = first[: laid.real_rows]
    times, start = np.bincount(first, minlength=len(laid.row_of)), 0  # rows that take each token's routes
    for sample in samples:
        assert sample.routes is not None, "loads are counted from routes"
        tail = tail_routes(sample.id, layout=layout, topology=topology)[None]
        routes = np.concatenate([sample.routes.astype(np.int64), tail])
        mine = times[start : start + len(sample)]
        start += len(sample)
        _add_loads(loads, routes.repeat(mine, axis=0), owner=owner)
    return loads


def _add_loads(loads: NDArray[np.int64], routes: NDArray[np.integer], *, owner: NDArray[np.int64]) -> None:
    """Count `routes` [rows, L, K] into `loads` [E, L], in place."""
    for layer in range(loads.shape[1]):
        loads[:, layer] += np.bincount(owner[routes[:, layer]].ravel(), minlength=len(loads))


def layer_skews(loads: NDArray[np.int64]) -> tuple[float, ...]:
    """[C, R, E, L] -> [L]: of every layer the busiest destination over the mean one, both summed over columns
    and replicas; 1 is even, also where nothing is sent.
    """
    busiest, mean = loads.max(axis=2).sum(axis=(0, 1)), loads.mean(axis=2).sum(axis=(0, 1))
    return tuple(float(a / b) if b > 0 else 1.0 for a, b in zip(busiest, mean, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forecast:
    """Predicted counts of the dispatcher: `loads` int64 [C, R, E, L] of the global layer ids `layers`. Where
    experts are lent, every destination has `slots` slots, and loads are by slot, [C, R, S, L].
    `arrival` [L]: the skew of every layer in the order of arrival, None where it was kept or is not known.
    """

    loads: NDArray[np.int64]
    layers: tuple[int, ...]
    slots: int = 1
    arrival: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        plan: PackPlan,
        *,
        loads: NDArray[np.int32],
        layout: ExpertLayout,
        topology: Topology,
        layer_stride: int,
        pads: PadWork | None = None,
        slots: int = 1,
        arrival: tuple[float, ...] | None = None,
    ) -> Forecast:
        """`pads`: work that the padding of this plan adds, where rows are padded. `slots`: of a destination,
        where `loads` and `pads` are by slot. `arrival`: skews of layers to compare with.
        """
        predicted = destination_loads(plan, loads=loads, topology=topology, pads=pads)
        layers = layout.routed_layers[::layer_stride]
        return cls(loads=predicted, layers=layers, slots=slots, arrival=arrival)

    @classmethod
    def of_shared(
        cls,
        plan: PackPlan,
        *,
        samples: Sequence[Sample],
        layout: ExpertLayout,
        topology: Topology,
        layer_stride: int,
        padding: Padding = NO_PADDING,
    ) -> Forecast:
        """Of packs whose samples share rows: every row counts once, pads too."""
        cells = np.stack(
            [
                [
                    shared_loads(
                        [samples[i] for i in pack], layout=layout, topology=topology, padding=padding
                    )[:, ::layer_stride]
                    for pack in rank
                ]
                for rank in plan.packs
            ]
        )  # [W, C, E, L]
        by_replica = cells.reshape(topology.num_replicas, topology.ep_degree, *cells.shape[1:])
        return cls(
            loads=by_replica.sum(axis=1).transpose(1, 0, 2, 3), layers=layout.routed_layers[::layer_stride]
        )

    def compare(self, observed: NDArray[np.int64]) -> dict[str, Any]:
        """Values of `expert_balance`: predicted and observed assignments [L][E] over the step, expert work of
        both, and the cells (column, replica, destination, layer, and slot where experts are lent) where they
        differ, the first few by name.
        """
        differs = np.argwhere(observed != self.loads)
        named = [
            {
                "column": int(c),
                "replica": int(r),
                "destination": int(e) // self.slots,
                **({"slot": int(e) % self.slots} if self.slots > 1 else {}),
                "layer": self.layers[i],
                "predicted": int(self.loads[c, r, e, i]),
                "observed": int(observed[c, r, e, i]),
            }
            for c, r, e, i in differs[:_NAMED]
        ]
        ranks = self.loads.shape[2] // self.slots
        predicted, counted = folded(self.loads, ranks=ranks), folded(observed, ranks=ranks)
        return {
            "world_size": predicted.shape[1] * ranks,
            "ep_degree": ranks,
            "layers": list(self.layers),
            "predicted": predicted.sum(axis=(0, 1)).T.tolist(),
            "observed": counted.sum(axis=(0, 1)).T.tolist(),
            "predicted_expert_work": int(predicted.max(axis=(1, 2)).sum()),
            "expert_work": int(counted.max(axis=(1, 2)).sum()),
            "layer_skew": list(layer_skews(counted)),
            "layer_skew_before": None if self.arrival is None else list(self.arrival),
            "equal": len(differs) == 0,
            "mismatch": len(differs),
            "where": named,
        }
