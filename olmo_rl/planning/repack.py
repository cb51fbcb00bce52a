"""What a swap in the order changes once both ranks are packed anew: kernels below level `order`.

Owns greedy packing with equalisation as kernels (the rule of `planning.packing`), the full recount of a
state, and the change of work when boundaries move. Shapes as in `moves.State`; n samples per rank. The
arrays hold C columns, of which `book[COLUMNS]` are in use.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from olmo_rl.planning.kernels import kernel
from olmo_rl.planning.moves import (
    BUDGET,
    COLUMN,
    EXPERT,
    I32,
    I64,
    PAIR,
    RANK,
    SLOT,
    SQUARES,
    TOKEN,
    TOKENS,
    busiest,
    excess_change,
    one_changed,
    two_changed,
)


class Order(NamedTuple):
    """What the order adds to `moves.State`.

    `slots` int64 [W, n] samples in packing order; `edges` int64 [W, C + 1] first slot of every pack;
    `greedy` int64 [W] packs before equalising. Proposed: `fresh` int64 [2, n + 1] edges of two ranks,
    `delta` int32 [C, 2, E, L] changes of their blocks, `touched` int64 [C, 2] which of them, `sums` int64
    [2, C, 2] tokens and squares, `works` int64 [C, 3].
    """

    slots: I64
    edges: I64
    greedy: I64
    fresh: I64
    delta: I32
    touched: I64
    sums: I64
    works: I64


@kernel
def pack_greedily(
    slots: I64, w: int, k1: int, s1: int, k2: int, s2: int, sample: I64, budget: int, fresh: I64, side: int
) -> int:
    """Greedy packs of rank w with samples s1 and s2 in slots k1 and k2 (-1: none): edges in fresh[side],
    their count.
    """
    packs, total = 0, 0
    for k in range(slots.shape[1]):
        s = slots[w, k]
        if k == k1:
            s = s1
        elif k == k2:
            s = s2
        tokens = sample[s, TOKENS]
        if total + tokens > budget:
            packs += 1
            fresh[side, packs] = k
            total = 0
        total += tokens
    packs += 1
    fresh[side, packs] = slots.shape[1]
    return packs


@kernel
def split_until(fresh: I64, side: int, packs: int, target: int) -> None:
    """Split the pack with most samples, the first on ties, at half until there are `target`."""
    while packs < target:
        largest, size = 0, 0
        for p in range(packs):
            if fresh[side, p + 1] - fresh[side, p] > size:
                largest, size = p, fresh[side, p + 1] - fresh[side, p]
        for p in range(packs, largest, -1):
            fresh[side, p + 1] = fresh[side, p]
        fresh[side, largest + 1] = fresh[side, largest] + size // 2
        packs += 1


@kernel
def rebuild(
    sample: I64,
    h: I32,
    load: I32,
    peak: I32,
    cell: I64,
    columns: I64,
    book: I64,
    slots: I64,
    edges: I64,
    greedy: I64,
    fresh: I64,
) -> int:
    """Pack every rank anew and recount everything but the totals in `book`; the number of packs, 0 if the
    arrays hold fewer (nothing is changed then).
    """
    world, n = slots.shape
    ep, layers = load.shape[2:]
    packs = 0
    for w in range(world):
        packs = max(packs, pack_greedily(slots, w, -1, 0, -1, 0, sample, book[BUDGET], fresh, 0))
    if packs > len(columns):
        return 0
    load[:] = 0
    peak[:] = 0
    cell[:] = 0
    columns[:] = 0
    for w in range(world):
        greedy[w] = pack_greedily(slots, w, -1, 0, -1, 0, sample, book[BUDGET], fresh, 0)
        split_until(fresh, 0, greedy[w], packs)
        for c in range(packs):
            edges[w, c + 1] = fresh[0, c + 1]
            for k in range(fresh[0, c], fresh[0, c + 1]):
                s = slots[w, k]
                sample[s, RANK], sample[s, SLOT], sample[s, COLUMN] = w, k, c
                cell[0, c, w] += 1
                cell[TOKEN, c, w] += sample[s, TOKENS]
                cell[PAIR, c, w] += sample[s, SQUARES]
                for e in range(ep):
                    for x in range(layers):
                        load[c, w // ep, e, x] = np.int32(load[c, w // ep, e, x] + h[s, e, x])
    for c in range(packs):
        for r in range(load.shape[1]):
            for e in range(ep):
                for x in range(layers):
                    peak[c, r, x] = max(peak[c, r, x], load[c, r, e, x])
        for x in range(layers):
            columns[c, EXPERT] += peak[c, :, x].max()
        columns[c, TOKEN] = cell[TOKEN, c].max()
        columns[c, PAIR] = cell[PAIR, c].max()
    return packs


@kernel
def moved_samples(
    w: int,
    k1: int,
    s1: int,
    k2: int,
    s2: int,
    side: int,
    row: int,
    packs: int,
    sample: I64,
    h: I32,
    slots: I64,
    edges: I64,
    fresh: I64,
    delta: I32,
    touched: I64,
    sums: I64,
) -> None:
    """Add to `delta` and `sums` what rank w's new boundaries fresh[side] and substitutes change."""
    ep, layers = delta.shape[2:]
    old, new = 0, 0
    for c in range(packs):
        sums[0, c, side] = 0
        sums[1, c, side] = 0
    for k in range(slots.shape[1]):
        while edges[w, old + 1] <= k:
            old += 1
        while fresh[side, new + 1] <= k:
            new += 1
        leaving = slots[w, k]
        arriving = s1 if k == k1 else (s2 if k == k2 else leaving)
        sums[0, new, side] += sample[arriving, TOKENS]
        sums[1, new, side] += sample[arriving, SQUARES]
        if old == new and leaving == arriving:
            continue
        for c in (old, new):
            if not touched[c, row]:
                touched[c, row] = 1
                for e in range(ep):
                    for x in range(layers):
                        delta[c, row, e, x] = 0
        for e in range(ep):
            for x in range(layers):
                delta[old, row, e, x] = np.int32(delta[old, row, e, x] - h[leaving, e, x])
                delta[new, row, e, x] = np.int32(delta[new, row, e, x] + h[arriving, e, x])


