"""The parts that generate collections: a task, its tokenizer, and a built-in or a serving engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from olmo_rl.config import Config, Source
from olmo_rl.data.tokenizers import Tokenizer, fitting_tokenizer
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.policy.weights import read_weights
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.tasks.problems import Problem, Task
from olmo_rl.tasks.prompting import task_of
from olmo_rl.training.publication import LocalPublication, Publication, build_remote
from olmo_rl.training.strategy import ExpertParallelStrategy, local_device


@dataclass(kw_only=True, slots=True)
class RolloutParts:
    """The parts that generating and held-out evaluation share. `publish` sends a policy's weights and their
    version to the engine, on all ranks, and returns metrics; `close` releases it.
    """

    task: Task
    tokenizer: Tokenizer
    engine: LocalEngine | RemoteEngine
    publish: Callable[[nn.Module, int], dict[str, float]]
    close: Callable[[], None] = lambda: None


def build_local(config: Config, *, problems: Sequence[Problem] | None = None) -> RolloutParts:
    """Task, tokenizer and engine on this rank's device."""
    engine = LocalEngine(config.model, device=local_device(config))
    tokenizer = fitting_tokenizer(config.model)
    return RolloutParts(
        task=_started(config, tokenizer=tokenizer, problems=problems),
        tokenizer=tokenizer,
        engine=engine,
        publish=LocalPublication(engine),
    )


def build_alone(config: Config) -> RolloutParts:
    """The parts of a process of its own: an engine with the weights of `init_from`, or a client of serving
    engines as they are.
    """
    if config.asks_engines:
        remote = RemoteEngine(config.rollouts, axis=None, vocab_size=config.model.vocab_size)  # no routes
        tokenizer = fitting_tokenizer(config.model)
        task = _started(config, tokenizer=tokenizer, problems=None)
        return RolloutParts(
            task=task, tokenizer=tokenizer, engine=remote, publish=_unpublished, close=remote.close
        )
    assert config.init_from is not None, "refusals require init_from without serving engines"
    parts = build_local(config)
    assert isinstance(parts.engine, LocalEngine)
    parts.engine.publish(read_weights(config.init_from), 0)
    return parts


def _unpublished(policy: nn.Module, version: int) -> dict[str, float]:
    raise AssertionError("nothing is published to engines that are asked as they are")


def build_parts(
    config: Config, *, strategy: ExpertParallelStrategy, problems: Sequence[Problem] | None = None
) -> RolloutParts:
    """The generator: the engine of this process, or a client of serving engines. `problems`: those of
    `task.path` where it was read before.
    """
    if config.rollouts.source is Source.local:
        return build_local(config, problems=problems)
    remote = build_remote(config, device=local_device(config))
    tokenizer = fitting_tokenizer(config.model)
    return RolloutParts(
        task=_started(config, tokenizer=tokenizer, problems=problems),
        tokenizer=tokenizer,
        engine=remote,
        publish=Publication(remote, config=config, strategy=strategy),
        close=remote.close,
    )


def _started(config: Config, *, tokenizer: Tokenizer, problems: Sequence[Problem] | None) -> Task:
    """The task, its verifiers started: later the other ranks would wait for this one in a collective."""
    task = task_of(config, tokenizer=tokenizer, problems=problems)
    task.start(seconds=config.strategy.timeout_seconds / 2)
    return task
