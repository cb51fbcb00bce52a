"""The task of a run with prompts as its policy reads them: as the task writes them, or as turns of a chat;
those that fit into the context.

A rendered prompt is text: its special tokens become ids where it is encoded, so engines, evaluations and
demonstrations take it like any other.

Refuses: `task.chat` with a tokenizer that has no chat template, templates that refuse the turns, tasks of
which no problem fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from olmo_rl.config import Config, OverlongPrompt, TaskConfig, TaskKind
from olmo_rl.data.chat import user_prompt
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.mixing import set_config
from olmo_rl.tasks.problems import Problem, Task, demonstration
from olmo_rl.tasks.rewards import Judged
from olmo_rl.types import Refusal


class ChatTask:
    """A task whose prompts are rendered; problems, references and rewards stay the task's."""

    def __init__(self, task: Task, *, render: Callable[[str], str]) -> None:
        self._task, self._render = task, render

    @property
    def counts(self) -> Mapping[str, int]:
        return self._task.counts

    @property
    def size(self) -> int | None:
        return self._task.size

    def problems(self, count: int, *, seed: int, start: int = 0) -> list[Problem]:
        return self._rendered(self._task.problems(count, seed=seed, start=start))

    def fits(self, problem: Problem) -> bool:
        return self._task.fits(problem)

    def held_out(self, count: int) -> list[Problem]:
        return self._rendered(self._task.held_out(count))

    def epochs(self, place: int) -> dict[str, float]:
        return self._task.epochs(place)

    def reward(self, problem: Problem, response: str) -> float:
        return self._task.reward(problem, response)

    def judge(self, problem: Problem, responses: Sequence[str]) -> list[Judged]:
        return self._task.judge(problem, responses)

    @property
    def judges_groups(self) -> bool:
        return self._task.judges_groups

    def start(self, *, seconds: float) -> None:
        self._task.start(seconds=seconds)

    def check_references(self) -> tuple[str, ...]:
        return self._task.check_references()

    def _rendered(self, problems: list[Problem]) -> list[Problem]:
        # The line break behind a question separates it from the answer where no template does.
        return [replace(problem, prompt=self._render(problem.prompt.rstrip("\n"))) for problem in problems]


class FittingTask:
    """A task whose overlong problems a run leaves out; held-out ones are not replaced."""

    def __init__(self, task: Task, *, fits: Callable[[Problem], bool]) -> None:
        self._task, self._fits = task, fits

    @property
    def counts(self) -> Mapping[str, int]:
        return self._task.counts

    @property
    def size(self) -> int | None:
        return self._task.size

    def problems(self, count: int, *, seed: int, start: int = 0) -> list[Problem]:
        return self._task.problems(count, seed=seed, start=start)

    def fits(self, problem: Problem) -> bool:
        return self._fits(problem)

    def held_out(self, count: int) -> list[Problem]:
        kept = [problem for problem in self._task.held_out(count) if self._fits(problem)]
        if count and not kept:
            raise Refusal(f"task.eval_problems={count}: {NOTHING_FITS}")
        return kept

    def epochs(self, place: int) -> dict[str, float]:
        return self._task.epochs(place)

    def reward(self, problem: Problem, response: str) -> float:
        return self._task.reward(problem, response)

    def judge(self, problem: Problem, responses: Sequence[str]) -> list[Judged]:
        return self._task.judge(problem, responses)

    @property
    def judges_groups(self) -> bool:
        return self._task.judges_groups

    def start(self, *, seconds: float) -> None:
        self._task.start(seconds=seconds)

    def check_references(self) -> tuple[str, ...]:
        return self._task.check_references()


NOTHING_FITS = (
    "task.overlong=leave_out leaves no problem: every prompt exceeds model.max_seq_len with its response: "
    "raise model.max_seq_len, or lower rollouts.max_new_tokens"
)


def rendered_task(
    config: Config,
    *,
    tokenizer: Tokenizer,
    problems: Sequence[Problem] | None = None,
    whole: bool = False,
) -> Task:
    """The task of the run with all of its problems, prompts in the form of `task.chat`. `problems`: those of
    `task.path` where it was read before; `whole`: all of them are held out.
    """
    task = build_task(
        config.task, seed=config.seed, problems=problems, whole=whole, sets=_generated_sets(config)
    )
    if not config.task.chat:
        return task
    system = config.task.system
    return ChatTask(task, render=lambda text: user_prompt(text, tokenizer=tokenizer, system=system))


def _generated_sets(config: Config) -> list[TaskConfig]:
    """The sets of `evaluation.sets` whose problems are draws of a dataset that training may draw from too."""
    named = {f"evaluation.sets.{name}": entry for name, entry in config.evaluation.sets.items()}
    return [
        set_config(entry, base=config.task, where=where)
        for where, entry in named.items()
        if isinstance(entry, Mapping) and entry.get("kind") == TaskKind.reasoning_gym.value
    ]


def task_of(
    config: Config,
    *,
    tokenizer: Tokenizer,
    problems: Sequence[Problem] | None = None,
    whole: bool = False,
) -> Task:
    """The task that the run draws from: that of `rendered_task`, which leaves overlong ones out if asked."""
    task = rendered_task(config, tokenizer=tokenizer, problems=problems, whole=whole)
    if config.task.overlong is OverlongPrompt.refuse:
        return task
    longest = config.model.max_seq_len
    return FittingTask(
        task, fits=lambda problem: tokens_of(problem, config=config, tokenizer=tokenizer) <= longest
    )


def tokens_of(problem: Problem, *, config: Config, tokenizer: Tokenizer) -> int:
    """Tokens of the longest document that the run makes of `problem`: prompt and longest response, or prompt
    and reference answer.
    """
    lengths = [0]
    if config.reads_prompts:
        lengths.append(len(tokenizer.encode(problem.prompt)) + config.rollouts.max_new_tokens)
    if config.demonstrates:
        lengths.append(sum(map(len, demonstration(problem, tokenizer=tokenizer))))
    return max(lengths)
