"""recipe=plan: plan.json by hand numbers, its pictures and table, the synthetic law, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from olmo_rl.config import (
    BalanceConfig,
    BalanceKind,
    BatchConfig,
    Config,
    LossConfig,
    ModelConfig,
    PackingConfig,
    PackingKind,
    PlanConfig,
    PolicyConfig,
    Recipe,
    RolloutsConfig,
    ScoringConfig,
    ScoringMode,
    Source,
)
from olmo_rl.data.files import read_collection, write_collection
from olmo_rl.data.validation import checked_routes
from olmo_rl.planning.cost_model import CostModel, write_cost_model
from olmo_rl.planning.loads import collection_loads
from olmo_rl.planning.objective import Bounds, Work, measure, pair_straggler, token_straggler
from olmo_rl.planning.packing import plan_step
from olmo_rl.planning.pictures import PADS, column_loads, draw_packs
from olmo_rl.planning.report import (
    ReportedStep,
    load_lines,
    plan_document,
    print_report,
    report_step,
    scoring_remark,
)
from olmo_rl.planning.schedule import Schedule, StepInput, known_schedule
from olmo_rl.planning.synthetic import (
    DOMAINS,
    draw_lengths,
    expert_counts,
    recorded_lengths,
    routes_of_counts,
    synthetic_collection,
)
from olmo_rl.types import Collection, ExpertLayout, PackPlan, Padding, Refusal, Sample, SearchLog, Topology
from recipes import plan

ROOT = Path(__file__).parent.parent
LENGTHS = Path(__file__).parent / "data" / "grpo_lengths.json"
BOTH = ExpertLayout(num_experts=2, top_k=2, routed_layers=(0, 2))  # every token visits both experts


def write_file(path: Path, lengths: list[int], *, layout: ExpertLayout | None, first_id: int = 0) -> Path:
    samples = []
    for i, n in enumerate(lengths, start=first_id):
        rng = np.random.default_rng(i)
        routes = None
        if layout is not None:
            scores = rng.random((n - 1, len(layout.routed_layers), layout.num_experts))
            routes = np.argsort(scores, axis=-1)[..., : layout.top_k].astype(np.int16)
        samples.append(
            Sample(
                id=f"s{i}",
                group=str(i // 2),
                tokens=np.arange(n, dtype=np.int32) + 900,
                response_mask=np.arange(n) > 0,
                behavior_logprobs=np.full(n, -1, dtype=np.float32),
                reward=1.0,
                routes=routes,
            )
        )
    write_collection(Collection(samples=samples, layout=layout, source="test"), path)
    return path


def config_of(path: Path | None, run_dir: Path, **changes: Any) -> Config:
    run_dir.mkdir(parents=True, exist_ok=True)
    base = Config(
        recipe=Recipe.plan,
        run_dir=str(run_dir),
        rollouts=RolloutsConfig(source=Source.files, path=None if path is None else str(path)),
        batch=BatchConfig(samples_per_step=None),
        packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=12),
        plan=PlanConfig(world_size=2, ep_degree=2),
    )
    return replace(base, **changes)


def planned(config: Config) -> dict[str, Any]:
    plan.run(config)
    document = json.loads((Path(config.run_dir) / "plan.json").read_text())
    assert isinstance(document, dict)
    return document


def test_plan_json_holds_the_hand_computed_plan_and_its_work(tmp_path: Path) -> None:
    path = write_file(tmp_path / "c.parquet", [4, 7, 4, 6, 4, 5], layout=BOTH)
    # Columns {0, 1} and {2, 4, 3, 5}: 11 and 19 tokens, tails included, go to both ranks in both layers.
    work = {
        "expert_work": 2 * (11 + 19),
        "token_work": 7 + 11,
        "pair_work": 7 * 7 + 6 * 6 + 5 * 5,
        "skew_mean": 1.0,
        "skew_max": 1.0,
        "max_destination_load": 19,
        "packs_per_rank": 2,
    }
    assert planned(config_of(path, tmp_path / "run")) == {
        "topology": {"world_size": 2, "ep_degree": 2},
        "budget": 12,
        "blocks": [
            {
                "step": 0,
                "ranks": [[["s0"], ["s2", "s4"]], [["s1"], ["s3", "s5"]]],
                "packs_per_rank": 2,
                "fill": 30 / 48,
                "before": work,
                "after": work,
                "lower_bounds": {
                    "expert_work": 60,
                    "token_work": 15,
                    "pair_work": 79,
                    "packs_per_rank": 2,
                },
                "search": None,
            }
        ],
        "untouched_tail": [],
    }


def test_without_replay_expert_fields_are_null_and_ignored_routes_are_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = PolicyConfig(replay=False)
    bare = write_file(tmp_path / "bare.jsonl", [4, 7, 4, 6, 4, 5], layout=None)
    document = planned(config_of(bare, tmp_path / "a", policy=off))
    block = document["blocks"][0]
    for work in (block["before"], block["after"]):
        experts = ("expert_work", "skew_mean", "skew_max", "max_destination_load")
        assert [work[name] for name in experts] == [None] * 4
        assert work["token_work"] == 18
    assert block["lower_bounds"]["expert_work"] is None
    assert "ignored" not in capsys.readouterr().out
    routed = write_file(tmp_path / "routed.jsonl", [4, 7, 4, 6, 4, 5], layout=BOTH)
    assert planned(config_of(routed, tmp_path / "b", policy=off)) == document
    assert "recorded routes are ignored because policy.replay=false" in capsys.readouterr().out


def test_steps_continue_over_files_in_name_order_and_every_tail_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(tmp_path / "data" / "c-1.parquet", [3] * 5, layout=BOTH)
    write_file(tmp_path / "data" / "c-2.jsonl", [3] * 3, layout=BOTH, first_id=5)
    write_file(tmp_path / "data" / "c-3.parquet", [3] * 4, layout=BOTH, first_id=8)
    config = config_of(tmp_path / "data", tmp_path / "run", batch=BatchConfig(samples_per_step=4))
    document = planned(config)
    assert [block["step"] for block in document["blocks"]] == [0, 1]
    assert [sorted(i for rank in b["ranks"] for pack in rank for i in pack) for b in document["blocks"]] == [
        ["s0", "s1", "s2", "s3"],
        ["s10", "s11", "s8", "s9"],
    ]
    assert document["untouched_tail"] == ["s4", "s5", "s6", "s7"]
    assert "Left out: 4 samples" in capsys.readouterr().out


def test_packing_off_has_one_sample_per_pack_and_no_budget(tmp_path: Path) -> None:
    path = write_file(tmp_path / "c.parquet", [4, 7, 4, 6], layout=BOTH)
    config = config_of(path, tmp_path / "run", packing=PackingConfig(kind=PackingKind.none))
    document = planned(config)
    assert document["budget"] is None
    block = document["blocks"][0]
    assert block["ranks"] == [[["s0"], ["s2"]], [["s1"], ["s3"]]]
    assert block["fill"] is None
    assert block["packs_per_rank"] == block["lower_bounds"]["packs_per_rank"] == 2


def test_expert_counts_come_from_the_file_and_the_model_is_not_consulted(tmp_path: Path) -> None:
    path = write_file(tmp_path / "c.parquet", [4, 7, 4, 6, 4, 5], layout=BOTH)
    expected = planned(config_of(path, tmp_path / "a"))
    tiny = ModelConfig(
        vocab_size=3, max_seq_len=2, num_experts=64, top_k=8
    )  # fits neither tokens nor lengths
    assert planned(config_of(path, tmp_path / "b", model=tiny)) == expected


def test_files_without_metadata_take_expert_counts_from_the_model_or_are_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "c.jsonl", [4, 7, 4, 6, 4, 5], layout=BOTH)
    lines = path.read_text().splitlines()
    assert "meta" in json.loads(lines[0])
    expected = planned(config_of(path, tmp_path / "a"))
    path.write_text("\n".join(lines[1:]))
    model = ModelConfig(
        num_experts=2, top_k=2, layer_types=ModelConfig().layer_types * 2, dense_layers=[1, 3]
    )
    assert model.expert_layout == BOTH
    assert planned(config_of(path, tmp_path / "b", model=model)) == expected
    with pytest.raises(Refusal, match="neither the file's metadata nor the model"):
        plan.run(config_of(path, tmp_path / "c", model=ModelConfig(num_experts=0)))


def test_routes_over_all_layers_give_the_same_plan(tmp_path: Path) -> None:
    layout = ExpertLayout(num_experts=8, top_k=2, routed_layers=(1, 2))
    routed = write_file(tmp_path / "routed.jsonl", [4, 7, 4, 6, 4, 5], layout=layout)
    head, *lines = (json.loads(line) for line in routed.read_text().splitlines())
    head["meta"]["route_layers"] = "all"
    for line in lines:
        line["routes"] = [[[0, 0], *row] for row in line["routes"]]  # layer 0 is dense, its rows mean nothing
    everywhere = tmp_path / "all.jsonl"
    everywhere.write_text("\n".join(json.dumps(line) for line in [head, *lines]))
    one = planned(config_of(routed, tmp_path / "a"))
    assert planned(config_of(everywhere, tmp_path / "b")) == one
    assert one["blocks"][0]["after"]["expert_work"] > 60


@pytest.mark.parametrize(
    ("lengths", "layout", "changes", "message"),
    [
        ([4, 13], BOTH, {}, r"c\.jsonl: sample 's1' has 13 tokens, more than the budget of 12"),
        ([4, 7, 4], BOTH, {}, r"c\.jsonl: 3 samples do not divide over 2 ranks"),
        ([4, 7], None, {}, r"line 2, sample 's0': routes are missing"),
        (
            [4, 7],
            BOTH,
            {"plan": PlanConfig(world_size=4, ep_degree=4)},
            r"2 samples do not divide over 4 ranks",
        ),
        (
            [4, 7, 4, 7],
            BOTH,
            {"plan": PlanConfig(world_size=4, ep_degree=4)},
            r"num_experts=2 is not divisible",
        ),
        ([4, 7], BOTH, {"plan": PlanConfig(world_size=3, ep_degree=2)}, r"ep_degree=2 does not divide"),
        (
            [4, 7],
            BOTH,
            {"batch": BatchConfig(samples_per_step=4)},
            r"no collection holds a complete step \(2 samples",
        ),
    ],
)
def test_a_refused_plan_says_why_and_writes_nothing(
    tmp_path: Path, lengths: list[int], layout: ExpertLayout | None, changes: dict[str, Any], message: str
) -> None:
    path = write_file(tmp_path / "c.jsonl", lengths, layout=layout)
    if layout is None:
        path.write_text(
            json.dumps({"meta": {"num_experts": 2, "top_k": 2, "routed_layers": [0]}})
            + "\n"
            + path.read_text()
        )
    config = config_of(path, tmp_path / "run", **changes)
    with pytest.raises(Refusal, match=message):
        plan.run(config)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_bad_second_file_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    write_file(tmp_path / "data" / "a.parquet", [4, 7], layout=BOTH)
    (tmp_path / "data" / "b.parquet").write_bytes((tmp_path / "data" / "a.parquet").read_bytes()[:200])
    with pytest.raises(Refusal, match=r"b\.parquet: not a complete parquet file"):
        plan.run(config_of(tmp_path / "data", tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []


def test_a_generating_source_is_planned_from_the_law_within_the_models_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        None,
        tmp_path / "run",
        rollouts=RolloutsConfig(source=Source.local, group_size=4),
        batch=BatchConfig(samples_per_step=16, steps_per_collection=2),
        model=ModelConfig(max_seq_len=64),
        packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=128),
    )
    document = planned(config)
    assert len(document["blocks"]) == 2
    assert (
        document["blocks"][0]["after"]["expert_work"] >= document["blocks"][0]["lower_bounds"]["expert_work"]
    )
    assert "follow a synthetic law" in capsys.readouterr().out


def test_the_terminal_report_fits_a_hundred_columns_and_names_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path / "c.parquet", [4, 7, 4, 6, 4, 5] * 20, layout=BOTH)
    batch = BatchConfig(samples_per_step=6, filter_zero_variance=True)
    plan.run(config_of(path, tmp_path / "run", batch=batch))
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines() if "Written" not in line)
    assert "2 ranks, 1 x EP 2, packs of up to 12 tokens" in out
    assert "and 4 more steps in plan.json" in out
    assert "Filters act when training" in out
    assert "standalone" in out
    assert "20 optimizer steps from one collection" in out
    assert str(tmp_path / "run" / "plan.json") in out


def test_a_searched_plan_is_reported_beside_the_order_of_arrival(capsys: pytest.CaptureFixture[str]) -> None:
    lengths, topology = np.array([9, 1, 9, 1]), Topology(2)
    arrival = plan_step(lengths, budget=10, topology=topology)
    log = SearchLog(seed=7, proposals=5, accepted=1, stop_reason="bounds", rejected={"pair_work": 2})
    better = PackPlan(packs=(((0, 1),), ((2, 3),)), search=log)
    given = StepInput(
        lengths=lengths,
        ids=["a", "b", "c", "d"],
        loads=None,
        budget=10,
        topology=topology,
        balance=BalanceConfig(kind=BalanceKind.anneal),
    )
    schedule = known_schedule(better, step=given, arrival=arrival, seconds={}, start="length_rows")
    step = report_step(schedule, given=given, number=0, packed=True)
    document = plan_document([step], topology=topology, budget=10, untouched_tail=[])["blocks"][0]
    assert document["ranks"] == [[["a", "b"]], [["c", "d"]]]
    works = [
        (document[x]["token_work"], document[x]["pair_work"]) for x in ("before", "after", "lower_bounds")
    ]
    assert works == [(18, 162), (10, 82), (10, 82)]
    assert (document["packs_per_rank"], document["before"]["packs_per_rank"]) == (1, 2)
    assert document["fill"] == 1.0
    assert document["search"] == {
        "seed": 7,
        "proposals": 5,
        "accepted": 1,
        "stop_reason": "bounds",
        "rejected": {"pair_work": 2},
    }
    print_report([step], topology=topology, budget=10, untouched_tail=[], notes=["[not markup] 3 %"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "arrival", "88.4%", "2", "x", "2", "1.0", "0.500", "18", "+80%", "162", "+98%"] in rows
    assert ["planned", "0.0%", "2", "x", "1", "2.0", "1.000", "10", "+0%", "82", "+0%"] in rows
    assert ["bound", "0.0%", "2", "x", "1", "10", "82"] in rows
    log = "Step 0: start length_rows, 5 proposals, 1 accepted, stopped by bounds; rejected by pair_work 2"
    assert log.split() in rows
    assert ["[not", "markup]", "3", "%"] in rows


def test_a_plan_that_raises_the_largest_destination_load_is_reported_with_the_cap_that_keeps_it() -> None:
    work = Work(
        expert_work=90,
        token_work=9,
        pair_work=9,
        skew_mean=1.0,
        skew_max=1.0,
        max_destination_load=100,
        packs_per_rank=1,
    )
    log = SearchLog(seed=0, proposals=1, accepted=1, stop_reason="proposals", rejected={})
    for load, expected in ((121, " (+21%): the busiest rank needs more memory; "), (100, "100 planned")):
        schedule = Schedule(
            plan=PackPlan(packs=(((0,),), ((1,),)), search=log),
            before=work,
            after=replace(work, max_destination_load=load),
            bounds=Bounds(expert_work=80, token_work=9, pair_work=9, packs_per_rank=1),
            start="",
            paths={},
        )
        step = ReportedStep(
            number=0, ids=("a", "b"), lengths=np.ones(2), schedule=schedule, fill=1.0, padded_tokens=None
        )
        (line,) = load_lines([step])
        assert expected in line
        assert ("balance.max_destination_load=100" in line) == (load > 100)


def test_the_scoring_remark_follows_the_configuration() -> None:
    auto = Config(scoring=ScoringConfig(check_interval=7))
    assert "every 7 updates, skipped otherwise" in scoring_remark(auto, steps_in_collection=1)
    assert "2 optimizer steps from one collection" in scoring_remark(auto, steps_in_collection=2)
    once = Config(scoring=ScoringConfig(check_interval=0))
    assert "first update of each process, skipped" in scoring_remark(once, steps_in_collection=1)
    always = Config(scoring=ScoringConfig(mode=ScoringMode.always))
    assert "scoring.mode=always" in scoring_remark(always, steps_in_collection=1)
    referenced = Config(loss=LossConfig(kl_coef=0.1))
    assert "loss.kl_coef=0.1" in scoring_remark(referenced, steps_in_collection=1)


def test_grey_in_the_picture_is_the_unused_share_of_the_budget(tmp_path: Path) -> None:
    for lengths in ([50] * 16, [100] * 16, [25, 75] * 8):
        chosen = plan_step(lengths, budget=100, topology=Topology(4))
        draw_packs(chosen, lengths=lengths, budget=100, path=tmp_path / "p.png")
        pixels = np.rint(imread(tmp_path / "p.png")[..., :3] * 255).astype(int)
        inside = pixels[60:-80, 60:-160].reshape(-1, 3)  # without title, axis labels and colour bar
        grey = (inside == 0xEE).all(axis=1).sum()
        white = (inside == 0xFF).all(axis=1).sum()
        fill = sum(lengths) / (4 * chosen.packs_per_rank * 100)
        assert 1 - grey / (len(inside) - white) == pytest.approx(fill, abs=0.06)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.png"]


def test_packs_of_real_lengths_are_those_measured_before(tmp_path: Path) -> None:
    lengths, topology = recorded_lengths(LENGTHS, case="mbu_157_percent"), Topology(8)
    assert len(lengths) == 512
    chosen = plan_step(lengths, budget=4608, topology=topology)
    work = measure(chosen, lengths=lengths, loads=None, topology=topology)
    assert chosen.packs_per_rank == 13
    assert lengths.sum() / (8 * 13 * 4608) == pytest.approx(0.676, abs=5e-4)
    assert token_straggler(work, lengths=lengths, topology=topology) == pytest.approx(1.353, abs=5e-4)
    assert pair_straggler(work, lengths=lengths, topology=topology) == pytest.approx(2.137, abs=5e-4)
    with pytest.raises(Refusal, match="no case 'x', it has mbu_157_percent"):
        recorded_lengths(LENGTHS, case="x")
    with pytest.raises(Refusal, match="not a JSON file of recorded lengths"):
        recorded_lengths(tmp_path / "gone.json", case="x")


def test_lengths_of_the_law_have_the_stated_medians_limits_groups_and_shared_difficulty() -> None:
    drawn = draw_lengths(40_000, seed=3)
    assert drawn.lengths.min() == 200
    assert drawn.lengths.max() == 8000
    assert len(set(drawn.ids)) == 40_000
    for i, domain in enumerate(DOMAINS):
        of_domain = drawn.lengths[drawn.domains == i]
        assert len(of_domain) / 40_000 == pytest.approx(domain.weight, abs=0.02)
        assert np.median(of_domain) == pytest.approx(domain.median, rel=0.06)
    groups = drawn.prompts.reshape(-1, 8)
    assert (groups == groups[:, :1]).all(), "the samples of a group arrive together"
    math = np.log(drawn.lengths.reshape(-1, 8)[drawn.domains[::8] == 0])
    inner = math[(math > np.log(201)).all(1) & (math < np.log(7999)).all(1)]
    assert 0.4 < inner.mean(axis=1).var() / inner.var() < 0.75
    longest = drawn.lengths.reshape(-1, 8).max(axis=1)
    rank = np.corrcoef(np.arange(len(longest)), np.log(longest))[0, 1]
    assert 0.6 < rank < 0.95, "short groups arrive first, but not in exact order"


def test_the_law_depends_on_its_seed_alone_and_scales_with_the_longest() -> None:
    a, b, c = (draw_lengths(64, seed=seed) for seed in (1, 1, 2))
    assert a.ids == b.ids
    assert (a.lengths == b.lengths).all()
    assert a.lengths.tolist() != c.lengths.tolist()
    small = draw_lengths(64, seed=1, longest=80)
    assert small.ids == a.ids
    assert np.abs(small.lengths - a.lengths / 100).max() <= 0.5
    assert draw_lengths(64, seed=1, longest=10).lengths.min() == 2
    with pytest.raises(Refusal, match="each must be at least 1"):
        draw_lengths(0, seed=1)


@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (4, 4), (5, 3), (64, 8)])
def test_routes_of_the_law_realise_its_counts_with_distinct_experts(experts: int, top_k: int) -> None:
    layout = ExpertLayout(num_experts=experts, top_k=top_k, routed_layers=(1, 2, 5))
    drawn = draw_lengths(24, seed=5, longest=200)
    collection = synthetic_collection(24, layout=layout, seed=5, longest=200)
    for sample, counts in zip(collection.samples, expert_counts(drawn, layout=layout, seed=5), strict=True):
        assert sample.routes is not None
        checked_routes(sample.routes, tokens=len(sample), layout=layout)
        found = [np.bincount(sample.routes[:, layer].ravel(), minlength=experts) for layer in range(3)]
        np.testing.assert_array_equal(found, counts)
        assert (counts.sum(axis=1) == top_k * (len(sample) - 1)).all()


def test_rows_are_shuffled_so_that_routes_do_not_follow_the_position() -> None:
    counts = np.array([[50, 50, 50, 50]])
    routes = routes_of_counts(counts, rows=100, top_k=2, rng=np.random.default_rng(0))
    halves = [np.bincount(routes[part, 0].ravel(), minlength=4) for part in (slice(0, 50), slice(50, 100))]
    assert np.abs(halves[0] - halves[1]).max() < 20


def test_samples_of_one_domain_load_the_same_experts_and_routes_are_far_from_uniform() -> None:
    layout = ExpertLayout(num_experts=32, top_k=4, routed_layers=tuple(range(6)))
    collection = synthetic_collection(96, layout=layout, seed=0, longest=2000)
    loads = collection_loads(collection.samples, layout=layout, topology=Topology(8, 8)).astype(float)
    shares = (loads / loads.sum(axis=1, keepdims=True)).reshape(96, -1)
    correlation = np.corrcoef(shares)
    domains = np.array([sample.id.split("-")[0] for sample in collection.samples])
    prompts = np.array([sample.group for sample in collection.samples])
    same_prompt = prompts[:, None] == prompts
    same_domain = (domains[:, None] == domains) & ~same_prompt
    other = domains[:, None] != domains
    off = ~np.eye(96, dtype=bool)
    means = [correlation[kind & off].mean() for kind in (same_prompt, same_domain, other)]
    assert means[0] > means[1] + 0.02 > means[2] + 0.2
    assert (loads.max(axis=1) / loads.mean(axis=1)).mean() > 1.3


def test_a_collection_of_the_law_is_a_valid_file(tmp_path: Path) -> None:
    layout = ExpertLayout(num_experts=8, top_k=2, routed_layers=(0, 1))
    write_collection(synthetic_collection(20, layout=layout, seed=2, longest=100), tmp_path / "c.parquet")
    found = read_collection(tmp_path / "c.parquet", require_routes=True, vocab_size=256)
    assert found.layout == layout
    assert sorted({sample.group for sample in found.samples}) == ["prompt-0", "prompt-1", "prompt-2"]


PLAN_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from olmo_rl.config import *
from recipes import plan
rollouts = RolloutsConfig(source=Source.files, path=sys.argv[1])
packing = PackingConfig(kind=PackingKind.consecutive, max_tokens=12)
topology = PlanConfig(world_size=2, ep_degree=2)
batch = BatchConfig(samples_per_step=None)
groups = {"rollouts": rollouts, "packing": packing, "plan": topology, "batch": batch}
plan.run(Config(recipe=Recipe.plan, run_dir=sys.argv[2], **groups))
"""


