"""Reward functions of users: what they ask for, by name, and what a response is worth. No torch here.

A function that has a parameter `response` judges one response, one that has `responses` but no `response` all
responses to one prompt together, as many values as responses. It gets by name what its other parameters name:
`answer`, `prompt` and `messages` (as the data have them, before any chat template), `domain`, and any column
of the row. A parameter with a default is optional; `**kwargs` takes everything. An argument that the
configuration gives is never replaced by a column of its name. A function with neither of
the two parameters is called with response and answer, in this order.

A value is a finite number, or None or NaN where the function does not judge. The verdict is the sum of the
values given, each times its weight; where nobody judges it is NaN. Refuses functions that cannot be imported
or called, and columns that a row lacks.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from olmo_rl.tasks.verdicts import Call, Verifier
from olmo_rl.types import Refusal
from olmo_rl.user_code import import_parts, imported

MATH = "olmo_rl.tasks.judging.math_answer"
RESPONSE, RESPONSES = "response", "responses"
WEIGHT = "_weight_"
_OPEN = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The verdict on one response: finite, or NaN where it is unknown. `parts`: the value of each of several
    rewards by name, before weights, None where it does not judge.
    """

    reward: float
    parts: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A function with its further arguments `bound`. `required` and `optional`: names that it asks for;
    `open`: it takes every name but those bound; `positional`: it is called with response and answer. `where`:
    the key that names it.
    """

    function: Verifier
    where: str
    weight: float = 1.0
    required: tuple[str, ...] = (RESPONSE, "answer")
    optional: tuple[str, ...] = ()
    open: bool = False
    bound: frozenset[str] = frozenset()
    positional: bool = False

    @property
    def of_groups(self) -> bool:
        """Whether it needs all responses to one prompt."""
        return self.open or RESPONSES in (*self.required, *self.optional)

    @property
    def judges_together(self) -> bool:
        """Whether one call judges all responses to one prompt."""
        return RESPONSE not in (*self.required, *self.optional) and not self.positional

    def missing(self, given: Mapping[str, Any]) -> list[str]:
        """Names that it needs and a row does not have."""
        own = (RESPONSE, RESPONSES)
        return [name for name in self.required if name not in own and name not in given]

    def call(self, given: Mapping[str, Any], *, responses: Sequence[str], index: int) -> Call:
        """The call that judges response `index`, or all of them where it judges together."""
        if self.positional:
            return Call(positional=(responses[index], given.get("answer")))
        everything = {**given, RESPONSES: list(responses)}
        if not self.judges_together:
            everything[RESPONSE] = responses[index]
        # A configured argument goes before a column of its name, as for parameters that a signature names.
        wanted = everything.keys() - self.bound if self.open else (*self.required, *self.optional)
        return Call(
            named={name: everything[name] for name in wanted if name in everything},
            count=len(responses) if self.judges_together else None,
        )


def exact(response: str, answer: str) -> float:
    """1 where the response is the answer, spaces around it aside; else 0."""
    return float(response.strip() == answer.strip())


def resolve_reward(entry: Mapping[str, Any] | None, *, key: str) -> Reward:
    """The function behind `_target_` with its further arguments bound; exact match where there is none."""
    if not entry:
        return Reward(function=exact, where=key)
    target = entry.get("_target_") if isinstance(entry, Mapping) else None
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
    arguments = {key: value for key, value in entry.items() if key not in ("_target_", WEIGHT)}
    return _asking(function, arguments=arguments, where=where, key=key, weight=_weight(entry, key=key))


def _weight(entry: Mapping[str, Any], *, key: str) -> float:
    weight = entry.get(WEIGHT, 1.0)
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
        raise Refusal(f"{key}.{WEIGHT}={weight!r}: give a finite number")
    return float(weight)


def _asking(function: Any, *, arguments: dict[str, Any], where: str, key: str, weight: float) -> Reward:
    """The reward with what the signature of its function asks for."""
    try:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        named = {p.name for p in parameters if p.kind not in (*_OPEN, inspect.Parameter.POSITIONAL_ONLY)}
        if not {RESPONSE, RESPONSES} & named:
            signature.bind("response", "answer", **arguments)
            return Reward(function=partial(function, **arguments), where=key, weight=weight, positional=True)
        signature.bind_partial(**arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin function that has no signature
        raise Refusal(f"{where}: called (response, answer, {arguments}): {error}") from error
    if stray := [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]:
        raise Refusal(f"{where}: parameter {stray[0]!r} has no name to ask by: remove the / behind it")
    free = [p for p in parameters if p.kind not in _OPEN and p.name not in arguments]
    return Reward(
        function=partial(function, **arguments),
        where=key,
        weight=weight,
        required=tuple(p.name for p in free if p.default is inspect.Parameter.empty),
        optional=tuple(p.name for p in free if p.default is not inspect.Parameter.empty),
        open=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        bound=frozenset(arguments),
    )


def combined(rewards: Mapping[str, Reward], values: Mapping[str, float]) -> Judged:
    """The verdict of several rewards from their values, NaN where one does not judge."""
    known = [rewards[name].weight * value for name, value in values.items() if not math.isnan(value)]
    return Judged(
        reward=math.fsum(known) if known else math.nan,
        parts={name: None if math.isnan(value) else value for name, value in values.items()},
    )
