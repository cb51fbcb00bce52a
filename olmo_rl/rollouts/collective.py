"""Weights by broadcast: rank 0 of the trainer and the ranks of one engine form a process group of their own.

With SGLang 0.5, `/init_weights_update_group` has an engine join, and every call of
`/update_weights_from_distributed` names tensors that rank 0 then broadcasts one by one, in that order. The
group stands beside the trainer's own and beside the engine's: neither registers it. gloo where weights lie on
CPU, NCCL on CUDA. The words of vLLM are in vllm_transfer.py.

Refused, on the engine's side: a group that nobody opened, tensors of another model, another shape or dtype.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_rl.hf.names import Piece
from olmo_rl.rollouts.exchange import EngineFault
from olmo_rl.types import Refusal

A = TypeVar("A")

SILENCE = timedelta(seconds=60)  # a side that does not join, send or take a bucket within this is gone
LONG_SILENCE = timedelta(hours=1)  # NCCL ends the process then: a call over HTTP must end earlier


@dataclass(kw_only=True, slots=True, eq=False)
class WeightGroup:
    """One process group; rank 0 sends. `device`: of the tensors that travel."""

    backend: Any
    device: torch.device

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """In order, in place on every rank but 0; blocks. RuntimeError where the other side is gone."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            self.backend.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Let go of the other side, whose broadcast ends with a RuntimeError. One under way on this side ends
        when the other lets go, or after SILENCE.
        """
        self.backend.abort()


def own_store(name: str, *, world_size: int) -> tuple[dist.TCPStore, dict[str, Any]]:
    """A rendezvous at a free port of this machine, and what the others must know to meet there, as ranks
    from 1 on. The address is `address_for` their URL.
    """
    store = dist.TCPStore("0.0.0.0", 0, world_size, is_master=True, timeout=SILENCE, wait_for_workers=False)
    address = {"master_port": store.port, "rank_offset": 1, "world_size": world_size, "group_name": name}
    return store, address


def address_for(url: str) -> str:
    """The address of this machine on the way to `url`."""
    parts = urlsplit(url)
    family, *_, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # nothing is sent
        return str(probe.getsockname()[0])


def join(store: dist.Store, *, name: str, rank: int, world_size: int, device: torch.device) -> WeightGroup:
    """Meet the others in `store`; blocks until all are there. The prefixes are those under which torch's own
    groups of that name meet, which is what engines make.
    """
    for prefix in (name, f"{name}/", f"{device.type}/"):
        store = dist.PrefixStore(prefix, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LONG_SILENCE
        return WeightGroup(backend=dist.ProcessGroupNCCL(store, rank, world_size, options), device=device)
    backend = dist.ProcessGroupGloo(store, rank, world_size, SILENCE)
    return WeightGroup(backend=backend, device=device)


Call = tuple[str, dict[str, Any]]  # path and body of a POST


class Group(Protocol):
    """What rank 0 sends through."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Invitation:
    """The `call` that has an engine join a group, and rank 0's own part, which blocks until all are there."""

    name: str
    call: Call
    join: Callable[[], Group]


class Words(Protocol):
    """The calls of one program around a broadcast; None: it needs no such call."""

    def invite(self, name: str, *, url: str, world_size: int, device: torch.device) -> Invitation: ...

    def begin(self) -> Call | None: ...

    def announce(self, name: str, tensors: Mapping[str, Tensor], *, version: int) -> Call: ...

    def end(self, version: int) -> Call | None: ...


class SglangWords:
    """SGLang 0.5: a group of torch's own kind, met in a store of rank 0."""

    def invite(self, name: str, *, url: str, world_size: int, device: torch.device) -> Invitation:
        store, address = own_store(name, world_size=world_size)
        backend = "nccl" if device.type == "cuda" else "gloo"
        return Invitation(
            name=name,
            call=(
                "/init_weights_update_group",
                address | {"master_address": address_for(url), "backend": backend},
            ),
            join=partial(join, store, name=name, rank=0, world_size=world_size, device=device),
        )

    def begin(self) -> Call | None:
        return None

    def announce(self, name: str, tensors: Mapping[str, Tensor], *, version: int) -> Call:
        return "/update_weights_from_distributed", {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": name,
            "flush_cache": False,
            "weight_version": str(version),
        }

    def end(self, version: int) -> Call | None:
        del version
        return None


