"""J in fixed point, so that searches compare exact integers and decide alike on every machine."""

from __future__ import annotations

from dataclasses import dataclass

from olmo_rl.planning.objective import Bounds, Work
from olmo_rl.types import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """J in fixed point: what a unit of each work, and an assignment above the cap, adds to the integer
    objective.
    """

    expert: int
    token: int
    pair: int
    excess: int

    def objective(self, work: Work | Bounds) -> int:
        return (
            self.expert * (work.expert_work or 0) + self.token * work.token_work + self.pair * work.pair_work
        )


def fixed_point(base: Work, *, topology: Topology) -> Weights:
    """Weights with J = 1 per term at `base`, scaled so that no plan and no pressure reaches 2^63."""
    one = 2**54 // topology.world_size
    expert = one // base.expert_work if base.expert_work else 0
    # One assignment too many costs as much as 16 units of expert work, whatever layers they are in.
    return Weights(
        expert=expert, token=one // base.token_work, pair=one // base.pair_work, excess=16 * max(expert, 1)
    )
