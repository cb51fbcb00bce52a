"""Work on a model whose weights are shards: gradient sync, clipping over meshes, copies of whole weights.

Dense and expert weights live on different meshes; every element lives on exactly one rank, so that local
shards add up. A model that is not sharded needs none of it and passes through. Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

T = TypeVar("T")
Read = Callable[[str], Tensor]


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part, as a plain tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def places(parameter: Tensor) -> list[Tensor]:
    """int64, ascending: which indices of every dimension this rank's part has. Dimensions are sent one by one
    through the parameter's own placement, so that any sharding is followed; nothing is communicated.
    """
    if not isinstance(parameter, DTensor):
        return [torch.arange(size) for size in parameter.shape]
    mesh, found = parameter.device_mesh, []
    for dim, size in enumerate(parameter.shape):
        own = [_along(placement, dim=dim) for placement in parameter.placements]
        numbers = torch.arange(size, device=parameter.device)
        whole = DTensor.from_local(numbers, mesh, [Replicate()] * mesh.ndim, run_check=False)
        found.append(whole.redistribute(placements=own).to_local().cpu())
    return found


def _along(placement: Placement, *, dim: int) -> Placement:
    """What a placement does to one dimension, as one of a tensor that has no other."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """All modules that FSDP gathers as units."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free what forwards without a backward left gathered: FSDP keeps the root's weights for the backward."""
    for unit in fsdp_modules(model):
        unit.reshard()


