"""The task of a run with prompts as its policy reads them: as the task writes them, or as turns of a chat.

A rendered prompt is text: its special tokens become ids where it is encoded, so engines, evaluations and
demonstrations take it like any other.

Refuses: `task.chat` with a tokenizer that has no chat template, templates that refuse the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from olmo_rl.config import Config
from olmo_rl.data.chat import user_prompt
from olmo_rl.data.tasks import Problem, Task, build_task
from olmo_rl.data.tokenizers import Tokenizer


class ChatTask:
    """A task whose prompts are rendered; problems, references and rewards stay the task's."""

    def __init__(self, task: Task, *, render: Callable[[str], str]) -> None:
        self._task, self._render = task, render

    @property
    def counts(self) -> Mapping[str, int]:
        return self._task.counts

    def problems(self, count: int, *, seed: int) -> list[Problem]:
        return self._rendered(self._task.problems(count, seed=seed))

    def held_out(self, count: int) -> list[Problem]:
        return self._rendered(self._task.held_out(count))

    def reward(self, problem: Problem, response: str) -> float:
        return self._task.reward(problem, response)

    def check_references(self) -> tuple[str, ...]:
        return self._task.check_references()

    def _rendered(self, problems: list[Problem]) -> list[Problem]:
        # The line break behind a question sets the answer apart where no template does.
        return [replace(problem, prompt=self._render(problem.prompt.rstrip("\n"))) for problem in problems]


def task_of(config: Config, *, tokenizer: Tokenizer) -> Task:
    """The task of the run, its prompts as `task.chat` says."""
    task = build_task(config.task, seed=config.seed)
    if not config.task.chat:
        return task
    system = config.task.system
    return ChatTask(task, render=lambda text: user_prompt(text, tokenizer=tokenizer, system=system))
