"""Operations on sharded models: gradient synchronisation, clipping over meshes, whole weights and own parts.

Dense and expert weights lie on different meshes; every element lies on exactly one rank, so that sums over
local shards are sums over the model. All functions accept models that are not sharded. Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

T = TypeVar("T")
PARTS = ("dense", "experts", "router")  # of a decoder, whose norms are reported one by one
Read = Callable[[str], Tensor]
_MEETING = ""  # announced in place of a parameter's name


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part as a plain tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def places(parameter: Tensor) -> list[Tensor]:
    """Return the indices of this rank's part along every dimension, int64, ascending. They follow from the
    parameter's own placement, whatever it is; nothing is communicated.
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
    """Return the effect of a placement on one dimension, as the placement of a 1-D tensor."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def own_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of `whole`, which has the shape of `parameter`; a view where it can be."""
    for dim, along in enumerate(places(parameter)):
        if len(along) == 0:
            whole = whole.narrow(dim, 0, 0)
        elif int(along[-1] - along[0]) + 1 == len(along):
            whole = whole.narrow(dim, int(along[0]), len(along))
        else:
            whole = whole.index_select(dim, along)
    return whole


@torch.no_grad()
def draw_parameter(parameter: Tensor, values: Callable[[Tensor], object]) -> None:
    """Set a parameter to what `values` writes into an empty float32 tensor of its whole shape on the CPU, of
    which this rank keeps its part: equal on every topology. Needs memory for one whole parameter.
    """
    if parameter.is_meta:
        return
    if (
        parameter.dtype is torch.float32
        and parameter.device.type == "cpu"
        and local_part(parameter) is parameter
    ):
        values(parameter)
        return
    whole = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    values(whole)
    local_part(parameter).copy_(own_part(parameter, whole))


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """List the modules that FSDP gathers as units."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free weights that a forward without a backward left gathered: FSDP keeps those of the root."""
    for unit in fsdp_modules(model):
        unit.reshard()


def set_gradient_sync(model: nn.Module, *, last: bool) -> None:
    """Call before each backward of an optimizer step: only the step's last pack reduces gradients over ranks.

    A model that is not sharded needs nothing.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def clip_grad_norm(model: nn.Module, *, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm` (None: measure only). Returns the
    norm before clipping, a scalar, the same on every rank.
    """
    return clip_grad_norms(model, max_norm=max_norm)[0]


@torch.no_grad()
def clip_grad_norms(model: nn.Module, *, max_norm: float | None) -> Tensor:
    """As `clip_grad_norm`; returns float32 [1 + PARTS]: the joint norm before clipping, then that of each
    part.

    Dense and expert gradients live on different meshes, but every element lives on exactly one rank: squared
    norms of local shards are added by one all-reduce over the world.
    """
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    assert not any(p.is_replicate() for _, g in named if isinstance(g, DTensor) for p in g.placements)
    shards = [local_part(gradient) for _, gradient in named]
    assert shards, "clip_grad_norm before any backward"
    squares = torch.stack(torch._foreach_norm(shards, dtype=torch.float64)).square()
    sums = torch.cat([squares.sum()[None], sums_by_part(squares, names=[name for name, _ in named])])
    if any(isinstance(gradient, DTensor) for _, gradient in named):
        dist.all_reduce(sums)
    norms = sums.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(shards, torch.clamp(max_norm / (norms[0] + 1e-6), max=1.0).to(shards[0].dtype))
    return norms.to(torch.float32)


def part_of(name: str) -> int:
    """Return the index in `PARTS` of the part that a decoder's parameter belongs to."""
    if ".routed_experts." in name:
        return PARTS.index("experts")
    return PARTS.index("router" if ".router." in name else "dense")


def sums_by_part(values: Tensor, *, names: Sequence[str]) -> Tensor:
    """[N] values of parameters -> [PARTS]: their sum in each part."""
    parts = torch.tensor([part_of(name) for name in names], device=values.device)
    return values.new_zeros(len(PARTS)).index_add(0, parts, values)


@torch.no_grad()
def whole(parameter: Tensor) -> Tensor:
    """Return a copy of a whole parameter, float32. A collective of all ranks where it is sharded."""
    parameter = parameter.detach()
    if not isinstance(parameter, DTensor):
        return parameter.to(torch.float32, copy=True)
    # One mesh dimension at a time, the outermost sharding last: several at once warn on every rank.
    placements = list(parameter.placements)
    strided = [isinstance(placement, _StridedShard) for placement in placements]
    for dim in sorted(range(len(placements)), key=lambda dim: (not strided[dim], -dim)):
        placements[dim] = Replicate()
        parameter = parameter.redistribute(placements=placements)
    return parameter.to_local().to(torch.float32)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters by name, whole, float32, on every rank: for models whose unsharded copy
    fits a rank. A collective of all ranks.
    """
    reshard(model)  # so that the parameters below are the shards that the optimizer updates
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


class ParameterReader:
    """Whole parameters for rank 0, one at a time: beside its shards, a rank contains one parameter.

    `meet` returns once the future of every rank is done, as `ExpertParallelStrategy.meet` does.
    """

    def __init__(self, model: nn.Module, *, meet: Callable[[Future[Any] | None], None]) -> None:
        reshard(model)  # so that the parameters below are the shards that the optimizer updates
        self._parameters = dict(model.named_parameters())
        self._meet = meet
        self.shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._sharded = any(isinstance(p, DTensor) for p in self._parameters.values())

    def on_rank_zero(self, work: Callable[[Read], T]) -> T | None:
        """Call `work` on rank 0 with a function that reads a whole parameter by name, float32, and return its
        result; None on the other ranks, which take part in each read and each `wait` until `work` ends. A
        collective.
        """
        if self._sharded and dist.get_rank() > 0:
            while (name := self._announce(None)) is not None:
                if name == _MEETING:
                    self._meet(None)
                else:
                    whole(self._parameters[name])
            return None
        try:
            return work(self._read)
        finally:
            self._announce(None)

    def wait(self, future: Future[T]) -> T:
        """On rank 0, inside `work`: the result of something outside this job, for which no rank waits inside
        a collective.
        """
        self._announce(_MEETING)
        self._meet(future)
        return future.result()

    def _read(self, name: str) -> Tensor:
        self._announce(name)
        return whole(self._parameters[name])

    def _announce(self, name: str | None) -> str | None:
        """Return the name that rank 0 reads next, or that it waits; None where it reads no more."""
        if not self._sharded:
            return name
        message = [name]
        dist.broadcast_object_list(message, src=0)
        return message[0]
