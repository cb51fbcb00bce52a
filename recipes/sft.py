"""Supervised fine-tuning on a task's demonstrations: the same model, packer and update as GRPO, cross-entropy
loss.
"""

from __future__ import annotations

from lightning.pytorch import Callback
from rich.console import Console

from olmo_rl.config import Config
from olmo_rl.data.tasks import build_task
from olmo_rl.data.tokenizers import load_tokenizer
from olmo_rl.training.build import build_loggers, build_trainer
from olmo_rl.training.callbacks import ContractLog, PackPicture, ProgressDisplay
from olmo_rl.training.checkpoints import EXIT_INTERRUPTED, Checkpoints, resolve_checkpoint
from olmo_rl.training.demonstrations import DemonstrationDataModule
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.processes import run_ranks
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.update import SUPERVISED


def run(config: Config) -> None:
    """Start the ranks of this job; every rank runs `train`."""
    run_ranks(train, config)


def train(config: Config) -> None:
    """One rank, top to bottom."""
    checkpoint = resolve_checkpoint(config)
    strategy = ExpertParallelStrategy(config)
    module = PolicyModule(config, objective=SUPERVISED)
    assert config.batch.samples_per_step is not None, "refusals require batch.samples_per_step for recipe=sft"
    data = DemonstrationDataModule(
        config,
        task=build_task(config.task, seed=config.seed),
        tokenizer=load_tokenizer(config.model.tokenizer),
        samples_per_step=config.batch.samples_per_step,
    )
    checkpoints = Checkpoints(config)
    callbacks: list[Callback] = [ContractLog(config.run_dir)]
    if config.callbacks.pictures:
        callbacks.append(PackPicture(config))
    if config.callbacks.progress:
        callbacks.append(ProgressDisplay(label="updates", total=config.trainer.max_steps))
    callbacks.append(checkpoints)
    trainer = build_trainer(
        config,
        strategy=strategy,
        max_steps=config.trainer.max_steps,
        callbacks=callbacks,
        loggers=build_loggers(config),
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        Console().print(f"run directory: {config.run_dir}", soft_wrap=True)
    if checkpoints.interrupted:
        raise SystemExit(EXIT_INTERRUPTED)
