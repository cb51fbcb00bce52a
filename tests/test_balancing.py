"""Balancing while training, on four gloo ranks with EP2: it changes counts alone, and reports them.

One program (balance_cases.py) trains the same file in every form; the tests look at what each rank saw.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import balance_cases
import numpy as np
import pytest
import torch
from programs import run_program
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from training_cases import fit

from olmo_rl.config import StrategyConfig, TrainerConfig

SEARCHED = ("reference", "anneal", "anneal recomputed", "stride")
EXACT = 1e-12  # of float64 sums in another order, and of the weights that they made
EQUAL = 1e-6  # of float32 sums in another order
# In the second batch the gradients of A_log and dt_bias of KDA are sums that cancel: other shapes of matrices
# round their terms otherwise, which moves them by 4e-6. Adding the terms up in float64 changes nothing about
# that; in float32 the gradients of this model are 2e-5 away from those of float64.
SECOND = 1e-5


Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    directory = tmp_path_factory.mktemp("balance")
    printed = run_program(directory, *balance_cases.STEPS)
    found = [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
    found[0] |= {"stdout": printed, "directory": str(directory)}
    return found


def events(found: Found, name: str) -> list[Found]:
    return [event for event in found["events"] if event["event"] == name]


def distances(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, float]:
    """The distance of all tensors as one vector, relative to its norm, and max|a-b| / max|b| of the tensor
    where it is largest.
    """
    assert a.keys() == b.keys()
    apart = sum(float((a[name] - b[name]).double().norm()) ** 2 for name in b)
    together = (apart / sum(float(b[name].double().norm()) ** 2 for name in b)) ** 0.5
    largest = {name: float(b[name].abs().max()) for name in b}
    assert min(largest.values()) > 0
    return together, max(float((a[name] - b[name]).abs().max()) / largest[name] for name in b)


def moments(found: Found, update: int, kind: str) -> dict[str, Tensor]:
    return {name: t for name, t in found["adam"][update].items() if name.endswith(kind)}


@pytest.mark.parametrize("form", SEARCHED)
def test_gradients_and_adam_state_of_two_updates_are_those_without_balancing(
    ranks: list[Found], form: str
) -> None:
    plain, found = ranks[0]["none"], ranks[0][form]
    orders = [event["order"] for event in events(found, "expert_schedule")]
    arrival = [i for rank in range(4) for i in range(rank, 24, 4)]
    assert all(order != arrival for order in orders), "the plan must move samples to prove anything"
    for update in range(2):
        # A square doubles what is relative.
        for kind, factor in (("gradients", 1), ("exp_avg", 1), ("exp_avg_sq", 2)):
            mine, theirs = (
                run["gradients"][update] if kind == "gradients" else moments(run, update, kind)
                for run in (found, plain)
            )
            together, worst = distances(mine, theirs)
            assert together < EQUAL
            assert worst < factor * (EQUAL if update == 0 else SECOND)
    first, second = plain["gradients"]
    assert distances(first, second)[0] > 0.1, "another update must look different"


@pytest.mark.parametrize("form", ["anneal exact", "anneal recomputed exact"])
def test_in_float64_balancing_changes_nothing_at_all(ranks: list[Found], form: str) -> None:
    plain, found = ranks[0]["none exact"], ranks[0][form]
    assert [e["digest"] for e in events(found, "expert_schedule")] == [
        e["digest"] for e in events(ranks[0]["anneal"], "expert_schedule")
    ]
    for update in range(2):
        assert all(t.dtype == torch.float64 for t in found["gradients"][update].values())
        assert distances(found["gradients"][update], plain["gradients"][update])[1] < EXACT
        for kind in ("exp_avg", "exp_avg_sq"):
            assert distances(moments(found, update, kind), moments(plain, update, kind))[1] < EXACT
        # What float32 rounds away is more than what another order of its sums changes.
        single = ranks[0]["none"]["gradients"][update]
        exact = {name: gradient.float() for name, gradient in plain["gradients"][update].items()}
        assert EQUAL < distances(single, exact)[1] < 1e-3


def test_the_next_file_planned_ahead_gives_the_same_steps_plans_and_weights(ranks: list[Found]) -> None:
    ahead, late, mended = (ranks[0][f"files {how}"] for how in ("ahead", "at hand-over", "mended"))
    plans = [[event["digest"] for event in events(run, "expert_schedule")] for run in (ahead, late, mended)]
    assert plans[0] == plans[1] == plans[2], "a digest holds the ids in every cell"
    assert len(set(plans[0])) == 3
    assert ahead["weights"] == late["weights"] == mended["weights"]
    assert all(torch.equal(ahead["gradients"][2][n], late["gradients"][2][n]) for n in ahead["gradients"][2])


@pytest.mark.parametrize("form", ["anneal", "lent"])
def test_a_balanced_run_resumes_inside_a_file_to_the_last_bit(ranks: list[Found], form: str) -> None:
    for found in ranks:
        whole, parts = found[form], found[f"{form} interrupted"]
        assert parts["weights"] == whole["weights"]
        assert [event["plan"] for event in events(parts, "packing")] == ["planned", "resumed"]
        mine, theirs = events(parts, "expert_schedule")[1], events(whole, "expert_schedule")[1]
        assert (mine["origin"], theirs["origin"]) == ("resumed", "planned")
        for name in (
            "digest",
            "order",
            "before",
            "after",
            "lower_bounds",
            "start",
            "search",
            "paths",
            "loans",
        ):
            assert mine[name] == theirs[name]
        assert (mine["loans"] is None) == (form == "anneal")
        scoring = [event["decision"] for event in events(parts, "scoring")]
        assert scoring == ["standalone", "standalone"]


@pytest.mark.parametrize("form", ["anneal", "lent"])
def test_one_process_goes_on_inside_a_file_that_four_began(
    ranks: list[Found], tmp_path: Path, form: str
) -> None:
    directory = Path(ranks[0]["directory"])
    config = replace(
        balance_cases.config_for(
            directory,
            "goes on",
            files="skewed" if form == "lent" else "input",
            trainer=TrainerConfig(max_steps=2),
            strategy=StrategyConfig(),
        ),
        run_dir=str(tmp_path / "run"),
        ckpt_path=str(directory / f"{form} interrupted" / "checkpoints" / "step-1"),
    )
    run = fit(config)
    assert run.recorder.ids == [[f"s{i}" for i in range(24, 48)]]
    assert [event["plan"] for event in run.events("packing")] == ["replanned"]
    together, worst = distances(run.recorder.gradients[0], ranks[0][form]["gradients"][1])
    assert together < EQUAL
    assert worst < SECOND * (1 if form == "anneal" else 3)
    # The anchors are the first policy's, which the four ranks scored before they updated it.
    assert run.events("scoring")[0]["decision"] == "standalone"
    assert run.recorder.batches[0].anchors is not None
    ratio = run.events("optimizer")[0]["max_log_ratio"]
    assert ratio == pytest.approx(events(ranks[0][form], "optimizer")[1]["max_log_ratio"], rel=1e-4)
    assert ratio > 0


def test_lent_experts_leave_no_trace_in_a_checkpoint(ranks: list[Found]) -> None:
    directory = Path(ranks[0]["directory"])
    found = []
    for form in ("anneal", "lent"):
        stored = FileSystemReader(
            directory / f"{form} interrupted" / "checkpoints" / "step-1"
        ).read_metadata()
        tensors = stored.state_dict_metadata
        found.append({name: getattr(value, "size", None) for name, value in tensors.items()})
    assert found[0] == found[1]
    assert sum(".w1_EFD" in name for name in found[0]) == 4 * 2  # weight, two moments and step of two layers


def test_lending_evens_out_what_packing_cannot(ranks: list[Found]) -> None:
    rows = ranks[0]["lent"]["rows"]
    assert all(1 <= row["balance/lent_floor"] < row["balance/placement_floor"] for row in rows)
    assert all(0 < row["balance/loans"] <= 2 for row in rows)
    for update in range(2):
        loans = events(ranks[0]["lent"], "expert_schedule")[update]["loans"]
        assert sum(map(len, loans)) == 2 * rows[update]["balance/loans"]
    assert "balance/loans" not in ranks[0]["anneal"]["rows"][0]


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


@pytest.mark.parametrize("form", ["none", *SEARCHED, "lent", "lent interrupted"])
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
            tokens = sum(events(rank[form], "packing")[event["step"] - 1]["real_tokens"] for rank in ranks)
            assert [sum(layer) for layer in event["observed"]] == [2 * tokens] * len(event["layers"])


@pytest.mark.parametrize("form", [*SEARCHED, "lent"])
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


def test_pads_enter_what_is_predicted_and_observed_and_change_no_plan_and_no_gradient(
    ranks: list[Found],
) -> None:
    for found in ranks:
        padded, bare = found["anneal padded"], found["anneal"]
        for update in range(2):
            schedule, plain = (events(run, "expert_schedule")[update] for run in (padded, bare))
            assert schedule["order"] == plain["order"]
            assert schedule["lower_bounds"] == plain["lower_bounds"]
            assert schedule["after"]["token_work"] == 64 * schedule["after"]["packs_per_rank"]
            balance = events(padded, "expert_balance")[update]
            assert balance["equal"]
            assert balance["observed"] == balance["predicted"]
            assert balance["expert_work"] == schedule["after"]["expert_work"] > plain["after"]["expert_work"]
            rows = [events(rank["anneal padded"], "packing")[update] for rank in ranks]
            assert [sum(layer) for layer in balance["observed"]] == [
                2 * sum(row["padded_tokens"] for row in rows)
            ] * 2
            together, worst = distances(padded["gradients"][update], bare["gradients"][update])
            assert together < SECOND
            assert worst < SECOND


def test_balancing_lowers_what_it_predicts(ranks: list[Found]) -> None:
    rows = ranks[0]["anneal"]["rows"]
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
