"""Puts a run together from its configuration: trainer, loggers, the local engine and its task."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from typing_extensions import override

from olmo_rl.config import Config, LoggerKind, Source
from olmo_rl.data.prompting import task_of
from olmo_rl.data.tasks import Task
from olmo_rl.data.tokenizers import Tokenizer, fitting_tokenizer
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.policy.sharded import FullWeights
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.training.metrics_csv import MetricsCsv
from olmo_rl.training.processes import cluster_environment
from olmo_rl.training.remote import Publication, build_remote
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal


@dataclass(kw_only=True, slots=True)
class RolloutParts:
    """The parts that generating and held-out evaluation share. `publish` hands a policy's weights and their
    version to the engine, on all ranks alike; `close` lets go of it.
    """

    task: Task
    tokenizer: Tokenizer
    engine: LocalEngine | RemoteEngine
    publish: Callable[[nn.Module, int], None]
    close: Callable[[], None] = lambda: None


class NoSignalHandlers(_SignalConnector):
    """Lightning's handlers would talk to other ranks inside the handler; ours do not (checkpoints.py)."""

    @override
    def register_signal_handlers(self) -> None:
        """None."""


class WandbRun(WandbLogger):
    """One W&B run a job: it ends with the training, so that the next job of a sweep starts its own."""

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


def local_device(config: Config) -> torch.device:
    """The device of this rank."""
    if config.trainer.accelerator == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", cluster_environment().local_rank())


def build_local(config: Config) -> RolloutParts:
    """Task, tokenizer and engine on this rank's device."""
    engine = LocalEngine(config.model, device=local_device(config))
    tokenizer = fitting_tokenizer(config.model)
    return RolloutParts(
        task=task_of(config, tokenizer=tokenizer),
        tokenizer=tokenizer,
        engine=engine,
        publish=LocalPublication(engine),
    )


class LocalPublication:
    """Full weights for the engine of this process: every rank generates, and holds a copy for it."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._weights: FullWeights | None = None

    def __call__(self, decoder: nn.Module, version: int) -> None:
        if self._weights is None:
            self._weights = FullWeights(decoder)
        self._engine.publish(self._weights.gather(), version)


def build_parts(config: Config, *, strategy: ExpertParallelStrategy) -> RolloutParts:
    """What generates: the engine of this process, or a client of serving engines."""
    if config.rollouts.source is Source.local:
        return build_local(config)
    remote = build_remote(config, device=local_device(config))
    tokenizer = fitting_tokenizer(config.model)
    return RolloutParts(
        task=task_of(config, tokenizer=tokenizer),
        tokenizer=tokenizer,
        engine=remote,
        publish=Publication(remote, config=config, strategy=strategy),
        close=remote.close,
    )


def build_loggers(config: Config) -> list[Logger]:
    """metrics.csv always; W&B where the configuration asks for it."""
    loggers: list[Logger] = [MetricsCsv(Path(config.run_dir) / "metrics.csv")]
    if config.logger.kind is LoggerKind.wandb:
        if importlib.util.find_spec("wandb") is None:
            raise Refusal(
                "logger=wandb: the wandb package is not installed: pip install -c constraints.txt "
                "-e '.[wandb]', or choose logger=csv"
            )
        loggers.append(
            WandbRun(
                project=config.logger.project,
                name=config.run_name,
                save_dir=config.run_dir,
                offline=config.logger.offline,
                config=plain(asdict(config)),
            )
        )
    return loggers


def build_trainer(
    config: Config,
    *,
    strategy: ExpertParallelStrategy,
    max_steps: int,
    callbacks: list[Callback],
    loggers: list[Logger],
) -> Trainer:
    """A Lightning trainer that leaves batching, clipping, checkpoints and progress to this project."""
    seed_everything(config.seed, verbose=False)
    quiet_lightning()
    trainer = Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy=strategy,
        plugins=[cluster_environment()],
        max_steps=max_steps,
        max_epochs=-1,
        callbacks=callbacks,
        logger=loggers,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        inference_mode=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=config.run_dir,
    )
    trainer._signal_connector = NoSignalHandlers(trainer)
    return trainer


def plain(value: Any) -> Any:
    """A configuration as JSON has it: words in place of the members of an Enum."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value.value if isinstance(value, Enum) else value


def quiet_lightning() -> None:
    """Silence advice that does not apply: our loader is the batch sampler, steps are logged one by one,
    predictions are handed on inside the step, data modules resume by their own state, and `init_from` is
    read by every rank for itself.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*`srun` command is available.*",
        ".*treespec.*",
        "predict returned None.*",
        ".*your dataloader is not resumable.*",
        "You have overridden `transfer_batch_to_device`.*",
        "torch.distributed is disabled, unavailable or uninitialized.*",
    ):
        warnings.filterwarnings("ignore", message=message)
