"""The parts behind an environment: its process and gateway at rank 0, and engines.

With `rollouts=local` every rank's own engine is served on 127.0.0.1 (`HostedEngine`), and the gateway asks
them all; with serving engines it asks those of `rollouts.urls`. Weights reach them as in any other run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from olmo_rl.config import Config, RolloutsConfig
from olmo_rl.config import Source as SourceKind
from olmo_rl.data.tokenizers import fitting_tokenizer
from olmo_rl.environments.environment import Start
from olmo_rl.policy.engine import LocalEngine
from olmo_rl.policy.sharded import whole_weights
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.environments import EnvironmentProcess, Ready
from olmo_rl.rollouts.gateway import Gateway, Limits
from olmo_rl.rollouts.serving.hosted import HostedEngine, new_token
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.training.publication import Publication, build_remote
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.strategy import ExpertParallelStrategy, cluster_environment, local_device
from olmo_rl.types import Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What rank 0 alone has: `engine` asks the engines."""

    process: EnvironmentProcess
    gateway: Gateway
    engine: RemoteEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentParts:
    """`ready`: what the environment has; `host`: of rank 0, None at others; `remote`: this rank's client of
    serving engines, None where engines are the run's own. `publish` sends a policy's weights and their
    version to the engines, on all ranks, and returns metrics; `close` releases everything but the process.
    """

    ready: Ready
    host: Host | None
    remote: RemoteEngine | None
    publish: Callable[[nn.Module, int], dict[str, float]]
    close: Callable[[], None]


class OpenedEnvironment:
    """The environment process of a run, from before its warm start to its end; rank 0 alone has one."""

    def __init__(self, config: Config) -> None:
        self.token = new_token()
        self.process: EnvironmentProcess | None = None
        if cluster_environment().global_rank() == 0:
            self.process = EnvironmentProcess(
                start_of(config),
                token=self.token,
                start_seconds=config.environment.start_seconds,
                stall_seconds=config.environment.stall_seconds,
            )

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.close()


def open_environment(config: Config) -> OpenedEnvironment | None:
    """Start the process of `environment.taskset`; None without one."""
    if config.environment.taskset is None:
        return None
    if importlib.util.find_spec("verifiers") is None:
        raise Refusal(
            f"environment.taskset={config.environment.taskset}: the verifiers library is not installed: "
            "pip install -c constraints.txt -e '.[environments]'"
        )
    return OpenedEnvironment(config)


def start_of(config: Config) -> Start:
    """What the process receives."""
    environment = config.environment
    assert environment.taskset is not None, "a run without an environment opens none"
    return Start(
        taskset=environment.taskset,
        env=environment.env,
        harness=environment.harness,
        renderer=environment.renderer,
        settings=environment.settings,
        tasks=environment.tasks,
        max_turns=environment.max_turns,
        timeout_seconds=environment.timeout_seconds,
        concurrency=environment.concurrency,
        tokenizer=config.model.tokenizer,
        directory=f"{config.run_dir}/environment",
    )


class HostedPublication:
    """Whole weights for the engines of all ranks; rank 0's client then knows that they have them."""

    def __init__(
        self, hosted: HostedEngine, *, client: RemoteEngine | None, strategy: ExpertParallelStrategy
    ) -> None:
        self._hosted, self._client, self._strategy = hosted, client, strategy

    def __call__(self, decoder: nn.Module, version: int) -> dict[str, float]:
        """Publish on all ranks."""
        self._hosted.publish(whole_weights(decoder), version)
        self._strategy.barrier()
        if self._client is not None:
            self._client.adopt(None, version, versions={e.url: version for e in self._client.engines})
        return {}


def build_environment_parts(
    config: Config, *, opened: OpenedEnvironment, strategy: ExpertParallelStrategy
) -> EnvironmentParts:
    """Engines, gateway and the environment that serves through it. A collective of all ranks."""
    if config.rollouts.source is SourceKind.local:
        token = strategy.from_rank_zero(lambda: opened.token)
        hosted = HostedEngine(
            LocalEngine(config.model, device=local_device(config)),
            model=config.model,
            tokenizer=fitting_tokenizer(config.model),
            token=token,
        )
        urls = strategy.gather_objects(hosted.url)
        client = None if opened.process is None else _client_of(config, urls=urls, token=token)
        publish: Callable[[nn.Module, int], dict[str, float]]
        publish, remote = HostedPublication(hosted, client=client, strategy=strategy), None
        closing: list[Callable[[], None]] = [hosted.close]
        if client is not None:
            closing.insert(0, client.close)
    else:
        client = remote = build_remote(config, device=local_device(config))
        publish = Publication(remote, config=config, strategy=strategy)
        closing = [remote.close]
    host, serving = None, None
    if opened.process is not None:
        assert client is not None, "rank 0 has a client"
        gateway = Gateway(client, limits=limits_of(config), token=opened.token, seed=config.seed)
        closing.insert(0, gateway.close)
        serving = opened.process.serve(gateway.url)
    strategy.meet(serving)
    ready = outcome(serving.result) if serving is not None else None
    (found,) = together([strategy.from_rank_zero(lambda: ready)])
    assert found is not None, "rank 0 has the process"
    if opened.process is not None and client is not None:
        host = Host(process=opened.process, gateway=gateway, engine=client)

    def close() -> None:
        for part in closing:
            part()

    return EnvironmentParts(ready=found, host=host, remote=remote, publish=publish, close=close)


def limits_of(config: Config) -> Limits:
    """Bounds of what the gateway answers."""
    return Limits(
        vocab_size=config.model.vocab_size,
        context=config.model.max_seq_len,
        max_new_tokens=config.rollouts.max_new_tokens,
        calls=config.environment.max_turns,
        num_experts=config.model.num_experts if config.replay else 0,
    )


def _client_of(config: Config, *, urls: list[str], token: str) -> RemoteEngine:
    """Rank 0's client of the engines of all ranks."""
    layout = config.model.expert_layout if config.replay else None
    axis = None if layout is None else RouteAxis(layout=layout, num_layers=len(config.model.layer_types))
    rollouts: RolloutsConfig = replace(
        config.rollouts,
        source=SourceKind.vllm,
        urls=urls,
        token=token,
        concurrency=config.environment.concurrency,
    )
    return RemoteEngine(rollouts, axis=axis, vocab_size=config.model.vocab_size)
