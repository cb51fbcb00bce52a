"""Two and four ranks against one process: gradients, metrics, counts, files, errors, interruption.

One program (distributed_cases.py) runs the recipes over three worlds; the tests look at what each rank saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distributed_cases
import matrix_checks
import numpy as np
import pytest
import torch
from programs import run_program
from routed_fixture import CHANGED, FIXTURE_LENGTHS
from torch import Tensor

from olmo_rl.data.files import read_collection

SAME_GRADIENT = ("packed", "one pack each", "unpacked", "recomputed", "scored first")
# Packs differ where one process and two ranks lay out the same samples; synthetic tails depend on the ranks.
LAYOUT_METRICS = ("packing/", "time/", "throughput/", "memory/", "loss/router", "replay/overlap")


Found = dict[str, Any]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("worlds")
    run_program(directory, *distributed_cases.STEPS)
    return directory


def load(directory: Path, world: int) -> list[Found]:
    paths = [directory / f"world{world}-rank{rank}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=False) for path in paths]


@pytest.fixture(scope="module")
def one(directory: Path) -> Found:
    return load(directory, 1)[0]


@pytest.fixture(scope="module")
def two(directory: Path) -> list[Found]:
    return load(directory, 2)


@pytest.fixture(scope="module")
def four(directory: Path) -> list[Found]:
    return load(directory, 4)


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Distance of all gradients taken as one vector, relative to its norm."""
    assert got.keys() == want.keys()
    square = sum(float((got[n].double() - g.double()).square().sum()) for n, g in want.items())
    return (square / sum(float(g.double().square().sum()) for g in want.values())) ** 0.5


