"""Seconds from counts: the fit against known weights, what is left out, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import fit_cost_model
from olmo_rl.planning.cost_model import (
    CostModel,
    fit_costs,
    non_negative_least_squares,
    read_cost_model,
    write_cost_model,
)
from olmo_rl.planning.objective import Work
from olmo_rl.types import Refusal, Topology

WEIGHTS = {"expert_work": 2e-6, "token_work": 3e-4, "pair_work": 0.0, "columns": 0.05}
UPDATE = 0.4


def work_of(row: dict[str, float]) -> Work:
    return Work(
        expert_work=int(row["expert_work"]),
        token_work=int(row["token_work"]),
        pair_work=int(row["pair_work"]),
        skew_mean=1.0,
        skew_max=1.0,
        max_destination_load=1,
        packs_per_rank=int(row["columns"]),
    )


def updates(count: int, *, seed: int = 0) -> list[dict[str, float]]:
    """Updates that cost exactly what WEIGHTS say."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        row = {
            "expert_work": float(rng.integers(10_000, 200_000)),
            "token_work": float(rng.integers(1_000, 9_000)),
            "pair_work": float(rng.integers(10_000, 900_000)),
            "columns": float(rng.integers(2, 12)),
        }
        rows.append(row | {"seconds": UPDATE + sum(WEIGHTS[name] * row[name] for name in WEIGHTS)})
    return rows


def test_non_negative_least_squares_meets_its_optimality_conditions() -> None:
    rng = np.random.default_rng(3)
    clipped = 0
    for _ in range(50):
        a, b = rng.standard_normal((12, 4)), rng.standard_normal(12)
        x = non_negative_least_squares(a, b)
        gradient = a.T @ (a @ x - b)
        assert (x >= 0).all()
        assert (gradient >= -1e-9).all()
        assert abs(float(x @ gradient)) < 1e-9
        clipped += int((x == 0).any())
    assert clipped > 25
    assert non_negative_least_squares(np.array([[1.0], [2.0]]), np.array([-1.0, -1.0])).tolist() == [0.0]
    x = non_negative_least_squares(np.array([[1.0, 0.0], [0.0, 1e9]]), np.array([3.0, 4e9]))
    assert x.tolist() == pytest.approx([3.0, 4.0])


def test_a_fit_recovers_known_weights_and_predicts_inside_what_was_measured(tmp_path: Path) -> None:
    rows = updates(30)
    model = fit_costs(rows, topology=Topology(4, 2))
    assert model.weights == pytest.approx(WEIGHTS | {"update": UPDATE}, rel=1e-6, abs=1e-12)
    assert model.held_out < 1e-6
    write_cost_model(model, tmp_path / "new" / "model.json")
    again = read_cost_model(tmp_path / "new" / "model.json")
    assert again == model
    inside = {name: float(int(np.mean(range_))) for name, range_ in model.ranges.items()}
    expected = UPDATE + sum(WEIGHTS[name] * inside[name] for name in WEIGHTS)
    assert again.seconds(work_of(inside)) == pytest.approx(expected, rel=1e-6)


def test_nothing_is_extrapolated() -> None:
    model = fit_costs(updates(30), topology=Topology(4, 2))
    inside = {name: float(int(np.mean(range_))) for name, range_ in model.ranges.items()}
    for name, far in itertools.product(inside, (0.5, 2.0)):
        edge = model.ranges[name][far > 1]
        with pytest.raises(Refusal, match=f"does not extrapolate: {name} .* outside the measured"):
            model.seconds(work_of(inside | {name: float(int(edge * far))}))
    outside = work_of(inside | {"columns": 99})
    lines = list(model.lines([(0, outside, work_of(inside))]))
    assert lines[0] == "Update time, step 0, arrival: not predicted, columns 99 outside the measured 2..11"
    assert lines[1].startswith("Update time, step 0, planned: ")
    with pytest.raises(Refusal, match="step 0, arrival: columns 99 outside the measured"):
        list(model.lines([(0, outside, outside)]))
    with pytest.raises(Refusal, match="measured on 4 ranks, EP 2; this plan is for 8 with EP 2"):
        model.check(Topology(8, 2))


def test_held_out_updates_are_judged_by_weights_that_never_saw_them() -> None:
    rows = updates(20)
    for row in rows[14:]:
        row["seconds"] *= 2
    assert fit_costs(rows, topology=Topology(4, 2)).held_out == pytest.approx(0.5, rel=1e-6)


def write_logs(directory: Path, rows: list[dict[str, float]], *, ranks: int = 2, **more: Any) -> list[Path]:
    directory.mkdir()
    paths = []
    for rank in range(ranks):
        lines: list[dict[str, Any]] = []
        for step, row in enumerate(rows, start=1):
            common = {"step": step, "rank": rank}
            lines.append({"event": "packing", **common})
            scoring = "checked" if step in (1, 5) else "skipped"
            lines.append({"event": "optimizer", "scoring": scoring, **common})
            # The slowest rank is the last one; the first update and the checked one are far slower.
            seconds = row["seconds"] * (1 if rank == ranks - 1 else 0.9) * (9 if step in (1, 5) else 1)
            values = {name: value for name, value in row.items() if name != "seconds"}
            topology = {"world_size": 4, "ep_degree": 2} | more
            lines.append({"event": "expert_balance", **common, **values, **topology, "update_s": seconds})
        path = directory / f"training_contract_rank{rank}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        paths.append(path)
    return paths


def test_the_command_fits_logs_of_several_runs_without_their_first_and_checked_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = updates(40)
    paths = write_logs(tmp_path / "a", rows[:20]) + write_logs(tmp_path / "b", rows[20:])
    out = tmp_path / "model.json"
    assert fit_cost_model.main([*map(str, paths), "--out", str(out)]) == 0
    model = read_cost_model(out)
    assert isinstance(model, CostModel)
    assert model.measured == 36
    assert model.weights == pytest.approx(WEIGHTS | {"update": UPDATE}, rel=1e-6, abs=1e-12)
    printed = capsys.readouterr().out
    assert "held-out error 0.0 %" in printed
    assert "measured columns: 2..11" in printed


def test_unusable_logs_are_refused_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = write_logs(tmp_path / "few", updates(9))
    mixed = few + write_logs(tmp_path / "mixed", updates(9), world_size=8)
    empty = tmp_path / "training_contract_rank0.jsonl"
    empty.write_text('{"event": "packing", "step": 1, "rank": 0}\n')
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"event": "expert_balance", "step": 1}\n')
    for paths, words in (
        (few, "7 measured updates: a cost model needs at least 10"),
        (mixed, "logs of several topologies"),
        ([empty], "no expert_balance events"),
        ([broken], "broken.jsonl, line 1: not a line of a contract log"),
        ([tmp_path / "absent.jsonl"], "absent.jsonl: No such file"),
    ):
        assert fit_cost_model.main([*map(str, paths), "--out", str(tmp_path / "x.json")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"ranges": {}}', '{"ranges": {"columns": 3}}'])
def test_a_file_that_is_no_cost_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(Refusal, match="not a cost model"):
        read_cost_model(path)
    with pytest.raises(Refusal, match="name a file of"):
        read_cost_model(tmp_path / "absent.json")
