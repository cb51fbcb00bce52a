"""A mean that may be unknown. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A sum and the number of finite values in it. `value` is None where nothing was counted: unknown is no
    number.
    """

    total: float = 0.0
    count: int = 0

    @staticmethod
    def of(values: Iterable[float]) -> Mean:
        """The mean of the finite `values`; NaN and infinities are unknown and not counted."""
        finite = [value for value in values if math.isfinite(value)]
        return Mean(total=math.fsum(finite), count=len(finite))

    def __add__(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


def shown(value: float | None, *, digits: str = ".3f") -> str:
    """A value for people: "unknown" where it is None."""
    return "unknown" if value is None else format(value, digits)