@kernel
def repacked_changes(
    w1: int,
    w2: int,
    packs: int,
    cap: int,
    load: I32,
    peak: I32,
    peaks: I32,
    cell: I64,
    columns: I64,
    delta: I32,
    touched: I64,
    sums: I64,
    works: I64,
) -> tuple[int, int, int, int]:
    """Changes of expert, token and pair work and of the excess from `delta` and `sums`; the columns' in
    `works`.
    """
    ep, layers = delta.shape[2:]
    r1, r2 = w1 // ep, w2 // ep
    other = 1 if w1 != w2 else 0
    expert, token, pair, excess = 0, 0, 0, 0
    for c in range(packs):
        for row in range(2):
            if touched[c, row]:
                r = r1 if row == 0 else r2
                for x in range(layers):
                    peaks[c, row, x] = np.int32(load[c, r, 0, x] + delta[c, row, 0, x])
                for e in range(1, ep):
                    for x in range(layers):
                        peaks[c, row, x] = max(
                            peaks[c, row, x], np.int32(load[c, r, e, x] + delta[c, row, e, x])
                        )
                if cap:
                    excess += excess_change(peak, c, r, peaks, row, cap)
        works[c, EXPERT] = columns[c, EXPERT]
        if touched[c, 0] and touched[c, 1]:
            works[c, EXPERT] = two_changed(peak, c, r1, r2, peaks)
        elif touched[c, 0]:
            works[c, EXPERT] = one_changed(peak, c, r1, peaks, 0)
        elif touched[c, 1]:
            works[c, EXPERT] = one_changed(peak, c, r2, peaks, 1)
        works[c, TOKEN] = busiest(cell, TOKEN, c, columns[c, TOKEN], w1, sums[0, c, 0], w2, sums[0, c, other])
        works[c, PAIR] = busiest(cell, PAIR, c, columns[c, PAIR], w1, sums[1, c, 0], w2, sums[1, c, other])
        expert += works[c, EXPERT] - columns[c, EXPERT]
        token += works[c, TOKEN] - columns[c, TOKEN]
        pair += works[c, PAIR] - columns[c, PAIR]
    return expert, token, pair, excess


@kernel
def adopt(
    w1: int,
    w2: int,
    packs: int,
    load: I32,
    peak: I32,
    peaks: I32,
    cell: I64,
    columns: I64,
    delta: I32,
    touched: I64,
    sums: I64,
    works: I64,
    edges: I64,
    fresh: I64,
    slots: I64,
    sample: I64,
) -> None:
    """Carry out what `repacked_changes` has answered; the two samples have changed slots already."""
    ep, layers = delta.shape[2:]
    for c in range(packs):
        for row in range(2):
            if touched[c, row]:
                r = (w1 if row == 0 else w2) // ep
                for e in range(ep):
                    for x in range(layers):
                        load[c, r, e, x] = np.int32(load[c, r, e, x] + delta[c, row, e, x])
                for x in range(layers):
                    peak[c, r, x] = peaks[c, row, x]
        for k in range(3):
            columns[c, k] = works[c, k]
    for side in range(1 if w1 == w2 else 2):
        w = w1 if side == 0 else w2
        for c in range(packs):
            edges[w, c + 1] = fresh[side, c + 1]
            cell[0, c, w] = fresh[side, c + 1] - fresh[side, c]
            cell[TOKEN, c, w], cell[PAIR, c, w] = sums[0, c, side], sums[1, c, side]
            for k in range(edges[w, c], edges[w, c + 1]):
                sample[slots[w, k], COLUMN] = c


@kernel
def exchange_slots(slots: I64, sample: I64, i: int, j: int) -> None:
    """Samples i and j change places in the order."""
    w1, k1, w2, k2 = sample[i, RANK], sample[i, SLOT], sample[j, RANK], sample[j, SLOT]
    slots[w1, k1], slots[w2, k2] = j, i
    sample[i, RANK], sample[i, SLOT] = w2, k2
    sample[j, RANK], sample[j, SLOT] = w1, k1
