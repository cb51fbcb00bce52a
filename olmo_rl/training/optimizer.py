"""The optimizer: groups of parameters, AdamW or Muon for each, and the schedule of the learning rate.

Decay is decoupled: weights shrink by the factor 1 - lr x weight_decay. Norms, biases, router gates and the
decay parameters of KDA are never decayed, embeddings and the output head only with `optim.decay_embeddings`.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by the
nearest semi-orthogonal matrix, found by Newton-Schulz iterations. It is defined for whole matrices: parts of
a sharded matrix are gathered, and each expert is a matrix of its own. AdamW updates everything that is not a
matrix, and embeddings, head, router gates and the taps of short convolutions. Updates are scaled to the root
mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate serves both.
`torch.optim.Muon` takes only two-dimensional parameters that are not sharded, and iterates in bfloat16, in
which topologies differ by 1e-2: here the iterations run in the dtype of the
weights, float32 or float64.

Shapes: E experts of a rank, M x N one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw
from typing_extensions import override

from olmo_rl.config import OptimConfig, OptimizerKind, ScheduleKind
from olmo_rl.types import Refusal

# Newton-Schulz coefficients of the quintic a x + b x^3 + c x^5, chosen by Jordan for a steep slope at zero.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# Root mean square of an AdamW update in units of the learning rate (Liu et al. 2025, section 2.2).
ADAMW_RMS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """The update rule of one parameter. Equal roles form one group."""

    experts: bool  # on the expert-parallel mesh: a fused update cannot mix shards of two meshes
    decayed: bool
    muon: bool


def role_of(name: str, parameter: Tensor, *, config: OptimConfig) -> Role:
    """The role of a decoder's parameter."""
    embedding = name.startswith(("tok_embeddings.", "lm_head."))
    matrix = parameter.ndim >= 2 and not name.endswith("router.gate.weight")
    experts, conv = ".routed_experts." in name, name.endswith("conv.weight")
    return Role(
        experts=experts,
        decayed=config.weight_decay > 0 and matrix and (config.decay_embeddings or not embedding),
        muon=config.kind is OptimizerKind.muon and matrix and not embedding and not conv,
    )


