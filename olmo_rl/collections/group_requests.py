"""The requests of one rank in continuous generation: groups that its engines answer while it trains.

Owns futures and nothing that ranks share: what is asked, cancelled and given up is decided by all ranks
together (continuous.py), from what this reports. Groups are judged when they are whole, in the thread
that trains.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from olmo_rl.collections.group_queue import Group, Ticket
from olmo_rl.collections.sources import judge_together, seed_of, unjudged
from olmo_rl.config import Config
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.occupancy import Activity, Occupancy
from olmo_rl.rollouts.requests import Counts
from olmo_rl.tasks.problems import Problem, Task


@dataclass(kw_only=True, slots=True, eq=False)
class Begun:
    """A group under way: its answers so far, and the requests that have none."""

    group: Group
    problem: Problem
    futures: dict[int, Future[Generation | None]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Report:
    """What happened at one rank since its last report. `finished`: whole groups with the wall clock at which
    they were found; `failed`: groups with a request that no engine answers; `quiet`: seconds since any group
    was finished here; `fault`: why no answer will come any more.
    """

    finished: list[tuple[float, Group]]
    failed: list[Ticket]
    counts: dict[str, float]
    activity: Activity
    quiet: float
    fault: str | None


class GroupRequests:
    """State: the groups of this rank that are under way, and counts since the last report."""

    def __init__(self, config: Config, *, engine: RemoteEngine, task: Task, tokenizer: Tokenizer) -> None:
        self._rollouts, self._seed = config.rollouts, config.seed
        self._engine, self._task, self._tokenizer = engine, task, tokenizer
        self._begun: dict[Ticket, Begun] = {}
        self._news = threading.Event()
        self._attempts = Counts()
        self._counts: Counter[str] = Counter()
        self._occupancy = Occupancy()
        self._latest = time.monotonic()

    def ask(self, groups: Sequence[Group], *, problems: Mapping[Ticket, Problem]) -> None:
        """Hand what these groups lack to the engines, in this order."""
        requests, seeds, places = [], [], []
        for group in groups:
            ticket, problem = group.ticket, problems[group.ticket]
            self._begun[ticket] = Begun(group=group, problem=problem)
            tokens = self._tokenizer.encode(problem.prompt)
            for number in range(self._rollouts.group_size):
                if number not in group.samples:
                    requests.append(Request(id=f"{ticket.name}-s{number}", tokens=tokens))
                    seeds.append(seed_of(self._seed, ticket.index, 0))
                    places.append((ticket, number))
        if not requests:
            return
        engine, rollouts = self._engine, self._rollouts
        compared = engine.run(engine.compare_versions())

        async def answer(request: Request, seed: int) -> Generation | None:
            await asyncio.shield(asyncio.wrap_future(compared))
            return await engine.answer(
                request,
                max_new_tokens=rollouts.max_new_tokens,
                stop_tokens=[self._tokenizer.eos_id],
                temperature=rollouts.temperature,
                top_p=rollouts.top_p,
                seed=seed,
                counts=self._attempts,
                occupancy=self._occupancy,
            )

        futures = [engine.run(answer(*asked)) for asked in zip(requests, seeds, strict=True)]
        self._counts["asked"] += len(futures)
        for (ticket, number), future in zip(places, futures, strict=True):
            self._begun[ticket].futures[number] = future
            future.add_done_callback(lambda _: self._news.set())

    def wait(self, seconds: float) -> None:
        """Return after at most `seconds`, earlier where an answer comes."""
        self._news.wait(seconds)

    def report(self) -> Report:
        """Collect and judge what has been answered. Raises the Refusal of a request, or of a verifier."""
        self._news.clear()
        finished, failed, fault = [], [], None
        before = self._task.counts
        try:
            self._engine.check_alive()
            for ticket, begun in list(self._begun.items()):
                whole = self._collect(begun)
                if whole is False:
                    failed.append(ticket)
                    self.cancel(ticket)
                elif whole:
                    finished.append((time.time(), self._begun.pop(ticket).group))
        except RuntimeError as error:  # of ours: every rank ends with it
            fault = f"{type(error).__name__}: {error}"
        for name, count in self._task.counts.items():
            self._counts[name] += count - before[name]
        if finished or failed:
            self._latest = time.monotonic()
        self._counts["retried"] += self._attempts.retried
        self._attempts.retried = 0
        counts, self._counts = {name: float(count) for name, count in self._counts.items()}, Counter()
        return Report(
            finished=finished,
            failed=failed,
            counts=counts,
            activity=self._occupancy.read(),
            quiet=time.monotonic() - self._latest,
            fault=fault,
        )

    def _collect(self, begun: Begun) -> bool | None:
        """Take the answers that came; True where the group is whole, False where it never will be."""
        group = begun.group
        for number, future in list(begun.futures.items()):
            if not future.done():
                continue
            generation = future.result()
            del begun.futures[number]
            self._counts["abandoned" if generation is None else "received"] += 1
            if generation is None:
                return False
            sample = unjudged(
                generation,
                group=group.ticket.name,
                id=f"{group.ticket.name}-s{number}",
                problem=begun.problem,
                tokenizer=self._tokenizer,
            )
            group.add(number, sample, ages=ages_of(generation))
        if begun.futures:
            return None
        samples = [group.samples[number] for number in sorted(group.samples)]
        judge_together(samples, problem=begun.problem, task=self._task, rollouts=self._rollouts)
        return True

    def cancel(self, ticket: Ticket) -> None:
        """End the requests of a group in their engines, and count what its answers were."""
        begun = self._begun.pop(ticket)
        for future in begun.futures.values():
            # One that was answered a moment ago is cancelled for us all the same.
            future.cancel()
            self._counts["cancelled"] += 1
        answers = begun.group.samples.values()
        self._counts["wasted"] += len(answers)
        self._counts["wasted_tokens"] += sum(int(sample.response_mask.sum()) for sample in answers)

    def holds(self, ticket: Ticket) -> bool:
        """Whether this rank asked for the group."""
        return ticket in self._begun

    @property
    def partial(self) -> list[Group]:
        """Groups under way that have answers."""
        return [begun.group for begun in self._begun.values() if begun.group.samples]

    def start_waiting(self) -> None:
        """Count quiet seconds from now on: nobody waited before."""
        self._latest = time.monotonic()


def ages_of(generation: Generation) -> dict[int, int]:
    """Generated tokens by the version that wrote them; by the oldest possible one where the engine does not
    tell.
    """
    if generation.token_versions is None:
        return {generation.policy_version: len(generation.logprobs)}
    versions, counts = np.unique(generation.token_versions, return_counts=True)
    return {int(version): int(count) for version, count in zip(versions, counts, strict=True)}
