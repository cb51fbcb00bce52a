"""One training run of a module on its data: what every recipe that trains puts around `Trainer.fit`."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningDataModule, Trainer

from olmo_rl.config import Config
from olmo_rl.training.build import build_loggers, build_trainer
from olmo_rl.training.callbacks import ContractLog, PackPicture, ProgressDisplay
from olmo_rl.training.checkpoints import Checkpoints
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.strategy import ExpertParallelStrategy


def fit(
    config: Config,
    *,
    strategy: ExpertParallelStrategy,
    module: PolicyModule,
    data: LightningDataModule,
    contract: ContractLog,
    evaluations: Sequence[Callback],
    checkpoint: str | None,
) -> tuple[Trainer, bool]:
    """Train to `trainer.max_steps` or the end of the data, from `checkpoint` where there is one; the trainer,
    and whether a signal ended the run early (its checkpoint is saved). A collective of all ranks.
    """
    checkpoints = Checkpoints(config)
    callbacks: list[Callback] = [contract, *evaluations]
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
    return trainer, checkpoints.interrupted
