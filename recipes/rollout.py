"""Generate collections with the local engine and write them as rollout files that `rollouts=files` reads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from olmo_rl.collections.environment_parts import (
    EnvironmentParts,
    OpenedEnvironment,
    build_environment_parts,
    open_environment,
)
from olmo_rl.collections.environment_source import EnvironmentSource
from olmo_rl.collections.generation import RolloutParts, build_parts
from olmo_rl.collections.sources import GeneratingSource, RolloutSource
from olmo_rl.config import Config
from olmo_rl.data.files import write_collection
from olmo_rl.data.inputs import Inputs
from olmo_rl.data.means import Mean, shown
from olmo_rl.running.trainer import build_trainer
from olmo_rl.running.warm_start import warm_start
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy


def generate(config: Config, *, inputs: Inputs | None = None) -> None:
    """One rank, top to bottom: load weights, publish them to the engine, generate, write. `inputs`: what the
    preflight read.
    """
    environment = open_environment(config)
    try:
        _generate(config, inputs=inputs, environment=environment)
    finally:
        if environment is not None:
            environment.close()


def _generate(config: Config, *, inputs: Inputs | None, environment: OpenedEnvironment | None) -> None:
    problems = None if inputs is None else inputs.problems
    config = warm_start(config, problems=problems, environment=environment)
    strategy = ExpertParallelStrategy(config)
    parts: RolloutParts | EnvironmentParts
    source: RolloutSource
    if environment is None:
        parts = build_parts(config, strategy=strategy, problems=problems)
        source = GeneratingSource(config, parts=parts, strategy=strategy)
    else:
        parts = build_environment_parts(config, opened=environment, strategy=strategy)
        source = EnvironmentSource(config, parts=parts, strategy=strategy)
    directory = Path(config.run_dir) / "rollouts"

    module = PolicyModule(config, objective=POLICY)
    module.publish = parts.publish
    samples = config.batch.samples_per_step
    assert samples is not None, "refusals require batch.samples_per_step for a generating source"
    groups = -(-samples * config.batch.steps_per_collection // config.rollouts.group_size)

    def draw(index: int) -> None:
        path = directory / f"collection-{int(index):05d}.parquet"
        if strategy.from_rank_zero(path.is_file):  # written before a requeue: ckpt_path=auto
            source.pass_over(groups)
            return
        collection = source.draw(int(index), attempt=0, groups=groups)
        assert collection is not None, "a generating source is never exhausted"
        if strategy.global_rank == 0:
            judged = [sample for sample in collection.samples if math.isfinite(sample.reward)]
            failed = len(collection.samples) - len(judged)
            collection = replace(collection, samples=judged)
            rewards = [sample.reward for sample in judged]
            tokens = int(collection.lengths.sum())
            write_collection(collection, path)
            mean = shown(Mean.of(rewards).value)
            left_out = f", {failed} without a verdict left out" if failed else ""
            print(f"{path.name}: {len(rewards)} samples, {tokens} tokens, mean reward {mean}{left_out}")

    module.on_predict = draw
    try:
        trainer = build_trainer(config, strategy=strategy, max_steps=-1, callbacks=[], loggers=[])
        trainer.predict(module, dataloaders=range(config.rollouts.collections), return_predictions=False)
    finally:
        parts.close()
    if trainer.is_global_zero:
        Console().print(f"rollouts: {directory}", soft_wrap=True)
