"""`balance=anneal`: one chain of simulated annealing over a fixed number of proposals, from the best start.

Owns the cooling, the deadline and the arrays of a chain. The chain itself is a kernel per
level (`cells`, `order`). The temperature is a share of J that falls geometrically; no clock and no floating
point enters an accept, so that a plan that no deadline cut is equal on every machine.

Shapes as in `moves.State`.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import BalanceLevel
from olmo_rl.planning import moves
from olmo_rl.planning.cells import anneal_cells
from olmo_rl.planning.kernels import HAVE_NUMBA, compile_for
from olmo_rl.planning.moves import State
from olmo_rl.planning.objective import Work
from olmo_rl.planning.order import anneal_order
from olmo_rl.planning.packing import plan_step
from olmo_rl.planning.repack import Order, rebuild
from olmo_rl.planning.starts import by_length, cells_plan, order_plan
from olmo_rl.planning.weights import Weights
from olmo_rl.types import PackPlan, SearchLog, Topology

CHUNKS = 128
KEPT, REPACKED, EQUALISED = "boundaries_kept", "columns_repacked", "world_equalised"
# First temperature as a share of J / N, which is about what a swap of similar samples changes, and last /
# first.
HEAT, COOLED = 0.2, 0.02
# How much more a unit of work above the guard weighs, in the first and in the second half. RELAXED may pass
# through plans above the guard while it is warm, which finds better ones; STRICT is for where it does not
# come back.
RELAXED, STRICT = (0, 20), (20, 20)
# Proposals between two looks at the clock: milliseconds.
STEPS, UNCOMPILED_STEPS = 10_000, 64
_LANES = 16


def compile_chain(level: BalanceLevel) -> None:
    """Compile the kernels of `level` for the types that `anneal` calls them with, or load them from the
    cache.
    """
    if not HAVE_NUMBA:
        return
    lengths, topology = np.ones(2, dtype=np.int64), Topology(2)
    plan = plan_step(lengths, budget=1, topology=topology)
    state = _state(plan, lengths=lengths, loads=None, topology=topology, columns=1, seed=0)
    if level is BalanceLevel.cells:
        compile_for(anneal_cells, 1, 1, 1, deviates(), *state)
    else:
        state.book[moves.BUDGET] = 1
        compile_for(anneal_order, 1, 1, 1, deviates(), *state, *_order(plan, state))


def default_proposals(samples: int, *, level: BalanceLevel) -> int:
    """Proposals of one batch: about 40 ms for 128 samples, half a second (`order`: a second) for 1,024."""
    return max(120_000, 700 * samples) if level is BalanceLevel.cells else max(100_000, 400 * samples)


def deviates() -> NDArray[np.int64]:
    """int64 [4096]: quantiles of the unit exponential in units of 2^-16."""
    return np.rint(-np.log((np.arange(4096) + 0.5) / 4096) * 65536).astype(np.int64)


def temperatures(objective: int, *, samples: int) -> NDArray[np.int64]:
    """int64 [CHUNKS]: the geometric cooling. The shares are rounded so that no libm shows in them."""
    shares = np.rint(2**24 * COOLED ** (np.arange(CHUNKS) / (CHUNKS - 1))).astype(np.int64)
    first = int(objective * HEAT / samples)
    return np.array([(first * int(share)) >> 24 for share in shares], dtype=np.int64)


def _state(
    plan: PackPlan,
    *,
    lengths: NDArray[np.int64],
    loads: NDArray[np.int32] | None,
    topology: Topology,
    columns: int,
    seed: int,
) -> State:
    """Arrays of `plan` with room for `columns`; `book` is still zero."""
    n, world = len(lengths), topology.world_size
    ep, layers = (1, 0) if loads is None else loads.shape[1:]
    replicas = topology.num_replicas if loads is not None else world
    padded = -(-layers // _LANES) * _LANES
    h = np.zeros((n + 1, ep, padded), dtype=np.int32)
    if loads is not None:
        h[:n, :, :layers] = loads
    order = by_length(lengths)
    sample = np.zeros((n + 1, 6), dtype=np.int64)
    sample[:n, moves.TOKENS] = lengths
    sample[:n, moves.SQUARES] = lengths * lengths
    sample[order, moves.PLACE] = np.arange(n)
    load = np.zeros((columns, replicas, ep, padded), dtype=np.int32)
    cell = np.zeros((3, columns, world), dtype=np.int64)
    for w, packs in enumerate(plan.packs):
        for c, pack in enumerate(packs):
            members = list(pack)
            sample[members, moves.RANK], sample[members, moves.COLUMN] = w, c
            load[c, w // ep] += h[members].sum(axis=0)
            cell[:, c, w] = len(members), lengths[members].sum(), (lengths[members] ** 2).sum()
    peak = load.max(axis=2)
    works = np.stack([peak.max(axis=1).sum(axis=1), cell[1].max(axis=1), cell[2].max(axis=1)], axis=1)
    return State(
        sample=sample,
        h=h,
        load=load,
        peak=peak,
        peaks=np.zeros((columns, 3, padded), dtype=np.int32),
        cell=cell,
        columns=works.astype(np.int64),
        book=np.zeros(moves.BOOK_SLOTS, dtype=np.int64),
        by_length=order,
        best=np.zeros(n, dtype=np.int64),
        chain=np.array([seed], dtype=np.uint64),
    )


def _book(state: State, *, weights: Weights, work: Work, guard: Work, budget: int, cap: int | None) -> None:
    """Fill in totals, weights and limits. `work` is the start's, for the chain to beat."""
    book, excess = state.book, 0
    if cap is not None:
        book[moves.CAP] = cap
        excess = int(np.maximum(state.peak.max(axis=2, initial=0).astype(np.int64) - cap, 0).sum())
    totals = state.columns.sum(axis=0)
    book[: moves.W_EXPERT] = totals
    book[moves.W_EXPERT : moves.G_EXPERT] = weights.expert, weights.token, weights.pair, weights.excess
    book[moves.G_EXPERT : moves.BUDGET] = guard.expert_work or 0, guard.token_work, guard.pair_work
    book[moves.BUDGET], book[moves.COLUMNS], book[moves.EXCESS] = budget, work.packs_per_rank, excess
    works = (book[: moves.W_EXPERT] * book[moves.W_EXPERT : moves.W_EXCESS]).sum()
    book[moves.OBJECTIVE] = works + weights.excess * excess
    book[moves.BEST] = weights.objective(work)
    if cap is not None and (work.max_destination_load or 0) > cap:
        # No start keeps the cap: whatever keeps it is better, and no guard stands in its way.
        book[moves.G_EXPERT : moves.BUDGET] = book[moves.BEST] = 2**62


