"""What serving engines answer, whichever of their spellings it comes in -> one `Completion` per response.

Owns the encodings of recorded experts and the fields of completion bodies; refuses what does not describe the
tokens it came with. Read in: vLLM 0.21 (`prompt_routed_experts` beside the choices, `routed_experts` on each,
nested lists or {encoding, dtype, shape, data}), vLLM 0.22 to 0.32 (`routed_experts` on each choice, base64 of
a .npy file), SGLang 0.5.9 to 0.5.23 (`sglext.routed_experts` beside the choices and
`meta_info.routed_experts` of `/generate`: base64 of int32 values in C order; `metadata.weight_version`, and
`metadata.weight_versions` by spans of tokens).

Shapes: P prompt tokens, G generated ones, T = P + G; L layers of the engine's axis, K experts per token.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from olmo_rl.rollouts.versions import oldest_version, token_versions, version_of
from olmo_rl.types import ExpertLayout, Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteAxis:
    """What recorded routes of a model may look like: its layout, and `num_layers` with the dense ones, over
    which some engines report too.
    """

    layout: ExpertLayout
    num_layers: int

    @property
    def top_k(self) -> int:
        return self.layout.top_k

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of layers that an engine may report: the routed ones, or all."""
        return tuple({len(self.layout.routed_layers): None, self.num_layers: None})

    def routed(self, routes: NDArray[np.integer]) -> NDArray[np.integer]:
        """`routes` [R, L, K] of the routed layers alone, in the order of the layout."""
        if routes.shape[1] == len(self.layout.routed_layers):
            return routes
        return np.ascontiguousarray(routes[:, list(self.layout.routed_layers)])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """One response: `prompt` int32 [P], `tokens` int32 [G], `logprobs` float32 [G] (NaN where the engine gave
    none), `routes` [T-1, L, K] with the engine's own layer axis, None where nothing was recorded.
    `policy_version`: the oldest weights that the engine reports to have written a token, None where it
    reports none; `token_versions` int32 [G]: those of each token, where it reports that. `surplus_rows`:
    route rows behind the last token's, which no token needs and which were cut.
    """

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    routes: NDArray[np.integer] | None
    finish_reason: str | None
    policy_version: int | None
    token_versions: NDArray[np.int32] | None = None
    text: str | None = None
    surplus_rows: int = 0


def completions_of(
    body: Any, *, axis: RouteAxis | None, prompt: Sequence[int] | None = None, where: str = "answer"
) -> list[Completion]:
    """Every response of one parsed JSON body, in the order of its choices.

    `prompt`: the ids that were sent, for bodies that do not repeat them. `axis`: None = routes are not read.
    Raises Refusal naming `where` and the field at fault.
    """
    if isinstance(body, list):  # /generate with several samples
        return [one for part in body for one in completions_of(part, axis=axis, prompt=prompt, where=where)]
    if not isinstance(body, Mapping):
        raise Refusal(f"{where}: {type(body).__name__} instead of an object with choices")
    if "choices" in body:
        choices = body["choices"]
        if not isinstance(choices, list):
            raise Refusal(f"{where}: choices is {type(choices).__name__}, expected a list")
        if isinstance(body.get("sglext"), Mapping) and len(choices) > 1 and axis is not None:
            raise Refusal(
                f"{where}: sglext has the routes of the first of {len(choices)} choices: ask one by one"
            )
        return [
            _choice(choice, body=body, axis=axis, prompt=prompt, where=f"{where}, choice {number}")
            for number, choice in enumerate(choices)
        ]
    if "meta_info" in body:
        return [_generated(body, axis=axis, prompt=prompt, where=where)]
    raise Refusal(f"{where}: neither choices (OpenAI-style) nor meta_info (/generate) in {sorted(body)[:8]}")


