"""One row of the table of refusals, and the small vocabulary its conditions are written in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

from olmo_rl.config import Config, Recipe


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


def under(group: str, names: str) -> tuple[str, ...]:
    """Dotted keys of several names of a group, given in one string."""
    return tuple(f"{group}.{name}" for name in names.split())


def always(config: Config) -> bool:
    """A condition that every configuration meets."""
    return True


def every(config: Config, key: str) -> bool:
    """Picks all keys of a row."""
    return True


def changed(config: Config, key: str) -> bool:
    """Picks keys that differ from the schema's default."""
    return bool(value_of(config, key) != value_of(Config(), key))


def below(minimum: int) -> Callable[[Config, str], bool]:
    """Picks keys whose value lies below `minimum`; null passes."""
    return lambda config, key: (value := value_of(config, key)) is not None and value < minimum


def outside(low: float, high: float) -> Callable[[Config, str], bool]:
    """Picks keys whose value does not lie in (low, high); NaN is outside, null passes."""
    return lambda config, key: (value := value_of(config, key)) is not None and not low < value < high


def outside_from(low: float, high: float) -> Callable[[Config, str], bool]:
    """Picks keys whose value does not lie in [low, high); NaN is outside, null passes."""
    return lambda config, key: (value := value_of(config, key)) is not None and not low <= value < high


def undivided(whole: int, parts: int) -> bool:
    """Whether `parts` does not divide `whole`; values below 1 are another row's."""
    return whole > 0 and parts > 0 and whole % parts != 0


def trains(config: Config) -> bool:
    """Whether the configuration is judged as a training run; recipe=validate judges it as one."""
    return config.recipe in (Recipe.train, Recipe.sft, Recipe.validate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One row. A configuration breaks it when `when` holds, through those of `keys` that `select` picks; it
    keeps it when none is picked. A key that names a group stands for its `kind` or `source`. `example`:
    overrides of `+experiment=packed_moe` that break it; a {name} there is filled by the test that walks the
    table. `planning`: recipe=plan walks the row too.
    """

    keys: tuple[str, ...]
    refuses: str
    fix: str
    example: tuple[str, ...]
    when: Callable[[Config], bool] = always
    select: Callable[[Config, str], bool] = every
    planning: bool = False

    def check(self, config: Config) -> str | None:
        """One line with keys, values, reason and fix; None where the row is kept."""
        if not self.when(config):
            return None
        keys = [key for key in self.keys if self.select(config, key)]
        if not keys:
            return None
        values = " ".join(f"{key}={as_text(value_of(config, key))}" for key in keys)
        return f"{values}: {self.refuses}; {self.fix}"
