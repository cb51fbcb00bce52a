"""The order of training problems: each once a pass, resumed where it stopped, whatever lies ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datamodule import local_config
from training_cases import fit

from olmo_rl.config import BatchConfig, Config, TaskConfig, TaskKind, TrainerConfig
from olmo_rl.refusals import refusals
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.mixing import MixedTask, Part
from olmo_rl.tasks.order import DEMONSTRATIONS, PromptOrder
from olmo_rl.tasks.problems import BLOCK, Problem, _shuffled
from olmo_rl.tasks.prompting import FittingTask
from olmo_rl.types import Refusal


def lines(path: Path, count: int) -> TaskConfig:
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": f"{i}"}) + "\n" for i in range(count)))
    return TaskConfig(kind=TaskKind.jsonl, path=str(path), eval_problems=0)


def take(order: PromptOrder, count: int) -> list[str]:
    taken = order.take(count)
    order.advance(taken)
    return [problem.id for problem in taken.problems]


@pytest.mark.parametrize("count", [20, 200])
def test_every_problem_comes_once_a_pass_in_another_order_each_pass(tmp_path: Path, count: int) -> None:
    task = build_task(lines(tmp_path / "p.jsonl", count), seed=0)
    size = task.size
    assert size is not None
    order = PromptOrder(task=task)
    passes = [[id for _ in range(0, size, 5) for id in take(order, 5)] for _ in range(3)]
    drawn = [id for part in passes for id in part]
    whole = [drawn[i * size : (i + 1) * size] for i in range(3)]
    assert all(len(set(part)) == size for part in whole)
    assert whole[0] != whole[1] != whole[2]
    assert order.epochs == {"": len(drawn) / size}


def test_the_sums_of_the_default_run_come_once_a_pass_and_demonstrations_in_another_order() -> None:
    task = build_task(TaskConfig(), seed=0)
    size = task.size
    assert size is not None
    first = take(PromptOrder(task=task), size)
    assert len(set(first)) == size
    assert take(PromptOrder(task=task, seed=DEMONSTRATIONS), 64) != first[:64]


@pytest.mark.parametrize(
    "config",
    [
        TaskConfig(parameters={"digits": 5}),
        TaskConfig(kind=TaskKind.reasoning_gym, name="chain_sum", eval_problems=4),
    ],
)
def test_problems_made_on_demand_follow_from_their_place(config: TaskConfig) -> None:
    order = PromptOrder(task=build_task(config, seed=0))
    first = take(order, BLOCK + 10)
    assert order.epochs == {}
    other = PromptOrder(task=build_task(config, seed=0))
    other.load_state_dict({"place": 7, "returned": [], "order": None})
    assert take(other, BLOCK) == first[7 : 7 + BLOCK]
    assert len(set(first[:BLOCK])) == BLOCK


@settings(deadline=None)
@given(data=st.data())
def test_any_cut_by_checkpoints_gives_the_same_problems(data: st.DataObject) -> None:
    """A checkpoint may hold problems that were taken ahead; they come first afterwards."""
    task = build_task(TaskConfig(parameters={"digits": 1}), seed=1)
    parts = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    straight = PromptOrder(task=task)
    expected = [id for part in parts for id in take(straight, part)]
    order, found = PromptOrder(task=task), []
    for part in parts:
        found += take(order, part)
        ahead = order.take(data.draw(st.integers(0, 20)))
        order.advance(ahead)
        order, state = PromptOrder(task=task), order.state_dict(unused=ahead.places)
        order.load_state_dict(json.loads(json.dumps(state)))
    assert found == expected


def test_problems_that_do_not_fit_are_passed_over_and_counted(tmp_path: Path) -> None:
    task = build_task(lines(tmp_path / "p.jsonl", 60), seed=0)
    size = task.size
    assert size is not None

    def short(problem: Problem) -> bool:
        return len(problem.prompt) < 3

    fitting = PromptOrder(task=FittingTask(task, fits=short))
    kept = sum(short(problem) for problem in task.problems(size, seed=0))
    assert 0 < kept < size
    taken = fitting.take(2 * kept)
    assert sorted(p.id for p in taken.problems[:kept]) == sorted(p.id for p in taken.problems[kept:])
    assert size - kept <= taken.overlong <= 2 * (size - kept)
    assert taken.behind == 2 * kept + taken.overlong
    with pytest.raises(Refusal, match="task.overlong=leave_out leaves no problem"):
        PromptOrder(task=FittingTask(task, fits=lambda problem: False)).take(1)


def test_the_state_of_another_order_is_refused(tmp_path: Path) -> None:
    config = lines(tmp_path / "p.jsonl", 60)
    state = PromptOrder(task=build_task(config, seed=0)).state_dict()
    for other in (
        build_task(config, seed=1),
        build_task(lines(tmp_path / "q.jsonl", 61), seed=0),
    ):
        with pytest.raises(Refusal, match="the training problems .* when the checkpoint was saved"):
            PromptOrder(task=other).load_state_dict(state)
    PromptOrder(task=build_task(config, seed=0)).load_state_dict(state)


def test_problems_solved_always_or_never_sit_out_passes_and_come_back_also_across_a_resume(
    tmp_path: Path,
) -> None:
    """Line 1 is always solved, line 2 never, all others sometimes."""
    task = build_task(lines(tmp_path / "p.jsonl", 40), seed=0)
    size = task.size
    assert size is not None
    first, second = (problem.id for problem in task.problems(2, seed=0))
    order, seen = PromptOrder(task=task, rest=2), list[str]()
    resting = 0
    for _ in range(4 * size):
        taken = order.take(1)
        order.advance(taken)
        resting += taken.resting
        (problem,), (place,) = taken.problems, taken.places
        seen.append(problem.id)
        solved = {first: 4, second: 0}.get(problem.id, 2)
        order.note(problem, place=place, asked=4, judged=4, solved=solved)
        order, state = PromptOrder(task=task, rest=2), order.state_dict()
        order.load_state_dict(json.loads(json.dumps(state)))
    # Pass 0 has all, passes 1 and 2 lack two, pass 3 has all again.
    passes = [seen[:size], seen[size : 2 * size - 2], seen[2 * size - 2 : 3 * size - 4], seen[3 * size - 4 :]]
    assert [({first, second} & set(part)) for part in passes[:3]] == [{first, second}, set(), set()]
    assert {first, second} <= set(passes[3][:size])
    assert resting >= 4
    assert order.rates[first][0] == order.rates[first][1] > 4
    assert order.rates[second] == [order.rates[second][0], 0]
    everything = PromptOrder(task=task, rest=1)
    for _ in range(3):  # all are set aside at once, and come back
        taken = everything.take(size)
        everything.advance(taken)
        for problem, place in zip(taken.problems, taken.places, strict=True):
            everything.note(problem, place=place, asked=1, judged=1, solved=0)
    assert everything.place == 5 * size
    unknown = PromptOrder(task=task, rest=1)
    (problem,) = task.problems(1, seed=0)
    unknown.note(problem, place=0, asked=8, judged=0, solved=0)
    assert unknown.rates == unknown.back == {}
    for solved in (0, 1):  # one verdict of eight says little about all of them
        unknown.note(problem, place=0, asked=8, judged=1, solved=solved)
    assert unknown.rates == {problem.id: [2, 1]}
    assert unknown.back == {}


def noted(order: PromptOrder, *, passes: int) -> None:
    """All that fits of the first `passes` passes is taken, and solved by all of its responses."""
    size = order.task.size
    assert size is not None
    while order.place < passes * size:
        taken = order.take(1)
        order.advance(taken)
        for problem, place in zip(taken.problems, taken.places, strict=True):
            order.note(problem, place=place, asked=2, judged=2, solved=2)


def test_problems_that_rest_are_not_taken_for_problems_that_do_not_fit(tmp_path: Path) -> None:
    """Half of the problems do not fit, the others rest: they come back, where they are counted apart."""
    task = build_task(lines(tmp_path / "p.jsonl", 60), seed=0)
    size = task.size
    assert size is not None
    fitting = {problem.id for problem in task.problems(size, seed=0)[::-2]}  # the last of the first pass too
    order = PromptOrder(task=FittingTask(task, fits=lambda problem: problem.id in fitting), rest=2)
    noted(order, passes=1)
    assert (set(order.back), order.place) == (fitting, size)
    taken = order.take(len(fitting))
    assert {problem.id for problem in taken.problems} == fitting
    assert taken.places[0] >= 3 * size
    assert taken.resting == 2 * len(fitting)
    assert taken.behind == size + len(fitting) + taken.resting + taken.overlong


def test_one_problem_that_fits_is_found_wherever_its_passes_put_it(tmp_path: Path) -> None:
    """It may be the first of a pass and the last of the next one."""
    task = build_task(lines(tmp_path / "p.jsonl", 12), seed=0)
    size = task.size
    assert size is not None
    for only in {problem.id for problem in task.problems(size, seed=0)}:
        order = PromptOrder(task=FittingTask(task, fits=lambda problem, only=only: problem.id == only))
        assert take(order, 20) == [only] * 20


def test_the_order_of_a_pass_is_made_once(tmp_path: Path) -> None:
    task = build_task(lines(tmp_path / "p.jsonl", 300), seed=12345)
    size = task.size
    assert size is not None
    order, before = PromptOrder(task=task), _shuffled.cache_info().misses
    for _ in range(2 * size // 5):
        take(order, 5)
    assert _shuffled.cache_info().misses - before <= 3


@pytest.mark.parametrize(
    ("task", "back"),
    [
        (TaskConfig(parameters={"digits": 3}), False),
        (TaskConfig(parameters={"digits": 2}), True),
        (TaskConfig(kind=TaskKind.reasoning_gym, name="chain_sum"), False),
        (
            TaskConfig(
                kind=TaskKind.mixed,
                mix={
                    "a": {"kind": "addition", "parameters": {"digits": 4}},
                    "b": {"kind": "reasoning_gym", "name": "chain_sum"},
                },
            ),
            False,
        ),
        (
            TaskConfig(
                kind=TaskKind.mixed,
                mix={"a": {"kind": "addition", "parameters": {"digits": 4}}, "b": {"path": "p.jsonl"}},
            ),
            True,
        ),
    ],
)
def test_problems_that_do_not_come_back_are_not_set_aside(task: TaskConfig, back: bool) -> None:
    found = [line for line in refusals(Config(task=replace(task, set_aside=1))) if "set_aside" in line]
    assert len(found) == (not back)
    assert all("no effect on problems made on demand" in line for line in found)
    if task.kind is TaskKind.addition:
        assert (build_task(task, seed=0).size is None) == (not back)


def test_where_everything_rests_the_first_to_return_come_back_after_a_whole_pass(tmp_path: Path) -> None:
    task = build_task(lines(tmp_path / "p.jsonl", 40), seed=0)
    size = task.size
    assert size is not None
    order = PromptOrder(task=task, rest=100)
    noted(order, passes=1)
    early = order.take(1).problems[0].id
    order.back = {id: back - (id == early) for id, back in order.back.items()}
    taken = order.take(3)
    assert [problem.id for problem in taken.problems] == [early] * 3, "the others rest for longer"
    assert taken.resting == taken.behind - size - 3
    assert taken.behind <= 7 * size
    assert order.take(3) == taken, "taking changes nothing"
    mixed = MixedTask({name: Part(task=task, weight=w) for name, w in (("a", 1.0), ("b", 3.0))})
    order = PromptOrder(task=mixed, rest=100)
    for _ in range(2):
        taken = order.take(4 * size)
        order.advance(taken)
        for problem, place in zip(taken.problems, taken.places, strict=True):
            order.note(problem, place=place, asked=2, judged=2, solved=0)
    assert order.take(5).resting < 20 * size


def test_a_run_meets_every_prompt_once_a_pass_also_across_a_resume(tmp_path: Path) -> None:
    config = local_config(
        tmp_path / "run",
        task=lines(tmp_path / "p.jsonl", 40),
        batch=BatchConfig(samples_per_step=16),
        trainer=TrainerConfig(max_steps=5),
    )
    size = build_task(config.task, seed=config.seed).size
    assert size is not None
    first = fit(config)
    second = fit(replace(config, ckpt_path="last", trainer=TrainerConfig(max_steps=-(-size // 4))))
    batches = [*first.recorder.batches, *second.recorder.batches]
    prompts = [sample.prompt for batch in batches for sample in batch.samples[::4]]
    assert len(prompts) >= size
    assert len(set(prompts[:size])) == size
    epochs = [row["rollouts/epoch"] for row in second.rows]
    assert epochs == pytest.approx([4 * n / size for n in range(1, len(epochs) + 1)])
