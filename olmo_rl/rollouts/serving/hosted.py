"""The engine of this process behind its own HTTP API, in a thread: for callers that speak to engines over
HTTP alone. It listens on 127.0.0.1, for whoever has its token.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Mapping

from aiohttp import web
from torch import Tensor

from olmo_rl.config import ModelConfig
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.hf.writing import engine_pieces
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.policy.weights import parameter_shapes
from olmo_rl.rollouts.collective import Arrivals
from olmo_rl.rollouts.serving.server import EngineServer
from olmo_rl.rollouts.serving.vllm import VllmApi
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.types import Refusal


def _no_files(path: str) -> Mapping[str, Tensor]:
    raise Refusal(f"{path}: this engine takes weights from its own process alone")


class HostedEngine:
    """`url`: where it listens, with the API of vLLM; `token`: what requests need."""

    def __init__(self, engine: LocalEngine, *, model: ModelConfig, tokenizer: Tokenizer, token: str) -> None:
        layout = model.expert_layout
        self._server = EngineServer(
            engine=engine,
            api=VllmApi(),
            tokenizer=tokenizer,
            load=_no_files,
            arrivals=Arrivals(engine_pieces(model), shapes=parameter_shapes(model)),
            axis=None if layout is None else RouteAxis(layout=layout, num_layers=len(model.layer_types)),
            token=token,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hosted engine", daemon=True)
        self._thread.start()
        self._runner = web.AppRunner(
            self._server.application(), handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Serve these weights from now on; a running batch ends first."""
        work = self._server.publish(lambda: weights, label=str(version))
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Listen no more; requests under way are cut off."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def new_token() -> str:
    """A token that nobody else knows."""
    return secrets.token_urlsafe(24)
