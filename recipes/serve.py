"""The local engine as a server: the HTTP API of serving engines, on a laptop. For trying the loop, and tests.

It holds the weights of `init_from`, or waits for a trainer to publish some. Ctrl-C or SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from aiohttp import web
from torch import Tensor

from olmo_rl.config import Config, EngineApi
from olmo_rl.data.tokenizers import fitting_tokenizer
from olmo_rl.hf.writing import engine_pieces
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.policy.weights import parameter_shapes, read_weights
from olmo_rl.rollouts.collective import Arrivals
from olmo_rl.rollouts.serving.server import EngineServer
from olmo_rl.rollouts.serving.sglang import SglangApi
from olmo_rl.rollouts.serving.vllm import VllmApi
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.types import Refusal

ANSWER_SECONDS = 0.5  # for the requests that a dead loop leaves, before the process ends


def _leave() -> None:
    raise web.GracefulExit


def _leave_soon() -> None:
    asyncio.get_running_loop().call_later(ANSWER_SECONDS, _leave)


def read_below(path: str, *, roots: Sequence[str]) -> dict[str, Tensor]:
    """Read the weights that a request names. Raises Refusal for a path outside of `roots`, with the same
    words whether it exists or not; links are followed first.
    """
    real = Path(path).resolve()
    if not any(real.is_relative_to(Path(root).resolve()) for root in roots):
        raise Refusal("the path of the weights: not below a directory of serve.weights_from")
    return read_weights(str(real))


def run(config: Config) -> None:
    """Listen until a signal."""
    device = torch.device("cpu" if config.trainer.accelerator == "cpu" else "cuda")
    engine = LocalEngine(config.model, device=device)
    if config.init_from is not None:
        engine.publish(read_weights(config.init_from), 0)
    layout = config.model.expert_layout
    server = EngineServer(
        engine=engine,
        api=VllmApi() if config.serve.api is EngineApi.vllm else SglangApi(),
        tokenizer=fitting_tokenizer(config.model),
        load=partial(read_below, roots=config.serve.weights_from),
        arrivals=Arrivals(engine_pieces(config.model), shapes=parameter_shapes(config.model)),
        axis=None if layout is None else RouteAxis(layout=layout, num_layers=len(config.model.layer_types)),
        token=config.serve.token,
        on_failure=_leave_soon,
    )
    host, port = config.serve.host, config.serve.port

    def announce(text: str) -> None:
        """aiohttp prints its address once it listens."""
        if "http://" in text:
            print(text.splitlines()[0].strip("= "), flush=True)

    try:
        web.run_app(
            server.application(),
            host=host,
            port=port,
            print=announce,
            access_log=None,
            handler_cancellation=True,  # what a client that left had asked for is dropped
        )
    except OSError as error:
        raise Refusal(f"serve.host={host} serve.port={port}: cannot listen there ({error})") from error
    if server.failure is not None:
        raise RuntimeError("the loop that generates ended") from server.failure
