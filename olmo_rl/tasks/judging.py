"""Verifiers: which one judges a response, how long it may take, and what its failure means. No torch here.

A verdict is a finite number, or NaN where a verifier cannot judge. A verifier that raises, ends
its process, returns anything else or runs out of time did not judge: `task.on_verifier_failure` decides
whether that ends the run naming the problem (`refuse`), leaves the sample untrained (`leave_out`), or counts
as 0 (`zero`). Each failure is counted.

With `task.verifier_seconds` verifiers run in a process of their own, which is killed when the time is over:
nothing else stops code that does not return. The clock starts in a process that has judged the reference
once, so that imports do not count; a verifier whose first call exceeds `START_SECONDS` is not waited for
again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from olmo_rl.config import OnVerifierFailure, TaskConfig
from olmo_rl.tasks.math_answers import equal_answers, reference_fault
from olmo_rl.tasks.rewards import Judged, Reward, combined, exact, resolve_reward
from olmo_rl.tasks.verdicts import Call, Verdict, VerifierProcess, verdict_of
from olmo_rl.types import Refusal

START_SECONDS = 300.0  # bound on starting a verifiers' process, and on a verifier's first call in it


class InvalidReference(Exception):
    """A reference that `math_answer` cannot read."""


def math_answer(response: str, answer: str) -> float:
    """1 where the response's final answer is mathematically equal to `answer`, else 0 (`math_answers`). Needs
    `pip install 'olmo_rl[math]'`.

    It has no time limit of its own: set `task.verifier_seconds`.
    """
    fault = reference_fault(answer)
    if fault is not None:
        raise InvalidReference(f"the reference {answer!r} is invalid: {fault}")
    return float(equal_answers(response, answer))


@dataclass(kw_only=True, slots=True)
class Judge:
    """The rewards of a task: several by name, or `default` and others by the domain of a problem. `counts`
    since the start: `verifier_failures` and `verifier_timeouts`, in judgements.
    """

    default: Reward
    by_domain: Mapping[str, Reward]
    named: Mapping[str, Reward]
    on_failure: OnVerifierFailure
    seconds: float | None
    counts: Counter[str] = field(default_factory=Counter)
    _process: VerifierProcess = field(default_factory=VerifierProcess)
    _warm: set[int] = field(default_factory=set)  # verifiers that the process has called, by identity
    _endless: set[int] = field(default_factory=set)  # those whose first call ran out of time

    def judge(self, given: Mapping[str, Any], responses: Sequence[str], *, problem: str) -> list[Judged]:
        """The verdicts on responses to `problem` (its name, for messages), of whose row `given` holds what
        functions may ask for.

        Raises Refusal where a function fails and `on_failure` is `refuse`.
        """
        values = {
            name: self._values(reward, given, responses, problem=problem)
            for name, reward in self.rewards(given.get("domain")).items()
        }
        if not self.named:
            ((found, failed),) = values.values()
            return [Judged(reward=value) for value, _ in zip(found, failed, strict=True)]
        verdicts = []
        for index in range(len(responses)):
            verdict = combined(self.named, {name: found[index] for name, (found, _) in values.items()})
            lost = any(failed[index] for _, failed in values.values())
            verdicts.append(Judged(reward=math.nan, parts=verdict.parts) if lost else verdict)
        return verdicts

    def rewards(self, domain: str | None) -> Mapping[str, Reward]:
        """Those that judge a problem of `domain`, by name; a single one has the name ""."""
        if self.named:
            return self.named
        return {"": self.default if domain is None else self.by_domain.get(domain, self.default)}

    @property
    def judges_groups(self) -> bool:
        """Whether a verdict needs all responses to one prompt."""
        return any(r.of_groups for r in (self.default, *self.by_domain.values(), *self.named.values()))

    def start(self, rows: Sequence[Mapping[str, Any]], *, seconds: float) -> None:
        """Call the functions of every row once, with its answer as the response, so that imports and the
        start of a process are over before ranks wait for each other. What has not begun after `seconds`
        starts when it first judges.
        """
        ends = time.monotonic() + seconds
        for given in rows:
            responses = [given.get("answer") or ""]
            for reward in self.rewards(given.get("domain")).values():
                left = ends - time.monotonic()
                if left > 0 and not reward.missing(given):
                    call = reward.call(given, responses=responses, index=0)
                    self._call(reward, call, first=call, start=min(START_SECONDS, left))

    def is_built_in(self, domain: str | None) -> bool:
        """Whether one of our own verifiers judges `domain` alone: those give 1 to a reference."""
        if self.named:
            return False
        (reward,) = self.rewards(domain).values()
        verify = reward.function
        return (verify.func if isinstance(verify, partial) else verify) in (exact, math_answer)

    def _values(
        self, reward: Reward, given: Mapping[str, Any], responses: Sequence[str], *, problem: str
    ) -> tuple[list[float], list[bool]]:
        """The value of one function for each response, and whether it failed there and leaves it out."""
        first = reward.call(given, responses=[given.get("answer") or ""], index=0)
        values: list[float] = []
        failed: list[bool] = []
        calls = 1 if reward.judges_together else len(responses)
        for index in range(calls):
            count = len(responses) if reward.judges_together else 1
            call = reward.call(given, responses=responses, index=index)
            verdict = self._call(reward, call, first=first)
            if verdict.fault is None:
                values += verdict.rewards
                failed += [False] * count
                continue
            value = self._failed(reward, verdict, problem=problem)
            values += [value] * count
            failed += [math.isnan(value)] * count
        return values, failed

    def _failed(self, reward: Reward, verdict: Verdict, *, problem: str) -> float:
        """What a failed judgement is worth; NaN: it is left out."""
        fault = verdict.fault
        self.counts["verifier_timeouts" if verdict.timed_out else "verifier_failures"] += 1
        if verdict.timed_out:
            fault = f"it did not end within task.verifier_seconds={self.seconds:g}"
        if self.on_failure is OnVerifierFailure.refuse:
            raise Refusal(
                f"{reward.where} failed on a response to {problem}: {fault}: correct the verifier, or set "
                "task.on_verifier_failure to leave_out or zero"
            )
        return 0.0 if self.on_failure is OnVerifierFailure.zero else math.nan

    def _call(self, reward: Reward, call: Call, *, first: Call, start: float | None = None) -> Verdict:
        """The verdict of a call; `first` is called before in a process that does not know the function."""
        verify = reward.function
        if self.seconds is None:
            return verdict_of(verify, call)
        start = START_SECONDS if start is None else start
        ask, key = partial(self._process.call, verify, start=start), id(verify)
        if not self._process.runs:
            self._warm.clear()
        if key not in self._warm | self._endless:
            # Imports whatever a verifier imports; a verdict, or a failure, is the next call's.
            tried = ask(first, seconds=start + self.seconds)
            if tried.timed_out:
                self._endless.add(key)
            if not self._process.runs:
                return tried
            self._warm.add(key)
        return ask(call, seconds=self.seconds)

    def close(self) -> None:
        """End the verifiers' process."""
        self._process.close()


def build_judge(config: TaskConfig) -> Judge:
    """The functions that `task.rewards`, or `task.verifier` and `task.verifiers`, name; exact match where
    there is none.
    """
    return Judge(
        default=resolve_reward(config.verifier, key="task.verifier"),
        by_domain={
            domain: resolve_reward(verifier, key=f"task.verifiers.{domain}")
            for domain, verifier in config.verifiers.items()
        },
        named={
            name: resolve_reward(reward, key=f"task.rewards.{name}")
            for name, reward in config.rewards.items()
        },
        on_failure=config.on_verifier_failure,
        seconds=config.verifier_seconds,
    )
