"""The local engine behind the HTTP API that serving engines speak: completions with log-probs and routes.

`POST /v1/completions` as OpenAI defines it, with the extensions that RL needs: prompts as token ids,
`return_token_ids`, recorded experts (base64 of a .npy, as vLLM sends them) and `weight_version`. Weights
arrive by `POST /update_weights_from_disk` (SGLang), `/collective_rpc` with `reload_weights` (vLLM) or by
broadcast (`/init_weights_update_group` and `/update_weights_from_distributed`, SGLang); an update waits for
the running batch, so every sample has one version, and a failed one changes nothing. Refused with status 400:
what this engine cannot do (streams, several stop tokens), requests too long for the model. Until weights are
there, completions answer 503.

Requests that wait together are generated together: one batch after another in one thread.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from torch import Tensor

from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.policy.engine import Generation, LocalEngine, Request
from olmo_rl.rollouts.collective import Arrivals
from olmo_rl.rollouts.wire import version_of
from olmo_rl.types import Refusal

MODEL_NAME = "policy"
MAX_BODY_BYTES = 64 * 2**20
# What waits this long is generated together; a batch takes longer than that anyway.
GATHER_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one request is sampled; requests that agree share a batch."""

    max_tokens: int
    temperature: float
    top_p: float
    stop_token: int | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Waiting:
    """A request in the queue and whoever waits for it."""

    request: Request
    sampling: Sampling
    result: asyncio.Future[Generation]


