"""Trajectories of agents in ATIF, the Agent Trajectory Interchange Format of Harbor, v1.4 to v1.8.

A file holds one trajectory, a .jsonl file one a line. Of a directory every `trajectory*.json` below it is
read, as Harbor writes them into its jobs, and all of them are one collection: trials of one task are a
group, and `result.json` of the trial has the rewards. Elsewhere `extra` of a trajectory may name `reward`,
`group_id` and `policy_version`.

Every step of the agent needs `metrics` with `prompt_token_ids` (the whole history that the model read),
`completion_token_ids` and `logprobs`: text is never encoded again. Steps that a trajectory repeats
(`is_copied_context`) or that no model wrote (`llm_call_count` 0) are context. While a prompt continues all
tokens before it, turns are one sample, in which only completions are generated; where the history was
rewritten, a further sample of the same group and reward begins. Embedded subagents are samples of their own,
those of another model are left out. `metrics.extra.routed_experts` has the routes of a turn, prompt included.

Refuses: other versions, names that ATIF does not have, steps out of order, agent steps without token ids or
log-probs, steps that add several calls of a model up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from olmo_rl.data.columns import converted
from olmo_rl.data.json_lines import parse_line
from olmo_rl.data.metadata import unknown_name
from olmo_rl.rollouts.importers.engine_answers import JoinedTurns, join_turns
from olmo_rl.rollouts.importers.foreign import ForeignSample, ReadOptions, located, text_of
from olmo_rl.rollouts.wire import Completion, RouteAxis, decode_routes, version_of
from olmo_rl.types import Kind, Refusal, Sampling

NAME = "trajectory*.json"
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(4, 9))
TRAJECTORY = (
    "schema_version",
    "session_id",
    "trajectory_id",
    "agent",
    "steps",
    "notes",
    "final_metrics",
    "continued_trajectory_ref",
    "extra",
    "subagent_trajectories",
)
STEP = (
    "step_id",
    "timestamp",
    "source",
    "model_name",
    "reasoning_effort",
    "message",
    "reasoning_content",
    "tool_calls",
    "observation",
    "metrics",
    "is_copied_context",
    "llm_call_count",
    "extra",
)
METRICS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cost_usd",
    "prompt_token_ids",
    "completion_token_ids",
    "logprobs",
    "extra",
)
_RECORD = "terminus-2 records them with collect_rollout_details=true"
_TRIAL_DEPTH = 4  # directories between a trajectory and the result of its trial, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The facts of a trajectory that stand beside it. `left_out`: why its trial has no reward to train on."""

    name: str | None = None
    group: str | None = None
    reward: Any = None
    policy_version: int | None = None
    left_out: str | None = None


@dataclass(kw_only=True, slots=True)
class Trials:
    """Results of trials, each read once."""

    root: Path
    found: dict[Path, Mapping[str, Any] | None] = field(default_factory=dict)

    def of(self, path: Path) -> tuple[Mapping[str, Any], Path] | None:
        """The result that belongs to a trajectory, and its directory."""
        for directory in list(path.parents)[:_TRIAL_DEPTH]:
            file = directory / "result.json"
            if file not in self.found:
                result = _document(file) if file.is_file() else None
                named = isinstance(result, Mapping) and "trial_name" in result  # a job has a result too
                self.found[file] = result if named else None
            if (known := self.found[file]) is not None:
                return known, directory
            if directory == self.root:
                break
        return None


def read_trajectories(path: Path, *, options: ReadOptions) -> Iterator[ForeignSample]:
    """Every sample of one file, or of all trajectories below a directory."""
    trials = Trials(root=path if path.is_dir() else path.parent)
    for file in sorted(path.rglob(NAME)) if path.is_dir() else [path]:
        found = trials.of(file)
        beside = Trial() if found is None else _trial(*found, file=file)
        for where, document in _documents(file):
            with located(where):
                yield from _samples(document, trial=beside, where=where, axis=options.axis)


