"""Control calls to one serving engine: pause, new weights, flush, resume, in the words of vLLM or SGLang.

A call that does not succeed is an EngineFault of that engine; who then goes on without it is not judged here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from torch import Tensor

from olmo_rl.config import RolloutsConfig, Source
from olmo_rl.rollouts.answers import EngineFault
from olmo_rl.rollouts.collective import Broadcaster

CONTROL_TIMEOUT_SECONDS = 600.0  # reading a checkpoint of a large model takes minutes
AT_ONCE_SECONDS = 5.0  # what any engine answers that is alive


@dataclass(kw_only=True, slots=True, eq=False)
class Engine:
    """One server: what it holds, what it is doing, how it has been. `version` None: weights unknown;
    `control`: held by whoever gives it weights.
    """

    url: str
    version: int | None = None
    under_way: int = 0
    failures: int = 0
    resting: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    control: asyncio.Lock = field(default_factory=asyncio.Lock)


class Control:
    """The calls; `device`: where broadcast weights lie, `patience`: seconds of one call."""

    def __init__(
        self,
        config: RolloutsConfig,
        *,
        client: httpx.AsyncClient,
        device: torch.device,
        patience: float = CONTROL_TIMEOUT_SECONDS,
    ) -> None:
        self._sglang = config.source is Source.sglang
        self._client = client
        self._patience = patience
        self._broadcaster = Broadcaster(self._post, device=device, ranks=config.engine_ranks)

    async def healthy(self, engine: Engine) -> bool:
        """Whether an engine answers at once."""
        try:
            await self._probe(engine)
        except EngineFault:
            return False
        return True

    async def reload(self, engine: Engine, path: str, *, version: int) -> None:
        """Have an engine read the weights at `path`; it holds `version` then."""
        await self._pause(engine)
        try:
            if self._sglang:
                body: dict[str, Any] = {"model_path": path, "weight_version": str(version)}
                await self._post(engine.url, "/update_weights_from_disk", body)
            else:
                arguments = {"weights_path": path, "weight_version": version}
                body = {"method": "reload_weights", "kwargs": arguments}
                await self._post(engine.url, "/collective_rpc", body)
            await self._flush(engine)
        except EngineFault:
            await self._let_go(engine)
            raise
        await self._resume(engine)
        _holds(engine, version)

    async def begin_broadcast(self, engine: Engine) -> None:
        """An engine that has joined rank 0 and waits for tensors."""
        await self._pause(engine)
        try:
            await self._broadcaster.open(engine.url)
        except EngineFault:
            await self._let_go(engine)
            raise

    async def send(self, engine: Engine, *, bucket: Mapping[str, Tensor], version: int) -> None:
        """Some of the tensors, by the engine's names."""
        try:
            await self._broadcaster.send(engine.url, bucket, version=version)
        except EngineFault:
            await self._let_go(engine)
            raise

    async def end_broadcast(self, engine: Engine, *, version: int) -> None:
        """All tensors were sent: the engine holds `version` then."""
        await self._flush(engine)
        await self._resume(engine)
        _holds(engine, version)

    def drop(self, engine: Engine) -> None:
        """Forget the group of an engine that failed: it joins another when it is back."""
        self._broadcaster.drop(engine.url)

    def close(self) -> None:
        self._broadcaster.close()

    async def _let_go(self, engine: Engine) -> None:
        """After a fault: it goes on with what it holds, where it is alive at all."""
        with suppress(EngineFault):
            await self._resume(engine, patience=AT_ONCE_SECONDS)

    async def _probe(self, engine: Engine) -> None:
        try:
            await self._client.get(engine.url + "/health", timeout=AT_ONCE_SECONDS)
        except (httpx.HTTPError, OSError) as error:
            raise EngineFault(f"/health: {type(error).__name__} {error}".strip()) from None

    async def _pause(self, engine: Engine) -> None:
        await self._probe(engine)  # the dead and the stopped are told apart before anybody waits for them
        await self._post(engine.url, "/pause_generation" if self._sglang else "/pause", {})

    async def _resume(self, engine: Engine, *, patience: float | None = None) -> None:
        path = "/continue_generation" if self._sglang else "/resume"
        await self._post(engine.url, path, {}, patience=patience)

    async def _flush(self, engine: Engine) -> None:
        await self._post(engine.url, "/flush_cache" if self._sglang else "/reset_prefix_cache", {})

    async def _post(
        self, url: str, path: str, body: Mapping[str, Any], *, patience: float | None = None
    ) -> Any:
        """One call; anything but success is a fault."""
        timeout = self._patience if patience is None else patience
        try:
            answer = await self._client.post(url + path, json=body, timeout=timeout)
        except (httpx.HTTPError, OSError) as error:
            raise EngineFault(f"{path}: {type(error).__name__} {error}".strip()) from None
        if answer.status_code != 200:
            raise EngineFault(f"{path}: status {answer.status_code} {answer.text[:200]}")
        return answer


def _holds(engine: Engine, version: int) -> None:
    engine.version = version
    engine.failures, engine.resting = 0, False
