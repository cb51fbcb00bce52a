"""Router losses, the frozen reference, the guards and weights of Hugging Face directories on two ranks;
two_rank_cases.py runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import two_rank_cases
from programs import run_program
from torch import Tensor

from olmo_rl.cli import run as run_command

Found = dict[str, Any]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """Observations of every rank, of one process and of two."""
    directory = tmp_path_factory.mktemp("worlds")
    run_program(directory, *two_rank_cases.STEPS)
    return {
        world: [
            torch.load(directory / f"world{world}-rank{rank}.pt", weights_only=False) for rank in range(world)
        ]
        for world in (1, 2)
    }


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Distance of all gradients taken as one vector, relative to its norm."""
    assert got.keys() == want.keys()
    square = sum(float((got[n].double() - g.double()).square().sum()) for n, g in want.items())
    return (square / sum(float(g.double().square().sum()) for g in want.values())) ** 0.5


def terms(run: Found) -> list[dict[str, float]]:
    return [event["terms"] for event in run["events"] if event["event"] == "optimizer"]


def test_router_losses_of_equal_packs_are_equal_at_every_expert_parallel_degree(
    worlds: dict[int, list[Found]],
) -> None:
    for rank in worlds[2]:
        one, two = rank["by pack, EP1"], rank["by pack, EP2"]
        assert difference(two["gradients"][0], one["gradients"][0]) <= 1e-6
        for name in ("loss/router_balance", "loss/router_z", "loss/total"):
            assert terms(two)[0][name] == pytest.approx(terms(one)[0][name], rel=1e-6), name
        assert terms(two)[0]["loss/router_balance"] > 1


def test_grouped_by_sequence_two_ranks_have_the_router_losses_of_one_process(
    worlds: dict[int, list[Found]],
) -> None:
    (want,) = worlds[1]
    for rank in worlds[2]:
        assert difference(rank["by sequence"]["gradients"][0], want["by sequence"]["gradients"][0]) <= 1e-6
        for name in ("loss/router_balance", "loss/router_z"):
            expected = terms(want["by sequence"])[0][name]
            assert terms(rank["by sequence"])[0][name] == pytest.approx(expected, rel=1e-6), name


def test_the_entropy_of_recorded_experts_is_one_number_on_all_ranks(worlds: dict[int, list[Found]]) -> None:
    found = [
        [e["expert_entropy"] for e in run["by sequence"]["events"] if e["event"] == "replay"]
        for run in (*worlds[1], *worlds[2])
    ]
    assert found[0] == found[1] == found[2]
    assert 0 < min(found[0][0]) < max(found[0][0]) < 1


def test_a_sharded_reference_gives_the_gradients_of_one_process_and_comes_back_on_resume(
    worlds: dict[int, list[Found]],
) -> None:
    (want,) = worlds[1]
    for rank in worlds[2]:
        for update, limit in ((0, 1e-5), (1, 2e-5)):  # Adam's first step spreads what was rounded
            got = rank["reference"]["gradients"][update]
            assert difference(got, want["reference"]["gradients"][update]) <= limit
            kl = terms(rank["reference"])[update]["loss/ref_kl"]
            assert kl == pytest.approx(terms(want["reference"])[update]["loss/ref_kl"], rel=1e-5)
            assert kl > 1e-3
        packs = next(e["packs"] for e in rank["reference"]["events"] if e["event"] == "packing")
        # The policy's scores, the reference's, then training, pack by pack.
        assert rank["reference"]["forwards"][: 3 * packs] == [False] * 2 * packs + [True] * packs
        assert rank["resumed"]["weights"] == rank["reference"]["weights"] != rank["half"]["weights"]
        assert terms(rank["resumed"])[1] == terms(rank["reference"])[1]


@pytest.mark.parametrize("name", ["olmo3moe", "tied qwen3_moe"])
def test_two_ranks_that_start_from_a_hugging_face_directory_have_the_gradients_of_one_process(
    worlds: dict[int, list[Found]], name: str
) -> None:
    (one,) = worlds[1]
    (want,) = one[f"{name} directory"]["gradients"]
    for rank in worlds[2]:
        run = rank[f"{name} directory"]
        assert run["ended"] is None
        (got,) = run["gradients"]
        print(f"{name}: gradients of two ranks from a directory differ by {difference(got, want):.2g}")
        assert difference(got, want) <= 1e-6
    for found in (one, *worlds[2]):  # a file of the same weights: not a bit of the update differs
        assert found[f"{name} directory"]["weights"] == found[f"{name} file"]["weights"]
        (other,) = found[f"{name} file"]["gradients"]
        (got,) = found[f"{name} directory"]["gradients"]
        assert all(torch.equal(got[key], other[key]) for key in want)


def test_a_directory_that_lost_a_file_is_the_same_refusal_on_both_ranks(
    worlds: dict[int, list[Found]],
) -> None:
    first, second = (rank["lost"] for rank in worlds[2])
    assert first["ended"] == second["ended"]
    assert first["ended"].startswith("Refusal: init_from=")
    assert ".safetensors is missing, cut or no safetensors file" in first["ended"]
    assert first["gradients"] == second["gradients"] == []


def test_a_gradient_that_is_not_finite_ends_every_rank_before_the_step(
    worlds: dict[int, list[Found]],
) -> None:
    for rank in worlds[2]:
        found = rank["not finite"]
        assert found["ended"] == worlds[2][0]["not finite"]["ended"]
        assert found["ended"].startswith("Refusal: update 2: loss ")
        assert "gradient norm nan: the gradient only, every loss was finite" in found["ended"]
        assert found["checkpoints"] == ["step-1"], "it meets every rank, so the update before it is saved"


def test_a_guard_that_trips_is_the_same_refusal_on_both_ranks_and_nothing_is_stepped(
    worlds: dict[int, list[Found]],
) -> None:
    first, second = (rank["gap"] for rank in worlds[2])
    assert first["ended"] == second["ended"]
    assert first["ended"].startswith("Refusal: update 1: engine agreement: mean |policy - behaviour| ")
    named = first["ended"].partition("Most in samples ")[2].partition(". Check")[0].split(", ")
    assert {name.split(" ")[0] for name in named} == {f"s{i}" for i in range(12)}, "samples of both ranks"
    gaps = [float(name.split("(")[1].rstrip(")")) for name in named]
    assert gaps == sorted(gaps, reverse=True)
    for rank in (first, second):
        assert rank["gradients"] == []
        assert [event["event"] for event in rank["events"]] == ["log"], "its first line, and no update"


def test_a_guard_that_trips_ends_the_command_with_exit_code_2_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = (
        "+experiment=packed_moe run_name=run warm_start.steps=0 scoring.max_behavior_gap=1e-12 "
        "batch.samples_per_step=16 task.eval_problems=0 trainer.max_steps=2 strategy=single trainer=cpu"
    )
    code = run_command(overrides.split())
    out, err = capfd.readouterr()
    assert code == 2, err[-4000:]
    assert "refused, one reason:\n  update 1: engine agreement: " in err
    assert "scoring.max_behavior_gap=1e-12: nothing was stepped. Most in samples c0-a0-p" in err
    assert "Traceback" not in out + err
