"""The columns of a rollout file, from the table of a sample's fields, and how a row becomes a Sample.

Owns the conversion of every value to the kind of its field: JSON values are taken as they are (true is no
integer, 1.0 is no token), lists may arrive as arrays. Refuses a wrong type and a missing value;
`validation.py` refuses wrong contents.

Shapes: T tokens, L layers of a route's axis, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.data.validation import checked_routes
from olmo_rl.types import FIELDS, Collection, ExpertLayout, Kind, Refusal, Sample, SampleField

COLUMNS = tuple(entry for entry in FIELDS if entry.stored and entry.kind is not Kind.routes)
ROUTE_COLUMNS = ("routes", "routes_shape", "routes_dtype")
ROUTE_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row of a file before it is a sample: its place, its cells by name, or why it has none."""

    where: str
    cells: dict[str, Any]
    fault: str | None = None


def written_columns(collection: Collection) -> list[SampleField]:
    """The columns that a file of `collection` has: the required ones, and those that any sample fills with
    something other than the default.
    """
    return [c for c in COLUMNS if c.required or any(filled(s, c) for s in collection.samples)]


def filled(sample: Sample, entry: SampleField) -> bool:
    """Whether a field of the sample differs from its default."""
    value = getattr(sample, entry.name)
    return value is not entry.default and (isinstance(value, np.ndarray) or value != entry.default)


def layer_axis(record: Record) -> int | None:
    """Layers of a record's routes, None where it has none or they are malformed."""
    routes, shape = record.cells.get("routes"), record.cells.get("routes_shape")
    if isinstance(routes, list):
        return len(routes[0]) if routes and isinstance(routes[0], list) else None
    return shape[1] if isinstance(shape, list) and len(shape) == 3 else None


def sample_of(record: Record) -> Sample:
    """The sample of a record, its routes not read."""
    if record.fault is not None:
        raise Refusal(record.fault)
    values: dict[str, Any] = {}
    for column in COLUMNS:
        value = record.cells.get(column.column)
        if value is not None:
            values[column.name] = converted(value, kind=column.kind, name=column.column)
        elif column.required:
            raise Refusal(f"{column.column} is missing")
    return Sample(**values)


