"""Batches and arms of the planner's benchmark, and how a plan is judged.

Batches come from the law of `planning.synthetic` or from a user's panel: an .npz with `lengths` [N] and
`loads` [N, E, L] and, optionally, the numbers `world_size`, `ep_degree`, `budget`. A malformed panel is
refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.loads import tail_routes
from olmo_rl.planning.objective import (
    Work,
    destination_loads,
    gap,
    lower_bounds,
    measure,
)
from olmo_rl.planning.planners import schedule_step
from olmo_rl.planning.schedule import Schedule, StepInput
from olmo_rl.planning.searches.starts import karmarkar_karp_ranks, order_plan
from olmo_rl.planning.synthetic import draw_lengths, expert_counts
from olmo_rl.types import ExpertLayout, PackPlan, Refusal, Topology

ARMS = (
    "arrival",
    "kk_arrival",
    "kk_descending",
    "length_anneal",
    "reference",
    "anneal",
)
# Shares of the step that the order of arrival is assumed to spend on experts, tokens and pairs.
SHARES = (0.5, 0.35, 0.15)


class PlannerSize(NamedTuple):
    """One column of the table: samples, ranks, EP degree, routed layers, experts; held-out batches, full
    and quick.
    """

    name: str
    samples: int
    world: int
    ep: int
    layers: int
    experts: int
    batches: int
    quick: int


SETTINGS = (
    PlannerSize("N128 W8 EP4 L32", 128, 8, 4, 32, 64, 20, 6),
    PlannerSize("N256 W16 EP8 L48", 256, 16, 8, 48, 128, 20, 4),
    PlannerSize("N512 W32 EP8 L48", 512, 32, 8, 48, 128, 20, 3),
    PlannerSize("N1024 W64 EP16 L60", 1024, 64, 16, 60, 256, 20, 1),
)
TOP_K, BUDGET = 8, 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One batch to plan."""

    lengths: NDArray[np.int64]
    loads: NDArray[np.int32]
    ids: tuple[str, ...]
    topology: Topology
    budget: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One arm on one batch. `models`: simulated step over that of the order of arrival."""

    setting: str
    batch: int
    arm: str
    gap: float
    work: Work
    models: tuple[float, float, float]
    start_ms: float
    search_ms: float
    verify_ms: float
    proposals: int


def draw_batch(setting: PlannerSize, *, seed: int) -> Batch:
    """A held-out batch of the law; loads are counted from expert counts and tails, as real routes would
    give them.
    """
    topology = Topology(setting.world, setting.ep)
    layout = ExpertLayout(
        num_experts=setting.experts, top_k=TOP_K, routed_layers=tuple(range(setting.layers))
    )
    drawn = draw_lengths(setting.samples, seed=seed)
    owner = topology.destinations(setting.experts)
    loads = np.zeros((setting.samples, setting.ep, setting.layers), dtype=np.int32)
    for i, counts in enumerate(expert_counts(drawn, layout=layout, seed=seed)):
        tail = owner[tail_routes(drawn.ids[i], layout=layout, topology=topology)]
        for rank in range(setting.ep):
            loads[i, rank] = counts[:, owner == rank].sum(axis=1) + (tail == rank).sum(axis=1)
    return Batch(lengths=drawn.lengths, loads=loads, ids=drawn.ids, topology=topology, budget=BUDGET)


def read_panel(path: str) -> Batch:
    """The user's own batch. Refuses a file that lacks an array or whose shapes, types or signs do not fit."""
    try:
        with np.load(path, allow_pickle=False) as panel:
            arrays = {name: panel[name] for name in panel.files}
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: not an .npz panel: {error}") from None
    reasons = [f"{path}: no array {name!r}" for name in ("lengths", "loads") if name not in arrays]
    if reasons:
        raise Refusal(reasons)
    lengths, loads = arrays["lengths"], arrays["loads"]
    for name, array, axes in (("lengths", lengths, 1), ("loads", loads, 3)):
        if array.dtype.kind not in "iu" or array.ndim != axes or not array.size:
            reasons.append(
                f"{path}: {name} must be integers with {axes} axes, not {array.dtype} {array.shape}"
            )
        elif int(array.min()) < (1 if name == "lengths" else 0):
            reasons.append(f"{path}: {name} holds {int(array.min())}")
        elif name == "loads" and int(array.max()) >= 2**31:
            reasons.append(f"{path}: loads holds {int(array.max())}, more than an int32")
    if not reasons and len(lengths) != len(loads):
        reasons.append(f"{path}: {len(lengths)} lengths for {len(loads)} loads")
    if reasons:
        raise Refusal(reasons)
    given = {name: int(arrays[name]) for name in ("world_size", "ep_degree", "budget") if name in arrays}
    ep = given.get("ep_degree", loads.shape[1])
    if ep != loads.shape[1]:
        raise Refusal(f"{path}: ep_degree={ep}, but loads have {loads.shape[1]} destinations")
    return Batch(
        lengths=lengths.astype(np.int64),
        loads=loads.astype(np.int32),
        ids=tuple(str(i) for i in range(len(lengths))),
        topology=Topology(given.get("world_size", 2 * ep), ep),
        budget=given.get("budget", max(BUDGET, int(lengths.max()))),
    )


