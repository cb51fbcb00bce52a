"""Held-out evaluation: pass@k against its closed form, sets by name, domains, and recipe=evaluate on weights
of every origin.
"""

from __future__ import annotations

import json
import math
import time
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from engine_cases import MODEL_KEYS, listening, local_engine, server_of, weights_of

from olmo_rl.cli import run as run_command
from olmo_rl.config import Config, EvaluationConfig, TaskConfig
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.policy.weights import save_weights
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.tasks.held_out import held_out_sets, start_named
from olmo_rl.tasks.pass_rates import Tried, by_domain, measure, pass_at


@pytest.mark.parametrize("responses", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_draws_of_k_responses_that_hold_a_solution(responses: int) -> None:
    for solved in range(responses + 1):
        outcomes = [i < solved for i in range(responses)]
        for k in range(1, responses + 1):
            draws = list(combinations(outcomes, k))
            share = Fraction(sum(any(draw) for draw in draws), len(draws))
            assert pass_at(k, responses=responses, solved=solved) == pytest.approx(float(share), abs=1e-15)


def test_pass_at_k_is_exact_where_binomials_overflow_floats() -> None:
    assert pass_at(1, responses=4000, solved=1000) == 0.25
    assert pass_at(2000, responses=4000, solved=0) == 0.0
    assert pass_at(2000, responses=4000, solved=1) == 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_pass_at_k_is_unbiased_over_every_outcome_of_independent_responses(rate: float) -> None:
    """The mean over all counts of solutions, weighted by their chance, is 1 - (1 - rate)^k."""
    n = 6
    for k in range(1, n + 1):
        mean = sum(
            math.comb(n, c) * rate**c * (1 - rate) ** (n - c) * pass_at(k, responses=n, solved=c)
            for c in range(n + 1)
        )
        assert mean == pytest.approx(1 - (1 - rate) ** k, abs=1e-12)


def test_unknown_verdicts_and_missing_answers_are_counted_and_in_no_mean() -> None:
    tried = [
        Tried(domain="a", rewards=(1.0, 0.0, math.nan)),
        Tried(domain="b", rewards=(0.5, 0.5), unanswered=1),
        Tried(domain="b", rewards=(math.nan,), unanswered=2),
    ]
    found = measure(tried, ks=[1, 2], solved_from=0.5)
    assert found.record() == {
        "accuracy": 0.5,
        "pass_at_1": 0.75,
        "pass_at_2": 1.0,
        "problems": 3,
        "answered": 6,
        "judged": 4,
        "pass_at_1_problems": 2,
        "pass_at_2_problems": 2,
    }
    assert {name: len(part) for name, part in by_domain(tried).items()} == {"a": 1, "b": 2}
    assert by_domain(tried[1:]) == {}
    nothing = measure(tried[2:], ks=[1], solved_from=0.5)
    assert nothing.values() == {"accuracy": None, "pass_at_1": None}


def even(response: str) -> float:
    return float(len(response) % 2 == 0)


def first_half(response: str, level: int) -> float | None:
    """Judges level 1 alone."""
    return 0.25 if level == 1 else None


def slow(response: str, seconds: float, name: str) -> float:
    STARTED.append(name)
    time.sleep(seconds)
    return 0.0


STARTED: list[str] = []


@pytest.mark.parametrize("seconds", [0.0, 0.6])
def test_named_sets_share_the_time_of_their_start(tmp_path: Path, seconds: float) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1?", "answer": "1"}) + "\n")
    sets = {
        name: {
            "path": str(tmp_path / "p.jsonl"),
            "verifier": {"_target_": f"{__name__}.slow", "seconds": seconds, "name": name},
        }
        for name in "abc"
    }
    found = held_out_sets(
        Config(task=TaskConfig(eval_problems=0), evaluation=EvaluationConfig(sets=sets)),
        own=None,
        tokenizer=ByteTokenizer(),
    )
    STARTED.clear()
    start_named(found, seconds=0.5 if seconds else 60.0)
    assert len(STARTED) <= 1 if seconds else STARTED == ["a", "b", "c"]


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two named sets: judged as the task is, and by a function of its own."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}=", "answer": f"{i}", "domain": "odd" if i % 2 else "even"} for i in range(6)]
    Path("numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": f"{i}?", "level": 1 + i % 2} for i in range(4)]
    Path("levels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "+evaluation.sets.numbers={path:numbers.jsonl,verifier:{_target_:test_evaluation.even}}",
        "+evaluation.sets.levels={path:levels.jsonl,"
        "rewards:{half:{_target_:test_evaluation.first_half,_weight_:2.0}}}",
    ]


SMALL = ("+experiment=packed_moe", *MODEL_KEYS, "warm_start.steps=0", "rollouts.max_new_tokens=4")
ALONE = ("strategy=single", "trainer=cpu", "callbacks=quiet", "task.eval_problems=4")
SAMPLED = ("evaluation.samples=4", "evaluation.temperature=1", "evaluation.pass_at=[1,2,4]")


def evaluated(run: str) -> dict[tuple[str, str | None], dict[str, Any]]:
    found = json.loads((Path("outputs") / run / "evaluation.json").read_text())
    return {(one["set"], one["domain"]): one for one in found["results"]}


