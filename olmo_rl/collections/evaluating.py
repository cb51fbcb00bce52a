"""Held-out problems to the verdicts on their responses: the requests to an engine, and what they measure.

Callers share the problems over ranks, or not; all responses to one problem are judged together. A response
that no engine gave is no evidence about the policy, and an unknown verdict is not a number: both are counted
and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from olmo_rl.collections.generation import RolloutParts
from olmo_rl.collections.sources import response_text
from olmo_rl.config import Config
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.tasks.held_out import HeldOut
from olmo_rl.tasks.pass_rates import Measured, Tried, by_domain, measure
from olmo_rl.tasks.problems import Problem
from olmo_rl.types import Refusal

OWN = "task"  # what the task's own problems are called beside named sets

Answers = Sequence[Generation | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One problem of a set, to be answered `evaluation.samples` times."""

    held_out: HeldOut
    problem: Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """The responses to one problem with their verdicts, NaN where one is unknown. `of`: its set."""

    of: str
    problem: Problem
    responses: tuple[str, ...]
    rewards: tuple[float, ...]
    unanswered: int

    @property
    def tried(self) -> Tried:
        return Tried(
            domain=self.problem.domain or self.problem.part or None,
            rewards=self.rewards,
            unanswered=self.unanswered,
        )


def questions_of(sets: Sequence[HeldOut]) -> list[Question]:
    """Every problem of every set, in order."""
    return [Question(held_out=one, problem=problem) for one in sets for problem in one.problems]


def ask(
    questions: Sequence[Question], *, config: Config, parts: RolloutParts
) -> Answers | Future[list[Generation | None]]:
    """The answers, problem after problem, or their future where serving engines give them."""
    evaluation, engine = config.evaluation, parts.engine
    requests = [
        Request(
            id=f"{question.held_out.name}:{question.problem.id}:{number}",
            tokens=parts.tokenizer.encode(question.problem.prompt),
        )
        for question in questions
        for number in range(evaluation.samples)
    ]
    settings: dict[str, Any] = {
        "max_new_tokens": config.rollouts.max_new_tokens,
        "stop_token": parts.tokenizer.eos_id,
        "seed": 0,
    }
    greedy = evaluation.temperature == 0
    if isinstance(engine, RemoteEngine):
        return engine.start(requests, temperature=evaluation.temperature, top_p=evaluation.top_p, **settings)
    if greedy:
        return engine.generate(requests, greedy=True, **settings)
    return engine.generate(requests, temperature=evaluation.temperature, top_p=evaluation.top_p, **settings)


def judged(
    questions: Sequence[Question],
    *,
    asked: Answers | Future[list[Generation | None]] | Refusal,
    config: Config,
    parts: RolloutParts,
) -> list[Answered]:
    """The verdicts on the answers to these problems. Raises the Refusal that came in their place."""
    if isinstance(asked, Refusal):
        raise asked
    generations = asked.result() if isinstance(asked, Future) else asked
    samples, found = config.evaluation.samples, []
    for index, question in enumerate(questions):
        mine = generations[index * samples : (index + 1) * samples]
        responses = [response_text(one, tokenizer=parts.tokenizer) for one in mine if one is not None]
        verdicts = question.held_out.task.judge(question.problem, responses) if responses else []
        found.append(
            Answered(
                of=question.held_out.name,
                problem=question.problem,
                responses=tuple(responses),
                rewards=tuple(verdict.reward for verdict in verdicts),
                unanswered=samples - len(responses),
            )
        )
    return found


def measured(answered: Sequence[Answered], *, config: Config) -> dict[tuple[str, str], Measured]:
    """The result by (set, domain): of every set as a whole (domain ""), and of its domains where it has
    several.
    """
    evaluation = config.evaluation
    found: dict[tuple[str, str], Measured] = {}
    for name in dict.fromkeys(one.of for one in answered):
        tried = [one.tried for one in answered if one.of == name]
        for domain, part in {"": tried, **by_domain(tried)}.items():
            found[name, domain] = measure(part, ks=evaluation.pass_at, solved_from=evaluation.solved_from)
    return found


def metrics_of(results: dict[tuple[str, str], Measured]) -> dict[str, float | None]:
    """By name of a metric: `eval/accuracy` of the task's own problems, `eval/<set>/accuracy` of a named set,
    `eval/<set>/<domain>/accuracy` of a domain, where `<set>` is `task` for the task's own; pass@k likewise.
    """
    return {
        "/".join(["eval", *title_of(*where, own="" if where[1] == "" else OWN), name]): value
        for where, result in results.items()
        for name, value in result.values().items()
    }


def title_of(name: str, domain: str, *, own: str = OWN) -> list[str]:
    """The words that name a set, or a domain of it."""
    return [word for word in (name or own, domain) if word]