def _choice(
    choice: Any,
    *,
    body: Mapping[str, Any],
    axis: RouteAxis | None,
    prompt: Sequence[int] | None,
    where: str,
) -> Completion:
    """One choice of an OpenAI-style completion, of vLLM, SGLang or our own server."""
    if not isinstance(choice, Mapping):
        raise Refusal(f"{where}: {type(choice).__name__} instead of an object")
    tokens = _ids(choice.get("token_ids"), name="token_ids", where=where)
    asked = choice.get("prompt_token_ids")
    asked = body.get("prompt_token_ids") if asked is None else asked
    read = _prompt(asked, sent=prompt, where=where)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        raise Refusal(f"{where}: no logprobs: ask for them (logprobs=0 or more)")
    extension = body.get("sglext")
    recorded = choice.get("routed_experts")
    if recorded is None and isinstance(extension, Mapping):
        recorded = extension.get("routed_experts")
    routes, surplus = None, 0
    if axis is not None:
        parts = [body.get("prompt_routed_experts"), recorded]
        routes, surplus = _joined(parts, rows=len(read) + len(tokens) - 1, axis=axis, where=where)
    return Completion(
        prompt=read,
        tokens=tokens,
        logprobs=_logprobs(_token_logprobs(logprobs), count=len(tokens), where=where),
        routes=routes,
        finish_reason=choice.get("finish_reason"),
        policy_version=oldest_version(choice, body=body, where=where),
        token_versions=token_versions(body, count=len(tokens)),
        text=choice.get("text"),
        surplus_rows=surplus,
    )


def _token_logprobs(logprobs: Mapping[str, Any]) -> Any:
    """The list of numbers in the completions form, or in the chat form."""
    if "token_logprobs" in logprobs:
        return logprobs["token_logprobs"]
    content = logprobs.get("content")
    if isinstance(content, list):
        return [entry.get("logprob") if isinstance(entry, Mapping) else entry for entry in content]
    return content


def _generated(
    body: Mapping[str, Any], *, axis: RouteAxis | None, prompt: Sequence[int] | None, where: str
) -> Completion:
    """One answer of SGLang's /generate: log-probs are (value, id, text) triples."""
    meta = body["meta_info"]
    if not isinstance(meta, Mapping):
        raise Refusal(f"{where}: meta_info is {type(meta).__name__}, expected an object")
    triples = meta.get("output_token_logprobs")
    if not isinstance(triples, list) or any(not isinstance(t, Sequence) or len(t) < 2 for t in triples):
        raise Refusal(f"{where}: meta_info.output_token_logprobs is no list of (log-prob, id): ask for it")
    ids = body.get("output_ids", [triple[1] for triple in triples])
    tokens = _ids(ids, name="output_ids", where=where)
    if len(triples) == len(tokens) and any(triple[1] != id for triple, id in zip(triples, ids, strict=True)):
        raise Refusal(f"{where}: output_ids are other tokens than those of meta_info.output_token_logprobs")
    read = _prompt(body.get("prompt_token_ids"), sent=prompt, where=where)
    routes, surplus = None, 0
    if axis is not None:
        parts = [None, meta.get("routed_experts")]
        routes, surplus = _joined(parts, rows=len(read) + len(tokens) - 1, axis=axis, where=where)
    reason = meta.get("finish_reason")
    return Completion(
        prompt=read,
        tokens=tokens,
        logprobs=_logprobs([triple[0] for triple in triples], count=len(tokens), where=where),
        routes=routes,
        finish_reason=reason.get("type") if isinstance(reason, Mapping) else reason,
        policy_version=version_of(meta.get("weight_version")),
        text=body.get("text"),
        surplus_rows=surplus,
    )


def _prompt(answered: Any, *, sent: Sequence[int] | None, where: str) -> NDArray[np.int32]:
    """The ids of the prompt: those of the answer, or those that were sent; both are the same where both are
    there.
    """
    read = _ids(sent if answered is None else answered, name="prompt_token_ids", where=where)
    given = read if sent is None else _ids(sent, name="prompt_token_ids", where=where)
    if not np.array_equal(read, given):
        raise Refusal(f"{where}: the prompt is another one than was sent")
    return read


