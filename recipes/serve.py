"""The local engine as a server: the HTTP API of serving engines, on a laptop. For trying the loop, and tests.

It holds the weights of `init_from`, or waits for a trainer to publish some. Ctrl-C or SIGTERM ends it.
"""

from __future__ import annotations

import torch
from aiohttp import web

from olmo_rl.config import Config
from olmo_rl.data.tokenizers import fitting_tokenizer
from olmo_rl.hf.export import engine_pieces
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.policy.weights import parameter_shapes, read_weights
from olmo_rl.rollouts.collective import Arrivals
from olmo_rl.rollouts.server import EngineServer
from olmo_rl.types import Refusal


def run(config: Config) -> None:
    """Listen until told to stop."""
    device = torch.device("cpu" if config.trainer.accelerator == "cpu" else "cuda")
    engine = LocalEngine(config.model, device=device)
    if config.init_from is not None:
        engine.publish(read_weights(config.init_from), 0)
    server = EngineServer(
        engine,
        tokenizer=fitting_tokenizer(config.model),
        load=read_weights,
        arrivals=Arrivals(engine_pieces(config.model), shapes=parameter_shapes(config.model)),
    )
    host, port = config.serve.host, config.serve.port

    def announce(text: str) -> None:
        """aiohttp says where it listens once it does."""
        if "http://" in text:
            print(text.splitlines()[0].strip("= "), flush=True)

    try:
        web.run_app(server.application(), host=host, port=port, print=announce, access_log=None)
    except OSError as error:
        raise Refusal(f"serve.host={host} serve.port={port}: cannot listen there ({error})") from error
