"""The requests of one rank in continuous generation: groups that its engines answer while it trains.

Owns futures and nothing that ranks share: what is asked, cancelled and given up is decided by all ranks
together (continuous.py), from what this reports. Groups are judged when they are whole, in the thread
that trains. What refuses a request or a verdict is reported as a value: other groups, and the answers of
its own group, remain.
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
from olmo_rl.types import Refusal


@dataclass(kw_only=True, slots=True, eq=False)
class Begun:
    """A group under way: its answers so far, and the requests that have none. `error`: why it cannot be
    finished in this process.
    """

    group: Group
    problem: Problem
    futures: dict[int, Future[Generation | None]] = field(default_factory=dict)
    error: Refusal | RuntimeError | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Report:
    """What happened at one rank since its last report. `finished`: whole groups with the wall clock at which
    they were found; `failed`: groups with a request that no engine answers; `quiet`: seconds since any
    request ended here; `refusal`: the first one of a request or a verifier, in every report from then on;
    `fault`: why no answer will come any more.
    """

    finished: list[tuple[float, Group]]
    failed: list[Ticket]
    counts: dict[str, float]
    activity: Activity
    quiet: float
    refusal: Refusal | None
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
        """Collect and judge what has been answered. Raises nothing for a request or a verifier: checkpoints
        are saved after a Refusal, too.
        """
        self._news.clear()
        finished, failed = [], []
        errors: list[Refusal | RuntimeError] = []
        before = self._task.counts
        try:
            self._engine.check_alive()
        except RuntimeError as error:
            errors.append(error)
        for ticket, begun in list(self._begun.items()):
            answered = self._collect(begun)
            whole = self._judge(begun)
            if begun.error is not None:
                errors.append(begun.error)
            elif not answered:
                failed.append(ticket)
                self.cancel(ticket)
            elif whole:
                finished.append((time.time(), self._begun.pop(ticket).group))
        for name, count in self._task.counts.items():
            self._counts[name] += count - before[name]
        if self._counts["received"] or self._counts["abandoned"]:
            self._latest = time.monotonic()
        self._counts["retried"] += self._attempts.retried
        self._attempts.retried = 0
        counts, self._counts = {name: float(count) for name, count in self._counts.items()}, Counter()
        faults = [error for error in errors if not isinstance(error, Refusal)]  # of ours: every rank ends
        return Report(
            finished=finished,
            failed=failed,
            counts=counts,
            activity=self._occupancy.read(),
            quiet=time.monotonic() - self._latest,
            refusal=next((error for error in errors if isinstance(error, Refusal)), None),
            fault=f"{type(faults[0]).__name__}: {faults[0]}" if faults else None,
        )

    def _collect(self, begun: Begun) -> bool:
        """Take the answers that came; False where one of the group never will. A request that was refused
        stays open, as one that a resumed run asks again.
        """
        group, answered = begun.group, True
        for number, future in list(begun.futures.items()):
            if not future.done():
                continue
            try:
                generation = future.result()
                if generation is not None:
                    sample = unjudged(
                        generation,
                        group=group.ticket.name,
                        id=f"{group.ticket.name}-s{number}",
                        problem=begun.problem,
                        tokenizer=self._tokenizer,
                    )
                    group.add(number, sample, ages=ages_of(generation))
            except (Refusal, RuntimeError) as error:
                begun.error = error
                continue
            del begun.futures[number]
            self._counts["abandoned" if generation is None else "received"] += 1
            answered = answered and generation is not None
        return answered

    def _judge(self, begun: Begun) -> bool:
        """Give a whole group its rewards, once; False where it is not whole or has none."""
        if begun.error is not None or len(begun.group.samples) < self._rollouts.group_size:
            return False
        samples = [begun.group.samples[number] for number in sorted(begun.group.samples)]
        try:
            judge_together(samples, problem=begun.problem, task=self._task, rollouts=self._rollouts)
        except (Refusal, RuntimeError) as error:
            begun.error = error
            return False
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
