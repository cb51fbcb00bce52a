"""The local engine behind the HTTP API of vLLM 0.32.0 or SGLang 0.5.23: one queue, one thread that generates.

Requests that wait together are generated together, one batch after another. An update of weights waits for
the running batch, so every response has one version, and a failed update changes nothing. Requests whose
client has left, and aborted ones, are dropped from the running batch. Until weights are there, completions
answer 503.

`vllm` and `sglang` have the routes and fields of the two programs; each accepts no more than
its program does, and fewer settings: neutral top_k, min_p and penalties, no streams.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from aiohttp import web
from torch import Tensor

from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.policy.engine import Generation, LocalEngine, Request
from olmo_rl.rollouts.collective import Arrivals
from olmo_rl.rollouts.serving.bodies import (
    MAX_BODY_BYTES,
    Asked,
    Sampling,
    completion_request,
    json_object,
)
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.types import Refusal

MODEL_NAME = "policy"
# What waits this long is generated together; a batch takes longer than that anyway.
GATHER_SECONDS = 0.005
ABORTED = "abort"
_LOG = logging.getLogger(__name__)


class Api(Protocol):
    """The routes and fields of one program. `whole_vocabulary`: its top_k that keeps every token."""

    whole_vocabulary: int

    def routes(self, server: EngineServer) -> list[web.RouteDef]: ...

    def completion(self, answered: Answered) -> dict[str, Any]: ...

    def error(self, message: str, *, status: int) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Waiting:
    """A request in the queue and whoever waits for it."""

    request: Request
    sampling: Sampling
    result: asyncio.Future[Generation]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answered:
    """The responses to one body, in the order of its prompts, and what their program writes about them."""

    asked: Asked
    requests: Sequence[Request]
    generations: Sequence[Generation]
    label: str
    tokenizer: Tokenizer
    axis: RouteAxis | None

    def head(self) -> dict[str, Any]:
        """The fields that every program has."""
        read = sum(len(prompt) for prompt in self.asked.prompts)
        written = sum(len(generation.logprobs) for generation in self.generations)
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }

    def choices(self) -> list[dict[str, Any]]:
        """Index, text, finish reason, log-probs and ids of every response."""
        found = []
        for index, (request, generation) in enumerate(zip(self.requests, self.generations, strict=True)):
            ids = generation.tokens[len(request.tokens) :].tolist()
            ended = generation.finish_reason == "stop"
            choice: dict[str, Any] = {
                "index": index,
                "text": self.tokenizer.decode(ids[:-1] if ended else ids),
                "finish_reason": generation.finish_reason,
                "logprobs": self._logprobs(ids, generation=generation) if self.asked.logprobs else None,
            }
            if self.asked.token_ids:
                choice |= {"token_ids": ids, "prompt_token_ids": list(request.tokens)}
            found.append(choice)
        return found

    def _logprobs(self, ids: Sequence[int], *, generation: Generation) -> dict[str, Any]:
        texts = [self.tokenizer.decode([token]) for token in ids]
        values = [float(value) for value in generation.logprobs]
        offsets = np.cumsum([0, *(len(text) for text in texts)])[:-1].tolist()
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": [{text: value} for text, value in zip(texts, values, strict=True)],
            "text_offset": offsets,
        }

    def all_layers(self, generation: Generation) -> np.ndarray[Any, np.dtype[np.integer[Any]]] | None:
        """Routes over every layer, as both programs report them; zeros where nothing is routed."""
        if generation.routes is None or self.axis is None or generation.finish_reason == ABORTED:
            return None
        rows, _, top_k = generation.routes.shape
        whole = np.zeros((rows, self.axis.num_layers, top_k), dtype=generation.routes.dtype)
        whole[:, list(self.axis.layout.routed_layers)] = generation.routes
        return whole


@dataclass(kw_only=True, slots=True, eq=False)
class EngineServer:
    """One engine behind one `api`. `load` reads full weights from a path, `arrivals` collects those that are
    broadcast; `label` is the weight version as text; `token` guards every route but /health. `failure`: the
    exception that ended the loop that generates; `on_failure` is called then.
    """

    engine: LocalEngine
    api: Api
    tokenizer: Tokenizer
    load: Callable[[str], Mapping[str, Tensor]]
    arrivals: Arrivals
    axis: RouteAxis | None
    token: str | None = None
    on_failure: Callable[[], None] = lambda: None
    label: str = "default"
    failure: BaseException | None = None
    under_way: dict[str, Waiting] = field(default_factory=dict)
    _queue: asyncio.Queue[Waiting] = field(default_factory=asyncio.Queue)
    _running: asyncio.Event = field(default_factory=asyncio.Event)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
    )
    _batches: asyncio.Task[None] | None = None

    def application(self) -> web.Application:
        """Routes and life cycle."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_get("/health", self._health)
        app.router.add_get("/olmo_rl/status", self._status)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_routes(self.api.routes(self))
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, app: web.Application) -> None:
        del app
        self._running.set()
        self._batches = asyncio.create_task(self._generate_batches())
        self._batches.add_done_callback(self._ended)

    def _ended(self, batches: asyncio.Task[None]) -> None:
        """A loop that ended by itself leaves requests that nobody answers: the process ends."""
        if batches.cancelled() or (error := batches.exception()) is None:
            return
        self.failure = error
        _LOG.error("the loop that generates ended: %r", error)
        for waiting in self.under_way.values():
            if not waiting.result.done():
                waiting.result.set_exception(RuntimeError("the server ends"))
        self.on_failure()

    async def _stop(self, app: web.Application) -> None:
        del app
        if self._batches is not None:
            self._batches.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.arrivals.close()

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token; answer what a request did wrong with 400."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
        needed = (self.token or "").encode()
        if needed and request.path != "/health" and not hmac.compare_digest(given, needed):
            return self.refuse("the token of serve.token is missing or wrong", status=401)
        try:
            return await handler(request)
        except Refusal as refusal:
            return self.refuse(str(refusal), status=400)

    def refuse(self, message: str, *, status: int) -> web.Response:
        """An error in the words of the program."""
        printable = message.encode("utf-8", "replace").decode()
        return web.json_response(self.api.error(printable, status=status), status=status)

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=200 if self.failure is None else 503)

    async def _status(self, request: web.Request) -> web.Response:
        """Of this server alone: the version that generates, and requests under way."""
        del request
        return web.json_response({"version": self.engine.version, "requests": len(self.under_way)})

    async def _completions(self, request: web.Request) -> web.Response:
        if self.failure is not None:
            return self.refuse("the loop that generates has ended", status=503)
        if self.engine.version is None:
            return self.refuse("no weights yet", status=503)
        asked = completion_request(
            await json_object(request),
            tokenizer=self.tokenizer,
            vocab_size=self.engine.vocab_size,
            max_seq_len=self.engine.max_seq_len,
            whole=self.api.whole_vocabulary,
        )
        name = uuid.uuid4().hex
        loop = asyncio.get_running_loop()
        waiting = {
            f"{name}/{number}/{copy}": Waiting(
                request=Request(
                    id=f"{name if asked.seed is None else asked.seed}/{number}/{copy}", tokens=prompt
                ),
                sampling=asked.sampling,
                result=loop.create_future(),
            )
            for number, prompt in enumerate(asked.prompts)
            for copy in range(asked.copies)
        }
        self.under_way |= waiting
        try:
            for one in waiting.values():
                self._queue.put_nowait(one)
            generations = await asyncio.gather(*(one.result for one in waiting.values()))
        finally:  # of a client that left, too: its futures are cancelled, which drops it from its batch
            for key in waiting:
                del self.under_way[key]
        answered = Answered(
            asked=asked,
            requests=[one.request for one in waiting.values()],
            generations=generations,
            label=self.label,
            tokenizer=self.tokenizer,
            axis=self.axis,
        )
        return web.json_response(self.api.completion(answered))

    async def _generate_batches(self) -> None:
        """Take what waits, batch by batch, as long as the server runs."""
        loop = asyncio.get_running_loop()
        while True:
            waiting = [await self._queue.get()]
            await asyncio.sleep(GATHER_SECONDS)
            await self._running.wait()
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            # Requests of equal seeds have equal ids, which one batch must not have twice.
            batches: dict[tuple[Sampling, int], list[Waiting]] = defaultdict(list)
            seen: Counter[tuple[Sampling, str]] = Counter()
            for one in waiting:
                if one.result.done():  # its client left, or it was aborted
                    continue
                key = (one.sampling, one.request.id)
                batches[one.sampling, seen[key]].append(one)
                seen[key] += 1
            for (sampling, _), batch in batches.items():
                await self._one_batch(loop, sampling=sampling, batch=batch)

    async def _one_batch(
        self, loop: asyncio.AbstractEventLoop, *, sampling: Sampling, batch: list[Waiting]
    ) -> None:
        def generate() -> list[Generation]:
            return self.engine.generate(
                [one.request for one in batch],
                max_new_tokens=sampling.max_tokens,
                stop_token=sampling.stop_tokens,
                temperature=sampling.temperature or 1.0,
                top_p=sampling.top_p,
                greedy=sampling.temperature == 0,
                seed=0,  # the requests' own ids contain theirs
                draw=0,  # as real engines draw: a seed gives the same numbers under any weights
                dropped=lambda: {one.request.id for one in batch if one.result.done()},
            )

        running = loop.run_in_executor(self._thread, generate)
        await asyncio.wait([running])
        error = running.exception()
        if error is not None:
            _LOG.error("a batch of %d requests failed: %r", len(batch), error)
            for one in batch:
                if not one.result.done():
                    one.result.set_exception(error)
            return
        for one, generation in zip(batch, running.result(), strict=True):
            if not one.result.done():
                one.result.set_result(generation)

    async def pause(self, *, abort: bool) -> None:
        """Start no new batch; the running one ends first, or at once where its requests are aborted."""
        self._running.clear()
        if abort:
            for waiting in self.under_way.values():
                if not waiting.result.done():
                    waiting.result.set_result(_aborted(waiting.request, version=self.engine.version or 0))
        await asyncio.get_running_loop().run_in_executor(self._thread, _nothing)

    def resume(self) -> None:
        self._running.set()

    async def take_weights(self, path: str, *, label: str | None) -> None:
        """Load and publish between two batches; a Refusal or OSError leaves weights and version alone."""
        await self.publish(lambda: self.load(path), label=label)

    async def publish(self, weights: Callable[[], Mapping[str, Tensor]], *, label: str | None) -> None:
        """Publish in the thread that generates. `label` None: the version stays what it was."""
        number = self._number(self.label if label is None else label)
        await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self.engine.publish(weights(), number)
        )
        if label is not None:
            self.label = label

    def rename(self, label: str) -> None:
        """Give the present weights another version."""
        self.label = label
        if self.engine.version is not None:
            self.engine.version = self._number(label)

    def _number(self, label: str) -> int:
        """The version of the engine: the label where it is a number."""
        numeric = label.isascii() and label.isdecimal() and len(label) < 18
        return int(label) if numeric else (self.engine.version or 0)


def _aborted(request: Request, *, version: int) -> Generation:
    return Generation(
        id=request.id,
        tokens=np.array(request.tokens, dtype=np.int32),
        logprobs=np.zeros(0, dtype=np.float32),
        routes=None,
        finish_reason=ABORTED,
        policy_version=version,
    )


def _nothing() -> None:
    """Done once the engine's thread is idle."""
