"""The tasks of this project: addition and problems from a file; `build_task` makes any task. No torch here.

Refuses: unknown parameters, files that are missing or malformed (by line), references that verifiers
cannot judge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from olmo_rl.config import LISTED_DIGITS, TaskConfig, TaskKind
from olmo_rl.tasks.judging import build_judge
from olmo_rl.tasks.math_answers import reference_fault
from olmo_rl.tasks.mixing import FUNCTIONS, MixedTask, Part, entry_config, weight_of
from olmo_rl.tasks.problems import (
    HELD_OUT_SEED,
    MadeOnDemand,
    Problem,
    Task,
    blocks,
    is_held_out,
    passes,
    refuse_unknown,
    take_held_out,
)
from olmo_rl.tasks.rewards import Judged, exact
from olmo_rl.tasks.rows import REPORTED, read_problems
from olmo_rl.types import Refusal

MAX_DIGITS = 6
REFERENCE_SECONDS = 30.0  # for judging every reference once before a run


def build_task(
    config: TaskConfig,
    *,
    seed: int,
    problems: Sequence[Problem] | None = None,
    whole: bool = False,
    partial: bool = False,
    sets: Sequence[TaskConfig] = (),
) -> Task:
    """The task that `config` describes; `seed` shifts the order of its training problems. `problems`:
    those of `task.path` where it was read before; `whole`: all rows of a file are held out;
    `partial`: domains of verifiers may be those of other parts; `sets`: further held-out sets that datasets
    made on demand are never to train on.
    """
    match config.kind:
        case TaskKind.addition:
            return AdditionTask(config, seed=seed)
        case TaskKind.reasoning_gym:
            # Slow to import and needed by no other task.
            from olmo_rl.tasks.gym import GymTask

            return GymTask(config, seed=seed, sets=sets)
        case TaskKind.jsonl:
            return JsonlTask(config, seed=seed, problems=problems, whole=whole, partial=partial)
        case TaskKind.mixed:
            return _mixed(config, seed=seed, sets=sets)


def _mixed(config: TaskConfig, *, seed: int, sets: Sequence[TaskConfig]) -> Task:
    """The tasks of `task.mix` by their weights. Raises Refusal with the reasons of every part."""
    parts: dict[str, Part] = {}
    reasons: list[str] = []
    shared: list[JsonlTask] = []  # parts that the mixture's functions judge
    for name, entry in config.mix.items():
        where = f"task.mix.{name}"
        try:
            part = entry_config(entry, base=config, where=where, further=("weight",))
            inherits = not set(FUNCTIONS) & set(entry)
            task = build_task(part, seed=seed, partial=inherits, sets=sets)
            parts[name] = Part(task=task, weight=weight_of(entry, where=where))
            if isinstance(task, JsonlTask) and inherits:
                shared.append(task)
        except Refusal as refusal:
            reasons += [r if r.startswith(where) else f"{where}: {r}" for r in refusal.reasons]
    if reasons:
        raise Refusal(reasons)
    domains = {domain for task in shared for domain in task.domains}
    _refuse_unused(
        list(config.verifiers), present=domains, where="those parts of task.mix that name no functions"
    )
    return MixedTask(parts)


class AdditionTask(MadeOnDemand):
    """Sums of two numbers with `digits` digits each: `12+34=` -> `46`. Pairs are held out in both orders. Up
    to two digits all pairs are listed and come once a pass; longer ones are drawn, where a repeat is rare.
    """

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        refuse_unknown(list(config.parameters), known=["digits"], where="task.parameters of task=addition")
        digits = config.parameters.get("digits", 2)
        if not isinstance(digits, int) or isinstance(digits, bool) or not 1 <= digits <= MAX_DIGITS:
            raise Refusal(f"task.parameters.digits={digits!r}: give a whole number from 1 to {MAX_DIGITS}")
        self._low = 0 if digits == 1 else 10 ** (digits - 1)
        self._high = 10**digits
        self._seed = seed
        self._pool: list[Problem] | None = None
        if digits <= LISTED_DIGITS:
            every = product(range(self._low, self._high), repeat=2)
            self._pool = [_sum(a, b) for a, b in every if not _reserved(a, b)]

    @property
    def size(self) -> int | None:
        return None if self._pool is None else len(self._pool)

    def problems(self, count: int, *, seed: int, start: int = 0) -> list[Problem]:
        where, seeds = "task=addition", (self._seed, seed)
        if self._pool is not None:
            return passes(self._pool, start=start, count=count, seeds=seeds, where=where)

        def draw(missing: int, block: int, round: int) -> list[Problem]:
            return self._pairs(missing, held_out=False, seeds=(*seeds, block, round))

        return blocks(start=start, count=count, draw=draw, where=where)

    def held_out(self, count: int) -> list[Problem]:
        found = self._pairs(count, held_out=True, seeds=(HELD_OUT_SEED,))
        return take_held_out(found, count=count, where="task=addition")

    def reward(self, problem: Problem, response: str) -> float:
        return exact(response, problem.answer)

    def _pairs(self, count: int, *, held_out: bool, seeds: tuple[int, ...]) -> list[Problem]:
        """Up to `count` different pairs of one side."""
        found: dict[str, Problem] = {}
        for a, b in self._order(np.random.default_rng(seeds)):
            if len(found) == count:
                break
            if _reserved(a, b) == held_out:
                found[f"{a}+{b}="] = _sum(a, b)
        return list(found.values())

    def _order(self, generator: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Small spaces shuffled whole; large ones sampled without end, where a repeat is rare."""
        span = self._high - self._low
        if span**2 <= 10**6:
            codes = generator.permutation(span**2)
            yield from ((self._low + code // span, self._low + code % span) for code in codes.tolist())
            return
        while True:
            a, b = generator.integers(self._low, self._high, size=2).tolist()
            yield a, b


def _reserved(a: int, b: int) -> bool:
    return is_held_out(f"{min(a, b)}+{max(a, b)}")


def _sum(a: int, b: int) -> Problem:
    return Problem(id=f"{a}+{b}", prompt=f"{a}+{b}=", reference=str(a + b))


class JsonlTask:
    """Prompts and answers from rows of a file, maybe with a `domain`; other names are columns for reward
    functions. One prompt in `HELD_OUT_EVERY` is
    held out. `task.verifiers` judges responses by domain, `task.verifier` all others; `task.rewards` judges
    all, by several functions.
    """

    def __init__(
        self,
        config: TaskConfig,
        *,
        seed: int,
        problems: Sequence[Problem] | None = None,
        whole: bool = False,
        partial: bool = False,
    ) -> None:
        if config.path is None:
            raise Refusal("task.path is not set: name a file of lines with prompt and answer")
        self._seed = seed
        self._path = config.path
        self._judge = build_judge(config)
        self._prompt_column = config.prompt_column
        self._system = config.system if config.chat else None
        if problems is None:
            problems = read_problems(config)
        self.domains = {problem.domain for problem in problems if problem.domain is not None}
        if not (whole or partial):
            _refuse_unused(list(config.verifiers), present=self.domains, where=config.path)
        self._refuse_missing(problems)
        self._training = [p for p in problems if not (whole or is_held_out(p.prompt))]
        self._reserved = list({p.prompt: p for p in problems if whole or is_held_out(p.prompt)}.values())

    def problems(self, count: int, *, seed: int, start: int = 0) -> list[Problem]:
        return passes(
            self._training,
            start=start,
            count=count,
            seeds=(self._seed, seed),
            where=f"task.path={self._path}",
        )

    def fits(self, problem: Problem) -> bool:
        return True

    def epochs(self, place: int) -> dict[str, float]:
        return {"": place / len(self._training)} if self._training else {}

    def held_out(self, count: int) -> list[Problem]:
        return take_held_out(self._reserved, count=count, where=f"task.path={self._path}")

    def reward(self, problem: Problem, response: str) -> float:
        return self.judge(problem, [response])[0].reward

    def judge(self, problem: Problem, responses: Sequence[str]) -> list[Judged]:
        return self._judge.judge(self._given(problem), responses, problem=self._where(problem))

    @property
    def judges_groups(self) -> bool:
        return self._judge.judges_groups

    def _given(self, problem: Problem) -> dict[str, Any]:
        """What reward functions may ask for. Columns are the row's own, but for these names."""
        prompt = problem.row.get(self._prompt_column, problem.prompt)
        turns = [] if self._system is None else [{"role": "system", "content": self._system}]
        return {
            "messages": [*turns, {"role": "user", "content": prompt}],
            **problem.row,
            "prompt": prompt,
            "answer": problem.reference,
            "domain": problem.domain,
        }

    def _refuse_missing(self, problems: Sequence[Problem]) -> None:
        """Every function must find what it asks for, in every row that it judges."""
        reasons: list[str] = []
        for problem in problems:
            given = self._given(problem)
            if problem.reference is None:
                del given["answer"]
            for reward in self._judge.rewards(problem.domain).values():
                if missing := reward.missing(given):
                    columns = ", ".join(sorted(set(given) | {"response", "responses"}))
                    reasons.append(
                        f"{self._where(problem)}: no {missing[0]!r}, which {reward.where} asks for; there "
                        f"are {columns}"
                    )
        if reasons:
            raise Refusal(reasons[:REPORTED])

    def start(self, *, seconds: float) -> None:
        # Rows of a held-out set are all reserved.
        problems = (*self._reserved, *self._training)
        by_domain = {problem.domain: self._given(problem) for problem in problems}
        self._judge.start(list(by_domain.values()), seconds=seconds)

    def check_references(self) -> tuple[str, ...]:
        """Judge every reference as a response to its own problem, for `REFERENCE_SECONDS` at most. Our own
        verifiers must give it 1; those of users must give a verdict.
        """
        problems = [p for p in (*self._training, *self._reserved) if p.reference is not None]
        ends = time.monotonic() + REFERENCE_SECONDS
        faults: list[str] = []
        worthless = unknown = judged = 0
        try:
            for problem in problems:
                if time.monotonic() > ends or len(faults) == REPORTED:
                    break
                judged += 1
                try:
                    reward = self._judged_reference(problem)
                except Refusal as refusal:
                    faults.extend(refusal.reasons)
                    continue
                worthless += reward == 0.0
                unknown += math.isnan(reward)
        finally:
            self._judge.close()
            self._judge.counts.clear()
        if faults:
            raise Refusal(faults)
        remarks, key = [], "task.rewards" if self._judge.named else "task.verifier"
        if judged < len(problems):
            remarks.append(
                f"{key} judged {judged} of {len(problems)} references in {REFERENCE_SECONDS:g} s: "
                "the rest is unchecked"
            )
        if worthless:
            remarks.append(f"{key} gives 0 to {worthless} of {judged} references as responses")
        if unknown:
            remarks.append(f"{key} cannot judge {unknown} of {judged} references as responses")
        return tuple(remarks)

    def _judged_reference(self, problem: Problem) -> float:
        reward = self.reward(problem, problem.answer)
        if self._judge.is_built_in(problem.domain) and reward != 1.0:
            fault = reference_fault(problem.answer) or "the verifier cannot read it"
            raise Refusal(f"{self._where(problem)}: the reference {problem.answer!r} is invalid: {fault}")
        return reward

    def _where(self, problem: Problem) -> str:
        return f"{self._path}, {problem.id.replace('-', ' ')}"

    @property
    def size(self) -> int | None:
        return len(self._training)

    @property
    def counts(self) -> Mapping[str, int]:
        return {name: self._judge.counts[name] for name in ("verifier_failures", "verifier_timeouts")}


def _refuse_unused(domains: list[str], *, present: set[str], where: str) -> None:
    """A verifier of a domain that no line has would judge nothing, and another one judge in its place."""
    reasons = [
        f"task.verifiers.{domain}: no effect, no line of {where} has this domain: lines have "
        f"{', '.join(map(repr, sorted(present))) or 'none'}"
        for domain in domains
        if domain not in present
    ]
    if reasons:
        raise Refusal(reasons)
