"""The findings of a preflight: reasons for a refusal, all at once, and what was read on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from olmo_rl.data.inputs import Inputs
from olmo_rl.types import Refusal

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Findings:
    """Reasons for a refusal, and the contents of the files; `inputs`: what the run need not read again."""

    reasons: list[str] = field(default_factory=list)
    files: int = 0
    samples: int = 0
    longest: int = 0
    updates: int = 0
    most_updates: int = 0  # of one file
    notes: list[str] = field(default_factory=list)
    references: dict[bool, Path] = field(default_factory=dict)  # carried or not -> the first such file
    unknown_sampling: list[Path] = field(default_factory=list)  # files without a recorded temperature
    inputs: Inputs = field(default_factory=Inputs)

    def collect(self, job: Callable[[], T]) -> T | None:
        """The result of `job`; None where it is refused, with its reasons added to `reasons`."""
        try:
            return job()
        except Refusal as refusal:
            self.reasons.extend(refusal.reasons)
            return None
