"""Verifiers by domain, their failures and time limits. Functions stand at module level: processes import
them by name.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounds import BOUND_SECONDS
from math_cases import ANSWERS

from olmo_rl.config import OnVerifierFailure, TaskConfig, TaskKind
from olmo_rl.tasks.judging import Judge, build_judge, math_answer
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.problems import is_held_out
from olmo_rl.tasks.rewards import MATH
from olmo_rl.types import Refusal

HERE = __name__


def length(response: str, answer: str, scale: float = 1.0) -> float:
    return scale * len(response) + len(answer)


def failing(response: str, answer: str) -> float:
    raise KeyError(f"{response}/{answer}")


def slow(response: str, answer: str) -> float:
    """Judges after as many seconds as the response names."""
    time.sleep(float(response))
    return 3.0


def returning(response: str, answer: str) -> Any:
    """The value that the response spells."""
    return eval(response, {"np": np, "Fraction": Fraction})


def ending(response: str, answer: str) -> float:
    sys.exit(int(response))


def dying(response: str, answer: str) -> float:
    """Dies or sleeps where the response asks for it, and judges everything else."""
    if response == "die":
        os._exit(9)
    time.sleep(3600.0 if response == "sleep" else 0.0)
    return 1.0


class TwoArguments(Exception):
    """Cannot be pickled back: its constructor takes other arguments than it hands on."""

    def __init__(self, response: str, answer: str) -> None:
        super().__init__(f"{response}/{answer}")


class NoMessage(BaseException):
    def __str__(self) -> str:
        raise ValueError("no message")


def strange(response: str, answer: str) -> Any:
    """Does what the response names, in ways that break programs that hand it on."""
    if response == "two arguments":
        raise TwoArguments(response, answer)
    if response == "no message":
        raise NoMessage
    if response == "time":
        raise TimeoutError("theirs")
    if response == "exit":
        os._exit(0)
    if response == "fork":
        os.fork()
    return (lambda: 1.0) if response == "function" else 1.0


_imported = False


def importing(response: str, answer: str) -> float:
    """The first call of a process takes 2 s, as a large library does; later ones as the response asks."""
    global _imported
    time.sleep(float(response) if _imported else 2.0)
    _imported = True
    return 1.0


def config(**settings: Any) -> TaskConfig:
    return TaskConfig(kind=TaskKind.jsonl, path="problems.jsonl", **settings)


def judged(judge: Judge, response: str, *, answer: str, domain: str | None, problem: str) -> float:
    given = {"answer": answer, "domain": domain, "prompt": "a prompt"}
    (verdict,) = judge.judge(given, [response], problem=problem)
    return verdict.reward


def test_each_domain_has_its_verifier_and_others_the_default() -> None:
    judge = build_judge(
        config(
            verifier={"_target_": f"{HERE}.length"},
            verifiers={"math": {"_target_": f"{HERE}.length", "scale": 10.0}, "quiz": {}},
        )
    )
    verdicts = [
        judged(judge, "abc", answer="de", domain=domain, problem="p")
        for domain in (None, "math", "quiz", "poetry")
    ]
    assert verdicts == [5.0, 32.0, 0.0, 5.0]
    assert judged(judge, " de ", answer="de", domain="quiz", problem="p") == 1.0


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
    value = judged(judge, "a", answer="b", domain=None, problem="p")
    assert value == verdict or (math.isnan(value) and math.isnan(verdict))
    assert judge.counts == {"verifier_failures": 1}


@pytest.mark.parametrize(
    ("verifier", "response", "reason"),
    [
        ("failing", "a", "KeyError: 'a/b'"),
        ("returning", "[1.0]", r"it returned \[1.0\]: return a finite number"),
        ("returning", "'1'", "it returned '1': return a finite number"),
        ("returning", "float('inf')", "it returned inf: return a finite number"),
        ("returning", "10**400", "OverflowError: int too large to convert to float"),
        ("ending", "3", r"it called sys.exit\(3\)"),
    ],
)
def test_by_default_a_verifier_that_gives_no_verdict_is_refused_by_problem(
    verifier: str, response: str, reason: str
) -> None:
    settings: dict[str, Any] = {"verifier": {"_target_": f"{HERE}.{verifier}"}}
    with pytest.raises(Refusal, match=f"on a response to p.jsonl, line 7: {reason}"):
        judged(build_judge(config(**settings)), response, answer="b", domain=None, problem="p.jsonl, line 7")
    lenient = build_judge(config(**settings, on_verifier_failure=OnVerifierFailure.zero))
    assert judged(lenient, response, answer="b", domain=None, problem="p") == 0.0
    assert lenient.counts == {"verifier_failures": 1}


@pytest.mark.parametrize(
    "response", ["True", "np.bool_(True)", "np.float32(1)", "np.int64(1)", "Fraction(1)"]
)
def test_every_kind_of_real_number_is_a_verdict(response: str) -> None:
    judge = build_judge(config(verifier={"_target_": f"{HERE}.returning"}))
    assert judged(judge, response, answer="b", domain=None, problem="p") == 1.0


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("die", "its process ended with exit code 9"),
        ("sleep", "did not end within task.verifier_seconds=0.5"),
    ],
)
def test_a_verifier_that_dies_or_sleeps_in_its_process_is_refused_by_problem(
    response: str, reason: str
) -> None:
    judge = build_judge(config(verifier={"_target_": f"{HERE}.dying"}, verifier_seconds=0.5))
    try:
        with pytest.raises(Refusal, match=f"on a response to line 7: (it )?{reason}"):
            judged(judge, response, answer="", domain=None, problem="line 7")
    finally:
        judge.close()


def test_a_slow_import_does_not_count_against_the_limit_also_in_a_process_after_a_kill() -> None:
    judge = build_judge(
        config(
            verifier={"_target_": f"{HERE}.importing"},
            verifier_seconds=1.0,
            on_verifier_failure=OnVerifierFailure.leave_out,
        )
    )
    try:
        assert judged(judge, "0", answer="0", domain=None, problem="p") == 1.0
        assert math.isnan(judged(judge, "3600", answer="0", domain=None, problem="p"))
        assert judged(judge, "0", answer="0", domain=None, problem="p") == 1.0
    finally:
        judge.close()
    assert judge.counts == {"verifier_timeouts": 1}


@pytest.mark.parametrize("seconds", [None, 60.0])
@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("two arguments", "TwoArguments: two arguments/a"),
        ("no message", r"NoMessage: \(its message cannot be shown\)"),
        ("time", "TimeoutError: theirs"),
        ("function", "it returned <function strange"),
    ],
)
def test_failures_that_no_process_can_hand_on_are_reported_alike_with_and_without_a_limit(
    response: str, reason: str, seconds: float | None
) -> None:
    judge = build_judge(config(verifier={"_target_": f"{HERE}.strange"}, verifier_seconds=seconds))
    try:
        for _ in range(2):
            with pytest.raises(Refusal, match=f"on a response to line 7: {reason}"):
                judged(judge, response, answer="a", domain=None, problem="line 7")
        assert judged(judge, "right", answer="a", domain=None, problem="line 7") == 1.0
    finally:
        judge.close()
    assert judge.counts == {"verifier_failures": 2}


def test_a_process_that_ends_without_an_error_is_noticed_at_once_and_replaced() -> None:
    settings = {"verifier_seconds": 3600.0, "on_verifier_failure": OnVerifierFailure.leave_out}
    judge = build_judge(config(verifier={"_target_": f"{HERE}.strange"}, **settings))
    begun = time.monotonic()
    try:
        assert math.isnan(judged(judge, "exit", answer="exit", domain=None, problem="p"))
        assert math.isnan(judged(judge, "exit", answer="a", domain=None, problem="p"))
        assert judged(judge, "fork", answer="a", domain=None, problem="p") == 1.0
        assert judged(judge, "right", answer="a", domain=None, problem="p") == 1.0
    finally:
        judge.close()
    assert time.monotonic() - begun < 600
    assert judge.counts == {"verifier_failures": 2}


def test_the_long_wait_for_a_first_call_is_granted_to_a_verifier_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("olmo_rl.tasks.judging.START_SECONDS", 15.0)
    settings = {"verifier_seconds": 1.0, "on_verifier_failure": OnVerifierFailure.leave_out}
    judge = build_judge(config(verifier={"_target_": f"{HERE}.slow"}, **settings))
    begun = time.monotonic()
    try:
        for _ in range(4):
            assert math.isnan(judged(judge, "3600", answer="3600", domain=None, problem="p"))
        assert judged(judge, "0", answer="3600", domain=None, problem="p") == 3.0
    finally:
        judge.close()
    assert judge.counts == {"verifier_timeouts": 4}
    assert time.monotonic() - begun < 5 * 15, "one wait of 15 s, not five"


def test_a_task_starts_its_verifiers_before_anything_is_judged_within_a_deadline(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "answer": "1", "domain": "late" if i % 2 else None} for i in range(40)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verifiers = {
        "verifier": {"_target_": f"{HERE}.slow"},
        "verifiers": {"late": {"_target_": f"{HERE}.late"}},
    }
    settings = TaskConfig(kind=TaskKind.jsonl, path=str(path), verifier_seconds=0.5, **verifiers)
    before = set(multiprocessing.active_children())
    task = build_task(settings, seed=0)
    begun = time.monotonic()
    task.start(seconds=30.0)
    started = set(multiprocessing.active_children()) - before
    try:
        assert time.monotonic() - begun < BOUND_SECONDS, "a first call that never ends is not waited for"
        assert task.counts == {"verifier_failures": 0, "verifier_timeouts": 0}
        assert len(started) <= 1
    finally:
        for process in started:
            process.kill()


def test_a_verifier_is_warm_after_the_start_of_its_judge() -> None:
    judge = build_judge(config(verifier={"_target_": f"{HERE}.importing"}, verifier_seconds=1.0))
    try:
        judge.start([{"answer": "0"}], seconds=300.0)
        assert judge._process.runs
        assert len(judge._warm) == 1
        assert judged(judge, "0", answer="0", domain=None, problem="p") == 1.0
    finally:
        judge.close()


def test_signals_to_the_job_leave_the_judgement_to_the_process_that_waits_for_it() -> None:
    judge = build_judge(config(verifier={"_target_": f"{HERE}.slow"}, verifier_seconds=60.0))
    try:
        assert judged(judge, "0", answer="0", domain=None, problem="p") == 3.0
        (process,) = multiprocessing.active_children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(process.pid or 0, number)
        assert judged(judge, "0.5", answer="0", domain=None, problem="p") == 3.0
    finally:
        judge.close()


def late(response: str, answer: str) -> float:
    """Never answers."""
    time.sleep(3600.0)
    return 0.0


def starting(response: str, answer: str) -> float:
    """Leaves a program that runs for an hour, and its number in the file that the answer names."""
    if response == answer:
        return 1.0
    program = subprocess.Popen(["sleep", "3600"])
    Path(answer).write_text(str(program.pid))
    time.sleep(float(response))
    return 0.0


def ends(pid: int) -> bool:
    """Whether a process is gone within the bound on hanging."""
    until = time.monotonic() + BOUND_SECONDS
    while time.monotonic() < until:
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("response", ["0", "3600"])
def test_programs_that_a_verifier_starts_end_with_its_process(tmp_path: Path, response: str) -> None:
    judge = build_judge(
        config(
            verifier={"_target_": f"{HERE}.starting"},
            verifier_seconds=2.0,
            on_verifier_failure=OnVerifierFailure.leave_out,
        )
    )
    try:
        judged(judge, response, answer=str(tmp_path / "pid"), domain=None, problem="p")
    finally:
        judge.close()
    assert ends(int((tmp_path / "pid").read_text()))


def judge_until_killed(directory: str) -> None:
    """A rank that is killed while its verifier works."""
    judge = build_judge(config(verifier={"_target_": f"{HERE}.starting"}, verifier_seconds=600.0))
    judged(judge, "3600", answer=str(Path(directory) / "pid"), domain=None, problem="p")


def test_programs_that_a_verifier_started_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    rank = multiprocessing.get_context("spawn").Process(target=judge_until_killed, args=(str(tmp_path),))
    rank.start()
    until = time.monotonic() + BOUND_SECONDS
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.05)
    rank.kill()
    rank.join()
    time.sleep(0.05)  # the number is written whole
    assert ends(int((tmp_path / "pid").read_text()))


def test_a_verifier_that_does_not_return_is_ended_and_the_next_response_is_judged() -> None:
    judge = build_judge(
        config(
            verifier={"_target_": f"{HERE}.slow"},
            verifier_seconds=30.0,
            on_verifier_failure=OnVerifierFailure.leave_out,
        )
    )
    try:
        assert judged(judge, "0", answer="0", domain=None, problem="p") == 3.0
        judge.seconds = 0.5
        assert math.isnan(judged(judge, "3600", answer="", domain=None, problem="p"))
        judge.seconds = 30.0
        assert judged(judge, "0", answer="0", domain=None, problem="p") == 3.0
        assert math.isnan(judged(judge, "not a number", answer="", domain=None, problem="p"))
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
        judged(
            build_judge(config(verifier={"_target_": MATH})),
            response,
            answer=answer,
            domain=None,
            problem="p",
        )
        == worth
    )


@pytest.mark.parametrize(("answer", "right", "wrong"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_every_spelling_of_an_answer_is_judged_by_its_value(
    answer: str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    for reference in (answer, f"${answer}$"):
        for given in (answer, *right):
            bare = given.strip("$")
            for response in (
                given,
                rf"so it is \boxed{{{bare}}}",
                f"We add 7 and 8.\n\nThe answer is {given}.",
            ):
                assert math_answer(response, reference) == 1.0, (response, reference)
        for given in wrong:
            for response in (given, rf"so it is \boxed{{{given}}}", f"The answer is {given}."):
                assert math_answer(response, reference) == 0.0, (response, reference)


@pytest.mark.parametrize(
    ("response", "answer", "worth"),
    [
        ("She has 5 apples left.", "5", 1.0),
        ("She makes 9 * 2 = $18 every day.", "18", 1.0),
        ("The answer is 42, since 40+2=42.", "42", 1.0),
        ("The total is 10 and the average is 5.", "10", 0.0),
        ("We find f(x) = x^2+1", "x^2+1", 1.0),
        ("the point $(0,5)$", "(0,5)", 1.0),
        ("**Answer:** $1$ and $2$", "1, 2", 1.0),
        ("#### 70,000", "70000", 1.0),
        ("7 or 8", "7", 0.0),
        ("9999999999998", "9999999999999", 0.0),
        ("9^{9^{9^{9^9}}}", "1", 0.0),
        ("99999!", "1", 0.0),
        ("((((((", "1", 0.0),
        (r"\frac{", "1", 0.0),
        (r"\boxed{", "1", 0.0),
        ("", "1", 0.0),
        ("<think>is it 6?</think><answer>7</answer>", "7", 1.0),
        ("<answer>7</answer>", "6", 0.0),
        ("It will be a Thursday.", r"\text{Thursday}", 1.0),
        ("He walks east", r"\text{west}", 0.0),
    ],
)
def test_the_final_answer_of_prose_is_what_counts(response: str, answer: str, worth: float) -> None:
    assert math_answer(response, answer) == worth


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("", "it is empty"),
        ("$$", "it is empty"),
        (r"\frac{1}{2", "its { and } do not match"),
        ("He has 2+1=3 bolts.\n#### 3", "it is a whole solution with ####: give the final answer alone"),
        (r"So $x=\boxed{3}$.", r"it is a whole solution with \boxed: give the final answer alone"),
    ],
)
def test_a_reference_that_cannot_be_read_is_refused_by_file_and_line(
    tmp_path: Path, answer: str, fault: str
) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": answer}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings: dict[str, Any] = {"verifier": {"_target_": MATH}}
    for choice in OnVerifierFailure:
        task = build_task(
            TaskConfig(kind=TaskKind.jsonl, path=str(path), on_verifier_failure=choice, **settings), seed=0
        )
        with pytest.raises(Refusal, match=f"p.jsonl, line 2.*is invalid: {re.escape(fault)}") as caught:
            task.check_references()
        assert len(caught.value.reasons) == 1
        assert set(task.counts.values()) == {0}


def test_users_verifiers_judge_every_reference_once_and_zeros_are_a_remark(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{name}", "answer": "{name}"}}\n' for name in "abcdefghijklm"))
    settings: dict[str, Any] = {"verifier": {"_target_": f"{HERE}.length", "scale": -1.0}}
    task = build_task(TaskConfig(kind=TaskKind.jsonl, path=str(path), **settings), seed=0)
    assert task.check_references() == ("task.verifier gives 0 to 13 of 13 references as responses",)
    settings = {"verifier": {"_target_": f"{HERE}.length", "scale": math.nan}}
    task = build_task(TaskConfig(kind=TaskKind.jsonl, path=str(path), **settings), seed=0)
    assert task.check_references() == ("task.verifier cannot judge 13 of 13 references as responses",)
    settings = {"verifier": {"_target_": f"{HERE}.failing"}}
    task = build_task(TaskConfig(kind=TaskKind.jsonl, path=str(path), **settings), seed=0)
    with pytest.raises(Refusal, match=r"p\.jsonl, line 3: KeyError") as caught:
        task.check_references()
    assert len(caught.value.reasons) == 13
