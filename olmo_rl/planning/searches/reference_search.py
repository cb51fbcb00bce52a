"""`balance=reference`: the bounded swap search in plain NumPy, an oracle for the kernels and an arm of the
benchmark.

Owns the greedy placements, the proposals aimed at overloaded destinations, strict descent on J with a
smooth surrogate on exact plateaus, and a guard on every metric. It permutes the order; the greedy packer
forms the packs.

Shapes: N samples, W ranks, C columns, R replicas, E expert-parallel ranks, L layers; `h` int64 [N, E, L],
`load` int64 [C, R, E, L], `tokens` and `pairs` int64 [C, W].
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.objective import Bounds, Work, measure
from olmo_rl.planning.packing import RankPacks, equalise, pack_consecutively
from olmo_rl.planning.searches.starts import (
    SearchProblem,
    SearchResult,
    Start,
    Weights,
    arrival_ranks,
    by_length,
    order_plan,
)
from olmo_rl.types import PackPlan, SearchLog, Topology

I64 = NDArray[np.int64]

PROPOSALS, PATIENCE = 1024, 256
# Ways to score a proposal: pack boundaries stay, columns of two ranks change, all ranks are packed again.
KEPT, REPACKED, EQUALISED = "boundaries_kept", "columns_repacked", "world_equalised"
METRICS = tuple(field.name for field in fields(Work))


class BatchArrays(NamedTuple):
    """The constants of a search: `n` int64 [N] lengths, `h` loads, without layers where none are known."""

    n: I64
    h: I64
    topology: Topology
    budget: int
    weights: Weights


def batch_of(problem: SearchProblem) -> BatchArrays:
    n, loads = problem.lengths, problem.loads
    h = np.zeros((len(n), 1, 0), dtype=np.int64) if loads is None else loads.astype(np.int64)
    return BatchArrays(n=n, h=h, topology=problem.topology, budget=problem.budget, weights=problem.weights)


def reference_start(problem: SearchProblem) -> tuple[Start, I64]:
    """The start of least J that is no worse than the order of arrival on any metric, and its ranks [W, n]:
    the order of arrival, or samples placed greedily in that order or by length.
    """
    batch = batch_of(problem)
    candidates = [(problem.arrival, arrival_ranks(len(batch.n), world_size=batch.topology.world_size))]
    for name, order in (("arrival", np.arange(len(batch.n))), ("length", by_length(batch.n))):
        ranks = greedy_ranks(order, n=batch.n, h=batch.h, topology=batch.topology, weights=batch.weights)
        plan = order_plan(ranks, lengths=batch.n, budget=batch.budget)
        work = measure(plan, lengths=batch.n, loads=problem.loads, topology=batch.topology)
        if worse_metric(work, guard=problem.arrival.work) is None:
            candidates.append((Start(name=f"greedy_{name}", plan=plan, work=work), ranks))
    return min(candidates, key=lambda c: (batch.weights.objective(c[0].work), c[0].work.packs_per_rank))


@dataclass(kw_only=True, slots=True)
class Packed:
    """An order, the packs it makes and their sums."""

    ranks: list[list[int]]
    greedy: list[RankPacks]
    packs: list[RankPacks]
    load: I64
    tokens: I64
    pairs: I64


def greedy_ranks(order: I64, *, n: I64, h: I64, topology: Topology, weights: Weights) -> I64:
    """int64 [W, N / W]: `order` dealt in rows of W, every sample to the free rank that then carries least.

    What a rank carries: its replica's sum over layers of the busiest destination, its tokens and its pairs,
    weighed as in J. Whole ranks stand in for packs, which are not known before the last sample is placed.
    """
    world, ep = topology.world_size, h.shape[1]
    rows = order.reshape(-1, world)
    ranks = np.empty((world, len(rows)), dtype=np.int64)
    load = np.zeros((world // ep, *h.shape[1:]), dtype=np.int64)
    tokens, pairs = np.zeros(world, dtype=np.int64), np.zeros(world, dtype=np.int64)
    for k, row in enumerate(rows):
        free = np.ones(world, dtype=bool)
        for i in row[np.argsort(-n[row], kind="stable")]:
            after = np.repeat((load + h[i]).max(axis=1).sum(axis=1), ep)
            carried = weights.expert * after + weights.token * tokens + weights.pair * pairs
            w = int(np.argmin(np.where(free, carried, np.iinfo(np.int64).max)))
            free[w], ranks[w, k] = False, i
            load[w // ep] += h[i]
            tokens[w] += n[i]
            pairs[w] += n[i] ** 2
    return ranks


def pack_order(ranks: list[list[int]], *, batch: BatchArrays) -> Packed:
    """Packs and sums of `ranks` from scratch."""
    ep = batch.h.shape[1]
    greedy = [pack_consecutively(rank, lengths=batch.n, budget=batch.budget) for rank in ranks]
    packs = equalise(greedy)
    columns, world = len(packs[0]), len(ranks)
    packed = Packed(
        ranks=ranks,
        greedy=greedy,
        packs=packs,
        load=np.zeros((columns, world // ep, *batch.h.shape[1:]), dtype=np.int64),
        tokens=np.zeros((columns, world), dtype=np.int64),
        pairs=np.zeros((columns, world), dtype=np.int64),
    )
    for w in range(world):
        for c in range(columns):
            _add(packed, w, c, packs[w][c], batch, 1)
    return packed


def _add(packed: Packed, w: int, c: int, samples: tuple[int, ...], batch: BatchArrays, sign: int) -> None:
    members = list(samples)
    packed.load[c, w // batch.h.shape[1]] += sign * batch.h[members].sum(axis=0)
    packed.tokens[c, w] += sign * batch.n[members].sum()
    packed.pairs[c, w] += sign * (batch.n[members] ** 2).sum()


def swapped(
    packed: Packed, *, i: tuple[int, int], j: tuple[int, int], batch: BatchArrays
) -> tuple[Packed, str]:
    """`packed` with the samples at (rank, slot) i and j exchanged, and the scoring path this took."""
    ranks = list(packed.ranks)
    for w in {i[0], j[0]}:
        ranks[w] = list(ranks[w])
    (w1, k1), (w2, k2) = i, j
    ranks[w1][k1], ranks[w2][k2] = packed.ranks[w2][k2], packed.ranks[w1][k1]
    greedy = list(packed.greedy)
    for w in {w1, w2}:
        greedy[w] = pack_consecutively(ranks[w], lengths=batch.n, budget=batch.budget)
    columns = len(packed.packs[0])
    if max(len(packs) for packs in greedy) != columns:
        return pack_order(ranks, batch=batch), EQUALISED
    equal = list(packed.packs)
    packs = equalise(greedy)
    new = Packed(
        ranks=ranks,
        greedy=greedy,
        packs=equal,
        load=packed.load.copy(),
        tokens=packed.tokens.copy(),
        pairs=packed.pairs.copy(),
    )
    path = KEPT
    for w in sorted({w1, w2}):
        equal[w] = packs[w]
        for c in range(columns):
            before, after = packed.packs[w][c], packs[w][c]
            if len(before) != len(after):
                path = REPACKED
            if before != after:
                _add(new, w, c, before, batch, -1)
                _add(new, w, c, after, batch, 1)
    return new, path


def work_of(packed: Packed, *, experts: bool) -> Work:
    """The work of the packs, from their sums."""
    token_work, pair_work = int(packed.tokens.max(axis=1).sum()), int(packed.pairs.max(axis=1).sum())
    columns = len(packed.load)
    if not experts:
        return Work(
            expert_work=None,
            token_work=token_work,
            pair_work=pair_work,
            skew_mean=None,
            skew_max=None,
            max_destination_load=None,
            packs_per_rank=columns,
        )
    peak = packed.load.max(axis=2)
    skew = peak.sum(axis=-1) / packed.load.mean(axis=2).sum(axis=-1)
    return Work(
        expert_work=int(peak.max(axis=1).sum()),
        token_work=token_work,
        pair_work=pair_work,
        skew_mean=float(skew.mean()),
        skew_max=float(skew.max()),
        max_destination_load=int(peak.max()),
        packs_per_rank=columns,
    )


def surrogate(packed: Packed, *, batch: BatchArrays) -> float:
    """J with every maximum replaced by a log-sum-exp: it still falls when a maximum that is not alone
    falls.
    """

    def smooth(values: NDArray[np.int64], weight: int) -> float:
        if not weight or not values.size:
            return 0.0
        top = values.max(axis=0, keepdims=True)
        scale = max(float(values.mean()) / 50, 1.0)
        soft = top[0] + scale * np.log(np.exp((values - top) / scale).sum(axis=0))
        return weight * float(soft.sum())

    columns, replicas, ep, layers = packed.load.shape
    blocks = packed.load.reshape(columns, replicas * ep, layers).transpose(1, 0, 2)
    w = batch.weights
    return smooth(blocks, w.expert) + smooth(packed.tokens.T, w.token) + smooth(packed.pairs.T, w.pair)


def worse_metric(work: Work, *, guard: Work) -> str | None:
    """The first metric on which `work` is above `guard`."""
    for name in METRICS:
        new, old = getattr(work, name), getattr(guard, name)
        # Skews are ratios: equal ones may differ in the last bit.
        if old is not None and new > old + (1e-12 if isinstance(old, float) else 0):
            return name
    return None


def proposals(packed: Packed, *, batch: BatchArrays, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Endless pairs of samples for the present `packed`: three of four aimed at an overloaded destination,
    half of these at a partner of similar length.
    """
    n, h, world = batch.n, batch.h, batch.topology.world_size
    order = by_length(n)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    columns, replicas, ep, layers = packed.load.shape
    cell_of = np.empty((len(n), 2), dtype=np.int64)
    for w in range(world):
        for c, pack in enumerate(packed.packs[w]):
            cell_of[list(pack)] = c, w // ep
    peak = packed.load.max(axis=2)
    # How far the busiest destination of a block stands above the mean replica: what a good swap takes away.
    over = (packed.load - peak.mean(axis=1, keepdims=True)[:, :, None]).clip(min=0).sum(axis=-1).ravel()
    window = max(8, len(n) // 32)
    while True:
        if rng.random() >= 0.75 or not layers or over.sum() == 0:
            i, j = (int(x) for x in rng.integers(0, len(n), size=2))
            yield i, j
            continue
        block = int(rng.choice(len(over), p=over / over.sum()))
        c, r, e = block // (replicas * ep), block // ep % replicas, block % ep
        inside = np.flatnonzero((cell_of[:, 0] == c) & (cell_of[:, 1] == r))
        heavy = inside[np.argsort(-h[inside, e].sum(axis=-1), kind="stable")][: max(1, len(inside) // 4)]
        i = int(rng.choice(heavy))
        outside = np.flatnonzero((cell_of[:, 0] != c) | (cell_of[:, 1] != r))
        if not len(outside):
            continue
        if rng.random() < 0.5:
            near = outside[np.abs(place[outside] - place[i]) <= window]
            outside = near if len(near) else outside
        some = rng.choice(outside, size=min(16, len(outside)), replace=False)
        # Complementary: light where the block is heaviest, heavy elsewhere.
        weight = packed.load[c, r] - packed.load[c, r].mean(axis=0)
        yield i, int(some[np.argmin((h[some] * weight).sum(axis=(1, 2)))])


def search_reference(start: I64, *, problem: SearchProblem) -> tuple[PackPlan, dict[str, int]]:
    """Strict descent from `start` [W, n], which is also the guard: the plan with its log, and how often each
    way of scoring was taken.

    Only a proposal in progress outlives `problem.seconds`.
    """
    batch, experts, bounds = batch_of(problem), problem.loads is not None, problem.bounds
    began = time.monotonic()
    rng = np.random.default_rng(problem.seed)
    packed = pack_order([list(rank) for rank in start.tolist()], batch=batch)
    guard = work = work_of(packed, experts=experts)
    limit = PROPOSALS if problem.proposals is None else problem.proposals
    rejected = dict.fromkeys(("objective", *METRICS), 0)
    paths = dict.fromkeys((KEPT, REPACKED, EQUALISED), 0)
    where = {i: (w, k) for w, rank in enumerate(packed.ranks) for k, i in enumerate(rank)}
    pairs = proposals(packed, batch=batch, rng=rng)
    smooth: float | None = None
    done = accepted = idle = 0
    reason = "proposals"
    while done < limit:
        if time.monotonic() - began > problem.seconds:
            reason = "deadline"
            break
        if idle >= PATIENCE:
            reason = "no_progress"
            break
        if all(getattr(work, f.name) == getattr(bounds, f.name) for f in fields(Bounds)):
            reason = "bounds"
            break
        i, j = next(pairs)
        done, idle = done + 1, idle + 1
        new, path = swapped(packed, i=where[i], j=where[j], batch=batch)
        paths[path] += 1
        new_work = work_of(new, experts=experts)
        change = batch.weights.objective(new_work) - batch.weights.objective(work)
        if change == 0 and smooth is None:
            smooth = surrogate(packed, batch=batch)
        flat = change == 0 and smooth is not None and surrogate(new, batch=batch) < smooth * (1 - 1e-12)
        if change >= 0 and not flat:
            rejected["objective"] += 1
            continue
        metric = worse_metric(new_work, guard=guard)
        if metric is not None:
            rejected[metric] += 1
            continue
        packed, work, smooth = new, new_work, None
        where[i], where[j] = where[j], where[i]
        pairs = proposals(packed, batch=batch, rng=rng)
        accepted, idle = accepted + 1, 0
    log = SearchLog(
        seed=problem.seed, proposals=done, accepted=accepted, stop_reason=reason, rejected=rejected
    )
    return PackPlan(packs=tuple(tuple(rank) for rank in packed.packs), search=log), paths


def search_from_reference_start(problem: SearchProblem) -> SearchResult:
    """The plan of `balance=reference`: swaps from the best greedy start."""
    start, ranks = reference_start(problem)
    started = time.perf_counter()
    plan, paths = search_reference(ranks, problem=problem)
    return SearchResult(plan=plan, start=start, started=started, paths=paths)
