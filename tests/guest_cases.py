"""What the ranks of test_guests.py run: prepared steps under random loans and without, and whole runs that
lend, on two and four gloo ranks.

Steps are trained by Lightning as a run does it; their loans are drawn at random, so that they contain whole
experts, small shares and, with four expert-parallel ranks, an expert on two hosts. Hooks of torch watch from
outside: full gradients, Adam's moments, and the rows that reach every slot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bounds import BOUND_SECONDS
from gloo_world import full, joined
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor
from training_cases import MODEL, config_of
from typing_extensions import override

from olmo_rl.collections.datamodule import RolloutDataModule
from olmo_rl.collections.sources import FileSource
from olmo_rl.config import (
    BalanceConfig,
    Config,
    Dtype,
    LossConfig,
    OptimConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recompute,
    StrategyConfig,
    TrainerConfig,
)
from olmo_rl.data.collate import step_of_rank
from olmo_rl.data.files import write_collection
from olmo_rl.data.loans import LayerLoans
from olmo_rl.data.packs import Step
from olmo_rl.planning.lending import WHOLE, expert_loads, under
from olmo_rl.planning.loads import collection_loads, stable_hash
from olmo_rl.planning.packing import plan_step
from olmo_rl.planning.schedule import Forecast
from olmo_rl.policy import titan
from olmo_rl.policy.sharded import local_part, whole_weights
from olmo_rl.running.callbacks import ContractLog
from olmo_rl.running.trainer import build_trainer
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, ExpertLayout, Lending, Loan, Sample, Topology

SKEWED = ExpertLayout(num_experts=8, top_k=2, routed_layers=(1, 2))
UPDATES = 2
BUDGET = 24
GUESTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Two updates of prepared steps. `lent`: under random loans. `fault`: `swapped` exchanges the guests of a
    rank, `misled` the gradients that return to an owner.
    """

    world: int
    ep: int
    experts: int = 8
    lent: bool = True
    recompute: Recompute = Recompute.none
    dtype: Dtype = Dtype.float64
    fault: str = ""


# What every world trains: each cell with loans is compared with the one without.
CELLS = {
    2: (
        Cell(world=2, ep=2, recompute=Recompute.selective),
        Cell(world=2, ep=2, dtype=Dtype.float32),
        Cell(world=2, ep=2, fault="swapped"),
        Cell(world=2, ep=2, fault="misled"),
    ),
    4: (
        Cell(world=4, ep=2, recompute=Recompute.full),
        Cell(world=4, ep=4),
        Cell(world=4, ep=2, experts=2),
    ),
}


def home(cell: Cell) -> Cell:
    """The cell without loans that a cell is compared with."""
    return replace(cell, lent=False, recompute=Recompute.none, fault="")


def model_of(cell: Cell) -> Any:
    return replace(MODEL, num_experts=cell.experts, init_std=0.05, kda_heads=8, kda_head_dim=4)


def samples_of(layout: ExpertLayout, *, update: int, count: int = 24) -> list[Sample]:
    """Samples of 5 to 11 tokens; their values differ everywhere."""
    random = np.random.default_rng(100 + update)
    samples = []
    for index in range(count):
        length = 5 + (5 * index + update) % 7
        scores = random.random((length - 1, len(layout.routed_layers), layout.num_experts))
        samples.append(
            Sample(
                id=f"u{update}-s{index}",
                group=f"u{update}-g{index // 4}",
                tokens=random.integers(0, MODEL.vocab_size, length, dtype=np.int32),
                response_mask=np.arange(length) >= 2,
                behavior_logprobs=random.uniform(-6.5, -4.5, length).astype(np.float32),
                reward=0.0,
                advantage=float(random.normal()),
                routes=scores.argsort(-1)[..., : layout.top_k].astype(np.int16),
                finish_reason="stop",
            )
        )
    return samples


