"""One HTTP exchange with an engine, bounded as a whole: seconds from the first byte sent to the last
received,
and bytes of the answer.

Every way in which an exchange fails raises `EngineFault` with its deepest cause.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

CONTROL_BYTES = 4 * 2**20  # of the answer to a control call
_SHOWN = 300


class EngineFault(Exception):
    """One attempt failed at one engine; the request may succeed at another."""


class RejectedRequest(EngineFault):
    """The engine answered with status 4xx: the request would fail everywhere if the engine is right."""


class AbortedRequest(EngineFault):
    """The engine ended a response before it was complete."""


class RefusedCall(EngineFault):
    """The engine is there and did not do what a control call asked for."""


class UnsupportedEngine(EngineFault):
    """The engine's program is too old for what training needs."""


class Deadline:
    """The end of several calls together."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, *, at_most: float) -> float:
        """Seconds that remain for the next call."""
        return max(0.0, min(at_most, self._end - time.monotonic()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A complete answer; `where` names its call in faults."""

    where: str
    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The beginning of the answer, printable."""
        return self.content[:_SHOWN].decode("utf-8", "replace")

    def json(self) -> Any:
        """The parsed body; EngineFault where it is no JSON."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError) as error:
            raise EngineFault(f"{self.where}: no JSON: {error}"[:_SHOWN]) from None


def client_with(*, token: str | None) -> httpx.AsyncClient:
    """Connections to engines. Answers are asked for uncompressed, so that bytes received are bytes kept."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, headers=headers)


async def exchange(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    seconds: float,
    most_bytes: int = CONTROL_BYTES,
) -> Reply:
    """The answer of `url` + `path` within `seconds`, whatever its status; EngineFault where there is none."""
    content = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(method, url + path, content=content, headers=headers) as answer,
        ):
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise EngineFault(f"{path}: a compressed answer, which was not asked for")
            received = bytearray()
            async for chunk in answer.aiter_raw():
                received += chunk
                if len(received) > most_bytes:
                    raise EngineFault(f"{path}: more than {most_bytes} bytes of answer")
            return Reply(where=path, status=answer.status_code, content=bytes(received))
    except TimeoutError:
        raise EngineFault(f"{path}: no complete answer within {seconds:.3g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
        raise EngineFault(f"{path}: {_root_cause(error)}") from None


def _root_cause(error: BaseException) -> str:
    """The kind of an error, and the reason that the operating system gave where there is one."""
    words, deepest = f"{type(error).__name__} {error}".strip(), error
    seen = {id(error)}
    while (below := deepest.__cause__ or deepest.__context__) is not None and id(below) not in seen:
        seen.add(id(below))
        deepest = below
    if deepest is not error and isinstance(deepest, OSError) and deepest.errno is not None:
        words = f"{type(error).__name__}: {os.strerror(deepest.errno)}"
    return words
