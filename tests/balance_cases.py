"""What the four ranks of test_balancing.py run: the same files with balancing on and off, EP2, over gloo.

Each rank leaves `rank{r}.pt`. Hooks of torch watch from outside: the full gradients that an optimizer is
about to use and the Adam state it leaves.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bounds import BOUND_SECONDS
from distributed_cases import Watch, digest
from gloo_world import full, joined
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training_cases import MODEL, config_of, samples_of, write_files

from olmo_rl.collections.datamodule import RolloutDataModule
from olmo_rl.collections.sources import FileSource
from olmo_rl.config import (
    BalanceConfig,
    BalanceKind,
    BatchConfig,
    CallbacksConfig,
    Config,
    Dtype,
    OptimConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recompute,
    StrategyConfig,
    TrainerConfig,
)
from olmo_rl.running.callbacks import ContractLog
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.trainer import build_trainer
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample
from recipes import score, train

WORLD = 4
STEPS = ("balance_cases:write_inputs", f"balance_cases:run_rank*{WORLD}")
ANNEAL = BalanceConfig(kind=BalanceKind.anneal, proposals=1000, seconds=float("inf"))
LENT = replace(ANNEAL, guests=1)
BALANCES = {
    "none": BalanceConfig(),
    "reference": BalanceConfig(kind=BalanceKind.reference, proposals=64, seconds=float("inf")),
    "anneal": ANNEAL,
}
EXACT = ("none", "anneal", "anneal recomputed")


def skewed(samples: list[Sample], *, rng: np.random.Generator) -> list[Sample]:
    """The samples with routes that prefer the first of the four experts, so that they are lent."""
    for sample in samples:
        assert sample.routes is not None
        logits = rng.gumbel(size=(*sample.routes.shape[:2], 4)) - 0.3 * np.arange(4)
        sample.routes = logits.argsort(axis=-1)[..., -2:].astype(np.int16)
    return samples


def write_inputs(place: str) -> None:
    """One file of two updates of 24 samples each, and three of one update."""
    directory = Path(place)
    rng = np.random.default_rng(7)
    shapes = [(int(a), int(b)) for a, b in zip(rng.integers(1, 9, 48), rng.integers(1, 22, 48), strict=True)]
    write_files(directory / "input", [samples_of(shapes, seed=11)])
    write_files(directory / "skewed", [skewed(samples_of(shapes, seed=11), rng=rng)])
    files = [samples_of(shapes[8 * i : 24 + 8 * i], seed=20 + i, prefix=f"f{i}-") for i in range(3)]
    write_files(directory / "three", files)
    write_files(directory / "broken", files)
    with (directory / "broken" / "files" / "collection-00001.parquet").open("r+b") as second:
        second.truncate(100)


def config_for(directory: Path, name: str, *, files: str = "input", **sections: Any) -> Config:
    fields: dict[str, Any] = {
        "trainer": TrainerConfig(devices=WORLD, max_steps=2),
        "strategy": StrategyConfig(ep_degree=2, timeout_seconds=BOUND_SECONDS),
        "packing": PackingConfig(kind=PackingKind.consecutive, max_tokens=64),
        "batch": BatchConfig(samples_per_step=24),
        "model": MODEL,
        # Adam divides by the root of the second moment: eps above rounding keeps it from blowing rounding up.
        "optim": OptimConfig(lr=1e-4, warmup_steps=0, max_grad_norm=None, eps=1e-5),
    }
    config = config_of(directory / files, **(fields | sections))
    return replace(config, run_name=name, run_dir=str(directory / name))


class Adam:
    """Full Adam moments after every step of an optimizer."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.states: list[dict[str, Tensor]] = []

    def on_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer.param_groups[0]["lr"] == 0:
            return
        assert self.watch.decoder is not None
        self.states.append(
            full(
                {
                    f"{name}/{moment}": optimizer.state[parameter][moment]
                    for name, parameter in self.watch.decoder.named_parameters()
                    for moment in ("exp_avg", "exp_avg_sq")
                }
            )
        )


def events(config: Config, *, rank: int) -> list[dict[str, Any]]:
    log = Path(config.run_dir) / f"training_contract_rank{rank}.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


def rows(config: Config) -> list[dict[str, float]]:
    path = Path(config.run_dir) / "metrics.csv"
    return read_metrics(path) if path.is_file() else []


