"""How a forked process of a test becomes a rank of a gloo world, and leaves it; what it finds loaded."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


def full(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the whole tensors, of which each rank has shards. A collective of all ranks: one, where
    `full_tensor` would need two for each tensor. What a rank has of a tensor, it keeps.
    """
    mine = {name: _piece(tensor) for name, tensor in tensors.items()}
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return {name: local for name, (_, local) in mine.items()}
    everyone: list[dict[str, tuple[tuple[int, ...], Tensor]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: _assembled(name, tensor, everyone=everyone) for name, tensor in tensors.items()}


def _piece(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """This rank's part of a tensor, and where it begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach().clone()
    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(begin), tensor.to_local().detach().clone()


def _assembled(
    name: str, tensor: Tensor, *, everyone: list[dict[str, tuple[tuple[int, ...], Tensor]]]
) -> Tensor:
    own = dist.get_rank()
    ranks = tensor.device_mesh.mesh.flatten().tolist() if isinstance(tensor, DTensor) else [own]
    whole = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    for rank in (*(rank for rank in ranks if rank != own), own):
        begin, part = everyone[rank][name]
        whole[tuple(slice(b, b + n) for b, n in zip(begin, part.shape, strict=True))] = part
    return whole
