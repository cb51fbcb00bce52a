"""Describes one key of the configuration: documentation, bounds, and when it has an effect.

`key` stores the description as metadata of a dataclass field; `keys_of` reads it back for every field of a
configuration. Refusals, `--help` and the reference are generated from these descriptions.
"""

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from olmo_rl.config import Config

_FACTS = "olmo_rl"


class Choice(Enum):
    """One word that a key accepts: a member is `name = "name"` or `name = "name", "documentation"`."""

    doc: str
    _value_: str

    def __new__(cls, value: str, doc: str = "") -> Self:
        member = object.__new__(cls)
        member._value_ = value
        member.doc = doc
        return member


@dataclass(frozen=True, eq=False, slots=True)
class Needs:
    """The condition under which a key has an effect; elsewhere any value but the default is refused.

    `reason` completes "no effect ..."; `fix` names the change that gives the key an effect ("" = there is
    none, restore the default). `planning`: recipe=plan checks it too.
    """

    holds: Callable[[Config], bool]
    reason: str
    fix: str = ""
    planning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The interval of a number. `whole`: an integer. Infinity needs `max=inf`; NaN is always outside."""

    whole: bool
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def contain(self, value: float) -> bool:
        """Whether `value` lies in the interval."""
        return (
            (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (math.isfinite(value) or (self.max == math.inf and value == math.inf))
        )

    @property
    def text(self) -> str:
        """The interval in words; "" without limits."""
        open_low, low = self.above is not None, self.min if self.above is None else self.above
        open_high, high = self.below is not None, self.max if self.below is None else self.below
        if low is None or high is None or high == math.inf:
            return "" if low is None else f"{'above' if open_low else 'at least'} {low}"
        return f"in {'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    doc: str
    limits: dict[str, float]
    needs: tuple[Needs, ...]
    was: str | None


def key(
    default: Any,
    doc: str,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    needs: Needs | Sequence[Needs] = (),
    was: str | None = None,
) -> Any:
    """A dataclass field with its description.

    `doc` is one line that names the unit. `min` and `max` are allowed values, `above` and `below` are not.
    `needs`: conditions that must all hold for the key to have an effect. `was`: the name that the key had
    before, which is refused with the new one.
    """
    limits = {"min": min, "max": max, "above": above, "below": below}
    facts = _Facts(
        doc=doc,
        limits={name: limit for name, limit in limits.items() if limit is not None},
        needs=(needs,) if isinstance(needs, Needs) else tuple(needs),
        was=was,
    )
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata={_FACTS: facts})
    return field(default=default, metadata={_FACTS: facts})


def section(kind: type[Any]) -> Any:
    """A dataclass field that holds a section; the section's docstring is its documentation."""
    return field(default_factory=kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key, dotted, with its description. `hint` is its type; `bounds` is None unless it is a number."""

    name: str
    default: Any
    hint: Any
    doc: str
    bounds: Interval | None
    needs: tuple[Needs, ...]
    was: str | None

    @property
    def text(self) -> bool:
        """Whether its values are strings."""
        return self.hint in (str, str | None)

    @property
    def open(self) -> bool:
        """Whether keys below it are free."""
        return "dict" in str(self.hint)

    @property
    def choices(self) -> tuple[Enum, ...]:
        """The members it accepts, of a list those of an element; () unless it is a choice."""
        kinds = [kind for kind in (self.hint, *typing.get_args(self.hint)) if isinstance(kind, type)]
        return next((tuple(kind) for kind in kinds if issubclass(kind, Enum)), ())


def keys_of(node: Any, prefix: str = "") -> Iterator[Key]:
    """Every key that holds a value, in the order of the schema; `node` is a configuration with defaults."""
    hints = typing.get_type_hints(type(node))
    for item in fields(node):
        value, hint = getattr(node, item.name), hints[item.name]
        if is_dataclass(value):
            yield from keys_of(value, f"{prefix}{item.name}.")
            continue
        facts: _Facts = item.metadata[_FACTS]
        whole, real = (hint in (kind, kind | None) for kind in (int, float))
        yield Key(
            name=prefix + item.name,
            default=value,
            hint=hint,
            doc=facts.doc,
            bounds=Interval(whole=whole, **facts.limits) if whole or real else None,
            needs=facts.needs,
            was=facts.was,
        )
