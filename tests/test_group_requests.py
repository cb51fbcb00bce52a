"""Requests of one rank in continuous generation, against a real engine: what is refused loses no answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from bounds import BOUND_SECONDS
from engine_cases import StandIn, client_of, listening, local_engine, server_of, weights_of
from engine_proxy import Proxy

from olmo_rl.collections.continuous import patience_of
from olmo_rl.collections.group_queue import Group, Ticket
from olmo_rl.collections.group_requests import GroupRequests, Report
from olmo_rl.collections.step_facts import Ledger, prediction
from olmo_rl.config import Config, RolloutsConfig, Source
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.tasks.kinds import AdditionTask
from olmo_rl.tasks.problems import Problem
from olmo_rl.tasks.rewards import Judged
from olmo_rl.types import Refusal

SIZE = 2
TICKETS = [Ticket(index=0, position=position) for position in range(2)]


class Breaks(AdditionTask):
    """Judging one problem is refused. `judged`: calls by problem."""

    broken: str | None = None

    def __init__(self) -> None:
        super().__init__(Config().task, seed=0)
        self.judged: Counter[str] = Counter()

    def judge(self, problem: Problem, responses: Sequence[str]) -> list[Judged]:
        self.judged[problem.prompt] += 1
        if problem.prompt == self.broken:
            raise Refusal("the verifier is broken")
        return super().judge(problem, responses)


@contextmanager
def requests_of(task: AdditionTask, before: Any = None) -> Iterator[tuple[GroupRequests, list[Problem]]]:
    """Two groups under way at an engine."""
    server = server_of(local_engine(), shelf={"weights": weights_of(0)})
    with listening(server.application()) as behind:
        proxy = Proxy(upstream=behind, before=before)
        with listening(proxy.application()) as url, client_of(url, axis=None, retries=0) as engine:
            engine.publish("weights", 0)
            rollouts = RolloutsConfig(source=Source.vllm, urls=[url], group_size=SIZE, max_new_tokens=4)
            requests = GroupRequests(
                Config(rollouts=rollouts), engine=engine, task=task, tokenizer=ByteTokenizer()
            )
            problems = task.problems(2, seed=0)
            requests.ask(
                [Group(ticket=ticket, version=0) for ticket in TICKETS],
                problems=dict(zip(TICKETS, problems, strict=True)),
            )
            yield requests, problems


def reports_until(requests: GroupRequests, done: Callable[[list[Report]], bool]) -> list[Report]:
    found: list[Report] = []
    began = time.monotonic()
    while not done(found):
        assert time.monotonic() - began < BOUND_SECONDS
        requests.wait(0.05)
        found.append(requests.report())
    return found


def count(reports: Sequence[Report], name: str) -> float:
    return sum(report.counts.get(name, 0) for report in reports)


def test_what_a_verifier_refuses_is_reported_and_every_answer_is_kept() -> None:
    task = Breaks()
    task.broken = task.problems(2, seed=0)[0].prompt
    with requests_of(task) as (requests, problems):
        found = reports_until(requests, lambda reports: count(reports, "received") == 2 * SIZE)
        found.append(requests.report())
        assert [group.ticket for report in found for _, group in report.finished] == [TICKETS[1]]
        assert str(found[-1].refusal) == "the verifier is broken"
        assert [(group.ticket, len(group.samples)) for group in requests.partial] == [(TICKETS[0], SIZE)]
        assert task.judged == {problem.prompt: 1 for problem in problems}


def test_a_refused_request_keeps_its_group_and_the_others_are_finished() -> None:
    """One request is refused by the only engine; three are answered."""
    prompts: list[list[int]] = []
    task = Breaks()

    async def refused_once(body: dict[str, Any]) -> None:
        prompts.append(body["prompt"])
        if len(prompts) == 1:
            raise web.HTTPBadRequest(text="too long")

    with requests_of(task, refused_once) as (requests, problems):
        found = reports_until(
            requests,
            lambda reports: count(reports, "received") == 2 * SIZE - 1 and bool(reports[-1].refusal),
        )
        found.append(requests.report())
        bad = next(i for i, p in enumerate(problems) if ByteTokenizer().encode(p.prompt) == prompts[0])
        assert [group.ticket for report in found for _, group in report.finished] == [TICKETS[1 - bad]]
        assert "refused request c0-a0-p" in str(found[-1].refusal)
        assert [(group.ticket, len(group.samples)) for group in requests.partial] == [
            (TICKETS[bad], SIZE - 1)
        ]


def test_any_answer_ends_the_quiet_of_a_wait() -> None:
    """One answer comes after half a second, its sibling and the other group are held."""
    seen: list[int] = []
    released: list[bool] = []

    async def hold_others(body: dict[str, Any]) -> None:
        seen.append(body["seed"])
        held = len(seen) > 1
        while held or not released:
            await asyncio.sleep(0.02)

    with requests_of(Breaks(), hold_others) as (requests, _):
        time.sleep(0.5)
        before = requests.report()
        released.append(True)
        found = reports_until(requests, lambda reports: count(reports, "received") == 1)
        assert not found[-1].finished
        assert found[-1].quiet < before.quiet
        for ticket in TICKETS:
            requests.cancel(ticket)


def test_the_end_of_the_thread_that_asks_engines_is_reported_and_not_waited_for() -> None:
    async def never(body: dict[str, Any]) -> Any:
        await asyncio.sleep(BOUND_SECONDS)

    stand_in = StandIn(reply=never)
    with listening(stand_in.application()) as url, client_of(url) as engine:
        engine.publish("weights", 0)
        config = Config(rollouts=RolloutsConfig(source=Source.vllm, urls=[url], group_size=2))
        task = AdditionTask(Config().task, seed=0)
        requests = GroupRequests(config, engine=engine, task=task, tokenizer=ByteTokenizer())
        ticket = Ticket(index=0, position=0)
        requests.ask([Group(ticket=ticket, version=0)], problems={ticket: task.problems(1, seed=0)[0]})
        assert requests.report().fault is None
        engine._loop.call_soon_threadsafe(engine._loop.stop)
        engine._thread.join(BOUND_SECONDS)
        assert requests.report().fault == "RuntimeError: the thread that asks engines has ended"
        engine._thread = threading.Thread(target=engine._loop.run_forever, daemon=True)
        engine._thread.start()  # to be closed


def test_a_wait_is_as_patient_as_one_request() -> None:
    """5 attempts of 3 s, and 2 s of absence."""
    assert patience_of(RolloutsConfig(wait_seconds=2.0, timeout_seconds=3.0, retries=4)) == 17


def test_no_lag_is_predicted_before_an_answer_came() -> None:
    """Durations 1 and 3 s: the longer of two is 2.5 s on average, over 2: 1.25. (1.25 x 8 + 2 x 2) / 8."""
    ledger = Ledger()
    given = {"under_way": 8, "queued": 2, "group_size": 2, "samples_per_step": 8, "max_lag": 4}
    assert prediction(ledger, **given) is None
    ledger.durations.extend([1.0, 3.0])
    assert prediction(ledger, **given) == 14 / 8
