"""Servers for tests: the real one around a tiny engine, and stand-ins that misbehave in one way each.

Every server listens on a real socket of its own, in a thread of this process.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from aiohttp import web
from bounds import BOUND_SECONDS
from model_cases import context_of
from torch import Tensor

from olmo_rl.config import LayerType, ModelConfig, RolloutsConfig, Source
from olmo_rl.data.packs import RouteMode, RouteTrace
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.hf.writing import engine_pieces
from olmo_rl.policy.engine import Generation, LocalEngine
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import parameter_shapes
from olmo_rl.rollouts.collective import Arrivals
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.serving.server import EngineServer
from olmo_rl.rollouts.serving.sglang import SglangApi
from olmo_rl.rollouts.serving.vllm import VllmApi
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
# The same as keys of a command.
MODEL_KEYS = (
    "model=dense_tiny",
    "model.layer_types=[full_attention,full_attention,full_attention]",
    *(
        f"model.{name}={json.dumps(getattr(MODEL, name))}"
        for name in (
            "dim",
            "dense_layers",
            "dense_hidden",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_experts",
            "top_k",
            "expert_hidden",
            "max_seq_len",
        )
    ),
)
assert MODEL.expert_layout is not None
AXIS = RouteAxis(layout=MODEL.expert_layout, num_layers=3)


def weights_of(seed: int) -> dict[str, Tensor]:
    decoder = HybridDecoder(MODEL, attention="torch")
    decoder.init_weights(seed)
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


def score(
    decoder: HybridDecoder, generations: Sequence[Generation], *, replay: bool, temperature: float = 1.0
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Log-probs of the generated tokens by the packed forward over the temperature, and the routes it
    took.
    """
    tokens = torch.from_numpy(np.concatenate([g.tokens for g in generations])).long()
    trace = RouteTrace()
    routes = None
    if replay:
        rows = [np.concatenate([g.routes, g.routes[-1:]]) for g in generations]  # any tail: it scores nothing
        stacked = torch.from_numpy(np.concatenate(rows)).long()
        routes = {layer: stacked[:, i] for i, layer in enumerate(decoder.config.routed_layers)}
    context = context_of(
        [len(g.tokens) for g in generations],
        mode=RouteMode.replay if replay else RouteMode.record,
        routes=routes,
        trace=trace,
    )
    with torch.no_grad():
        logits = decoder(tokens, context).logits
    scored = []
    for g, start in zip(generations, context.boundaries, strict=False):
        first = len(g.tokens) - len(g.logprobs)
        rows = torch.log_softmax(logits[start + first - 1 : start + len(g.tokens) - 1] / temperature, -1)
        scored.append(rows.gather(1, torch.from_numpy(g.tokens[first:]).long()[:, None])[:, 0])
    return scored, trace.ids


def local_engine(*, seed: int | None = None, version: int = 0) -> LocalEngine:
    engine = LocalEngine(MODEL, device=torch.device("cpu"))
    if seed is not None:
        engine.publish(weights_of(seed), version)
    return engine


def server_of(
    engine: LocalEngine,
    *,
    shelf: Mapping[str, Mapping[str, Tensor]] | None = None,
    api: Source = Source.vllm,
    token: str | None = None,
) -> EngineServer:
    """The real server; `shelf`: weights by the path that a publication names."""

    def load(path: str) -> Mapping[str, Tensor]:
        if shelf is None or path not in shelf:
            raise FileNotFoundError(f"{path}: no such weights")
        return shelf[path]

    return EngineServer(
        engine=engine,
        api=VllmApi() if api is Source.vllm else SglangApi(),
        tokenizer=ByteTokenizer(),
        load=load,
        arrivals=Arrivals(engine_pieces(MODEL), shapes=parameter_shapes(MODEL)),
        axis=AXIS,
        token=token,
    )


