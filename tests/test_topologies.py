"""One hybrid model trained in every form that must give the same two updates, on one, two and four ranks.

One program (matrix_cases.py) runs all cells of the matrix; `-s` prints the table of relative errors.
test_seeded_faults.py shows that faults do not pass.
"""

from __future__ import annotations

from dataclasses import replace

import matrix_cases
import matrix_checks
import pytest
from programs import run_program


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> matrix_checks.Results:
    directory = tmp_path_factory.mktemp("matrix")
    run_program(directory, *matrix_cases.STEPS)
    return matrix_cases.load(directory)


@pytest.fixture(scope="module")
def verdicts(matrix: matrix_checks.Results) -> dict[str, matrix_checks.Verdict]:
    print(f"\n{matrix_checks.table(matrix)}")
    return matrix_checks.verdicts(matrix)


# How much each rule compares at least: a rule that looks at nothing cannot fail.
RULES = {
    "topology": 42,
    "packing": 15,
    "recompute": 11,
    "ranks": 60,
    "denominators": 556,
    "loads": 549,
    "experts": 82,
    "router": 3680,
}


@pytest.mark.parametrize("rule", list(RULES))
def test_the_matrix_keeps_the_rule(verdicts: dict[str, matrix_checks.Verdict], rule: str) -> None:
    """Gradients, norm and Adam state of two updates on 1, 2, 4 ranks; matrix_checks.py states each rule."""
    assert verdicts.keys() == RULES.keys()
    assert verdicts[rule].faults == []
    assert verdicts[rule].compared >= RULES[rule]


@pytest.mark.parametrize(("world", "ep"), matrix_cases.TOPOLOGIES)
def test_the_matrix_gives_every_rank_work_of_its_own(
    matrix: matrix_checks.Results, world: int, ep: int
) -> None:
    base = matrix_cases.Cell(world=world, ep=ep)
    packs = [[update["packs"] for update in rank["updates"]] for rank in matrix[base]]
    tokens = [rank["updates"][0]["real_tokens"] for rank in matrix[base]]
    assert len({str(pack) for pack in packs}) == world
    assert len({sum(rank) for rank in tokens}) == min(world, 4), "unequal token counts"
    assert {len(pack) for rank in packs for update in rank for pack in update} == {1, 2}
    for update in matrix[base][0]["updates"]:
        overlap = update["totals"]["sum/overlap"] / update["totals"]["count/recorded_rows"]
        assert 0 < overlap < 0.9, "replayed routes are not those that a router would choose"
    assert [update["scoring"] for update in matrix[base][0]["updates"]] == ["checked", "skipped"]
    alone = matrix[matrix_cases.Cell(world=1, ep=1)][0]["updates"][0]["packs"]
    assert sorted(pack for rank in packs for pack in rank[0]) == sorted(alone), "the same packs everywhere"
    arrival = [
        rank["updates"][0]["packs"]
        for rank in matrix[replace(base, double=True, files=matrix_cases.Files.arrival)]
    ]
    assert sorted(pack for rank in arrival for pack in rank) != sorted(alone), "other packs"


def test_ranks_without_an_expert_row_and_experts_without_a_row_take_part(
    matrix: matrix_checks.Results,
) -> None:
    layer = matrix_cases.IDLE_LAYER
    cells = [cell for cell in matrix if cell.files is matrix_cases.Files.idle]
    assert {cell.ep for cell in cells} == {1, 2, 4}
    for cell in cells:
        (first, second) = matrix[cell][0]["gradients"]
        for name, gradient in first.items():
            if matrix_cases.EXPERTS in name:
                assert not gradient[matrix_cases.IDLE_EXPERT].any(), (cell, name)
                assert not second[name][matrix_cases.IDLE_EXPERT].any(), (cell, name)
                assert gradient[0].any(), (cell, name)
        owner = matrix[cell][-1]["received"]
        assert all(counts[-1] == 0 for layer in owner.values() for counts in layer)
    (four,) = [cell for cell in cells if cell.ep == 4]
    rows = [[int(counts.sum()) for counts in rank["received"][layer]] for rank in matrix[four]]
    assert all(count > 0 for rank in rows[:2] for count in rank)
    assert all(count == 0 for rank in rows[2:] for count in rank)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_clipping_a_norm_of_ten_to_one_scales_every_gradient_by_a_tenth(
    matrix: matrix_checks.Results, world: int
) -> None:
    free = matrix_cases.Cell(world=world, ep=world, files=matrix_cases.Files.ten)
    (before, *_), (after, *_) = (
        matrix[cell][0]["gradients"] for cell in (free, replace(free, max_grad_norm=1.0))
    )
    for cell in (free, replace(free, max_grad_norm=1.0)):
        assert matrix[cell][0]["updates"][0]["grad_norm"] == pytest.approx(10, rel=1e-6)
    tenth = {name: gradient / 10 for name, gradient in before.items()}
    assert matrix_checks.relative(after, tenth)[0] <= 1e-6


def test_router_losses_change_the_gradients_that_they_are_part_of(matrix: matrix_checks.Results) -> None:
    for world, ep in matrix_cases.TOPOLOGIES:
        plain = matrix_cases.Cell(world=world, ep=ep, double=True)
        pair = [matrix[cell][0]["gradients"][0] for cell in (replace(plain, router=True), plain)]
        gates = [name for name in pair[0] if name.endswith("router.gate.weight")]
        assert len(gates) == 3
        for name in gates:
            assert float((pair[0][name] - pair[1][name]).norm() / pair[1][name].norm()) > 0.01