def _ids(values: Any, *, name: str, where: str) -> NDArray[np.int32]:
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise Refusal(f"{where}: no {name}: ask the engine to return token ids, text is not decoded again")
    if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        raise Refusal(f"{where}: {name} holds something that is no integer")
    largest = np.iinfo(np.int32).max
    if any(not 0 <= value <= largest for value in values):
        raise Refusal(f"{where}: {name} holds an id outside 0..{largest}")
    return np.array(values, dtype=np.int32)


def _logprobs(values: Any, *, count: int, where: str) -> NDArray[np.float32]:
    """float32 [G]; null stays NaN, and whoever scores that token refuses it by sample."""
    if not isinstance(values, list) or len(values) != count:
        found = len(values) if isinstance(values, list) else type(values).__name__
        raise Refusal(f"{where}: {found} log-probs for {count} generated tokens")
    numbers = [math.nan if value is None else value for value in values]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers):
        raise Refusal(f"{where}: a log-prob that is no number")
    if any(isinstance(value, int) and abs(value) >= 2**1000 for value in numbers):
        raise Refusal(f"{where}: a log-prob that no float holds")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused where it is scored
        return np.array(numbers, dtype=np.float32)


def _joined(
    parts: Sequence[Any], *, rows: int, axis: RouteAxis, where: str
) -> tuple[NDArray[np.integer] | None, int]:
    """Routes of prompt and response in one array [rows, L, K], and how many surplus rows were cut."""
    given = [part for part in parts if part is not None]
    if not given:
        return None, 0
    whole = rows if len(given) == 1 else None
    arrays = [decode_routes(part, axis=axis, rows=whole, where=where) for part in given]
    if len({array.shape[1:] for array in arrays if len(array)}) > 1:
        raise Refusal(
            f"{where}: routes of the prompt have (layers, top_k) {arrays[0].shape[1:]}, those of the "
            f"response {arrays[1].shape[1:]}"
        )
    arrays = [array for array in arrays if len(array)] or arrays[:1]
    routes = np.concatenate(arrays)
    surplus = len(routes) - rows
    # The last token was never read by the engine: a row for it is left over from another step.
    if surplus not in (0, 1):
        raise Refusal(
            f"{where}: {len(routes)} route rows, expected {rows}, one for every token but the last: a cached "
            "prefix may have been left out, or the prompt was cut"
        )
    return routes[:rows], surplus


def decode_routes(
    payload: Any, *, axis: RouteAxis, rows: int | None = None, where: str = "routes"
) -> NDArray[np.integer]:
    """Recorded experts [rows, L, K] from any of the encodings above.

    `rows` divides an encoding without a shape; None = such an encoding is refused. Raises Refusal.
    """
    if isinstance(payload, Mapping):
        array = _from_parts(payload, where=where)
    elif isinstance(payload, str):
        array = _from_text(payload, axis=axis, rows=rows, where=where)
    else:
        array = _from_lists(payload, where=where)
    if array.size == 0:
        return np.zeros((0, axis.layers[0], axis.top_k), dtype=np.int32)
    if array.ndim != 3:
        raise Refusal(f"{where}: routes have shape {array.shape}, expected (tokens - 1, layers, top_k)")
    if array.dtype.kind not in "iu":
        raise Refusal(f"{where}: routes have dtype {array.dtype}: expert ids are integers")
    if array.shape[2] != axis.top_k:
        raise Refusal(f"{where}: routes have {array.shape[2]} experts per token, top_k is {axis.top_k}")
    if array.shape[1] not in axis.layers:
        known = " or ".join(map(str, axis.layers))
        raise Refusal(f"{where}: routes have {array.shape[1]} layers, the model has {known}")
    return array


def _from_lists(payload: Any, *, where: str) -> NDArray[Any]:
    """Arrays as they are; nested lists once every entry is known to be a small integer."""
    if isinstance(payload, np.ndarray):
        return payload
    values, depth = payload, 0
    while isinstance(values, list) and values and isinstance(values[0], list) and depth < 2:
        if not all(isinstance(value, list) for value in values):
            raise Refusal(f"{where}: routes are lists of unequal lengths")
        values, depth = [entry for value in values for entry in value], depth + 1
    if not isinstance(values, list) or any(type(value) is not int or abs(value) > 2**31 for value in values):
        raise Refusal(
            f"{where}: routes are neither nested lists of expert ids nor one of the known encodings"
        )
    try:
        return np.asarray(payload)
    except ValueError:
        raise Refusal(f"{where}: routes are lists of unequal lengths") from None


