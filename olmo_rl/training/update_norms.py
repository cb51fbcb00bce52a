"""How far an update moves the weights, part by part: measured in a few updates, because it takes a copy of
this rank's shards while the optimizer steps, when activations are gone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from olmo_rl.policy.sharded import PARTS, local_part, sums_by_part

INTERVAL = 10  # updates


def is_measured(update: int) -> bool:
    """Whether the update of this number, from 1, is measured: the first and every tenth."""
    return update == 1 or update % INTERVAL == 0


@torch.no_grad()
def measured_step(
    model: nn.Module, apply: Callable[[], None], *, add: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Step the optimizer with `apply`; return metrics of the change. `add` sums a small tensor over ranks: a
    collective, which every rank reaches because updates are measured by their number.
    """
    named = list(model.named_parameters())
    names, shards = [name for name, _ in named], [local_part(p.detach()) for _, p in named]
    before = [shard.clone() for shard in shards]
    apply()
    weights = torch.stack(torch._foreach_norm(before, dtype=torch.float64)).square()
    changes = torch.stack(
        torch._foreach_norm(torch._foreach_sub(shards, before), dtype=torch.float64)
    ).square()
    sums = add(torch.stack([sums_by_part(changes, names=names), sums_by_part(weights, names=names)]))
    moved, size = sums.cpu()
    found = {"update/norm": float(moved.sum().sqrt())}
    return found | {
        f"update/relative_{part}": float((moved[i] / size[i]).sqrt())
        for i, part in enumerate(PARTS)
        if size[i] > 0
    }
