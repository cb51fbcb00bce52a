"""How a forked process of a test becomes a rank of a gloo world, and leaves it; what it finds loaded."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from bounds import BOUND_SECONDS

from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.planners import compile_kernels
from olmo_rl.types import ExpertLayout, Topology


def load_kernels() -> None:
    """Compile the planner's kernels, or load them from the cache, for all that this process forks."""
    layout = ExpertLayout(num_experts=4, top_k=2, routed_layers=(1,))
    balance = BalanceConfig(kind=BalanceKind.anneal)
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