def test_given_weights_are_evaluated_by_set_and_domain_alike_from_every_origin(
    sets: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    save_weights(weights_of(3), Path("w.safetensors"))
    common = ("recipe=evaluate", *SMALL, *ALONE, *SAMPLED, *sets)
    assert run_command([*common, "run_name=file", "init_from=w.safetensors"]) == 0
    found = evaluated("file")
    assert list(found) == [
        ("task", None),
        ("numbers", None),
        ("numbers", "even"),
        ("numbers", "odd"),
        ("levels", None),
    ]
    assert (found["numbers", None]["problems"], found["numbers", None]["judged"]) == (6, 24)
    assert (found["levels", None]["judged"], found["levels", None]["accuracy"]) == (8, 0.5)
    assert found["levels", None]["pass_at_1_problems"] == 2
    for name in ("task", "numbers"):
        lines = [
            json.loads(line) for line in Path(f"outputs/file/answers/{name}.jsonl").read_text().splitlines()
        ]
        by_problem: dict[str, list[float]] = {}
        for line in lines:
            by_problem.setdefault(line["problem"], []).append(line["reward"])
        rewards = [reward for part in by_problem.values() for reward in part]
        assert found[name, None]["accuracy"] == pytest.approx(sum(rewards) / len(rewards))
        for k in (1, 2, 4):
            shares = [
                sum(any(r >= 1 for r in draw) for draw in combinations(part, k)) / math.comb(4, k)
                for part in by_problem.values()
            ]
            assert found[name, None][f"pass_at_{k}"] == pytest.approx(sum(shares) / len(shares))
        if name == "numbers":
            assert all(line["reward"] == even(line["response"]) for line in lines)
            assert 0 < found[name, None]["pass_at_1"] < found[name, None]["pass_at_4"] <= 1
    assert "mean@4" in capfd.readouterr().out

    assert (
        run_command(["recipe=export", *SMALL, "run_name=x", "init_from=w.safetensors", "export.path=hf"]) == 0
    )
    assert run_command([*common, "run_name=hf", "init_from=hf"]) == 0
    assert evaluated("hf") == found
    with listening(server_of(local_engine(seed=3)).application()) as url:
        served = ("rollouts=vllm", f"rollouts.urls=[{url}]")
        greedy = ("recipe=evaluate", *SMALL, *ALONE, *sets)
        assert run_command([*greedy, *served, "run_name=engine"]) == 0
    assert run_command([*greedy, "run_name=greedy", "init_from=w.safetensors"]) == 0
    assert evaluated("engine") == evaluated("greedy")


def test_a_run_logs_its_named_sets_beside_its_own_and_its_checkpoint_is_evaluated(
    sets: list[str],
) -> None:
    common = (*SMALL, *ALONE, *SAMPLED, *sets)
    small = ("batch.samples_per_step=8", "rollouts.group_size=4", "trainer.max_steps=1")
    assert run_command([*common, *small, "run_name=run", "callbacks.checkpoint_interval=1"]) == 0
    (row,) = read_metrics(Path("outputs/run/metrics.csv"))
    checkpoint = "init_from=outputs/run/checkpoints/step-1"
    assert run_command(["recipe=evaluate", *common, "run_name=again", checkpoint]) == 0
    found = evaluated("again")
    assert row["eval/levels/accuracy"] == found["levels", None]["accuracy"] == 0.5
    names = {
        ("task", None): "eval/",
        ("numbers", None): "eval/numbers/",
        ("numbers", "odd"): "eval/numbers/odd/",
    }
    for where, prefix in names.items():
        # Draws depend on the version of the weights too, greedy measures alone would be equal.
        assert {f"{prefix}accuracy", f"{prefix}pass_at_4"} <= row.keys()
        assert found[where]["problems"] > 0
    lines = Path("outputs/run/training_contract_rank0.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "evaluation"]
    assert [event["problems"] for event in events] == [4, 4]
    assert [one["set"] for one in events[1]["sets"]] == ["numbers", "numbers", "numbers", "levels"]
    assert events[1]["accuracy"] == row["eval/accuracy"]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("{path:nowhere.jsonl}", "evaluation.sets.s: task.path=nowhere.jsonl: no such file"),
        ("{pfad:p.jsonl}", "evaluation.sets.s: unknown 'pfad', the nearest known name is 'path'"),
        ("{path:3}", "evaluation.sets.s.path=3: give text"),
        ("{problems:3}", "evaluation.sets.s.path: not set: name a file"),
        ("{kind:addition}", "evaluation.sets.s.problems: addition has no end: say how many"),
        ("{kind:sums,problems:3}", "evaluation.sets.s.kind=sums: give one of addition"),
        ("{path:numbers.jsonl,problems:0}", "evaluation.sets.s.problems=0: give a whole number"),
        ("{path:numbers.jsonl,problems:99}", "evaluation.sets.s: task.eval_problems=99: "),
        ("{path:levels.jsonl}", "'answer' is missing"),
    ],
)
def test_a_set_that_cannot_be_asked_is_refused_by_name(
    sets: list[str], capfd: pytest.CaptureFixture[str], entry: str, reason: str
) -> None:
    save_weights(weights_of(3), Path("w.safetensors"))
    arguments = ["recipe=evaluate", *SMALL, *ALONE, "run_name=r", "init_from=w.safetensors"]
    assert run_command([*arguments, f"+evaluation.sets.s={entry}"]) == 2
    assert reason in capfd.readouterr().err
    assert not Path("outputs/r/evaluation.json").exists()
