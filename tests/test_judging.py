"""Verifiers by domain, their failures and time limits. Functions stand at module level: processes import
them by name.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from olmo_rl.config import OnVerifierFailure, TaskConfig, TaskKind
from olmo_rl.data.judging import MATH, build_judge, math_answer
from olmo_rl.data.tasks import build_task, is_held_out
from olmo_rl.types import Refusal

HERE = __name__


def length(response: str, answer: str, scale: float = 1.0) -> float:
    return scale * len(response) + len(answer)


def failing(response: str, answer: str) -> float:
    raise KeyError(f"{response}/{answer}")


def slow(response: str, answer: str) -> float:
    """Judges after as many seconds as the response says."""
    time.sleep(float(response))
    return 3.0


def config(**settings: Any) -> TaskConfig:
    return TaskConfig(kind=TaskKind.jsonl, path="problems.jsonl", **settings)


def test_each_domain_has_its_verifier_and_others_the_default() -> None:
    judge = build_judge(
        config(
            verifier={"_target_": f"{HERE}.length"},
            verifiers={"math": {"_target_": f"{HERE}.length", "scale": 10.0}, "quiz": {}},
        )
    )
    verdicts = [
        judge.judge("abc", answer="de", domain=domain, problem="p")
        for domain in (None, "math", "quiz", "poetry")
    ]
    assert verdicts == [5.0, 32.0, 0.0, 5.0]
    assert judge.judge(" de ", answer="de", domain="quiz", problem="p") == 1.0


def test_a_line_names_its_domain(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    prompts = [name for name in ("a", "b", "c", "d", "e", "f") if not is_held_out(name)][:2]
    path.write_text(
        f'{{"prompt": "{prompts[0]}", "answer": "x", "domain": "math"}}\n'
        f'{{"prompt": "{prompts[1]}", "answer": "x"}}\n'
    )
    settings: dict[str, Any] = {"verifiers": {"math": {"_target_": f"{HERE}.length"}}}
    task = build_task(TaskConfig(kind=TaskKind.jsonl, path=str(path), **settings), seed=0)
    by_prompt = {problem.prompt: problem for problem in task.problems(2, seed=0)}
    assert task.reward(by_prompt[prompts[0]], "abc") == 4.0
    assert task.reward(by_prompt[prompts[1]], "abc") == 0.0
    path.write_text('{"prompt": "a", "answer": "x", "domain": 3}\n')
    with pytest.raises(Refusal, match="line 1: 'domain' is not text"):
        build_task(TaskConfig(kind=TaskKind.jsonl, path=str(path)), seed=0)


@pytest.mark.parametrize(
    ("choice", "verdict"), [(OnVerifierFailure.leave_out, math.nan), (OnVerifierFailure.zero, 0.0)]
)
def test_a_failure_is_counted_and_is_a_zero_only_where_that_was_asked_for(
    choice: OnVerifierFailure, verdict: float
) -> None:
    judge = build_judge(config(verifier={"_target_": f"{HERE}.failing"}, on_verifier_failure=choice))
    value = judge.judge("a", answer="b", domain=None, problem="p")
    assert value == verdict or (math.isnan(value) and math.isnan(verdict))
    assert judge.counts == {"verifier_failures": 1}


def test_by_default_a_failure_ends_the_run_and_names_the_problem() -> None:
    judge = build_judge(config(verifier={"_target_": f"{HERE}.failing"}))
    with pytest.raises(KeyError) as caught:
        judge.judge("a", answer="b", domain=None, problem="line-7")
    assert caught.value.__notes__ == ["task.verifier failed on a response to problem line-7"]


def test_a_verifier_that_does_not_return_is_ended_and_the_next_response_is_judged() -> None:
    judge = build_judge(
        config(
            verifier={"_target_": f"{HERE}.slow"},
            verifier_seconds=30.0,
            on_verifier_failure=OnVerifierFailure.leave_out,
        )
    )
    try:
        assert judge.judge("0", answer="", domain=None, problem="p") == 3.0  # the process has started
        judge.seconds = 0.5
        assert math.isnan(judge.judge("3600", answer="", domain=None, problem="p"))
        judge.seconds = 30.0
        assert judge.judge("0", answer="", domain=None, problem="p") == 3.0
        assert math.isnan(judge.judge("not a number", answer="", domain=None, problem="p"))
    finally:
        judge.close()
    assert judge.counts == {"verifier_timeouts": 1, "verifier_failures": 1}


def test_a_domain_that_names_no_function_is_refused_by_its_key() -> None:
    with pytest.raises(Refusal, match="task.verifiers.math: give the function's import path"):
        build_judge(config(verifiers={"math": {"target": "x"}}))
    with pytest.raises(Refusal, match=r"task\.verifiers\.math\._target_=no\.such"):
        build_judge(config(verifiers={"math": {"_target_": "no.such"}}))


@pytest.mark.parametrize(
    ("response", "answer", "worth"),
    [
        ("so the result is $\\frac{1}{2}$", "$0.5$", 1.0),
        ("the answer is \\boxed{\\frac{3}{6}}", "$\\frac{1}{2}$", 1.0),
        ("the answer is \\boxed{2}", "$\\frac{1}{2}$", 0.0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        ("no number here", "$4$", 0.0),
        ("$14$", "$4$", 0.0),
    ],
)
def test_mathematical_answers_are_equal_by_value_not_by_text(
    response: str, answer: str, worth: float
) -> None:
    assert (
        build_judge(config(verifier={"_target_": MATH})).judge(
            response, answer=answer, domain=None, problem="p"
        )
        == worth
    )


def test_a_reference_that_is_no_answer_is_a_failure_not_a_wrong_response() -> None:
    with pytest.raises(ValueError, match="reads no answer in the reference"):
        math_answer("$4$", "")
