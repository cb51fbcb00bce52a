"""The annealing chain of level `order`: the planner permutes the batch, the unmodified greedy packer forms
packs.

Owns the proposals (swap two samples of the order) and the choice of the cheapest exact evaluation: the
boundaries of both ranks stay, so that two cells change; boundaries move, so that some columns of these
ranks change; the world-wide number of packs changes, so that every rank is packed anew. Shapes as in
`moves.State` and `repack.Order`.
"""

from __future__ import annotations

import numpy as np

from olmo_rl.planning.cells import ANYWHERE, swap_changes
from olmo_rl.planning.kernels import kernel
from olmo_rl.planning.moves import (
    BUDGET,
    CAP,
    COLUMN,
    COLUMNS,
    EXCESS,
    EXPERT,
    I32,
    I64,
    KEPT,
    MORE_PACKS,
    PAIR,
    PLACE,
    RANK,
    SLOT,
    SQUARES,
    TOKEN,
    TOKENS,
    U64,
    WORSE,
    allowed_rise,
    below,
    carry_out,
    draw,
    enter,
    partner,
    score,
)
from olmo_rl.planning.repack import (
    adopt,
    exchange_slots,
    moved_samples,
    pack_greedily,
    rebuild,
    repacked_changes,
    split_until,
)

# The order of the counters `moves.KEPT`, `REPACKED`, `EQUALISED`.
STAY, MOVE, ANEW = 0, 1, 2


@kernel
def propose_packs(
    w1: int,
    k1: int,
    i: int,
    w2: int,
    k2: int,
    j: int,
    book: I64,
    sample: I64,
    slots: I64,
    edges: I64,
    greedy: I64,
    fresh: I64,
) -> tuple[int, int, int]:
    """Pack both ranks of a proposal into `fresh`: whether boundaries STAY, MOVE, or the world is packed
    ANEW, and the greedy pack counts of the two.
    """
    packs, same = book[COLUMNS], w1 == w2
    first = pack_greedily(slots, w1, k1, j, k2 if same else -1, i, sample, book[BUDGET], fresh, 0)
    second = first if same else pack_greedily(slots, w2, k2, i, -1, 0, sample, book[BUDGET], fresh, 1)
    if first != greedy[w1] or second != greedy[w2]:
        most = max(first, second)
        for w in range(len(greedy)):
            if w not in (w1, w2):
                most = max(most, greedy[w])
        if most != packs:
            return ANEW, first, second
    split_until(fresh, 0, first, packs)
    if not same:
        split_until(fresh, 1, second, packs)
    for c in range(1, packs):
        if fresh[0, c] != edges[w1, c] or (not same and fresh[1, c] != edges[w2, c]):
            return MOVE, first, second
    return STAY, first, second


@kernel
def excess_of(peak: I32, packs: int, cap: int) -> int:
    """Assignments above `cap` at the busiest (destination, layer), summed over blocks."""
    excess = 0
    if cap:
        for c in range(packs):
            for r in range(peak.shape[1]):
                excess += max(0, int(peak[c, r].max()) - cap)
    return excess


