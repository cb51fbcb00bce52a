"""Held-out problems answered by given weights, or by serving engines as they are: mean rewards and pass@k by
set and domain. One process; nothing is trained and no weights are sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from olmo_rl.collections.evaluating import Answered, ask, judged, measured, questions_of, title_of
from olmo_rl.collections.generation import RolloutParts, build_alone
from olmo_rl.complete_files import complete_file, write_complete
from olmo_rl.config import Config
from olmo_rl.data.means import shown
from olmo_rl.running.rank_process import ended_by_signals
from olmo_rl.tasks.held_out import held_out_sets
from olmo_rl.tasks.pass_rates import Measured


def run(config: Config) -> None:
    """Ask, judge, measure; write `evaluation.json` and `answers/<set>.jsonl`, and show a table."""
    with ended_by_signals():
        parts = build_alone(config)
        try:
            answered = _answered(config, parts=parts)
        finally:
            parts.close()
    results = measured(answered, config=config)
    directory = Path(config.run_dir)
    for name in dict.fromkeys(one.of for one in answered):
        path = directory / "answers" / f"{title_of(name, '')[0]}.jsonl"
        _write_answers((one for one in answered if one.of == name), path=path)
    write_complete(
        directory / "evaluation.json", json.dumps(_document(results, config=config), indent=1) + "\n"
    )
    console = Console()
    console.print(_table(results, config=config))
    console.print(f"run directory: {config.run_dir}", soft_wrap=True)


def _answered(config: Config, *, parts: RolloutParts) -> list[Answered]:
    sets = held_out_sets(config, own=parts.task, tokenizer=parts.tokenizer)
    questions = questions_of(sets)
    return judged(questions, asked=ask(questions, config=config, parts=parts), config=config, parts=parts)


def _write_answers(answered: Iterable[Answered], *, path: Path) -> None:
    """One line a response: complete or absent."""
    with complete_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for one in answered:
            about = {"problem": one.problem.id, "domain": one.problem.domain, "prompt": one.problem.prompt}
            for response, reward in zip(one.responses, one.rewards, strict=True):
                judged_too = reward if reward == reward else None  # NaN: unknown
                file.write(json.dumps(about | {"response": response, "reward": judged_too}) + "\n")


def _document(results: Mapping[tuple[str, str], Measured], *, config: Config) -> dict[str, object]:
    evaluation = config.evaluation
    return {
        "weights": config.init_from,
        "engines": list(config.rollouts.urls),
        "samples": evaluation.samples,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "max_new_tokens": config.rollouts.max_new_tokens,
        "solved_from": evaluation.solved_from,
        "results": [
            {"set": title_of(name, "")[0], "domain": domain or None, **result.record()}
            for (name, domain), result in results.items()
        ],
    }


def _table(results: Mapping[tuple[str, str], Measured], *, config: Config) -> Table:
    samples = config.evaluation.samples
    table = Table(title=config.run_name, title_justify="left")
    for heading in ("set", "domain"):
        table.add_column(heading)
    passes = [f"pass@{k}" for k in config.evaluation.pass_at]
    mean = "mean reward" if samples == 1 else f"mean@{samples}"
    for heading in ("problems", "answered", "judged", mean, *passes):
        table.add_column(heading, justify="right")
    for (name, domain), result in results.items():
        counts = (result.problems, result.answered, result.reward.count)
        values = (result.reward.value, *(one.value for one in result.passes.values()))
        table.add_row(title_of(name, "")[0], domain, *map(str, counts), *map(shown, values))
    return table
