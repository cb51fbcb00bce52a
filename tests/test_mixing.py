"""Problems of parquet files and saved datasets, columns by name, and tasks mixed by weight."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_rl.config import SftFormat, TaskConfig, TaskKind
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.mixing import CYCLE, MixedTask, Part
from olmo_rl.tasks.order import PromptOrder
from olmo_rl.tasks.problems import Problem
from olmo_rl.tasks.rows import read_problems
from olmo_rl.types import Refusal

ROWS = [{"question": f"{i}+1=", "truth": f"{i + 1}", "level": i % 3, "domain": None} for i in range(40)]


def config_of(path: Path, format: SftFormat = SftFormat.auto, **more: Any) -> TaskConfig:
    columns = {"prompt_column": "question", "answer_column": "truth"}
    return TaskConfig(kind=TaskKind.jsonl, path=str(path), format=format, **columns, **more)


def written(directory: Path) -> dict[str, TaskConfig]:
    """The same rows in every format."""
    import datasets

    lines, table, saved = directory / "p.jsonl", directory / "p.parquet", directory / "saved"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), table)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(saved)
    return {
        "jsonl": config_of(lines),
        "parquet": config_of(table),
        "datasets": config_of(saved, SftFormat.datasets),
    }


def level_of(response: str, level: int, question: str) -> float:
    return 100.0 * len(question) + level


def test_every_format_gives_the_same_problems_and_columns(tmp_path: Path) -> None:
    reward = {"_target_": f"{__name__}.level_of"}
    tasks = {}
    for name, config in written(tmp_path).items():
        problems = read_problems(config)
        assert [(p.prompt, p.reference, p.row["level"]) for p in problems] == [
            (row["question"], row["truth"], row["level"]) for row in ROWS
        ]
        assert problems[0].id == ("line-1" if name == "jsonl" else "row-0")
        config.verifier = reward
        tasks[name] = build_task(config, seed=0)
    drawn = {name: [p.prompt for p in task.problems(9, seed=0)] for name, task in tasks.items()}
    assert drawn["jsonl"] == drawn["parquet"] == drawn["datasets"]
    (problem,) = tasks["parquet"].problems(1, seed=0)
    assert tasks["parquet"].reward(problem, "x") == 100 * len(problem.prompt) + problem.row["level"]


def test_files_that_hold_no_problems_are_refused_by_row_and_key(tmp_path: Path) -> None:
    table = tmp_path / "p.parquet"
    pq.write_table(
        pa.Table.from_pylist([{"question": "a", "truth": "b"}, {"question": "", "truth": None}]), table
    )
    with pytest.raises(Refusal, match=r"p\.parquet, row 1: 'truth' is not text"):
        read_problems(config_of(table))
    with pytest.raises(Refusal, match=r"row 0: 'prompt' is missing"):
        read_problems(TaskConfig(kind=TaskKind.jsonl, path=str(table)))
    table.write_bytes(table.read_bytes()[:100])
    with pytest.raises(Refusal, match="not a sound parquet file"):
        read_problems(config_of(table))


def test_a_hub_that_is_not_reachable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'nobody/sums' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(Refusal) as caught:
        read_problems(config_of(Path("nobody/sums"), SftFormat.datasets))
    assert str(caught.value) == (
        "task.path=nobody/sums task.format=datasets: no directory of that name here, and the Hugging Face "
        "Hub is not reachable (Couldn't reach 'nobody/sums' on the Hub (LocalEntryNotFoundError)): name a "
        "directory that datasets saved, or load it once where the Hub is reachable, into the cache of this "
        "machine"
    )


class Numbered:
    """A task of `size` problems, named by their place."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.counts: dict[str, int] = {}

    def problems(self, count: int, *, seed: int, start: int = 0) -> list[Problem]:
        del seed
        return [
            Problem(id=str(i % self.size), prompt="p", reference="r") for i in range(start, start + count)
        ]

    def epochs(self, place: int) -> dict[str, float]:
        return {"": place / self.size}


@settings(deadline=None, max_examples=30)
@given(
    weights=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=5),
    start=st.integers(0, 3 * CYCLE),
    count=st.integers(1, 400),
)
def test_every_stretch_from_the_start_has_its_shares_to_within_a_problem_for_each_part(
    weights: list[float], start: int, count: int
) -> None:
    parts: dict[str, Any] = {f"p{i}": Part(task=Numbered(7 + i), weight=w) for i, w in enumerate(weights)}  # type: ignore[arg-type]
    task = MixedTask(parts)
    drawn = task.problems(start % CYCLE, seed=0)
    found = Counter(problem.part for problem in drawn)
    for name, part in parts.items():
        share = part.weight / sum(weights) * len(drawn)
        assert abs(found[name] - share) <= len(weights)
    # Any cut gives the same problems, each part in its own order.
    assert task.problems(start + count, seed=0)[start:] == task.problems(count, seed=0, start=start)
    ids = [problem.id for problem in task.problems(count, seed=0) if problem.part == "p0"]
    assert ids == [f"p0:{i % 7}" for i in range(len(ids))]
    assert task.epochs(count)["p0"] == len(ids) / 7