class CorruptRoute(Callback):
    """Before update 2, one token of the last rank goes to other experts than was planned."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == WORLD - 1:
            routes = batch.packs[0].routes
            owner = routes[:, 1] // 2
            row = int((owner[:, 0] == owner[:, 1]).nonzero()[0])  # both experts on one rank
            routes[row, 1] = (routes[row, 1] + 2) % 4


def corrupt(directory: Path) -> dict[str, Any]:
    config = config_for(directory, "corrupted", balance=ANNEAL)
    module = PolicyModule(config, objective=POLICY)
    trainer = build_trainer(
        config,
        strategy=ExpertParallelStrategy(config),
        max_steps=2,
        callbacks=[ContractLog(config.run_dir), CorruptRoute()],
        loggers=[],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=RolloutDataModule(config, source=FileSource(config)))
    return {
        "events": events(config, rank=dist.get_rank()),
        "warnings": [str(w.message) for w in caught if "differ from the plan" in str(w.message)],
    }


def train_exactly(config: Config) -> None:
    config = replace(config, policy=replace(config.policy, dtype=Dtype.float64))
    module = PolicyModule(config, objective=POLICY)
    trainer = build_trainer(
        config,
        strategy=ExpertParallelStrategy(config),
        max_steps=config.trainer.max_steps,
        callbacks=[ContractLog(config.run_dir)],
        loggers=[],
    )
    trainer.fit(module, datamodule=RolloutDataModule(config, source=FileSource(config)))


def mend_and_resume(config: Config) -> None:
    """The second of three files cannot be read, which is found while the first one trains."""
    with pytest.raises(Refusal, match=r"collection-00001\.parquet"):
        train.train(config)
    dist.barrier()  # rank 0 completes the checkpoint last
    names = sorted(path.name for path in (Path(config.run_dir) / "checkpoints").iterdir())
    assert names == ["step-1"], f"refused when it is to be trained, after the update before it: {names}"
    dist.barrier()
    if dist.get_rank() == 0:
        path = Path(str(config.rollouts.path)) / "collection-00001.parquet"
        shutil.copy(path.parents[2] / "three" / "files" / path.name, path)
    dist.barrier()
    train.train(replace(config, ckpt_path="last"))


def interrupt_and_resume(config: Config) -> None:
    """Two updates of one file, by two runs of one."""
    train.train(replace(config, trainer=replace(config.trainer, max_steps=1)))
    dist.barrier()
    train.train(replace(config, ckpt_path="last"))


def forms(directory: Path) -> dict[str, tuple[Callable[[Config], None], Config]]:
    """The runs and their configurations, by name."""
    sections: dict[str, dict[str, Any]] = {name: {"balance": balance} for name, balance in BALANCES.items()}
    sections["anneal at hand-over"] = {"balance": replace(ANNEAL, overlap=False)}
    sections["anneal recomputed"] = sections["anneal"] | {"policy": PolicyConfig(recompute=Recompute.full)}
    sections["stride"] = {"balance": replace(ANNEAL, layer_stride=2)}
    padded = PackingConfig(kind=PackingKind.consecutive, max_tokens=64, pad_to_budget=True)
    sections["anneal padded"] = sections["anneal"] | {"packing": padded}
    lent: dict[str, Any] = {"balance": LENT, "files": "skewed"}
    sections["lent"] = lent
    sections["capped"] = {"balance": replace(ANNEAL, max_destination_load=1)}
    three = {"files": "three", "trainer": TrainerConfig(devices=WORLD, max_steps=3)}
    sections["files ahead"] = three | {"balance": ANNEAL}
    sections["files at hand-over"] = three | {"balance": replace(ANNEAL, overlap=False)}
    found: dict[str, tuple[Callable[[Config], None], Config]] = {
        name: (train.train, config_for(directory, name, **fields)) for name, fields in sections.items()
    }
    for form in ("anneal", "lent"):
        name = f"{form} interrupted"
        found[name] = interrupt_and_resume, config_for(directory, name, **sections[form])
    saving = CallbacksConfig(progress=False, pictures=False, checkpoint_interval=1)
    found["files mended"] = (
        mend_and_resume,
        config_for(
            directory, "files mended", balance=ANNEAL, callbacks=saving, **(three | {"files": "broken"})
        ),
    )
    for name in EXACT:
        found[f"{name} exact"] = train_exactly, config_for(directory, f"{name} exact", **sections[name])
    return found


def run_rank(number: int, world: int, directory: str) -> None:
    with joined(number, world=world, directory=directory):
        watch, results = Watch(), {}
        adam = Adam(watch)
        path = Path(directory)
        with (
            register_module_forward_hook(watch.on_forward),
            register_optimizer_step_pre_hook(watch.on_step),
            register_optimizer_step_post_hook(adam.on_stepped),
        ):
            for name, (job, config) in forms(path).items():
                watch.clear()
                adam.states = []
                found: dict[str, Any] = {"ended": None}
                try:
                    job(config)
                except Refusal as refusal:
                    results[name] = {"ended": str(refusal)}
                    continue
                assert watch.decoder is not None
                found |= {
                    "gradients": watch.gradients,
                    "adam": adam.states,
                    "weights": digest(full(dict(watch.decoder.named_parameters()))),
                    "events": events(config, rank=number),
                    "rows": rows(config) if number == 0 else [],
                }
                results[name] = found
            for name in ("none", "anneal"):
                config = config_for(path, f"{name} scored", balance=BALANCES[name])
                score.score(config)
                dist.barrier()  # rank 0 writes last
                lines = (Path(config.run_dir) / "scores.jsonl").read_text().splitlines()
                results[f"{name} scored"] = {
                    line["sample_id"]: line["policy_logprobs"] for line in map(json.loads, lines)
                }
        results["corrupted"] = corrupt(path)
        torch.save(results, path / f"rank{number}.pt")