def set_gradient_sync(model: nn.Module, *, last: bool) -> None:
    """Call before each backward of an optimizer step: only the step's last pack reduces gradients over ranks.

    A model that is not sharded needs nothing.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


@torch.no_grad()
def clip_grad_norm(model: nn.Module, *, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm` (None: measure only). Returns the
    norm before clipping, a scalar, the same on every rank.

    Dense and expert gradients live on different meshes, but every element lives on exactly one rank: squared
    norms of local shards are added by one all-reduce over the world.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert not any(p.is_replicate() for g in gradients if isinstance(g, DTensor) for p in g.placements)
    shards = [local_part(gradient) for gradient in gradients]
    assert shards, "clip_grad_norm before any backward"
    total = torch.stack(torch._foreach_norm(shards, dtype=torch.float64)).square().sum()
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(shards, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(shards[0].dtype))
    return norm.to(torch.float32)


class FullWeights:
    """Copies of all weights on every rank, by ONE all-gather of one flat buffer.

    Built once from the sharded model. Where each element lies is found by sending element numbers through the
    parameter's own placement, so any sharding is followed, uneven and strided ones too. Costs 4 to 8 bytes an
    element for the addresses: meant for models whose unsharded copy fits a rank.
    """

    def __init__(self, model: nn.Module) -> None:
        for module in fsdp_modules(model):
            module.reshard()  # so that the parameters below are the shards which the optimizer updates
        self._parameters = dict(model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
        if self._sharded:
            self._stride = self._longest_shard()
            self._index = self._addresses()

    def _longest_shard(self) -> int:
        device = next(iter(self._parameters.values())).device
        numel = torch.tensor(sum(local_part(p).numel() for p in self._parameters.values()), device=device)
        dist.all_reduce(numel, op=dist.ReduceOp.MAX)
        return int(numel)

    def _addresses(self) -> Tensor:
        """int [elements of the model]: place of every element in the gathered buffer, parameters in order."""
        held, first = [], 0
        for parameter in self._parameters.values():
            last = first + parameter.numel()
            numbers = torch.arange(first, last, device=parameter.device).view(parameter.shape)
            first = last
            if isinstance(parameter, DTensor):
                whole = [Replicate()] * parameter.device_mesh.ndim
                numbers = DTensor.from_local(numbers, parameter.device_mesh, whole, run_check=False)
                numbers = numbers.redistribute(placements=parameter.placements).to_local()
            held.append(numbers.reshape(-1))
        mine = torch.full((self._stride,), first, device=held[0].device)  # padding: one past the last element
        flat = torch.cat(held)
        mine[: flat.numel()] = flat
        numbers = mine.new_empty(self._stride * dist.get_world_size())
        dist.all_gather_single(numbers, mine)
        addresses = torch.empty(first + 1, dtype=torch.int64, device=mine.device)
        addresses[numbers] = torch.arange(numbers.numel(), device=mine.device)
        return addresses[:-1].to(torch.int32 if numbers.numel() < 2**31 else torch.int64)

    @torch.no_grad()
    def gather(self) -> dict[str, Tensor]:
        """Every parameter by name, full, float32, a copy, on every rank. A collective: all ranks call it."""
        locals_ = [local_part(p).detach() for p in self._parameters.values()]
        if not self._sharded:
            return {
                name: p.to(torch.float32, copy=True)
                for name, p in zip(self._parameters, locals_, strict=True)
            }
        flat = locals_[0].new_zeros(self._stride, dtype=torch.float32)
        used = torch.cat([p.reshape(-1) for p in locals_])
        flat[: used.numel()] = used
        gathered = flat.new_empty(self._stride * dist.get_world_size())
        dist.all_gather_single(gathered, flat)
        full = gathered.index_select(0, self._index).split([s.numel() for s in self._shapes.values()])
        return {
            name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), full, strict=True)
        }


class ParameterReader:
    """Whole parameters on rank 0, one after another: what any rank holds beside the shards is one parameter.

    Built once from the sharded model, which is a collective. Where a part lies is told by its placement, so
    any sharding is followed, uneven and strided ones too.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model)  # so that the parameters below are the shards which the optimizer updates
        self._parameters = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
        self._rank = dist.get_rank() if self._sharded else 0
        if self._sharded:
            device = next(iter(self._parameters.values())).device
            room = torch.tensor([local_part(p).numel() for p in self._parameters.values()], device=device)
            dist.all_reduce(room, op=dist.ReduceOp.MAX)
            self._room = dict(zip(self._parameters, room.tolist(), strict=True))
            mine = {name: [_span(along) for along in places(p)] for name, p in self._parameters.items()}
            self._places: list[dict[str, list[slice | Tensor]]] | None = None
            if self._rank == 0:
                self._places = [{} for _ in range(dist.get_world_size())]
            dist.gather_object(mine, self._places)

    def on_rank_zero(self, work: Callable[[Read], T]) -> T | None:
        """What `work` makes of a function that reads a parameter by name, float32, on rank 0; None on the
        others, which send their parts of what it reads until it ends. A collective.
        """
        if self._rank > 0:
            while (name := self._told(None)) is not None:
                self._collect(name)
            return None
        try:
            return work(self._read)
        finally:
            self._told(None)

    def _read(self, name: str) -> Tensor:
        self._told(name)
        return self._collect(name)

    def _told(self, name: str | None) -> str | None:
        """What rank 0 reads next, None when it has done."""
        if not self._sharded:
            return name
        telling = [name]
        dist.broadcast_object_list(telling, src=0)
        return telling[0]

    @torch.no_grad()
    def _collect(self, name: str) -> Tensor:
        """The whole parameter on rank 0, this rank's padded part of it on the others."""
        parameter = self._parameters[name]
        part = local_part(parameter).detach()
        if not self._sharded:
            return part.to(torch.float32, copy=True)
        sent = part.new_zeros(self._room[name], dtype=torch.float32)
        sent[: part.numel()] = part.reshape(-1)
        if self._places is None:
            dist.gather(sent, dst=0)
            return sent
        parts = [torch.empty_like(sent) for _ in self._places]
        dist.gather(sent, parts, dst=0)
        whole = torch.empty(parameter.shape, dtype=torch.float32)
        for flat, held in zip(parts, self._places, strict=True):
            _put(whole, flat.cpu(), held[name])
        return whole


def _span(along: Tensor) -> slice | Tensor:
    """Ascending indices as a slice, where they have no gaps."""
    if len(along) == 0:
        return slice(0, 0)
    first, last = int(along[0]), int(along[-1])
    return slice(first, last + 1) if last - first + 1 == len(along) else along


def _put(whole: Tensor, flat: Tensor, held: list[slice | Tensor]) -> None:
    """Copy the part that has the indices `held` along every dimension; `flat` may be longer."""
    along = [
        np.arange(size)[places] if isinstance(places, slice) else places.numpy()
        for size, places in zip(whole.shape, held, strict=True)
    ]
    shape = [len(places) for places in along]
    part = flat[: int(np.prod(shape))].view(shape)
    if all(isinstance(places, slice) for places in held):
        whole[tuple(held)] = part
    else:
        whole.numpy()[np.ix_(*along)] = part.numpy()
