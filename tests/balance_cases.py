"""What the four ranks of test_balancing.py run: the same files with balancing on and off, EP2, over gloo.

`python balance_cases.py DIRECTORY` forks the ranks once; each leaves `rank{r}.pt`. Hooks of torch watch from
outside: the full gradients that an optimizer is about to use and the Adam state it leaves.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_cases import Watch, digest, full
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training_cases import MODEL, config_of, samples_of, write_files

from olmo_rl.config import (
    BalanceConfig,
    BalanceKind,
    BalanceLevel,
    BatchConfig,
    Config,
    OptimConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recompute,
    StrategyConfig,
    StrategyKind,
    TrainerConfig,
)
from olmo_rl.training.build import build_trainer
from olmo_rl.training.callbacks import ContractLog
from olmo_rl.training.datamodule import RolloutDataModule
from olmo_rl.training.metrics_csv import read_metrics
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.sources import FileSource
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.update import POLICY
from olmo_rl.types import Refusal
from recipes import score, train

WORLD = 4
SECONDS = 40
ANNEAL = BalanceConfig(kind=BalanceKind.anneal, proposals=2000, seconds=float("inf"))
BALANCES = {
    "none": BalanceConfig(),
    "greedy": BalanceConfig(kind=BalanceKind.greedy),
    "reference": BalanceConfig(kind=BalanceKind.reference, proposals=64, seconds=float("inf")),
    "anneal": ANNEAL,
    "anneal order": replace(ANNEAL, level=BalanceLevel.order),
}


def write_inputs(directory: Path) -> None:
    """One file of two updates of 24 samples each."""
    rng = np.random.default_rng(7)
    shapes = [(int(a), int(b)) for a, b in zip(rng.integers(1, 9, 48), rng.integers(1, 22, 48), strict=True)]
    write_files(directory / "input", [samples_of(shapes, seed=11)])


def config_for(directory: Path, name: str, **sections: Any) -> Config:
    fields: dict[str, Any] = {
        "trainer": TrainerConfig(devices=WORLD, max_steps=2),
        "strategy": StrategyConfig(kind=StrategyKind.expert_parallel, ep_degree=2, timeout_seconds=SECONDS),
        "packing": PackingConfig(kind=PackingKind.consecutive, max_tokens=64),
        "batch": BatchConfig(samples_per_step=24),
        "model": MODEL,
        # Adam divides by the root of the second moment: eps above rounding keeps it from blowing rounding up.
        "optim": OptimConfig(lr=1e-4, warmup_steps=0, max_grad_norm=None, eps=1e-5),
    }
    config = config_of(directory / "input", **(fields | sections))
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
            {
                f"{name}/{moment}": full(optimizer.state[parameter][moment])
                for name, parameter in self.watch.decoder.named_parameters()
                for moment in ("exp_avg", "exp_avg_sq")
            }
        )


def events(config: Config, *, rank: int) -> list[dict[str, Any]]:
    log = Path(config.run_dir) / f"training_contract_rank{rank}.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


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


def run_rank(number: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # never used: the group exists already
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=number,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    watch, results = Watch(), {}
    adam = Adam(watch)
    forms: dict[str, dict[str, Any]] = {name: {"balance": balance} for name, balance in BALANCES.items()}
    forms["anneal at hand-over"] = {"balance": replace(ANNEAL, overlap=False)}
    forms["anneal recomputed"] = forms["anneal"] | {"policy": PolicyConfig(recompute=Recompute.full)}
    forms["stride"] = {"balance": replace(ANNEAL, layer_stride=2)}
    forms["capped"] = {"balance": replace(ANNEAL, max_destination_load=1)}
    path = Path(directory)
    with (
        register_module_forward_hook(watch.on_forward),
        register_optimizer_step_pre_hook(watch.on_step),
        register_optimizer_step_post_hook(adam.on_stepped),
    ):
        for name, sections in forms.items():
            watch.clear()
            adam.states = []
            config = config_for(path, name, **sections)
            found: dict[str, Any] = {"ended": None}
            try:
                train.train(config)
            except Refusal as refusal:
                results[name] = {"ended": str(refusal)}
                continue
            assert watch.decoder is not None
            found |= {
                "gradients": watch.gradients,
                "adam": adam.states,
                "weights": digest({n: full(p) for n, p in watch.decoder.named_parameters()}),
                "events": events(config, rank=number),
                "rows": read_metrics(Path(config.run_dir) / "metrics.csv") if number == 0 else [],
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
    dist.barrier()
    dist.destroy_process_group()


def main(directory: str) -> None:
    write_inputs(Path(directory))
    mp.start_processes(run_rank, args=(directory,), nprocs=WORLD, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
