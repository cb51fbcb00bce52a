"""Several tasks mixed by weight: in every stretch of the order each has its share, to within one problem.

Which task a place of the order belongs to follows from the weights alone: cycles of `CYCLE` places, in each
of which the places of a task are spread evenly. Each task keeps its own order, so each of its problems comes
once in each of its passes. No torch here.

Refuses weights that are no positive numbers, or too small for a cycle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from olmo_rl.config import TaskConfig, TaskKind
from olmo_rl.tasks.problems import Problem, Task, refuse_unknown
from olmo_rl.tasks.rewards import Judged
from olmo_rl.types import Refusal

CYCLE = 1000
FUNCTIONS = ("verifier", "verifiers", "rewards")
_ROWS = ("path", "format", "subset", "split", "prompt_column", "answer_column")
KEYS = ("kind", "name", "parameters", *_ROWS, *FUNCTIONS)
_KINDS = [choice.value for choice in TaskKind if choice is not TaskKind.mixed]


def entry_config(entry: object, *, base: TaskConfig, where: str, further: Sequence[str]) -> TaskConfig:
    """The task that an entry of `task.mix` or `evaluation.sets` describes: its own keys beside those of
    `base` on prompts and judging. Rows are judged as those of `base` unless the entry names functions.
    `further`: names of the entry that are no keys of a task.
    """
    if not isinstance(entry, Mapping):
        raise Refusal(f"{where}={entry!r}: give keys of task, for example {{path: problems.jsonl}}")
    refuse_unknown(list(map(str, entry)), known=[*KEYS, *further], where=where)
    given = {key: value for key, value in entry.items() if key in KEYS}
    kind = given.get("kind", TaskKind.jsonl.value)
    if kind not in _KINDS:
        raise Refusal(f"{where}.kind={kind}: give one of {', '.join(_KINDS)}")
    types = {item.name: str(item.type) for item in fields(TaskConfig)}
    for key, value in given.items():
        wanted: type = Mapping if "dict" in types[key] else str
        if not isinstance(value, wanted):
            raise Refusal(f"{where}.{key}={value!r}: give {'a mapping' if wanted is Mapping else 'text'}")
    plain = TaskConfig()
    base = replace(base, mix={}, name=None, parameters={}, **{key: getattr(plain, key) for key in _ROWS})
    if set(FUNCTIONS) & set(given) or kind != TaskKind.jsonl.value:
        base = replace(base, verifier={}, verifiers={}, rewards={})
    if "format" in given:
        formats = [choice.value for choice in type(plain.format)]
        if given["format"] not in formats:
            raise Refusal(f"{where}.format={given['format']}: give one of {', '.join(formats)}")
        given["format"] = type(plain.format)(given["format"])
    if kind == TaskKind.jsonl.value and given.get("path") is None:
        raise Refusal(f"{where}.path: not set: name a file of rows with prompt and answer")
    return replace(base, **{**given, "kind": TaskKind(kind)})


def set_config(entry: object, *, base: TaskConfig, where: str) -> TaskConfig:
    """The task of an entry of `evaluation.sets`; `eval_problems` is its `problems`, 0: all rows."""
    task = entry_config(entry, base=base, where=where, further=("problems",))
    assert isinstance(entry, Mapping), "else it was refused"
    count = entry.get("problems")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise Refusal(f"{where}.problems={count!r}: give a whole number of at least 1, or null for all")
    if count is None and task.kind is not TaskKind.jsonl:
        raise Refusal(f"{where}.problems: {task.kind.value} has no end: say how many")
    return replace(task, eval_problems=count or 0)


def weight_of(entry: Mapping[str, Any], *, where: str) -> float:
    """The share of an entry relative to the others."""
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise Refusal(f"{where}.weight={weight!r}: give a number above 0")
    return float(weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One task of a mixture and its weight."""

    task: Task
    weight: float


class MixedTask:
    """Problems of several tasks; ids carry the name of the part."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts
        self._cycle = _cycle([part.weight for part in parts.values()])
        for name, count in zip(parts, self._counts(CYCLE), strict=True):
            if count == 0:
                raise Refusal(
                    f"task.mix.{name}.weight={parts[name].weight:g}: less than one of {CYCLE} problems: "
                    "raise it, or leave this part out"
                )

    @property
    def counts(self) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        for part in self._parts.values():
            found.update(part.task.counts)
        return dict(found)

    @property
    def size(self) -> int | None:
        return None

    def epochs(self, place: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for (name, part), count in zip(self._parts.items(), self._counts(place), strict=True):
            passes = part.task.epochs(count)
            if passes:
                found[name] = passes[""]
        return found

    def problems(self, count: int, *, seed: int, start: int = 0) -> list[Problem]:
        before, behind = self._counts(start), self._counts(start + count)
        drawn = [
            iter(self._named(name, part.task.problems(end - first, seed=seed, start=first)))
            for (name, part), first, end in zip(self._parts.items(), before, behind, strict=True)
        ]
        return [next(drawn[self._cycle[place % CYCLE]]) for place in range(start, start + count)]

    def fits(self, problem: Problem) -> bool:
        return self._parts[problem.part].task.fits(problem)

    def held_out(self, count: int) -> list[Problem]:
        found: list[Problem] = []
        for (name, part), share in zip(self._parts.items(), self._counts(count), strict=True):
            try:
                found += self._named(name, part.task.held_out(share))
            except Refusal as refusal:
                raise Refusal(
                    f"task.eval_problems={count}: task.mix.{name} would give {share} of them: {refusal}"
                ) from None
        return found

    def reward(self, problem: Problem, response: str) -> float:
        return self._parts[problem.part].task.reward(problem, response)

    def judge(self, problem: Problem, responses: Sequence[str]) -> list[Judged]:
        return self._parts[problem.part].task.judge(problem, responses)

    @property
    def judges_groups(self) -> bool:
        return any(part.task.judges_groups for part in self._parts.values())

    def start(self, *, seconds: float) -> None:
        for part in self._parts.values():
            part.task.start(seconds=seconds / len(self._parts))

    def check_references(self) -> tuple[str, ...]:
        remarks = [
            (name, remark) for name, part in self._parts.items() for remark in part.task.check_references()
        ]
        return tuple(f"task.mix.{name}: {remark}" for name, remark in remarks)

    def _named(self, name: str, problems: Sequence[Problem]) -> list[Problem]:
        return [replace(problem, id=f"{name}:{problem.id}", part=name) for problem in problems]

    def _counts(self, place: int) -> list[int]:
        """How many of the first `place` places each part has."""
        whole, rest = divmod(place, CYCLE)
        size = len(self._parts)
        every = np.bincount(self._cycle, minlength=size) * whole
        found: list[int] = (every + np.bincount(self._cycle[:rest], minlength=size)).tolist()
        return found


def _cycle(weights: Sequence[float]) -> np.ndarray:
    """int64 [CYCLE]: the part of every place; the next place goes to the part that is furthest behind."""
    shares = np.array(weights, dtype=np.float64) / math.fsum(weights)
    counts = np.zeros(len(weights), dtype=np.int64)
    found = np.zeros(CYCLE, dtype=np.int64)
    for place in range(CYCLE):
        found[place] = int(np.argmax(shares * (place + 1) - counts))
        counts[found[place]] += 1
    return found