def largest(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(float((got[n] - g).norm() / g.norm()) for n, g in want.items())


def events(run: Found, name: str) -> list[dict[str, Any]]:
    return [event for event in run["events"] if event["event"] == name]


@pytest.mark.parametrize("form", [*SAME_GRADIENT, "by response", "silent"])
def test_every_gradient_of_two_ranks_equals_one_process(one: Found, two: list[Found], form: str) -> None:
    (want,) = one[form]["gradients"]
    for rank in two:
        (got,) = rank[form]["gradients"]
        assert difference(got, want) <= 1e-6
        assert largest(got, want) <= 5e-6


def test_two_ranks_that_share_no_experts_have_the_same_gradients(one: Found, two: list[Found]) -> None:
    for rank in two:
        (got,) = rank["no experts shared"]["gradients"]
        assert difference(got, one["packed"]["gradients"][0]) <= 1e-6


@pytest.mark.parametrize("form", ["packed", "silent"])
def test_four_ranks_with_experts_shared_by_pairs_have_the_same_gradients(
    one: Found, four: list[Found], form: str
) -> None:
    for rank in four:
        (got,) = rank[form]["gradients"]
        assert difference(got, one[form]["gradients"][0]) <= 1e-6


def test_packs_recomputation_and_a_scoring_pass_change_no_gradient_but_masks_and_reductions_do(
    one: Found, two: list[Found]
) -> None:
    for world in (one, two[0], two[1]):
        (base,) = world["packed"]["gradients"]
        for form in SAME_GRADIENT:
            assert difference(world[form]["gradients"][0], base) <= 1e-5, form
        for form in ("by response", "silent"):
            assert difference(world[form]["gradients"][0], base) > 0.1, form


def test_supervised_gradients_with_live_routes_and_router_losses_equal_one_process(
    one: Found, two: list[Found]
) -> None:
    for rank in two:
        assert len(rank["sft"]["gradients"]) == len(one["sft"]["gradients"]) == 2
        assert difference(rank["sft"]["gradients"][0], one["sft"]["gradients"][0]) <= 1e-6


def test_chat_data_give_two_ranks_the_samples_gradients_and_held_out_loss_of_one(
    one: Found, two: list[Found]
) -> None:
    single = one["chat data"]
    for run in (rank["chat data"] for rank in two):
        assert difference(run["gradients"][0], single["gradients"][0]) <= 1e-6
        evaluations = events(run, "evaluation")
        assert [event["step"] for event in evaluations] == [0, 3]
        for event, other in zip(evaluations, events(single, "evaluation"), strict=True):
            assert event["loss"] == pytest.approx(other["loss"], rel=1e-4)
            assert event["scored_tokens"] == other["scored_tokens"]
    trained = [event["real_tokens"] for rank in two for event in events(rank["chat data"], "packing")]
    assert sum(trained) == sum(row["sft/tokens"] for row in single["rows"]), "pads are no tokens"
    for name in ("sft/tokens", "sft/scored_tokens", "sft/epoch", "sft/conversations"):
        assert [row[name] for row in two[0]["chat data"]["rows"]] == [row[name] for row in single["rows"]]
    assert [row["sft/epoch"] for row in single["rows"]] == [0, 0, 1]


def test_a_row_that_one_rank_reads_and_refuses_is_refused_by_all(one: Found, two: list[Found]) -> None:
    endings = [rank["broken data"]["ended"] for rank in (one, *two)]
    assert len(set(endings)) == 1
    assert "broken.jsonl, line 8: 'messages' is empty" in endings[0]


@pytest.mark.parametrize("form", ["packed", "unpacked", "by response", "silent", "local"])
def test_metrics_of_two_ranks_equal_those_of_one_process(one: Found, two: list[Found], form: str) -> None:
    row, other = two[0][form]["rows"][0], one[form]["rows"][0]
    of_ranks = {name for name in row if name.startswith("ranks/")}
    assert of_ranks == {
        f"ranks/{n}" for n in ("start_skew_s", "last_to_start", "busiest_over_mean", "busiest")
    }
    assert row.keys() - of_ranks == other.keys()
    compared = [name for name in other if not name.startswith(LAYOUT_METRICS)]
    assert {"loss/total", "grad/norm", "mismatch/mean", "mismatch/p99", "reward/mean"} <= set(compared)
    for name in compared:
        assert row[name] == pytest.approx(other[name], rel=2e-6, abs=1e-6), name


def test_mismatch_is_the_mean_over_the_tokens_of_all_ranks_as_a_script_finds_it(
    directory: Path, two: list[Found]
) -> None:
    gaps: tuple[list[float], list[float]] = ([], [])
    file = directory / "twelve" / "files" / "collection-00000.parquet"
    for position, sample in enumerate(read_collection(file, require_routes=True).samples):
        scores = two[0]["twelve scored"]["scores"][sample.id]
        slots = np.flatnonzero(sample.response_mask)
        gaps[position % 2].extend(abs(scores[t] - float(sample.behavior_logprobs[t])) for t in slots)
    reported = two[0]["packed"]["rows"][0]["mismatch/mean"]
    assert reported == pytest.approx(np.mean(gaps[0] + gaps[1]), rel=1e-6)
    assert abs(np.mean([np.mean(part) for part in gaps]) - reported) > 1e-3, "the mean of means is another"


def test_evaluation_is_one_count_of_the_problems_of_all_ranks(one: Found, two: list[Found]) -> None:
    evaluations = [events(run["local"], "evaluation") for run in (one, *two)]
    for found in evaluations:
        assert [event["accuracy"] for event in found] == [event["accuracy"] for event in evaluations[0]]
        assert [event["problems"] for event in found] == [7] * 3  # before, after each update; odd on purpose
    correct = [event["accuracy"] * 7 for event in evaluations[0]]
    assert correct == pytest.approx([round(value) for value in correct])
    assert 0 < max(correct) < 7


def test_the_step_is_divided_once_by_the_tokens_of_all_ranks(two: list[Found]) -> None:
    for number, rank in enumerate(two):
        (event,) = events(rank["uneven"], "optimizer")
        assert event["terms"]["loss/policy"] == 1.75  # (6 + 1) / 4; the mean of both ranks' means is 1.5
        assert event["local_scored_tokens"] == (3, 1)[number]
        assert event["global_scored_tokens"] == 4


def test_ranks_with_five_and_six_packs_both_run_six_when_scoring_and_when_training(two: list[Found]) -> None:
    scoring, training = [False] * 6, [True] * 6
    for rank in two:
        assert rank["five and six"]["forwards"] == scoring + training
        assert rank["five and six scored"]["forwards"] == scoring
        (event,) = events(rank["five and six"], "packing")
        assert event["packs"] == 6
        assert event["samples_per_pack"] == [1] * 6
    real_tokens = [events(rank["five and six"], "packing")[0]["real_tokens"] for rank in two]
    assert real_tokens == [39, 43]


@pytest.mark.parametrize("run", ["three", "three scored"])
def test_samples_that_do_not_divide_over_the_ranks_are_the_same_error_on_every_rank(
    two: list[Found], run: str
) -> None:
    assert two[0][run]["ended"] == two[1][run]["ended"]
    assert two[0][run]["ended"].startswith("Refusal: ")
    assert "3 samples do not divide over 2 ranks" in two[0][run]["ended"]
    assert two[0][run]["forwards"] == two[1][run]["forwards"] == []


def test_a_step_that_is_not_finite_is_abandoned_by_both_ranks_alike(two: list[Found]) -> None:
    initial = two[0]["published flat"]["given"][0]
    for rank in two:
        assert rank["huge abort"]["ended"].startswith("Refusal: update 1: loss ")
        assert rank["huge abort"]["ended"] == two[0]["huge abort"]["ended"]
        assert rank["huge skip"]["ended"].startswith("Refusal: nothing was trained: 1 updates were skipped")
        assert [event["stepped"] for event in events(rank["huge skip"], "optimizer")] == [False]
        for run in ("huge abort", "huge skip"):
            assert rank[run]["gradients"] == []
            assert rank[run]["weights"] == initial


def test_every_update_replays_every_recorded_route(one: Found, two: list[Found], four: list[Found]) -> None:
    count = 0
    for rank in (one, *two, *four):
        for run in rank.values():
            replayed = events(run, "replay") if isinstance(run, dict) and "events" in run else []
            for event in replayed:
                if event["rows"] == 0:
                    continue  # supervised documents have no recorded routes
                count += 1
                assert event["mismatches"] == 0
                assert event["coverage"] == 1.0
    assert count > 30
    tokens = sum(events(rank["packed"], "packing")[0]["real_tokens"] for rank in two)
    assert events(two[0]["packed"], "replay")[0]["rows"] == 2 * tokens  # two layers with experts


def test_two_ranks_generate_what_one_process_generates(one: Found, two: list[Found]) -> None:
    want = one["rollout"]["samples"]
    assert len(want) == 32
    assert len({sample.tokens.tobytes() for sample in want}) > 24
    assert {sample.reward for sample in want} == {0.0, 1.0}
    for rank in two:
        got = rank["rollout"]["samples"]
        assert [sample.id for sample in got] == [sample.id for sample in want]
        for mine, theirs in zip(got, want, strict=True):
            assert mine.tokens.tolist() == theirs.tokens.tolist()
            assert mine.routes.tolist() == theirs.routes.tolist()
            assert (mine.reward, mine.group, mine.finish_reason) == (
                theirs.reward,
                theirs.group,
                theirs.finish_reason,
            )
            np.testing.assert_allclose(mine.behavior_logprobs, theirs.behavior_logprobs, atol=5e-6)


def test_the_engine_agrees_with_the_packed_scoring_of_two_ranks(one: Found, two: list[Found]) -> None:
    for rank in two:
        scores = rank["scored"]["scores"]
        gaps = []
        for sample in rank["rollout"]["samples"]:
            values = scores[sample.id]
            scored = np.flatnonzero(sample.response_mask)
            assert [t for t, value in enumerate(values) if value is not None] == scored.tolist()
            gaps += [abs(values[t] - float(sample.behavior_logprobs[t])) for t in scored]
            single = one["scored"]["scores"][sample.id]
            np.testing.assert_allclose([values[t] for t in scored], [single[t] for t in scored], atol=5e-6)
        assert len(gaps) > 100
        assert np.mean(gaps) <= 1e-6
        assert np.max(gaps) <= 5e-5


def test_the_engine_still_agrees_after_an_update_was_published(two: list[Found]) -> None:
    rows = two[0]["local"]["rows"]
    assert [row["mismatch/mean"] <= 1e-6 for row in rows] == [True, True]
    first, second = two[0]["local"]["gradients"]
    assert difference(second, first) > 0.1
    versions = [event["policy_versions"] for event in events(two[1]["local"], "optimizer")]
    assert versions == [[0, 0], [1, 1]]


def test_every_rank_is_given_the_same_weights_after_every_update(two: list[Found]) -> None:
    given = two[0]["published"]["given"]
    assert list(given) == [0, 1, 2]
    assert len(set(given.values())) == 3
    for rank in two:
        assert rank["published"]["given"] == given
        assert rank["published"]["held"] == given[2]


@pytest.mark.parametrize(("model", "suffix"), [("published", ""), ("published flat", ".safetensors")])
def test_engines_are_given_the_weights_of_all_shards_bit_for_bit(
    two: list[Found], model: str, suffix: str
) -> None:
    assert two[0][model]["written"] == two[0][model]["given"]
    names = [f"step-{version}{suffix}" for version in range(3)]
    assert two[1][model]["written"] == {}
    assert two[1][model]["adopted"] == names
    for rank in two:
        assert rank[model]["kept"] == names[1:], "the oldest go, and nothing is left of the writing"
        assert "no engine could be updated" in rank[model]["refused"]


def test_a_signal_to_one_rank_ends_both_with_a_checkpoint_and_resuming_loses_nothing(
    two: list[Found],
) -> None:
    shards = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for rank in two:
        assert rank["interrupted"]["ended"] == 75
        assert rank["saved"] == [*shards, "manifest.json", "meta.pt", "step-2"]
        assert rank["resumed"]["ended"] is None
        assert rank["resumed"]["weights"] == rank["straight"]["weights"]
        assert rank["resumed"]["weights"] != rank["interrupted"]["weights"]
        steps = [event["step"] for event in events(rank["resumed"], "optimizer")]
        assert steps == [1, 2, 3, 4]
        decisions = [event["scoring"] for event in events(rank["resumed"], "optimizer")]
        assert decisions == ["checked", "skipped", "checked", "skipped"]  # each process checks its first
    straight, resumed = two[0]["straight"]["rows"], two[0]["resumed"]["rows"]
    assert [row["step"] for row in resumed] == [1, 2, 3, 4]
    for name in ("loss/total", "grad/norm", "reward/mean", "mismatch/mean", "optim/lr"):
        assert [row[name] for row in resumed] == [row[name] for row in straight], name


@pytest.mark.parametrize("routes", ["replayed", "live"])
@pytest.mark.parametrize(("precision", "tolerance"), [(" double", 1e-10), ("", 1e-5)])
def test_pads_change_neither_loss_nor_gradients_where_two_ranks_share_experts(
    two: list[Found], routes: str, precision: str, tolerance: float
) -> None:
    for rank in two:
        bare, padded = (rank[f"{form} {routes}{precision}"] for form in ("bare", "padded"))
        (rows,) = events(padded, "packing")
        assert rows["padded_tokens"] == rows["packs"] * rows["token_budget"] > rows["real_tokens"]
        assert events(bare, "packing")[0]["padded_tokens"] == rows["real_tokens"]
        (got,), (want,) = padded["gradients"], bare["gradients"]
        assert {g.dtype for g in got.values()} == {torch.float64 if precision else torch.float32}
        assert largest(got, want) <= tolerance
        terms, expected = (events(run, "optimizer")[0]["terms"] for run in (padded, bare))
        assert terms == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_loads_that_were_predicted_with_pads_are_those_that_were_dispatched(two: list[Found]) -> None:
    for rank in two:
        (bare,), (padded,) = (
            events(rank[f"{form} replayed"], "expert_balance") for form in ("bare", "padded")
        )
        assert padded["equal"]
        assert padded["observed"] == padded["predicted"]
        rows = sum(events(other["padded replayed"], "packing")[0]["padded_tokens"] for other in two)
        assert [sum(layer) for layer in padded["observed"]] == [2 * rows] * 2
        assert padded["expert_work"] == padded["predicted_expert_work"] > bare["expert_work"]
        budget = events(rank["padded replayed"], "packing")[0]["token_budget"]
        assert padded["token_work"] == budget * padded["columns"] > bare["token_work"]


@pytest.mark.parametrize(("world", "packs"), [(1, 3), (2, 2)])
def test_the_fixture_takes_three_forwards_alone_and_two_on_each_of_two_ranks(
    one: Found, two: list[Found], world: int, packs: int
) -> None:
    scoring, training = [False] * packs, [True] * packs
    for rank in (one,) if world == 1 else two:
        assert rank["fixture packed"]["forwards"] == scoring + training + training
        assert rank["fixture packed scores of fixture"]["forwards"] == 2 * scoring
        decisions = [event["scoring"] for event in events(rank["fixture packed"], "optimizer")]
        assert decisions == ["checked", "skipped"]
        for event in events(rank["fixture packed"], "replay"):
            assert event["rows"] == 2 * sum(FIXTURE_LENGTHS)
            assert (event["mismatches"], event["coverage"]) == (0, 1.0)
        unpacked = len(FIXTURE_LENGTHS) // world
        assert rank["fixture unpacked"]["forwards"] == [False] * unpacked + [True] * 2 * unpacked


def test_the_fixture_scores_alike_packed_unpacked_and_on_two_ranks(one: Found, two: list[Found]) -> None:
    want = one["fixture unpacked scores of fixture"]["scores"]
    for rank in (one, *two):
        for form in ("packed", "unpacked"):
            scores = rank[f"fixture {form} scores of fixture"]["scores"]
            assert scores.keys() == want.keys()
            for id, values in scores.items():
                scored = [t for t, value in enumerate(values) if value is not None]
                length = FIXTURE_LENGTHS[int(id[-1])]
                prompt = length - min(7 + int(id[-1]), length - 2)
                assert scored == [t for t in range(prompt, length) if t != prompt + 1]
                for t in scored:
                    assert abs(values[t] - want[id][t]) <= 1e-5


def test_other_tokens_in_one_document_of_the_fixture_change_no_bit_of_any_other(
    one: Found, two: list[Found]
) -> None:
    for rank in (one, *two):
        before, after = (
            rank[f"fixture packed scores of {files}"]["scores"] for files in ("fixture", "changed fixture")
        )
        differ = {id for id in after if after[id] != before[id]}
        assert differ == {f"u1-{CHANGED}"}


def test_the_first_gradients_of_the_fixture_are_the_same_packed_unpacked_and_on_two_ranks(
    one: Found, two: list[Found]
) -> None:
    want = one["fixture unpacked"]["gradients"][0]
    for rank in (one, *two):
        for form in ("packed", "unpacked"):
            got = rank[f"fixture {form}"]["gradients"][0]
            assert matrix_checks.relative(got, want)[0] <= 1e-5, "of every tensor"
    terms = events(one["fixture packed"], "optimizer")[0]["terms"]
    assert 0 < terms["loss/tis_low"] < 1
    assert 0 < terms["loss/tis_high"] < 1