class Broadcaster:
    """The trainer's side: one group for each engine, made when it is first needed. `post` is a control call
    to an engine: address, path, body. `ranks`: of one engine.
    """

    def __init__(
        self,
        post: Callable[[str, str, dict[str, Any]], Awaitable[Any]],
        *,
        words: Words,
        device: torch.device,
        ranks: int,
    ) -> None:
        self._post = post
        self._words = words
        self._device = device
        self._world_size = 1 + ranks
        self._groups: dict[str, tuple[str, Group]] = {}
        self._made = 0

    async def open(self, url: str) -> None:
        """Have the engine at `url` join a group, unless it did, and expect tensors."""
        if url not in self._groups:
            await self._join(url)
        await self._call(url, self._words.begin())

    async def _join(self, url: str) -> None:
        self._made += 1
        name = f"olmo_rl-{os.getpid()}-{self._made}"
        try:
            invitation = self._words.invite(name, url=url, world_size=self._world_size, device=self._device)
        except (OSError, RuntimeError) as error:
            raise EngineFault(f"no group with it: {error}") from None
        calling = asyncio.ensure_future(self._post(url, *invitation.call))
        joining = _in_thread(invitation.join)
        await asyncio.wait({calling, joining}, return_when=asyncio.FIRST_EXCEPTION)
        if not (calling.done() and joining.done()):
            # One failed. A meeting that nobody comes to ends by itself, and nobody waits for it.
            joining.add_done_callback(lambda future: future.cancelled() or future.exception())
            calling.cancel()
        self._groups[url] = name, _outcome(calling, joining)

    async def send(self, url: str, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Announce tensors by the engine's names, then broadcast them."""
        name, group = self._groups[url]
        sent = [tensor.to(self._device) for tensor in tensors.values()]
        call = self._words.announce(name, tensors, version=version)
        calling = asyncio.ensure_future(self._post(url, *call))
        sending = _in_thread(partial(group.broadcast, sent))
        await asyncio.wait({calling, sending}, return_when=asyncio.FIRST_EXCEPTION)
        if not sending.done():
            group.close()  # the engine takes nothing
            await asyncio.wait({sending}, timeout=SILENCE.total_seconds())
            sending.add_done_callback(lambda future: future.cancelled() or future.exception())
        elif not calling.done():
            calling.cancel()
        _outcome(calling, sending)

    async def end(self, url: str, *, version: int) -> None:
        """After the last tensor."""
        await self._call(url, self._words.end(version))

    async def _call(self, url: str, call: Call | None) -> None:
        if call is not None:
            await self._post(url, *call)

    def drop(self, url: str) -> None:
        """Forget an engine that failed: it joins a new group when it is back."""
        if url in self._groups:
            self._groups.pop(url)[1].close()

    def close(self) -> None:
        for url in list(self._groups):
            self.drop(url)


def _in_thread(work: Callable[[], A]) -> asyncio.Future[A]:
    """Blocking work beside the event loop, in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[A] = loop.create_future()

    def run() -> None:
        try:
            resolve = partial(done.set_result, work())
        except RuntimeError as error:
            resolve = partial(done.set_exception, EngineFault(f"broadcast: {str(error)[:200]}"))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(resolve)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return done


def _outcome(calling: asyncio.Future[Any], transfer: asyncio.Future[A]) -> A:
    """What the transfer gave; the call's fault before its own, since it says why."""
    ended = [future for future in (calling, transfer) if future.done() and not future.cancelled()]
    for fault in [future.exception() for future in ended]:
        if fault is not None:
            raise fault
    return transfer.result()


def meet(body: Mapping[str, Any], *, device: torch.device) -> WeightGroup:
    """The engine's side of `/init_weights_update_group`, for an engine of one rank."""
    try:
        address, port = str(body["master_address"]), int(body["master_port"])
        rank, world_size, name = int(body["rank_offset"]), int(body["world_size"]), str(body["group_name"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Refusal(
            f"master_address, master_port, rank_offset, world_size, group_name: {error!r}"
        ) from None
    if not (0 < port < 2**16 and 0 < rank < world_size < 2**16):
        raise Refusal("master_port, rank_offset, world_size: no port, or no rank of that world")
    try:
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=SILENCE)
        return join(store, name=name, rank=rank, world_size=world_size, device=device)
    except (RuntimeError, ValueError) as error:
        raise Refusal(f"init_weights_update_group: {error}") from None


class Arrivals:
    """The engine's side: groups it joined, and the tensors of a model as they arrive, until all are there."""

    def __init__(self, parts: Sequence[Piece], *, shapes: Mapping[str, torch.Size]) -> None:
        self._parts = {piece.name: piece for piece in parts}
        self._shapes = shapes
        self._groups: dict[str, WeightGroup] = {}
        self._found: dict[str, Tensor] = {}

    def open(self, body: Mapping[str, Any]) -> None:
        """Join the group of `body`; the one before it is gone: a trainer has one."""
        self.close()
        self._groups[str(body.get("group_name"))] = meet(body, device=torch.device("cpu"))

    def close(self) -> None:
        """Forget all groups and what has arrived."""
        while self._groups:
            self._groups.popitem()[1].close()
        self._found.clear()

    def take(self, body: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Receive the tensors that `body` names. Full weights by our names once the last of a model is there,
        None before.
        """
        group = self._groups.get(str(body.get("group_name")))
        if group is None:
            raise Refusal(f"group_name: {body.get('group_name')!r} was not opened, or its trainer is gone")
        try:
            announced = self._announced(body)
        except Refusal:
            self.close()  # or the trainer waits for somebody to take what it sends
            raise
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in announced}
        try:
            group.broadcast(list(tensors.values()))
        except RuntimeError as error:
            self.close()
            raise Refusal(f"update_weights_from_distributed: {error}") from None
        self._found |= tensors
        if len(self._found) < len(self._parts):
            return None
        whole = {name: torch.empty(shape) for name, shape in self._shapes.items()}
        for piece in self._parts.values():
            rows = whole[piece.parameter][piece.start : piece.stop]
            rows.copy_(self._found[piece.name].view(rows.shape))
        self._found.clear()
        return whole

    def _announced(self, body: Mapping[str, Any]) -> list[tuple[str, list[int], torch.dtype]]:
        """Name, shape and dtype of every tensor of one call, checked against the model."""
        lists = [body.get(key) for key in ("names", "dtypes", "shapes")]
        columns = [column for column in lists if isinstance(column, list)]
        if len(columns) < 3 or not len(columns[0]) == len(columns[1]) == len(columns[2]) > 0:
            raise Refusal("names, dtypes, shapes: give three lists of one length")
        found = []
        for name, word, shape in zip(*columns, strict=True):
            piece = self._parts.get(name) if isinstance(name, str) else None
            dtype = getattr(torch, word, None) if isinstance(word, str) and word.isascii() else None
            if piece is None:
                raise Refusal(f"names: {name} is not a weight of this model")
            if shape != list(piece.shape):
                raise Refusal(f"shapes: {name} has {shape}, the model {list(piece.shape)}")
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise Refusal(f"dtypes: {name} has {word!r}, weights have a floating-point type")
            found.append((name, shape, dtype))
        return found
