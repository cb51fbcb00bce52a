"""Bodies of requests to `recipe=serve`, checked: types, ranges and bounds. Every fault is a Refusal, which
the
server answers with status 400.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.types import Refusal

MAX_BODY_BYTES = 16 * 2**20
MAX_PROMPTS = 1024  # of one body, as in vLLM
MAX_STOPS = 256  # ids that end a response
MAX_RESPONSES = 4096  # of one body: prompts x n
_INT64 = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one request is sampled; requests that agree share a batch."""

    max_tokens: int
    temperature: float
    top_p: float
    stop_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One body of `/v1/completions`: `copies` responses to each prompt."""

    prompts: list[list[int]]
    copies: int
    seed: int | None
    sampling: Sampling
    logprobs: bool
    token_ids: bool
    routes: bool


async def json_object(request: web.Request) -> dict[str, Any]:
    """The body of a request."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal("the body is no JSON object")
    return body


def completion_request(
    body: Mapping[str, Any], *, tokenizer: Tokenizer, vocab_size: int, max_seq_len: int, whole: int
) -> Asked:
    """A body of `/v1/completions` that this engine can answer. `whole`: the top_k that keeps all tokens."""
    prompts = _prompts(body, tokenizer=tokenizer, vocab_size=vocab_size)
    sampling = _sampling(body, tokenizer=tokenizer, vocab_size=vocab_size, whole=whole)
    longest = max(len(prompt) for prompt in prompts) + sampling.max_tokens
    if longest > max_seq_len:
        raise Refusal(f"prompt and max_tokens: {longest} tokens together, model.max_seq_len={max_seq_len}")
    copies = integer(body, "n", default=1, lowest=1)
    if len(prompts) * copies > MAX_RESPONSES:
        raise Refusal(f"n: {len(prompts)} prompts x {copies} are more than {MAX_RESPONSES} responses")
    seed = integer(body, "seed", default=-_INT64, lowest=-_INT64)
    logprobs = integer(body, "logprobs", default=-1, lowest=-1)
    _text(body, "model")
    _text(body, "cache_salt")
    return Asked(
        prompts=prompts,
        copies=copies,
        seed=None if body.get("seed") is None else seed,
        sampling=sampling,
        logprobs=logprobs >= 0,
        token_ids=flag(body, "return_token_ids"),
        routes=flag(body, "return_routed_experts"),
    )


def _prompts(body: Mapping[str, Any], *, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Token ids of every prompt: text, ids, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = prompt
    else:
        raise Refusal("prompt: give text, token ids, or a list of either")
    if len(prompts) > MAX_PROMPTS:
        raise Refusal(f"prompt: {len(prompts)} prompts, {MAX_PROMPTS} at most")
    found = []
    for one in prompts:
        ids = _encoded(one, tokenizer=tokenizer) if isinstance(one, str) else one
        if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
            raise Refusal("prompt: every prompt is text or a list of at least one token id")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise Refusal(f"prompt: a token id outside 0..{vocab_size - 1}")
        found.append(ids)
    return found


def _encoded(text: str, *, tokenizer: Tokenizer) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"prompt: no Unicode text: {error}") from None
    return list(tokenizer.encode(text))


def _sampling(body: Mapping[str, Any], *, tokenizer: Tokenizer, vocab_size: int, whole: int) -> Sampling:
    for name in ("stream", "echo", "suffix", "best_of", "stop", "logit_bias", "min_tokens", "prompt_embeds"):
        if body.get(name) not in (None, False, 0, []):
            raise Refusal(f"{name}: not supported by this server")
    for name, neutral in _neutral(whole).items():
        if number(body, name, default=neutral, lowest=-_INT64) != neutral:
            raise Refusal(f"{name}: this server samples with {neutral:g} only")
    stops = body.get("stop_token_ids")
    stops = [tokenizer.eos_id] if stops is None else stops
    if flag(body, "ignore_eos"):
        stops = []
    if not isinstance(stops, list) or any(type(token) is not int for token in stops):
        raise Refusal("stop_token_ids: no list of token ids")
    if len(stops) > MAX_STOPS:
        raise Refusal(f"stop_token_ids: {len(stops)} ids, {MAX_STOPS} at most")
    if any(not 0 <= token < vocab_size for token in stops):
        raise Refusal(f"stop_token_ids: an id outside 0..{vocab_size - 1}")
    top_p = number(body, "top_p", default=1.0)
    if not 0 < top_p <= 1:
        raise Refusal(f"top_p: {top_p} lies outside (0, 1]")
    return Sampling(
        max_tokens=integer(body, "max_tokens", default=16, lowest=1),
        temperature=number(body, "temperature", default=1.0),
        top_p=top_p,
        stop_tokens=tuple(sorted(set(stops))),
    )


def _neutral(whole: int) -> dict[str, float]:
    """Settings that leave the distribution as it is."""
    return {
        "top_k": whole,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def integer(body: Mapping[str, Any], name: str, *, default: int, lowest: int) -> int:
    """An integer of int64, `default` where it is missing or null."""
    value = body.get(name)
    value = default if value is None else value
    if type(value) is not int or not lowest <= value < _INT64:
        raise Refusal(f"{name}: {_shown(value)} is no integer of at least {lowest}")
    return value


def number(body: Mapping[str, Any], name: str, *, default: float, lowest: float = 0) -> float:
    """A finite number, `default` where it is missing or null."""
    value = body.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not lowest <= value < 1e300:
        raise Refusal(f"{name}: {_shown(value)} is no number of at least {lowest:g}")
    return float(value)


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A truth value, `default` where it is missing or null."""
    value = body.get(name)
    if value not in (None, True, False) or isinstance(value, int | float) and not isinstance(value, bool):
        raise Refusal(f"{name}: {_shown(value)} is neither true nor false")
    return default if value is None else bool(value)


def word(body: Mapping[str, Any], name: str) -> str:
    """A text that must be there."""
    value = _text(body, name)
    if value is None:
        raise Refusal(f"{name}: missing")
    return value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise Refusal(f"{name}: {_shown(value)} is no text")
    return value


def _shown(value: Any) -> str:
    """A value for a message: its kind where it may be long, since integers of JSON have any length."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _INT64:
        return "an integer beyond 64 bits"
    return repr(value)[:80] if isinstance(value, str | int | float | None) else type(value).__name__
