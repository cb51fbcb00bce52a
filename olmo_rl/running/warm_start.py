"""Supervised updates before a recipe, cached by everything that shapes them. Not part of
trainer.max_steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from olmo_rl.backends import attention_of, linear_of
from olmo_rl.collections.environment_parts import OpenedEnvironment
from olmo_rl.collections.environment_source import EnvironmentDemonstrations
from olmo_rl.collections.supervised import SupervisedDataModule, SupervisedSource, TaskDemonstrations
from olmo_rl.complete_files import write_complete
from olmo_rl.config import Config, ScheduleKind
from olmo_rl.data.tokenizers import fitting_tokenizer
from olmo_rl.policy.sharded import whole_weights
from olmo_rl.policy.weights import save_weights
from olmo_rl.run_directory import sha256_of
from olmo_rl.running.display import ProgressDisplay
from olmo_rl.running.trainer import build_trainer
from olmo_rl.tasks.problems import Problem
from olmo_rl.tasks.prompting import task_of
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import SUPERVISED
from olmo_rl.training.strategy import ExpertParallelStrategy

# What cross-entropy shares with the policy objective.
_SHAPING_LOSSES = (
    "reduction",
    "router_aux_weight",
    "router_z_weight",
    "router_aux_grouping",
    "router_aux_reduction",
    "router_z_reduction",
    "router_count_source",
)

_WEIGHTS = ("*.distcp", "*.safetensors")  # of a checkpoint, of a Hugging Face directory


def warm_start(
    config: Config,
    *,
    problems: Sequence[Problem] | None = None,
    environment: OpenedEnvironment | None = None,
) -> Config:
    """The configuration with `init_from` pointing at warmed weights; unchanged where no warm start is asked
    for.

    A collective of all ranks. Rank 0 decides whether the cache serves, so that a file that appears meanwhile
    cannot send ranks separate ways.
    """
    if config.warm_start.steps == 0 or config.ckpt_path is not None:
        return config
    path = Path(config.cache_dir) / "warm_start" / f"{_digest(config)}.safetensors"
    optim = replace(config.optim, lr=config.warm_start.lr, schedule=ScheduleKind.constant)
    rollouts = replace(config.rollouts, temperature=1.0)  # demonstrations were not sampled
    supervised = replace(config, optim=optim, rollouts=rollouts)
    strategy = ExpertParallelStrategy(supervised)
    steps = config.warm_start.steps
    trainer = build_trainer(
        supervised,
        strategy=strategy,
        max_steps=steps,
        callbacks=[ProgressDisplay(label="warm-up", total=steps)] if config.callbacks.progress else [],
        loggers=[],
    )
    strategy.join()
    if not strategy.broadcast(_whole(path)):
        module = PolicyModule(supervised, objective=SUPERVISED)
        tokenizer = fitting_tokenizer(config.model)
        source: SupervisedSource
        if environment is not None:
            source = EnvironmentDemonstrations(supervised, opened=environment, strategy=strategy)
        else:
            source = TaskDemonstrations(
                supervised,
                task=task_of(config, tokenizer=tokenizer, problems=problems),
                tokenizer=tokenizer,
                strategy=strategy,
            )
        data = SupervisedDataModule(
            supervised, source=source, samples_per_step=config.warm_start.samples_per_step
        )
        trainer.fit(module, datamodule=data)
        _save(module, path=path)
    elif trainer.is_global_zero:
        print(f"warm start: {path} serves, made earlier by the same configuration", flush=True)
    return replace(config, init_from=str(path))


def _save(module: PolicyModule, *, path: Path) -> None:
    """A collective: every rank gathers, rank 0 writes, nobody goes on before the file is there."""
    weights = whole_weights(module.policy)
    if module.strategy.global_rank == 0:
        save_weights(weights, path)
        write_complete(_checksum(path), sha256_of([path])[0])
    module.strategy.barrier()


def _checksum(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _whole(path: Path) -> bool:
    """Whether the cache holds these weights as they were written."""
    checksum = _checksum(path)
    if not path.is_file() or not checksum.is_file():
        return False
    return sha256_of([path])[0] == checksum.read_text(encoding="utf-8")


def _contents(path: str | None) -> str | None:
    """A hash of what a file holds, or of the weights in a directory: a name alone would hide a change."""
    if path is None:
        return None
    found = [Path(path)]
    if Path(path).is_dir():
        found = sorted(file for pattern in _WEIGHTS for file in Path(path).glob(pattern))
    digest = hashlib.sha256()
    for file in found:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def code_digest(package: Path) -> str:
    """Return a hash of the source files of a package: other code may train other weights."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _digest(config: Config) -> str:
    """Return a hash of everything that determines the warmed weights."""
    parts = {
        "seed": config.seed,
        "init_from": config.init_from,
        "model": asdict(config.model),
        "task": asdict(config.task),
        "environment": asdict(config.environment),
        "contents": [_contents(path) for path in (config.init_from, config.task.path)],
        "warm_start": asdict(config.warm_start),
        "packing": asdict(config.packing),
        "optim": asdict(config.optim),
        "loss": {name: value for name, value in asdict(config.loss).items() if name in _SHAPING_LOSSES},
        "policy": asdict(config.policy),
        "backends": [attention_of(config), linear_of(config), config.expert_dtype.value],
        "device": config.trainer.accelerator,
        "topology": [config.trainer.world_size, config.strategy.ep_degree],
        "code": [torch.__version__, code_digest(Path(__file__).parents[1])],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
