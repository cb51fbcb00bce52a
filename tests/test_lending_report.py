"""What recipe=plan and recipe=validate report about lending: seconds by hand, X against its definition."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from composing import compose_fast
from matplotlib.image import imread
from test_loads import make_sample
from test_plan import config_of, planned

from olmo_rl.config import (
    BalanceConfig,
    BalanceKind,
    Config,
    Dtype,
    PackingConfig,
    PackingKind,
    PlanConfig,
    Recipe,
    Recompute,
)
from olmo_rl.data.files import write_collection
from olmo_rl.planning.lending_report import Costs, exchanged, expert_parameters
from olmo_rl.planning.loads import collection_loads
from olmo_rl.planning.objective import measure
from olmo_rl.planning.packing import plan_step
from olmo_rl.policy.footprint import memory_table
from olmo_rl.policy.weights import parameter_shapes
from olmo_rl.types import Collection, ExpertLayout, Lending, Loan, Sample, Topology
from recipes import validate

EIGHT = ExpertLayout(num_experts=8, top_k=2, routed_layers=(0, 2))


def lending_config(**sections: object) -> Config:
    """hybrid_tiny over four ranks at EP2 with one guest slot."""
    config = compose_fast("+experiment=balanced_moe", "balance.guests=1", "recipe=plan")
    return replace(config, **sections)


def test_seconds_of_an_assignment_and_of_a_guest_follow_from_stated_speeds() -> None:
    config = lending_config(plan=PlanConfig(tflops=0.5, link_gigabytes=2.0))
    size = expert_parameters(config.model)
    width = config.model.latent_dim or config.model.dim
    assert size == 3 * width * config.model.expert_hidden
    costs = Costs.of(config)
    # Float32: 4 bytes out, 4 bytes of gradient back; 2 operations an element forward, 4 backward.
    assert costs.bytes == size * 8
    assert costs.exchange == pytest.approx(size * 8 / 2e9)
    assert costs.product == pytest.approx(size * 6 / 0.5e12)
    full = Costs.of(replace(config, policy=replace(config.policy, recompute=Recompute.full)))
    assert (full.bytes, full.product / costs.product) == (size * 12, pytest.approx(8 / 6))
    selective = replace(config.policy, recompute=Recompute.selective, dtype=Dtype.bfloat16)
    kept = Costs.of(replace(config, policy=selective))
    assert (kept.bytes, kept.product) == (size * 4, full.product)


def test_an_exchange_takes_as_long_as_its_busiest_sender_or_host() -> None:
    def loan(expert: int, host: int, slot: int = 0) -> Loan:
        return Loan(expert=expert, host=host, slot=slot, first=0, below=9)

    # Experts 0, 1 of rank 0 go to ranks 1 and 2: it sends two. Then rank 3 receives two.
    lending = Lending(guests=2, layers=((loan(0, 1), loan(1, 2)), (loan(0, 3), loan(2, 3, 1)), ()))
    assert exchanged(lending, topology=Topology(4, 4), num_experts=8) == 2 + 2


def skewed_file(path: Path) -> list[Sample]:
    rng, samples = np.random.default_rng(3), []
    for index in range(16):
        rows = 9 + 5 * index % 23
        keys = rng.gumbel(size=(rows, 2, 8)) - 0.4 * np.arange(8)
        samples.append(make_sample(f"s{index}", rows + 1, keys.argsort(axis=-1)[..., -2:].astype(np.int16)))
    write_collection(Collection(samples=samples, layout=EIGHT, source="test"), path)
    return samples


def test_a_plan_reports_expert_work_at_home_and_lent_and_draws_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = skewed_file(tmp_path / "c.parquet")
    config = config_of(
        tmp_path / "c.parquet",
        tmp_path / "run",
        packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=64),
        plan=PlanConfig(world_size=4, ep_degree=2, link_gigabytes=1e-3, tflops=1e-9),
        balance=BalanceConfig(kind=BalanceKind.anneal, proposals=500, seconds=float("inf"), guests=1),
    )
    block = planned(config)["blocks"][0]
    found, out = block["lending"], " ".join(capsys.readouterr().out.split())
    topology, lengths = Topology(4, 2), np.array([len(sample) for sample in samples])
    loads = collection_loads(samples, layout=EIGHT, topology=topology)
    arrival = plan_step(lengths, budget=64, topology=topology)
    perfect = loads.sum() / 4
    work = measure(arrival, lengths=lengths, loads=loads, topology=topology)
    assert found["as_it_is"] == pytest.approx(work.expert_work / perfect)
    assert found["lent"] == pytest.approx(block["before"]["expert_work"] / perfect)
    assert found["lent_and_packed"] == pytest.approx(block["after"]["expert_work"] / perfect)
    assert 1 <= found["lent_and_packed"] < found["packed"] < found["as_it_is"]
    assert found["lent_and_packed"] < found["lent"] < found["as_it_is"]
    assert len(found["loans"]) == 2
    assert all(loans for loans in found["loans"])
    costs = Costs.of(config)
    assert found["won"] == pytest.approx(
        (found["packed"] - found["lent_and_packed"]) * perfect * costs.product
    )
    assert found["bytes"] == block["packs_per_rank"] * 2 * costs.bytes
    assert found["exact_bytes"] == block["packs_per_rank"] * 2 * 4 * costs.bytes
    assert f"{found['as_it_is']:.3f} as it is, {found['packed']:.3f} packed, {found['lent']:.3f} lent" in out
    assert "MiB on the busiest ranks" in out
    assert ": it pays, from packs of about" in out
    assert imread(tmp_path / "run" / "loads.png").shape[1] > 1000
    at_home = planned(
        replace(config, balance=replace(config.balance, guests=0), run_dir=str(tmp_path / "home"))
    )
    assert "lending" not in at_home["blocks"][0]
    assert at_home["blocks"][0]["after"]["expert_work"] == pytest.approx(found["packed"] * perfect)
    json.dumps(found, allow_nan=False)


def test_validate_reports_memory_and_the_tokens_from_which_lending_pays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(lending_config(), recipe=Recipe.validate)
    validate.run(config)
    out = capsys.readouterr().out
    costs = Costs.of(config)
    assert f"about {costs.exchange / (0.1 * config.model.top_k * costs.product):,.0f} tokens on" in out
    shapes, model = parameter_shapes(config.model), config.model
    layers, owned, one = len(model.routed_layers), model.num_experts // 2, 4 * expert_parameters(model)
    for recompute, experts in (
        (Recompute.none, layers * (owned + 1)),
        (Recompute.full, owned + 1),
        (Recompute.selective, owned + 1 + layers),
    ):
        policy = replace(config.policy, recompute=recompute)
        (line,) = [
            line
            for line in memory_table(replace(config, policy=policy), shapes=shapes)
            if line.name == "guests"
        ]
        assert line.bytes == experts * one
