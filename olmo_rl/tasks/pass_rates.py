"""How often problems are solved: pass@k and means over problems that may be unknown. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from olmo_rl.data.means import Mean


def pass_at(k: int, *, responses: int, solved: int) -> float:
    """The chance that at least one of `k` responses solves a problem of which `solved` of `responses` did,
    drawn without replacement: 1 - C(responses - solved, k) / C(responses, k), the unbiased estimate of
    arXiv 2107.03374.
    """
    assert 1 <= k <= responses, "needs as many responses as it draws"
    return 1.0 - math.comb(responses - solved, k) / math.comb(responses, k)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One held-out problem: the verdicts on its responses, NaN where one is unknown, and how many responses
    no engine gave.
    """

    domain: str | None
    rewards: tuple[float, ...]
    unanswered: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The result on some held-out problems. `reward`: mean verdict over the responses that were judged;
    `passes[k]`: mean pass@k over the problems with at least k of them.
    """

    problems: int
    answered: int
    reward: Mean
    passes: dict[int, Mean]

    def values(self) -> dict[str, float | None]:
        """By name of a metric; None where nothing was judged."""
        return {"accuracy": self.reward.value} | {f"pass_at_{k}": m.value for k, m in self.passes.items()}

    def record(self) -> dict[str, object]:
        """Everything, as plain values."""
        counts = {"problems": self.problems, "answered": self.answered, "judged": self.reward.count}
        known = {f"pass_at_{k}_problems": mean.count for k, mean in self.passes.items()}
        return {**self.values(), **counts, **known}


def measure(tried: Sequence[Tried], *, ks: Iterable[int], solved_from: float) -> Measured:
    """The result on these problems; a response with a reward of at least `solved_from` solves its problem."""
    judged = [[reward for reward in one.rewards if math.isfinite(reward)] for one in tried]
    return Measured(
        problems=len(tried),
        answered=sum(len(one.rewards) for one in tried),
        reward=Mean.of(reward for rewards in judged for reward in rewards),
        passes={
            k: Mean.of(
                pass_at(k, responses=len(rewards), solved=sum(r >= solved_from for r in rewards))
                for rewards in judged
                if len(rewards) >= k
            )
            for k in ks
        },
    )


def by_domain(tried: Sequence[Tried]) -> dict[str, list[Tried]]:
    """The problems of each domain, in order of appearance; none where there is one domain or less."""
    found: dict[str, list[Tried]] = {}
    for one in tried:
        if one.domain is not None:
            found.setdefault(one.domain, []).append(one)
    return found if len(found) > 1 else {}
