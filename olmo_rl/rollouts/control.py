"""Control calls to one serving engine: pause, new weights, version, resume, in the words of vLLM or SGLang.

A call that does not succeed is an EngineFault of that engine; who then goes on without it is not decided
here. vLLM since 0.27.1 (`/weight_info`), started with VLLM_SERVER_DEV_MODE=1; SGLang since 0.5.17
(`return_token_ids`). Older ones are refused by name.

`rollouts.pause=keep` freezes what is under way and lets it go on with new weights (vLLM `keep`, SGLang
`in_place`); its requests carry the weight version as cache salt, so that no prefix computed with old weights
serves them, and caches need no flush. The other modes flush.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from torch import Tensor

from olmo_rl.config import PauseMode, PublicationKind, RolloutsConfig, Source
from olmo_rl.rollouts.collective import Broadcaster, SglangWords
from olmo_rl.rollouts.exchange import (
    Deadline,
    EngineFault,
    RefusedCall,
    Reply,
    UnsupportedEngine,
    exchange,
)
from olmo_rl.rollouts.versions import version_of
from olmo_rl.rollouts.vllm_transfer import VllmWords

CONTROL_TIMEOUT_SECONDS = 600.0  # reading a checkpoint of a large model takes minutes
AT_ONCE_SECONDS = 5.0  # what any engine answers that is alive
FLUSH_EVERY_SECONDS = 0.2
OLDEST_VLLM = (0, 27, 1)
OLDEST_TRANSFER = (0, 32, 0)
OLDEST_SGLANG = (0, 5, 17)
LACKS = {
    OLDEST_VLLM: "/weight_info",
    OLDEST_TRANSFER: "nccl_unique_id_b64 of /init_weight_transfer_engine",
    OLDEST_SGLANG: "return_token_ids of /v1/completions",
}


@dataclass(kw_only=True, slots=True, eq=False)
class Engine:
    """One server: its weights, its load, its faults. `version` None: weights unknown; `paused`: we paused it
    and
    did not resume it; `latest`: its newest fault; `control`: held by whoever gives it weights.
    """

    url: str
    version: int | None = None
    under_way: int = 0
    failures: int = 0
    resting: bool = False
    paused: bool = False
    supported: bool = False
    latest: EngineFault | None = None
    faults: Counter[str] = field(default_factory=Counter)
    control: asyncio.Lock = field(default_factory=asyncio.Lock)


class Control:
    """The calls; `device`: where broadcast weights lie."""

    def __init__(self, config: RolloutsConfig, *, client: httpx.AsyncClient, device: torch.device) -> None:
        self._sglang = config.source is Source.sglang
        self._mode = config.pause
        self._client = client
        self._deadline = Deadline(0.0)
        words = SglangWords() if self._sglang else VllmWords()
        self._oldest = OLDEST_SGLANG if self._sglang else OLDEST_VLLM
        if config.publication is PublicationKind.collective and not self._sglang:
            self._oldest = OLDEST_TRANSFER
        self._broadcaster = Broadcaster(
            self._broadcast_call, words=words, device=device, ranks=config.engine_ranks
        )

    async def held_version(self, engine: Engine) -> int | None:
        """The weight version of a healthy engine of a supported program, None where it was given none."""
        await self._probe(engine, deadline=Deadline(2 * AT_ONCE_SECONDS))
        return await self._version(engine)

    async def reload(self, engine: Engine, path: str, *, version: int, deadline: Deadline) -> None:
        """Have an engine read the weights at `path`; it serves `version` then."""
        await self._pause(engine, deadline=deadline)
        try:
            if self._sglang:
                # Its own flush asserts that nothing is under way, and ends the engine where something is.
                body: dict[str, Any] = {
                    "model_path": path,
                    "weight_version": str(version),
                    "flush_cache": False,
                }
                await self._post(engine.url, "/update_weights_from_disk", body, deadline=deadline)
            else:
                body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
                await self._post(engine.url, "/collective_rpc", body, deadline=deadline)
                body = {"new_version": str(version)}
                await self._post(engine.url, "/update_weight_version", body, deadline=deadline)
            await self._complete(engine, version=version, deadline=deadline)
        except EngineFault:
            await self._let_go(engine)
            raise

    async def begin_broadcast(self, engine: Engine, *, deadline: Deadline) -> None:
        """Pause an engine and have it join rank 0, ready for tensors."""
        self._deadline = deadline
        await self._pause(engine, deadline=deadline)
        try:
            await self._broadcaster.open(engine.url)
        except EngineFault:
            await self._let_go(engine)
            raise

    async def send(self, engine: Engine, *, bucket: Mapping[str, Tensor], version: int) -> None:
        """Send some of the tensors, by the engine's names, before the deadline of `begin_broadcast`."""
        try:
            await self._broadcaster.send(engine.url, bucket, version=version)
        except EngineFault:
            # Its weights may be of two versions: nothing under way may go on with them.
            with suppress(EngineFault):
                await self._pause_as(PauseMode.abort, engine, deadline=Deadline(AT_ONCE_SECONDS))
            await self._let_go(engine)
            raise

    async def end_broadcast(self, engine: Engine, *, version: int, deadline: Deadline) -> None:
        """Resume an engine that has all tensors: it serves `version` then."""
        self._deadline = deadline
        try:
            await self._broadcaster.end(engine.url, version=version)
            await self._complete(engine, version=version, deadline=deadline)
        except EngineFault:
            await self._let_go(engine)
            raise

    def drop(self, engine: Engine) -> None:
        """Forget the group of an engine that failed: it joins another when it is back."""
        engine.supported = False
        self._broadcaster.drop(engine.url)

    def close(self) -> None:
        self._broadcaster.close()

    async def _complete(self, engine: Engine, *, version: int, deadline: Deadline) -> None:
        """Flush where old prefixes could be served, check the version, resume."""
        if self._mode is not PauseMode.keep:
            await self._flush(engine, deadline=deadline)
        found = await self._version(engine)
        if found != version:
            raise EngineFault(f"weights of version {found} after an update to {version}")
        await self._resume(engine, deadline=deadline)
        engine.version = version
        engine.failures, engine.resting = 0, False

    async def _let_go(self, engine: Engine) -> None:
        """After a fault: it goes on with the weights it has, where it is alive at all."""
        with suppress(EngineFault):
            await self._resume(engine, deadline=Deadline(AT_ONCE_SECONDS))

    async def _probe(self, engine: Engine, *, deadline: Deadline) -> None:
        """Separate the dead, the stopped and the unsupported before anybody waits for them."""
        if engine.paused:  # a paused SGLang answers no health check
            await self._resume(engine, deadline=deadline)
        await self._at_once(engine, "/health", deadline=deadline)
        if engine.supported:
            return
        reply = await self._at_once(engine, "/server_info" if self._sglang else "/version", deadline=deadline)
        name, oldest = "SGLang" if self._sglang else "vLLM", self._oldest
        word = _field(reply, "version")
        match = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", word) if isinstance(word, str) else None
        if match is None:
            raise UnsupportedEngine(f"{reply.where}: {str(word)[:40]!r} is no version of {name}")
        if tuple(map(int, match.groups())) < oldest:
            needed = ".".join(map(str, oldest))
            lacks = LACKS[oldest]
            raise UnsupportedEngine(f"{name} {word}: {lacks} needs {name} {needed} or newer")
        engine.supported = True

    async def _version(self, engine: Engine) -> int | None:
        path = "/model_info" if self._sglang else "/weight_info"
        reply = await self._at_once(engine, path, deadline=Deadline(AT_ONCE_SECONDS))
        return version_of(_field(reply, "weight_version"))

    async def _pause(self, engine: Engine, *, deadline: Deadline) -> None:
        await self._probe(engine, deadline=deadline)
        engine.paused = True
        await self._pause_as(self._mode, engine, deadline=deadline)

    async def _pause_as(self, mode: PauseMode, engine: Engine, *, deadline: Deadline) -> None:
        if self._sglang:
            word = "in_place" if mode is PauseMode.keep else mode.value
            await self._post(engine.url, "/pause_generation", {"mode": word}, deadline=deadline)
        else:
            await self._post(engine.url, f"/pause?mode={mode.value}", None, deadline=deadline)

    async def _resume(self, engine: Engine, *, deadline: Deadline) -> None:
        if self._sglang:
            await self._post(engine.url, "/continue_generation", {}, deadline=deadline)
        else:
            await self._post(engine.url, "/resume", None, deadline=deadline)
        engine.paused = False

    async def _flush(self, engine: Engine, *, deadline: Deadline) -> None:
        """Forget prefixes; what was aborted or has ended may hold its blocks a moment longer."""
        path, patience = "/flush_cache" if self._sglang else "/reset_prefix_cache", Deadline(AT_ONCE_SECONDS)
        while True:
            try:
                await self._post(engine.url, path, None, deadline=deadline)
                return
            except EngineFault:
                if not patience.left(at_most=1.0):
                    raise
            await asyncio.sleep(FLUSH_EVERY_SECONDS)

    async def _at_once(self, engine: Engine, path: str, *, deadline: Deadline) -> Reply:
        seconds = deadline.left(at_most=AT_ONCE_SECONDS)
        return _successful(await exchange(self._client, "GET", engine.url, path, seconds=seconds))

    async def _broadcast_call(self, url: str, path: str, body: Mapping[str, Any]) -> Reply:
        return await self._post(url, path, body, deadline=self._deadline)

    async def _post(
        self, url: str, path: str, body: Mapping[str, Any] | None, *, deadline: Deadline
    ) -> Reply:
        """One call; anything but success is a fault."""
        seconds = deadline.left(at_most=CONTROL_TIMEOUT_SECONDS)
        reply = _successful(await exchange(self._client, "POST", url, path, body=body, seconds=seconds))
        if reply.content[:1] == b"{" and _field(reply, "success") is False:
            raise RefusedCall(f"{path}: {reply.text}")
        return reply


def _successful(reply: Reply) -> Reply:
    if reply.status != 200:
        kind = EngineFault if reply.where == "/health" else RefusedCall  # it may be starting or ending
        raise kind(f"{reply.where}: status {reply.status} {reply.text}".strip())
    return reply


def _field(reply: Reply, name: str) -> Any:
    body = reply.json()
    if not isinstance(body, dict):
        raise EngineFault(f"{reply.where}: no JSON object")
    return body.get(name)