class EngineServer:
    """One engine, one queue, one thread that generates. `load` reads full weights from a path, `arrivals`
    collects those that are broadcast.
    """

    def __init__(
        self,
        engine: LocalEngine,
        *,
        tokenizer: Tokenizer,
        load: Callable[[str], Mapping[str, Tensor]],
        arrivals: Arrivals,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._load = load
        self._arrivals = arrivals
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._running = asyncio.Event()
        self._running.set()
        self._batches: asyncio.Task[None] | None = None
        self._under_way = 0

    def application(self) -> web.Application:
        """Routes and life cycle."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_refusals_as_400])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        for path in ("/pause", "/pause_generation"):
            app.router.add_post(path, self._pause)
        for path in ("/resume", "/continue_generation"):
            app.router.add_post(path, self._resume)
        for path in ("/reset_prefix_cache", "/flush_cache"):
            app.router.add_post(path, self._flush)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/collective_rpc", self._collective_rpc)
        app.router.add_post("/init_weights_update_group", self._join)
        app.router.add_post("/update_weights_from_distributed", self._receive)
        app.router.add_post("/destroy_weights_update_group", self._leave)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, app: web.Application) -> None:
        del app
        self._batches = asyncio.create_task(self._generate_batches())

    async def _stop(self, app: web.Application) -> None:
        del app
        if self._batches is not None:
            self._batches.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._arrivals.close()

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"weight_version": self._engine.version, "requests": self._under_way})

    async def _models(self, request: web.Request) -> web.Response:
        del request
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "olmo_rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.Response:
        if self._engine.version is None:
            return web.json_response({"error": {"message": "no weights yet", "code": 503}}, status=503)
        body = await _body(request)
        prompts = self._prompts(body)
        sampling = self._sampling(body)
        longest = max(len(prompt) for prompt in prompts) + sampling.max_tokens
        if longest > self._engine.max_seq_len:
            raise Refusal(
                f"prompt and max_tokens: {longest} tokens together, "
                f"model.max_seq_len={self._engine.max_seq_len}"
            )
        copies = _integer(body, "n", default=1, lowest=1)
        name = f"cmpl-{uuid.uuid4().hex}"
        seed = body.get("seed")
        loop = asyncio.get_running_loop()
        waiting = [
            Waiting(
                request=Request(id=f"{name if seed is None else seed}/{number}/{copy}", tokens=prompt),
                sampling=sampling,
                result=loop.create_future(),
            )
            for number, prompt in enumerate(prompts)
            for copy in range(copies)
        ]
        for one in waiting:
            self._queue.put_nowait(one)
        self._under_way += len(waiting)
        try:
            generations = await asyncio.gather(*(one.result for one in waiting))
        finally:
            self._under_way -= len(waiting)
        choices = [
            self._choice(generation, index=index, prompt=one.request.tokens, body=body)
            for index, (generation, one) in enumerate(zip(generations, waiting, strict=True))
        ]
        read = sum(len(prompt) for prompt in prompts)
        written = sum(len(generation.logprobs) for generation in generations)
        answer = {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "choices": choices,
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }
        return web.json_response(answer)

    def _prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """Token ids of every prompt: text, ids, or a list of either."""
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            prompts: list[Any] = [prompt]
        elif isinstance(prompt, list) and prompt and all(isinstance(part, int) for part in prompt):
            prompts = [prompt]
        elif isinstance(prompt, list) and prompt:
            prompts = prompt
        else:
            raise Refusal("prompt: give text, token ids, or a list of either")
        found = []
        for one in prompts:
            ids = self._tokenizer.encode(one) if isinstance(one, str) else one
            if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
                raise Refusal("prompt: every prompt is text or a list of at least one token id")
            if min(ids) < 0 or max(ids) >= self._engine.vocab_size:
                raise Refusal(f"prompt: a token id outside 0..{self._engine.vocab_size - 1}")
            found.append(ids)
        return found

    def _sampling(self, body: Mapping[str, Any]) -> Sampling:
        for name in ("stream", "echo", "suffix", "best_of", "stop"):
            if body.get(name) not in (None, False):
                raise Refusal(f"{name}: not supported by this server")
        stops = body.get("stop_token_ids")
        stops = [self._tokenizer.eos_id] if stops is None else stops
        if body.get("ignore_eos"):
            stops = []
        if not isinstance(stops, list) or len(stops) > 1 or any(type(token) is not int for token in stops):
            raise Refusal("stop_token_ids: this engine ends responses at one token id")
        top_p = _number(body, "top_p", default=1.0)
        if not 0 < top_p <= 1:
            raise Refusal(f"top_p: {top_p} lies outside (0, 1]")
        return Sampling(
            max_tokens=_integer(body, "max_tokens", default=16, lowest=1),
            temperature=_number(body, "temperature", default=1.0),
            top_p=top_p,
            stop_token=stops[0] if stops else None,
        )

    def _choice(
        self, generation: Generation, *, index: int, prompt: Any, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        ids = generation.tokens[len(prompt) :].tolist()
        ended = generation.finish_reason == "stop"
        choice: dict[str, Any] = {
            "index": index,
            "text": self._tokenizer.decode(ids[:-1] if ended else ids),
            "finish_reason": generation.finish_reason,
            "logprobs": None,
            "weight_version": generation.policy_version,
        }
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [self._tokenizer.decode([token]) for token in ids],
                "token_logprobs": [float(value) for value in generation.logprobs],
                "top_logprobs": None,
                "text_offset": None,
            }
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": list(prompt)}
        if generation.routes is not None:
            choice["routed_experts"] = _npy(generation.routes)
        return choice

    async def _generate_batches(self) -> None:
        """Take what waits, batch by batch, as long as the server runs."""
        loop = asyncio.get_running_loop()
        while True:
            waiting = [await self._queue.get()]
            await asyncio.sleep(GATHER_SECONDS)
            await self._running.wait()
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            # Requests of equal seeds have equal ids, which one batch must not hold twice.
            batches: dict[tuple[Sampling, int], list[Waiting]] = defaultdict(list)
            seen: Counter[tuple[Sampling, str]] = Counter()
            for one in waiting:
                key = (one.sampling, one.request.id)
                batches[one.sampling, seen[key]].append(one)
                seen[key] += 1
            for (sampling, _), batch in batches.items():
                await self._one_batch(loop, sampling=sampling, batch=batch)

    async def _one_batch(
        self, loop: asyncio.AbstractEventLoop, *, sampling: Sampling, batch: list[Waiting]
    ) -> None:
        def generate() -> list[Generation]:
            return self._engine.generate(
                [one.request for one in batch],
                max_new_tokens=sampling.max_tokens,
                stop_token=sampling.stop_token,
                temperature=sampling.temperature or 1.0,
                top_p=sampling.top_p,
                greedy=sampling.temperature == 0,
                seed=0,  # the requests' own ids hold theirs
            )

        try:
            generations = await loop.run_in_executor(self._thread, generate)
        except (Refusal, RuntimeError) as error:
            for one in batch:
                if not one.result.done():
                    one.result.set_exception(error)
            return
        for one, generation in zip(batch, generations, strict=True):
            if not one.result.done():  # a client that left
                one.result.set_result(generation)

    async def _pause(self, request: web.Request) -> web.Response:
        """No new batch starts; the running one ends first."""
        del request
        self._running.clear()
        await asyncio.get_running_loop().run_in_executor(self._thread, _nothing)
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        del request
        self._running.set()
        return web.json_response({"status": "running"})

    async def _flush(self, request: web.Request) -> web.Response:
        """Decoding state lives inside one batch: nothing computed with old weights is kept."""
        del request
        return web.json_response({"status": "flushed"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await _body(request)
        return await self._take_weights(body.get("model_path"), version=body.get("weight_version"))

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if body.get("method") != "reload_weights":
            raise Refusal(f"method: {body.get('method')!r} is not known here, reload_weights is")
        arguments = body.get("kwargs") or {}
        return await self._take_weights(
            arguments.get("weights_path"), version=arguments.get("weight_version")
        )

    async def _take_weights(self, path: Any, *, version: Any) -> web.Response:
        """Load and publish between two batches. A failure leaves weights and version as they were."""
        number = version_of(version)
        number = (self._engine.version or 0) + 1 if number is None else number
        if not isinstance(path, str):
            raise Refusal("model_path: name the directory or file with the new weights")

        def publish() -> None:
            self._engine.publish(self._load(path), number)

        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, publish)
        except (Refusal, OSError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": "", "weight_version": number})

    async def _join(self, request: web.Request) -> web.Response:
        """Both sides of a broadcast wait for each other, so neither call may wait for generation."""
        await asyncio.to_thread(self._arrivals.open, await _body(request))
        return web.json_response({"success": True, "message": ""})

    async def _leave(self, request: web.Request) -> web.Response:
        del request
        self._arrivals.close()
        return web.json_response({"success": True, "message": ""})

    async def _receive(self, request: web.Request) -> web.Response:
        """The weights take effect with the last of them."""
        body = await _body(request)
        version = version_of(body.get("weight_version"))
        weights = await asyncio.to_thread(self._arrivals.take, body)
        if weights is not None:
            version = (self._engine.version or 0) + 1 if version is None else version
            publish = partial(self._engine.publish, weights, version)
            await asyncio.get_running_loop().run_in_executor(self._thread, publish)
        return web.json_response({"success": True, "message": "", "weight_version": self._engine.version})


@web.middleware
async def _refusals_as_400(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        error = {"message": str(refusal), "type": "invalid_request_error", "code": 400}
        return web.json_response({"error": error}, status=400)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal("the body is no JSON object")
    return body


def _integer(body: Mapping[str, Any], name: str, *, default: int, lowest: int) -> int:
    value = body.get(name)
    value = default if value is None else value
    if type(value) is not int or value < lowest:
        raise Refusal(f"{name}: {value!r} is no integer of at least {lowest}")
    return value


def _number(body: Mapping[str, Any], name: str, *, default: float) -> float:
    value = body.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise Refusal(f"{name}: {value!r} is no number of at least 0")
    return float(value)


def _npy(routes: NDArray[np.integer]) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def _nothing() -> None:
    """What the engine's thread does to show that it is idle."""
