"""The optimizer against oracles written here: groups, AdamW, Muon, schedules, shards."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import optimizer_cases
import pytest
import torch
from model_cases import tiny_config
from programs import run_program
from torch import Tensor
from training_cases import config_of, files, fit, write_files

from olmo_rl.config import ModelConfig, OptimConfig, OptimizerKind, ScheduleKind, TrainerConfig
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.training.optimizer import (
    ITERATIONS,
    QUINTIC,
    build_optimizer,
    muon_direction,
    orthogonalized,
    parameter_groups,
    rate_factor,
)

UNDECAYED = (
    "norm.weight",
    "bias",
    "router.gate.weight",
    "A_log",
    "dt_bias",
    "tok_embeddings.weight",
    "lm_head.weight",
)
BY_ADAMW = (*UNDECAYED, "conv.weight")


def decoder_of(model: ModelConfig) -> HybridDecoder:
    decoder = HybridDecoder(model, attention="reference")
    decoder.init_weights(0)
    return decoder


# Groups


def test_norms_biases_router_gates_and_decay_parameters_are_never_decayed() -> None:
    decoder = decoder_of(tiny_config())
    names = {id(p): name for name, p in decoder.named_parameters()}
    groups = parameter_groups(decoder, config=OptimConfig(weight_decay=0.1))
    decayed = {names[id(p)] for g in groups if g["weight_decay"] > 0 for p in g["params"]}
    spared = {names[id(p)] for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    assert all(g["weight_decay"] in (0.0, 0.1) for g in groups)
    assert spared == {name for name in names.values() if name.endswith(UNDECAYED)}
    assert decayed | spared == set(names.values())
    assert any(".routed_experts." in name for name in decayed)


def test_embeddings_and_head_are_decayed_by_a_key() -> None:
    decoder = decoder_of(tiny_config())
    config = OptimConfig(weight_decay=0.1, decay_embeddings=True)
    decayed = {
        id(p) for g in parameter_groups(decoder, config=config) if g["weight_decay"] for p in g["params"]
    }
    assert id(decoder.tok_embeddings.weight) in decayed
    assert id(decoder.lm_head.weight) in decayed


def test_without_decay_there_are_two_groups_dense_weights_then_experts() -> None:
    decoder = decoder_of(tiny_config())
    names = {id(p): name for name, p in decoder.named_parameters()}
    dense, experts = [
        [names[id(p)] for p in group["params"]] for group in parameter_groups(decoder, config=OptimConfig())
    ]
    assert experts == [name for name in names.values() if ".routed_experts." in name]
    assert sorted(dense + experts) == sorted(names.values())


def test_a_group_never_mixes_dense_weights_with_experts() -> None:
    decoder = decoder_of(tiny_config())
    names = {id(p): name for name, p in decoder.named_parameters()}
    config = OptimConfig(kind=OptimizerKind.muon, weight_decay=0.1, decay_embeddings=True)
    for group in parameter_groups(decoder, config=config):
        assert len({".routed_experts." in names[id(p)] for p in group["params"]}) == 1


# One update of the trainer, weight by weight


def adamw_oracle(
    weight: Tensor, gradients: list[Tensor], *, config: OptimConfig, rates: list[float], decay: float
) -> Tensor:
    """Loshchilov and Hutter 2019, algorithm 2, in float64, element by element."""
    w = weight.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = gradient.double()
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        first, second = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
        w = w - rate * decay * w
        w = w - rate * first / (second.sqrt() + config.eps)
    return w


def muon_oracle(
    weight: Tensor, gradients: list[Tensor], *, config: OptimConfig, rates: list[float], decay: float
) -> Tensor:
    """Jordan 2024 with Nesterov momentum and the scale of Liu et al. 2025, in float64, on one matrix: the
    iterations act on singular values alone, so that each is the polynomial applied to them.
    """
    w, buffer = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    a, b, c = QUINTIC
    for gradient, rate in zip(gradients, rates, strict=True):
        g = gradient.double()
        buffer = config.muon_momentum * buffer + (1 - config.muon_momentum) * g
        u, s, vh = torch.linalg.svd(
            (1 - config.muon_momentum) * g + config.muon_momentum * buffer, full_matrices=False
        )
        s = s / s.square().sum().sqrt()
        for _ in range(ITERATIONS):
            s = a * s + b * s**3 + c * s**5
        w = w - rate * decay * w
        w = w - rate * 0.2 * math.sqrt(max(w.shape)) * (u * s) @ vh
    return w


OPTIMIZERS = {
    "decayed": OptimConfig(
        lr=3e-3, warmup_steps=2, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3, max_grad_norm=None
    ),
    "cosine": OptimConfig(
        lr=3e-3, warmup_steps=1, beta1=0.7, beta2=0.9, schedule=ScheduleKind.cosine, max_grad_norm=None
    ),
    "muon": OptimConfig(
        kind=OptimizerKind.muon,
        lr=3e-3,
        warmup_steps=0,
        eps=1e-5,
        weight_decay=0.2,
        muon_momentum=0.9,
        schedule=ScheduleKind.linear,
        min_lr_ratio=0.1,
        max_grad_norm=None,
    ),
}
RATES = {  # of three updates, by hand
    "decayed": [1.5e-3, 3e-3, 3e-3],
    "cosine": [3e-3, 3e-3, 1.5e-3],
    "muon": [3e-3, 3e-3 * 0.7, 3e-3 * 0.4],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_updates_of_the_trainer_move_every_weight_as_the_oracle_does(tmp_path: Path, name: str) -> None:
    config = OPTIMIZERS[name]
    write_files(tmp_path / "run", files(3))
    run = fit(config_of(tmp_path / "run", optim=config, trainer=TrainerConfig(max_steps=3)))
    initial, gradients = run.recorder.weights[0], run.recorder.gradients
    assert [row["optim/lr"] for row in run.rows] == pytest.approx(RATES[name], rel=1e-6)
    moved = 0
    for parameter, after in run.weights.items():
        found = [gradient[parameter] for gradient in gradients]
        decay = 0.0 if parameter.endswith(UNDECAYED) else config.weight_decay
        muon = config.kind is OptimizerKind.muon and not parameter.endswith(BY_ADAMW)
        oracle = muon_oracle if muon else adamw_oracle
        parts = [(initial[parameter], found, after)]
        if muon and after.ndim == 3:
            parts = [(initial[parameter][e], [g[e] for g in found], after[e]) for e in range(after.shape[0])]
        for before, steps, got in parts:
            want = oracle(before, steps, config=config, rates=RATES[name], decay=decay)
            # Both in units of one update; the oracle's error is that of float32 sums.
            assert float((got.double() - want).abs().max()) <= 2e-3 * config.lr, parameter
            moved += int(float((got.double() - before.double()).abs().max()) > 0.1 * config.lr)
    assert moved >= len(run.weights)


# Muon


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4), (1, 8), (5, 7, 3), (2, 3, 9)])
def test_directions_are_semi_orthogonal_matrix_by_matrix(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = orthogonalized(matrices)
    values = torch.linalg.svdvals(got)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.25
    if len(shape) == 3:
        for one, whole in zip(matrices, got, strict=True):
            torch.testing.assert_close(orthogonalized(one), whole, rtol=0, atol=1e-6)


def test_a_direction_is_scaled_by_the_sides_of_its_matrix_however_many_experts_there_are() -> None:
    experts = torch.randn(9, 4, 2, generator=torch.Generator().manual_seed(3))
    got = muon_direction(experts)
    torch.testing.assert_close(got, 0.2 * 2.0 * orthogonalized(experts), rtol=1e-6, atol=1e-7)


def test_zero_gradients_give_zero_directions() -> None:
    assert torch.equal(orthogonalized(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_directions_equal_those_of_torch_within_its_bfloat16() -> None:
    weight = torch.nn.Parameter(torch.randn(24, 16, generator=torch.Generator().manual_seed(1)))
    other = torch.nn.Parameter(weight.detach().clone())
    gradient = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
    weight.grad, other.grad = gradient.clone(), gradient.clone()
    model = torch.nn.Module()
    model.register_parameter("matrix", weight)
    config = OptimConfig(kind=OptimizerKind.muon, lr=1.0, weight_decay=0.1)
    before = weight.detach().clone()
    build_optimizer(model, config=config).step()
    torch.optim.Muon([other], lr=1.0, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    with torch.no_grad():
        step = float((weight - before).norm())
        assert float((weight - other).norm()) < 0.02 * step


# Schedules, by hand


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (OptimConfig(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        (OptimConfig(warmup_steps=0), [1] * 8),
        (
            OptimConfig(warmup_steps=0, schedule=ScheduleKind.linear, min_lr_ratio=0.2),
            [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2],
        ),
        (
            OptimConfig(warmup_steps=2, schedule=ScheduleKind.cosine),
            [0.5, 1, 1, (1 + math.cos(math.pi / 6)) / 2, (1 + math.cos(math.pi / 3)) / 2, 0.5],
        ),
        (
            OptimConfig(warmup_steps=2, schedule=ScheduleKind.wsd, decay_fraction=0.5, min_lr_ratio=0.5),
            [0.5, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5],
        ),
    ],
)
def test_schedules_by_hand(config: OptimConfig, want: list[float]) -> None:
    factor = rate_factor(config, total=8)
    assert [factor(step) for step in range(len(want))] == pytest.approx(want)


def test_a_decaying_schedule_ends_at_its_minimum_however_long_the_warm_up() -> None:
    for kind in (ScheduleKind.linear, ScheduleKind.cosine, ScheduleKind.wsd):
        factor = rate_factor(OptimConfig(warmup_steps=20, schedule=kind, min_lr_ratio=0.1), total=8)
        assert factor(7) == pytest.approx(0.4)
        assert factor(100) == pytest.approx(0.1)


def test_tied_embeddings_stand_in_one_group_once() -> None:
    decoder = decoder_of(replace(tiny_config(), tie_embeddings=True))
    grouped = [
        id(p) for g in parameter_groups(decoder, config=OptimConfig(weight_decay=0.1)) for p in g["params"]
    ]
    assert len(grouped) == len(set(grouped)) == len(list(decoder.parameters()))


# Shards


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, dict[str, Tensor]]]:
    directory = tmp_path_factory.mktemp("optimizer")
    run_program(directory, *optimizer_cases.STEPS)
    return {
        (world, ep): torch.load(directory / f"optimizer-world{world}-ep{ep}.pt")
        for world, ep in optimizer_cases.TOPOLOGIES
    }


@pytest.mark.parametrize("name", optimizer_cases.OPTIMIZERS)
def test_two_updates_of_sharded_weights_equal_those_of_one_process(
    worlds: dict[tuple[int, int], dict[str, dict[str, Tensor]]], name: str
) -> None:
    want = worlds[1, 1][name]
    for topology, results in worlds.items():
        got = results[name]
        assert got.keys() == want.keys()
        for part, value in want.items():
            # AdamW is elementwise, up to the last bit, which vector instructions round differently at the end
            # of a row. Muon sums over a matrix, in an order that may depend on how many are multiplied at
            # once: its bound is in units of the learning rate.
            absolute = 1e-9 if name == "adamw" else 1e-5 * optimizer_cases.BASE.lr
            error = (got[part] - value).abs() - 3e-7 * value.abs()
            assert float(error.max()) <= absolute, (topology, part)
    assert any(key.endswith("momentum_buffer") for key in want) == (name == "muon")
