"""The routes and fields of SGLang 0.5.23, started with --enable-return-routed-experts.

Routes stand beside the choices and belong to the first; log-probs, ids and versions as its classes have them.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from aiohttp import web

from olmo_rl.rollouts.serving.bodies import flag, json_object, word
from olmo_rl.rollouts.serving.server import MODEL_NAME, Answered, EngineServer
from olmo_rl.types import Refusal

VERSION = "0.5.23"


class SglangApi:
    """SGLang's words for one server."""

    whole_vocabulary = -1

    def routes(self, server: EngineServer) -> list[web.RouteDef]:
        calls = _Calls(server)
        return [
            web.get("/server_info", calls.server_info),
            web.get("/model_info", calls.model_info),
            web.get("/v1/models", calls.models),
            web.post("/pause_generation", calls.pause),
            web.post("/continue_generation", calls.resume),
            web.post("/flush_cache", calls.flush),
            web.post("/update_weights_from_disk", calls.update),
            web.post("/init_weights_update_group", calls.join),
            web.post("/update_weights_from_distributed", calls.receive),
            web.post("/destroy_weights_update_group", calls.leave),
        ]

    def completion(self, answered: Answered) -> dict[str, Any]:
        choices = answered.choices()
        for choice in choices:
            choice["matched_stop"] = None
        metadata: dict[str, Any] = {"weight_version": answered.label}
        body = answered.head() | {"choices": choices, "metadata": metadata}
        first = answered.generations[0]
        metadata["weight_versions"] = [{"version": answered.label, "start": 0, "end": len(first.logprobs)}]
        routes = answered.all_layers(first) if answered.asked.routes else None
        if routes is not None:
            body["sglext"] = {"routed_experts": base64.b64encode(routes.astype("<i4").tobytes()).decode()}
        return body

    def error(self, message: str, *, status: int) -> dict[str, Any]:
        kind = "BadRequestError" if status == 400 else "InternalServerError"
        return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


class _Calls:
    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def server_info(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"version": VERSION, "model_path": MODEL_NAME, "internal_states": []})

    async def model_info(self, request: web.Request) -> web.Response:
        del request
        return web.json_response(
            {"model_path": MODEL_NAME, "is_generation": True, "weight_version": self._server.label}
        )

    async def models(self, request: web.Request) -> web.Response:
        del request
        card = {
            "id": MODEL_NAME,
            "object": "model",
            "created": 0,
            "owned_by": "sglang",
            "root": MODEL_NAME,
            "parent": None,
            "max_model_len": self._server.engine.max_seq_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def pause(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        mode = word(body, "mode") if "mode" in body else "abort"
        if mode not in ("abort", "retract", "in_place"):
            raise Refusal(f"mode: {mode[:40]!r} is not abort, retract or in_place")
        await self._server.pause(abort=mode == "abort")
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await json_object(request)
        self._server.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: web.Request) -> web.Response:
        """Refused while requests are under way, frozen ones too."""
        del request
        idle = not self._server.under_way
        return web.Response(
            text="Cache flushed." if idle else "Flush cache failed.", status=200 if idle else 400
        )

    async def update(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        path, label = word(body, "model_path"), word(body, "weight_version") if _has(body) else None
        # Its scheduler asserts that the flush succeeds, and ends where it does not.
        if flag(body, "flush_cache", default=True) and self._server.under_way:
            return _outcome("Cache flush failed after updating weights")
        try:
            await self._server.take_weights(path, label=label)
        except (Refusal, OSError, ValueError) as error:
            return _outcome(str(error))
        return _outcome()

    async def join(self, request: web.Request) -> web.Response:
        """Both sides of a broadcast wait for each other, so neither call may wait for generation."""
        await asyncio.to_thread(self._server.arrivals.open, await json_object(request))
        return _outcome()

    async def leave(self, request: web.Request) -> web.Response:
        await json_object(request)
        self._server.arrivals.close()
        return _outcome()

    async def receive(self, request: web.Request) -> web.Response:
        """The weights take effect with the last of them."""
        body = await json_object(request)
        label = word(body, "weight_version") if _has(body) else None
        weights = await asyncio.to_thread(self._server.arrivals.take, body)
        if weights is not None:
            await self._server.publish(lambda: weights, label=label)
        return _outcome()


def _has(body: dict[str, Any]) -> bool:
    return body.get("weight_version") is not None


def _outcome(message: str | None = None) -> web.Response:
    """Success, or the reason why not."""
    printable = (message or "").encode("utf-8", "replace").decode()
    body = {"success": message is None, "message": printable}
    return web.json_response(body, status=200 if message is None else 400)
