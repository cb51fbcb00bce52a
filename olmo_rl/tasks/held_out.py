"""Held-out sets by name: the task's own, with the name "", and those of `evaluation.sets`. No torch here.

A named set has keys of a task. Rows of a file are all held out; where the set names no reward function, the
task's judge it. Refuses unknown names and values of a set, and whatever its task refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from olmo_rl.config import Config, TaskConfig, TaskKind
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.tasks.kinds import read_problems
from olmo_rl.tasks.problems import Problem, Task, refuse_unknown
from olmo_rl.tasks.prompting import task_of
from olmo_rl.types import Refusal

_FUNCTIONS = ("verifier", "verifiers", "rewards")
_KEYS = ("kind", "name", "parameters", "path", *_FUNCTIONS)
_KINDS = [choice.value for choice in TaskKind]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Problems that are asked in evaluations alone, and the task that judges them."""

    name: str
    task: Task
    problems: Sequence[Problem]


def held_out_sets(config: Config, *, own: Task | None, tokenizer: Tokenizer) -> list[HeldOut]:
    """The task's own problems where `task.eval_problems` asks for some, then every named set: as many
    `problems` as it says, or all rows of its file.
    """
    found = []
    if own is not None and config.task.eval_problems:
        found.append(HeldOut(name="", task=own, problems=own.held_out(config.task.eval_problems)))
    for name, entry in config.evaluation.sets.items():
        where = f"evaluation.sets.{name}"
        try:
            found.append(_named(name, entry, config=config, tokenizer=tokenizer))
        except Refusal as refusal:
            reasons = [r if r.startswith(where) else f"{where}: {r}" for r in refusal.reasons]
            raise Refusal(reasons) from None
    return found


def _named(name: str, entry: object, *, config: Config, tokenizer: Tokenizer) -> HeldOut:
    where = f"evaluation.sets.{name}"
    if not isinstance(entry, Mapping):
        raise Refusal(f"{where}={entry!r}: give keys of task, for example {{path: held_out.jsonl}}")
    refuse_unknown(list(map(str, entry)), known=[*_KEYS, "problems"], where=where)
    count = entry.get("problems")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise Refusal(f"{where}.problems={count!r}: give a whole number of at least 1, or null for all")
    task = _task_config({key: value for key, value in entry.items() if key != "problems"}, config, where)
    problems = None
    if task.kind is TaskKind.jsonl:
        if task.path is None:
            raise Refusal(f"{where}.path: not set: name a file of rows with prompt and answer")
        problems = read_problems(Path(task.path), answers=not task.rewards)
        count = count or len({problem.prompt for problem in problems})
    elif count is None:
        raise Refusal(f"{where}.problems: {task.kind.value} has no end: say how many")
    asked = replace(config, task=replace(task, eval_problems=count))
    built = task_of(asked, tokenizer=tokenizer, problems=problems, whole=True)
    return HeldOut(name=name, task=built, problems=built.held_out(count))


def _task_config(given: Mapping[str, Any], config: Config, where: str) -> TaskConfig:
    """The task of a set: what it names, beside keys of the run's task on prompts and judging."""
    kind = given.get("kind", TaskKind.jsonl.value)
    if kind not in _KINDS:
        raise Refusal(f"{where}.kind={kind}: give one of {', '.join(_KINDS)}")
    types = {item.name: str(item.type) for item in fields(TaskConfig)}
    for key, value in given.items():
        wanted: type = Mapping if "dict" in types[key] else str
        if not isinstance(value, wanted):
            raise Refusal(f"{where}.{key}={value!r}: give {'a mapping' if wanted is Mapping else 'text'}")
    base = replace(config.task, name=None, parameters={}, path=None)
    if set(_FUNCTIONS) & set(given) or kind != TaskKind.jsonl.value:
        base = replace(base, verifier={}, verifiers={}, rewards={})
    return replace(base, **{**given, "kind": TaskKind(kind)})
