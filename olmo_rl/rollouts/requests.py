"""One question to one engine: the body that is sent, the answer that fits it, and the model that is asked;
what is counted, and the pause before it is asked again.

Whatever changes the distribution is sent, neutral settings too: engines fill gaps from the
`generation_config.json` of their model.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from olmo_rl.config import Source
from olmo_rl.policy.engine import Request
from olmo_rl.policy.sampling import StopTokens, stop_ids
from olmo_rl.rollouts.answers import Wanted, fitting_answer
from olmo_rl.rollouts.exchange import EngineFault, RejectedRequest, exchange
from olmo_rl.rollouts.wire import Completion

COMPLETIONS = "/v1/completions"
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 10.0


@dataclass(kw_only=True, slots=True)
class Counts:
    """What happened to requests; asked = received + abandoned when none is under way."""

    asked: int = 0
    received: int = 0
    retried: int = 0
    abandoned: int = 0

    def metrics(self) -> dict[str, float]:
        return {
            "rollouts/asked": float(self.asked),
            "rollouts/received": float(self.received),
            "rollouts/retried": float(self.retried),
            "rollouts/abandoned": float(self.abandoned),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """The first model of an engine; `max_model_len` None: it is not reported."""

    name: str
    max_model_len: int | None


def common_body(
    source: Source,
    *,
    max_new_tokens: int,
    stop_token: StopTokens,
    temperature: float,
    top_p: float,
    routes: bool,
) -> dict[str, Any]:
    """The body of every request but for model, prompt and seed."""
    sglang = source is Source.sglang
    body: dict[str, Any] = {
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": -1 if sglang else 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 1,
        "return_token_ids": True,
        "n": 1,
    }
    if stops := stop_ids(stop_token):
        body["stop_token_ids"] = list(stops)
    if routes and sglang:
        body["return_routed_experts"] = True
    return body


def attempt_body(
    body: Mapping[str, Any], request: Request, version: int | None, *, seed: int, draw: int = 0
) -> dict[str, Any]:
    """The body of one attempt. Another draw has other random numbers: an engine that fails on a response may
    do so again.
    """
    digest = hashlib.blake2b(f"{seed}/{request.id}/{draw}".encode(), digest_size=4).digest()
    salt = {} if version is None else {"cache_salt": str(version)}
    return {**body, **salt, "prompt": list(request.tokens), "seed": int.from_bytes(digest) >> 1}


async def ask(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    request: Request,
    wanted: Wanted,
    seconds: float,
) -> Completion:
    """One attempt: an answer that fits the request, or an EngineFault."""
    most = wanted.most_bytes(len(request.tokens) + body["max_tokens"])
    reply = await exchange(client, "POST", url, COMPLETIONS, body=body, seconds=seconds, most_bytes=most)
    if 400 <= reply.status < 500 and reply.status not in (408, 429):
        raise RejectedRequest(f"status {reply.status} {reply.text}")
    if reply.status != 200:
        raise EngineFault(f"status {reply.status} {reply.text}".strip())
    return fitting_answer(reply.json(), request=request, max_tokens=body["max_tokens"], wanted=wanted)


async def model_card(client: httpx.AsyncClient, url: str, *, seconds: float) -> ModelCard:
    """The first model that an engine lists."""
    reply = await exchange(client, "GET", url, "/v1/models", seconds=seconds)
    try:
        card = reply.json()["data"][0]
        name, length = card["id"], card.get("max_model_len")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineFault(f"/v1/models: {type(error).__name__}") from None
    if not isinstance(name, str):
        raise EngineFault("/v1/models: the name of a model is no text")
    return ModelCard(name=name, max_model_len=length if type(length) is int else None)


def backoff(attempt: int) -> float:
    """Seconds, doubled with every attempt, spread so that retries do not arrive together."""
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**attempt) * random.uniform(0.5, 1.0)
