"""A proxy between trainer and engine: it counts what passes, and delays or changes what it is asked to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiohttp import web

COMPLETIONS = "/v1/completions"
Passing = Callable[[dict[str, Any]], Awaitable[None]]
Change = Callable[[bytes], bytes]


@dataclass(kw_only=True, slots=True, eq=False)
class Proxy:
    """In front of the server at `upstream`. `before` awaits ahead of a completion; `change` makes its answer
    another. `calls` by path and query, `statuses` of completions, `reasons` of their choices, `left`: clients
    that did not wait; `under_way` completions.
    """

    upstream: str
    before: Passing | None = None
    change: Change | None = None
    calls: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    left: int = 0
    under_way: int = 0
    _client: httpx.AsyncClient | None = None

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        app.on_startup.append(self._open)
        app.on_cleanup.append(self._close)
        return app

    async def _open(self, app: web.Application) -> None:
        del app
        self._client = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits())

    async def _close(self, app: web.Application) -> None:
        del app
        assert self._client is not None
        await self._client.aclose()

    async def _pass(self, request: web.Request) -> web.Response:
        self.calls[request.path_qs] += 1
        completion = request.path == COMPLETIONS
        self.under_way += completion
        try:
            return await self._answer(request, completion=completion)
        except asyncio.CancelledError:
            self.left += completion
            raise
        finally:
            self.under_way -= completion

    async def _answer(self, request: web.Request, *, completion: bool) -> web.Response:
        assert self._client is not None
        if completion and self.before is not None:
            await self.before(await request.json())
        try:
            answer = await self._client.request(
                request.method,
                self.upstream + request.path_qs,
                content=await request.read(),
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            )
        except httpx.HTTPError:
            assert request.transport is not None
            request.transport.abort()  # as if the engine had been asked itself
            return web.Response(status=502)  # which nobody receives
        body = answer.content
        if completion:
            self.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                self.reasons.update(choice["finish_reason"] for choice in answer.json()["choices"])
                body = body if self.change is None else self.change(body)
        return web.Response(body=body, status=answer.status_code, content_type="application/json")
