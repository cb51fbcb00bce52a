"""Small batches for the planner's tests: lengths and loads that differ per sample, destination and layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import BalanceConfig
from olmo_rl.planning.planners import schedule_step
from olmo_rl.planning.schedule import Schedule, StepInput
from olmo_rl.planning.searches.starts import SearchProblem
from olmo_rl.types import Topology


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch: `lengths` [N], `loads` [N, E, L] or None, and where it is to run."""

    lengths: NDArray[np.int64]
    loads: NDArray[np.int32] | None
    topology: Topology
    budget: int

    def plan(self, balance: BalanceConfig) -> Schedule:
        ids = [f"sample-{i}" for i in range(len(self.lengths))]
        return schedule_step(
            StepInput(
                lengths=self.lengths,
                ids=ids,
                loads=self.loads,
                budget=self.budget,
                topology=self.topology,
                balance=balance,
            )
        )

    def problem(self, *, proposals: int | None = None, cap: int | None = None) -> SearchProblem:
        """The search problem of this batch."""
        return SearchProblem.of(
            self.lengths,
            loads=self.loads,
            budget=self.budget,
            topology=self.topology,
            seed=1,
            cap=cap,
            proposals=proposals,
        )


def loads_of(
    rng: np.random.Generator, lengths: NDArray[np.int64], *, ep: int, layers: int
) -> NDArray[np.int32]:
    """Two assignments a token, skewed differently in every (sample, layer)."""
    shares = rng.dirichlet(np.full(ep, 0.7), size=(len(lengths), layers))
    return np.stack([rng.multinomial(2 * n, shares[i]).T for i, n in enumerate(lengths)]).astype(np.int32)


def random_case(
    seed: int, *, world: int, ep: int, per_rank: int, layers: int = 5, longest: int = 60, room: float = 2.0
) -> Case:
    """`per_rank` samples a rank of 1 .. `longest` tokens; the budget is `room` times the longest."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(1 + rng.exponential(longest / 3, world * per_rank).astype(np.int64), longest)
    loads = loads_of(rng, lengths, ep=ep, layers=layers) if layers else None
    return Case(
        lengths=lengths,
        loads=loads,
        topology=Topology(world, ep),
        budget=int(lengths.max() * room),
    )
