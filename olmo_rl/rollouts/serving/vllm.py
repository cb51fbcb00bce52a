"""The routes and fields of vLLM 0.32.0, started with VLLM_SERVER_DEV_MODE=1 and --enable-return-routed-
experts.

Not imitated: streams, chat, the transfer of weights by NCCL.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from aiohttp import web

from olmo_rl.rollouts.serving.bodies import json_object, word
from olmo_rl.rollouts.serving.server import MODEL_NAME, Answered, EngineServer
from olmo_rl.types import Refusal

VERSION = "0.32.0"
_RELOAD = {"weights_iterator", "weights_path", "is_checkpoint_format"}


class VllmApi:
    """vLLM's words for one server."""

    whole_vocabulary = 0

    def routes(self, server: EngineServer) -> list[web.RouteDef]:
        calls = _Calls(server)
        return [
            web.get("/version", calls.version),
            web.get("/v1/models", calls.models),
            web.post("/pause", calls.pause),
            web.post("/resume", calls.resume),
            web.post("/reset_prefix_cache", calls.flush),
            web.post("/collective_rpc", calls.collective_rpc),
            web.post("/update_weight_version", calls.rename),
            web.get("/weight_info", calls.weight_info),
        ]

    def completion(self, answered: Answered) -> dict[str, Any]:
        choices = answered.choices()
        for choice, generation in zip(choices, answered.generations, strict=True):
            routes = answered.all_layers(generation)
            narrow = np.uint8 if answered.axis and answered.axis.layout.num_experts <= 256 else np.uint16
            choice |= {
                "stop_reason": None,
                "prompt_logprobs": None,
                "routed_experts": None if routes is None else _npy(routes.astype(narrow)),
            }
            choice.setdefault("token_ids", None)
            choice.setdefault("prompt_token_ids", None)
        empty = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
        return answered.head() | {"choices": choices} | dict.fromkeys(empty)

    def error(self, message: str, *, status: int) -> dict[str, Any]:
        kind = "BadRequestError" if status == 400 else "InternalServerError"
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class _Calls:
    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def version(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"version": VERSION})

    async def models(self, request: web.Request) -> web.Response:
        del request
        card = {
            "id": MODEL_NAME,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": MODEL_NAME,
            "parent": None,
            "max_model_len": self._server.engine.max_seq_len,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise Refusal(f"mode: {mode[:40]!r} is not abort, wait or keep")
        await self._server.pause(abort=mode == "abort")
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        del request
        self._server.resume()
        return web.json_response({"status": "resumed"})

    async def flush(self, request: web.Request) -> web.Response:
        """Blocks are held by requests under way, frozen ones too."""
        del request
        return web.json_response({"success": not self._server.under_way})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        method, given = word(body, "method"), body.get("kwargs", {})
        if method != "reload_weights" or not isinstance(given, dict) or set(given) - _RELOAD:
            strange = sorted(set(given) - _RELOAD)[:3] if isinstance(given, dict) else type(given).__name__
            return self._server.refuse(
                f"{method[:40]}: no such method, or no such keyword: {strange}", status=500
            )
        path = given.get("weights_path")
        if not isinstance(path, str):
            return self._server.refuse("weights_path: no path", status=500)
        try:
            await self._server.take_weights(path, label=None)
        except (Refusal, OSError, ValueError) as error:
            return self._server.refuse(str(error), status=500)
        return web.json_response({"results": [None]})

    async def rename(self, request: web.Request) -> web.Response:
        version = word(await json_object(request), "new_version")
        self._server.rename(version)
        return web.json_response({"success": True, "new_version": version})

    async def weight_info(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"weight_version": self._server.label})


def _npy(routes: Any) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()
