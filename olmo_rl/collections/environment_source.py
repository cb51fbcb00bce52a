"""Collections from an environment: rank 0 holds the environment process and the gateway, every rank an engine
or none.

Rank 0 chooses tasks, asks for their episodes and makes samples of the records; the others learn the result.
What engines and environments take, ranks wait for outside of collectives (`ExpertParallelStrategy.meet`).
Tasks, the numbers of episodes and their order follow from (seed, collection, round) alone, never from the
time of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from olmo_rl.collections.environment_parts import EnvironmentParts, OpenedEnvironment
from olmo_rl.collections.sources import sampling_of
from olmo_rl.config import Config
from olmo_rl.data.chat import supervised_sample
from olmo_rl.data.means import Mean
from olmo_rl.environments.environment import HELD_OUT, TRAINING
from olmo_rl.rollouts.environments import EnvironmentProcess, Record
from olmo_rl.rollouts.traces import Tally, samples_of
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, Refusal, Sample

_SHOWN = 5  # kinds of faults in one note


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Episodes under way, as rank 0 holds them: `names` and `groups` of each, in order; `slots`: their
    numbers.
    """

    names: list[str]
    groups: list[str]
    slots: list[int]
    records: Future[list[Record]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What became of episodes: their samples in order, and the count of everything."""

    samples: list[Sample]
    tally: Tally


class Episodes:
    """Episodes of an environment, as all ranks call it; rank 0 alone has a process behind it."""

    def __init__(self, config: Config, *, parts: EnvironmentParts, strategy: ExpertParallelStrategy) -> None:
        self._config = config
        self._parts = parts
        self._strategy = strategy

    def ask(
        self, tasks: Sequence[int], *, side: str, names: Sequence[str], copies: int, greedy: bool
    ) -> Asked | None:
        """Begin `copies` episodes of every task, at rank 0. `names`: of the tasks' groups."""
        host = self._parts.host
        if host is None:
            return None
        rollouts = self._config.rollouts
        groups = [name for name in names for _ in range(copies)]
        own = [f"{name}-s{copy}" for name in names for copy in range(copies)]
        slots = host.gateway.open_slots(
            own,
            temperature=0.0 if greedy else rollouts.temperature,
            top_p=1.0 if greedy else rollouts.top_p,
        )
        numbers = [task for task in tasks for _ in range(copies)]
        host.engine.run(host.engine.compare_versions()).result()
        records = host.process.run([(slot, side, task) for slot, task in zip(slots, numbers, strict=True)])
        return Asked(names=own, groups=groups, slots=slots, records=records)

    def take(self, asked: Asked | None) -> Played:
        """The samples of all episodes, on every rank. A collective of all ranks."""
        self._strategy.meet(None if asked is None else asked.records)
        (played,) = together([self._strategy.from_rank_zero(lambda: outcome(lambda: self._played(asked)))])
        return played

    def _played(self, asked: Asked | None) -> Played:
        host = self._parts.host
        assert host is not None, "rank 0 hosts the environment"
        assert asked is not None, "rank 0 asks"
        tally = Tally()
        noted = host.gateway.close_slots(asked.slots)
        records = asked.records.result()
        if host.gateway.failure is not None:
            raise host.gateway.failure
        samples: list[Sample] = []
        for slot, group, record in zip(asked.slots, asked.groups, records, strict=True):
            samples += samples_of(
                record,
                slot=noted[slot],
                group=group,
                agents=self._parts.ready.agents,
                layout=self._config.model.expert_layout if self._config.replay else None,
                tally=tally,
            )
        return Played(samples=samples, tally=tally)


class EnvironmentSource:
    """Collections of a generating source whose prompts, turns and rewards are an environment's."""

    generates = True

    def __init__(self, config: Config, *, parts: EnvironmentParts, strategy: ExpertParallelStrategy) -> None:
        self._config = config
        self._parts = parts
        self._episodes = Episodes(config, parts=parts, strategy=strategy)
        self._layout = config.model.expert_layout
        self._ready = parts.ready
        self._place = 0  # from which new tasks are taken, in the order of training tasks
        self._returned: list[int] = []  # places that come first: their episodes were not trained
        self._ahead: _Ahead | None = None
        self._looks_ahead = parts.remote is not None and _may_lag(config)

    def draw(self, index: int, *, attempt: int, groups: int) -> Collection | None:
        """Collection `index`, round `attempt`, of `groups` groups."""
        key = (index, attempt, groups)
        if self._ahead is not None and self._ahead.key == key:
            asked, self._ahead = self._ahead.asked, None
        else:
            asked = self._ask(key, places=self._take(groups))
        played = self._episodes.take(asked)
        if attempt == 0 and self._looks_ahead:
            following, places = (index + 1, 0, groups), self._take(groups)
            self._ahead = _Ahead(key=following, places=places, asked=self._ask(following, places=places))
        return Collection(
            samples=played.samples,
            layout=self._layout,
            source=f"environment {self._config.environment.taskset}",
            tokenizer=self._config.model.tokenizer,
            sampling=sampling_of(self._config.rollouts),
            notes=notes_of(played.tally, where=f"collection {index}"),
            counts=played.tally.counted(),
            facts=played.tally.means() | {"rollouts/epoch": self._place / self._ready.training},
        )

    def state_dict(self) -> dict[str, Any]:
        """The place in the order of tasks, those to be given once more, and the number of tasks."""
        unused = [] if self._ahead is None else self._ahead.places
        return {"place": self._place, "returned": [*unused, *self._returned], "tasks": self._ready.training}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["tasks"] != self._ready.training:
            raise Refusal(
                f"environment.taskset={self._config.environment.taskset}: {self._ready.training} training "
                f"tasks, there were {state['tasks']} when the checkpoint was saved: restore them, or start "
                "from the weights with init_from"
            )
        self._place, self._returned = state["place"], list(state["returned"])

    def _take(self, count: int) -> list[int]:
        """The next places: returned ones, then new ones."""
        taken = self._returned[:count]
        del self._returned[:count]
        new = count - len(taken)
        taken += range(self._place, self._place + new)
        self._place += new
        return taken

    def _ask(self, key: tuple[int, int, int], *, places: Sequence[int]) -> Asked | None:
        index, attempt, _ = key
        order = (self._ready.training, (self._config.seed, 0))
        return self._episodes.ask(
            [task_at(place, tasks=order[0], seeds=order[1]) for place in places],
            side=TRAINING,
            names=[f"c{index}-a{attempt}-p{number}" for number in range(len(places))],
            copies=self._config.rollouts.group_size,
            greedy=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ahead:
    """A collection that was asked for before it is drawn, and the places of its tasks."""

    key: tuple[int, int, int]
    places: list[int]
    asked: Asked | None


def _may_lag(config: Config) -> bool:
    """Whether the collection after the present one may be generated while it trains."""
    lag, allowed = 2 * config.batch.steps_per_collection - 1, config.rollouts.max_lag
    return allowed is not None and allowed >= lag


def task_at(place: int, *, tasks: int, seeds: Sequence[int]) -> int:
    """The number of the task at a place of an order that has each of them once a pass."""
    turn, position = divmod(place, tasks)
    return int(np.random.default_rng([*seeds, turn]).permutation(tasks)[position])


def notes_of(tally: Tally, *, where: str) -> tuple[str, ...]:
    """One line about episodes that failed, where there are any."""
    lost = sum(tally.counts[name] for name in ("failed", "timeouts", "empty", "unaccounted"))
    if not lost:
        return ()
    kinds = [f"{count} x {fault}" for fault, count in tally.faults.most_common(_SHOWN)]
    reasons = "; ".join(kinds) or "they ran out of time, or wrote nothing"
    return (f"{where}: {lost} of {tally.counts['episodes']} episodes are not trained: {reasons}",)


class EnvironmentDemonstrations:
    """Demonstrations of training tasks, each once a pass, without end."""

    def __init__(
        self, config: Config, *, opened: OpenedEnvironment, strategy: ExpertParallelStrategy
    ) -> None:
        self._config = config
        self._opened = opened
        self._strategy = strategy
        self._draws = 0

    def draw(self, count: int) -> list[Sample]:
        """The next `count` documents, the same on all ranks. A collective of all ranks."""
        process = self._opened.process
        self._strategy.meet(None if process is None else process.loaded)
        asked = None if process is None else outcome(lambda: self._ask(process, count=count))
        self._strategy.meet(asked if isinstance(asked, Future) else None)
        mine = outcome(asked.result) if isinstance(asked, Future) else asked
        (found,) = together([self._strategy.from_rank_zero(lambda: mine)])
        assert found is not None, "rank 0 has the process"
        samples = [self._sample(one, id=f"step{self._draws}-{i}") for i, one in enumerate(found)]
        self._draws += 1
        return samples

    def _ask(self, process: EnvironmentProcess, *, count: int) -> Future[list[Mapping[str, bytes]]]:
        tasks, first = process.loaded.result().training, self._draws * count
        numbers = [
            task_at(first + place, tasks=tasks, seeds=(self._config.seed, 1)) for place in range(count)
        ]
        return process.demonstrate(numbers, seconds=self._config.environment.start_seconds)

    def facts(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, int]:
        return {"draws": self._draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._draws = state["draws"]

    def _sample(self, found: Mapping[str, bytes], *, id: str) -> Sample:
        tokens = np.frombuffer(found["tokens"], dtype="<i4").astype(np.int32)
        if len(tokens) > self._config.model.max_seq_len:
            raise Refusal(
                f"warm_start: a demonstration of environment.taskset={self._config.environment.taskset} has "
                f"{len(tokens)} tokens: raise model.max_seq_len={self._config.model.max_seq_len}"
            )
        return supervised_sample(id, tokens, trained=np.frombuffer(found["mask"], dtype=np.bool_))


class HeldOutEpisodes:
    """Greedy episodes of held-out tasks, the same in every run."""

    def __init__(self, config: Config, *, parts: EnvironmentParts, strategy: ExpertParallelStrategy) -> None:
        self._config = config
        self._parts = parts
        self._episodes = Episodes(config, parts=parts, strategy=strategy)

    def score(self, *, step: int) -> tuple[float | None, Mapping[str, float]]:
        """The mean of `environment.success` (null: of the reward) over the episodes that were judged, and
        their metrics. None where none was. A collective of all ranks.
        """
        tasks = range(min(self._config.task.eval_problems, self._parts.ready.held_out))
        names = [f"e{step}-p{number}" for number in range(len(tasks))]
        played = self._episodes.take(
            self._episodes.ask(tasks, side=HELD_OUT, names=names, copies=1, greedy=True)
        )
        return self._mean(played), played.tally.counted() | played.tally.means()

    def _mean(self, played: Played) -> float | None:
        name = self._config.environment.success
        if name is None:
            return Mean.of({sample.episode: sample.reward for sample in played.samples}.values()).value
        values = played.tally.values.get(f"metric/{name}")
        if values is None and not played.tally.counts["rollouts"]:
            return None
        if values is None:
            known = sorted(key.removeprefix("metric/") for key in played.tally.values if "metric/" in key)
            raise Refusal(
                f"environment.success={name}: no rollout has this metric: there are "
                f"{', '.join(known) or 'none'}"
            )
        return Mean.of(values).value
