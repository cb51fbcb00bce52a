"""The annealing against exhaustive enumeration: it reaches the optimum within its guard, and nothing beats
that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from planner_cases import Case, random_case

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.objective import Work, objective
from olmo_rl.planning.searches.starts import least

INSTANCES = 20


def one_column(case: Case) -> Iterator[tuple[int, int, int, int]]:
    """Expert, token and pair work and packs of every way to give 12 samples to 4 ranks (two replicas), 3 to
    each.
    """
    assert case.loads is not None
    n, h = case.lengths, case.loads.astype(np.int64)
    for left in itertools.combinations(range(12), 6):
        right = tuple(i for i in range(12) if i not in left)
        if 0 not in left:  # the replicas are alike
            continue
        expert = int(np.maximum(h[list(left)].sum(0).max(0), h[list(right)].sum(0).max(0)).sum())
        halves = []
        for side in (left, right):
            ranks = [(three, tuple(set(side) - set(three))) for three in itertools.combinations(side, 3)]
            halves.append(
                {tuple(max(int((n[list(r)] ** p).sum()) for r in pair) for p in (1, 2)) for pair in ranks}
            )
        for (t1, q1), (t2, q2) in itertools.product(*halves):
            yield expert, max(t1, t2), max(q1, q2), 1


def value(works: NDArray[np.int64], base: Work) -> NDArray[np.float64]:
    assert base.expert_work is not None
    return works[:, 0] / base.expert_work + works[:, 1] / base.token_work + works[:, 2] / base.pair_work


def test_the_enumerated_optimum_within_the_guard_is_reached_and_never_beaten() -> None:
    reached = improved = 0
    for seed in range(INSTANCES):
        case = random_case(100 + seed, world=4, ep=2, per_rank=3, layers=3, room=100)
        found = case.plan(BalanceConfig(kind=BalanceKind.anneal, proposals=20_000, seconds=600))
        start = case.plan(BalanceConfig(kind=BalanceKind.anneal, proposals=0)).after
        works = np.array(list(one_column(case)))
        values = value(works, found.before)
        j, j_start = objective(found.after, base=found.before), objective(start, base=found.before)
        assert values.min() <= j * (1 + 1e-12)
        bound = objective(found.bounds, base=found.before)
        assert bound <= values.min() * (1 + 1e-12)
        optimum = j_start
        for guard in (least(start, found.before), start):
            limits = (guard.expert_work, guard.token_work, guard.pair_work, guard.packs_per_rank)
            within = values[(works <= limits).all(axis=1)]
            if len(within) and within.min() < j_start * (1 - 1e-12):
                optimum = within.min()
                break
        assert j >= optimum * (1 - 1e-9), "the enumeration is complete"
        reached += j <= optimum * (1 + 1e-9)
        improved += j < j_start
    assert reached >= 0.95 * INSTANCES
    assert improved >= 0.5 * INSTANCES
