"""Serving engines over HTTP: requests in, completions out, nothing lost and nothing silently short.

Every request is one prompt and one response. It goes to the live engine with the fewest requests under way;
what fails there (connection, time, status, an answer that does not fit the request) is retried on another,
with back-off, until it succeeds or `retries` are used up; then it is abandoned and counted. A request that
every engine rejects with status 4xx is refused. An engine that fails twice in a row rests until it answers
`/health` again; it is reloaded only if it lost the present weights. A response that our own publication
aborted is asked again, which uses up no attempt.

Versions: a sample counts as old as the oldest weights that may have written a token of it: those at its
start, or what the engine reports where that is older. Before every batch of requests each engine is asked for
its version, so that one that was started again while idle gets the present weights first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from olmo_rl.config import RolloutsConfig
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.policy.sampling import StopTokens
from olmo_rl.rollouts.answers import Wanted, generation_of
from olmo_rl.rollouts.control import CONTROL_TIMEOUT_SECONDS, Control, Engine
from olmo_rl.rollouts.exchange import (
    AbortedRequest,
    Deadline,
    EngineFault,
    RejectedRequest,
    client_with,
)
from olmo_rl.rollouts.fleet import Fleet, reason_of
from olmo_rl.rollouts.occupancy import Occupancy
from olmo_rl.rollouts.requests import Counts, ask, attempt_body, backoff, common_body, model_card
from olmo_rl.rollouts.wire import Completion, RouteAxis
from olmo_rl.types import Refusal

T = TypeVar("T")

CPU = torch.device("cpu")
# How a caller waits for calls to engines: alone, or together with other ranks, which then return early.
Wait = Callable[[Future[Any]], object]
PROBE_SECONDS = 120.0  # of all questions of one comparison to one engine: ranks wait for it


class RemoteEngine:
    """The engines of `rollouts.urls` behind the calls of `LocalEngine`. A thread runs the event loop, so that
    generation goes on while the caller trains. `axis` None: routes are not read; `vocab_size` None: any token
    id; `device`: where broadcast weights lie; `patience`: seconds that all control calls of one publication
    take.
    """

    def __init__(
        self,
        config: RolloutsConfig,
        *,
        axis: RouteAxis | None,
        vocab_size: int | None = None,
        device: torch.device = CPU,
        patience: float = CONTROL_TIMEOUT_SECONDS,
    ) -> None:
        self.counts = Counts()
        self._config = config
        self._wanted = Wanted(axis=axis, vocab_size=vocab_size)
        self._model: str | None = config.served_model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        self._client = self._call(self._open())
        self._slots = asyncio.Semaphore(config.concurrency)
        # Of requests that go on while others are awaited, such as those of a held-out evaluation.
        self._background_slots = asyncio.Semaphore(config.concurrency)
        self._control = Control(config, client=self._client, device=device)
        self._fleet = Fleet(config, control=self._control, patience=patience)

    @property
    def engines(self) -> list[Engine]:
        """Every engine of `rollouts.urls`, with its state."""
        return self._fleet.engines

    @property
    def version(self) -> int | None:
        """The version of the present weights."""
        return self._fleet.version

    async def _open(self) -> httpx.AsyncClient:
        return client_with(token=self._config.token)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` in the event loop of this client."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T], *, wait: Wait = Future.result) -> T:
        future = self.run(work)
        wait(future)
        return future.result()

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

    def hold(self, *, wait: Wait = Future.result) -> None:
        """Give no engine the present weights any more: newer ones are about to be published, by whichever
        process. Until they are, an answer may come from them, and counts as one of the older. Every rank
        calls this before rank 0 publishes.
        """
        self._call(self._fleet.hold(), wait=wait)

    def publish(self, path: str, version: int, *, wait: Wait = Future.result) -> None:
        """Pause -> update from `path` -> check -> resume every engine that answers. An engine that fails
        keeps its old version and gets no request until it has caught up. Where all fail they are tried again
        for `rollouts.wait_seconds`, unless none of them ever took weights; then refused.
        """
        self.hold(wait=wait)
        self._call(self._fleet.publish(path, version), wait=wait)

    def broadcast(
        self, buckets: Iterable[Mapping[str, Tensor]], version: int, *, wait: Wait = Future.result
    ) -> None:
        """The same without files: buckets of tensors by the engines' names, one after another. An engine that
        comes back later waits for the next publication.
        """
        self.hold(wait=wait)
        fleet = self._fleet
        ready = self._call(fleet.begin_broadcast(version), wait=wait)
        deadline = Deadline(fleet.patience)
        for number, bucket in enumerate(buckets):
            send = partial(self._control.send, bucket=bucket, version=version)
            sent = self._call(fleet.each(ready, send), wait=wait)
            if number == 0:  # one that was started again since the last broadcast has left its group
                begin = partial(self._control.begin_broadcast, deadline=deadline)
                lost = [engine for engine in ready if engine not in sent]
                again = self._call(fleet.each(lost, begin), wait=wait)
                sent += self._call(fleet.each(again, send), wait=wait)
            ready = sent
            if not ready:
                break  # nobody is left to read the rest for
        self._call(fleet.end_broadcast(ready, version, deadline=deadline), wait=wait)

    @property
    def versions(self) -> dict[str, int | None]:
        """The weight version of each engine, by address."""
        return {engine.url: engine.version for engine in self.engines}

    def adopt(self, path: str | None, version: int, *, versions: Mapping[str, int | None]) -> None:
        """Take over what another process published: files at `path`, or a broadcast."""
        self._call(self._fleet.adopt(path, version, versions=versions))

    def generate(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int,
        stop_token: StopTokens = None,
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
        stop_token: StopTokens,
        temperature: float,
        top_p: float,
        seed: int,
        counts: Counts | None = None,
    ) -> Future[list[Generation | None]]:
        """The same, going on while the caller does something else; counted in `counts` where it is given."""
        body = self._body(max_new_tokens, stop_token=stop_token, temperature=temperature, top_p=top_p)
        counts = self.counts if counts is None else counts
        counts.asked += len(requests)
        work = self._all(requests, body=body, seed=seed, counts=counts)
        return self.run(work)

    async def answer(
        self,
        request: Request,
        *,
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        temperature: float,
        top_p: float,
        seed: int,
        counts: Counts,
        occupancy: Occupancy | None = None,
    ) -> Generation | None:
        """Continue one request, for callers in this client's loop; None where it was abandoned. Cancelling
        the call ends the request at its engine. With an `occupancy`, which notes it, the request goes on in
        the background: it takes no slot of those that somebody waits for.
        """
        body = self._body(max_new_tokens, stop_token=stop_tokens, temperature=temperature, top_p=top_p)
        counts.asked += 1
        sent = {**body, "model": await self._served_model()}
        slots = self._slots if occupancy is None else self._background_slots
        return await self._one(request, body=sent, seed=seed, counts=counts, slots=slots, occupancy=occupancy)

    async def compare_versions(self) -> None:
        """Take engines out of service that no longer have the weights that they were given."""
        await asyncio.gather(*(self._fleet.compare_version(engine) for engine in self.engines))

    def check_alive(self) -> None:
        """Raise RuntimeError where the thread behind all requests has ended: no future would ever be done."""
        if not self._thread.is_alive():
            raise RuntimeError("the thread that asks engines has ended")

    def probe(
        self, requests: Sequence[Request], *, max_new_tokens: int, seed: int
    ) -> Future[dict[str, list[Generation] | str]]:
        """The answers of every engine with the present weights, by address; the reason where one gives none.
        Each is asked once, at the temperature of the run, and nothing is counted.
        """
        body = self._body(max_new_tokens, temperature=self._config.temperature)
        return self.run(self._probe(requests, body=body, seed=seed))

    async def _probe(
        self, requests: Sequence[Request], *, body: Mapping[str, Any], seed: int
    ) -> dict[str, list[Generation] | str]:
        body = {**body, "model": await self._served_model()}
        engines = [engine for engine in self.engines if self._fleet.is_ready(engine)]

        async def ask(engine: Engine) -> list[Generation] | str:
            version, given = engine.version, []
            deadline = Deadline(PROBE_SECONDS)
            try:
                for request in requests:
                    sent = attempt_body(body, request, version, seed=seed)
                    seconds = deadline.left(at_most=self._config.timeout_seconds)
                    completion = await self._ask(engine, sent, request=request, seconds=seconds)
                    self._fleet.check_version(engine, completion, at_start=version)
                    given.append(
                        generation_of(completion, request=request, version=version, wanted=self._wanted)
                    )
                await self._fleet.compare_version(engine)  # answers need not name one
                return reason_of(engine) if engine.resting else given
            except EngineFault as fault:
                if not engine.resting:
                    self._fleet.failed(engine, fault)
                return str(fault)

        found = await asyncio.gather(*(ask(engine) for engine in engines))
        return {engine.url: given for engine, given in zip(engines, found, strict=True)}

    def _body(
        self,
        max_new_tokens: int,
        *,
        stop_token: StopTokens = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> dict[str, Any]:
        return common_body(
            self._config.source,
            max_new_tokens=max_new_tokens,
            stop_token=stop_token,
            temperature=temperature,
            top_p=top_p,
            routes=self._wanted.axis is not None,
        )

    async def _ask(
        self,
        engine: Engine,
        body: Mapping[str, Any],
        *,
        request: Request,
        seconds: float | None = None,
    ) -> Completion:
        return await ask(
            self._client,
            engine.url,
            body,
            request=request,
            wanted=self._wanted,
            seconds=self._config.timeout_seconds if seconds is None else seconds,
        )

    async def _all(
        self, requests: Sequence[Request], *, body: Mapping[str, Any], seed: int, counts: Counts
    ) -> list[Generation | None]:
        body = await self._prepared(body)
        one = partial(self._one, body=body, seed=seed, counts=counts, slots=self._slots)
        tasks = [asyncio.create_task(one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _prepared(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a batch of requests, once each engine was asked for its version."""
        await self.compare_versions()
        return {**body, "model": await self._served_model()}

    async def _served_model(self) -> str:
        """The first model that a ready engine names, asked once."""
        if self._model is not None:
            return self._model
        for attempt in range((self._config.retries + 1) * len(self.engines)):
            engine = await self._fleet.pick()
            try:
                card = await model_card(self._client, engine.url, seconds=self._config.timeout_seconds)
            except EngineFault as fault:
                self._fleet.failed(engine, fault)
                await asyncio.sleep(backoff(attempt))
            else:
                self._model = card.name
                return card.name
        raise Refusal("rollouts.urls: no engine names a model at /v1/models: set rollouts.served_model")

    async def _one(
        self,
        request: Request,
        *,
        body: Mapping[str, Any],
        seed: int,
        counts: Counts,
        slots: asyncio.Semaphore,
        occupancy: Occupancy | None = None,
    ) -> Generation | None:
        """One request until it is answered or abandoned."""
        attempt, draws = 0, 0
        rejecting: set[str] = set()
        fault: EngineFault | None = None
        async with slots:
            while attempt <= self._config.retries:
                engine = await self._fleet.pick()
                version, publications = engine.version, self._fleet.publications
                sent = attempt_body(body, request, version, seed=seed, draw=draws)
                draws += 1
                engine.under_way += 1
                began, answered = None if occupancy is None else occupancy.begin(engine.url), False
                try:
                    completion = await self._ask(engine, sent, request=request)
                    self._fleet.check_version(engine, completion, at_start=version)
                except EngineFault as caught:
                    fault = caught
                else:
                    engine.failures, answered = 0, True
                    counts.received += 1
                    return generation_of(completion, request=request, version=version, wanted=self._wanted)
                finally:
                    engine.under_way -= 1
                    if occupancy is not None and began is not None:
                        occupancy.end(engine.url, began, answered=answered)
                if isinstance(fault, AbortedRequest) and self._fleet.aborts_since(publications):
                    counts.retried += 1
                    continue
                if not engine.resting or isinstance(fault, RejectedRequest):
                    self._fleet.failed(engine, fault)
                if isinstance(fault, RejectedRequest):
                    rejecting.add(engine.url)
                if attempt < self._config.retries:
                    counts.retried += 1
                    await asyncio.sleep(backoff(attempt))
                attempt += 1
        if len(rejecting) == len(self.engines):
            raise Refusal(f"{engine.url} refused request {request.id}: {fault}")
        counts.abandoned += 1
        return None
