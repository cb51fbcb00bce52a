"""An environment of the verifiers library as a run asks for it: its configuration, tasks, episodes.

Everything runs in this process or in local subprocesses; what would run elsewhere is refused by name, as are
two environments of one name and tasks without end. One task in ten is held out, by its key. Importing this
module imports nothing of the library: the trainer reads `Start`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from olmo_rl.environments.byte_tokenizer import write_byte_tokenizer
from olmo_rl.environments.records import SHOWN, episode_record, failed_record
from olmo_rl.tasks.problems import is_held_out
from olmo_rl.types import Refusal

TOKEN_VARIABLE = "OLMO_RL_GATEWAY_TOKEN"
# An episode's own limits end it; this is for code that does not let itself be ended.
GRACE_SECONDS = 30.0
PLAIN = {"name": "custom", "import_path": "olmo_rl.environments.plain.PlainRenderer"}
TRAINING, HELD_OUT = "training", "held_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What the process receives at its start; fields of the same names are keys of `environment`."""

    taskset: str
    env: str
    harness: str | None
    renderer: dict[str, Any]
    settings: dict[str, Any]
    tasks: int | None
    max_turns: int
    timeout_seconds: float
    concurrency: int
    tokenizer: str
    directory: str


class Environment:
    """The library's environment, its tasks by side, and how episodes are asked for."""

    def __init__(self, start: Start) -> None:
        self._start = start
        vf = _library()
        self._env = vf.load_environment(resolved_config(start))
        tasks = _tasks(self._env.taskset, start=start)
        self.sides: dict[str, list[Any]] = {TRAINING: [], HELD_OUT: []}
        for task in tasks:
            self.sides[HELD_OUT if is_held_out(task.key) else TRAINING].append(task)
        if not self.sides[TRAINING]:
            raise Refusal(
                f"environment.taskset={start.taskset}: {len(tasks)} tasks, and none of them to train on: one "
                "task in ten is held out"
            )
        self._client: Any = None
        self._episodes = asyncio.Semaphore(start.concurrency)

    @property
    def agents(self) -> list[str]:
        """The names of its roles."""
        from verifiers.v1.configs.agent import agent_config_fields

        return list(agent_config_fields(self._env.config))

    @property
    def has(self) -> dict[str, Any]:
        """The numbers of tasks by side, and the agents."""
        return {"tasks": {side: len(tasks) for side, tasks in self.sides.items()}, "agents": self.agents}

    def serving(self, url: str) -> Any:
        """What episodes share, tool servers among it, while the block runs; their model is behind `url`."""
        self._client = self._client_config(url)
        return self._env.serving()

    def _client_config(self, url: str) -> Any:
        return _library().TrainClientConfig(
            base_url=url,
            api_key_var=TOKEN_VARIABLE,
            renderer=self._start.renderer or PLAIN,
            renderer_model_name=tokenizer_directory(self._start),
        )

    async def record(self, slot: int, side: str, number: int) -> dict[str, Any]:
        """Run one episode; whatever happens to it is in its record."""
        vf = _library()
        task = self.sides[side][number]
        context = vf.ModelContext(model="policy", client=self._client, sampling=vf.SamplingConfig(seed=slot))
        async with self._episodes:
            run = asyncio.create_task(self._env.run_slot(self._env.slots(task)[0], context))
            # Twice: its hook for the end of an episode has a limit of its own.
            seconds = 2 * self._start.timeout_seconds + GRACE_SECONDS
            try:
                done, _ = await asyncio.wait([run], timeout=seconds)
            finally:
                run.cancel()
            if not done:
                return failed_record(slot, fault=f"it did not end within {seconds:g} s", timeout=True)
            if run.cancelled():
                return failed_record(slot, fault="cancelled by the environment itself")
            if (error := run.exception()) is not None:
                return failed_record(slot, fault=one_line(error))
            return episode_record(run.result(), slot=slot)

    def demonstrations(self, numbers: Sequence[int]) -> list[dict[str, bytes]]:
        """Tokens and the mask of what a policy would have written, of `demonstration()` of training tasks."""
        from renderers import create_renderer
        from renderers.base import load_tokenizer

        client = self._client_config("http://127.0.0.1/v1")  # which nothing is asked of
        renderer = create_renderer(load_tokenizer(client.renderer_model_name), client.renderer)
        return [demonstration(self.sides[TRAINING][number], renderer=renderer) for number in numbers]


