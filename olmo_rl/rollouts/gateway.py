"""The gateway: serving engines behind the wire of the verifiers library, whose clients send and read token
ids.

`POST /inference/v1/generate` and `GET /v1/models`, on 127.0.0.1 alone. Every call belongs to a slot, which is
one planned episode: it carries the slot's number as `seed`, and the id of its trace as session. The call is
asked like any request of `RemoteEngine`: of the ready engine with the fewest requests, again elsewhere where
that fails; while weights are published it waits. A client that leaves ends its request at the engine.

A slot fixes how its tokens are drawn: calls that ask for other sampling are refused, because such tokens
cannot be trained. Random numbers follow from the slot, the session's place in it and the prompt alone:
neither the order nor the time of arrival changes them where agents of one episode play one after another. A
session's place is that of its first call among those of its slot, so agents that play at once draw by who
asks first. Every answered call leaves the version of its weights, by the tokens that the engine read and
wrote.

Refused with status 400 and a reason: bodies that make no sense, unknown slots, prompts beyond the context,
more calls of a session than allowed. An engine that refuses a request, or no engine for too long, is the
failure of the gateway as a whole: `failure` holds it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.engines import Counts, RemoteEngine
from olmo_rl.rollouts.serving.bodies import MAX_BODY_BYTES, MAX_STOPS, integer, json_object, number
from olmo_rl.types import Refusal

MODEL_NAME = "policy"
SESSION_HEADER = "X-Session-ID"
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "n": (1,),
}
# What changes nothing here: log-probs are always those of the chosen tokens, and ids are never decoded.
_UNREAD = frozenset(
    {"seed", "temperature", "top_p", "max_tokens", "stop_token_ids", "logprobs", "skip_special_tokens"}
    | {"routed_experts_prompt_start", *_NEUTRAL}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one call and one session: `context` tokens of prompt and response together, `max_new_tokens`
    of a response, `calls` answered calls of a session; `num_experts` 0: routes are not recorded.
    """

    vocab_size: int
    context: int
    max_new_tokens: int
    calls: int
    num_experts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One body of /inference/v1/generate."""

    tokens: list[int]
    slot: int
    max_tokens: int | None
    stop_tokens: tuple[int, ...]
    first_row: int  # of the routes that are wanted


@dataclass(kw_only=True, slots=True)
class Session:
    """One trace as the gateway sees it. `place`: among the sessions of its slot, in order of their first
    calls; `versions`: of the weights behind each answered call, by `digest_of` the tokens read and written.
    """

    place: int
    prompts: Counter[bytes] = field(default_factory=Counter)
    versions: dict[bytes, int] = field(default_factory=dict)
    answered: int = 0


@dataclass(kw_only=True, slots=True)
class Slot:
    """One planned episode. `name` seeds its random numbers; `temperature` 0: greedy."""

    name: str
    temperature: float
    top_p: float
    sessions: dict[str, Session] = field(default_factory=dict)


class Gateway:
    """The server, in the event loop of `engine`. `url`: for clients, with the `/v1` that they expect;
    `token`: the bearer token that every call needs; `failure`: why no more calls can be answered; `counts`:
    of requests since the start.
    """

    def __init__(self, engine: RemoteEngine, *, limits: Limits, token: str, seed: int) -> None:
        self.token = token
        self.failure: Refusal | None = None
        self.counts = Counts()
        self._engine = engine
        self._limits = limits
        self._seed = seed
        self._slots: dict[int, Slot] = {}
        self._numbers = 0
        self._runner: web.AppRunner | None = None
        self.url = engine.run(self._listen()).result()

    async def _listen(self) -> str:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        # Without handler_cancellation, what a departed client had asked for would be generated to its end.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}/v1"

    def close(self) -> None:
        """Listen no more; requests under way are cancelled. The engine stays its owner's."""
        if self._runner is not None:
            self._engine.run(self._runner.cleanup()).result()
            self._runner = None

    def open_slots(self, names: Sequence[str], *, temperature: float, top_p: float) -> list[int]:
        """A number for each planned episode, by which its calls are known."""
        numbers = [self._numbers + place for place in range(len(names))]
        self._numbers += len(names)
        for slot, name in zip(numbers, names, strict=True):
            self._slots[slot] = Slot(name=name, temperature=temperature, top_p=top_p)
        return numbers

    def close_slots(self, numbers: Sequence[int]) -> dict[int, Slot]:
        """What was answered to each of these episodes; later calls of theirs are refused."""
        return {slot: self._slots.pop(slot) for slot in numbers}

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode()):
            return _refused("the token of this gateway is missing or wrong", status=401)
        try:
            return await handler(request)
        except Refusal as refusal:
            return _refused(str(refusal), status=400)

    async def _models(self, request: web.Request) -> web.Response:
        del request
        card = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "olmo_rl"}
        return web.json_response({"object": "list", "data": [card | {"max_model_len": self._limits.context}]})

    async def _generate(self, request: web.Request) -> web.Response:
        if self.failure is not None:
            return _refused(str(self.failure), status=503)
        call = call_of(await json_object(request), limits=self._limits, slots=self._slots)
        slot = self._slots[call.slot]
        session = self._session(slot, request.headers.get(SESSION_HEADER))
        generation = await self._answer(call, slot=slot, session=session)
        if generation is None:
            return _refused("every attempt at this request failed: the engines' log tells why", status=502)
        session.answered += 1
        session.versions[digest_of(generation.tokens)] = generation.policy_version
        return _compact(answer_of(generation, call=call, num_experts=self._limits.num_experts))

    def _session(self, slot: Slot, id: str | None) -> Session:
        if not id:
            raise Refusal(f"{SESSION_HEADER}: missing: it names the trace of a call")
        session = slot.sessions.setdefault(id, Session(place=len(slot.sessions)))
        if session.answered >= self._limits.calls:
            raise Refusal(f"environment.max_turns={self._limits.calls}: this session had as many answers")
        return session

    async def _answer(self, call: Call, *, slot: Slot, session: Session) -> Generation | None:
        limits = self._limits
        room = limits.context - len(call.tokens)
        if room < 1:
            raise Refusal(
                f"model.max_seq_len={limits.context}: the conversation has {len(call.tokens)} tokens and "
                "leaves no room for an answer"
            )
        prompt = digest_of(np.asarray(call.tokens, dtype=np.int32))
        again = session.prompts[prompt]  # a fork may ask the same twice
        session.prompts[prompt] += 1
        id = f"{slot.name}/{session.place}/{prompt.hex()}/{again}"
        asked = limits.max_new_tokens if call.max_tokens is None else call.max_tokens
        try:
            return await self._engine.answer(
                Request(id=id, tokens=call.tokens),
                max_new_tokens=min(asked, limits.max_new_tokens, room),
                stop_tokens=call.stop_tokens,
                temperature=slot.temperature,
                top_p=slot.top_p,
                seed=self._seed,
                counts=self.counts,
            )
        except Refusal as refusal:
            self.failure = refusal
            raise


