"""Verifiers: which one judges a response, how long it may take, and what its failure means. No torch here.

A verdict is a finite number, or NaN where a verifier cannot judge. A verifier that raises, ends
its process, returns anything else or runs out of time did not judge: `task.on_verifier_failure` decides
whether that ends the run naming the problem (`refuse`), leaves the sample untrained (`leave_out`), or counts
as 0 (`zero`). Each failure is counted.

With `task.verifier_seconds` verifiers run in a process of their own, which is killed when the time is over:
nothing else stops code that does not return. The clock starts in a process that has judged the reference
once, so that imports do not count.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import multiprocessing
import numbers
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pebble import ProcessExpired, ProcessPool

from olmo_rl.config import OnVerifierFailure, TaskConfig
from olmo_rl.data.validation import LARGEST_REWARD
from olmo_rl.tasks.math_answers import equal_answers, reference_fault
from olmo_rl.types import Interrupted, Refusal

Verifier = Callable[[str, str], Any]
START_SECONDS = 300.0  # bound on starting a verifiers' process and its first call, beside its time limit
MATH = "olmo_rl.tasks.judging.math_answer"


class NoVerdict(Exception):
    """A verifier returned no number, or its process ended."""


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
        raise NoVerdict(f"the reference {answer!r} is invalid: {fault}")
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
    _pool: ProcessPool | None = None
    _warm: set[int] = field(default_factory=set)  # verifiers that the process has called, by identity

    def judge(self, response: str, *, answer: str, domain: str | None, problem: str) -> float:
        """The reward of a response to `problem` (its name, for messages); NaN where it is unknown.

        Raises Refusal where the verifier fails and `on_failure` is `refuse`.
        """
        verify = self._verifier(domain)
        try:
            return _verdict(self._call(verify, response, answer))
        except Interrupted:
            raise
        except OutOfTime:
            self.counts["verifier_timeouts"] += 1
            fault = f"it did not end within task.verifier_seconds={self.seconds:g}"
        except SystemExit as end:
            self.counts["verifier_failures"] += 1
            fault = f"it called sys.exit({end.code})"
        except Exception as failure:  # any exception of a user's function means that it did not judge
            self.counts["verifier_failures"] += 1
            own = isinstance(failure, NoVerdict)
            fault = (
                str(failure) if own else f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
            )
        if self.on_failure is OnVerifierFailure.refuse:
            raise Refusal(
                f"task.verifier failed on a response to {problem}: {fault}: correct the verifier, or set "
                "task.on_verifier_failure to leave_out or zero"
            )
        return 0.0 if self.on_failure is OnVerifierFailure.zero else math.nan

    def is_built_in(self, domain: str | None) -> bool:
        """Whether one of our own verifiers judges `domain`: those give 1 to a reference."""
        verify = self._verifier(domain)
        return (verify.func if isinstance(verify, functools.partial) else verify) in (exact, math_answer)

    def _verifier(self, domain: str | None) -> Verifier:
        return self.default if domain is None else self.by_domain.get(domain, self.default)

    def _call(self, verify: Verifier, response: str, answer: str) -> Any:
        if self.seconds is None:
            return verify(response, answer)
        if self._pool is None:
            # Spawned: a fork would copy the threads of torch.
            self._pool = ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn"))
        if id(verify) not in self._warm:
            self._run(_warm_up, (verify, answer), seconds=START_SECONDS + self.seconds)
            self._warm.add(id(verify))
        return self._run(verify, (response, answer), seconds=self.seconds)

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...], *, seconds: float) -> Any:
        """Call in the process; a call that kills it, or is killed, leaves a cold one."""
        assert self._pool is not None
        try:
            return self._pool.schedule(function, args=arguments, timeout=seconds).result()
        except OutOfTime:
            self._warm.clear()
            raise
        except ProcessExpired as end:
            self._warm.clear()
            raise NoVerdict(f"its process ended with exit code {end.exitcode}") from None

    def close(self) -> None:
        """End the verifiers' process."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
            self._warm.clear()


def _warm_up(verify: Verifier, answer: str) -> None:
    """Import whatever a verifier imports; its verdict, or its failure, is the next call's."""
    with suppress(Exception, SystemExit):
        verify(answer, answer)


def _verdict(value: object) -> float:
    """A verifier's value as a number; NoVerdict or OverflowError for anything else."""
    if type(value).__name__ in ("bool", "bool_"):  # NumPy's is no Real
        return float(bool(value))
    if not isinstance(value, numbers.Real) or abs(float(value)) > LARGEST_REWARD:
        raise NoVerdict(
            f"it returned {value!r:.200}: return a finite number, or NaN where the response cannot be judged"
        )
    return float(value)


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
    module, _, name = str(target).rpartition(".")
    if not isinstance(target, str) or not module:
        raise Refusal(f"{key}: give the function's import path, {{_target_: package.function}}")
    if target == MATH and importlib.util.find_spec("math_verify") is None:
        raise Refusal(f"{key}._target_={target}: math-verify is missing: pip install 'olmo_rl[math]'")
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Refusal(
            f"{key}._target_={target}: {error}: correct it, put the module beside train.py, or its folder on "
            "PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise Refusal(f"{key}._target_={target}: {error}: name a function of that module") from error
    arguments = {key: value for key, value in verifier.items() if key != "_target_"}
    try:
        inspect.signature(function).bind("response", "answer", **arguments)
    except TypeError as error:
        raise Refusal(f"{key}._target_={target}: called (response, answer, {arguments}): {error}") from error
    return functools.partial(function, **arguments)
