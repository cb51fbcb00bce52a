"""One rule of the configuration, the helpers its conditions use, and the rules generated from keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

from olmo_rl.config import Config
from olmo_rl.keys import Interval, Key, Needs, keys_of

LEAST = 1e-30  # of the magnitude of a number that is not 0; its inverse is the most
DEFAULTS = Config()
KEYS: dict[str, Key] = {key.name: key for key in keys_of(DEFAULTS)}


def value_of(config: Config, key: str) -> Any:
    """The value under a dotted key; for a group, its `kind` or `source`."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    if is_dataclass(value):
        return getattr(value, "source" if hasattr(value, "source") else "kind")
    return value


def as_text(value: object) -> str:
    """A value as one would type it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list):
        return f"[{','.join(as_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_text(item)}' for key, item in value.items())}}}"
    return str(value)


def assignments(config: Config, keys: list[str]) -> str:
    """Keys with their values, as one would type them."""
    return " ".join(f"{key}={as_text(value_of(config, key))}" for key in keys)


def always(config: Config) -> bool:
    """A condition that every configuration meets."""
    return True


def every(config: Config, key: str) -> bool:
    """Selects all keys of a rule."""
    return True


def changed(config: Config, key: str) -> bool:
    """Selects keys that differ from the schema's default."""
    return bool(value_of(config, key) != value_of(DEFAULTS, key))


def undivided(whole: int, parts: int) -> bool:
    """Whether `parts` does not divide `whole`; values below 1 break another rule."""
    return whole > 0 and parts > 0 and whole % parts != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A configuration breaks a rule when `when` holds and `select` picks at least one of `keys`.

    `keys`: dotted names, separated by spaces; the name of a group stands for its `kind` or `source`.
    `restore`: the first remedy is the default of the picked keys, `fix` is a further one and may be "".
    `planning`: recipe=plan checks the rule too.
    """

    keys: str
    refuses: str
    fix: str = ""
    when: Callable[[Config], bool] = always
    select: Callable[[Config, str], bool] = every
    planning: bool = False
    restore: bool = False

    def check(self, config: Config) -> str | None:
        """One line with keys, values, reason and fix; None where the rule holds."""
        if not self.when(config):
            return None
        keys = [key for key in self.keys.split() if self.select(config, key)]
        if not keys:
            return None
        fixes = [f"leave {assignments(DEFAULTS, keys)}"] if self.restore else []
        if self.fix:
            fixes.append(self.fix)
        return f"{assignments(config, keys)}: {self.refuses}; {', or '.join(fixes)}"


def generated() -> tuple[Rule, ...]:
    """The rules that the schema states: one for every interval and for every condition of an effect."""
    bounds: dict[Interval, list[str]] = {}
    needs: dict[Needs, list[str]] = {}
    for key in KEYS.values():
        if key.bounds is not None:
            bounds.setdefault(key.bounds, []).append(key.name)
        for need in key.needs:
            needs.setdefault(need, []).append(key.name)
    return (
        *(_bound_rule(bound, keys) for bound, keys in bounds.items()),
        _range_rule([name for name, key in KEYS.items() if key.bounds is not None and not key.bounds.whole]),
        *(_need_rule(need, keys) for need, keys in needs.items()),
    )


def _bound_rule(bounds: Interval, keys: list[str]) -> Rule:
    kind = "whole number" if bounds.whole else "number" if bounds.max is not None else "finite number"
    words = f"of {bounds.text}" if bounds.text.startswith("at least") else bounds.text
    return Rule(
        keys=" ".join(keys),
        refuses=f"not a {kind} {words}".rstrip(),
        fix=f"give a {kind} {words}".rstrip(),
        select=lambda c, key: (value := value_of(c, key)) is not None and not bounds.contain(value),
        planning=True,
    )


def _range_rule(keys: list[str]) -> Rule:
    """Numbers inside their interval that float32 rounds to 0 or infinity."""

    def strays(config: Config, key: str) -> bool:
        value, bounds = value_of(config, key), KEYS[key].bounds
        if value is None or bounds is None or not bounds.contain(value):
            return False
        return math.isfinite(value) and value != 0 and not LEAST <= abs(value) <= 1 / LEAST

    return Rule(
        keys=" ".join(keys),
        refuses="float32, in which runs compute, takes this for 0 or overflows",
        fix=f"give a number between {LEAST:g} and {1 / LEAST:g}, or 0 where that is allowed",
        select=strays,
        planning=True,
    )


def _need_rule(need: Needs, keys: list[str]) -> Rule:
    return Rule(
        keys=" ".join(keys),
        refuses=f"no effect {need.reason}",
        fix=need.fix,
        when=lambda c: not need.holds(c),
        select=changed,
        planning=need.planning,
        restore=True,
    )
