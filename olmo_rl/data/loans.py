"""The loans of one step as one rank needs them, layer by layer: where rows go, and which experts leave.

Owns the step from experts to slots. Slots are those of `planning.lending`: every rank's own experts, then its
guest slots. A host receives its guests in the order of their experts, so that is the order of its slots.

Shapes: T rows of a pack, X experts, K of them per row, H the most loans of one expert, S slots of all ranks,
E expert-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from olmo_rl.planning.lending import SlotTable
from olmo_rl.types import ExpertLayout, Lending, Loan, Topology


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerLoans:
    """One layer's loans on one rank. `limits` int32 [X, H] and `slots` int64 [X, H + 1] as in `SlotTable`;
    `leaving` int64: this rank's own experts that it sends, counted from its first one, by host and then by
    expert; `sent` and `received` [E]: how many go to and come from every rank. Every rank has `guests` guest
    slots, of which the first `sum(received)` are taken.
    """

    limits: Tensor
    slots: Tensor
    num_slots: int
    guests: int
    leaving: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def place(self, ids: Tensor, hashes: Tensor) -> Tensor:
        """int64 [T, K]: the slot of every assignment `ids` int64 [T, K] of rows with `hashes` int32 [T]."""
        share = (hashes[:, None, None] >= self.limits[ids]).sum(dim=-1)
        return self.slots[ids, share]


def loans_of_rank(
    lending: Lending, *, layout: ExpertLayout, topology: Topology, rank: int, device: torch.device
) -> Mapping[int, LayerLoans]:
    """The loans of every routed layer, by global layer id, on expert-parallel rank `rank` of a replica."""
    table = SlotTable.of(lending, layout=layout, topology=topology)
    owned, ranks = topology.experts_per_rank(layout.num_experts), topology.ep_degree
    by_host = [sorted(loans, key=lambda loan: (loan.host, loan.expert)) for loans in lending.layers]
    for loans in by_host:
        _check(loans, owned=owned, guests=lending.guests)
    mine = [[loan for loan in loans if loan.expert // owned == rank] for loans in by_host]
    leaving = torch.tensor([loan.expert % owned for loans in mine for loan in loans], dtype=torch.int64)
    limits, slots = (
        torch.from_numpy(part).to(device, non_blocking=True) for part in (table.limits, table.slots)
    )
    slots, parts = slots.long(), leaving.to(device, non_blocking=True).split([len(loans) for loans in mine])
    return {
        layer: LayerLoans(
            limits=limits[i],
            slots=slots[i],
            num_slots=table.num_slots,
            guests=lending.guests,
            leaving=parts[i],
            sent=_counts([loan.host for loan in mine[i]], ranks=ranks),
            received=_counts([loan.expert // owned for loan in by_host[i] if loan.host == rank], ranks=ranks),
        )
        for i, layer in enumerate(layout.routed_layers)
    }


def _check(loans: Sequence[Loan], *, owned: int, guests: int) -> None:
    """Assert that the loans of a layer, by host and expert, fill the slots of every host in that order."""
    slot = {loan.host: 0 for loan in loans}
    for loan in loans:
        assert loan.expert // owned != loan.host, "an expert is no guest where it lives"
        assert loan.slot == slot[loan.host] < guests, "guests lie in the order of their experts"
        slot[loan.host] += 1


def _counts(ranks_of: Sequence[int], *, ranks: int) -> tuple[int, ...]:
    return tuple(ranks_of.count(rank) for rank in range(ranks))
