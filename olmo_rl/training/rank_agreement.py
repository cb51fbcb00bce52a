"""Refusals of one rank, raised by all ranks so that they save and end together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from olmo_rl.types import Refusal

T = TypeVar("T")
_REPORTED = 20  # refusals of one draw


def outcome(job: Callable[[], T]) -> T | Refusal:
    """The result of `job`, or its refusal as a value: other ranks wait for this one's part."""
    try:
        return job()
    except Refusal as refusal:
        return refusal


def together(parts: Sequence[T | Refusal]) -> list[T]:
    """The parts of all ranks. Raises the refusals among them, the same on every rank."""
    reasons = [reason for part in parts if isinstance(part, Refusal) for reason in part.reasons]
    if reasons:
        raise Refusal(reasons[:_REPORTED])
    return [part for part in parts if not isinstance(part, Refusal)]
