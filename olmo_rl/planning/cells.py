"""The annealing chain of level `cells`: the planner sets the packs themselves.

Owns the proposals (swap two samples, move one between columns of its rank) and their incremental
evaluation. It never empties a cell, never exceeds the budget and keeps the number of samples of every rank.
Shapes as in `moves.State`.
"""

from __future__ import annotations

import numpy as np

from olmo_rl.planning.kernels import inlined, kernel
from olmo_rl.planning.moves import (
    BUDGET,
    CAP,
    COLUMN,
    EXPERT,
    I32,
    I64,
    MEMBERS,
    OVER_BUDGET,
    PAIR,
    PLACE,
    RANK,
    SQUARES,
    TOKEN,
    TOKENS,
    U64,
    WORSE,
    allowed_rise,
    below,
    busiest,
    carry_out,
    draw,
    enter,
    excess_change,
    exchange,
    one_changed,
    partner,
    score,
    two_changed,
)

# Of 1024 proposals: those that move a sample, and those that do not look for a partner of similar length.
MOVES, ANYWHERE = 51, 102


@inlined
def swap_changes(
    load: I32,
    h: I32,
    peak: I32,
    peaks: I32,
    cell: I64,
    columns: I64,
    cap: int,
    i: int,
    w1: int,
    c1: int,
    j: int,
    w2: int,
    c2: int,
    dn: int,
    dq: int,
) -> tuple[int, int, int, int, int, int, int]:
    """Expert, token and pair work of columns c1 and c2, and the change of the excess, when i and j change
    places.

    Sample j brings `dn` more tokens and `dq` more squared tokens than i. With c1 = c2 both columns answer
    alike.
    """
    ep = load.shape[2]
    r1, r2 = w1 // ep, w2 // ep
    n1, n2 = cell[TOKEN, c1, w1] + dn, cell[TOKEN, c2, w2] - dn
    q1, q2 = cell[PAIR, c1, w1] + dq, cell[PAIR, c2, w2] - dq
    excess = 0
    if c1 == c2:
        token = busiest(cell, TOKEN, c1, columns[c1, TOKEN], w1, n1, w2, n2)
        pair = busiest(cell, PAIR, c1, columns[c1, PAIR], w1, q1, w2, q2)
        expert = columns[c1, EXPERT]
        if r1 != r2:
            exchange(load, h, c1, r1, c2, r2, i, j, peaks)
            expert = two_changed(peak, c1, r1, r2, peaks)
            if cap:
                excess = excess_change(peak, c1, r1, peaks, 0, cap) + excess_change(
                    peak, c2, r2, peaks, 1, cap
                )
        return expert, token, pair, expert, token, pair, excess
    exchange(load, h, c1, r1, c2, r2, i, j, peaks)
    if cap:
        excess = excess_change(peak, c1, r1, peaks, 0, cap) + excess_change(peak, c2, r2, peaks, 1, cap)
    return (
        one_changed(peak, c1, r1, peaks, 0),
        busiest(cell, TOKEN, c1, columns[c1, TOKEN], w1, n1, w1, n1),
        busiest(cell, PAIR, c1, columns[c1, PAIR], w1, q1, w1, q1),
        one_changed(peak, c2, r2, peaks, 1),
        busiest(cell, TOKEN, c2, columns[c2, TOKEN], w2, n2, w2, n2),
        busiest(cell, PAIR, c2, columns[c2, PAIR], w2, q2, w2, q2),
        excess,
    )


@kernel
def anneal_cells(
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
) -> None:
    """`proposals` steps of the chain at one temperature."""
    n, count, ep = len(by_length), len(columns), load.shape[2]
    for _ in range(proposals):
        bits, more = draw(chain), draw(chain)
        i, j = below(bits >> np.uint64(32), n), n
        w1, c1 = sample[i, RANK], sample[i, COLUMN]
        kind = np.int64((more >> np.uint64(12)) & np.uint64(1023))
        if kind < MOVES:
            if cell[MEMBERS, c1, w1] == 1:
                continue
            w2, c2 = w1, below(bits, count)
        else:
            j = (
                below(bits, n)
                if kind < ANYWHERE or not window
                else partner(bits, sample[i, PLACE], window, by_length)
            )
            w2, c2 = sample[j, RANK], sample[j, COLUMN]
        if w1 == w2 and c1 == c2:
            continue
        dn, dq = sample[j, TOKENS] - sample[i, TOKENS], sample[j, SQUARES] - sample[i, SQUARES]
        if cell[TOKEN, c1, w1] + dn > book[BUDGET] or cell[TOKEN, c2, w2] - dn > book[BUDGET]:
            book[OVER_BUDGET] += 1
            continue
        x1, t1, q1, x2, t2, q2, excess = swap_changes(
            load, h, peak, peaks, cell, columns, book[CAP], i, w1, c1, j, w2, c2, dn, dq
        )
        expert, token, pair = x1 - columns[c1, EXPERT], t1 - columns[c1, TOKEN], q1 - columns[c1, PAIR]
        if c1 != c2:
            expert += x2 - columns[c2, EXPERT]
            token += t2 - columns[c2, TOKEN]
            pair += q2 - columns[c2, PAIR]
        rise, judged = score(book, expert, token, pair, excess)
        if judged > allowed_rise(more, temperature, deviates):
            book[WORSE] += 1
            continue
        cell[TOKEN, c1, w1] += dn
        cell[TOKEN, c2, w2] -= dn
        cell[PAIR, c1, w1] += dq
        cell[PAIR, c2, w2] -= dq
        columns[c1, EXPERT], columns[c1, TOKEN], columns[c1, PAIR] = x1, t1, q1
        columns[c2, EXPERT], columns[c2, TOKEN], columns[c2, PAIR] = x2, t2, q2
        if c1 != c2 or w1 // ep != w2 // ep:
            carry_out(load, h, peak, peaks, c1, w1 // ep, c2, w2 // ep, i, j)
        sample[i, RANK], sample[i, COLUMN] = w2, c2
        if j < n:
            sample[j, RANK], sample[j, COLUMN] = w1, c1
        else:
            cell[MEMBERS, c1, w1] -= 1
            cell[MEMBERS, c2, w2] += 1
        if enter(book, expert, token, pair, excess, rise):
            for k in range(n):
                best[k] = sample[k, RANK] * count + sample[k, COLUMN]
