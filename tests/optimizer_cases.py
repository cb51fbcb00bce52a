"""Two updates of sharded models with given gradients: what the optimizer alone makes of a topology."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from gloo_world import joined
from model_cases import tiny_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from olmo_rl.config import OptimConfig, OptimizerKind, Recompute, ScheduleKind
from olmo_rl.policy import titan
from olmo_rl.policy.hybrid import HybridDecoder, named_generator
from olmo_rl.policy.sharded import places
from olmo_rl.training.optimizer import build_optimizer, rate_factor
from olmo_rl.types import Topology

TOPOLOGIES = ((1, 1), (2, 2), (4, 2), (4, 1))
STEPS = tuple(f"optimizer_cases:run_rank*{world}" for world in (1, 2, 4))
UPDATES = 2
# Six experts: (4, 2) shards three over the two ranks that hold them, (4, 1) all six over four ranks.
MODEL = replace(tiny_config(), num_experts=6)
BASE = OptimConfig(lr=1e-2, warmup_steps=2, weight_decay=0.3, schedule=ScheduleKind.cosine)
OPTIMIZERS = {"adamw": BASE, "muon": replace(BASE, kind=OptimizerKind.muon)}


def gradient_of(name: str, parameter: Tensor, *, update: int) -> Tensor:
    """A gradient of the parameter's shape, drawn by its name."""
    return torch.randn(parameter.shape, generator=named_generator(f"{name}/{update}", 0))


def sharded_like(whole: Tensor, *, parameter: Tensor) -> Tensor:
    """This rank's part of `whole`, placed as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return whole
    part = whole
    for dim, held in enumerate(places(parameter)):
        part = part.index_select(dim, held)
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def updated(config: OptimConfig, *, world: int, ep: int) -> dict[str, Tensor]:
    """All weights and optimizer state, whole, after two updates."""
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.init_weights(0)
    if world > 1:
        dims = titan.build_parallel_dims(Topology(world, ep), device_type="cpu")
        titan.parallelize(decoder, dims=dims, dtype=torch.float32, recompute=Recompute.none)
    optimizer = build_optimizer(decoder, config=config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor(config, total=4))
    for update in range(UPDATES):
        for name, parameter in decoder.named_parameters():
            whole = gradient_of(name, parameter, update=update)
            parameter.grad = sharded_like(whole, parameter=parameter)
        optimizer.step()
        scheduler.step()
    found = {}
    for name, parameter in decoder.named_parameters():
        found[name] = parameter.detach()
        state = optimizer.state[parameter].items()
        found |= {f"{name} {key}": value for key, value in state if value.shape == parameter.shape}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in found.items()
    }


def run_rank(number: int, world: int, directory: str) -> None:
    """Leave `optimizer-world{n}-ep{n}.pt` of rank 0."""
    with joined(number, world=world, directory=directory):
        titan.prepare("cpu")
        for ranks, ep in TOPOLOGIES:
            if ranks == world:
                results = {name: updated(config, world=world, ep=ep) for name, config in OPTIMIZERS.items()}
                if number == 0:
                    torch.save(results, Path(directory) / f"optimizer-world{world}-ep{ep}.pt")
