"""Answers that no engine should give: each is made from a right answer to a request of the client.

One must cost a retry or a sample, never the run.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from aiohttp import web
from engine_cases import MODEL


def answer_of(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A right answer, with changes to its choice: two tokens, routes of the two routed layers."""
    rows = len(body["prompt"]) + 1
    routes = [[[row % 4, (row + 1) % 4]] * 2 for row in range(rows)]
    choice = {
        "token_ids": [7, 8],
        "prompt_token_ids": body["prompt"],
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
        "finish_reason": "length",
        "routed_experts": routes,
        "text": "",
    }
    return {"choices": [choice | changes]}


def _logprobs(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"token_logprobs": list(values)}}


def _rows(body: dict[str, Any], row: list[int]) -> dict[str, Any]:
    return answer_of(body, routed_experts=[[row] * 2] * (len(body["prompt"]) + 1))


def _npy(header: str, *, data: bytes = b"", version: bytes = b"\x01\x00") -> str:
    words = header.encode()
    return base64.b64encode(b"\x93NUMPY" + version + len(words).to_bytes(2, "little") + words + data).decode()


def _saved(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def _routes(payload: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda body: answer_of(body, routed_experts=payload)


def _text(text: str) -> Callable[[dict[str, Any]], Any]:
    return lambda body: (200, text)


HUGE = "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 3, 2), }\n"
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "status 500": lambda body: (500, {"error": "out of memory"}),
    "status 404": lambda body: (404, {"detail": "Not Found"}),
    "status 302": lambda body: (302, "elsewhere"),
    "no JSON": _text("<html>gateway</html>"),
    "no UTF-8": lambda body: (200, b"\xff\xfe{}"),
    "JSON nested 100,000 deep": _text("[" * 100_000 + "]" * 100_000),
    "an integer of 5,000 digits": _text('{"choices": ' + "9" * 5000 + "}"),
    "a list": _text("[1]"),
    "null": _text("null"),
    "choices is text": lambda body: {"choices": "two"},
    "a choice is a number": lambda body: {"choices": [7]},
    "no choices": lambda body: {"choices": []},
    "two for one": lambda body: {"choices": answer_of(body)["choices"] * 2},
    "another prompt": lambda body: answer_of(body, prompt_token_ids=[1, *body["prompt"][1:], 9]),
    "prompt of text": lambda body: answer_of(body, prompt_token_ids="ab"),
    "no tokens": lambda body: answer_of(body, token_ids=[], **_logprobs()),
    "too many tokens": lambda body: answer_of(body, token_ids=[1] * 9, **_logprobs(*[-1.0] * 9)),
    "a negative token": lambda body: answer_of(body, token_ids=[7, -1]),
    "a token outside of the vocabulary": lambda body: answer_of(body, token_ids=[7, MODEL.vocab_size]),
    "the largest int32 as token": lambda body: answer_of(body, token_ids=[7, 2**31 - 1]),
    "a token beyond int64": lambda body: answer_of(body, token_ids=[7, 2**70]),
    "a token of true": lambda body: answer_of(body, token_ids=[7, True]),
    "a token of 1.5": lambda body: answer_of(body, token_ids=[7, 1.5]),
    "no log-probs": lambda body: answer_of(body, logprobs=None),
    "too few log-probs": lambda body: answer_of(body, **_logprobs(-1.0)),
    "null log-prob": lambda body: answer_of(body, **_logprobs(-1.0, None)),
    "log-prob of text": lambda body: answer_of(body, **_logprobs(-1.0, "-2")),
    "log-prob of 400 digits": lambda body: answer_of(body, **_logprobs(-1.0, -(10**400))),
    "log-prob NaN": lambda body: (200, json.dumps(answer_of(body, **_logprobs(-1.0, float("nan"))))),
    "log-prob minus infinity": lambda body: (
        200,
        json.dumps(answer_of(body, **_logprobs(-1.0, -float("inf")))),
    ),
    "log-prob beyond float32": lambda body: answer_of(body, **_logprobs(-1.0, -1e300)),
    "log-prob above 0": lambda body: answer_of(body, **_logprobs(-1.0, 3.0)),
    "aborted": lambda body: answer_of(body, finish_reason="abort"),
    "finish_reason is a list": lambda body: answer_of(body, finish_reason=["stop"]),
    "finish_reason is a lone surrogate": lambda body: answer_of(body, finish_reason="\ud800"),
    "no routes": _routes(None),
    "routes of a cached prefix": _routes([[[0, 1]] * 2]),
    "routes of another model": _routes([[[0, 1]] * 5] * 9),
    "routes all zero": lambda body: _rows(body, [0, 0]),
    "an expert twice": lambda body: _rows(body, [3, 3]),
    "expert 77 of 4": lambda body: _rows(body, [0, 77]),
    "expert -1": lambda body: _rows(body, [0, -1]),
    "routes of text": lambda body: _rows(body, ["0", "1"]),  # type: ignore[list-item]
    "routes of unequal lengths": _routes([[[0, 1]], [[0]]]),
    "routes with an integer of 400 digits": _routes([[[0, 10**400]]]),
    "routes that are no base64": _routes("%%%"),
    "an .npy of 10^12 rows": _routes(_npy(HUGE)),
    "an .npy with a nested header": _routes(_npy("(" * 9000)),
    "an .npy that is cut": _routes(base64.b64encode(b"\x93NUMPY\x01").decode()),
    "an .npy of objects": _routes(_npy("{'descr': '|O', 'fortran_order': False, 'shape': (3, 2, 2), }\n")),
    "an .npy of floats": _routes(_saved(np.zeros((3, 2, 2)))),
    "an .npy of one axis": _routes(_saved(np.zeros(12, dtype=np.uint8))),
    "routes with a negative shape": _routes({"dtype": "uint8", "shape": [-1, 2, 2], "data": "AAAA"}),
    "routes with a shape beyond int64": _routes({"dtype": "uint8", "shape": [10**30, 2, 2], "data": ""}),
    "routes of dtype object": _routes({"dtype": "O", "shape": [1, 1, 3], "data": "AAAA"}),
    "routes whose shape is a number": _routes({"dtype": "uint8", "shape": 12, "data": "AAAA"}),
    "a version of 5,000 digits": lambda body: answer_of(body, weight_version="9" * 5000, token_ids=[]),
    "version spans that are numbers": lambda body: answer_of(body) | {"metadata": {"weight_versions": [1]}},
    "a compressed answer": lambda body: web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
    "a flood": lambda body: (200, b" " * (2**23)),
}