@contextmanager
def listening(application: web.Application, *, port: int = 0) -> Iterator[str]:
    """The address of an application while the block runs."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    address: list[str] = []
    # Requests under way are cut off at the end, those of clients that left at once, as in recipe=serve.
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)

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


@dataclass(kw_only=True, slots=True, eq=False)
class StandIn:
    """A server whose completions are what `reply` makes of the request: a body, or (status, body). Control
    calls
    accept what the real program accepts. `label`: its weight version; `calls`: every POST with its body;
    `flushes`: whether caches can be reset; `reads_weights`: whether updates succeed.
    """

    reply: Reply
    calls: list[tuple[str, Any]] = field(default_factory=list)
    api: Source = Source.vllm
    program: str | None = None
    label: str = "default"
    health: int = 200
    flushes: bool = True
    reads_weights: bool = True

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        return app

    @property
    def loads(self) -> list[str]:
        """The paths that it was asked to load, in order."""
        vllm = [body["kwargs"]["weights_path"] for path, body in self.calls if path == "/collective_rpc"]
        sglang = [body["model_path"] for path, body in self.calls if path == "/update_weights_from_disk"]
        return vllm + sglang

    async def _get(self, request: web.Request) -> web.Response:
        sglang = self.api is Source.sglang
        program = self.program or ("0.5.23" if sglang else "0.32.0")
        answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "policy"}]},
            "/server_info" if sglang else "/version": {"version": program},
            "/model_info" if sglang else "/weight_info": {"weight_version": self.label},
        }
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path not in answers:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(answers[request.path])

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json() if request.body_exists else None
        if request.path != "/v1/completions":
            self.calls.append((request.path_qs, body))
            return self._control(request, body)
        answer = self.reply(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, web.Response):
            return answer
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        if isinstance(answer, bytes | str):
            return web.Response(body=answer, status=status)
        return web.json_response(answer, status=status)

    def _control(self, request: web.Request, body: Any) -> web.Response:
        failed = web.json_response({"success": False, "message": "out of memory"}, status=400)
        if self.api is Source.sglang:
            if request.path == "/update_weights_from_disk" and isinstance(body["weight_version"], str):
                if not self.reads_weights:
                    return failed
                self.label = body["weight_version"]
                return web.json_response({"success": True, "message": "", "num_paused_requests": 0})
            if request.path == "/flush_cache":
                return web.Response(text="flushed", status=200 if self.flushes else 400)
            known = {"/pause_generation": {"abort", "retract", "in_place"}, "/continue_generation": {None}}
            good = isinstance(body, dict) and body.get("mode") in known.get(request.path, ())
            return web.json_response({"status": "ok"}, status=200 if good else 404)
        if request.path == "/collective_rpc":
            kwargs = set(body["kwargs"]) - {"weights_iterator", "weights_path", "is_checkpoint_format"}
            return web.json_response(
                {"results": [None]}, status=500 if kwargs or not self.reads_weights else 200
            )
        if request.path == "/update_weight_version":
            good = isinstance(body.get("new_version"), str)
            self.label = body["new_version"] if good else self.label
            return web.json_response({"success": good}, status=200 if good else 400)
        if request.path == "/reset_prefix_cache":
            return web.json_response({"success": self.flushes})
        transfer = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights")
        if request.path in transfer:
            return web.json_response({"message": "done"})
        if request.path == "/finish_weight_update":
            self.label = body["weight_version"]
            return web.json_response({"message": "done"})
        good = request.path == "/resume" or request.query.get("mode") in ("keep", "wait", "abort")
        return web.json_response({"status": "ok"}, status=200 if good else 404)


def stand_in(reply: Reply, *, calls: list[tuple[str, Any]] | None = None, **settings: Any) -> web.Application:
    """The application of a StandIn."""
    return StandIn(reply=reply, calls=[] if calls is None else calls, **settings).application()


@contextmanager
def client_of(
    *urls: str, source: Source = Source.vllm, axis: RouteAxis | None = AXIS, **settings: Any
) -> Iterator[RemoteEngine]:
    """A client of these servers."""
    config = RolloutsConfig(source=source, urls=list(urls), **{"timeout_seconds": BOUND_SECONDS, **settings})
    remote = RemoteEngine(config, axis=axis, vocab_size=MODEL.vocab_size)
    try:
        yield remote
    finally:
        remote.close()