def _documents(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix != ".jsonl":
        yield str(file), _document(file)
        return
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line.strip():
            where = f"{file} line {number}"
            yield where, parse_line(line, where=where)


def _document(file: Path) -> Any:
    return parse_line(file.read_bytes(), where=str(file))


def _trial(result: Mapping[str, Any], directory: Path, *, file: Path) -> Trial:
    """What `result.json` records about the trajectory in `file`: of its step in trials of several steps."""
    name, group, judged = result["trial_name"], result.get("task_name"), result
    parts = file.relative_to(directory).parts
    with located(str(directory / "result.json")):
        if parts[0] == "steps":
            steps = _objects(result, "step_results")
            judged = next((step for step in steps if step.get("step_name") == parts[1]), {})
            name, group = f"{name}:{parts[1]}", f"{group}:{parts[1]}"
        rewards = _object(_object(judged, "verifier_result"), "rewards")
        raised = _object(judged, "exception_info") or _object(result, "exception_info")
    exception = raised.get("exception_type")
    if file.stem != "trajectory":  # a continuation, or a subagent in a file of its own
        name = f"{name}/{file.stem.removeprefix('trajectory.')}"
    left_out = None
    if not rewards and exception is not None:
        left_out = f"trial ended with {exception}"
    elif rewards and exception is not None and result.get("reward_valid") is False:
        left_out = f"reward is not valid after {exception}"
    reward = next(iter(rewards.values())) if rewards and len(rewards) == 1 else rewards or None
    return Trial(name=str(name), group=str(group), reward=reward, left_out=left_out)


def _samples(
    document: Any, *, trial: Trial, where: str, axis: RouteAxis | None, model: Any = None
) -> Iterator[ForeignSample]:
    """The samples of one trajectory, then those of its subagents. `model`: of the agent that delegated."""
    steps = _checked(document)
    agent, extra = document["agent"], _object(document, "extra")
    name = document.get("trajectory_id") or document.get("session_id")
    own = Trial(
        name=trial.name or (None if name is None else str(name)),
        group=trial.group or _optional(extra, "group_id"),
        reward=extra.get("reward") if trial.reward is None else trial.reward,
        policy_version=version_of(extra.get("policy_version")),
        left_out=trial.left_out,
    )
    if model is not None and agent.get("model_name") not in (None, model):
        yield ForeignSample(where=where, left_out="subagent of another model")
    else:
        yield from _trajectory(document, steps=steps, trial=own, where=where, axis=axis)
    for number, inner in enumerate(_objects(document, "subagent_trajectories")):
        at = f"{where}, subagent {number}"
        with located(at):
            id = inner.get("trajectory_id")
            if id is None:
                raise Refusal("an embedded subagent without trajectory_id")
            below = Trial(name=f"{own.name}/{id}", group=own.group, reward=own.reward, left_out=own.left_out)
            yield from _samples(inner, trial=below, where=at, axis=axis, model=agent.get("model_name") or "")


def _trajectory(
    document: Mapping[str, Any],
    *,
    steps: list[Mapping[str, Any]],
    trial: Trial,
    where: str,
    axis: RouteAxis | None,
) -> Iterator[ForeignSample]:
    if trial.left_out is not None:
        yield ForeignSample(where=where, left_out=trial.left_out)
        return
    turns = [
        _turn(step, where=f"{where} step {step['step_id']}", axis=axis)
        for step in steps
        if step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0
    ]
    if not turns:
        yield ForeignSample(where=where, left_out="no turn of a model")
        return
    ignored = _unread(document, steps=steps)
    sampling = _sampling(_object(document["agent"], "extra"))
    prompt = next((text_of(step["message"]) for step in steps if step["source"] == "user"), None)
    media = any(_has_media(step) for step in steps)
    for number, part in enumerate(_continued(turns)):
        sample: JoinedTurns = join_turns(part, where=where)
        yield ForeignSample(
            where=where if number == 0 else f"{where}, history {number}",
            values={
                "id": trial.name if number == 0 or trial.name is None else f"{trial.name}.{number}",
                "group": trial.group,
                "tokens": sample.tokens,
                "response_mask": sample.response_mask,
                "behavior_logprobs": sample.logprobs,
                "reward": trial.reward,
                "routes": sample.routes,
                "policy_version": trial.policy_version,
                "prompt": prompt,
                "has_placeholders": media,
            },
            sampling=sampling,
            surplus_rows=sample.surplus_rows,
            ignored=ignored if number == 0 else [],
        )


def _continued(turns: list[Completion]) -> Iterator[list[Completion]]:
    """Runs of turns, each of which continues all tokens before it."""
    run: list[Completion] = []
    so_far = np.zeros(0, dtype=np.int32)
    for turn in turns:
        if run and not np.array_equal(turn.prompt[: len(so_far)], so_far):
            yield run
            run = []
        run.append(turn)
        so_far = np.concatenate([turn.prompt, turn.tokens])
    yield run


def _checked(document: Any) -> list[Mapping[str, Any]]:
    """The steps of a trajectory of the form that the format has."""
    if not isinstance(document, Mapping) or "schema_version" not in document:
        raise Refusal("no ATIF trajectory: an object with schema_version, agent and steps is expected")
    version = document["schema_version"]
    if version not in VERSIONS:
        raise Refusal(
            f"schema_version is {version!r:.40}: known are {VERSIONS[0]}, the first with token ids of "
            f"prompts, to {VERSIONS[-1]}"
        )
    _refuse_unknown(document, known=TRAJECTORY)
    steps, agent = document.get("steps"), document.get("agent")
    if not isinstance(agent, Mapping) or not isinstance(steps, list) or not steps:
        raise Refusal("agent is no object, or steps is no list with entries")
    for number, step in enumerate(steps, start=1):
        if not isinstance(step, Mapping) or step.get("step_id") != number:
            raise Refusal(f"step {number} has another step_id, or is no object: steps count from 1")
        with located(f"step {number}"):
            _refuse_unknown(step, known=STEP)
            if step.get("source") not in ("system", "user", "agent"):
                raise Refusal(f"source is {step.get('source')!r:.40}: expected system, user or agent")
            if "message" not in step:
                raise Refusal("message is missing")
    return steps


def _refuse_unknown(found: Mapping[str, Any], *, known: tuple[str, ...]) -> None:
    for name in found:
        if name not in known:
            raise Refusal(unknown_name(str(name), known))


def _turn(step: Mapping[str, Any], *, where: str, axis: RouteAxis | None) -> Completion:
    """One call of a model, from its metrics."""
    with located(where):
        calls = step.get("llm_call_count")
        if calls not in (None, 1):
            raise Refusal(
                f"llm_call_count is {calls}: the metrics of several calls are added up, they are no sequence"
            )
        metrics = _object(step, "metrics")
        if not metrics:
            raise Refusal(
                f"no metrics, so no token ids: training needs those that the model read ({_RECORD})"
            )
        _refuse_unknown(metrics, known=METRICS)
        missing = [n for n in ("prompt_token_ids", "completion_token_ids", "logprobs") if not metrics.get(n)]
        if missing:
            raise Refusal(
                f"metrics have no {', '.join(missing)}: text is not encoded again, training needs what the "
                f"model read and wrote ({_RECORD})"
            )
        prompt = converted(metrics["prompt_token_ids"], kind=Kind.tokens, name="prompt_token_ids")
        tokens = converted(metrics["completion_token_ids"], kind=Kind.tokens, name="completion_token_ids")
        logprobs = converted(metrics["logprobs"], kind=Kind.logprobs, name="logprobs")
        if len(logprobs) != len(tokens):
            raise Refusal(f"{len(logprobs)} logprobs for {len(tokens)} completion_token_ids")
        rows = len(prompt) + len(tokens) - 1
        routes, surplus = None, 0
        recorded = _object(metrics, "extra").get("routed_experts")
        if axis is not None and recorded is not None:
            routes = decode_routes(recorded, axis=axis, rows=rows, where="routed_experts")
            surplus = len(routes) - rows
            if surplus not in (0, 1):
                raise Refusal(
                    f"routed_experts have {len(routes)} rows for {rows + 1} tokens, expected {rows}"
                )
            routes = routes[:rows]
    return Completion(
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        routes=routes,
        finish_reason="stop",
        policy_version=None,
        surplus_rows=surplus,
    )


def _sampling(extra: Mapping[str, Any]) -> Sampling:
    """The settings that the agent records about its model: at its root, or as arguments of every call."""
    given = {**_object(extra, "llm_kwargs"), **extra}
    names = [entry.name for entry in fields(Sampling)]
    return Sampling(**{name: given[name] for name in names if type(given.get(name)) in (int, float)})


def _results(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the agent observed in a step."""
    return _objects(_object(step, "observation"), "results")


def _unread(document: Mapping[str, Any], *, steps: list[Mapping[str, Any]]) -> list[str]:
    """Parts that lie in other files: they are not followed from here."""
    unread = [] if document.get("continued_trajectory_ref") is None else ["continued_trajectory_ref"]
    results = [result for step in steps for result in _results(step)]
    references = [one for result in results for one in _objects(result, "subagent_trajectory_ref")]
    return unread + ["trajectory_path" for one in references if one.get("trajectory_path") is not None]


def _has_media(step: Mapping[str, Any]) -> bool:
    """Whether tokens of a step stand for images or audio."""
    contents = [step["message"], *(result.get("content") for result in _results(step))]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


def _object(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under a name; {} where there is none."""
    value = found.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise Refusal(f"{name} is {value!r:.80}: expected an object")
    return value or {}


def _objects(found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The list of objects under a name; [] where there is none."""
    value = found.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(x, Mapping) for x in value)):
        raise Refusal(f"{name} is {value!r:.80}: expected a list of objects")
    return value or []


def _optional(extra: Mapping[str, Any], name: str) -> str | None:
    value = extra.get(name)
    return None if value is None else str(converted(value, kind=Kind.name, name=name))
