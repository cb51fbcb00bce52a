"""Weights by broadcast: rank 0 of the trainer and the ranks of one engine form a process group of their own.

As SGLang 0.5 does it: `/init_weights_update_group` has an engine join, and every call of
`/update_weights_from_distributed` names tensors that rank 0 then broadcasts one by one, in that order. The
group stands beside the trainer's own and beside the engine's: neither registers it. gloo where weights lie on
CPU, NCCL on CUDA.

Refused, on the engine's side: a group that nobody opened, tensors of another model, another shape or dtype.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_rl.policy.hf_names import Piece
from olmo_rl.types import Refusal

# Of the tensors whose names one call carries; an engine holds them beside its weights.
BUCKET_BYTES = 512 * 2**20
SILENCE = timedelta(seconds=120)  # a side that does not join, send or take a bucket within this is gone


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
        """Let go of the other side; a broadcast under way ends with a RuntimeError."""
        self.backend.abort()


def own_store(name: str, *, world_size: int) -> tuple[dist.TCPStore, dict[str, Any]]:
    """A rendezvous at a free port of this machine, and what the others must be told to meet there, as ranks
    from 1 on. The address is `address_for` their URL.
    """
    store = dist.TCPStore("0.0.0.0", 0, world_size, is_master=True, timeout=SILENCE, wait_for_workers=False)
    told = {"master_port": store.port, "rank_offset": 1, "world_size": world_size, "group_name": name}
    return store, told


def address_for(url: str) -> str:
    """The address of this machine on the way to `url`."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # nothing is sent
        return str(probe.getsockname()[0])


def join(store: dist.Store, *, name: str, rank: int, world_size: int, device: torch.device) -> WeightGroup:
    """Meet the others in `store`; blocks until all are there. The prefixes are those under which torch's own
    groups of that name meet, which is what engines make.
    """
    for prefix in (name, f"{name}/", f"{device.type}/"):
        store = dist.PrefixStore(prefix, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = SILENCE
        return WeightGroup(backend=dist.ProcessGroupNCCL(store, rank, world_size, options), device=device)
    backend = dist.ProcessGroupGloo(store, rank, world_size, SILENCE)
    return WeightGroup(backend=backend, device=device)


def meet(body: Mapping[str, Any], *, device: torch.device) -> WeightGroup:
    """The engine's side of `/init_weights_update_group`, for an engine of one rank."""
    try:
        address, port = str(body["master_address"]), int(body["master_port"])
        rank, world_size, name = int(body["rank_offset"]), int(body["world_size"]), str(body["group_name"])
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"master_address, master_port, rank_offset, world_size, group_name: {error!r}"
        ) from None
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=SILENCE)
    return join(store, name=name, rank=rank, world_size=world_size, device=device)


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
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in self._announced(body)}
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
        names, dtypes, shapes = (body.get(key) for key in ("names", "dtypes", "shapes"))
        lists = isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)
        if not lists or not len(names) == len(dtypes) == len(shapes) > 0:
            raise Refusal("names, dtypes, shapes: give three lists of one length")
        found = []
        for name, word, shape in zip(names, dtypes, shapes, strict=True):
            piece = self._parts.get(name)
            dtype = getattr(torch, str(word), None)
            if piece is None:
                raise Refusal(f"names: {name} is not a weight of this model")
            if shape != list(piece.shape):
                raise Refusal(f"shapes: {name} has {shape}, the model {list(piece.shape)}")
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise Refusal(f"dtypes: {name} has {word!r}, weights have a floating-point type")
            found.append((name, shape, dtype))
        return found
