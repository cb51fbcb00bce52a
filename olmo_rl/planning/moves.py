"""What a swap of two samples changes: the kernels that both annealing levels share. Exact, incremental, in
integers.

Owns the arrays of one batch (`State`), random numbers from a counter, and the work of changed columns.
Every accept compares integers, so that equal inputs give equal plans on any machine.

Shapes: N samples, W ranks, C columns, R replicas, E expert-parallel ranks, L layers padded to a multiple of
16 with zero loads (rows then fill whole vectors). A block is one (column, replica). Kernels take arrays and
scalars one by one: a tuple of arrays would be counted references at every access, three times the cost of
the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.kernels import inlined

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

# Columns of `State.columns`, first slots of `State.book`. In `State.cell`, slot 0 counts the samples of a
# cell.
EXPERT, TOKEN, PAIR = 0, 1, 2
MEMBERS = 0
# Further slots of `State.book`. PRESSURE: how much more a unit of work above the guard weighs.
W_EXPERT, W_TOKEN, W_PAIR, W_EXCESS = 3, 4, 5, 6
G_EXPERT, G_TOKEN, G_PAIR = 7, 8, 9
BUDGET, CAP, COLUMNS, PRESSURE, EXCESS, OBJECTIVE, BEST, FOUND = 10, 11, 12, 13, 14, 15, 16, 17
ACCEPTED, WORSE, OVER_BUDGET, MORE_PACKS, KEPT, REPACKED, EQUALISED = 18, 19, 20, 21, 22, 23, 24
BOOK_SLOTS = 25
# Columns of `State.sample`.
TOKENS, SQUARES, RANK, COLUMN, PLACE, SLOT = 0, 1, 2, 3, 4, 5


class State(NamedTuple):
    """One batch as the kernels see it. Sample N has no tokens and no loads: moving a sample is a swap with
    it.

    `sample` int64 [N + 1, 6] tokens, squared tokens, rank, column, place in `by_length`, slot within the
    rank; `h` int32 [N + 1, E, L] loads; `load` int32 [C, R, E, L]; `peak` int32 [C, R, L] its maximum over
    E; `peaks` int32 [C, 3, L] proposed rows of up to two replicas, and scratch; `cell` int64 [3, C, W]
    samples, tokens, squares; `columns` int64 [C, 3] expert, token and pair work; `book` int64 totals,
    weights, limits and counters; `by_length` int64 [N]; `best` int64 [N] the best state within the guard;
    `chain` uint64 [1] the random counter.
    """

    sample: I64
    h: I32
    load: I32
    peak: I32
    peaks: I32
    cell: I64
    columns: I64
    book: I64
    by_length: I64
    best: I64
    chain: U64


@inlined
def draw(chain: U64) -> np.uint64:
    """The next 64 bits of splitmix64."""
    chain[0] += np.uint64(0x9E3779B97F4A7C15)
    x = chain[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined
def below(bits: np.uint64, limit: int) -> int:
    """0 .. limit - 1 from the low 32 of `bits`."""
    return int(np.int64(((bits & np.uint64(0xFFFFFFFF)) * np.uint64(limit)) >> np.uint64(32)))


@inlined
def allowed_rise(bits: np.uint64, temperature: int, deviates: I64) -> int:
    """Temperature times an exponential deviate from 12 of `bits`: the rise of the objective that is still
    accepted.

    `deviates` int64 [4096] holds -log(u) in units of 2^-16; the shifts keep the product below 2^63.
    """
    return ((temperature >> 20) * deviates[np.int64(bits & np.uint64(4095))]) << 4


@inlined
def partner(bits: np.uint64, place: int, window: int, by_length: I64) -> int:
    """A sample whose place in `by_length` differs from `place` by 1 .. window, or more at the ends."""
    p = place - window + below(bits, 2 * window)
    if p >= place:
        p += 1
    if p < 0:
        p += 2 * window + 1
    elif p >= len(by_length):
        p -= 2 * window + 1
    return by_length[p]


@inlined
def exchange(load: I32, h: I32, c1: int, r1: int, c2: int, r2: int, i: int, j: int, peaks: I32) -> None:
    """Maxima over E once i of block (c1, r1) and j of (c2, r2) have changed places, into peaks[c1, 0],
    peaks[c2, 1].
    """
    ep, layers = load.shape[2:]
    for k in range(layers):
        d = np.int32(h[j, 0, k] - h[i, 0, k])
        peaks[c1, 0, k] = np.int32(load[c1, r1, 0, k] + d)
        peaks[c2, 1, k] = np.int32(load[c2, r2, 0, k] - d)
    for e in range(1, ep):
        for k in range(layers):
            d = np.int32(h[j, e, k] - h[i, e, k])
            peaks[c1, 0, k] = max(peaks[c1, 0, k], np.int32(load[c1, r1, e, k] + d))
            peaks[c2, 1, k] = max(peaks[c2, 1, k], np.int32(load[c2, r2, e, k] - d))


@inlined
def carry_out(
    load: I32, h: I32, peak: I32, peaks: I32, c1: int, r1: int, c2: int, r2: int, i: int, j: int
) -> None:
    """Apply the exchange that `peaks` describes."""
    ep, layers = load.shape[2:]
    for e in range(ep):
        for k in range(layers):
            d = np.int32(h[j, e, k] - h[i, e, k])
            load[c1, r1, e, k] = np.int32(load[c1, r1, e, k] + d)
            load[c2, r2, e, k] = np.int32(load[c2, r2, e, k] - d)
    for k in range(layers):
        peak[c1, r1, k] = peaks[c1, 0, k]
        peak[c2, r2, k] = peaks[c2, 1, k]


@inlined
def one_changed(peak: I32, c: int, r: int, peaks: I32, row: int) -> int:
    """Expert work of column c with peaks[c, row] in the place of replica r."""
    replicas, layers = peak.shape[1:]
    total = 0
    if replicas == 1:
        for k in range(layers):
            total += peaks[c, row, k]
        return total
    last = replicas - 1 if r < replicas - 1 else replicas - 2
    if replicas == 2:
        for k in range(layers):
            total += max(peaks[c, row, k], peak[c, last, k])
        return total
    for k in range(layers):
        peaks[c, 2, k] = peaks[c, row, k]
    for s in range(last):
        if s != r:
            for k in range(layers):
                peaks[c, 2, k] = max(peaks[c, 2, k], peak[c, s, k])
    for k in range(layers):
        total += max(peaks[c, 2, k], peak[c, last, k])
    return total


@inlined
def two_changed(peak: I32, c: int, r1: int, r2: int, peaks: I32) -> int:
    """Expert work of column c with peaks[c, 0] in the place of replica r1 and peaks[c, 1] in that of r2."""
    replicas, layers = peak.shape[1:]
    total = 0
    if replicas == 2:
        for k in range(layers):
            total += max(peaks[c, 0, k], peaks[c, 1, k])
        return total
    for k in range(layers):
        peaks[c, 2, k] = max(peaks[c, 0, k], peaks[c, 1, k])
    for s in range(replicas):
        if s not in (r1, r2):
            for k in range(layers):
                peaks[c, 2, k] = max(peaks[c, 2, k], peak[c, s, k])
    for k in range(layers):
        total += peaks[c, 2, k]
    return total


@inlined
def excess_change(peak: I32, c: int, r: int, peaks: I32, row: int, cap: int) -> int:
    """Change of the assignments above `cap` at the busiest (destination, layer) of block (c, r) under
    peaks[c, row].
    """
    old, new = 0, 0
    for k in range(peak.shape[2]):
        old = max(old, int(peak[c, r, k]))
        new = max(new, int(peaks[c, row, k]))
    return max(0, new - cap) - max(0, old - cap)


@inlined
def busiest(cell: I64, what: int, c: int, now: int, a: int, value_a: int, b: int, value_b: int) -> int:
    """The maximum over ranks of cell[what, c], now `now`, once ranks a and b (may be one) hold other
    values.
    """
    new = max(value_a, value_b)
    if new >= now:
        return new
    if cell[what, c, a] < now and cell[what, c, b] < now:
        return now
    for w in range(cell.shape[2]):
        if w not in (a, b):
            new = max(new, cell[what, c, w])
    return new


@inlined
def score(book: I64, expert: int, token: int, pair: int, excess: int) -> tuple[int, int]:
    """Change of the objective, and of the objective plus the pressure on work above the guard, for these
    changes.
    """
    rise = book[W_EXPERT] * expert + book[W_TOKEN] * token + book[W_PAIR] * pair + book[W_EXCESS] * excess
    if book[PRESSURE] == 0:
        return rise, rise
    x, t, q = book[EXPERT] - book[G_EXPERT], book[TOKEN] - book[G_TOKEN], book[PAIR] - book[G_PAIR]
    over = book[W_EXPERT] * (max(0, x + expert) - max(0, x))
    over += book[W_TOKEN] * (max(0, t + token) - max(0, t))
    over += book[W_PAIR] * (max(0, q + pair) - max(0, q))
    return rise, rise + book[PRESSURE] * over


@inlined
def enter(book: I64, expert: int, token: int, pair: int, excess: int, rise: int) -> bool:
    """Book an accepted change; true where the state is now the best one within guard and cap."""
    book[ACCEPTED] += 1
    book[EXPERT] += expert
    book[TOKEN] += token
    book[PAIR] += pair
    book[EXCESS] += excess
    book[OBJECTIVE] += rise
    if book[OBJECTIVE] >= book[BEST] or book[EXCESS] > 0:
        return False
    if book[EXPERT] > book[G_EXPERT] or book[TOKEN] > book[G_TOKEN] or book[PAIR] > book[G_PAIR]:
        return False
    book[BEST] = book[OBJECTIVE]
    book[FOUND] = 1
    return True
