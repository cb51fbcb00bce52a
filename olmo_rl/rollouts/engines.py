"""Serving engines over HTTP: requests in, completions out, nothing lost and nothing silently short.

Every request is one prompt and one response. It goes to the live engine with the fewest requests under way;
what fails there (connection, time, status 5xx, an answer that does not fit the request) is tried on another,
with back-off, until it succeeds or `retries` are used up; then it is abandoned and counted. An engine that
fails twice in a row is left alone until it answers `/health` again, and gets the present weights before it
gets requests. Status 4xx is our fault and a refusal: it would be the same elsewhere.

Versions: a sample counts as old as the oldest weights that may have written a token of it: those at its
start, or what the engine reports where that is older.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from olmo_rl.config import PublicationKind, RolloutsConfig, Source
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.answers import EngineFault, fitting_answer, generation_of
from olmo_rl.rollouts.control import CONTROL_TIMEOUT_SECONDS, Control, Engine
from olmo_rl.rollouts.wire import Completion, RouteAxis
from olmo_rl.types import Refusal

T = TypeVar("T")

CPU = torch.device("cpu")
FAILURES_BEFORE_REST = 2
REST_SECONDS = 1.0
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


class RemoteEngine:
    """The engines of `rollouts.urls` behind the calls of `LocalEngine`. A thread runs the event loop, so that
    generation goes on while the caller trains. `device`: where broadcast weights lie; `patience`: seconds
    that one control call may take.
    """

    def __init__(
        self,
        config: RolloutsConfig,
        *,
        axis: RouteAxis | None,
        device: torch.device = CPU,
        patience: float = CONTROL_TIMEOUT_SECONDS,
    ) -> None:
        self.version: int | None = None
        self.counts = Counts()
        self.engines = [Engine(url=url.rstrip("/")) for url in config.urls]
        self._config = config
        self._axis = axis
        self._published: str | None = None
        self._held = False
        self._model: str | None = config.served_model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        self._client = self._call(self._open())
        self._slots = asyncio.Semaphore(config.concurrency)
        self._control = Control(config, client=self._client, device=device, patience=patience)

    async def _open(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(timeout=self._config.timeout_seconds, limits=limits, trust_env=False)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Let go of requests, connections and thread."""
        self._call(self._end())
        self._control.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    def hold(self) -> None:
        """Give no engine the present weights any more: newer ones are about to be published, by whichever
        process. Until they are, an answer may come from them, and counts as one of the older.
        """
        self._call(self._hold())

    async def _hold(self) -> None:
        self._held = True
        for engine in self.engines:
            async with engine.control:
                pass  # what was under way has ended

    def publish(self, path: str, version: int) -> None:
        """Pause -> update from `path` -> flush -> resume every engine that answers. An engine that fails
        keeps its old version and gets no request until it has caught up. Refused where none is left.
        """
        self._published = path
        self.version = version
        self._call(self._each(self.engines, self._bring_up_to_date))
        self._held = False
        self._refuse_without_engines()

    def broadcast(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """The same without files: buckets of tensors by the engines' names, one after another. An engine that
        comes back later waits for the next publication.
        """
        self._published = None
        self.version = version
        ready = self._call(self._each(self.engines, self._control.begin_broadcast))
        for number, bucket in enumerate(buckets):
            send = partial(self._control.send, bucket=bucket, version=version)
            sent = self._call(self._each(ready, send))
            if number == 0:  # one that was started again since the last broadcast has left its group
                lost = [engine for engine in ready if engine not in sent]
                again = self._call(self._each(lost, self._control.begin_broadcast))
                sent += self._call(self._each(again, send))
            ready = sent
            if not ready:
                break  # nobody is left to read the rest for
        self._call(self._each(ready, partial(self._control.end_broadcast, version=version)))
        self._held = False
        self._refuse_without_engines()

    @property
    def versions(self) -> dict[str, int | None]:
        """What each engine holds, by address."""
        return {engine.url: engine.version for engine in self.engines}

    def adopt(self, path: str | None, version: int, *, versions: Mapping[str, int | None]) -> None:
        """Take over what another process published: files at `path`, or a broadcast."""
        self._published = path
        self.version = version
        self._call(self._adopt(versions))
        self._held = False

    async def _adopt(self, versions: Mapping[str, int | None]) -> None:
        for engine in self.engines:
            engine.version = versions[engine.url]
            if engine.version != self.version:
                self._failed(engine, EngineFault("took no weights"), rest=True)

    async def _each(
        self, engines: Iterable[Engine], work: Callable[[Engine], Awaitable[None]]
    ) -> list[Engine]:
        """Control calls to all engines at once; those that did not fail. The others keep what they hold."""

        async def attempt(engine: Engine) -> Engine | None:
            async with engine.control:
                try:
                    await work(engine)
                except EngineFault as fault:
                    self._control.drop(engine)
                    self._failed(engine, fault, rest=True)
                    return None
            return engine

        found = await asyncio.gather(*(attempt(engine) for engine in engines))
        return [engine for engine in found if engine is not None]

    def _refuse_without_engines(self) -> None:
        if not any(engine.version == self.version for engine in self.engines):
            raise Refusal(
                [f"{engine.url}: took no weights: {_worst(engine)}" for engine in self.engines]
                + ["rollouts.urls: no engine could be updated: are they up, and do they see the same files?"]
            )

    async def _bring_up_to_date(self, engine: Engine) -> None:
        """Alone with this engine's control calls, and with what is published by then."""
        path, version = self._published, self.version
        assert path is not None, "publish comes first"
        assert version is not None, "publish comes first"
        await self._control.reload(engine, path, version=version)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int,
        stop_token: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        greedy: bool = False,
        seed: int,
    ) -> list[Generation | None]:
        """Continue every request, results in their order; None for one that was abandoned."""
        return self.start(
            requests,
            max_new_tokens=max_new_tokens,
            stop_token=stop_token,
            temperature=0.0 if greedy else temperature,
            top_p=top_p,
            seed=seed,
        ).result()

    def start(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int,
        stop_token: int | None,
        temperature: float,
        top_p: float,
        seed: int,
        counts: Counts | None = None,
    ) -> Future[list[Generation | None]]:
        """The same, going on while the caller does something else; counted in `counts` where it is given."""
        body: dict[str, Any] = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "logprobs": 1,
            "return_token_ids": True,
            "n": 1,
        }
        if stop_token is not None:
            body["stop_token_ids"] = [stop_token]
        if self._axis is not None and self._config.source is Source.sglang:
            body["return_routed_experts"] = True
        counts = self.counts if counts is None else counts
        counts.asked += len(requests)
        work = self._all(requests, body=body, seed=seed, counts=counts)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _all(
        self, requests: Sequence[Request], *, body: Mapping[str, Any], seed: int, counts: Counts
    ) -> list[Generation | None]:
        if self._model is None:
            self._model = await self._served_model()
        body = {**body, "model": self._model}
        tasks = [
            asyncio.create_task(self._one(request, body=body, seed=seed, counts=counts))
            for request in requests
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _served_model(self) -> str:
        """The first model that an engine names."""
        for engine in self.engines:
            try:
                answer = await self._client.get(engine.url + "/v1/models")
                return str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
                self._failed(engine, EngineFault(f"/v1/models: {type(error).__name__}"))
        raise Refusal("rollouts.urls: no engine names a model at /v1/models: set rollouts.served_model")

    async def _one(
        self, request: Request, *, body: Mapping[str, Any], seed: int, counts: Counts
    ) -> Generation | None:
        """One request until it is answered or abandoned."""
        async with self._slots:
            for attempt in range(self._config.retries + 1):
                engine = await self._pick()
                version = engine.version
                # Another attempt draws other numbers: an engine that fails on a response may do so again.
                digest = hashlib.blake2b(f"{seed}/{request.id}/{attempt}".encode(), digest_size=4).digest()
                sent = {**body, "prompt": list(request.tokens), "seed": int.from_bytes(digest) >> 1}
                engine.under_way += 1
                try:
                    completion = await self._ask(engine, sent, request=request)
                    self._check_version(engine, completion, at_start=version)
                except EngineFault as fault:
                    self._failed(engine, fault)
                    if attempt < self._config.retries:
                        counts.retried += 1
                        await asyncio.sleep(_backoff(attempt))
                    continue
                finally:
                    engine.under_way -= 1
                engine.failures = 0
                counts.received += 1
                return generation_of(completion, request=request, version=version, axis=self._axis)
        counts.abandoned += 1
        return None

    async def _ask(self, engine: Engine, body: dict[str, Any], *, request: Request) -> Completion:
        """One attempt: an answer that fits the request, or an EngineFault."""
        try:
            answer = await self._client.post(engine.url + "/v1/completions", json=body)
        except (httpx.HTTPError, OSError) as error:
            raise EngineFault(f"{type(error).__name__} {error}".strip()) from None
        if 400 <= answer.status_code < 500 and answer.status_code not in (408, 429):
            raise Refusal(f"{engine.url} refused request {request.id}: {answer.text[:500]}")
        if answer.status_code != 200:
            raise EngineFault(f"status {answer.status_code}")
        try:
            body_found = answer.json()
        except (ValueError, RecursionError) as error:
            raise EngineFault(f"answer: {error}") from None
        return fitting_answer(body_found, request=request, max_tokens=body["max_tokens"], axis=self._axis)

    def _check_version(self, engine: Engine, completion: Completion, *, at_start: int | None) -> None:
        """An engine that says it holds other weights than were published was started again meanwhile."""
        reported = completion.policy_version
        if reported is None and self._config.publication is PublicationKind.directory:
            return
        if at_start is None:
            return
        newest = math.inf if self._held else engine.version or at_start
        if reported is not None and at_start <= reported <= newest:
            return
        fault = EngineFault(f"answer: weights of version {reported}, published were {at_start}")
        engine.version = None
        self._failed(engine, fault, rest=True)
        raise fault

    async def _pick(self) -> Engine:
        """The engine with the present weights and the fewest requests under way; waits while all rest."""
        deadline = self._loop.time() + self._config.timeout_seconds
        while True:
            ready = [e for e in self.engines if not e.resting and e.version == self.version]
            if ready:
                return min(ready, key=lambda engine: engine.under_way)
            if self._loop.time() > deadline:
                raise Refusal(
                    [f"{engine.url}: {_worst(engine)}" for engine in self.engines]
                    + [f"rollouts.urls: no engine answered for {self._config.timeout_seconds:g} seconds"]
                )
            await asyncio.sleep(0.1)

    def _failed(self, engine: Engine, fault: EngineFault, *, rest: bool = False) -> None:
        """Count; after repeated failures (or at once) let the engine rest and look after it."""
        engine.faults[str(fault)] += 1
        engine.failures += 1
        if (rest or engine.failures >= FAILURES_BEFORE_REST) and not engine.resting:
            engine.resting = True
            if not engine.control.locked():
                self._control.drop(engine)  # if it was started again, it is in no group
            self._loop.create_task(self._look_after(engine))

    async def _look_after(self, engine: Engine) -> None:
        """Wait until an engine is healthy, bring it up to date, let it work again."""
        while engine.resting:
            await asyncio.sleep(REST_SECONDS)
            if self._held or not await self._control.healthy(engine):
                continue
            # A server that came back holds whatever it was started with.
            if self._published is not None:
                await self._each([engine], self._unless_held)
            elif engine.version == self.version:
                engine.failures, engine.resting = 0, False
            # What was broadcast is gone: an engine without it rests until the next publication.

    async def _unless_held(self, engine: Engine) -> None:
        if not self._held:
            await self._bring_up_to_date(engine)


def _backoff(attempt: int) -> float:
    """Seconds, doubled with every attempt, spread so that retries do not arrive together."""
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**attempt) * random.uniform(0.5, 1.0)


def _worst(engine: Engine) -> str:
    """The most frequent fault of an engine."""
    return engine.faults.most_common(1)[0][0] if engine.faults else "no answer yet"
