"""Rewards: what functions get by name, weights, verdicts on groups, None, the length penalty, and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datamodule import local_config
from training_cases import fit

from olmo_rl.config import BatchConfig, OnVerifierFailure, RolloutsConfig, Source, TaskConfig, TaskKind
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.problems import Problem, Task, is_held_out
from olmo_rl.tasks.rewards import Judged
from olmo_rl.tasks.shaping import length_penalty, shaped
from olmo_rl.types import Refusal

HERE = __name__

# Functions that configurations of these tests name.


def of_columns(response: str, answer: str, source: str, level: int, bonus: float = 10.0) -> float:
    return len(response) + len(answer) + len(source) + level + bonus


def of_messages(response: str, prompt: str, messages: list[dict[str, str]], domain: str | None) -> float:
    assert messages == [{"role": "user", "content": prompt}]
    return float(len(prompt)) if domain == "math" else 0.0


def everything(response: str, **row: Any) -> float:
    return float(len(row))


def level_of(response: str, **row: Any) -> float:
    return float(row["level"])


def only_digits(response: str) -> float | None:
    """Judges digits alone."""
    return float(response) if response.isdigit() else None


def half(response: str) -> float:
    return 0.5


def by_position(text: str, truth: str) -> float:
    return float(text == truth)


def failing(response: str) -> float:
    raise KeyError(response)


def too_few(responses: list[str]) -> list[float]:
    return [1.0]


def of_nobody(response: str, colour: str) -> float:
    return 0.0


def only(response: str, answer: str, /) -> float:
    return 7.0 if response == answer else 0.0


def named(**functions: str | dict[str, Any]) -> dict[str, Any]:
    """Rewards of this module by name."""
    entries = {n: {"_target_": f} if isinstance(f, str) else f for n, f in functions.items()}
    return {n: entry | {"_target_": f"{HERE}.{entry['_target_']}"} for n, entry in entries.items()}


ROW = {"prompt": "2+2=", "answer": "4", "source": "book", "level": 3, "domain": "math"}


def task_of(path: Path, *rows: dict[str, Any], **config: Any) -> Task:
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows or (ROW,))))
    return build_task(TaskConfig(kind=TaskKind.jsonl, path=str(path), **config), seed=0)


def problem_of(task: Task) -> Problem:
    return (*(task.problems(1, seed=0) if task.size else ()), *([] if task.size else task.held_out(1)))[0]


def verdicts(tmp_path: Path, responses: Sequence[str], *rows: dict[str, Any], **config: Any) -> list[Judged]:
    task = task_of(tmp_path / "p.jsonl", *rows, **config)
    return task.judge(problem_of(task), responses)


def test_a_function_gets_what_its_parameters_name(tmp_path: Path) -> None:
    config = {"verifier": {"_target_": f"{HERE}.of_columns"}}
    assert verdicts(tmp_path, ["ab"], **config)[0].reward == 2 + 1 + 4 + 3 + 10
    config["verifier"] |= {"bonus": 0.5}
    assert verdicts(tmp_path, ["ab"], **config)[0].reward == 2 + 1 + 4 + 3 + 0.5
    assert verdicts(tmp_path, ["x"], verifier={"_target_": f"{HERE}.of_messages"})[0].reward == 4
    # prompt, answer, domain, messages, source, level, responses
    assert verdicts(tmp_path, ["x"], verifier={"_target_": f"{HERE}.everything"})[0].reward == 7


def test_an_optional_parameter_gets_the_column_of_the_rows_that_have_it(tmp_path: Path) -> None:
    rewarded = {"verifier": {"_target_": f"{HERE}.of_columns"}}
    assert verdicts(tmp_path, ["ab"], ROW | {"bonus": 100}, **rewarded)[0].reward == 2 + 1 + 4 + 3 + 100


def test_a_configured_argument_goes_before_a_column_of_its_name(tmp_path: Path) -> None:
    for function, worth in (("level_of", 50), ("of_columns", 2 + 1 + 4 + 50 + 10)):
        rewarded = {"verifier": {"_target_": f"{HERE}.{function}", "level": 50}}
        assert verdicts(tmp_path, ["ab"], **rewarded)[0].reward == worth
    assert verdicts(tmp_path, ["ab"], verifier={"_target_": f"{HERE}.level_of"})[0].reward == 3


def test_functions_of_two_arguments_go_on_working_whatever_their_names(tmp_path: Path) -> None:
    for name, worth in (("by_position", 1.0), ("only", 7.0)):
        found = verdicts(tmp_path, ["4", "5"], verifier={"_target_": f"{HERE}.{name}"})
        assert [verdict.reward for verdict in found] == [worth, 0.0]


def test_a_column_that_a_row_lacks_is_refused_by_line_with_those_that_it_has(tmp_path: Path) -> None:
    rows = [ROW, {key: value for key, value in ROW.items() if key != "level"}]
    with pytest.raises(Refusal) as caught:
        task_of(tmp_path / "p.jsonl", *rows, verifier={"_target_": f"{HERE}.of_columns"})
    (reason,) = caught.value.reasons
    assert reason == (
        f"{tmp_path}/p.jsonl, line 2: no 'level', which task.verifier asks for; there are answer, domain, "
        "messages, prompt, response, responses, source"
    )
    with pytest.raises(Refusal, match=r"line 1: no 'colour', which task\.rewards\.c asks for"):
        task_of(tmp_path / "p.jsonl", rewards=named(c="of_nobody"))


def test_answers_may_be_missing_where_no_reward_asks_for_one(tmp_path: Path) -> None:
    row = {"prompt": "2+2="}
    assert verdicts(tmp_path, ["7"], row, rewards=named(digits="only_digits"))[0].reward == 7
    with pytest.raises(Refusal, match="line 1: no 'answer', which task.rewards.a asks for"):
        task_of(tmp_path / "p.jsonl", row | {"source": "", "level": 1}, rewards=named(a="of_columns"))
    with pytest.raises(Refusal, match="line 1: 'answer' is missing"):
        task_of(tmp_path / "p.jsonl", row)


def test_several_rewards_add_up_by_weight_and_keep_their_values(tmp_path: Path) -> None:
    rewards = named(half="half", digits={"_target_": "only_digits", "_weight_": -0.25})
    first, second = verdicts(tmp_path, ["12", "no"], rewards=rewards)
    assert (first.reward, first.parts) == (0.5 - 0.25 * 12, {"half": 0.5, "digits": 12.0})
    assert (second.reward, second.parts) == (0.5, {"half": 0.5, "digits": None}), "None takes no part"


@settings(deadline=None)
@given(
    values=st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=6),
    weights=st.lists(st.floats(-10, 10), min_size=6, max_size=6),
)
def test_the_verdict_is_the_weighted_sum_over_those_who_judge(
    values: list[float | None], weights: list[float]
) -> None:
    """Oracle: exact fractions."""
    from fractions import Fraction

    from olmo_rl.tasks.rewards import Reward, combined

    rewards = {f"r{i}": Reward(function=half, where="r", weight=weights[i]) for i in range(len(values))}
    verdict = combined(rewards, {f"r{i}": math.nan if v is None else v for i, v in enumerate(values)})
    known = [Fraction(w) * Fraction(v) for v, w in zip(values, weights, strict=False) if v is not None]
    if not known:
        assert math.isnan(verdict.reward)
    else:
        assert verdict.reward == pytest.approx(float(sum(known)), rel=1e-12, abs=1e-9)
    assert list(verdict.parts.values()) == values


def test_where_nobody_judges_the_verdict_is_unknown(tmp_path: Path) -> None:
    assert math.isnan(verdicts(tmp_path, ["no"], rewards=named(digits="only_digits"))[0].reward)
    assert math.isnan(verdicts(tmp_path, ["no"], verifier={"_target_": f"{HERE}.only_digits"})[0].reward)


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_rewards_of_groups_see_all_responses_to_a_prompt(tmp_path: Path, seconds: float | None) -> None:
    rewards = {
        "rank": {"_target_": "reward_functions.rank_in_group"},
        "unique": {"_target_": "reward_functions.is_unique", "_weight_": 10.0},
    }
    config = {"rewards": rewards, "verifier_seconds": seconds}
    task = task_of(tmp_path / "p.jsonl", **config)
    assert task.judges_groups
    assert not task_of(tmp_path / "p.jsonl", rewards=named(half="half")).judges_groups
    found = task.judge(problem_of(task), ["aa", "a", "aa", "aaa"])
    task.check_references()  # ends the process
    assert [verdict.reward for verdict in found] == [0.25, 10.0, 0.25, 0.75 + 10.0]
    assert [verdict.parts["unique"] for verdict in found] == [0.0, 1.0, 0.0, 1.0]


def test_a_failure_of_one_of_several_is_named_and_never_taken_for_silence(tmp_path: Path) -> None:
    rewards = named(half="half", bad="failing")
    with pytest.raises(Refusal, match=r"task\.rewards\.bad failed on a response to .*line 1: KeyError: 'x'"):
        verdicts(tmp_path, ["x"], rewards=rewards)
    left = verdicts(tmp_path, ["x"], rewards=rewards, on_verifier_failure=OnVerifierFailure.leave_out)[0]
    assert math.isnan(left.reward)
    assert left.parts == {"half": 0.5, "bad": None}
    zero = verdicts(tmp_path, ["x"], rewards=rewards, on_verifier_failure=OnVerifierFailure.zero)[0]
    assert (zero.reward, zero.parts) == (0.5, {"half": 0.5, "bad": 0.0})
    with pytest.raises(Refusal, match=r"it returned \[1\.0\]: return a list of 2 numbers"):
        verdicts(tmp_path, ["x", "y"], rewards=named(few="too_few"))


@pytest.mark.parametrize("weight", ["1", True, math.inf, None])
def test_a_weight_that_is_no_finite_number_is_refused(tmp_path: Path, weight: Any) -> None:
    entry = {"_target_": "half", "_weight_": weight}
    with pytest.raises(Refusal, match=r"task\.rewards\.h\._weight_=.*: give a finite number"):
        task_of(tmp_path / "p.jsonl", rewards=named(h=entry))


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1.0)]
)
def test_the_length_penalty_grows_over_the_buffer(tokens: int, penalty: float) -> None:
    assert length_penalty(tokens, longest=16, buffer=4) == penalty
    rollouts = RolloutsConfig(max_new_tokens=16, length_penalty=2.0)  # a quarter of 16 tokens
    found = shaped(Judged(reward=1.0), tokens=tokens, rollouts=rollouts)
    assert found == Judged(reward=1.0 + 2.0 * penalty, parts={"verifier": 1.0, "length_penalty": penalty})
    unknown = shaped(Judged(reward=math.nan), tokens=tokens, rollouts=rollouts)
    assert math.isnan(unknown.reward)
    assert unknown.parts["verifier"] is None
    assert shaped(Judged(reward=1.0), tokens=tokens, rollouts=RolloutsConfig()) == Judged(reward=1.0)


def share_of_digits(response: str) -> float:
    return sum(c.isdigit() for c in response) / (len(response) or 1)


def odd_only(response: str) -> float | None:
    return 1.0 if len(response) % 2 else None


def test_a_run_logs_the_mean_of_every_part_over_those_that_it_judged(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": f"{i}?"} for i in range(40) if not is_held_out(f"{i}?")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = named(digits={"_target_": "share_of_digits", "_weight_": 2.0}, odd="odd_only")
    run = fit(
        local_config(
            tmp_path / "run",
            task=TaskConfig(kind=TaskKind.jsonl, path=str(path), rewards=rewards, eval_problems=0),
            rollouts=RolloutsConfig(
                source=Source.local, group_size=4, max_new_tokens=4, length_penalty=0.5, length_buffer=2
            ),
            batch=BatchConfig(samples_per_step=8),
        )
    )
    for row, batch in zip(run.rows, run.recorder.batches, strict=True):
        texts = [sample.response or "" for sample in batch.samples]
        odd = [odd_only(text) for text in texts]
        digits = [share_of_digits(text) for text in texts]
        lengths = [int(sample.response_mask.sum()) for sample in batch.samples]
        penalties = [-max(0, length - 2) / 2 for length in lengths]
        assert row["reward/digits"] == pytest.approx(sum(digits) / 8)
        assert row["reward/odd_unjudged"] == odd.count(None)
        assert row.get("reward/odd", 1.0) == 1.0
        assert row["reward/length_penalty"] == pytest.approx(sum(penalties) / 8)
        expected = [2 * d + (o or 0.0) + 0.5 * p for d, o, p in zip(digits, odd, penalties, strict=True)]
        assert [sample.reward for sample in batch.samples] == pytest.approx(expected)
        assert row["reward/mean"] == pytest.approx(sum(expected) / 8)
