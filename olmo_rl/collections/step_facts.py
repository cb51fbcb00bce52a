"""What one step of continuous generation reports: ages, idle seconds, what was asked, cancelled and wasted.

Pure sums over what ranks reported; the names are those of metrics.csv.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from olmo_rl.collections.group_queue import Group
from olmo_rl.rollouts.occupancy import Activity, idle_seconds, predicted_lag, spread

AGES = 8  # columns of the histogram; the last one has the older tokens, too
DURATIONS = 1024  # of the latest answers, for the spread of their lengths
REQUESTS = ("asked", "received", "retried", "abandoned", "cancelled", "wasted", "wasted_tokens")
GROUPS = ("groups_again", "groups_lost")
ENDED = ("received", "abandoned", "cancelled")


@dataclass(kw_only=True, slots=True)
class Ledger:
    """Counts of a run. `counts`: since the last step, by name; `open`: requests that have not ended;
    `durations`: seconds of the latest answers; seconds of the window since the last step: its length, idle
    ones of an engine on average, of all requests together.
    """

    counts: Counter[str] = field(default_factory=Counter)
    open: int = 0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=DURATIONS))
    window: float = 0.0
    engine_idle: float = 0.0
    request_seconds: float = 0.0

    def add(
        self, counts: Sequence[Mapping[str, float]], activities: Sequence[Activity], *, urls: Sequence[str]
    ) -> None:
        """Take what all ranks reported at once."""
        for mine in counts:
            self.counts.update(mine)
            self.open += int(mine.get("asked", 0) - sum(mine.get(name, 0) for name in ENDED))
        for activity in activities:
            self.durations.extend(activity.seconds)
            self.request_seconds += activity.request_seconds
        window, idle = idle_seconds(activities, urls=urls)
        self.window += window
        self.engine_idle += idle

    def utilisation(self, slots: int) -> float | None:
        """Share of all slots for requests that were in use; None where no time passed."""
        return self.request_seconds / (self.window * slots) if self.window > 0 else None

    def close_step(self, *, slots: int) -> dict[str, float]:
        """The facts of the step, and a new window."""
        facts = {name: float(count) for name, count in self.counts.items() if "/" in name}
        others = [name for name in self.counts if "/" not in name]  # of the task
        facts |= {f"rollouts/{name}": float(self.counts[name]) for name in (*REQUESTS, *GROUPS, *others)}
        facts |= {"rollouts/under_way": float(self.open), "rollouts/engine_idle_s": self.engine_idle}
        utilisation = self.utilisation(slots)
        if utilisation is not None:
            facts["rollouts/utilisation"] = utilisation
        self.counts = Counter()
        self.window = self.engine_idle = self.request_seconds = 0.0
        return facts

    def state(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "open": self.open}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over counts; what was open ended with its process."""
        self.counts = Counter(state["counts"])
        self.counts["cancelled"] += state["open"]
        self.open = 0


def lag_facts(groups: Sequence[Group], *, step: int) -> dict[str, float]:
    """Shares of a step's generated tokens by age in updates."""
    tokens = sum(count for group in groups for count in group.ages.values())
    histogram = dict.fromkeys(range(AGES), 0)
    for group in groups:
        for version, count in group.ages.items():
            histogram[min(max(step - version, 0), AGES - 1)] += count
    return {f"rollouts/lag_{age}": count / tokens for age, count in histogram.items() if tokens}


def prediction(
    ledger: Ledger, *, under_way: int, queued: int, group_size: int, samples_per_step: int, max_lag: int
) -> float | None:
    """The lag that requests `under_way` at a publication and `queued` groups let expect; None until an answer
    came, since nobody knows how long one takes.
    """
    found = spread(ledger.durations, group_size=group_size)
    if found is None:
        return None
    return predicted_lag(
        under_way=under_way,
        queued=queued * group_size,
        spread=found,
        samples_per_step=samples_per_step,
        max_lag=max_lag,
    )
