"""Batches that prime-rl's orchestrator hands to its trainer: msgpack of a `TrainingBatch`.

Both structs are written as arrays, so fields have no names and later versions put new ones in between. Read
by what stands where, as in prime-rl 0.2 to 0.6: first [prompt_ids, prompt_mask, completion_ids,
completion_mask, completion_logprobs], then maybe completion_temperatures (numbers), env_name (text), teacher
or reference log-probs (numbers or null), advantage and reward (a number or null each); or the flat form
[token_ids, mask, logprobs, temperatures, env_name, ...] of later versions. Routes are [data, shape, dtype] or
nested lists [tokens, layers, top_k], wherever they stand. Maps with these names are read too. prime-rl writes
one route row per token; the last one belongs to no decision and is cut. Groups are not in these files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from olmo_rl.rollouts.found import FoundSample, mask, number_of, numbers, token_ids, unknown_fields
from olmo_rl.rollouts.wire import RouteAxis, decode_routes
from olmo_rl.types import Refusal

SPLIT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")
FLAT = ("token_ids", "mask", "logprobs")
OTHERS = (
    "completion_temperatures",
    "temperatures",
    "env_name",
    "teacher_logprobs",
    "ref_logprobs",
    "advantage",
    "reward",
    "routed_experts",
)


def read_batch(path: Path, *, axis: RouteAxis | None, reward_key: str | None) -> Iterator[FoundSample]:
    """Every example of one file."""
    try:
        batch = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
    except (msgpack.UnpackException, ValueError) as error:
        raise Refusal(f"{path}: not one whole msgpack value ({error}): is the file cut?") from None
    examples = batch.get("examples") if isinstance(batch, Mapping) else _first_list(batch)
    if not isinstance(examples, list):
        raise Refusal(f"{path}: no list of examples: is this a TrainingBatch of prime-rl's orchestrator?")
    step = batch.get("step") if isinstance(batch, Mapping) else _step(batch)
    for number, example in enumerate(examples):
        where = f"{path} example {number}"
        fields = example if isinstance(example, Mapping) else _named(example, where=where)
        yield _sample(fields, number=number, step=step, where=where, axis=axis, reward_key=reward_key)


def _first_list(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list) and batch else None


def _step(batch: Sequence[Any]) -> int | None:
    """The first integer behind the examples: temperature before it is a float in every version."""
    return next((value for value in batch[1:] if isinstance(value, int) and value is not True), None)


def _named(example: Any, *, where: str) -> dict[str, Any]:
    """Names for the fields of an array, told by their types."""
    if not isinstance(example, list) or len(example) < 3:
        raise Refusal(f"{where}: {type(example).__name__} instead of the fields of an example")
    flat = _is_numbers(example[2]) and not _is_integers(example[2]) and len(example[0]) == len(example[2])
    names = FLAT if flat else SPLIT
    if len(example) < len(names):
        raise Refusal(f"{where}: {len(example)} fields, expected at least {', '.join(names)}")
    fields = dict(zip(names, example, strict=False))
    rest = example[len(names) :]
    if rest and _is_numbers(rest[0]) and rest[0]:
        fields["temperatures"] = rest.pop(0)
    if rest and isinstance(rest[0], str):
        fields["env_name"] = rest.pop(0)
    strange: list[int] = []
    scalars = [] if flat else ["ref_logprobs", "advantage", "reward"]
    for position, value in enumerate(rest, start=len(example) - len(rest)):
        if _is_routes(value):
            fields["routed_experts"] = _route_parts(value)
        elif scalars and _fits(value, scalars=scalars):
            fields[scalars.pop(0)] = value
        elif value is not None:
            strange.append(position)
    return fields | {f"field {position}": None for position in strange}


def _fits(value: Any, *, scalars: list[str]) -> bool:
    """Whether `value` can be the next of [ref_logprobs, advantage, reward]; a number skips the first."""
    if value is None:
        return True
    if scalars[0] == "ref_logprobs" and isinstance(value, float | int):
        scalars.pop(0)  # versions without the field: the first number is the advantage
        return True
    return _is_numbers(value) if scalars[0] == "ref_logprobs" else isinstance(value, float | int)


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in value
    )


def _is_routes(value: Any) -> bool:
    """[data, shape, dtype] with three axes, the same as a map, or nested lists."""
    if isinstance(value, Mapping):
        return {"data", "shape", "dtype"} <= set(value) and len(value["shape"]) == 3
    if not isinstance(value, list) or not value:
        return False
    if len(value) == 3 and isinstance(value[0], bytes):
        return isinstance(value[1], list) and len(value[1]) == 3 and isinstance(value[2], str)
    return isinstance(value[0], list) and bool(value[0]) and _is_integers(value[0][0])


def _route_parts(value: Any) -> Any:
    if isinstance(value, list) and isinstance(value[0], bytes):
        return {"data": value[0], "shape": value[1], "dtype": value[2]}
    return value


def _sample(
    fields: Mapping[str, Any],
    *,
    number: int,
    step: int | None,
    where: str,
    axis: RouteAxis | None,
    reward_key: str | None,
) -> FoundSample:
    read = _flat if "token_ids" in fields else _split
    tokens, generated, logprobs = read(fields, where=where)
    if not len(tokens) == len(generated) == len(logprobs):
        raise Refusal(
            f"{where}: {len(tokens)} tokens, {len(generated)} entries of the mask, {len(logprobs)} log-probs"
        )
    lacks = ["group"] + (["reward"] if fields.get("reward") is None else [])
    routes, surplus = None, 0
    if axis is not None and fields.get("routed_experts") is not None:
        recorded = _route_parts(fields["routed_experts"])
        routes = decode_routes(recorded, axis=axis, rows=len(tokens) - 1, where=where)
        surplus = int(len(routes) == len(tokens))
        routes = routes[: len(tokens) - 1]
    elif axis is not None:
        lacks.append("routed_experts")
    reference = fields.get("ref_logprobs")
    return FoundSample(
        where=where,
        id=None if step is None else f"{step}:{number}",
        tokens=tokens,
        response_mask=generated,
        logprobs=logprobs,
        ref_logprobs=_over_tokens(reference, tokens=len(tokens), where=where),
        reward=number_of(fields.get("reward"), key=reward_key, name="reward", where=where),
        routes=routes,
        surplus_rows=surplus,
        policy_version=None,
        lacks=lacks,
        ignored=unknown_fields(fields, known=(*SPLIT, *FLAT, *OTHERS)),
    )


def _flat(
    fields: Mapping[str, Any], *, where: str
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]:
    return (
        token_ids(fields.get("token_ids"), name="token_ids", where=where),
        mask(fields.get("mask"), name="mask", where=where),
        numbers(fields.get("logprobs"), name="logprobs", where=where),
    )


def _split(
    fields: Mapping[str, Any], *, where: str
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]:
    missing = [name for name in SPLIT if fields.get(name) is None]
    if missing:
        raise Refusal(f"{where}: no {', '.join(missing)}")
    prompt = token_ids(fields["prompt_ids"], name="prompt_ids", where=where)
    response = token_ids(fields["completion_ids"], name="completion_ids", where=where)
    logprobs = numbers(fields["completion_logprobs"], name="completion_logprobs", where=where)
    before = mask(fields["prompt_mask"], name="prompt_mask", where=where)
    behind = mask(fields["completion_mask"], name="completion_mask", where=where)
    for name, values, ids in (("prompt_mask", before, prompt), ("completion_mask", behind, response)):
        if len(values) != len(ids):
            raise Refusal(f"{where}: {name} has {len(values)} entries for {len(ids)} tokens")
    if before.any():
        raise Refusal(
            f"{where}: prompt_mask is true at token {int(np.argmax(before))}, which has no log-prob"
        )
    return (
        np.concatenate([prompt, response]),
        np.concatenate([before, behind]),
        np.concatenate([np.zeros(len(prompt), dtype=np.float32), logprobs]),
    )


def _over_tokens(values: Any, *, tokens: int, where: str) -> NDArray[np.float32] | None:
    """Reference log-probs, which cover all tokens or are not used."""
    if values is None:
        return None
    array = numbers(values, name="ref_logprobs", where=where)
    if len(array) != tokens:
        raise Refusal(f"{where}: ref_logprobs has {len(array)} entries for {tokens} tokens")
    return array
