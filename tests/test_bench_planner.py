"""The planner's benchmark: its panel, its measures by hand, and a small run from end to end."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from planner_cases import random_case

from benchmarks.bench_planner import interval, main, numpy_proposals_per_second
from benchmarks.planner_arms import ARMS, TOP_K, Batch, PlannerSize, draw_batch, read_panel, simulated_steps
from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.loads import collection_loads
from olmo_rl.planning.objective import measure
from olmo_rl.planning.synthetic import synthetic_collection
from olmo_rl.types import ExpertLayout, PackPlan, Refusal, Topology


def small_batch() -> Batch:
    case = random_case(1, world=4, ep=2, per_rank=6, layers=3)
    assert case.loads is not None
    return Batch(
        lengths=case.lengths,
        loads=case.loads,
        ids=tuple(f"s{i}" for i in range(24)),
        topology=case.topology,
        budget=case.budget,
    )


def save(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, **arrays)
    return str(path)


def test_a_panel_is_benchmarked_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = small_batch()
    panel = save(
        tmp_path / "panel.npz",
        lengths=batch.lengths,
        loads=batch.loads,
        world_size=np.array(4),
        budget=np.array(batch.budget),
    )
    assert main(["--panel", panel, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "panel panel.npz: 1 held-out batches" in printed
    with (tmp_path / "out" / "planner.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == list(ARMS)
    assert (
        float(rows[0]["step_gradient"]) == float(rows[0]["step_layer"]) == float(rows[0]["step_strict"]) == 1
    )
    gaps = {row["arm"]: float(row["gap"]) for row in rows}
    assert 0 <= gaps["anneal"] < gaps["arrival"]
    assert (tmp_path / "out" / "planner.png").stat().st_size > 10_000


def test_malformed_panels_are_refused_with_all_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = small_batch()
    good = {"lengths": batch.lengths, "loads": batch.loads}
    bad = {
        "no array 'loads'": {"lengths": batch.lengths},
        "lengths must be integers with 1 axes": good | {"lengths": batch.lengths.astype(float)},
        "loads must be integers with 3 axes": good | {"loads": batch.loads[0]},
        "lengths holds 0": good | {"lengths": batch.lengths * 0},
        "loads holds -": good | {"loads": -batch.loads - 1},
        "23 lengths for 24 loads": good | {"lengths": batch.lengths[:23]},
        "ep_degree=4, but loads have 2": good | {"ep_degree": np.array(4)},
        "does not divide the world size": good | {"world_size": np.array(3)},
    }
    for message, arrays in bad.items():
        with pytest.raises(Refusal, match=message):
            read_panel(save(tmp_path / "panel.npz", **arrays))
    (tmp_path / "text.npz").write_text("not a panel")
    for name in ("text.npz", "missing.npz"):
        with pytest.raises(Refusal, match=name):
            read_panel(str(tmp_path / name))
    assert main(["--panel", str(tmp_path / "missing.npz"), "--out", str(tmp_path / "out")]) == 2
    assert "missing.npz" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_three_synchronisation_models_by_hand() -> None:
    # Two replicas of two ranks, two columns, one layer; tokens and pairs alike everywhere.
    loads = np.zeros((8, 2, 1), dtype=np.int32)
    for i, (a, b) in enumerate([(4, 0), (0, 0), (0, 2), (0, 0), (0, 1), (0, 0), (5, 0), (0, 0)]):
        loads[i, 0], loads[i, 1] = a, b
    batch = Batch(
        lengths=np.full(8, 10),
        loads=loads,
        ids=tuple("abcdefgh"),
        topology=Topology(4, 2),
        budget=10,
    )
    # Replica 0 runs samples 0, 1 then 4, 5: busiest 4 + 1; replica 1 runs 2, 3 then 6, 7: busiest 2 + 5.
    plan = PackPlan(packs=(((0,), (4,)), ((1,), (5,)), ((2,), (6,)), ((3,), (7,))))
    base = measure(plan, lengths=batch.lengths, loads=loads, topology=batch.topology)
    assert base.expert_work == 4 + 5
    gradient, layer, strict = simulated_steps(plan, batch, base)
    assert strict == pytest.approx(1.0)
    assert layer == pytest.approx(0.5 + 0.35 + 0.15)
    assert gradient == pytest.approx(0.5 * 7 / 9 + 0.35 + 0.15)


def test_the_batches_of_the_law_are_counted_as_their_routes_would_be() -> None:
    setting = PlannerSize("tiny", 16, 4, 2, 3, 16, 1, 1)
    batch = draw_batch(setting, seed=3)
    layout = ExpertLayout(num_experts=16, top_k=TOP_K, routed_layers=(0, 1, 2))
    collection = synthetic_collection(16, layout=layout, seed=3)
    assert np.array_equal(batch.lengths, collection.lengths)
    assert batch.ids == tuple(sample.id for sample in collection.samples)
    assert np.array_equal(
        batch.loads, collection_loads(collection.samples, layout=layout, topology=batch.topology)
    )


def test_intervals_hold_the_mean_and_shrink_to_it_without_spread() -> None:
    assert interval([3.0, 3.0]) == (3.0, 3.0, 3.0)
    mean, low, high = interval([1.0, 2.0, 3.0, 10.0])
    assert mean == 4.0
    assert 1.0 <= low < mean < high <= 10.0


def test_the_kernels_are_far_faster_than_numpy_on_two_blocks() -> None:
    batch = draw_batch(PlannerSize("one", 128, 8, 4, 32, 64, 1, 1), seed=5)
    from benchmarks.planner_arms import searched

    searched(batch, BalanceConfig(kind=BalanceKind.anneal, proposals=1000))
    found = searched(batch, BalanceConfig(kind=BalanceKind.anneal, seconds=600))
    assert found.plan.search is not None
    rate = found.plan.search.proposals / found.seconds["search"]
    assert rate > 10 * numpy_proposals_per_second(batch, seconds=0.2)