def random_lending(layout: ExpertLayout, *, topology: Topology, seed: int) -> Lending:
    """Loans that fill every guest slot but one of the first rank: whole experts, an expert on two hosts where
    there are more than two ranks, shares from 1 in 65,536 on.
    """
    random = np.random.default_rng(seed)
    owned = topology.experts_per_rank(layout.num_experts)
    layers = []
    for _ in layout.routed_layers:
        left = dict.fromkeys(range(layout.num_experts), 0)
        loans: list[Loan] = []
        for host in random.permutation(topology.ep_degree).tolist():
            foreign = [e for e in range(layout.num_experts) if e // owned != host and left[e] < WHOLE]
            # An expert that another host has a share of comes first: it is on two hosts then.
            chosen = sorted(foreign, key=lambda e: (left[e] == 0, random.random()))[: GUESTS - (host == 0)]
            for slot, expert in enumerate(sorted(chosen)):
                free = WHOLE - left[expert]
                parts = free if random.random() < 0.3 else int(random.integers(1, free + 1))
                loan = Loan(
                    expert=expert, host=host, slot=slot, first=left[expert], below=left[expert] + parts
                )
                left[expert] += parts
                loans.append(loan)
        layers.append(tuple(loans))
    return Lending(guests=GUESTS, layers=tuple(layers))


def step_of(cell: Cell, *, update: int, rank: int) -> Step:
    """One prepared step as `rank` trains it."""
    layout, topology = model_of(cell).expert_layout, Topology(cell.world, cell.ep)
    assert layout is not None
    samples = samples_of(layout, update=update)
    lengths = np.array([len(sample) for sample in samples])
    plan, forecast = plan_step(lengths, budget=BUDGET, topology=topology), None
    if cell.lent:
        lent = under(
            random_lending(layout, topology=topology, seed=update),
            samples=samples,
            experts=expert_loads(samples, layout=layout, topology=topology),
            layout=layout,
            topology=topology,
        )
        plan = replace(plan, lending=lent.lending)
        forecast = Forecast.of(
            plan,
            loads=lent.slots,
            layout=layout,
            topology=topology,
            layer_stride=1,
            slots=lent.table.slots_per_rank,
        )
    step = step_of_rank(samples, plan=plan, rank=rank, layout=layout, topology=topology, budget=BUDGET)
    return replace(step, forecast=forecast)


class Steps(LightningDataModule):
    """Prepared steps, one after another."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps

    @override
    def train_dataloader(self) -> Any:
        return Loader(self.steps)


@dataclass
class Loader:
    steps: Sequence[Step]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)


@dataclass(eq=False)
class Recorder(Callback):
    """This rank's shards of gradients as the optimizer sees them and of moments, norms, rows by slot."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    moments: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    balances: list[Any] = field(default_factory=list)
    received: list[list[int]] = field(default_factory=list)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for block in pl_module.policy.blocks:
            if block.moe_enabled:
                block.moe.routed_experts.inner_experts.register_forward_pre_hook(
                    lambda module, args: self.received.append(args[1].tolist())
                )

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(
            {name: local_part(p.grad).clone() for name, p in pl_module.policy.named_parameters()}
        )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Step, batch_idx: int
    ) -> None:
        state = trainer.optimizers[0].state
        self.moments.append(
            {
                f"{name} {moment}": local_part(state[parameter][moment]).clone()
                for name, parameter in pl_module.policy.named_parameters()
                for moment in ("exp_avg", "exp_avg_sq")
            }
        )
        self.norms.append(pl_module.result.grad_norm)
        self.balances.append(pl_module.result.totals.balance)


def config_for(cell: Cell, *, directory: Path) -> Config:
    config = config_of(
        directory / "unused",
        model=model_of(cell),
        policy=PolicyConfig(recompute=cell.recompute),
        packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=BUDGET),
        # Adam divides by the root of the second moment: eps above rounding keeps it from blowing rounding up.
        optim=OptimConfig(lr=1e-4, warmup_steps=0, max_grad_norm=None, eps=1e-5),
        trainer=TrainerConfig(devices=cell.world, max_steps=1 if cell.fault else UPDATES),
        strategy=StrategyConfig(ep_degree=cell.ep, timeout_seconds=BOUND_SECONDS),
    )
    return replace(config, policy=replace(config.policy, dtype=cell.dtype))


def run_cell(cell: Cell, *, directory: Path) -> dict[str, Any]:
    """Train two prepared steps; what rank 0 gathered, and what this rank received."""
    config = config_for(cell, directory=directory)
    module, recorder = PolicyModule(config, objective=POLICY), Recorder()
    trainer = build_trainer(
        config,
        strategy=ExpertParallelStrategy(config),
        max_steps=config.trainer.max_steps,
        callbacks=[recorder],
        loggers=[],
    )
    rank = dist.get_rank()
    trainer.fit(module, datamodule=Steps([step_of(cell, update=u, rank=rank) for u in range(UPDATES)]))
    return {
        "received": recorder.received,
        "balances": recorder.balances,
        "gradients": recorder.gradients,
        "moments": recorder.moments,
        "norms": recorder.norms,
    }


