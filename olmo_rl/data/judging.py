"""Verifiers: which one judges a response, how long it may take, and what its failure means. No torch here.

A verdict is a finite number, or NaN where a verifier says that it cannot judge. A verifier that raises or
runs out of time did not judge: by `task.on_verifier_failure` that ends the run naming the problem (`refuse`),
leaves the sample untrained (`leave_out`), or counts as 0 because the user said so (`zero`). Each is counted.

With `task.verifier_seconds` verifiers run in a process of their own, which is ended when the time is over:
nothing else stops code that does not return.
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
from dataclasses import dataclass, field
from typing import Any

from pebble import ProcessExpired, ProcessPool

from olmo_rl.config import OnVerifierFailure, TaskConfig
from olmo_rl.types import Interrupted, Refusal

MATH = "olmo_rl.data.judging.math_answer"


def exact(response: str, answer: str) -> float:
    """1 where the response is the answer, spaces around it aside; else 0."""
    return float(response.strip() == answer.strip())


def math_answer(response: str, answer: str) -> float:
    """1 where math-verify finds the response's last answer mathematically equal to `answer`; else 0. Needs
    `pip install 'olmo_rl[math]'`.

    Its own time limits need signals of the main thread, so they are off: give `task.verifier_seconds`.
    """
    from math_verify import parse, verify

    gold = parse(answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify reads no answer in the reference {answer!r}")
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


@dataclass(kw_only=True, slots=True)
class Judge:
    """The verifiers of a task: `default`, and others by the domain of a problem. `counts` since the start:
    `verifier_failures` and `verifier_timeouts`, in judgements.
    """

    default: Callable[[str, str], Any]
    by_domain: Mapping[str, Callable[[str, str], Any]]
    on_failure: OnVerifierFailure
    seconds: float | None
    counts: Counter[str] = field(default_factory=Counter)
    _pool: ProcessPool | None = None

    def judge(self, response: str, *, answer: str, domain: str | None, problem: str) -> float:
        """What the response to `problem` (its id, for messages) is worth; NaN where nobody can tell."""
        verify = self.default if domain is None else self.by_domain.get(domain, self.default)
        where = f"on a response to problem {problem}"
        try:
            value = self._call(verify, response, answer)
        except Interrupted:
            raise
        except OutOfTime:
            self.counts["verifier_timeouts"] += 1
            return self._failed(
                RuntimeError(f"task.verifier did not end within {self.seconds:g} s"), where=where
            )
        except SystemExit as end:
            # Else the process would end as if all were well.
            self.counts["verifier_failures"] += 1
            return self._failed(
                RuntimeError(f"task.verifier called sys.exit({end.code}) {where}"), where=where
            )
        except Exception as failure:  # whatever a user's function raises is its failure to judge
            self.counts["verifier_failures"] += 1
            return self._failed(failure, where=where)
        if not isinstance(value, numbers.Real) or math.isinf(value):
            raise Refusal(
                f"task.verifier returned {value!r} for problem {problem}: return a finite number, or NaN "
                "where the response cannot be judged"
            )
        return float(value)

    def _call(self, verify: Callable[[str, str], Any], response: str, answer: str) -> Any:
        if self.seconds is None:
            return verify(response, answer)
        if self._pool is None:
            # Spawned: a fork would copy the threads of torch.
            self._pool = ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn"))
        future = self._pool.schedule(verify, args=(response, answer), timeout=self.seconds)
        try:
            return future.result()
        except ProcessExpired as end:
            raise RuntimeError(f"the verifier's process ended with {end.exitcode}") from None

    def _failed(self, error: Exception, *, where: str) -> float:
        if self.on_failure is OnVerifierFailure.refuse:
            error.add_note(f"task.verifier failed {where}")
            raise error
        return 0.0 if self.on_failure is OnVerifierFailure.zero else math.nan

    def close(self) -> None:
        """End the verifiers' process."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


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


def resolve_verifier(verifier: Mapping[str, Any] | None, *, key: str) -> Callable[[str, str], Any]:
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
    except (ImportError, AttributeError) as error:
        raise Refusal(f"{key}._target_={target}: {error}") from error
    arguments = {key: value for key, value in verifier.items() if key != "_target_"}
    try:
        inspect.signature(function).bind("response", "answer", **arguments)
    except TypeError as error:
        raise Refusal(f"{key}._target_={target}: called (response, answer, {arguments}): {error}") from error
    return functools.partial(function, **arguments)
