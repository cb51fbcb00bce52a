"""Puts a run together from its configuration: trainer, loggers, the local engine and its task."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger

from olmo_rl.config import Config, LoggerKind
from olmo_rl.data.tasks import Task, build_task
from olmo_rl.data.tokenizers import Tokenizer, load_tokenizer
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.training.metrics_csv import MetricsCsv
from olmo_rl.training.processes import cluster_environment
from olmo_rl.training.strategy import ExpertParallelStrategy


@dataclass(kw_only=True, slots=True)
class LocalRollouts:
    """The parts that generating and held-out evaluation share."""

    task: Task
    tokenizer: Tokenizer
    engine: LocalEngine


def build_local(config: Config) -> LocalRollouts:
    """Task, tokenizer and engine on this rank's device."""
    accelerator = config.trainer.accelerator
    device = (
        torch.device("cpu")
        if accelerator == "cpu"
        else torch.device("cuda", cluster_environment().local_rank())
    )
    return LocalRollouts(
        task=build_task(config.task, seed=config.seed),
        tokenizer=load_tokenizer(config.model.tokenizer),
        engine=LocalEngine(config.model, device=device),
    )


def build_loggers(config: Config) -> list[Logger]:
    """metrics.csv always; W&B where the configuration asks for it."""
    loggers: list[Logger] = [MetricsCsv(Path(config.run_dir) / "metrics.csv")]
    if config.logger.kind is LoggerKind.wandb:
        loggers.append(
            WandbLogger(
                project=config.logger.project,
                name=config.run_name,
                save_dir=config.run_dir,
                offline=config.logger.offline,
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
    return Trainer(
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


def quiet_lightning() -> None:
    """Silence advice that does not apply: our loader is the batch sampler, and steps are logged one by
    one.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (".*does not have many workers.*", ".*`srun` command is available.*", ".*treespec.*"):
        warnings.filterwarnings("ignore", message=message)
