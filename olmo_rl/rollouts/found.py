"""One sample as another system recorded it, before anybody judged it: what every reader yields."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.types import Refusal


@dataclass(kw_only=True, slots=True)
class FoundSample:
    """Arrays as in `types.Sample`; `routes` [rows, L, K] with the layer axis of the system that recorded it.

    `id`, `group` and `reward` are None where the record has none. `left_out` says why the record is no
    sample. `lacks` names fields that were not there, `ignored` fields that mean nothing to us.
    """

    where: str
    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    id: str | None = None
    group: str | None = None
    reward: float | None = None
    loss_mask: NDArray[np.bool_] | None = None
    ref_logprobs: NDArray[np.float32] | None = None
    routes: NDArray[np.integer] | None = None
    surplus_rows: int = 0
    policy_version: int | None = None
    finish_reason: str | None = None
    prompt: str | None = None
    response: str | None = None
    has_placeholders: bool = False
    left_out: str | None = None
    lacks: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


class Reader(Protocol):
    """Reads one file of another system, sample by sample, in the order of the file."""

    def __call__(
        self, path: Path, *, axis: RouteAxis | None, reward_key: str | None
    ) -> Iterable[FoundSample]:
        """`axis`: None = routes are not read. `reward_key`: which entry of a reward that is a mapping."""
        ...


def nothing(where: str, *, reason: str) -> FoundSample:
    """A record that is no sample."""
    none = np.zeros(0)
    return FoundSample(
        where=where,
        tokens=none.astype(np.int32),
        response_mask=none.astype(bool),
        logprobs=none.astype(np.float32),
        left_out=reason,
    )


def integers(values: Any, *, name: str, where: str) -> NDArray[np.int64]:
    """A list, array or tensor of integers as it is: nothing is rounded, true is no integer."""
    array = _array(values, name=name, where=where)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise Refusal(f"{where}: {name} is {array.dtype}, expected integers")
    return array.astype(np.int64)


def token_ids(values: Any, *, name: str, where: str) -> NDArray[np.int32]:
    """Token ids as int32; refused where they do not fit."""
    ids = integers(values, name=name, where=where)
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        raise Refusal(f"{where}: {name} holds an id outside 0..{np.iinfo(np.int32).max}")
    return ids.astype(np.int32)


def mask(values: Any, *, name: str, where: str) -> NDArray[np.bool_]:
    """Booleans, or integers that are 0 or 1."""
    array = _array(values, name=name, where=where)
    if array.size == 0:
        return np.zeros(0, dtype=bool)
    if array.dtype.kind not in "iub" or not np.isin(array, (0, 1)).all():
        raise Refusal(f"{where}: {name} holds something other than 0 and 1")
    return array.astype(bool)


def numbers(values: Any, *, name: str, where: str) -> NDArray[np.float32]:
    """Numbers as float32; null becomes NaN, which is refused later where the token is scored."""
    if isinstance(values, list):
        values = [math.nan if value is None else value for value in values]
    array = _array(values, name=name, where=where)
    if array.size and array.dtype.kind not in "iuf":
        raise Refusal(f"{where}: {name} holds something that is no number")
    return array.astype(np.float32)


def _array(values: Any, *, name: str, where: str) -> NDArray[Any]:
    """One axis, from a list, a NumPy array or a CPU tensor."""
    if hasattr(values, "numpy"):
        values = values.numpy()
    if not isinstance(values, list | tuple | np.ndarray):
        raise Refusal(f"{where}: {name} is {type(values).__name__}, expected a list")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise Refusal(f"{where}: {name}: {error}") from None
    if array.ndim != 1:
        raise Refusal(f"{where}: {name} has shape {array.shape}, expected one axis")
    return array


def behind_prompt(values: NDArray[Any], *, tokens: int, fill: Any, name: str, where: str) -> NDArray[Any]:
    """Values of the response as an array over all tokens, `fill` on the prompt."""
    if len(values) > tokens:
        raise Refusal(f"{where}: {name} has {len(values)} entries for {tokens} tokens")
    return np.concatenate([np.full(tokens - len(values), fill, dtype=values.dtype), values])


def number_of(value: Any, *, key: str | None, name: str, where: str) -> float | None:
    """A reward that is a number, or the entry `key` of one that is a mapping; None where there is none."""
    if isinstance(value, Mapping):
        if key is None:
            raise Refusal(
                f"{where}: {name} is a mapping of {', '.join(map(repr, sorted(value)))}: "
                "choose one with imports.reward_key"
            )
        if key not in value:
            raise Refusal(f"{where}: {name} has no entry imports.reward_key={key}, it has {sorted(value)}")
        value = value[key]
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return float(value)
    raise Refusal(f"{where}: {name} is {type(value).__name__}, expected a number")


def text_of(value: Any) -> str | None:
    """Text that can be written as UTF-8, None for anything else (a prompt may be a list of messages)."""
    if not isinstance(value, str):
        return None
    return value.encode("utf-8", errors="replace").decode("utf-8")


def unknown_fields(record: Mapping[str, Any], *, known: Sequence[str]) -> list[str]:
    """Names that this reader neither reads nor expects."""
    return sorted(str(name) for name in record if name not in known)
