"""The decoder of a run: equal weights on every topology, and never the whole model on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from construction_cases import DEGREES, SEED, digest, fingerprint, unsharded
from programs import run_program

SLACK = 2**17  # bytes of indices and of small parameters
# Fingerprints of the initial weights of seed 7, untied and tied: another one changes every run.
INITIAL = {False: -23.242620, True: -12.946878}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Findings of every rank, by topology, tying and source."""
    directory = tmp_path_factory.mktemp("construction")
    ranks = [f"construction_cases:build*{world}" for world in DEGREES]
    run_program(directory, "construction_cases:write_sources", *ranks)
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(Path(directory).glob("?-?.json")):
        for case, result in json.loads(path.read_text()).items():
            found.setdefault(case, []).append(result)
    assert len(found) == 32
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_are_the_same_bits_on_every_topology_and_the_draws_of_before(
    tied: bool, built: dict[str, list[dict[str, Any]]]
) -> None:
    initial = unsharded(seed=SEED, tied=tied)
    assert fingerprint(initial) == pytest.approx(INITIAL[tied], rel=1e-5)
    cases = {case: ranks for case, ranks in built.items() if case.endswith(f"tied={tied} seed")}
    assert len(cases) == 4
    for case, ranks in cases.items():
        assert {rank["digest"] for rank in ranks} == {digest(initial)}, case


@pytest.mark.parametrize("source", ["file", "checkpoint", "hf"])
@pytest.mark.parametrize("tied", [False, True])
def test_stored_weights_reach_the_shards_of_every_topology(
    tied: bool, source: str, built: dict[str, list[dict[str, Any]]]
) -> None:
    want = digest(unsharded(seed=SEED + 1, tied=tied))
    cases = {case: ranks for case, ranks in built.items() if case.endswith(f"tied={tied} {source}")}
    assert len(cases) == 4
    for case, ranks in cases.items():
        assert {rank["digest"] for rank in ranks} == {want}, case


def test_tied_embeddings_stay_one_parameter(built: dict[str, list[dict[str, Any]]]) -> None:
    assert {case for case, ranks in built.items() for rank in ranks if rank["tied"]} == {
        case for case in built if "tied=True" in case
    }


def test_a_rank_contains_its_shards_and_one_parameter_while_it_builds(
    built: dict[str, list[dict[str, Any]]],
) -> None:
    for case, ranks in built.items():
        for rank in ranks:
            print(f"{case}: {rank['peak']} bytes of {rank['whole']}, shards {rank['shards']}")
            # torch's reader of checkpoints keeps one stored tensor while it loads the next.
            room = (2 if case.endswith("checkpoint") else 1) * rank["largest"] + SLACK
            assert rank["shards"] <= rank["peak"] <= rank["shards"] + room, case
            assert case.startswith("1") or rank["shards"] + room < rank["whole"], case
