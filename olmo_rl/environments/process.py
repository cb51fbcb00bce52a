"""The environment process: the verifiers library with its tasks, tools and rewards, in one event loop.

`python -m olmo_rl.environments.process COMMANDS EVENTS` reads commands from one file descriptor and writes
events to the other, as MessagePack. It ends when its commands end, and with its supervisor. A beat every
second shows that the loop turns: code of an environment that blocks it stops the beats.

Commands: {start}, {serve: url}, {run: [[slot, side, task], ...]}, {demonstrate: tasks}. Events: {beat},
{loaded}, {serving}, {record}, {demonstrations}, {fault}, which ends the process. `side`: training or held-out
tasks.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

import msgpack

from olmo_rl.environments.environment import Environment, Start, one_line
from olmo_rl.environments.records import failed_record
from olmo_rl.types import Refusal

BEAT_SECONDS = 1.0
MAX_FRAME_BYTES = 2**31 - 1


class Events:
    """Frames to the parent, whole and in order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = asyncio.Lock()

    async def send(self, **event: Any) -> None:
        """Write one event; a thread waits where the pipe is full."""
        await self.send_frame(packed(**event))

    async def send_frame(self, frame: bytes) -> None:
        """Write what is packed already."""
        async with self._lock:
            await asyncio.to_thread(self._write, frame)

    def send_now(self, **event: Any) -> None:
        """Write one event from outside the loop."""
        self._write(packed(**event))

    def _write(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            view = view[os.write(self._descriptor, view) :]


def packed(**event: Any) -> bytes:
    """One event as bytes. Text of an environment may hold what UTF-8 has no code for, which becomes "?"."""
    frame: bytes = msgpack.packb(event, unicode_errors="replace")
    return frame


async def _serve(commands: int, events: Events) -> None:
    reader = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(commands, "rb")
    )
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES)
    beats = asyncio.create_task(_beat(events))
    running: set[asyncio.Task[None]] = set()
    environment: Environment | None = None
    async with _Stack() as stack:
        while chunk := await reader.read(2**16):
            unpacker.feed(chunk)
            for command in unpacker:
                if "start" in command:
                    environment = Environment(Start(**command["start"]))
                    await events.send(loaded=environment.has)
                    continue
                assert environment is not None, "the parent starts first"
                if "serve" in command:
                    await stack.enter(environment.serving(command["serve"]))
                    await events.send(serving=environment.has)
                elif "demonstrate" in command:
                    await events.send(demonstrations=environment.demonstrations(command["demonstrate"]))
                else:
                    for slot, side, number in command["run"]:
                        task = asyncio.create_task(_run(environment, events, slot, side, number))
                        running.add(task)
                        task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        beats.cancel()


class _Stack:
    """At most one context that is entered late and left at the end, within a limit."""

    def __init__(self) -> None:
        self._context: Any = None

    async def __aenter__(self) -> _Stack:
        return self

    async def enter(self, context: Any) -> None:
        await context.__aenter__()
        self._context = context

    async def __aexit__(self, *error: object) -> None:
        if self._context is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._context.__aexit__(None, None, None), timeout=10.0)


async def _run(environment: Environment, events: Events, slot: int, side: str, number: int) -> None:
    """Play one episode and send its record: where an environment's objects make none, one with the reason."""
    try:
        frame = packed(record=await environment.record(slot, side, number))
    except Exception as error:  # whatever code of the environment raises, or returns where a number belongs
        frame = packed(record=failed_record(slot, fault=f"no record of it: {one_line(error)}"))
    await events.send_frame(frame)


async def _beat(events: Events) -> None:
    while True:
        await events.send(beat=True)
        await asyncio.sleep(BEAT_SECONDS)


def _end_with_parent() -> None:
    """Have the kernel end this process when its supervisor is killed; else that ends it and its programs."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Serve until the commands end."""
    commands, descriptor = map(int, sys.argv[1:3])
    events = Events(descriptor)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # signals to the job are the parent's to handle
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    _end_with_parent()
    try:
        asyncio.run(_serve(commands, events))
    except Refusal as refusal:
        events.send_now(fault=list(refusal.reasons))
    except Exception as error:  # whatever the library or an environment raises while it starts
        traceback.print_exc()
        events.send_now(fault=[f"environment: {one_line(error)}"])


if __name__ == "__main__":
    main()
