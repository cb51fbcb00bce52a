"""How a forked process of a test becomes a rank of a gloo world, and leaves it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def joined(number: int, *, world: int, directory: str, seconds: float) -> Iterator[None]:
    """Rank `number` of `world`, with one thread, meeting the others by a file in `directory`. No collective
    may take longer than `seconds`. Ranks leave together; one that fails leaves the others to that limit.
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
        timeout=datetime.timedelta(seconds=seconds),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()
