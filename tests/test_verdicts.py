"""Runs whose verifiers fail or cannot judge: what is saved and reported; unknown is never a number."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bounds import BOUND_SECONDS
from composing import ROOT
from training_cases import samples_of

from olmo_rl.cli import run as run_command
from olmo_rl.collections.collecting import describe
from olmo_rl.data.means import Mean, shown
from olmo_rl.run_directory import complete_checkpoints
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.reward_picture import draw_reward
from olmo_rl.tasks.problems import is_held_out
from olmo_rl.training.measures import StepTotals

pytestmark = pytest.mark.usefixtures("forked")

HERE = __name__
RUN = (
    *("+experiment=packed_moe", "model=hybrid_tiny", "task=jsonl", "task.path=p.jsonl", "warm_start.steps=0"),
    *("batch.samples_per_step=8", "rollouts.group_size=4", "rollouts.max_new_tokens=4", "model.dim=16"),
    *("task.eval_interval=1", "callbacks.progress=false"),
)
ALONE = ("strategy=single", "trainer=cpu")


def held_out_unknown(response: str, answer: str) -> float:
    """NaN for held-out problems, else whether the response has an even number of characters."""
    return math.nan if is_held_out(answer) else float(len(response) % 2 == 0)


_calls = 0


def failing_later(response: str, answer: str, rank: str = "0", after: int = 20) -> float:
    """Raises at one rank once it has judged `after` responses."""
    global _calls
    _calls += response != answer
    if os.environ.get("RANK", "0") == rank and _calls > after:
        raise KeyError(response)
    return float(len(response) % 2 == 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": f"{i}", "answer": f"{i}"}) for i in range(60)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    return tmp_path


def events(run: Path, name: str) -> list[dict[str, object]]:
    lines = (run / "training_contract_rank0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_an_unknown_mean_is_none_and_is_shown_as_unknown() -> None:
    assert Mean.of([]).value is None
    assert Mean.of([math.nan, math.inf]).value is None
    assert Mean.of([1.0, math.nan, 0.0]).value == 0.5
    assert (Mean.of([1.0]) + Mean() + Mean.of([0.0, 0.5])).value == 0.5
    assert shown(None) == "unknown"
    assert shown(0.25) == "0.250"


def test_an_accuracy_that_nobody_knows_is_none_for_every_consumer(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (*RUN, *ALONE, "task.eval_problems=3", f"+task.verifier._target_={HERE}.held_out_unknown")
    assert run_command([*settings, "trainer.max_steps=1"]) == 0
    said = capfd.readouterr().out
    assert "unknown" in said[said.index("greedy held-out accuracy") :]
    (run,) = (place / "outputs").glob("packed_moe-*")
    assert [event["accuracy"] for event in events(run, "evaluation")] == [None, None]
    assert [event["judged"] for event in events(run, "evaluation")] == [0, 0]
    assert [event["answered"] for event in events(run, "evaluation")] == [3, 3]
    assert "eval/accuracy" not in read_metrics(run / "metrics.csv")[0]
    assert (run / "reward.png").is_file()
    assert run_command([*settings, "trainer.max_steps=2", "ckpt_path=last"]) == 0
    said = capfd.readouterr().out
    assert "unknown" in said[said.index("greedy held-out accuracy") :]


def test_a_picture_leaves_unknown_accuracies_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,reward/mean\n1,0.5\n2,\n")
    draw_reward(
        tmp_path / "metrics.csv", evaluations={0: None, 2: 0.5}, path=tmp_path / "reward.png", title="run"
    )
    assert (tmp_path / "reward.png").is_file()


def test_a_picture_shows_rewards_below_zero_and_above_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.csv").write_text("step,reward/mean\n1,-2.5\n2,7.5\n")
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure))
    draw_reward(tmp_path / "metrics.csv", evaluations={2: 9.0}, path=tmp_path / "reward.png", title="run")
    low, high = drawn[0].axes[0].get_ylim()
    assert low <= -2.5
    assert high >= 9.0


def test_rewards_that_nobody_knows_have_no_mean() -> None:
    samples = samples_of()
    for sample in samples:
        sample.reward = math.nan
    assert "reward/mean" not in describe(samples)
    samples[0].reward = 0.5
    assert describe(samples)["reward/mean"] == np.float64(0.5)


def test_a_verifier_that_fails_ends_the_run_as_a_refusal_and_what_was_trained_is_saved(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (*RUN, *ALONE, "task.eval_problems=0", f"+task.verifier._target_={HERE}.failing_later")
    assert run_command([*settings, "trainer.max_steps=9"]) == 2
    err = capfd.readouterr().err
    assert "task.verifier failed on a response to p.jsonl, line " in err
    assert ": KeyError: " in err
    assert "Traceback" not in err
    (run,) = (place / "outputs").glob("packed_moe-*")
    assert [path.name for path in complete_checkpoints(run)] == ["step-2"]


def test_a_verifier_that_fails_at_one_rank_is_refused_and_saved_by_all(place: Path) -> None:
    arguments = [
        *(*RUN, "task.eval_problems=0", "strategy.ep_degree=2", "trainer.devices=2"),
        *(f"+task.verifier._target_={HERE}.failing_later", "+task.verifier.rank='1'"),
        *("+task.verifier.after=6", "trainer.max_steps=9"),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=place,
        env=environment,
        timeout=BOUND_SECONDS,
    )
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-4000:]
    assert "task.verifier failed on a response to p.jsonl, line " in done.stderr
    assert "Traceback" not in done.stderr
    (run,) = (place / "outputs").glob("packed_moe-*")
    assert [path.name for path in complete_checkpoints(run)] == ["step-1"]


def test_means_of_an_update_over_nothing_are_none() -> None:
    nothing = {"sum/gap": 0.0, "count/scored": 0.0, "sum/overlap": 0.0, "count/recorded_rows": 0.0}
    totals = StepTotals(
        sums=nothing,
        p99_gap=None,
        max_drift=0.0,
        max_log_ratio=0.0,
        max_ratio=0.0,
        expert_entropies=(),
        balance=None,
    )
    assert totals.mean_gap is totals.mean_drift is totals.overlap is None
    known = replace(totals, sums=nothing | {"sum/gap": 3.0, "count/scored": 4.0})
    assert known.mean_gap == 0.75
    assert known.mean_drift is None, "a mean of what was never added up"