def _order(plan: PackPlan, state: State) -> Order:
    """Arrays for the order of `plan`'s ranks."""
    slots = np.array([[i for pack in rank for i in pack] for rank in plan.packs], dtype=np.int64)
    columns, (world, n) = len(state.columns), slots.shape
    order = Order(
        slots=slots,
        edges=np.zeros((world, columns + 1), dtype=np.int64),
        greedy=np.zeros(world, dtype=np.int64),
        fresh=np.zeros((2, n + 1), dtype=np.int64),
        delta=np.zeros((columns, 2, *state.load.shape[2:]), dtype=np.int32),
        touched=np.zeros((columns, 2), dtype=np.int64),
        sums=np.zeros((2, columns, 2), dtype=np.int64),
        works=np.zeros((columns, 3), dtype=np.int64),
    )
    s = state
    packs = rebuild(
        s.sample,
        s.h,
        s.load,
        s.peak,
        s.cell,
        s.columns,
        s.book,
        slots,
        order.edges,
        order.greedy,
        order.fresh,
    )
    assert packs == plan.packs_per_rank, "the start is not what the greedy packer makes of its order"
    return order


def anneal(
    start: PackPlan,
    *,
    work: Work,
    guard: Work,
    lengths: NDArray[np.int64],
    loads: NDArray[np.int32] | None,
    topology: Topology,
    budget: int,
    level: BalanceLevel,
    weights: Weights,
    goal: int,
    pressure: tuple[int, int] = RELAXED,
    seed: int,
    proposals: int | None,
    cap: int | None,
    seconds: float | None,
) -> tuple[PackPlan | None, SearchLog, dict[str, int]]:
    """The best plan found that beats `work`, the start's, in J, is no worse than `guard` and keeps the cap,
    or None; the scoring paths of
    level `order`.

    `goal` is J of the bounds. `seconds` is a safety net: the chain stops at the next look at the
    clock, and the log says so.
    """
    began = time.monotonic()
    limit = default_proposals(len(lengths), level=level) if proposals is None else proposals
    columns = start.packs_per_rank
    state = _state(start, lengths=lengths, loads=loads, topology=topology, columns=columns, seed=seed)
    _book(state, weights=weights, work=work, guard=guard, budget=budget, cap=cap)
    order = _order(start, state) if level is BalanceLevel.order else None
    book = state.book
    # A window of 0 (fewer than three samples) has no neighbours: partners then come from anywhere.
    window = min(max(8, len(lengths) // 32), (len(lengths) - 1) // 2)
    table, done, reason = deviates(), 0, "proposals"
    for chunk, temperature in enumerate(
        temperatures(int(book[moves.OBJECTIVE]), samples=len(lengths)).tolist()
    ):
        steps = limit * (chunk + 1) // CHUNKS - done
        book[moves.PRESSURE] = pressure[2 * chunk // CHUNKS]
        while steps:
            some = min(steps, STEPS if HAVE_NUMBA else UNCOMPILED_STEPS)
            if order is None:
                anneal_cells(some, temperature, window, table, *state)
            else:
                anneal_order(some, temperature, window, table, *state, *order)
            done, steps = done + some, steps - some
            if seconds is not None and time.monotonic() - began > seconds:
                break
        if book[moves.FOUND] and book[moves.BEST] == goal:
            reason = "bounds"
            break
        if seconds is not None and time.monotonic() - began > seconds and done < limit:
            reason = "deadline"
            break
    log = SearchLog(
        seed=seed,
        proposals=done,
        accepted=int(book[moves.ACCEPTED]),
        stop_reason=reason,
        rejected={
            "objective": int(book[moves.WORSE]),
            "budget": int(book[moves.OVER_BUDGET]),
            "packs_per_rank": int(book[moves.MORE_PACKS]),
        },
    )
    names = (KEPT, REPACKED, EQUALISED)
    paths = {n: int(k) for n, k in zip(names, book[moves.KEPT :], strict=True)} if order is not None else {}
    if not book[moves.FOUND]:
        return None, log, paths
    if order is None:
        return cells_plan(state.best, topology=topology, columns=columns), log, paths
    ranks = state.best.reshape(topology.world_size, -1)
    return order_plan(ranks, lengths=lengths, budget=budget), log, paths
