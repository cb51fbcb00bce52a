"""Which ranks compute a share of another rank's experts in one optimizer step, and the loads that result.

Owns the choice of shares from recorded counts, the hash that assigns a row to its expert's owner or to a
guest, and the counting of assignments by slot. A row's hash follows from its sample and its place there, so
that loads add up over samples and are known exactly before the step. All arithmetic is on integers: equal
counts give equal loans on every machine.

Slots: every EP rank has `experts_per_rank` slots of its own, then `guests` guest slots, the ranks one after
the other; the guests of a rank lie in the order of their experts. Shapes: N samples, T rows of one, L routed
layers, X experts, K of them per row, E EP ranks, S slots of all ranks, H the most loans of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.loads import check_routes, mix, refuse_id, stable_hash, tail_routes
from olmo_rl.types import ExpertLayout, Lending, Loan, Sample, Topology

Int = TypeVar("Int", np.int32, np.int64)

WHOLE = 1 << 16  # values of a row's hash
TOLERANCE = 2  # percent above the mean load up to which a layer stays at home
ENOUGH = 1  # percent above the mean load up to which the ranks of other layers are relieved
_GOLDEN = 0x9E3779B97F4A7C15


def row_hashes(sample_id: str, rows: int) -> NDArray[np.uint16]:
    """uint16 [rows]: a well-mixed hash of (sample id, row) for every row of a sample, its tail included."""
    counter = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (mix(counter + np.uint64(stable_hash(sample_id))) >> np.uint64(48)).astype(np.uint16)


def ranks_of_a_node(topology: Topology, *, devices: int) -> int:
    """The largest number such that as many consecutive EP ranks, counted from 0, lie on one node of `devices`
    ranks in every replica.
    """
    return math.gcd(devices, topology.ep_degree)


def choose_loans(
    counts: NDArray[np.int64], *, topology: Topology, guests: int, node_ranks: int
) -> Lending | None:
    """The loans for assignments `counts` [L, X] of a step; None where every layer is even enough at home.

    A layer whose busiest rank is at most 2 % above the mean stays as it is. In the others, as long as the
    busiest rank is more than 1 % above the mean and a rank below the mean has a free guest slot, the lightest
    such rank (on the busiest one's node where one there is more than 2 % below the mean) takes what it lacks
    from the busiest: a share of its smallest expert with as many rows, else its largest. The load of the
    busiest rank never grows.
    """
    layers = tuple(
        _loans_of_layer(row, ranks=topology.ep_degree, guests=guests, node_ranks=node_ranks)
        for row in counts.tolist()
    )
    return Lending(guests=guests, layers=layers) if any(layers) else None


def _loans_of_layer(counts: list[int], *, ranks: int, guests: int, node_ranks: int) -> tuple[Loan, ...]:
    """The loans of one layer; loads are counted in 1 / WHOLE of an assignment."""
    owned = len(counts) // ranks
    lent = [0] * len(counts)  # of WHOLE
    load = [sum(counts[r * owned : (r + 1) * owned]) * WHOLE for r in range(ranks)]
    total, free = sum(load), [guests] * ranks
    loans: list[Loan] = []
    if max(load) * ranks * 100 <= total * (100 + TOLERANCE):
        return ()
    enough = total * (100 + ENOUGH)
    while True:
        busiest = max(range(ranks), key=load.__getitem__)
        if load[busiest] * ranks * 100 <= enough:
            break
        host = _host(load, busiest=busiest, free=free, total=total, node_ranks=node_ranks)
        if host is None:
            break
        wanted = total // ranks - load[host]
        if sum(value * ranks * 100 > enough for value in load) == 1:
            wanted = min(wanted, load[busiest] - total // ranks)  # no other rank needs the host
        left = {
            e: counts[e] * (WHOLE - lent[e])
            for e in range(busiest * owned, (busiest + 1) * owned)
            if lent[e] < WHOLE and counts[e] and all((loan.expert, loan.host) != (e, host) for loan in loans)
        }
        if not left:
            break
        able = [e for e, rows in left.items() if rows >= wanted]
        expert = min(able, key=left.__getitem__) if able else max(left, key=left.__getitem__)
        parts = min(WHOLE - lent[expert], wanted // counts[expert])
        if parts == 0:
            break
        first = lent[expert]
        loans.append(Loan(expert=expert, host=host, slot=0, first=first, below=first + parts))
        lent[expert] += parts
        free[host] -= 1
        load[busiest] -= counts[expert] * parts
        load[host] += counts[expert] * parts
    return tuple(
        replace(loan, slot=sum(one.host == loan.host and one.expert < loan.expert for one in loans))
        for loan in loans
    )


def _host(
    load: Sequence[int], *, busiest: int, free: Sequence[int], total: int, node_ranks: int
) -> int | None:
    """The rank that takes a share from the busiest one, None where no rank below the mean has a free slot."""
    ranks = len(load)
    below = [r for r in range(ranks) if free[r] and r != busiest and load[r] * ranks < total]
    near = [
        r
        for r in below
        if r // node_ranks == busiest // node_ranks and load[r] * ranks * 100 < total * (100 - TOLERANCE)
    ]
    return min(near or below, key=load.__getitem__, default=None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotTable:
    """Where the rows of every expert go: `limits` int32 [L, X, H], rising, and `slots` int32 [L, X, H + 1]. A
    row with hash u goes to `slots[l, x, h]`, h the number of limits that are at most u. `slots_per_rank`
    counts guest slots.
    """

    limits: NDArray[np.int32]
    slots: NDArray[np.int32]
    slots_per_rank: int
    ranks: int

    @classmethod
    def of(cls, lending: Lending | None, *, layout: ExpertLayout, topology: Topology) -> SlotTable:
        """The table of these loans; None: all experts at home, without guest slots."""
        layers, experts = len(layout.routed_layers), layout.num_experts
        owned = topology.experts_per_rank(experts)
        width = owned + (0 if lending is None else lending.guests)
        loans = ((),) * layers if lending is None else lending.layers
        assert len(loans) == layers, "loans are given for every routed layer"
        of_expert: dict[tuple[int, int], list[Loan]] = {}
        for layer, found in enumerate(loans):
            for loan in found:
                of_expert.setdefault((layer, loan.expert), []).append(loan)
        most = max(map(len, of_expert.values()), default=0)
        ids = np.arange(experts, dtype=np.int32)
        home = ids // owned * width + ids % owned
        limits = np.zeros((layers, experts, most), dtype=np.int32)
        slots = np.broadcast_to(home[None, :, None], (layers, experts, most + 1)).copy()
        for (layer, expert), shares in of_expert.items():
            for place, loan in enumerate(shares):
                limits[layer, expert, place:] = loan.below
                slots[layer, expert, place] = loan.host * width + owned + loan.slot
        return cls(limits=limits, slots=slots, slots_per_rank=width, ranks=topology.ep_degree)

    @property
    def num_slots(self) -> int:
        return self.slots_per_rank * self.ranks

    def count(self, routes: NDArray[np.integer], hashes: NDArray[np.uint16]) -> tuple[NDArray[np.int64], int]:
        """int64 [S, L] assignments of `routes` [rows, L, K] with `hashes` [rows], and the flat index of the
        first id out of range, or -1.
        """
        from olmo_rl.planning.numba_kernels import HAVE_NUMBA, slot_kernel  # numba is slow to import

        if not HAVE_NUMBA or not routes.size:
            return count_numpy(routes, hashes, table=self)
        counts = np.zeros((routes.shape[1], self.num_slots), dtype=np.int64)
        unsigned = np.ascontiguousarray(routes).view(f"u{routes.dtype.itemsize}")  # negative ids become huge
        if slot_kernel(unsigned, hashes, self.limits, self.slots, counts):
            return count_numpy(routes, hashes, table=self)
        return counts.T, -1


def count_numpy(
    routes: NDArray[np.integer], hashes: NDArray[np.uint16], *, table: SlotTable
) -> tuple[NDArray[np.int64], int]:
    """`SlotTable.count` without numba, and its oracle."""
    layers, experts = table.limits.shape[:2]
    counts = np.zeros((table.num_slots, layers), dtype=np.int64)
    bad = (routes < 0) | (routes >= experts)
    if bad.any():
        return counts, int(np.argmax(bad))
    for layer in range(layers):
        ids = routes[:, layer].astype(np.int64)
        place = (hashes.astype(np.int32)[:, None, None] >= table.limits[layer][ids]).sum(axis=-1)
        counts[:, layer] = np.bincount(table.slots[layer][ids, place].ravel(), minlength=table.num_slots)
    return counts, -1


def slot_loads(
    samples: Sequence[Sample], *, table: SlotTable, layout: ExpertLayout, topology: Topology
) -> NDArray[np.int32]:
    """int32 [N, S, L]: assignments of every sample to every slot, tails included. Refuses routes as
    `loads.collection_loads` does.
    """
    loads = np.zeros((len(samples), table.num_slots, len(layout.routed_layers)), dtype=np.int32)
    for i, sample in enumerate(samples):
        routes, hashes = check_routes(sample, layout=layout), row_hashes(sample.id, len(sample))
        counted, bad = table.count(routes, hashes[:-1])
        if bad >= 0:
            refuse_id(sample, routes, bad, layout=layout)
        tail = tail_routes(sample.id, layout=layout, topology=topology)
        loads[i] = counted + table.count(tail[None], hashes[-1:])[0]
    return loads


def folded(loads: NDArray[Int], *, ranks: int) -> NDArray[Int]:
    """Loads by slot, or by expert at home, as loads by EP rank: [..., S, L] -> [..., E, L]."""
    *front, slots, layers = loads.shape
    return loads.reshape(*front, ranks, slots // ranks, layers).sum(axis=-2, dtype=loads.dtype)


def expert_loads(samples: Sequence[Sample], *, layout: ExpertLayout, topology: Topology) -> NDArray[np.int32]:
    """int32 [N, X, L]: `slot_loads` of every expert, without loans."""
    table = SlotTable.of(None, layout=layout, topology=topology)
    return slot_loads(samples, table=table, layout=layout, topology=topology)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lent:
    """A lending that relieves a step, with its table and exact loads: `slots` int32 [N, S, L] under it,
    `home` int32 [N, E, L] with every expert at home.
    """

    lending: Lending
    table: SlotTable
    slots: NDArray[np.int32]
    home: NDArray[np.int32]

    @property
    def loads(self) -> NDArray[np.int32]:
        """int32 [N, E, L]: assignments of every sample to every EP rank."""
        return folded(self.slots, ranks=self.table.ranks)


def lend(
    samples: Sequence[Sample],
    *,
    experts: NDArray[np.int32],
    layout: ExpertLayout,
    topology: Topology,
    guests: int,
    node_ranks: int,
) -> Lent | None:
    """The lending for one step with the loads `experts` [N, X, L], None where nothing is lent.

    Shares are chosen by their expected rows; a layer whose busiest rank they do not relieve, as exactly
    counted, stays at home.
    """
    chosen = choose_loans(
        experts.sum(axis=0, dtype=np.int64).T, topology=topology, guests=guests, node_ranks=node_ranks
    )
    if chosen is None:
        return None
    lent = under(chosen, samples=samples, experts=experts, layout=layout, topology=topology)
    kept = keep_what_helps(lent)
    if kept is None or kept == chosen:
        return None if kept is None else lent
    return under(kept, samples=samples, experts=experts, layout=layout, topology=topology)


def under(
    lending: Lending,
    *,
    samples: Sequence[Sample],
    experts: NDArray[np.int32],
    layout: ExpertLayout,
    topology: Topology,
) -> Lent:
    """A given lending with the loads of these samples."""
    table = SlotTable.of(lending, layout=layout, topology=topology)
    return Lent(
        lending=lending,
        table=table,
        slots=slot_loads(samples, table=table, layout=layout, topology=topology),
        home=folded(experts, ranks=topology.ep_degree),
    )


def keep_what_helps(lent: Lent) -> Lending | None:
    """The loans of layers whose busiest rank they relieve; None where there are none."""
    before = lent.home.sum(axis=0, dtype=np.int64).max(axis=0)
    after = lent.loads.sum(axis=0, dtype=np.int64).max(axis=0)
    layers = tuple(
        loans if after[layer] < before[layer] else () for layer, loans in enumerate(lent.lending.layers)
    )
    return Lending(guests=lent.lending.guests, layers=layers) if any(layers) else None


def compile_slots() -> None:
    """Compile `slot_kernel` for every width of ids, or load it from the cache."""
    from olmo_rl.planning.numba_kernels import compile_for, slot_kernel

    table = np.zeros((1, 1, 1), dtype=np.int32)
    for width in (np.uint8, np.uint16, np.uint32, np.uint64):
        compile_for(
            slot_kernel,
            np.zeros((1, 1, 1), dtype=width),
            np.zeros(1, dtype=np.uint16),
            table,
            table,
            np.zeros((1, 1), dtype=np.int64),
        )
