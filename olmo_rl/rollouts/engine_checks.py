"""What training will need of each engine of `rollouts.urls`, asked before a run: health, program, control
calls, weight version, context length, log-probs with token ids, routes, sampling from the whole distribution.

Nothing is changed: control calls are looked for by GET, which a path that exists answers with 405. Log-probs
are compared with the trainer's after each publication (training/engine_agreement.py), not here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

import httpx
import torch

from olmo_rl.checks import Finding
from olmo_rl.config import Config, PublicationKind, Source
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.answers import Wanted, generation_of
from olmo_rl.rollouts.control import Control, Engine
from olmo_rl.rollouts.exchange import EngineFault, client_with, exchange
from olmo_rl.rollouts.probes import UNLIKELY, chance_of_repeats, compared_request, draw_requests
from olmo_rl.rollouts.requests import ask, attempt_body, common_body, model_card
from olmo_rl.rollouts.wire import RouteAxis

SECONDS = 60.0  # of one question; a busy engine queues it
STARTED = {
    Source.vllm: "start it with VLLM_SERVER_DEV_MODE=1",
    Source.sglang: "use SGLang 0.5.17 or newer",
}
# SGLang empties its cache on a GET of /flush_cache too, which a check must not.
CALLS = {
    Source.vllm: ("/pause", "/resume", "/reset_prefix_cache"),
    Source.sglang: ("/pause_generation", "/continue_generation"),
}
RELOADS = {
    Source.vllm: ("/collective_rpc", "/update_weight_version"),
    Source.sglang: ("/update_weights_from_disk",),
}
BROADCASTS = {
    Source.vllm: (
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ),
    Source.sglang: ("/init_weights_update_group", "/update_weights_from_distributed"),
}
SEEN = (200, 400, 401, 405, 422)  # answers of a path that exists to a GET without arguments


def check_engines(config: Config) -> Iterable[Finding]:
    """Every engine, one after another; nothing where none is asked."""
    return asyncio.run(_all(config)) if config.asks_engines else []


async def _all(config: Config) -> list[Finding]:
    async with client_with(token=config.rollouts.token) as client:
        found = [await _Checked(config, client, url.rstrip("/")).findings() for url in config.rollouts.urls]
    return [finding for findings in found for finding in findings]


@dataclass(frozen=True, slots=True)
class _Checked:
    """One engine under questions."""

    config: Config
    client: httpx.AsyncClient
    url: str

    def _finding(self, name: str, good: bool | None, found: str, fix: str = "") -> Finding:
        return Finding(name=name, subject=self.url, good=good, found=found, fix="" if good else fix)

    async def findings(self) -> list[Finding]:
        """In the order of the run; the first ones decide whether the others can be asked."""
        rollouts = self.config.rollouts
        control = Control(rollouts, client=self.client, device=torch.device("cpu"))
        try:
            version = await control.held_version(Engine(url=self.url))
            card = await model_card(self.client, self.url, seconds=SECONDS)
        except EngineFault as fault:
            fix = f"is it up, and of a supported version? {STARTED[rollouts.source]}"
            return [self._finding("engine", False, str(fault)[:200], fix)]
        known = "none given yet" if version is None else str(version)
        found = [
            self._finding("engine", True, f"healthy, serves {card.name}"),
            self._finding("weight version", True, known),
            self._length(card.max_model_len),
            await self._calls(),
        ]
        return found + await self._answers(rollouts.served_model or card.name)

    def _length(self, most: int | None) -> Finding:
        needed = self.config.model.max_seq_len
        good = None if most is None else most >= needed
        option = "--max-model-len" if self.config.rollouts.source is Source.vllm else "--context-length"
        return self._finding(
            "context length",
            good,
            "not reported" if most is None else f"{most} tokens, model.max_seq_len={needed}",
            f"start it with {option} {needed}, or lower model.max_seq_len",
        )

    async def _calls(self) -> Finding:
        """Whether the control calls of this configuration exist."""
        rollouts = self.config.rollouts
        collective = rollouts.publication is PublicationKind.collective
        paths = CALLS[rollouts.source] + (BROADCASTS if collective else RELOADS)[rollouts.source]
        lacking = []
        for path in paths:
            try:
                reply = await exchange(self.client, "GET", self.url, path, seconds=SECONDS)
            except EngineFault as fault:
                lacking.append(str(fault)[:100])
                continue
            if reply.status not in SEEN:
                lacking.append(f"{path}: status {reply.status}")
        found = ", ".join(lacking) or "all there"
        return self._finding("control calls", not lacking, found, STARTED[rollouts.source])

    async def _answers(self, model: str) -> list[Finding]:
        """Log-probs, routes and draws."""
        config, layout = self.config, self.config.model.expert_layout
        plain = Wanted(axis=None, vocab_size=config.model.vocab_size)
        request, tokens = compared_request(
            vocab_size=config.model.vocab_size, max_seq_len=config.model.max_seq_len
        )
        found = [await self._one("log-probs, token ids", request, model=model, tokens=tokens, wanted=plain)]
        if config.replay and layout is not None:
            axis = RouteAxis(layout=layout, num_layers=len(config.model.layer_types))
            wanted = replace(plain, axis=axis)
            found.append(await self._one("routes", request, model=model, tokens=tokens, wanted=wanted))
        return [*found, await self._sampling(request, model=model, wanted=plain)]

    async def _one(self, name: str, request: Request, *, model: str, tokens: int, wanted: Wanted) -> Finding:
        try:
            answer = await self._generation(request, model=model, tokens=tokens, wanted=wanted)
        except EngineFault as fault:
            fix = "start it with --enable-return-routed-experts" if wanted.axis else "use a supported version"
            return self._finding(name, False, str(fault)[:200], fix)
        shape = "" if answer.routes is None else f", routes {answer.routes.shape} of {answer.routes.dtype}"
        return self._finding(name, True, f"{len(answer.logprobs)} of {tokens} tokens{shape}")

    async def _sampling(self, request: Request, *, model: str, wanted: Wanted) -> Finding:
        name = "whole distribution"
        try:
            draws = [
                await self._generation(draw, model=model, tokens=1, wanted=wanted)
                for draw in draw_requests(request.tokens)
            ]
        except EngineFault as fault:
            return self._finding(name, None, str(fault)[:200])
        chance = chance_of_repeats(draws)
        if chance is None:
            return self._finding(name, True, f"{len(draws)} draws differ")
        found = f"{len(draws)} draws gave one token, log-probability {chance:.3g}"
        fix = "start it without sampling defaults (vLLM: --generation-config vllm)"
        return self._finding(name, False if chance < UNLIKELY else None, found, fix)

    async def _generation(self, request: Request, *, model: str, tokens: int, wanted: Wanted) -> Generation:
        body = common_body(
            self.config.rollouts.source,
            max_new_tokens=tokens,
            stop_token=None,
            temperature=self.config.rollouts.temperature,
            top_p=1.0,
            routes=wanted.axis is not None,
        )
        sent = attempt_body({**body, "model": model}, request, None, seed=0)
        completion = await ask(self.client, self.url, sent, request=request, wanted=wanted, seconds=SECONDS)
        return generation_of(completion, request=request, version=0, wanted=wanted)