def parameter_groups(decoder: nn.Module, *, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of parameters with `weight_decay` and `muon`: dense weights first, then experts. The groups are
    the same in every topology, so that a run can resume in another one.
    """
    groups: dict[Role, list[nn.Parameter]] = {}
    for name, parameter in decoder.named_parameters():
        groups.setdefault(role_of(name, parameter, config=config), []).append(parameter)
    order = sorted(groups, key=lambda role: (role.experts, not role.decayed, not role.muon))
    return [
        {
            "params": groups[role],
            "weight_decay": config.weight_decay if role.decayed else 0.0,
            "muon": role.muon,
        }
        for role in order
    ]


def build_optimizer(decoder: nn.Module, *, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that `optim.kind` names, with learning rate `optim.lr`."""
    groups = parameter_groups(decoder, config=config)
    betas = (config.beta1, config.beta2)
    if config.kind is OptimizerKind.muon:
        return MuonAdamW(groups, lr=config.lr, betas=betas, eps=config.eps, momentum=config.muon_momentum)
    for group in groups:
        del group["muon"]
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def rate_factor(config: OptimConfig, *, total: int) -> Callable[[int], float]:
    """Factor on the learning rate of update `step` (from 0) in a run of `total` updates.

    Linear warm-up over `warmup_steps`: (step + 1) / warmup_steps. Afterwards 1 (`constant`); or, with t the
    share of the remaining updates that are done and m `optim.min_lr_ratio`: 1 - (1 - m) t (`linear`);
    m + (1 - m)(1 + cos(pi t)) / 2 (`cosine`); 1 until the last `optim.decay_fraction` of all updates, then a
    straight line to m (`wsd`). The update after the last one would have the factor m.
    """
    warmup, kind, floor = config.warmup_steps, config.schedule, config.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if kind is ScheduleKind.constant:
            return 1.0
        start = warmup
        if kind is ScheduleKind.wsd:
            start = max(warmup, total - round(total * config.decay_fraction))
        done = min(1.0, max(0.0, (step - start) / max(1, total - start)))
        if kind is ScheduleKind.cosine:
            return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
        return 1 - (1 - floor) * done

    return factor


def moments_of(config: OptimConfig) -> dict[str, float | str]:
    """Return the keys of `optim` on which the optimizer's state depends, with their values."""
    values: dict[str, float | str] = {
        "kind": config.kind.value,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
    }
    return values | ({"muon_momentum": config.muon_momentum} if config.kind is OptimizerKind.muon else {})


def check_moments(config: OptimConfig, *, saved: Mapping[str, float | str]) -> None:
    """Refuse to continue averages with other decays than they were started with, key by key. `saved`: those
    of the checkpoint; a checkpoint from before they were saved has none.
    """
    ours = moments_of(config)
    reasons = [
        f"optim.{name}={ours[name]}: the checkpoint was trained with optim.{name}={value}, which its "
        "averages contain: give that value, or start a new run with init_from"
        for name, value in saved.items()
        if name in ours and ours[name] != value
    ]
    if reasons:
        raise Refusal(reasons)


def resume_rates(
    optimizer: torch.optim.Optimizer, *, config: OptimConfig, total: int, step: int
) -> dict[str, list[Any]]:
    """Set the learning rate of the update after `step` in every group, and return the entries of the
    scheduler's state for these groups: rate and schedule of the configuration act on a resumed run.
    """
    rate = config.lr * rate_factor(config, total=total)(step)
    for group in optimizer.param_groups:
        group["initial_lr"], group["lr"] = config.lr, rate
    count = len(optimizer.param_groups)
    return {"base_lrs": [config.lr] * count, "_last_lr": [rate] * count, "lr_lambdas": [None] * count}


def orthogonalized(matrices: Tensor) -> Tensor:
    """[..., M, N] -> the same shape: about U V^T of each matrix U S V^T, with singular values between
    0.7 and 1.2. Zero stays zero.
    """
    a, b, c = QUINTIC
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def muon_direction(update: Tensor) -> Tensor:
    """[M, N] or [E, M, N], sharded or not -> the scaled semi-orthogonal direction, placed like `update`.

    A collective of all ranks that hold parts of a matrix; nothing is sent where ranks have whole matrices.
    """
    scale = ADAMW_RMS * math.sqrt(max(update.shape[-2:]))
    if not isinstance(update, DTensor):
        return orthogonalized(update) * scale
    stacked = update.ndim - 2  # leading dimensions number matrices and may stay sharded
    whole = [p if p.is_replicate() or p.dim < stacked else Replicate() for p in update.placements]  # type: ignore[attr-defined]
    gathered = update.redistribute(placements=whole)
    direction = DTensor.from_local(
        orthogonalized(gathered.to_local()) * scale,
        update.device_mesh,
        whole,
        run_check=False,
        shape=update.shape,
        stride=update.stride(),
    )
    return direction.redistribute(placements=update.placements)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the groups with `muon`, fused AdamW for the others. One optimizer, because Lightning counts
    the steps of each as updates.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "momentum": momentum, "muon": False},
        )

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. A collective where matrices are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["muon"]:
                for parameter in parameters:
                    self._muon(parameter, group=group)
            else:
                self._adamw(parameters, group=group)
        return loss

    def _muon(self, parameter: Tensor, *, group: dict[str, Any]) -> None:
        """Nesterov momentum, then the decayed weight moves along its direction."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        direction = muon_direction(gradient.lerp(buffer, group["momentum"]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(direction, alpha=group["lr"])

    def _adamw(self, parameters: Sequence[Tensor], *, group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            list(parameters),
            [cast(Tensor, parameter.grad) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