def _from_parts(payload: Mapping[str, Any], *, where: str) -> NDArray[Any]:
    """{dtype, shape, data}: bytes in C order, as they are or in base64."""
    missing = [name for name in ("dtype", "shape", "data") if name not in payload]
    if missing:
        raise Refusal(f"{where}: routes lack {', '.join(missing)}")
    data, shape = payload["data"], payload["shape"]
    raw = data if isinstance(data, bytes) else _base64(data, where=where)
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise Refusal(f"{where}: the shape of routes is {type(shape).__name__}, expected a list")
    return _from_bytes(raw, dtype=payload["dtype"], shape=shape, where=where)


def _from_bytes(
    raw: bytes, *, dtype: Any, shape: Sequence[Any], where: str, order: Literal["C", "F"] = "C"
) -> NDArray[Any]:
    """Integers of `dtype` in `shape`, which must account for every byte."""
    words = str(np.dtype(dtype)) if isinstance(dtype, np.dtype | type) else dtype
    if not isinstance(words, str) or not re.fullmatch(r"u?int(8|16|32|64)|[<>|=]?[iu][1248]", words):
        raise Refusal(f"{where}: routes have dtype {str(words)[:40]}: expert ids are integers")
    sizes = [int(n) if isinstance(n, int | np.integer) and not isinstance(n, bool) else -1 for n in shape]
    known = np.dtype(words)
    if min(sizes, default=-1) < 0 or math.prod(sizes) * known.itemsize != len(raw):
        raise Refusal(f"{where}: {len(raw)} bytes of routes do not fit their own dtype {words} and shape")
    return np.frombuffer(raw, dtype=known).reshape(sizes, order=order)


_NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|=][iu][1248])', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,80})\), \}\s*"
)


def _from_npy(raw: bytes, *, where: str) -> NDArray[Any]:
    """An .npy file as `numpy.save` writes it. The header is read here: numpy allocates what it announces."""
    wide = raw[6:7] != b"\x01"
    start = 12 if wide else 10
    end = start + int.from_bytes(raw[8:start], "little")
    match = _NPY_HEADER.fullmatch(raw[start:end])
    if match is None:
        raise Refusal(f"{where}: routes are a damaged .npy, or one of other than integers")
    descr, fortran, sizes = (part.decode() for part in match.groups())
    shape = [int(size) for size in sizes.split(",") if size.strip().isdecimal()]
    where = f"{where}: damaged .npy"
    return _from_bytes(
        raw[end:], dtype=descr, shape=shape, where=where, order="F" if fortran == "True" else "C"
    )


def _from_text(payload: str, *, axis: RouteAxis, rows: int | None, where: str) -> NDArray[Any]:
    raw = _base64(payload, where=where)
    if raw.startswith(b"\x93NUMPY"):
        return _from_npy(raw, where=where)
    if rows is None:
        raise Refusal(f"{where}: routes without a shape, in two parts: the length of each part is unknown")
    if len(raw) % 4 == 0:
        values = np.frombuffer(raw, dtype="<i4")
        for layers in axis.layers:
            for count in (rows, rows + 1):  # with the surplus row or without
                if values.size == count * layers * axis.top_k:
                    return values.reshape(count, layers, axis.top_k)
    raise Refusal(
        f"{where}: {len(raw)} bytes of routes are no int32 [{rows}, {' or '.join(map(str, axis.layers))}, "
        f"{axis.top_k}]: a cached prefix may have been left out, or the model is another one"
    )


def _base64(data: Any, *, where: str) -> bytes:
    if not isinstance(data, str):
        raise Refusal(f"{where}: routes are {type(data).__name__}, expected base64 text")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal(f"{where}: routes are no base64: {error}") from None