def test_two_processes_without_torch_write_byte_identical_plans(tmp_path: Path) -> None:
    path = write_file(tmp_path / "c.parquet", [4, 7, 4, 6, 4, 5], layout=BOTH)
    written = []
    for seed in ("1", "2"):
        run_dir = tmp_path / f"run{seed}"
        run_dir.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", PLAN_WITHOUT_TORCH, str(path), str(run_dir)],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        written.append((run_dir / "plan.json").read_bytes())
        assert sorted(p.name for p in run_dir.iterdir()) == ["packs.png", "plan.json"]
    assert written[0] == written[1]


def test_the_command_refuses_bad_data_with_exit_code_2_and_leaves_only_hydras_files(tmp_path: Path) -> None:
    path = write_file(tmp_path / "c.jsonl", [4, 7, 4, 6, 4, 5], layout=BOTH)
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "+experiment=packed_moe",
        "recipe=plan",
        "rollouts=files",
    ]
    command += [f"rollouts.path={path}", "batch.samples_per_step=null", "packing.max_tokens=6"]
    command += [f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert f"{path}: sample 's1' has 7 tokens, more than the budget of 6" in done.stderr
    assert "Traceback" not in done.stderr
    assert {p.name for p in (tmp_path / "run").iterdir()} == {".hydra"}
    roomy = [word.replace("max_tokens=6", "max_tokens=12") for word in command]
    done = subprocess.run(roomy, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["blocks"][0]["packs_per_rank"] == 2


def balanced(path: Path, run_dir: Path, **balance: Any) -> Config:
    """Four ranks, EP2, the annealing planner with a fixed number of proposals."""
    return config_of(
        path,
        run_dir,
        packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=40),
        plan=PlanConfig(world_size=4, ep_degree=2),
        balance=BalanceConfig(kind=BalanceKind.anneal, proposals=500, seconds=float("inf"), **balance),
    )


FOUR = ExpertLayout(num_experts=4, top_k=2, routed_layers=(0, 2))
UNEVEN = [9, 14, 3, 22, 17, 5, 8, 30, 12, 6, 19, 4, 25, 7, 11, 16]


def test_a_balanced_plan_reports_bound_log_times_and_the_placement_floor_and_draws_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path / "c.parquet", UNEVEN, layout=FOUR)
    permutation = tmp_path / "deep" / "placement.json"
    document = planned(balanced(path, tmp_path / "run", write_permutation=str(permutation)))
    block = document["blocks"][0]
    assert block["after"]["expert_work"] < block["before"]["expert_work"]
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row[:1] in (["planned"], ["bound"])] == ["planned", "bound"]
    log = " ".join(out.split())
    assert "Step 0: start " in log
    assert "2,000 proposals" in log  # four chains of 500
    assert all(f"{part} " in log.partition("; ms: ")[2] for part in ("count", "start", "search", "verify"))
    # The floor against its definition, and the file: every layer holds every expert once.
    samples = read_collection(path, require_routes=True).samples
    loads = collection_loads(samples, layout=FOUR, topology=Topology(4, 2)).sum(axis=0)
    floor = loads.max(axis=0).sum() / loads.mean(axis=0).sum()
    assert f"balance/placement_floor {floor:.3f}: " in out
    placement = json.loads(permutation.read_text())
    assert placement["floor"] == pytest.approx(floor)
    assert 1 <= placement["reached"] <= placement["floor"]
    assert {layer: sorted(row) for layer, row in placement["permutation"].items()} == {
        "0": [0, 1, 2, 3],
        "2": [0, 1, 2, 3],
    }
    picture = imread(tmp_path / "run" / "loads.png")
    assert picture.shape[1] > 1000
    red = (picture[..., 0] > 0.8) & (picture[..., 1] < 0.25) & (picture[..., 2] < 0.25)
    half = picture.shape[1] // 2
    assert red[:, :half].any(), "expert work of the order of arrival"
    assert red[:, half:].any(), "expert work of the plan"


