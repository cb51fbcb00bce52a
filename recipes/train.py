"""Train a policy with GRPO: collect, plan, update, publish; then draw what happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table

from olmo_rl.chosen_checkpoint import resolve_checkpoint
from olmo_rl.collections.continuous import ContinuousSource
from olmo_rl.collections.datamodule import RolloutDataModule
from olmo_rl.collections.environment_parts import (
    EnvironmentParts,
    OpenedEnvironment,
    build_environment_parts,
    open_environment,
)
from olmo_rl.collections.environment_source import EnvironmentSource, HeldOutEpisodes
from olmo_rl.collections.generation import RolloutParts, build_parts
from olmo_rl.collections.sources import FileSource, GeneratingSource, RolloutSource
from olmo_rl.config import Config
from olmo_rl.data.inputs import Inputs
from olmo_rl.data.means import shown
from olmo_rl.data.tokenizers import Tokenizer, local_tokenizer
from olmo_rl.run_directory import EXIT_INTERRUPTED
from olmo_rl.running.callbacks import ContractLog, Evaluation
from olmo_rl.running.closing import print_closing
from olmo_rl.running.environment_evaluation import EnvironmentEvaluation
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.reward_picture import draw_reward
from olmo_rl.running.sample_files import SampleFiles
from olmo_rl.running.trainer import fit
from olmo_rl.running.warm_start import warm_start
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal

CLOSING_METRICS = (
    "reward/mean",
    "packing/samples_per_pack",
    "packing/fill",
    "replay/coverage",
    "mismatch/mean",
    "throughput/real_tokens_per_second",
)


def train(config: Config, *, inputs: Inputs | None = None, watchers: Sequence[Callback] = ()) -> None:
    """One rank, top to bottom. `inputs`: what the preflight read; `watchers` see the hooks of Lightning
    beside our own callbacks.
    """
    inputs = Inputs() if inputs is None else inputs
    checkpoint = resolve_checkpoint(config)
    environment = open_environment(config)
    try:
        _train(config, inputs=inputs, watchers=watchers, checkpoint=checkpoint, environment=environment)
    finally:
        if environment is not None:
            environment.close()


def _train(
    config: Config,
    *,
    inputs: Inputs,
    watchers: Sequence[Callback],
    checkpoint: str | None,
    environment: OpenedEnvironment | None,
) -> None:
    config = warm_start(config, problems=inputs.problems, environment=environment)
    strategy = ExpertParallelStrategy(config)
    module = PolicyModule(config, objective=POLICY)
    module.recorded_reference = inputs.carries_reference
    parts: RolloutParts | EnvironmentParts | None = None
    if environment is not None:
        parts = build_environment_parts(config, opened=environment, strategy=strategy)
    elif config.generates:
        parts = build_parts(config, strategy=strategy, problems=inputs.problems)
    source = _source(config, parts=parts, inputs=inputs, strategy=strategy)
    data = RolloutDataModule(config, source=source)
    contract = ContractLog(config.run_dir)
    evaluation: Evaluation | EnvironmentEvaluation | None = None
    if parts is not None:
        module.publish = parts.publish
    kept = [] if config.callbacks.samples == 0 else [SampleFiles(config, tokenizer=_tokenizer(config, parts))]
    if isinstance(parts, RolloutParts) and (config.task.eval_problems > 0 or config.evaluation.sets):
        evaluation = Evaluation(config, parts=parts, contract=contract)
    if isinstance(parts, EnvironmentParts) and config.task.eval_problems > 0:
        held_out = HeldOutEpisodes(config, parts=parts, strategy=strategy)
        evaluation = EnvironmentEvaluation(config, episodes=held_out, contract=contract)
    try:
        trainer, interrupted = fit(
            config,
            strategy=strategy,
            module=module,
            data=data,
            contract=contract,
            evaluations=[*([] if evaluation is None else [evaluation]), *kept, *watchers],
            checkpoint=checkpoint,
        )
    finally:  # or the next job of a sweep shares its engines with what this one left running
        if parts is not None:
            parts.close()
    if trainer.is_global_zero:
        _close(config, evaluation=evaluation, skipped=module.skipped_updates, interrupted=interrupted)
    if interrupted:
        raise SystemExit(EXIT_INTERRUPTED)
    if trainer.global_step == 0:
        raise Refusal(
            f"nothing was trained: {module.skipped_updates} updates were skipped, and no other was possible: "
            "the metrics show why"
        )


def _source(
    config: Config,
    *,
    parts: RolloutParts | EnvironmentParts | None,
    inputs: Inputs,
    strategy: ExpertParallelStrategy,
) -> RolloutSource:
    if parts is None:
        return FileSource(config, inputs=inputs)
    if isinstance(parts, EnvironmentParts):
        return EnvironmentSource(config, parts=parts, strategy=strategy)
    if config.continuous:
        return ContinuousSource(config, parts=parts, strategy=strategy)
    return GeneratingSource(config, parts=parts, strategy=strategy)


def _tokenizer(config: Config, parts: RolloutParts | EnvironmentParts | None) -> Tokenizer | None:
    """The tokenizer of the samples; None where files are trained whose tokenizer is not on this machine."""
    return parts.tokenizer if isinstance(parts, RolloutParts) else local_tokenizer(config.model)


def _close(
    config: Config, *, evaluation: Evaluation | EnvironmentEvaluation | None, skipped: int, interrupted: bool
) -> None:
    """Pictures, the closing table, and what the run shows."""
    metrics = Path(config.run_dir) / "metrics.csv"
    rows = [row for row in read_metrics(metrics) if "packing/packs" in row] if metrics.is_file() else []
    accuracies = {} if evaluation is None else evaluation.results
    if config.callbacks.pictures and any("reward/mean" in row for row in rows):
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
        table.add_row("greedy held-out accuracy", shown(accuracies[steps[0]]), shown(accuracies[steps[-1]]))
    console = Console()
    console.print(table)
    if len(rows) < 20:
        console.print(f"{len(rows)} updates, first and last overlap: they prove the path, not the learning")
    print_closing(config, interrupted=interrupted)
