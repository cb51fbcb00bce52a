"""Lent experts in training, on two and four gloo ranks: the same gradients, rows where they were predicted.

guest_cases.py trains prepared steps under random loans, and runs of the recipe over skewed routes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guest_cases import CELLS, GUESTS, UPDATES, Cell, home, model_of, random_lending
from programs import run_program

from olmo_rl.config import Dtype
from olmo_rl.planning.lending import WHOLE
from olmo_rl.types import Topology

EXACT = 1e-12
SINGLE = (1e-6, 5e-6)  # of both updates in float32
SOUND = [cell for cells in CELLS.values() for cell in cells if not cell.fault]
FAULTY = [cell for cells in CELLS.values() for cell in cells if cell.fault]
Ranks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    """By world, what every rank found."""
    directory = tmp_path_factory.mktemp("guests")
    steps = [f"guest_cases:run_rank*{world}" for world in CELLS]
    run_program(directory, "guest_cases:write_inputs", *steps)
    return {
        world: [
            torch.load(directory / f"world{world}-rank{rank}.pt", weights_only=False) for rank in range(world)
        ]
        for world in CELLS
    }


def distance(ranks: Ranks, cell: Cell, kind: str, update: int) -> float:
    """The relative distance of a cell's tensors from those without loans: all shards as one vector."""
    apart = together = 0.0
    for rank in ranks:
        mine, theirs = rank[cell][kind][update], rank[home(cell)][kind][update]
        assert mine.keys() == theirs.keys()
        assert all(mine[name].shape == theirs[name].shape for name in mine)
        apart += sum(float((mine[name] - theirs[name]).double().square().sum()) for name in mine)
        together += sum(float(theirs[name].double().square().sum()) for name in mine)
    assert together > 0
    return (apart / together) ** 0.5


@pytest.mark.parametrize("cell", SOUND, ids=str)
def test_gradients_and_moments_of_two_updates_are_those_without_loans(
    ranks: dict[int, Ranks], cell: Cell
) -> None:
    found = ranks[cell.world]
    limits = SINGLE if cell.dtype is Dtype.float32 else (EXACT, EXACT)
    for update in range(UPDATES):
        assert distance(found, cell, "gradients", update) <= limits[update]
        assert distance(found, cell, "moments", update) <= limits[update]
        norms = found[0][cell]["norms"][update], found[0][home(cell)]["norms"][update]
        assert norms[0] == pytest.approx(norms[1], rel=2e-6 if cell.dtype is Dtype.float32 else EXACT)


@pytest.mark.parametrize("cell", FAULTY, ids=str)
def test_swapped_guests_and_misled_gradients_are_seen(ranks: dict[int, Ranks], cell: Cell) -> None:
    assert distance(ranks[cell.world], cell, "gradients", 0) > 1e-4


@pytest.mark.parametrize("cell", SOUND, ids=str)
def test_every_slot_of_every_rank_receives_the_rows_that_were_predicted(
    ranks: dict[int, Ranks], cell: Cell
) -> None:
    slots = cell.experts // cell.ep + GUESTS
    for number, rank in enumerate(ranks[cell.world]):
        found = rank[cell]
        assert [balance["mismatch"] for balance in found["balances"]] == [0] * UPDATES
        assert {len(counts) for counts in found["received"]} == {slots}
        assert all(len(counts) == slots - GUESTS for counts in rank[home(cell)]["received"])
        assert sum(counts[-GUESTS] for counts in found["received"]) > 0, f"rank {number}: no guest has rows"


def test_random_loans_have_whole_experts_and_an_expert_on_two_hosts() -> None:
    for cell in SOUND:
        layout, topology = model_of(cell).expert_layout, Topology(cell.world, cell.ep)
        layers = [
            loans
            for update in range(UPDATES)
            for loans in random_lending(layout, topology=topology, seed=update).layers
        ]
        assert any((loan.first, loan.below) == (0, WHOLE) for loans in layers for loan in loans)
        hosts = [
            len({loan.host for loan in loans if loan.expert == expert})
            for loans in layers
            for expert in range(cell.experts)
        ]
        assert max(hosts) >= 2 if cell.ep > 2 else max(hosts) == 1


@pytest.mark.parametrize(("world", "before", "after"), [(2, 1.2, 1.05), (4, 1.7, 1.10)])
def test_skewed_routes_arrive_evenly(
    ranks: dict[int, Ranks], world: int, before: float, after: float
) -> None:
    for rank in ranks[world]:
        events = rank["skewed"]["events"]
        balance, schedule = events["expert_balance"], events["expert_schedule"]
        assert balance["equal"]
        assert balance["observed"] == balance["predicted"]
        assert 1_400 <= sum(balance["observed"][0]) <= 2_000
        assert max(max(layer) * world / sum(layer) for layer in balance["observed"]) <= after
        assert sum(map(len, schedule["loans"])) > 0
        assert rank["skewed"]["published"] == [True, True]
        assert rank["skewed"]["totals"]["loss/kl"] == pytest.approx(0, abs=1e-6)
        assert rank["skewed"]["home"] >= before
