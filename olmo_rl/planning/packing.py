"""Order-preserving packs: how the samples of one optimizer step become rows, the same on every rank.

Owns the cut of a collection into steps, the stride partition over ranks, greedy consecutive packs and the
equalisation of pack counts. Everything here is a pure function of the GLOBAL lengths, so that every rank
computes the same plan, or raises the same refusal, without talking to the others. It refuses a sample without
tokens or longer than the budget (naming it) and sample counts that do not divide over the ranks.

Words: `lengths` are tokens per sample [N] in order of arrival, a position is an index into them, W is the
world size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from olmo_rl.types import PackPlan, Refusal, Topology

Lengths = Sequence[int] | NDArray[np.integer]
RankPacks = list[tuple[int, ...]]


def cut_into_steps(
    n: int, *, samples_per_step: int | None, world_size: int, source: str | None = None
) -> tuple[list[range], range]:
    """The positions of every complete optimizer step of `n` samples, and the tail that is left out.

    `samples_per_step` None makes one step of all samples. Steps keep the order of arrival; groups may
    straddle them. Raises Refusal unless a step divides over the ranks.
    """
    where = _prefix(source)
    if samples_per_step is None:
        if n % world_size:
            raise Refusal(
                f"{where}{n} samples do not divide over {world_size} ranks: set batch.samples_per_step to a "
                f"multiple of {world_size} instead of null (an incomplete tail is then left out and counted)"
            )
        return ([range(n)] if n else []), range(n, n)
    if samples_per_step < 1 or samples_per_step % world_size:
        raise Refusal(
            f"batch.samples_per_step={samples_per_step} is not a positive multiple of the world size "
            f"{world_size}: every rank packs the same number of samples, choose a multiple of {world_size}"
        )
    complete = n // samples_per_step
    blocks = [range(i * samples_per_step, (i + 1) * samples_per_step) for i in range(complete)]
    return blocks, range(complete * samples_per_step, n)


def plan_step(
    lengths: Lengths,
    *,
    budget: int,
    topology: Topology,
    ids: Sequence[str] | None = None,
    source: str | None = None,
) -> PackPlan:
    """The order-preserving plan of one step: partition by stride, pack greedily, equalise world-wide.

    `ids` and `source` (a file) only serve the messages. Raises Refusal where no such plan exists.
    """
    lengths = check_lengths(lengths, budget=budget, topology=topology, ids=ids, source=source)
    ranks = [
        pack_consecutively(
            rank_positions(len(lengths), rank=rank, topology=topology), lengths=lengths, budget=budget
        )
        for rank in range(topology.world_size)
    ]
    plan = PackPlan(packs=tuple(tuple(packs) for packs in equalise(ranks)))
    plan.check(lengths, budget)
    return plan


def unpacked_plan(
    lengths: Lengths, *, topology: Topology, ids: Sequence[str] | None = None, source: str | None = None
) -> PackPlan:
    """The plan with packing off: the same partition, every sample a forward of its own."""
    lengths = check_lengths(lengths, budget=None, topology=topology, ids=ids, source=source)
    plan = PackPlan(
        packs=tuple(
            tuple((i,) for i in rank_positions(len(lengths), rank=rank, topology=topology))
            for rank in range(topology.world_size)
        )
    )
    plan.check(lengths, max(lengths))
    return plan


def check_lengths(
    lengths: Lengths,
    *,
    budget: int | None,
    topology: Topology,
    ids: Sequence[str] | None = None,
    source: str | None = None,
) -> list[int]:
    """`lengths` as plain integers, once a plan of this step can hold them all."""
    lengths = [int(length) for length in lengths]
    where = _prefix(source)
    if not lengths or len(lengths) % topology.world_size:
        counts = [
            len(rank_positions(len(lengths), rank=rank, topology=topology))
            for rank in range(topology.world_size)
        ]
        raise Refusal(_unequal(counts, where=where))
    names = [
        f"sample {ids[i]!r}" if ids is not None else f"sample at position {i}" for i in range(len(lengths))
    ]
    shortest, longest = min(lengths), max(lengths)
    if shortest < 1:
        raise Refusal(
            f"{where}{names[lengths.index(shortest)]} has no tokens: an empty document cannot be packed"
        )
    if budget is not None and longest > budget:
        long = sum(length > budget for length in lengths)
        raise Refusal(
            f"{where}{names[lengths.index(longest)]} has {longest} tokens, more than the budget of {budget} "
            f"({long} such samples): samples are never cut, set packing.max_tokens to at least {longest}"
        )
    return lengths


def rank_positions(n: int, *, rank: int, topology: Topology) -> range:
    """The positions w, w + W, w + 2W, ... of rank w."""
    return range(rank, n, topology.world_size)


def pack_consecutively(positions: Sequence[int], *, lengths: Lengths, budget: int) -> RankPacks:
    """Greedy packs of one rank: a pack is closed when the next sample would exceed the budget. Order is kept.

    Among all cuts of this order into packs within budget none has fewer packs.
    """
    packs: RankPacks = []
    current: list[int] = []
    tokens = 0
    for position in positions:
        length = int(lengths[position])
        assert length <= budget, f"position {position} holds {length} tokens, budget {budget}"
        if current and tokens + length > budget:
            packs.append(tuple(current))
            current, tokens = [], 0
        current.append(position)
        tokens += length
    if current:
        packs.append(tuple(current))
    return packs


def equalise(ranks: Sequence[Sequence[tuple[int, ...]]]) -> list[RankPacks]:
    """Give every rank of the world as many packs as the rank that has most.

    A rank with fewer repeatedly splits its pack with the most samples (the first on ties) at floor(n / 2).
    With equal sample counts this always succeeds, because no rank has more packs than samples; unequal counts
    are refused.
    """
    counts = [sum(len(pack) for pack in packs) for packs in ranks]
    if len(set(counts)) != 1:
        raise Refusal(_unequal(counts, where=""))
    target = max(len(packs) for packs in ranks)
    equal = []
    for packs in ranks:
        packs = list(packs)
        while len(packs) < target:
            largest = max(range(len(packs)), key=lambda k: len(packs[k]))
            pack = packs[largest]
            half = len(pack) // 2
            packs[largest : largest + 1] = [pack[:half], pack[half:]]
        equal.append(packs)
    return equal


def _unequal(counts: Sequence[int], *, where: str) -> str:
    shown = ", ".join(str(count) for count in counts[:16]) + (", ..." if len(counts) > 16 else "")
    return (
        f"{where}the ranks would get {shown} samples: every rank needs the same number, at least one, so "
        "that all run the same number of packs; set batch.samples_per_step to a multiple of the world size "
        f"{len(counts)}"
    )


def _prefix(source: str | None) -> str:
    return "" if source is None else f"{source}: "
