"""Faults seeded into copies of the package break the rules of the topology matrix that they should break, and
no other; mutants.py makes the copies.
"""

from __future__ import annotations

import json

import pytest
from mutants import MUTATIONS
from programs import run_program


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """Faults by rule, by mutation; "none" is a copy without one."""
    directory = tmp_path_factory.mktemp("mutants")
    run_program(directory, "mutants:make_copies", "mutants:examine_copies")
    return {path.parent.name: json.loads(path.read_text()) for path in directory.glob("*/faults.json")}


@pytest.mark.parametrize("name", ["none", *MUTATIONS])
def test_a_seeded_fault_breaks_its_own_rules_and_no_other(
    mutants: dict[str, dict[str, list[str]]], name: str
) -> None:
    broken = {rule for rule, faults in mutants[name].items() if faults}
    assert broken == (MUTATIONS[name].rules if name != "none" else set()), mutants[name]


def test_seeded_faults_are_seen_where_they_act(mutants: dict[str, dict[str, list[str]]]) -> None:
    local = mutants["local denominators"]
    assert len(local["topology"]) == 2, "both cells of two ranks"
    experts = mutants["expert gradients times the expert-parallel degree"]["experts"]
    assert len(experts) == 2, "both updates of EP2"
    assert "gradient ratio 2.000000" in experts[0]
    (doubled,) = mutants["balancing loss doubled under recomputation"]["recompute"]
    assert "recompute full" in doubled
    shifted = mutants["labels shifted by one more in every further document of a pack"]
    assert "1 ranks, EP1, packed" in shifted["packing"][0]
    assert len(shifted["topology"]) == 1, "two ranks with EP1 hold the same packs and the same faults"
    assert mutants["routes of tails are zero"]["loads"]
