"""Held-out sets by name: the task's own, with the name "", and those of `evaluation.sets`. No torch here.

A named set has keys of a task. Rows of a file are all held out; where the set names no reward function, the
task's judge it. Refuses unknown names and values of a set, and whatever its task refuses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from olmo_rl.config import Config, TaskKind
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.tasks.mixing import set_config
from olmo_rl.tasks.problems import Problem, Task
from olmo_rl.tasks.prompting import task_of
from olmo_rl.tasks.rows import read_problems
from olmo_rl.types import Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Problems that are asked in evaluations alone, and the task that judges them."""

    name: str
    task: Task
    problems: Sequence[Problem]


def held_out_sets(config: Config, *, own: Task | None, tokenizer: Tokenizer) -> list[HeldOut]:
    """The task's own problems where `task.eval_problems` asks for some, then every named set: as many
    its `problems`, or all rows of its file.
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
    task = set_config(entry, base=config.task, where=where)
    problems = None
    if task.kind is TaskKind.jsonl:
        problems = read_problems(task)
        task = replace(
            task, eval_problems=task.eval_problems or len({problem.prompt for problem in problems})
        )
    asked = replace(config, task=task)
    built = task_of(asked, tokenizer=tokenizer, problems=problems, whole=True)
    return HeldOut(name=name, task=built, problems=built.held_out(task.eval_problems))


def start_named(sets: Sequence[HeldOut], *, seconds: float) -> None:
    """Start what judging the named sets needs, within `seconds` for all of them; that of the run has started.
    A set whose turn comes later starts when it first judges.
    """
    ends = time.monotonic() + seconds
    for one in sets:
        left = ends - time.monotonic()
        if one.name and left > 0:
            one.task.start(seconds=left)