def simulated_steps(plan: PackPlan, batch: Batch, base: Work) -> tuple[float, float, float]:
    """The time of a step if replicas synchronise at the gradient reduction, at every layer, or as the strict
    sum of maxima.

    Costs are SHARES of the order of arrival's expert, token and pair work; ranks of a replica meet at every
    layer.
    """
    assert base.expert_work is not None
    cost = [s / w for s, w in zip(SHARES, (base.expert_work, base.token_work, base.pair_work), strict=True)]
    load = destination_loads(plan, loads=batch.loads, topology=batch.topology)  # [C, R, E, L]
    columns, replicas, ep, layers = load.shape
    n = batch.lengths
    sums = [[(n[list(p)].sum(), (n[list(p)] ** 2).sum()) for p in rank] for rank in plan.packs]
    dense = np.array(sums, dtype=np.float64).reshape(replicas, ep, columns, 2) @ np.array(cost[1:])
    seconds = load * cost[0] + dense.transpose(2, 0, 1)[..., None] / layers
    replica = seconds.max(axis=2)  # [C, R, L]
    work = measure(plan, lengths=n, loads=batch.loads, topology=batch.topology)
    assert work.expert_work is not None
    strict = work.expert_work * cost[0] + work.token_work * cost[1] + work.pair_work * cost[2]
    return float(replica.sum(axis=(0, 2)).max()), float(replica.max(axis=1).sum()), float(strict)


def searched(batch: Batch, balance: BalanceConfig, *, blind: bool = False) -> Schedule:
    """One planned batch; `blind` hides the loads from the search."""
    return schedule_step(
        StepInput(
            lengths=batch.lengths,
            ids=batch.ids,
            loads=None if blind else batch.loads,
            budget=batch.budget,
            topology=batch.topology,
            balance=balance,
        )
    )


def run_arms(batch: Batch, *, setting: str, index: int) -> Iterator[Row]:
    """Every arm on one batch, each plan rescored from scratch."""
    anneal = BalanceConfig(kind=BalanceKind.anneal, seconds=60.0)
    arms: dict[str, Callable[[], Schedule | PackPlan]] = {
        "arrival": lambda: searched(batch, BalanceConfig()),
        "kk_arrival": lambda: kk_plan(batch, descending=False),
        "kk_descending": lambda: kk_plan(batch, descending=True),
        "length_anneal": lambda: searched(batch, anneal, blind=True),
        "reference": lambda: searched(batch, BalanceConfig(kind=BalanceKind.reference, seconds=0.25)),
        "anneal": lambda: searched(batch, anneal),
    }
    bounds = lower_bounds(
        lengths=batch.lengths, loads=batch.loads, topology=batch.topology, budget=batch.budget
    )
    base: Work | None = None
    for arm in ARMS:
        began = time.perf_counter()
        found = arms[arm]()
        spent = {"start": time.perf_counter() - began, "search": 0.0, "verify": 0.0}
        plan = found if isinstance(found, PackPlan) else found.plan
        spent = spent if isinstance(found, PackPlan) else found.seconds
        work = measure(plan, lengths=batch.lengths, loads=batch.loads, topology=batch.topology)
        if base is None:
            base, steps = work, simulated_steps(plan, batch, work)
        models = simulated_steps(plan, batch, base)
        yield Row(
            setting=setting,
            batch=index,
            arm=arm,
            gap=gap(work, bounds=bounds, base=base),
            work=work,
            models=(models[0] / steps[0], models[1] / steps[1], models[2] / steps[2]),
            start_ms=1e3 * spent["start"],
            search_ms=1e3 * spent["search"],
            verify_ms=1e3 * spent["verify"],
            proposals=plan.search.proposals if plan.search else 0,
        )


def kk_plan(batch: Batch, *, descending: bool) -> PackPlan:
    """Karmarkar-Karp ranks, within a rank the order of arrival (as RL frameworks use it) or falling
    lengths.
    """
    ranks = karmarkar_karp_ranks(batch.lengths, world_size=batch.topology.world_size)
    return order_plan(
        ranks if descending else np.sort(ranks, axis=1), lengths=batch.lengths, budget=batch.budget
    )