def test_column_loads_add_up_to_all_assignments_and_never_exceed_the_expert_work() -> None:
    loads = np.zeros((4, 2, 2), dtype=np.int32)
    loads[:, 0, 0], loads[:, 1, 1] = [3, 1, 2, 5], [1, 7, 0, 2]
    plan_of = PackPlan(packs=(((0,),), ((1,),), ((2,),), ((3,),)))
    ranks, work = column_loads(plan_of, loads=loads, topology=Topology(4, 2))
    assert ranks.tolist() == [[4, 8, 7, 2]]
    assert work.tolist() == [7 + 8], "the busiest rank of layer 0 and of layer 1"


def test_a_cost_model_predicts_seconds_in_the_report_and_refuses_what_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path / "c.parquet", UNEVEN, layout=FOUR)
    block = planned(balanced(path, tmp_path / "first"))["blocks"][0]
    names = ("expert_work", "token_work", "pair_work")
    works = [
        {n: block[when][n] for n in names} | {"columns": block[when]["packs_per_rank"]}
        for when in ("before", "after")
    ]
    model = CostModel(
        world_size=4,
        ep_degree=2,
        weights={"expert_work": 0.001, "token_work": 0.01, "pair_work": 0.0, "columns": 0.5, "update": 2.0},
        ranges={n: (min(w[n] for w in works), max(w[n] for w in works)) for n in works[0]},
        held_out=0.05,
        measured=20,
    )
    file = tmp_path / "model.json"
    write_cost_model(model, file)
    capsys.readouterr()
    planned(balanced(path, tmp_path / "second", cost_model=str(file)))
    out = capsys.readouterr().out
    for name, work in zip(("arrival", "planned"), works, strict=True):
        seconds = 2 + 0.001 * work["expert_work"] + 0.01 * work["token_work"] + 0.5 * work["columns"]
        assert f"Update time, step 0, {name}: {seconds:.3f} s" in out
    assert "20 measured updates, held-out error 5.0 %" in out
    write_cost_model(replace(model, ranges=model.ranges | {"token_work": (1.0, 2.0)}), file)
    with pytest.raises(Refusal, match="step 0, arrival: token_work .* outside the measured 1..2"):
        plan.run(balanced(path, tmp_path / "third", cost_model=str(file)))
    assert list((tmp_path / "third").iterdir()) == []


