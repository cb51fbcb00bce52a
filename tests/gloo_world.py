"""How a forked process of a test becomes a rank of a gloo world, and leaves it; what it finds loaded."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from bounds import BOUND_SECONDS
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.planners import compile_kernels
from olmo_rl.types import ExpertLayout, Topology

KERNEL_LOCK = Path(__file__).parents[1] / "outputs" / ".cache" / "kernels.lock"


def load_kernels() -> None:
    """Compile the planner's kernels, or load them from the cache, for all that this process forks. One
    process of the suite compiles, and the others wait for it.
    """
    layout = ExpertLayout(num_experts=4, top_k=2, routed_layers=(1,))
    balance = BalanceConfig(kind=BalanceKind.anneal)
    KERNEL_LOCK.parent.mkdir(parents=True, exist_ok=True)
    with KERNEL_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_kernels(balance, layout=layout, topology=Topology(4, 2))


@contextmanager
def joined(number: int, *, world: int, directory: str) -> Iterator[None]:
    """Rank `number` of `world`, with one thread, meeting the others by a file in `directory`. Ranks leave
    together; one that fails leaves the others to `BOUND_SECONDS`.
    """
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # never used: the group exists already
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store{world}",
        rank=number,
        world_size=world,
        timeout=datetime.timedelta(seconds=BOUND_SECONDS),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of a tensor: where it begins, its shape, and its bytes: a pickled tensor takes long."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    data: bytes


def full(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the whole tensors, of which each rank has shards. A collective of all ranks: one, where
    `full_tensor` would need two for each tensor. What a rank has of a tensor, it keeps.
    """
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    everyone: list[dict[str, Piece]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {name: _piece(tensor) for name, tensor in tensors.items()})
    return {name: _assembled(name, tensor, everyone=everyone) for name, tensor in tensors.items()}


def _piece(tensor: Tensor) -> Piece:
    """This rank's part of a tensor."""
    begin: Sequence[int] = (0,) * tensor.dim()
    local = tensor
    if isinstance(tensor, DTensor):
        _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local()
    flat = local.detach().contiguous().view(-1).view(torch.uint8)
    return Piece(tuple(begin), tuple(local.shape), flat.numpy().tobytes())


def _assembled(name: str, tensor: Tensor, *, everyone: list[dict[str, Piece]]) -> Tensor:
    own = dist.get_rank()
    ranks = tensor.device_mesh.mesh.flatten().tolist() if isinstance(tensor, DTensor) else [own]
    whole = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    for rank in (*(rank for rank in ranks if rank != own), own):
        piece = everyone[rank][name]
        if piece.data:
            part = torch.frombuffer(bytearray(piece.data), dtype=tensor.dtype).view(piece.shape)
            whole[tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.shape, strict=True))] = part
    return whole
