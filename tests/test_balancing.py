"""Balancing while training, on four gloo ranks with EP2: it changes counts and nothing else, and says so.

One program (balance_cases.py) trains the same file in every form; the tests look at what each rank saw.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

TESTS = Path(__file__).parent
SEARCHED = ("greedy", "reference", "anneal", "anneal order", "anneal recomputed", "stride")
EQUAL = 1e-6  # of float32 sums in another order, relative to the norm
NO_TENSOR = 1e-5  # tensors of a few cancelling terms round worse than all of them together

Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    directory = tmp_path_factory.mktemp("balance")
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "balance_cases.py"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    found = [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
    found[0]["stdout"] = done.stdout
    return found


def events(found: Found, name: str) -> list[Found]:
    return [event for event in found["events"] if event["event"] == name]


def distances(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, float]:
    """Of all tensors as one vector, and the largest of any tensor, relative to the norm."""
    assert a.keys() == b.keys()
    apart = {name: float((a[name] - b[name]).double().norm()) for name in b}
    norms = {name: float(b[name].double().norm()) for name in b}
    assert min(norms.values()) > 0
    together = sum(x * x for x in apart.values()) ** 0.5 / sum(x * x for x in norms.values()) ** 0.5
    return together, max(apart[name] / norms[name] for name in b)


@pytest.mark.parametrize("form", SEARCHED)
def test_gradients_and_adam_state_of_two_updates_are_those_without_balancing(
    ranks: list[Found], form: str
) -> None:
    plain, found = ranks[0]["none"], ranks[0][form]
    orders = [event["order"] for event in events(found, "expert_schedule")]
    arrival = [i for rank in range(4) for i in range(rank, 24, 4)]
    assert all(order != arrival for order in orders), "the plan must move samples to prove anything"
    for update in range(2):
        moments = [
            [
                {name: t for name, t in run["adam"][update].items() if name.endswith(kind)}
                for run in (found, plain)
            ]
            for kind in ("exp_avg", "exp_avg_sq")
        ]
        for mine, theirs in ((found["gradients"][update], plain["gradients"][update]), *moments):
            together, worst = distances(mine, theirs)
            assert together < EQUAL
            assert worst < NO_TENSOR
    first, second = plain["gradients"]
    assert distances(first, second)[0] > 0.1, "another update must look different"


def test_every_sample_scores_as_without_balancing(ranks: list[Found]) -> None:
    plain, planned = ranks[0]["none scored"], ranks[0]["anneal scored"]
    assert plain.keys() == planned.keys()
    assert len(plain) == 48
    for id, scores in plain.items():
        other = planned[id]
        assert [score is None for score in scores] == [score is None for score in other]
        known = np.array([score for score in scores if score is not None])
        found = np.array([score for score in other if score is not None])
        assert np.linalg.norm(found - known) <= EQUAL * np.linalg.norm(known)


@pytest.mark.parametrize("form", ["none", *SEARCHED])
def test_predicted_loads_are_the_observed_ones_on_every_rank_and_update(
    ranks: list[Found], form: str
) -> None:
    for found in ranks:
        balance = events(found[form], "expert_balance")
        assert [event["step"] for event in balance] == [1, 2]
        for event in balance:
            assert (event["equal"], event["mismatch"], event["where"]) == (True, 0, [])
            assert event["observed"] == event["predicted"]
            assert event["expert_work"] == event["predicted_expert_work"]
            assert event["layers"] == ([1] if form == "stride" else [1, 2])
            # Two experts a token, tails included, whatever the plan.
            tokens = [sum(events(rank[form], "packing")[event["step"] - 1]["real_tokens"] for rank in ranks)]
            assert [sum(layer) for layer in event["observed"]] == [2 * tokens[0]] * len(event["layers"])


@pytest.mark.parametrize("form", SEARCHED)
def test_every_rank_logs_the_same_schedule_with_its_evidence(ranks: list[Found], form: str) -> None:
    schedules = [events(found[form], "expert_schedule") for found in ranks]
    for update in range(2):
        mine = schedules[0][update]
        assert {s[update]["digest"] for s in schedules} == {mine["digest"]}
        assert sorted(mine["order"]) == list(range(24))
        assert mine["gap"] <= mine["gap_before"]
        assert mine["after"]["expert_work"] >= mine["lower_bounds"]["expert_work"]
        assert {"count", "start", "search", "verify", "wait", "agree"} == set(mine["seconds"])
        work = events(ranks[0][form], "expert_balance")[update]["expert_work"]
        assert work == mine["after"]["expert_work"]
    assert events(ranks[0]["none"], "expert_schedule") == []


def test_balancing_lowers_what_it_predicts(ranks: list[Found]) -> None:
    for form in ("anneal", "anneal order"):
        rows = ranks[0][form]["rows"]
        assert all(row["balance/gap"] < 0.5 * row["balance/gap_before"] for row in rows)
        assert all(row["balance/placement_floor"] >= 1 for row in rows)
        assert all(row["time/plan_ms"] > 0 for row in rows)


def test_planning_ahead_changes_no_plan_and_no_bit(ranks: list[Found]) -> None:
    ahead, late = ranks[0]["anneal"], ranks[0]["anneal at hand-over"]
    digests = [[event["digest"] for event in events(run, "expert_schedule")] for run in (ahead, late)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2
    assert ahead["weights"] == late["weights"]


def test_a_plan_that_rank_zero_refuses_is_refused_on_every_rank(ranks: list[Found]) -> None:
    endings = {found["capped"]["ended"] for found in ranks}
    assert len(endings) == 1
    assert "balance.max_destination_load=1: the best plan found sends" in endings.pop()


def test_a_route_corrupted_after_planning_is_reported_by_name(ranks: list[Found]) -> None:
    for rank, found in enumerate(ranks):
        sound, broken = events(found["corrupted"], "expert_balance")
        assert sound["equal"]
        assert not broken["equal"]
        assert broken["mismatch"] == 2
        cells = [(w["column"], w["replica"], w["layer"]) for w in broken["where"]]
        assert cells == [(0, 1, 2), (0, 1, 2)], "one token of the last rank's first pack, second routed layer"
        assert sorted(w["observed"] - w["predicted"] for w in broken["where"]) == [-2, 2]
        # The replay event compares with what is replayed, so it sees nothing: planning knew better.
        assert len(found["corrupted"]["warnings"]) == (rank == 0)
    assert "update 2: 2 expert loads differ from the plan" in ranks[0]["corrupted"]["warnings"][0]


def test_kernels_are_warmed_up_with_one_line_on_rank_zero(ranks: list[Found]) -> None:
    # Eight runs anneal (one is refused, one scores, one is corrupted), a line each; greedy and the reference
    # search say so too, none says nothing.
    said = ranks[0]["stdout"].splitlines()
    lines = [line for line in said if "compiling the planner's kernels in the background" in line]
    assert len([line for line in lines if line.startswith("balance=anneal: ")]) == 8
    assert len([line for line in lines if line.startswith("balance=none")]) == 0
