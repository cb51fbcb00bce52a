"""One sample as another program recorded it, which every reader yields, and what readers share.

A reader names values by the fields of `types.Sample` and leaves out those that its file does not have.
`importing.py` converts, completes and checks them by the table of fields, so that no reader copies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.types import Refusal, Sampling


@dataclass(kw_only=True, slots=True)
class ForeignSample:
    """One record of a file, before any check.

    `values` by field of `types.Sample`, absent or None where the record has none: per-token lists over prompt
    and response [T]; `routes` in any encoding that `wire.decode_routes` reads, [T-1 or T, L, K] with the
    layer axis of the program that recorded them; `reward` a number, or a mapping of which
    `imports.reward_key` names an entry. `surplus_rows`: route rows that the reader itself has dropped.
    `left_out`: why the record is no sample; it is counted. `ignored`: fields of the record that are not read.
    """

    where: str
    values: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    surplus_rows: int = 0
    left_out: str | None = None
    ignored: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Options of every reader. `axis`: shapes that recorded routes may have, None: routes are not read."""

    axis: RouteAxis | None


class Reader(Protocol):
    """Reads one file of another program, record by record, in the order of the file. Raises Refusal."""

    def __call__(self, path: Path, *, options: ReadOptions) -> Iterable[ForeignSample]: ...


@contextmanager
def located(where: str) -> Iterator[None]:
    """Opens every reason of a Refusal raised inside with `where`."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal([r if r.startswith(where) else f"{where}: {r}" for r in refusal.reasons]) from None


def behind_prompt(values: NDArray[Any], *, tokens: int, fill: Any) -> NDArray[Any]:
    """Values of the response [G] as an array over all tokens [T], `fill` on the prompt."""
    return np.concatenate([np.full(tokens - len(values), fill, dtype=values.dtype), values])


def text_of(value: Any) -> str | None:
    """Text that can be written as UTF-8, None for anything else (a prompt may be a list of messages)."""
    if not isinstance(value, str):
        return None
    return value.encode("utf-8", errors="replace").decode("utf-8")


def unknown_fields(record: Mapping[str, Any], *, known: Sequence[str]) -> list[str]:
    """Names that a reader neither reads nor expects."""
    return sorted(str(name) for name in record if name not in known)
