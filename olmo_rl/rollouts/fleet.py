"""The engines of a client, as its event loop sees them: their weights, their health, and which one is next.

An engine that fails twice in a row rests until it answers `/health` again; it is reloaded only if it lost the
present weights. All methods but `refuse_without_engines` run in the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

from olmo_rl.config import PauseMode, PublicationKind, RolloutsConfig
from olmo_rl.rollouts.control import Control, Engine
from olmo_rl.rollouts.exchange import Deadline, EngineFault, RefusedCall, UnsupportedEngine
from olmo_rl.rollouts.wire import Completion
from olmo_rl.types import Refusal

_LOG = logging.getLogger(__name__)
FAILURES_BEFORE_REST = 2
REST_SECONDS = 1.0


class Fleet:
    """State of all engines. `version`: of the present weights, `published`: their path, None where they were
    broadcast; `held`: newer ones are being published; `publications` begun so far; `patience`: seconds that
    the control calls of one publication take.
    """

    def __init__(self, config: RolloutsConfig, *, control: Control, patience: float) -> None:
        self.engines = [Engine(url=url.rstrip("/")) for url in config.urls]
        self.control = control
        self.patience = patience
        self.version: int | None = None
        self.published: str | None = None
        self.held = False
        self.publications = 0
        self._config = config
        self._waiting = False  # and it was reported

    async def hold(self) -> None:
        """Give no engine the present weights any more; what was under way has ended on return."""
        self.held = True
        self.publications += 1
        for engine in self.engines:
            async with engine.control:
                pass

    async def publish(self, path: str, version: int) -> None:
        """Have every engine that answers read `path`; refused where none does."""
        first, self.published, self.version = self.version is None, path, version

        async def all_at_once() -> list[Engine]:
            deadline = Deadline(self.patience)
            return await self.each(self.engines, partial(self.bring_up_to_date, deadline=deadline))

        await self._until_one(all_at_once, first=first)
        self.held = False
        self.refuse_without_engines()

    async def begin_broadcast(self, version: int) -> list[Engine]:
        """The engines that joined rank 0, ready for tensors. Every attempt has a deadline of its own."""
        first, self.published, self.version = self.version is None, None, version

        async def all_at_once() -> list[Engine]:
            begin = partial(self.control.begin_broadcast, deadline=Deadline(self.patience))
            return await self.each(self.engines, begin)

        return await self._until_one(all_at_once, first=first)

    async def end_broadcast(self, ready: Sequence[Engine], version: int, *, deadline: Deadline) -> None:
        """Resume the engines that have all tensors; refused where there is none."""
        await self.each(ready, partial(self.control.end_broadcast, version=version, deadline=deadline))
        self.held = False
        self.refuse_without_engines()

    async def _until_one(
        self, attempt: Callable[[], Awaitable[list[Engine]]], *, first: bool
    ) -> list[Engine]:
        """The engines that took part, tried again while all are gone. At the `first` publication there is no
        second try: a wrong address never answers.
        """
        patience = Deadline(0.0 if first else self._config.wait_seconds)
        while True:
            ready = await attempt()
            there = any(isinstance(engine.latest, UnsupportedEngine | RefusedCall) for engine in self.engines)
            if ready or there or not patience.left(at_most=1.0):
                return ready
            self._warn_of_waiting()
            await asyncio.sleep(REST_SECONDS)

    def _warn_of_waiting(self) -> None:
        """One line each time when no engine is left."""
        if not self._waiting:
            self._waiting = True
            reasons = "; ".join(f"{engine.url}: {reason_of(engine)}" for engine in self.engines)
            _LOG.warning("no engine answers (%s), waiting up to %g s", reasons, self._config.wait_seconds)

    async def bring_up_to_date(self, engine: Engine, *, deadline: Deadline) -> None:
        """Alone with this engine's control calls, and with what is published by then."""
        path, version = self.published, self.version
        assert path is not None, "publish comes first"
        assert version is not None, "publish comes first"
        await self.control.reload(engine, path, version=version, deadline=deadline)

    async def each(
        self, engines: Iterable[Engine], work: Callable[[Engine], Awaitable[None]]
    ) -> list[Engine]:
        """Control calls to all engines at once; those that did not fail. The others keep what they hold."""

        async def attempt(engine: Engine) -> Engine | None:
            async with engine.control:
                try:
                    await work(engine)
                except EngineFault as fault:
                    self.control.drop(engine)
                    self.failed(engine, fault, rest=True)
                    return None
            return engine

        found = await asyncio.gather(*(attempt(engine) for engine in engines))
        return [engine for engine in found if engine is not None]

    async def adopt(self, path: str | None, version: int, *, versions: Mapping[str, int | None]) -> None:
        """Take over what another process published, and the version of each engine by address."""
        self.published, self.version = path, version
        for engine in self.engines:
            engine.version = versions[engine.url]
            if engine.version != version:
                self.failed(engine, EngineFault("took no weights"), rest=True)
        self.held = False

    def refuse_without_engines(self) -> None:
        """Refused where no engine took the present weights, or one is of an unsupported version."""
        old = [engine for engine in self.engines if isinstance(engine.latest, UnsupportedEngine)]
        if old:
            raise Refusal([f"rollouts.urls: {engine.url}: {engine.latest}" for engine in old])
        if not any(engine.version == self.version for engine in self.engines):
            raise Refusal(
                [f"{engine.url}: took no weights: {reason_of(engine)}" for engine in self.engines]
                + ["rollouts.urls: no engine could be updated: are they up, and do they see the same files?"]
            )

    async def compare_version(self, engine: Engine) -> None:
        """Take an engine out of service that no longer has the weights that it was given."""
        given, publications = engine.version, self.publications
        if engine.resting or given is None or self.held:
            return
        try:
            found = await self.control.held_version(engine)
        except EngineFault as fault:
            self.failed(engine, fault, rest=True)
            return
        if found != given and publications == self.publications:
            self._lost(engine, found=found, given=given)

    def check_version(self, engine: Engine, completion: Completion, *, at_start: int | None) -> None:
        """An engine that reports other weights than were published was started again meanwhile."""
        reported = completion.policy_version
        if reported is None and self._config.publication is PublicationKind.directory:
            return
        if at_start is None:
            return
        newest = math.inf if self.held else engine.version or at_start
        if reported is None or not at_start <= reported <= newest:
            raise self._lost(engine, found=reported, given=at_start)

    def _lost(self, engine: Engine, *, found: int | None, given: int) -> EngineFault:
        """Note an engine with other weights than it was given: it was started again meanwhile."""
        fault = EngineFault(f"weights of version {found}, published were {given}")
        engine.version = None
        self.failed(engine, fault, rest=True)
        return fault

    def aborts_since(self, publications: int) -> bool:
        """Whether a publication that aborts requests was begun since there were `publications`."""
        began = self.held or self.publications != publications
        return began and self._config.pause is PauseMode.abort

    def is_ready(self, engine: Engine) -> bool:
        """Whether it has the present weights and may be asked."""
        return not engine.resting and engine.version == self.version

    async def pick(self) -> Engine:
        """The engine with the present weights and the fewest requests under way; waits while all rest."""
        deadline = asyncio.get_running_loop().time() + self._config.wait_seconds
        while True:
            ready = [engine for engine in self.engines if self.is_ready(engine)]
            if ready:
                self._waiting = False
                return min(ready, key=lambda engine: engine.under_way)
            if not self.held:
                self._warn_of_waiting()
            if asyncio.get_running_loop().time() > deadline:
                raise Refusal(
                    [f"{engine.url}: {reason_of(engine)}" for engine in self.engines]
                    + [f"rollouts.urls: no engine answered for {self._config.wait_seconds:g} seconds"]
                )
            await asyncio.sleep(0.1)

    def failed(self, engine: Engine, fault: EngineFault, *, rest: bool = False) -> None:
        """Count; after repeated failures (or at once) let the engine rest and look after it."""
        engine.latest = fault
        engine.faults[str(fault)[:300]] += 1
        engine.failures += 1
        if (rest or engine.failures >= FAILURES_BEFORE_REST) and not engine.resting:
            engine.resting = True
            if not engine.control.locked():
                self.control.drop(engine)  # if it was started again, it is in no group
            asyncio.create_task(self._look_after(engine))

    async def _look_after(self, engine: Engine) -> None:
        """Wait until an engine is healthy, reload it if it lost the present weights, let it work again."""
        while engine.resting:
            await asyncio.sleep(REST_SECONDS)
            if self.held:
                continue
            publications = self.publications
            try:
                found = await self.control.held_version(engine)
            except EngineFault as fault:
                engine.latest = fault
                continue
            if publications != self.publications:
                continue
            if engine.version == self.version and found in (self.version, None):
                engine.failures, engine.resting = 0, False
            elif self.published is not None:
                await self.each([engine], self._unless_held)
            # What was broadcast is gone: an engine without it rests until the next publication.

    async def _unless_held(self, engine: Engine) -> None:
        if not self.held:
            await self.bring_up_to_date(engine, deadline=Deadline(self.patience / 2))


def reason_of(engine: Engine) -> str:
    """The latest fault of an engine, which is nearest to the cause of its silence."""
    return str(engine.latest)[:300] if engine.latest is not None else "no answer yet"