def call_of(body: Mapping[str, Any], *, limits: Limits, slots: Mapping[int, Slot]) -> Call:
    """A body as a call. Raises Refusal naming the field at fault, and sampling that cannot be trained."""
    if body.get("model") != MODEL_NAME:
        raise Refusal(f"model: {str(body.get('model'))[:80]!r} is not served here, {MODEL_NAME!r} is")
    if body.get("features") or body.get("content_parts"):
        raise Refusal("features, content_parts: only text can be trained on")
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise Refusal("sampling_params: no object")
    tokens = _ids(body.get("token_ids"), name="token_ids", vocab_size=limits.vocab_size)
    if not tokens:
        raise Refusal("token_ids: a first token has nothing to be drawn from")
    number_of_slot = integer(params, "seed", default=-1, lowest=-1)
    slot = slots.get(number_of_slot)
    if slot is None:
        raise Refusal(f"seed: {number_of_slot} is the number of no episode that was asked for")
    _refuse_other_sampling(params, slot=slot)
    stops = _ids(params.get("stop_token_ids") or [], name="stop_token_ids", vocab_size=limits.vocab_size)
    if len(stops) > MAX_STOPS:
        raise Refusal(f"stop_token_ids: {len(stops)} ids, {MAX_STOPS} at most")
    first = integer(params, "routed_experts_prompt_start", default=0, lowest=0)
    if first > len(tokens):
        raise Refusal(f"routed_experts_prompt_start: {first} lies behind the prompt of {len(tokens)} tokens")
    most = integer(params, "max_tokens", default=limits.max_new_tokens, lowest=1)
    return Call(
        tokens=tokens,
        slot=number_of_slot,
        max_tokens=most,
        stop_tokens=tuple(sorted(set(stops))),
        first_row=first,
    )


def _refuse_other_sampling(params: Mapping[str, Any], *, slot: Slot) -> None:
    for name, value in (("temperature", slot.temperature), ("top_p", slot.top_p)):
        if number(params, name, default=value) != value:
            raise Refusal(
                f"{name}: the environment asks for {params[name]!r}, this run draws with "
                f"rollouts.{name}={value:g}: tokens of another distribution cannot be trained"
            )
    for name, neutral in _NEUTRAL.items():
        if number(params, name, default=neutral[0], lowest=-1) not in neutral:
            raise Refusal(f"{name}: {params[name]!r} changes the distribution, and cannot be trained")
    unknown = sorted(name for name, value in params.items() if name not in _UNREAD and value is not None)
    if unknown:
        raise Refusal(f"{unknown[0][:80]}: no sampling setting of this gateway")


def answer_of(generation: Generation, *, call: Call, num_experts: int) -> dict[str, Any]:
    """The body that the library's client reads: raw log-probs by id, routes from `call.first_row` on."""
    ids = generation.tokens[len(call.tokens) :].tolist()
    content = [
        {"token": f"token_id:{token}", "logprob": float(value)}
        for token, value in zip(ids, generation.logprobs, strict=True)
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": generation.finish_reason,
        "logprobs": {"content": content},
    }
    if num_experts and generation.routes is not None:
        rows = generation.routes[call.first_row :].astype(np.uint8 if num_experts <= 256 else np.uint16)
        choice["routed_experts"] = {  # its client looks for `data` in the first place
            "data": base64.b64encode(rows.tobytes()).decode(),
            "shape": list(rows.shape),
            "start": call.first_row,
            "dtype": str(rows.dtype),
        }
    return {"request_id": generation.id, "choices": [choice]}


def digest_of(tokens: NDArray[np.int32]) -> bytes:
    """A digest of token ids."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), digest_size=16).digest()


def _ids(values: object, *, name: str, vocab_size: int) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise Refusal(f"{name}: no list of token ids")
    if values and not 0 <= min(values) <= max(values) < vocab_size:
        raise Refusal(f"{name}: an id outside 0..{vocab_size - 1}")
    return values


def _compact(body: Mapping[str, Any]) -> web.Response:
    return web.json_response(body, dumps=lambda value: json.dumps(value, separators=(",", ":")))


def _refused(message: str, *, status: int) -> web.Response:
    printable = message.encode("utf-8", "replace").decode()
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return web.json_response({"error": {"message": printable, "type": kind, "code": status}}, status=status)