def test_pads_are_drawn_behind_the_documents_up_to_the_length_of_the_row(tmp_path: Path) -> None:
    lengths = [60] * 8
    chosen = plan_step(lengths, budget=100, topology=Topology(4))
    shares = {}
    for multiple in (1, 20, 80, 100):
        path = tmp_path / "p.png"
        draw_packs(chosen, lengths=lengths, budget=100, path=path, padding=Padding(multiple_of=multiple))
        pixels = np.rint(imread(path)[..., :3] * 255).astype(int)
        inside = pixels[60:-80, 60:-160].reshape(-1, 3)
        pads = (inside == [int(PADS[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=1).sum()
        shares[multiple] = pads / (len(inside) - (inside == 0xFF).all(axis=1).sum())
    assert shares == pytest.approx({1: 0.0, 20: 0.0, 80: 0.2, 100: 0.4}, abs=0.04)


def test_a_pack_of_shared_rows_is_one_bar_of_its_rows(tmp_path: Path) -> None:
    plan = PackPlan(packs=(((0, 1, 2),), ((3, 4, 5),)), rows=((60,), (90,)))
    draw_packs(plan, lengths=[50] * 6, budget=100, path=tmp_path / "p.png")
    pixels = np.rint(imread(tmp_path / "p.png")[..., :3] * 255).astype(int)
    inside = pixels[60:-80, 60:-160].reshape(-1, 3)
    grey = (inside == 0xEE).all(axis=1).sum()
    white = (inside == 0xFF).all(axis=1).sum()
    assert 1 - grey / (len(inside) - white) == pytest.approx(0.75, abs=0.08)
