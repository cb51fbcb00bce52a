"""Problems of reasoning-gym. Imported by `tasks.build_task` alone, since the package takes seconds to import.

Refuses: unknown datasets and parameters, parameters that the dataset itself does not take.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS, create_dataset

from olmo_rl.config import TaskConfig
from olmo_rl.tasks.problems import (
    HELD_OUT_SEED,
    MadeOnDemand,
    Problem,
    blocks,
    refuse_unknown,
    take_held_out,
)
from olmo_rl.types import Refusal

# A generated dataset that gives nothing new this many times in a row is exhausted.
PATIENCE = 20
# Datasets whose questions have several right answers, or give none. Only here the dataset's own verifier
# can give full marks: elsewhere such verifiers also give full marks to answers that are merely near.
SEVERAL_ANSWERS = frozenset(
    {
        "boxnet",
        "countdown",
        "graph_color",
        "group_anagrams",
        "intermediate_integration",
        "jugs",
        "kakurasu",
        "knight_swap",
        "n_queens",
        "palindrome_generation",
        "propositional_logic",
        "puzzle24",
        "quantum_lock",
        "rubiks_cube",
        "rush_hour",
        "shortest_path",
        "simple_integration",
        "sokoban",
        "tower_of_hanoi",
        "word_ladder",
    }
)
# What verifiers of datasets raise on text that they cannot read: a wrong answer, not a fault.
_UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError, RecursionError),
    *(SyntaxError, TypeError, ValueError, tokenize.TokenError),
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Some verifiers evaluate the text as Python. A fence, not a sandbox: calls other than of elementary
# functions, dunder names, towers of powers and big factorials are wrong answers, unread.
_UNSAFE = re.compile(
    r"\b(?!(?:a?(?:sin|cos|tan)h?|exp|log|ln|sqrt|Abs|erf|Rational)\b)[A-Za-z_]\w*\s*\("
    r"|[\])]\s*\(|__|\blambda\b"
    r"|(?:\*\*|\^)[\s(]*[\w.]+[\s)]*(?:\*\*|\^)|(?:\*\*|\^)[\s(]*\d{4}|\d{4,}\s*!|!\s*!"
)


class GymTask(MadeOnDemand):
    """Any dataset of reasoning-gym, by name and parameters. The prompt is the question and a line break.

    A response is worth 1 where its answer (in the last `<answer>...</answer>`, else all of it; stripped) is
    the dataset's, or, for datasets of `SEVERAL_ANSWERS`, another right one; else 0, never partial credit.
    Held out: the first `task.eval_problems` different questions of a fixed seed. Training leaves them out,
    and those of `sets`, further held-out sets, where they are of the same dataset.
    """

    def __init__(self, config: TaskConfig, *, seed: int, sets: Sequence[TaskConfig] = ()) -> None:
        if config.name is None:
            raise Refusal(
                "task.name is not set: name a dataset of reasoning-gym, for example task.name=chain_sum"
            )
        refuse_unknown([config.name], known=sorted(DATASETS), where="task.name")
        schema = DATASETS[config.name][1]
        known = [field.name for field in fields(schema) if field.name not in ("seed", "size")]
        refuse_unknown(list(config.parameters), known=known, where=f"task.parameters of {config.name}")
        self._config = config
        self._seed = seed
        self._judge = self._dataset(seed=HELD_OUT_SEED, size=1)
        self._sets = [GymTask(one, seed=seed) for one in sets if one.name == config.name]
        self._reserved: list[Problem] | None = None
        self._left_out: set[str] | None = None

    def problems(self, count: int, *, seed: int, start: int = 0) -> list[Problem]:
        reserved = self._reserved_prompts()

        def draw(missing: int, block: int, round: int) -> list[Problem]:
            return self._draw(missing, seeds=(self._seed, seed, block, round), without=reserved)

        return blocks(start=start, count=count, draw=draw, where=f"task.name={self._config.name}")

    def held_out(self, count: int) -> list[Problem]:
        return take_held_out(self._held_out_pool(), count=count, where=f"task.name={self._config.name}")

    def reward(self, problem: Problem, response: str) -> float:
        tagged = _ANSWER.findall(response)
        answer = (tagged[-1] if tagged else response).strip()
        if problem.reference is not None and answer == problem.reference.strip():
            return 1.0
        # A composite names the dataset of each question.
        source = (problem.entry or {}).get("metadata", {}).get("source_dataset", self._config.name)
        if source not in SEVERAL_ANSWERS or not answer or _UNSAFE.search(answer):
            return 0.0
        try:
            return float(self._judge.score_answer(answer, problem.entry) == 1.0)
        except _UNREADABLE:
            return 0.0

    def _held_out_pool(self) -> list[Problem]:
        if self._reserved is None:
            self._reserved = self._draw(self._config.eval_problems, seeds=(HELD_OUT_SEED,), without=set())
        return self._reserved

    def _reserved_prompts(self) -> set[str]:
        """Prompts of every held-out set. A larger set need not begin with a smaller one: where a question
        repeats, the number of problems decides from which draw the next ones are.
        """
        if self._left_out is None:
            pools = [one._held_out_pool() for one in (self, *self._sets)]
            self._left_out = {problem.prompt for pool in pools for problem in pool}
        return self._left_out

    def _draw(self, count: int, *, seeds: tuple[int, ...], without: set[str]) -> list[Problem]:
        """Up to `count` different problems; fewer where the dataset gives nothing new any more."""
        generator = np.random.default_rng(seeds)
        found: dict[str, Problem] = {}
        barren = 0
        while len(found) < count and barren < PATIENCE:
            size = count - len(found)
            dataset_seed = int(generator.integers(2**31))
            dataset = self._dataset(seed=dataset_seed, size=size)
            for index in range(size):
                entry = dataset[index]
                prompt = entry["question"] + "\n"
                if prompt not in without and prompt not in found:
                    id = f"{self._config.name}-{dataset_seed}-{index}"
                    found[prompt] = Problem(id=id, prompt=prompt, reference=entry["answer"], entry=entry)
            barren = barren + 1 if size == count - len(found) else 0
        return list(found.values())

    def _dataset(self, *, seed: int, size: int) -> Any:
        assert self._config.name is not None
        parameters = dict(self._config.parameters)
        try:
            if self._config.name == "composite":
                parameters["datasets"] = [DatasetSpec(**row) for row in parameters.get("datasets", [])]
            return create_dataset(self._config.name, seed=seed, size=size, **parameters)
        except (AssertionError, TypeError, ValueError) as error:
            raise Refusal(f"task.parameters of {self._config.name}: {error}") from error