def test_files_and_made_problems_are_mixed_each_with_its_own_judge_and_passes(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": "yes"}) + "\n" for i in range(40)))
    mix = {
        "words": {"path": str(path), "weight": 3},
        "sums": {"kind": "addition", "parameters": {"digits": 1}},
        "chains": {"kind": "reasoning_gym", "name": "chain_sum", "weight": 0.5},
    }
    task = build_task(TaskConfig(kind=TaskKind.mixed, mix=mix, eval_problems=9), seed=0)
    order = PromptOrder(task=task)
    taken = order.take(90)
    order.advance(taken)
    assert Counter(problem.part for problem in taken.problems) == {"words": 60, "sums": 20, "chains": 10}
    words = [problem.id for problem in taken.problems if problem.part == "words"]
    once = build_task(TaskConfig(kind=TaskKind.jsonl, path=str(path)), seed=0).size
    assert once is not None
    assert len(set(words[:once])) == once == len(set(words))
    sums = build_task(TaskConfig(parameters={"digits": 1}), seed=0).size
    assert order.epochs == {"words": 60 / once, "sums": 20 / (sums or 1)}
    for problem in taken.problems:
        assert task.judge(problem, [problem.answer])[0].reward == 1.0
        assert task.reward(problem, "no idea") == 0.0
    held_out = task.held_out(6)
    assert Counter(problem.part for problem in held_out) == {"words": 4, "sums": 1, "chains": 1}
    with pytest.raises(
        Refusal, match=r"=9: task\.mix\.words would give 6 of them: .* has 5 held-out problems"
    ):
        task.held_out(9)
    assert not {p.prompt for p in held_out} & {p.prompt for p in taken.problems}
    state = order.state_dict()
    resumed = PromptOrder(task=build_task(TaskConfig(kind=TaskKind.mixed, mix=mix, eval_problems=9), seed=0))
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.take(20).problems == order.take(20).problems
    other = build_task(
        TaskConfig(kind=TaskKind.mixed, mix=mix | {"words": mix["words"] | {"weight": 2}}), seed=0
    )
    with pytest.raises(Refusal, match="the training problems"):
        PromptOrder(task=other).load_state_dict(state)


def test_a_verifier_of_a_domain_that_no_part_has_is_refused(tmp_path: Path) -> None:
    for name in ("math", "code"):
        row = {"prompt": "1?", "answer": "1", "domain": name}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    judge = {"_target_": f"{__name__}.level_of"}
    exact = {"_target_": "olmo_rl.tasks.rewards.exact"}
    mix: dict[str, Any] = {
        "math": {"path": str(tmp_path / "math.jsonl")},
        "code": {"path": str(tmp_path / "code.jsonl"), "verifiers": {"code": exact}},
        "sums": {"kind": "addition"},
    }

    def reasons(verifiers: dict[str, Any], mix: dict[str, Any]) -> list[str]:
        try:
            build_task(TaskConfig(kind=TaskKind.mixed, mix=mix, verifiers=verifiers), seed=0)
        except Refusal as refusal:
            return list(refusal.reasons)
        return []

    assert reasons({"math": exact}, mix) == []
    where = "no effect, no line of those parts of task.mix that name no functions has this domain: lines have"
    assert reasons({"math": exact, "maths": judge}, mix) == [f"task.verifiers.maths: {where} 'math'"]
    assert reasons({"code": judge}, mix) == [f"task.verifiers.code: {where} 'math'"]
    mix["code"]["verifiers"] = {"cod": exact}
    (reason,) = reasons({}, mix)
    assert reason.startswith("task.mix.code: task.verifiers.cod: no effect, no line of ")


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        ({"a": {"weight": 0, "kind": "addition"}}, "task.mix.a.weight=0: give a number above 0"),
        ({"a": {"weigth": 1}}, "task.mix.a: unknown 'weigth', the nearest known name is 'weight'"),
        ({"a": {"path": "nowhere"}}, "task.mix.a: task.path=nowhere: no such file"),
        ({"a": {"kind": "mixed"}}, "task.mix.a.kind=mixed: give one of"),
        ({"a": {"path": "p", "format": "csv"}}, "task.mix.a.format=csv: give one of auto, jsonl, parquet"),
        (
            {"a": {"kind": "addition"}, "b": {"kind": "addition", "weight": 1e-5}},
            "task.mix.b.weight=1e-05: less than one of 1000 problems",
        ),
    ],
)
def test_a_part_that_cannot_be_drawn_is_refused_by_name(mix: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refusal) as caught:
        build_task(TaskConfig(kind=TaskKind.mixed, mix=mix), seed=0)
    assert caught.value.reasons[0].startswith(reason)