@kernel
def anneal_order(
    proposals: int,
    temperature: int,
    window: int,
    deviates: I64,
    sample: I64,
    h: I32,
    load: I32,
    peak: I32,
    peaks: I32,
    cell: I64,
    columns: I64,
    book: I64,
    by_length: I64,
    best: I64,
    chain: U64,
    slots: I64,
    edges: I64,
    greedy: I64,
    fresh: I64,
    delta: I32,
    touched: I64,
    sums: I64,
    works: I64,
) -> None:
    """`proposals` steps of the chain at one temperature."""
    n, ep, per_rank = len(by_length), load.shape[2], slots.shape[1]
    for _ in range(proposals):
        bits, more = draw(chain), draw(chain)
        i = below(bits >> np.uint64(32), n)
        kind = np.int64((more >> np.uint64(12)) & np.uint64(1023))
        j = (
            below(bits, n)
            if kind < ANYWHERE or not window
            else partner(bits, sample[i, PLACE], window, by_length)
        )
        w1, c1, k1 = sample[i, RANK], sample[i, COLUMN], sample[i, SLOT]
        w2, c2, k2 = sample[j, RANK], sample[j, COLUMN], sample[j, SLOT]
        if w1 == w2 and c1 == c2:
            continue
        r1, r2 = w1 // ep, w2 // ep
        packs = book[COLUMNS]
        limit = allowed_rise(more, temperature, deviates)
        path, first, second = propose_packs(w1, k1, i, w2, k2, j, book, sample, slots, edges, greedy, fresh)
        book[KEPT + path] += 1
        if path == ANEW:
            exchange_slots(slots, sample, i, j)
            anew = rebuild(sample, h, load, peak, cell, columns, book, slots, edges, greedy, fresh)
            if anew == 0:
                book[MORE_PACKS] += 1
                exchange_slots(slots, sample, i, j)
                continue
            expert, token, pair = -book[EXPERT], -book[TOKEN], -book[PAIR]
            for c in range(anew):
                expert += columns[c, EXPERT]
                token += columns[c, TOKEN]
                pair += columns[c, PAIR]
            excess = excess_of(peak, anew, book[CAP]) - book[EXCESS]
            rise, judged = score(book, expert, token, pair, excess)
            if judged > limit:
                book[WORSE] += 1
                exchange_slots(slots, sample, i, j)
                rebuild(sample, h, load, peak, cell, columns, book, slots, edges, greedy, fresh)
                continue
            book[COLUMNS] = anew
        elif path == MOVE:
            row = 0 if r1 == r2 else 1
            touched[:] = 0
            if w1 == w2:
                moved_samples(
                    w1, k1, j, k2, i, 0, 0, packs, sample, h, slots, edges, fresh, delta, touched, sums
                )
            else:
                moved_samples(
                    w1, k1, j, -1, 0, 0, 0, packs, sample, h, slots, edges, fresh, delta, touched, sums
                )
                moved_samples(
                    w2, k2, i, -1, 0, 1, row, packs, sample, h, slots, edges, fresh, delta, touched, sums
                )
            expert, token, pair, excess = repacked_changes(
                w1, w2, packs, book[CAP], load, peak, peaks, cell, columns, delta, touched, sums, works
            )
            rise, judged = score(book, expert, token, pair, excess)
            if judged > limit:
                book[WORSE] += 1
                continue
            exchange_slots(slots, sample, i, j)
            adopt(
                w1,
                w2,
                packs,
                load,
                peak,
                peaks,
                cell,
                columns,
                delta,
                touched,
                sums,
                works,
                edges,
                fresh,
                slots,
                sample,
            )
            greedy[w1], greedy[w2] = first, second
        else:
            dn, dq = sample[j, TOKENS] - sample[i, TOKENS], sample[j, SQUARES] - sample[i, SQUARES]
            x1, t1, q1, x2, t2, q2, excess = swap_changes(
                load, h, peak, peaks, cell, columns, book[CAP], i, w1, c1, j, w2, c2, dn, dq
            )
            expert, token, pair = x1 - columns[c1, EXPERT], t1 - columns[c1, TOKEN], q1 - columns[c1, PAIR]
            if c1 != c2:
                expert += x2 - columns[c2, EXPERT]
                token += t2 - columns[c2, TOKEN]
                pair += q2 - columns[c2, PAIR]
            rise, judged = score(book, expert, token, pair, excess)
            if judged > limit:
                book[WORSE] += 1
                continue
            cell[TOKEN, c1, w1] += dn
            cell[TOKEN, c2, w2] -= dn
            cell[PAIR, c1, w1] += dq
            cell[PAIR, c2, w2] -= dq
            columns[c1, EXPERT], columns[c1, TOKEN], columns[c1, PAIR] = x1, t1, q1
            columns[c2, EXPERT], columns[c2, TOKEN], columns[c2, PAIR] = x2, t2, q2
            if c1 != c2 or r1 != r2:
                carry_out(load, h, peak, peaks, c1, r1, c2, r2, i, j)
            exchange_slots(slots, sample, i, j)
            sample[i, COLUMN], sample[j, COLUMN] = c2, c1
            greedy[w1], greedy[w2] = first, second
        if enter(book, expert, token, pair, excess, rise):
            for w in range(slots.shape[0]):
                for k in range(per_rank):
                    best[w * per_rank + k] = slots[w, k]
