"""Kernels of `balance=anneal`: swaps and moves of samples, scored exactly and incrementally in integers.

Owns the arrays of one batch (`Chain`), the proposals (swap two samples, move one between columns of its rank)
and the acceptance rule. A proposal that would empty a cell or exceed the budget is rejected; every rank keeps
its number of samples. Every decision compares integers, so equal inputs give equal plans on any machine.

Shapes: N samples, W ranks, C columns, R replicas, E expert-parallel ranks, L layers padded to a multiple of
16 with zero loads, so that rows fill whole vectors. A cell is one (column, rank), a block one (column,
replica).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.numba_kernels import in_place, inlined

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

# Terms of the objective, in this order wherever an axis counts 3 (or 4, with the excess above the cap).
EXPERT, TOKEN, PAIR, EXCESS = 0, 1, 2, 3
# First axis of `Chain.cell`: samples, tokens (TOKEN), squared tokens (PAIR) of a cell.
MEMBERS = 0
# Columns of `Chain.sample`. PLACE: rank of the sample in the order by length.
TOKENS, SQUARES, RANK, COLUMN, PLACE = 0, 1, 2, 3, 4
# Slots of `Chain.value` and of `Chain.outcomes`.
OBJECTIVE, BEST = 0, 1
ACCEPTED, WORSE, OVER_BUDGET = 0, 1, 2
# Of 1024 proposals: those that move a sample, and those below which the partner is any sample, not one of
# similar length.
MOVES, ANYWHERE = 51, 102


class Rules(NamedTuple):
    """Constants of a chain. `weights`: what a unit of each work, and of the excess above the cap, adds to the
    objective. `guard`: expert, token and pair work that the returned plan must not exceed. `pressure`: how
    much more a unit of work above the guard weighs. `cap`: of assignments per destination and layer, 0 for
    none. `window`: partners differ by at most this many places in the order by length, 0 for any sample.
    """

    weights: tuple[int, int, int, int]
    guard: tuple[int, int, int]
    pressure: int
    budget: int
    cap: int
    window: int


class Chain(NamedTuple):
    """State of a chain. Sample N has no tokens and no loads: moving a sample is a swap with it.

    `sample` int64 [N + 1, 5] tokens, squared tokens, rank, column, place; `loads` int32 [N + 1, E, L];
    `load` int32 [C, R, E, L] of every block; `peak` int32 [C, R, L] its maximum over E; `proposed` int32
    [C, 3, L] peaks of up to two changed blocks, and scratch; `cell` int64 [3, C, W]; `works` int64 [C, 3]
    of every column; `total` int64 [4] their sums, and the excess; `value` int64 [2] objective now and of the
    best plan; `outcomes` int64 [3] counts of proposals; `by_length` int64 [N]; `best` int64 [N] cell `rank x
    C + column` of every sample in the best plan within the guard, -1 before one is found; `draws` uint64
    [1] counter of random numbers; `deviates` int64 [4096] of `annealing.deviates`.
    """

    sample: I64
    loads: I32
    load: I32
    peak: I32
    proposed: I32
    cell: I64
    works: I64
    total: I64
    value: I64
    outcomes: I64
    by_length: I64
    best: I64
    draws: U64
    deviates: I64


class Swap(NamedTuple):
    """Samples i, at rank w1 and column c1, and j, at w2 and c2, change places; r1 and r2 are the replicas.
    Sample j has `tokens` more tokens and `squares` more squared tokens than i.
    """

    i: int
    w1: int
    c1: int
    r1: int
    j: int
    w2: int
    c2: int
    r2: int
    tokens: int
    squares: int


class Works(NamedTuple):
    """Expert, token and pair work of columns c1 and c2 after a swap, equal where c1 = c2, and the change of
    the excess.
    """

    first: tuple[int, int, int]
    second: tuple[int, int, int]
    excess: int


@inlined
def next_bits(draws: U64) -> np.uint64:
    """The next 64 bits of splitmix64."""
    draws[0] += np.uint64(0x9E3779B97F4A7C15)
    x = draws[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined
def bounded(bits: np.uint64, limit: int) -> int:
    """0 .. limit - 1 from the low 32 of `bits`."""
    return int(np.int64(((bits & np.uint64(0xFFFFFFFF)) * np.uint64(limit)) >> np.uint64(32)))


@inlined
def allowed_rise(bits: np.uint64, temperature: int, deviates: I64) -> int:
    """The rise of the objective that is still accepted: temperature times an exponential deviate, drawn with
    12 of `bits`. Deviates are in units of 2^-16; the shifts keep the product below 2^63.
    """
    return ((temperature >> 20) * deviates[np.int64(bits & np.uint64(4095))]) << 4


@inlined
def partner(bits: np.uint64, place: int, window: int, by_length: I64) -> int:
    """A sample whose place in `by_length` differs from `place` by 1 .. window, or more at the ends."""
    p = place - window + bounded(bits, 2 * window)
    if p >= place:
        p += 1
    if p < 0:
        p += 2 * window + 1
    elif p >= len(by_length):
        p -= 2 * window + 1
    return by_length[p]


@inlined
def propose(bits: np.uint64, more: np.uint64, chain: Chain, window: int) -> Swap:
    """The swap encoded by 128 random bits; no proposal where both samples are in one cell."""
    sample, n, ep = chain.sample, len(chain.by_length), chain.load.shape[2]
    i, j = bounded(bits >> np.uint64(32), n), n
    w1, c1 = sample[i, RANK], sample[i, COLUMN]
    w2, c2 = w1, c1
    kind = np.int64((more >> np.uint64(12)) & np.uint64(1023))
    if kind >= MOVES:
        if kind < ANYWHERE or not window:
            j = bounded(bits, n)
        else:
            j = partner(bits, sample[i, PLACE], window, chain.by_length)
        w2, c2 = sample[j, RANK], sample[j, COLUMN]
    elif chain.cell[MEMBERS, c1, w1] > 1:
        c2 = bounded(bits, len(chain.works))
    tokens, squares = sample[j, TOKENS] - sample[i, TOKENS], sample[j, SQUARES] - sample[i, SQUARES]
    return Swap(i, w1, c1, w1 // ep, j, w2, c2, w2 // ep, tokens, squares)


@inlined
def exchange(swap: Swap, chain: Chain) -> None:
    """Peaks of both blocks after the swap, into proposed[c1, 0] and proposed[c2, 1]."""
    load, h, proposed = chain.load, chain.loads, chain.proposed
    i, c1, r1, j, c2, r2 = swap.i, swap.c1, swap.r1, swap.j, swap.c2, swap.r2
    ep, layers = load.shape[2:]
    for k in range(layers):
        d = np.int32(h[j, 0, k] - h[i, 0, k])
        proposed[c1, 0, k] = np.int32(load[c1, r1, 0, k] + d)
        proposed[c2, 1, k] = np.int32(load[c2, r2, 0, k] - d)
    for e in range(1, ep):
        for k in range(layers):
            d = np.int32(h[j, e, k] - h[i, e, k])
            proposed[c1, 0, k] = max(proposed[c1, 0, k], np.int32(load[c1, r1, e, k] + d))
            proposed[c2, 1, k] = max(proposed[c2, 1, k], np.int32(load[c2, r2, e, k] - d))


@inlined
def one_changed(peak: I32, proposed: I32, c: int, r: int, row: int) -> int:
    """Expert work of column c with proposed[c, row] in the place of replica r."""
    replicas, layers = peak.shape[1:]
    total = 0
    if replicas == 1:
        for k in range(layers):
            total += proposed[c, row, k]
        return total
    last = replicas - 1 if r < replicas - 1 else replicas - 2
    if replicas == 2:
        for k in range(layers):
            total += max(proposed[c, row, k], peak[c, last, k])
        return total
    for k in range(layers):
        proposed[c, 2, k] = proposed[c, row, k]
    for s in range(last):
        if s != r:
            for k in range(layers):
                proposed[c, 2, k] = max(proposed[c, 2, k], peak[c, s, k])
    for k in range(layers):
        total += max(proposed[c, 2, k], peak[c, last, k])
    return total


@inlined
def two_changed(peak: I32, proposed: I32, c: int, r1: int, r2: int) -> int:
    """Expert work of column c with proposed[c, 0] in the place of replica r1, proposed[c, 1] in that of
    r2.
    """
    replicas, layers = peak.shape[1:]
    total = 0
    if replicas == 2:
        for k in range(layers):
            total += max(proposed[c, 0, k], proposed[c, 1, k])
        return total
    for k in range(layers):
        proposed[c, 2, k] = max(proposed[c, 0, k], proposed[c, 1, k])
    for s in range(replicas):
        if s not in (r1, r2):
            for k in range(layers):
                proposed[c, 2, k] = max(proposed[c, 2, k], peak[c, s, k])
    for k in range(layers):
        total += proposed[c, 2, k]
    return total


@inlined
def excess_change(peak: I32, proposed: I32, c: int, r: int, row: int, cap: int) -> int:
    """Change of the assignments above `cap` at the busiest (destination, layer) of block (c, r) under
    proposed[c, row].
    """
    old, new = 0, 0
    for k in range(peak.shape[2]):
        old = max(old, int(peak[c, r, k]))
        new = max(new, int(proposed[c, row, k]))
    return max(0, new - cap) - max(0, old - cap)


@inlined
def busiest(cell: I64, term: int, c: int, now: int, a: int, value_a: int, b: int, value_b: int) -> int:
    """The maximum over ranks of cell[term, c], `now` at present, once ranks a and b hold other values."""
    new = max(value_a, value_b)
    if new >= now:
        return new
    if cell[term, c, a] < now and cell[term, c, b] < now:
        return now
    for w in range(cell.shape[2]):
        if w not in (a, b):
            new = max(new, cell[term, c, w])
    return new


@inlined
def works_after(swap: Swap, chain: Chain, cap: int) -> Works:
    """The works of the two columns after the swap; `chain.proposed` holds the new peaks."""
    cell, works, peak, proposed = chain.cell, chain.works, chain.peak, chain.proposed
    w1, c1, r1, w2, c2, r2 = swap.w1, swap.c1, swap.r1, swap.w2, swap.c2, swap.r2
    n1, n2 = cell[TOKEN, c1, w1] + swap.tokens, cell[TOKEN, c2, w2] - swap.tokens
    q1, q2 = cell[PAIR, c1, w1] + swap.squares, cell[PAIR, c2, w2] - swap.squares
    excess = 0
    if c1 != c2 or r1 != r2:
        exchange(swap, chain)
        if cap:
            excess += excess_change(peak, proposed, c1, r1, 0, cap)
            excess += excess_change(peak, proposed, c2, r2, 1, cap)
    if c1 == c2:
        expert = works[c1, EXPERT]
        if r1 != r2:
            expert = two_changed(peak, proposed, c1, r1, r2)
        token = busiest(cell, TOKEN, c1, works[c1, TOKEN], w1, n1, w2, n2)
        pair = busiest(cell, PAIR, c1, works[c1, PAIR], w1, q1, w2, q2)
        return Works((expert, token, pair), (expert, token, pair), excess)
    return Works(
        (
            one_changed(peak, proposed, c1, r1, 0),
            busiest(cell, TOKEN, c1, works[c1, TOKEN], w1, n1, w1, n1),
            busiest(cell, PAIR, c1, works[c1, PAIR], w1, q1, w1, q1),
        ),
        (
            one_changed(peak, proposed, c2, r2, 1),
            busiest(cell, TOKEN, c2, works[c2, TOKEN], w2, n2, w2, n2),
            busiest(cell, PAIR, c2, works[c2, PAIR], w2, q2, w2, q2),
        ),
        excess,
    )


@inlined
def changes(new: Works, swap: Swap, works: I64) -> tuple[int, int, int, int]:
    """The change by the swap of expert, token and pair work and to the excess."""
    c1, c2 = swap.c1, swap.c2
    expert = new.first[EXPERT] - works[c1, EXPERT]
    token = new.first[TOKEN] - works[c1, TOKEN]
    pair = new.first[PAIR] - works[c1, PAIR]
    if c1 != c2:
        expert += new.second[EXPERT] - works[c2, EXPERT]
        token += new.second[TOKEN] - works[c2, TOKEN]
        pair += new.second[PAIR] - works[c2, PAIR]
    return expert, token, pair, new.excess


@inlined
def score(change: tuple[int, int, int, int], total: I64, rules: Rules) -> tuple[int, int]:
    """Rise of the objective under `change`, and this rise plus the pressure on work above the guard."""
    rise = rules.weights[EXCESS] * change[EXCESS]
    over = 0
    for term in range(3):
        rise += rules.weights[term] * change[term]
        above = total[term] - rules.guard[term]
        over += rules.weights[term] * (max(0, above + change[term]) - max(0, above))
    return rise, rise + rules.pressure * over


@inlined
def carry_out(swap: Swap, new: Works, chain: Chain) -> None:
    """Apply a swap whose new peaks are in `chain.proposed`."""
    cell, sample = chain.cell, chain.sample
    i, w1, c1, r1 = swap.i, swap.w1, swap.c1, swap.r1
    j, w2, c2, r2 = swap.j, swap.w2, swap.c2, swap.r2
    cell[TOKEN, c1, w1] += swap.tokens
    cell[TOKEN, c2, w2] -= swap.tokens
    cell[PAIR, c1, w1] += swap.squares
    cell[PAIR, c2, w2] -= swap.squares
    for term in range(3):
        chain.works[c1, term], chain.works[c2, term] = new.first[term], new.second[term]
    if c1 != c2 or r1 != r2:
        exchange_loads(swap, chain)
    sample[i, RANK], sample[i, COLUMN] = w2, c2
    if j < len(chain.by_length):
        sample[j, RANK], sample[j, COLUMN] = w1, c1
    else:
        cell[MEMBERS, c1, w1] -= 1
        cell[MEMBERS, c2, w2] += 1


@inlined
def exchange_loads(swap: Swap, chain: Chain) -> None:
    """Loads and peaks of both blocks after the swap."""
    load, h, peak, proposed = chain.load, chain.loads, chain.peak, chain.proposed
    i, c1, r1, j, c2, r2 = swap.i, swap.c1, swap.r1, swap.j, swap.c2, swap.r2
    ep, layers = load.shape[2:]
    for e in range(ep):
        for k in range(layers):
            d = np.int32(h[j, e, k] - h[i, e, k])
            load[c1, r1, e, k] = np.int32(load[c1, r1, e, k] + d)
            load[c2, r2, e, k] = np.int32(load[c2, r2, e, k] - d)
    for k in range(layers):
        peak[c1, r1, k] = proposed[c1, 0, k]
        peak[c2, r2, k] = proposed[c2, 1, k]


@inlined
def keep_best(change: tuple[int, int, int, int], rise: int, chain: Chain, rules: Rules) -> None:
    """Add an accepted change to the totals; copy the plan where it is now the best within guard and cap."""
    total, value = chain.total, chain.value
    for term in range(4):
        total[term] += change[term]
    value[OBJECTIVE] += rise
    if value[OBJECTIVE] >= value[BEST] or total[EXCESS] > 0:
        return
    for term in range(3):
        if total[term] > rules.guard[term]:
            return
    value[BEST] = value[OBJECTIVE]
    for k in range(len(chain.best)):
        chain.best[k] = chain.sample[k, RANK] * len(chain.works) + chain.sample[k, COLUMN]


@in_place
def anneal_cells(proposals: int, temperature: int, rules: Rules, chain: Chain) -> None:
    """`proposals` steps of `chain` at one temperature."""
    for _ in range(proposals):
        bits, more = next_bits(chain.draws), next_bits(chain.draws)
        swap = propose(bits, more, chain, rules.window)
        if swap.w1 == swap.w2 and swap.c1 == swap.c2:
            continue
        after_1 = chain.cell[TOKEN, swap.c1, swap.w1] + swap.tokens
        after_2 = chain.cell[TOKEN, swap.c2, swap.w2] - swap.tokens
        if after_1 > rules.budget or after_2 > rules.budget:
            chain.outcomes[OVER_BUDGET] += 1
            continue
        new = works_after(swap, chain, rules.cap)
        change = changes(new, swap, chain.works)
        rise, judged = score(change, chain.total, rules)
        if judged > allowed_rise(more, temperature, chain.deviates):
            chain.outcomes[WORSE] += 1
            continue
        carry_out(swap, new, chain)
        chain.outcomes[ACCEPTED] += 1
        keep_best(change, rise, chain, rules)
