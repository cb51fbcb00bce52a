"""Shared by the trainer's tests: a tiny hybrid, collections whose every value is distinct, and runs of the
real trainer over recorded files.

A run is put together as recipes/train.py does it: files written by `write_collection` or the local engine,
the sources, modules and trainer of olmo_rl.training, one process under `run_ranks`. Nothing of ours is
replaced; what tests look at comes from Lightning's hooks, the contract log and metrics.csv.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from olmo_rl.chosen_checkpoint import resolve_checkpoint
from olmo_rl.collections.datamodule import RolloutDataModule
from olmo_rl.collections.generation import build_local
from olmo_rl.collections.sources import FileSource, GeneratingSource, RolloutSource
from olmo_rl.config import (
    BatchConfig,
    CallbacksConfig,
    Config,
    LayerType,
    ModelConfig,
    OptimConfig,
    PackingConfig,
    PackingKind,
    RolloutsConfig,
    Source,
    TaskConfig,
    TrainerConfig,
)
from olmo_rl.data.files import write_collection
from olmo_rl.data.packs import Step
from olmo_rl.refusals import refusals
from olmo_rl.running.callbacks import ContractLog
from olmo_rl.running.checkpoints import Checkpoints
from olmo_rl.running.loggers import build_loggers
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.ranks import run_ranks
from olmo_rl.running.trainer import build_trainer
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, Sample

MODEL = ModelConfig(
    dim=16,
    layer_types=[LayerType.full_attention, LayerType.linear_attention, LayerType.full_attention],
    dense_layers=[0],
    dense_hidden=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    kda_heads=2,
    kda_head_dim=8,
    num_experts=4,
    top_k=2,
    expert_hidden=8,
    max_seq_len=64,
    init_std=0.3,
)
LAYOUT = MODEL.expert_layout
assert LAYOUT is not None

# Prompt and response tokens of eight samples: response lengths differ a lot.
SHAPES = ((3, 1), (2, 3), (4, 7), (1, 2), (5, 5), (2, 6), (6, 4), (3, 3))

SMALL_PACKS = PackingConfig(kind=PackingKind.consecutive, max_tokens=20)


def samples_of(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    *,
    seed: int = 0,
    prefix: str = "s",
    group_size: int = 2,
    version: int = 0,
) -> list[Sample]:
    """One sample per (prompt, response) tokens; tokens, log-probs, rewards and routes differ everywhere."""
    random = np.random.default_rng(seed)
    samples = []
    for index, (prompt, response) in enumerate(shapes):
        length = prompt + response
        routes = random.random((length - 1, len(LAYOUT.routed_layers), LAYOUT.num_experts)).argsort(-1)
        samples.append(
            Sample(
                id=f"{prefix}{index}",
                group=f"{prefix}-g{index // group_size}",
                tokens=random.integers(0, MODEL.vocab_size, length, dtype=np.int32),
                response_mask=np.arange(length) >= prompt,
                behavior_logprobs=random.uniform(-6.5, -4.5, length).astype(np.float32),
                ref_logprobs=random.uniform(-6.5, -4.5, length).astype(np.float32),
                reward=float(random.random()),
                policy_version=version,
                routes=routes[..., : LAYOUT.top_k].astype(np.int16),
                finish_reason="stop",
            )
        )
    return samples


def files(count: int) -> list[list[Sample]]:
    """Collections whose values and ids all differ."""
    return [samples_of(seed=i, prefix=f"f{i}-") for i in range(count)]


def masked(sample: Sample, *, keep: Sequence[int] = ()) -> Sample:
    """The sample with a loss mask that is true at `keep` only."""
    mask = np.zeros(len(sample), dtype=np.bool_)
    mask[list(keep)] = True
    return replace(sample, loss_mask=mask)


def config_of(run_dir: Path, **sections: Any) -> Config:
    """A run over files below `run_dir`, everything in one pack, one update a file; `sections` replace fields
    of Config.
    """
    fields: dict[str, Any] = {
        "run_name": run_dir.name,
        "run_dir": str(run_dir),
        "cache_dir": str(run_dir / "cache"),
        "model": MODEL,
        "task": TaskConfig(eval_problems=0),
        "rollouts": RolloutsConfig(source=Source.files, path=str(run_dir / "files")),
        "batch": BatchConfig(samples_per_step=None),
        "packing": PackingConfig(kind=PackingKind.consecutive, max_tokens=64),
        "optim": OptimConfig(lr=1e-2, warmup_steps=0, max_grad_norm=None),
        "trainer": TrainerConfig(max_steps=1),
        "callbacks": CallbacksConfig(progress=False, pictures=False),
    }
    config = Config(**(fields | sections))
    assert refusals(replace(config, run_dir="")) == []
    return config


def write_files(run_dir: Path, collections: Sequence[Sequence[Sample]]) -> None:
    """One parquet file a collection, where `config_of` looks for them."""
    for index, samples in enumerate(collections):
        collection = Collection(samples=list(samples), layout=LAYOUT, source="test")
        write_collection(collection, run_dir / "files" / f"collection-{index:05d}.parquet")


@dataclass(eq=False)
class Recorder(Callback):
    """Inputs and results of each update, through Lightning's hooks: its gradients, the weights before it, its
    batch. `double` turns the policy to float64 before the first update.
    """

    double: bool = False
    keeps_batches: bool = True
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    batches: list[Step] = field(default_factory=list)
    ids: list[list[str]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.double:
            pl_module.policy.double()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        parameters = list(pl_module.policy.named_parameters())
        self.gradients.append({name: p.grad.clone() for name, p in parameters})
        self.weights.append({name: p.detach().clone() for name, p in parameters})

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Step, batch_idx: int
    ) -> None:
        if self.keeps_batches:
            self.batches.append(batch)
        self.ids.append([sample.id for sample in batch.samples])
        self.steps.append(trainer.global_step)


@dataclass(kw_only=True, eq=False)
class Run:
    """A finished run and what it wrote."""

    config: Config
    module: PolicyModule
    data: RolloutDataModule
    trainer: Trainer
    recorder: Recorder
    checkpoints: Checkpoints

    @property
    def records(self) -> list[dict[str, Any]]:
        path = Path(self.config.run_dir) / "training_contract_rank0.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == name]

    @property
    def rows(self) -> list[dict[str, float]]:
        path = Path(self.config.run_dir) / "metrics.csv"
        return read_metrics(path) if path.is_file() else []

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.module.policy.named_parameters()}

    @property
    def optimizer(self) -> list[dict[str, Tensor]]:
        """Adam state of every parameter that has one, in order."""
        return [dict(state) for state in self.trainer.optimizers[0].state.values()]


def fit(
    config: Config,
    *,
    double: bool = False,
    keeps_batches: bool = True,
    callbacks: Sequence[Callback] = (),
    prepare: Callable[[PolicyModule], None] | None = None,
) -> Run:
    """Train in this process. `prepare` sees the module before the trainer does."""
    runs: list[Run] = []

    def train(config: Config) -> None:
        strategy = ExpertParallelStrategy(config)
        module = PolicyModule(config, objective=POLICY)
        if prepare is not None:
            prepare(module)
        data = RolloutDataModule(config, source=_source(config, module=module, strategy=strategy))
        recorder, checkpoints = Recorder(double=double, keeps_batches=keeps_batches), Checkpoints(config)
        trainer = build_trainer(
            config,
            strategy=strategy,
            max_steps=config.trainer.max_steps,
            callbacks=[ContractLog(config.run_dir), recorder, *callbacks, checkpoints],
            loggers=build_loggers(config),
        )
        runs.append(
            Run(
                config=config,
                module=module,
                data=data,
                trainer=trainer,
                recorder=recorder,
                checkpoints=checkpoints,
            )
        )
        trainer.fit(module, datamodule=data, ckpt_path=resolve_checkpoint(config))

    run_ranks(train, config)
    return runs[0]


def _source(config: Config, *, module: PolicyModule, strategy: ExpertParallelStrategy) -> RolloutSource:
    if not config.generates:
        return FileSource(config)
    local = build_local(config)
    module.publish = local.publish
    return GeneratingSource(config, parts=local, strategy=strategy)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to that tensor's largest value."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name in a:
        scale = float(b[name].abs().max())
        worst = max(worst, float((a[name] - b[name]).abs().max()) / (scale if scale > 0 else 1.0))
    return worst


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
