"""Servers for tests: the real one around a tiny engine, and stand-ins that misbehave in one way each.

Every server listens on a real socket of its own, in a thread of this process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from aiohttp import web
from bounds import BOUND_SECONDS
from torch import Tensor

from olmo_rl.config import LayerType, ModelConfig, RolloutsConfig, Source
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.hf.export import engine_pieces
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import parameter_shapes
from olmo_rl.rollouts.collective import Arrivals
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.server import EngineServer
from olmo_rl.rollouts.wire import RouteAxis

MODEL = ModelConfig(
    dim=16,
    layer_types=[LayerType.full_attention] * 3,
    dense_layers=[0],
    dense_hidden=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    top_k=2,
    expert_hidden=16,
    max_seq_len=32,
)
assert MODEL.expert_layout is not None
AXIS = RouteAxis(layout=MODEL.expert_layout, num_layers=3)


def weights_of(seed: int) -> dict[str, Tensor]:
    decoder = HybridDecoder(MODEL, attention="torch")
    decoder.init_weights(seed)
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


def local_engine(*, seed: int | None = None, version: int = 0) -> LocalEngine:
    engine = LocalEngine(MODEL, device=torch.device("cpu"))
    if seed is not None:
        engine.publish(weights_of(seed), version)
    return engine


def server_of(
    engine: LocalEngine, *, shelf: Mapping[str, Mapping[str, Tensor]] | None = None
) -> EngineServer:
    """The real server; `shelf`: weights by the path that a publication names."""

    def load(path: str) -> Mapping[str, Tensor]:
        if shelf is None or path not in shelf:
            raise FileNotFoundError(f"{path}: no such weights")
        return shelf[path]

    arrivals = Arrivals(engine_pieces(MODEL), shapes=parameter_shapes(MODEL))
    return EngineServer(engine, tokenizer=ByteTokenizer(), load=load, arrivals=arrivals)


@contextmanager
def listening(application: web.Application, *, port: int = 0) -> Iterator[str]:
    """The address of an application while the block runs."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    address: list[str] = []
    runner = web.AppRunner(application, shutdown_timeout=0.1)  # what is under way is cut off

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(BOUND_SECONDS), "the server did not start"
    try:
        yield address[0]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(BOUND_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(BOUND_SECONDS)


Reply = Callable[[dict[str, Any]], Any]


def stand_in(reply: Reply, *, calls: list[tuple[str, Any]] | None = None) -> web.Application:
    """A server whose completions are what `reply` makes of the request: a body, or (status, body). Control
    calls succeed; `calls` notes every path with its body.
    """

    async def any_post(request: web.Request) -> web.Response:
        body = await request.json()
        if calls is not None:
            calls.append((request.path, body))
        if request.path != "/v1/completions":
            return web.json_response({"success": True})
        answer = reply(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        if isinstance(answer, str):
            return web.Response(text=answer, status=status)
        return web.json_response(answer, status=status)

    async def any_get(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy"}]})

    app = web.Application()
    app.router.add_post("/{path:.*}", any_post)
    app.router.add_get("/{path:.*}", any_get)
    return app


@contextmanager
def client_of(
    *urls: str, source: Source = Source.vllm, axis: RouteAxis | None = AXIS, **settings: Any
) -> Iterator[RemoteEngine]:
    """A client of these servers."""
    config = RolloutsConfig(source=source, urls=list(urls), **{"timeout_seconds": BOUND_SECONDS, **settings})
    remote = RemoteEngine(config, axis=axis)
    try:
        yield remote
    finally:
        remote.close()