def converted(value: Any, *, kind: Kind, name: str) -> Any:
    """`value` as a field of `kind` holds it; `name` opens the message of a Refusal.

    Scalars of NumPy are taken as numbers. Per-token values may be lists, tuples, tensors or arrays; anything
    but an array of one axis and of a dtype of the kind is checked element by element.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if kind.per_token:
        if isinstance(value, tuple):
            value = list(value)
        elif not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in _DTYPES[kind]:
            value = value.tolist() if hasattr(value, "tolist") else value
    return _CONVERT[kind](value, name)


def routes_of(
    record: Record, *, tokens: int, layout: ExpertLayout, all_layers: int | None
) -> NDArray[np.integer]:
    """The checked routes [T-1, L, K] of a record that must have them.

    `all_layers`: how many layers the axis of the routes has where it also counts dense ones, else None.
    """
    routes = record.cells.get("routes")
    if routes is None:
        raise Refusal(
            "routes are missing: replay needs them for every sample, record them or set policy.replay=false"
        )
    if isinstance(routes, list):
        nested = _nested_routes(routes, layout=layout, all_layers=all_layers)
        checked = checked_routes(nested, tokens=tokens, layout=layout, all_layers=all_layers)
        # JSON has no dtype: keep ids as narrow as engines do, once they are known to be in range.
        return checked.astype(np.int16 if layout.num_experts <= 2**15 else np.int32)
    if "routes_shape" not in record.cells:
        raise Refusal(f"routes are {routes!r:.80}: expected lists [tokens - 1][layers][top_k]")
    shape, dtype = record.cells["routes_shape"], record.cells["routes_dtype"]
    stored = _stored_routes(routes, shape=shape, dtype=dtype)
    return checked_routes(stored, tokens=tokens, layout=layout, all_layers=all_layers)


def _stored_routes(buffer: Any, *, shape: list[int] | None, dtype: str | None) -> NDArray[np.integer]:
    """The array in `buffer`: C order, little-endian."""
    if dtype not in ROUTE_DTYPES:
        raise Refusal(f"routes_dtype is {dtype!r}: expert ids are stored as one of {', '.join(ROUTE_DTYPES)}")
    if not isinstance(shape, list) or len(shape) != 3 or any(type(x) is not int or x < 0 for x in shape):
        raise Refusal(f"routes_shape is {shape}: expected [tokens - 1, layers, top_k]")
    item = np.dtype(dtype)
    if memoryview(buffer).nbytes != prod(shape) * item.itemsize:
        raise Refusal(
            f"routes hold {memoryview(buffer).nbytes} bytes, routes_shape {shape} of {dtype} needs "
            f"{prod(shape) * item.itemsize}"
        )
    return np.frombuffer(buffer, dtype=item.newbyteorder("<")).astype(item, copy=False).reshape(shape)


def _nested_routes(rows: list[Any], *, layout: ExpertLayout, all_layers: int | None) -> NDArray[np.int64]:
    """JSON lists [T-1][L][K] as an array. Dense layers are left 0, unread."""
    layers = layout.routed_layers
    axis = len(rows[0]) if rows and isinstance(rows[0], list) else all_layers or len(layers)
    for t, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != axis:
            raise Refusal(
                f"routes row {t} is not a list of {axis} layers: rows are lists [layers][top_k] of one shape"
            )
        for index, experts in enumerate(row):
            if all_layers and index not in layers:
                continue
            layer = layers[index] if not all_layers and index < len(layers) else index
            name = f"routes row {t}, layer {layer}: experts"
            _check_elements(experts, name, (int,), "an integer")
            if len(experts) != layout.top_k:
                raise Refusal(f"{name} {experts} are {len(experts)}, top_k is {layout.top_k}")
            if not all(abs(expert) < 2**63 for expert in experts):
                raise Refusal(f"{name} {experts} are outside 0..{layout.num_experts - 1}")
    # Only now is every size known to be one of the rows themselves, and not the metadata's alone.
    width = layout.top_k if axis == (all_layers or len(layers)) else 0  # another axis is refused by its shape
    array = np.zeros((len(rows), axis, width), dtype=np.int64)
    for t, row in enumerate(rows if width else ()):
        for index in layers if all_layers else range(axis):
            array[t, index] = row[index]
    return array


def _name(value: Any, column: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise Refusal(
            f"{column} is {value!r}: ids are non-empty strings (integers are read as decimal strings)"
        )
    return _text(value, column)


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Refusal(f"{column} is {value!r}: expected text (lone surrogates are none)")
    return value


def _integer(value: Any, column: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise Refusal(f"{column} is {value!r}: expected a 64-bit integer")
    return value


def _number(value: Any, column: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) >= 2**1023:
        raise Refusal(f"{column} is {value!r}: expected a number")
    return float(value)


def _flag(value: Any, column: str) -> bool:
    if not isinstance(value, bool) and (type(value) is not int or value not in (0, 1)):
        raise Refusal(f"{column} is {value!r}: expected true, false, 0 or 1")
    return bool(value)


def _tokens(value: Any, column: str) -> NDArray[np.int32]:
    if not isinstance(value, np.ndarray):
        _check_elements(value, column, (int,), "an integer")
        outside = [x for x in value if not 0 <= x < 2**31]
        if outside:
            raise Refusal(f"{column}[{value.index(outside[0])}] is {outside[0]}, outside 0..{2**31 - 1}")
        value = np.array(value, dtype=np.int64)
    bad = (value < 0) | (value >= 2**31)
    if bad.any():
        t = int(np.argmax(bad))
        raise Refusal(f"{column}[{t}] is {value[t]}, outside 0..{2**31 - 1}")
    return value.astype(np.int32)


def _mask(value: Any, column: str) -> NDArray[np.bool_]:
    if not isinstance(value, np.ndarray):
        _check_elements(value, column, (bool, int), "true, false, 0 or 1")
        value = np.array(value, dtype=object)
    bad = (value != 0) & (value != 1)
    if bad.any():
        t = int(np.argmax(bad))
        raise Refusal(f"{column}[{t}] is {value[t]}: expected true, false, 0 or 1")
    return value.astype(np.bool_)


def _logprobs(value: Any, column: str) -> NDArray[np.float32]:
    if not isinstance(value, np.ndarray):
        _check_elements(value, column, (int, float, type(None)), "a number or null")
        huge = next((t for t, x in enumerate(value) if type(x) is int and abs(x) >= 2**1000), None)
        if huge is not None:
            raise Refusal(f"{column}[{huge}] is {value[huge]}: not a log-prob")
        value = np.array([np.nan if x is None else x for x in value], dtype=np.float64)
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused where it is scored
        return value.astype(np.float32)


_DTYPES = {Kind.tokens: "iu", Kind.mask: "iub", Kind.logprobs: "iuf"}
_CONVERT: dict[Kind, Callable[[Any, str], Any]] = {
    Kind.name: _name,
    Kind.text: _text,
    Kind.integer: _integer,
    Kind.number: _number,
    Kind.flag: _flag,
    Kind.tokens: _tokens,
    Kind.mask: _mask,
    Kind.logprobs: _logprobs,
}


def _check_elements(value: Any, column: str, types: tuple[type, ...], expected: str) -> None:
    """A JSON list whose elements are exactly of `types` (true is not an integer)."""
    if not isinstance(value, list):
        raise Refusal(f"{column} is {value!r}: expected a list")
    if not set(map(type, value)) <= set(types):
        t = next(i for i, x in enumerate(value) if type(x) not in types)
        raise Refusal(f"{column}[{t}] is {value[t]!r}: expected {expected}")
