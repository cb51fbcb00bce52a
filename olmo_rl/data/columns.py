"""The columns of a rollout file, one table for reading and writing, and how a row becomes a Sample.

Owns the type of every cell: JSON values are taken as they are (true is no integer, 1.0 is no token), parquet
lists arrive as arrays. Refuses what has the wrong type or is missing; `validation.py` refuses what has the
wrong content.

Shapes: T tokens, L layers of a route's axis, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.data.validation import checked_routes
from olmo_rl.types import Collection, ExpertLayout, Refusal, Sample


class Kind(Enum):
    """What one cell of a column holds. The last three are per-token lists."""

    name = "name"
    text = "text"
    integer = "integer"
    number = "number"
    flag = "flag"
    tokens = "tokens"
    mask = "mask"
    logprobs = "logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column: its name in files, the attribute of `Sample` it fills, its kind, whether required."""

    name: str
    attribute: str
    kind: Kind
    required: bool = True


COLUMNS: tuple[Column, ...] = (
    Column(name="sample_id", attribute="id", kind=Kind.name),
    Column(name="group_id", attribute="group", kind=Kind.name),
    Column(name="tokens", attribute="tokens", kind=Kind.tokens),
    Column(name="response_mask", attribute="response_mask", kind=Kind.mask),
    Column(name="behavior_logprobs", attribute="behavior_logprobs", kind=Kind.logprobs),
    Column(name="reward", attribute="reward", kind=Kind.number),
    Column(name="policy_version", attribute="policy_version", kind=Kind.integer),
    Column(name="loss_mask", attribute="loss_mask", kind=Kind.mask, required=False),
    Column(name="ref_logprobs", attribute="ref_logprobs", kind=Kind.logprobs, required=False),
    Column(name="finish_reason", attribute="finish_reason", kind=Kind.text, required=False),
    Column(name="prompt", attribute="prompt", kind=Kind.text, required=False),
    Column(name="response", attribute="response", kind=Kind.text, required=False),
    Column(name="has_placeholders", attribute="has_placeholders", kind=Kind.flag, required=False),
)
ROUTE_COLUMNS = ("routes", "routes_shape", "routes_dtype")
ROUTE_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
METADATA_NAMES = ("num_experts", "top_k", "routed_layers", "route_layers", "model", "tokenizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """What a file says about itself. `all_layers`: the layer axis of its routes also counts dense layers."""

    layout: ExpertLayout | None = None
    all_layers: bool = False
    model: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row of a file before it is a sample: where it stands, its cells by name, or why it has none."""

    where: str
    cells: dict[str, Any]
    fault: str | None = None


def unknown_name(name: str, known: Sequence[str]) -> str:
    """The message about a name that means nothing here, with the nearest that could have been meant."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown name {name!r}: " + (
        f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    )


def metadata_of(raw: Any, *, where: str) -> Metadata:
    """What the metadata object of a file says; {} where there is none."""
    if not isinstance(raw, dict):
        raise Refusal(
            f"{where}: the metadata is {raw!r}, expected an object with {', '.join(METADATA_NAMES)}"
        )
    for name in raw:
        if name not in METADATA_NAMES:
            raise Refusal(f"{where}: metadata: {unknown_name(name, METADATA_NAMES)}")
    for name in ("model", "tokenizer"):
        if raw.get(name) is not None and not isinstance(raw[name], str):
            raise Refusal(f"{where}: metadata {name} is {raw[name]!r}: expected text")
    if raw.get("route_layers", "routed") not in ("all", "routed"):
        raise Refusal(
            f"{where}: metadata route_layers is {raw['route_layers']!r}: expected 'all' or 'routed'"
        )
    expert_names = ("num_experts", "top_k", "routed_layers")
    missing = [name for name in expert_names if raw.get(name) is None]
    layout = None
    if not missing:
        layout = _layout(*(raw[name] for name in expert_names), where=where)
    elif len(missing) < len(expert_names) or "route_layers" in raw:
        raise Refusal(
            f"{where}: metadata lacks {', '.join(missing)}: routes need {', '.join(expert_names)} together"
        )
    return Metadata(
        layout=layout,
        all_layers=raw.get("route_layers") == "all",
        model=raw.get("model"),
        tokenizer=raw.get("tokenizer"),
    )


def _layout(num_experts: Any, top_k: Any, routed_layers: Any, *, where: str) -> ExpertLayout:
    if type(num_experts) is not int or num_experts < 1:
        raise Refusal(f"{where}: metadata num_experts is {num_experts!r}: expected a positive integer")
    if type(top_k) is not int or not 1 <= top_k <= num_experts:
        raise Refusal(
            f"{where}: metadata top_k is {top_k!r}: expected an integer in 1..num_experts={num_experts}"
        )
    layers = routed_layers if isinstance(routed_layers, list) else []
    if not layers or any(type(x) is not int or x < 0 for x in layers) or len(set(layers)) != len(layers):
        raise Refusal(
            f"{where}: metadata routed_layers is {routed_layers!r}: expected a list of distinct layer ids"
        )
    return ExpertLayout(num_experts=num_experts, top_k=top_k, routed_layers=tuple(layers))


def describe(collection: Collection) -> dict[str, Any]:
    """The metadata of a collection as it is written."""
    layout = collection.layout
    experts = (
        {}
        if layout is None
        else {
            "num_experts": layout.num_experts,
            "top_k": layout.top_k,
            "routed_layers": list(layout.routed_layers),
        }
    )
    named = {"model": collection.model, "tokenizer": collection.tokenizer}
    return experts | {name: value for name, value in named.items() if value is not None}


def written_columns(collection: Collection) -> list[Column]:
    """The columns that a file of `collection` has: the required ones, and those that any sample fills."""
    return [
        c for c in COLUMNS if c.required or any(_filled(getattr(s, c.attribute)) for s in collection.samples)
    ]


def _filled(value: Any) -> bool:
    return value is not None and value is not False


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
    fields: dict[str, Any] = {}
    for column in COLUMNS:
        value = record.cells.get(column.name)
        if value is not None:
            fields[column.attribute] = _CONVERT[column.kind](value, column.name)
        elif column.required:
            raise Refusal(f"{column.name} is missing")
    return Sample(**fields)


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
    shape, dtype = record.cells["routes_shape"], record.cells["routes_dtype"]
    stored = _stored_routes(routes, shape=shape, dtype=dtype)
    return checked_routes(stored, tokens=tokens, layout=layout, all_layers=all_layers)


def _stored_routes(buffer: Any, *, shape: list[int] | None, dtype: str | None) -> NDArray[np.integer]:
    """The array in `buffer`: C order, little-endian."""
    if dtype not in ROUTE_DTYPES:
        raise Refusal(f"routes_dtype is {dtype!r}: expert ids are stored as one of {', '.join(ROUTE_DTYPES)}")
    if not isinstance(shape, list) or len(shape) != 3 or any(x is None or x < 0 for x in shape):
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
    array = np.zeros((len(rows), axis, layout.top_k), dtype=np.int64)
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
            array[t, index] = experts
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
