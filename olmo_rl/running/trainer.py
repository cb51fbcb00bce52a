"""The trainer and the loggers of a run, and what every recipe that trains puts around `Trainer.fit`."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import Logger

from olmo_rl.config import Config
from olmo_rl.run_directory import step_of
from olmo_rl.running.callbacks import ContractLog, PackPicture
from olmo_rl.running.checkpoints import Checkpoints
from olmo_rl.running.display import ProgressDisplay
from olmo_rl.running.loggers import build_loggers
from olmo_rl.running.profiling import ProfiledUpdates
from olmo_rl.training.lightning_internals import without_signal_handlers
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.strategy import ExpertParallelStrategy, cluster_environment
from olmo_rl.types import Refusal
from olmo_rl.user_code import import_parts, imported


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
    if config.trainer.profile_steps > 0:
        callbacks.append(ProfiledUpdates(config.run_dir, count=config.trainer.profile_steps))
    callbacks += build_extra(config.callbacks.extra, Callback, key="callbacks.extra")
    callbacks.append(checkpoints)
    trainer = build_trainer(
        config,
        strategy=strategy,
        max_steps=config.trainer.max_steps,
        callbacks=callbacks,
        loggers=[
            *build_loggers(config, resumed=None if checkpoint is None else step_of(Path(checkpoint))),
            *build_extra(config.logger.extra, Logger, key="logger.extra"),
        ],
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return trainer, checkpoints.interrupted


def build_extra(entries: Sequence[Any], kind: type[Any], *, key: str) -> list[Any]:
    """The user's own callbacks or loggers, each `{_target_: package.Class, argument: value}`. Raises Refusal
    for a class that cannot be made, or that is no `kind`.
    """
    made = []
    for number, entry in enumerate(entries):
        where = f"{key}[{number}]._target_={entry['_target_']}"
        try:
            one = instantiate({**entry, "_target_": _dotted(entry)})
        except InstantiationException as error:
            cause = error.__cause__
            while cause is not None and cause.__cause__ is not None:
                cause = cause.__cause__  # Hydra's own layers only repeat the path
            reason = str(cause or error).splitlines()[0].rstrip(":")
            raise Refusal(f"{where}: {reason}: correct the path or the arguments") from error
        if not isinstance(one, kind):
            raise Refusal(f"{where}: {type(one).__name__} is no Lightning {kind.__name__}: name a subclass")
        made.append(one)
    return made


def _dotted(entry: Mapping[str, Any]) -> str:
    """The import path of an entry as Hydra has it."""
    parts = import_parts(entry["_target_"])
    assert parts is not None, "a rule of the configuration"
    return ".".join(parts)


def extra_faults(entries: Sequence[Any], kind: type[Any], *, key: str) -> list[str]:
    """Why `build_extra` would refuse entries, as far as it shows without making one."""
    faults: list[str] = []
    for number, entry in enumerate(entries):
        where = f"{key}[{number}]._target_={entry['_target_']}"
        try:
            imported(_dotted(entry).rpartition(".")[0], where=where)
        except Refusal as refusal:
            faults += refusal.reasons
            continue
        try:
            made = get_object(_dotted(entry))
            arguments = {name: None for name in entry if not name.startswith("_")}
            inspect.signature(made).bind(*entry.get("_args_", ()), **arguments)
        except (ImportError, TypeError, ValueError) as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            faults.append(f"{where}: {reason}: correct the path or the arguments")
            continue
        if inspect.isclass(made) and not issubclass(made, kind):
            faults.append(f"{where}: {made.__name__} is no Lightning {kind.__name__}: name a subclass")
    return faults


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
    return without_signal_handlers(trainer)


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
