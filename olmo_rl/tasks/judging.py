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

import importlib.util
import inspect
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from olmo_rl.config import OnVerifierFailure, TaskConfig
from olmo_rl.tasks.math_answers import equal_answers, reference_fault
from olmo_rl.tasks.verdicts import Verdict, Verifier, VerifierProcess, verdict_of
from olmo_rl.types import Refusal
from olmo_rl.user_code import import_parts, imported

START_SECONDS = 300.0  # bound on starting a verifiers' process, and on a verifier's first call in it
MATH = "olmo_rl.tasks.judging.math_answer"


class InvalidReference(Exception):
    """A reference that `math_answer` cannot read."""


def exact(response: str, answer: str) -> float:
    """1 where the response is the answer, spaces around it aside; else 0."""
    return float(response.strip() == answer.strip())


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
    """The verifiers of a task: `default`, and others by the domain of a problem. `counts` since the start:
    `verifier_failures` and `verifier_timeouts`, in judgements.
    """

    default: Verifier
    by_domain: Mapping[str, Verifier]
    on_failure: OnVerifierFailure
    seconds: float | None
    counts: Counter[str] = field(default_factory=Counter)
    _process: VerifierProcess = field(default_factory=VerifierProcess)
    _warm: set[int] = field(default_factory=set)  # verifiers that the process has called, by identity
    _endless: set[int] = field(default_factory=set)  # those whose first call ran out of time

    def judge(self, response: str, *, answer: str, domain: str | None, problem: str) -> float:
        """The reward of a response to `problem` (its name, for messages); NaN where it is unknown.

        Raises Refusal where the verifier fails and `on_failure` is `refuse`.
        """
        verdict = self._call(self._verifier(domain), response, answer)
        fault = verdict.fault
        if fault is None:
            return verdict.reward
        self.counts["verifier_timeouts" if verdict.timed_out else "verifier_failures"] += 1
        if verdict.timed_out:
            fault = f"it did not end within task.verifier_seconds={self.seconds:g}"
        if self.on_failure is OnVerifierFailure.refuse:
            raise Refusal(
                f"task.verifier failed on a response to {problem}: {fault}: correct the verifier, or set "
                "task.on_verifier_failure to leave_out or zero"
            )
        return 0.0 if self.on_failure is OnVerifierFailure.zero else math.nan

    def start(self, references: Sequence[tuple[str | None, str]], *, seconds: float) -> None:
        """Call the verifier of every (domain, reference) once, so that imports and the start of a process are
        over before ranks wait for each other. What has not begun after `seconds` starts when it first judges.
        """
        ends = time.monotonic() + seconds
        for domain, answer in references:
            left = ends - time.monotonic()
            if left > 0:
                self._call(self._verifier(domain), answer, answer, start=min(START_SECONDS, left))

    def is_built_in(self, domain: str | None) -> bool:
        """Whether one of our own verifiers judges `domain`: those give 1 to a reference."""
        verify = self._verifier(domain)
        return (verify.func if isinstance(verify, partial) else verify) in (exact, math_answer)

    def _verifier(self, domain: str | None) -> Verifier:
        return self.default if domain is None else self.by_domain.get(domain, self.default)

    def _call(self, verify: Verifier, response: str, answer: str, *, start: float | None = None) -> Verdict:
        if self.seconds is None:
            return verdict_of(verify, response, answer)
        start = START_SECONDS if start is None else start
        call, key = partial(self._process.call, verify, start=start), id(verify)
        if not self._process.runs:
            self._warm.clear()
        if key not in self._warm | self._endless:
            # Imports whatever a verifier imports; a verdict, or a failure, is the next call's.
            first = call(answer, answer, seconds=start + self.seconds)
            if first.timed_out:
                self._endless.add(key)
            if not self._process.runs:
                return first
            self._warm.add(key)
        return call(response, answer, seconds=self.seconds)

    def close(self) -> None:
        """End the verifiers' process."""
        self._process.close()


def build_judge(config: TaskConfig) -> Judge:
    """The verifiers that `task.verifier` and `task.verifiers` name; exact match where there is none."""
    return Judge(
        default=resolve_verifier(config.verifier, key="task.verifier"),
        by_domain={
            domain: resolve_verifier(verifier, key=f"task.verifiers.{domain}")
            for domain, verifier in config.verifiers.items()
        },
        on_failure=config.on_verifier_failure,
        seconds=config.verifier_seconds,
    )


def resolve_verifier(verifier: Mapping[str, Any] | None, *, key: str) -> Verifier:
    """The function behind `_target_` with its further arguments bound; exact match where there is none."""
    if not verifier:
        return exact
    target = verifier.get("_target_") if isinstance(verifier, Mapping) else None
    parts = import_parts(target)
    if parts is None:
        raise Refusal(f"{key}: give the function's import path, {{_target_: package.function}}")
    module, name = parts
    if f"{module}.{name}" == MATH and importlib.util.find_spec("math_verify") is None:
        raise Refusal(f"{key}._target_={target}: math-verify is missing: pip install 'olmo_rl[math]'")
    where = f"{key}._target_={target}"
    found = imported(module, where=where)
    if not hasattr(found, name):
        raise Refusal(f"{where}: {module} has no attribute {name!r}: name a function of that module")
    function = getattr(found, name)
    arguments = {key: value for key, value in verifier.items() if key != "_target_"}
    try:
        inspect.signature(function).bind("response", "answer", **arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin function that has no signature
        raise Refusal(f"{where}: called (response, answer, {arguments}): {error}") from error
    return partial(function, **arguments)