def demonstration(task: Any, *, renderer: Any) -> dict[str, bytes]:
    """The rendered conversation of one task. Raises Refusal where the task or the renderer gives none."""
    if not hasattr(task, "demonstration"):
        raise Refusal(
            f"warm_start.steps: {type(task).__name__} has no demonstration(): give the task one, which "
            "returns messages (and tools, as a pair), or set warm_start.steps=0"
        )
    given = task.demonstration()
    messages, tools = given if isinstance(given, tuple) else (given, None)
    rendered = renderer.render(messages, tools=tools)
    if len(rendered.sampled_mask) != len(rendered.token_ids) or not any(rendered.sampled_mask):
        raise Refusal(
            "environment.renderer: it does not report which tokens a policy samples: a warm start needs one "
            "that does, or warm_start.steps=0"
        )
    return {
        "tokens": np.asarray(rendered.token_ids, dtype="<i4").tobytes(),
        "mask": np.asarray(rendered.sampled_mask, dtype=np.bool_).tobytes(),
    }


def tokenizer_directory(start: Start) -> str:
    """The directory or name that the library reads the tokenizer from."""
    if start.tokenizer != "bytes":
        return start.tokenizer
    directory = Path(start.directory) / "byte_tokenizer"
    write_byte_tokenizer(directory)
    return str(directory)


def resolved_config(start: Start) -> Any:
    """The library's configuration: every agent in a local subprocess, with the run's harness and limits,
    which `environment.settings` may change. Refuses what runs anywhere else.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    vf = _library()
    for id, kind in ((start.taskset, "tasksets"), (start.env, "envs")):
        if id:
            refuse_two_of_one_name(id, kind=kind)
    kind = env_config_type(start.taskset, start.env)
    harness = start.harness or default_harness_id(start.taskset)
    if start.harness is None and harness == "bash":  # the library's own, which fetches a program
        harness = _chat_loop()
    data: dict[str, Any] = {
        "id": start.env,
        "taskset": {"id": start.taskset},
        "timeout": {"episode": start.timeout_seconds, "finalize": start.timeout_seconds},
        "interception": {"type": "server"},
    }
    for name, field in kind.model_fields.items():
        if not hasattr(field.default, "harness"):
            continue
        own = field.default.harness
        data[name] = {
            "runtime": {"type": "subprocess"},
            "max_turns": start.max_turns,
            "timeout": {"rollout": start.timeout_seconds},
            **({"harness": {"id": harness}} if own is None else {}),
        }
    config = vf.resolve_env_config(_merged(data, start.settings))
    for name, agent in agent_config_fields(config).items():
        if agent.runtime.type != "subprocess":
            raise Refusal(
                f"environment.settings.{name}.runtime.type={agent.runtime.type}: agents run in a local "
                "subprocess alone: leave it out"
            )
    taskset = vf.load_taskset(config.taskset)
    servers = [*taskset.toolsets(config.taskset), *type(taskset).task_type().toolsets(config.taskset.task)]
    for server in servers:
        url, runtime = getattr(server.config, "url", None), server.config.runtime
        if url is not None or runtime.type != "subprocess":
            raise Refusal(
                f"environment.taskset={start.taskset}: its tools {server.server_name!r} run "
                f"{f'at {url}' if url is not None else f'in {runtime.type}'}: only local subprocesses do"
            )
    return config


def refuse_two_of_one_name(id: str, *, kind: str) -> None:
    """Refuse an id that names a module of the library and another one, or one of two distributions."""
    module = id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    owners = set(packages_distributions().get(module, []))
    own = importlib.util.find_spec(f"verifiers.v1.{kind}.{module}") is not None
    if len(owners) + own > 1 or (own and importlib.util.find_spec(module) is not None):
        names = sorted(owners) + (["verifiers"] if own else [])
        raise Refusal(
            f"environment: {module!r} is the name of two environments, of {' and '.join(names)}: rename or "
            "remove one of them"
        )


def _tasks(taskset: Any, *, start: Start) -> list[Any]:
    """Every task, or the first `environment.tasks`."""
    if not taskset.bounded and start.tasks is None:
        raise Refusal(
            f"environment.taskset={start.taskset} has tasks without end: set environment.tasks to how many "
            "of them to read"
        )
    found = list(itertools.islice(iter(taskset), start.tasks))
    if not found:
        raise Refusal(f"environment.taskset={start.taskset}: it has no task")
    return found


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `over`, mapping by mapping."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _library() -> ModuleType:
    """The library, imported once."""
    import verifiers.v1 as vf

    return vf


def _chat_loop() -> str:
    """Our harness under a name that the library can import: it reads dots as its own packages."""
    from olmo_rl.environments import chat_loop

    sys.modules[chat_loop.MODULE] = chat_loop
    return chat_loop.MODULE


def one_line(error: BaseException) -> str:
    """An exception in one line: what a configuration lacks stands in the later ones of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:SHOWN]
