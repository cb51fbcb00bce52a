"""Train a policy with GRPO: collect, plan, update, publish; then draw what happened."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table

from olmo_rl.config import Config, Source
from olmo_rl.data.preflight import refuse_files
from olmo_rl.training.build import LocalRollouts, build_local, build_loggers, build_trainer
from olmo_rl.training.callbacks import ContractLog, Evaluation, PackPicture, ProgressDisplay
from olmo_rl.training.checkpoints import EXIT_INTERRUPTED, Checkpoints, resolve_checkpoint
from olmo_rl.training.datamodule import RolloutDataModule
from olmo_rl.training.metrics_csv import read_metrics
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.pictures import draw_reward
from olmo_rl.training.processes import run_ranks
from olmo_rl.training.sources import FileSource, LocalSource
from olmo_rl.training.sources import Source as RolloutSource
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.update import POLICY
from olmo_rl.training.warm_start import warm_start

CLOSING_METRICS = (
    "reward/mean",
    "packing/samples_per_pack",
    "packing/fill",
    "replay/coverage",
    "mismatch/mean",
    "throughput/real_tokens_per_second",
)


def run(config: Config) -> None:
    """Look at the files, then start the ranks of this job; every rank runs `train`."""
    refuse_files(config)
    run_ranks(train, config)


def train(config: Config) -> None:
    """One rank, top to bottom."""
    checkpoint = resolve_checkpoint(config)
    config = warm_start(config)
    strategy = ExpertParallelStrategy(config)
    module = PolicyModule(config, objective=POLICY)
    local = build_local(config) if config.rollouts.source is Source.local else None
    data = RolloutDataModule(config, source=_source(config, local=local, strategy=strategy))
    contract, checkpoints = ContractLog(config.run_dir), Checkpoints(config)
    callbacks: list[Callback] = [contract]
    evaluation: Evaluation | None = None
    if local is not None:
        module.publish = local.engine.publish
        if config.task.eval_problems > 0:
            evaluation = Evaluation(config, local=local, contract=contract)
            callbacks.append(evaluation)
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
        _close(config, evaluation=evaluation, skipped=module.skipped_updates)
    if checkpoints.interrupted:
        raise SystemExit(EXIT_INTERRUPTED)


def _source(
    config: Config, *, local: LocalRollouts | None, strategy: ExpertParallelStrategy
) -> RolloutSource:
    if local is None:
        return FileSource(config)
    return LocalSource(config, local=local, strategy=strategy)


def _close(config: Config, *, evaluation: Evaluation | None, skipped: int) -> None:
    """Pictures and the closing table."""
    metrics = Path(config.run_dir) / "metrics.csv"
    rows = [row for row in read_metrics(metrics) if "packing/packs" in row] if metrics.is_file() else []
    accuracies = {} if evaluation is None else evaluation.results
    if rows and config.callbacks.pictures and "reward/mean" in rows[0]:
        picture = Path(config.run_dir) / "reward.png"
        draw_reward(metrics, evaluations=accuracies, path=picture, title=config.run_name)
    table = Table(title=f"{config.run_name}: {len(rows)} updates, {skipped} skipped", title_justify="left")
    table.add_column("metric")
    for heading in ("first 10 updates", "last 10 updates"):
        table.add_column(heading, justify="right")
    for name in CLOSING_METRICS:
        values = [row[name] for row in rows if name in row]
        if values:
            first, last = values[:10], values[-10:]
            table.add_row(name, f"{sum(first) / len(first):,.4g}", f"{sum(last) / len(last):,.4g}")
    if accuracies:
        steps = sorted(accuracies)
        table.add_row(
            "greedy held-out accuracy", f"{accuracies[steps[0]]:.3f}", f"{accuracies[steps[-1]]:.3f}"
        )
    console = Console()
    console.print(table)
    console.print(f"run directory: {config.run_dir}", soft_wrap=True)