def faulty(fault: str) -> Callable[..., list[Tensor]]:
    """`titan.with_guests` with a fault."""
    sound = titan.with_guests

    def swapped(weights: Sequence[Tensor], **given: Any) -> list[Tensor]:
        joined = sound(weights, **given)
        own = len(weights[0])
        return [torch.cat([w[:own], w[own:].flip(0)]) for w in joined]

    def misled(weights: Sequence[Tensor], *, loans: LayerLoans, ep_mesh: Any) -> list[Tensor]:
        other = replace(loans, leaving=(loans.leaving + 1) % len(weights[0]))
        joined, lost = (
            sound(weights, loans=loans, ep_mesh=ep_mesh),
            sound(weights, loans=other, ep_mesh=ep_mesh),
        )
        return [w.detach() + v - v.detach() for w, v in zip(joined, lost, strict=True)]

    return {"swapped": swapped, "misled": misled}[fault]


# Runs of the recipe


def skewed_samples(*, prefix: str, count: int, skew: float) -> list[Sample]:
    """Samples whose tokens prefer the first experts: logits fall by `skew` an expert, and Gumbel noise."""
    random = np.random.default_rng(stable_hash(prefix))
    samples = []
    for index in range(count):
        length = 30 + 7 * index % 13
        logits = -skew * np.arange(8) + random.gumbel(size=(length - 1, len(SKEWED.routed_layers), 8))
        samples.append(
            Sample(
                id=f"{prefix}{index}",
                group=f"{prefix}g{index // 4}",
                tokens=random.integers(0, MODEL.vocab_size, length, dtype=np.int32),
                response_mask=np.arange(length) >= 2,
                behavior_logprobs=random.uniform(-6.5, -4.5, length).astype(np.float32),
                reward=float(random.random()),
                routes=logits.argsort(-1)[..., -2:].astype(np.int16),
                finish_reason="stop",
            )
        )
    return samples


def write_inputs(place: str) -> None:
    """One file of one update for each world."""
    for world, skew in ((2, 0.12), (4, 0.3)):
        samples = skewed_samples(prefix=f"w{world}-", count=24, skew=skew)
        path = Path(place) / f"skewed{world}" / "files" / "collection-00000.parquet"
        write_collection(Collection(samples=samples, layout=SKEWED, source="test"), path)


def run_skewed(world: int, *, directory: Path) -> dict[str, Any]:
    """One update over skewed routes, one replica, with a frozen reference: the log and what is published."""
    config = config_of(
        directory / f"skewed{world}",
        model=replace(MODEL, num_experts=8, init_std=0.05),
        packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=96, pad_to_multiple_of=8),
        balance=BalanceConfig(guests=1),
        loss=LossConfig(kl_coef=0.1),
        trainer=TrainerConfig(devices=world, max_steps=1),
        strategy=StrategyConfig(ep_degree=world, timeout_seconds=BOUND_SECONDS),
    )
    published: list[bool] = []

    def compare(decoder: Any, version: int) -> dict[str, float]:
        weights, held = whole_weights(decoder), full(dict(decoder.named_parameters()))
        published.append(all(torch.equal(weights[name], held[name]) for name in held))
        return {}

    module = PolicyModule(config, objective=POLICY)
    module.publish = compare
    trainer = build_trainer(
        config,
        strategy=ExpertParallelStrategy(config),
        max_steps=1,
        callbacks=[ContractLog(config.run_dir)],
        loggers=[],
    )
    trainer.fit(module, datamodule=RolloutDataModule(config, source=FileSource(config)))
    log = Path(config.run_dir) / f"training_contract_rank{dist.get_rank()}.jsonl"
    events = {line["event"]: line for line in map(json.loads, log.read_text().splitlines())}
    assert module.result is not None
    samples = module.result.step.samples
    home_loads = collection_loads(samples, layout=SKEWED, topology=Topology(world, world)).sum(axis=0)
    return {
        "events": events,
        "published": published,
        "totals": module.result.totals.sums,
        "home": float((home_loads.max(axis=0) / home_loads.mean(axis=0)).min()),
    }


def run_rank(number: int, world: int, directory: str) -> None:
    with joined(number, world=world, directory=directory):
        results: dict[Any, Any] = {}
        for cell in dict.fromkeys([*map(home, CELLS[world]), *CELLS[world]]):
            sound = titan.with_guests
            titan.with_guests = faulty(cell.fault) if cell.fault else sound
            try:
                results[cell] = run_cell(cell, directory=Path(directory))
            finally:
                titan.with_guests = sound
        results["skewed"] = run_skewed(world, directory=Path(directory))
        torch.save(results, Path(directory) / f"world{world}-rank{number}.pt")
