"""Compiled blocks: how many graphs, why, and that they compute what uncompiled blocks compute.

Most tests trace with torch's counting or `aot_eager` backends, which need no compiler; one builds two regions
with inductor. Two ranks run compiled in tests/test_titan.py.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from model_cases import context_of, context_of_forest, random_routes, random_tokens, tiny_config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from training_cases import config_of, files, fit, write_files

from olmo_rl.config import (
    ModelConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recompute,
    ScoringConfig,
    TrainerConfig,
)
from olmo_rl.data.packs import PackContext, RouteMode, RouteTrace
from olmo_rl.planning.forest import Forest
from olmo_rl.policy import titan
from olmo_rl.policy.compiling import GraphLog, compile_regions, region
from olmo_rl.policy.hybrid import HybridDecoder, require_context
from olmo_rl.policy.moe import SwiGLU
from olmo_rl.types import Refusal


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Graphs of other tests' models would count, or save this test's from being compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(config: ModelConfig, *, recompute: Recompute = Recompute.none) -> HybridDecoder:
    model = HybridDecoder(config, attention="reference")
    model.init_weights(0)
    model.recompute = recompute
    model.set_expert_dtype(torch.bfloat16)
    return model


def documents(tokens: int, *, seed: int) -> list[int]:
    """Lengths that fill a row; their number and the longest differ from seed to seed."""
    longest = 1 + seed % tokens
    lengths: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while sum(lengths) < tokens:
        drawn = int(torch.randint(1, longest + 1, (1,), generator=generator))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return lengths


def context(config: ModelConfig, lengths: Sequence[int], *, seed: int) -> PackContext:
    routes = random_routes(config, tokens=sum(lengths), seed=seed) if config.routed_layers else None
    mode = RouteMode.live if routes is None else RouteMode.replay
    return context_of(lengths, mode=mode, routes=routes, trace=RouteTrace())


def score(model: HybridDecoder, lengths: Sequence[int], *, seed: int) -> None:
    """A pass without gradients over one pack."""
    with torch.no_grad():
        tokens = random_tokens(model.config, tokens=sum(lengths), seed=seed)
        model(tokens, context(model.config, lengths, seed=seed))


def train(
    model: HybridDecoder, lengths: Sequence[int], *, seed: int, pack: PackContext | None = None
) -> tuple[Tensor, list[Tensor]]:
    """A training pass over one pack: logits and gradients."""
    pack = pack or context(model.config, lengths, seed=seed)
    tokens = random_tokens(model.config, tokens=sum(lengths), seed=seed)
    logits = model(tokens, pack).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    return logits.detach(), list(torch.autograd.grad((logits * weight).sum(), list(model.parameters())))


def test_thirty_packs_of_one_length_compile_nothing_after_the_first() -> None:
    model, counter, log = build(tiny_config()), CompileCounter(), GraphLog()
    assert compile_regions(model, static_rows=True, backend=counter) == 33
    shapes = set()
    for seed in range(30):
        lengths = [48] if seed == 7 else [1] * 48 if seed == 8 else documents(48, seed=seed)
        shapes.add((len(lengths), max(lengths)))
        score(model, lengths, seed=seed)
        train(model, lengths, seed=seed)
        if seed == 0:
            first = counter.frame_count
            assert len(log.new()) == log.total == first
    assert len(shapes) > 20
    assert counter.frame_count == first
    assert log.new() == []


def test_rows_of_twenty_lengths_compile_a_bounded_number_of_graphs_each_with_its_reason() -> None:
    model, counter, log = build(tiny_config()), CompileCounter(), GraphLog()
    compile_regions(model, static_rows=False, backend=counter)
    for seed in range(20):
        lengths = documents(2 + 3 * seed, seed=seed)
        score(model, lengths, seed=seed)
        train(model, lengths, seed=seed)
    graphs = log.new()
    assert len(graphs) == log.total == counter.frame_count
    # The shared expert and the dense feed-forward have other widths; scoring runs without gradients.
    by_region = Counter(graph.region for graph in graphs)
    assert max(by_region.values()) == by_region["moe.forward"] == 4
    assert sorted(by_region.values()) == [2] * (len(by_region) - 1) + [4]
    assert {"kda._inputs", "kda.forward", "attention._project", "titan.forward", "titan._products"} <= set(
        by_region
    )
    assert by_region.keys() == {graph.region for graph in graphs if graph.reason == "first use"}
    reasons = [graph.reason for graph in graphs if graph.reason != "first use"]
    assert all("grad_mode" in reason or "size mismatch" in reason for reason in reasons)


def test_trees_compile_nothing_after_packs_of_two_lengths() -> None:
    """A flat pack and every tree run the same graphs, and a tree computes what it does uncompiled, up to the
    bfloat16 of experts.
    """
    compiled, plain, counter = build(tiny_config()), build(tiny_config()), CompileCounter()
    compile_regions(compiled, static_rows=False, backend=counter)
    for seed, lengths in enumerate(([9, 8], [21, 3, 1])):
        train(compiled, lengths, seed=seed)
    first = counter.frame_count
    forests = (
        Forest(lengths=(20, 17, 1, 5, 3), parents=(-1, 0, 1, 1, -1), leaves=(2, 3, 4, 1)),
        Forest(lengths=(3, 1, 1), parents=(-1, 0, 0), leaves=(1, 2)),
    )
    for forest in forests:
        routes = random_routes(tiny_config(), tokens=forest.boundaries[-1], seed=4)
        pack = context_of_forest(forest, mode=RouteMode.replay, routes=routes)
        logits, _ = train(compiled, forest.lengths, seed=4, pack=pack)
        expected, _ = train(plain, forest.lengths, seed=4, pack=pack)
        assert difference(logits, expected) <= 2e-2
    assert counter.frame_count == first


def test_the_log_tells_why_a_graph_was_compiled_again() -> None:
    class Doubler(nn.Module):
        @region()
        def double(self, x: Tensor) -> Tensor:
            return x * 2

    log, module = GraphLog(), Doubler()
    compile_regions(module, static_rows=True, backend=CompileCounter())
    module.double(torch.ones(3, 4))
    module.double(torch.ones(3, 5))
    first, second = log.new()
    assert (first.region, first.reason) == ("test_compile.double", "first use")
    assert "size mismatch at index 1. expected 4, actual 5" in second.reason
    assert log.new() == []


def test_a_region_that_breaks_into_parts_is_an_error_and_not_a_slow_path() -> None:
    class Reader(nn.Module):
        @region()
        def read(self, x: Tensor) -> Tensor:
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2

    module = Reader()
    compile_regions(module, static_rows=True, backend=CompileCounter())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        module.read(torch.ones(3, 4))


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("experts", [0, 8])
def test_compiled_blocks_compute_values_and_gradients_of_uncompiled_ones(experts: int) -> None:
    """Float32 blocks agree to 1e-5. Experts compute in bfloat16, where a last bit of float32 may turn into
    one of bfloat16 (2^-8 relative): they agree to 2e-2. Recomputation changes nothing.
    """
    config = tiny_config()
    if experts == 0:
        config = replace(
            config, num_experts=0, latent_dim=None, latent_norm=False, shared_hidden=0, dense_layers=[]
        )
    tolerance = 2e-2 if experts else 1e-5
    for recompute in Recompute if experts else [Recompute.none]:
        compiled, plain = build(config, recompute=recompute), build(config, recompute=recompute)
        compile_regions(compiled, static_rows=False, backend="aot_eager")
        for seed, lengths in enumerate(([5, 1, 2, 9, 3], [17, 4])):
            logits, gradients = train(compiled, lengths, seed=seed)
            expected, expected_gradients = train(plain, lengths, seed=seed)
            assert difference(logits, expected) <= tolerance
            for a, b in zip(gradients, expected_gradients, strict=True):
                assert difference(a, b) <= tolerance
    changed = context(config, [17, 4], seed=1), random_tokens(config, tokens=21, seed=1)
    other = changed[1].clone()
    other[:17] = (other[:17] + 1) % config.vocab_size
    with torch.no_grad():
        difference_by_row = (
            compiled(changed[1], changed[0]).logits - compiled(other, changed[0]).logits
        ).abs()
    assert difference_by_row[:17].amax(1).min() > 0
    assert difference_by_row[17:].max() == 0.0, "compiled rows of another document move by no bit"


def test_an_expert_without_rows_and_a_rank_without_rows_need_no_graph_of_their_own() -> None:
    experts = titan.build_experts(16, hidden=24, num_experts=4, top_k=2).inner_experts
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(weight.numel()))
    experts.compute_dtype = torch.bfloat16
    counter = CompileCounter()
    plain = [experts(x, counts) for x, counts in dispatched()]
    compile_regions(experts, static_rows=True, backend=counter)
    for (x, counts), expected in zip(dispatched(), plain, strict=True):
        assert torch.equal(experts(x, counts), expected)
    assert counter.frame_count == 1


def dispatched() -> Iterator[tuple[Tensor, Tensor]]:
    for counts in ([3, 0, 5, 2], [0, 0, 0, 0], [0, 1, 0, 0], [20, 30, 7, 9]):
        x = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(sum(counts)))
        yield x.requires_grad_(), torch.tensor(counts)


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor on CPU needs a C++ compiler: g++ is missing"
)
def test_inductor_builds_feed_forward_and_experts_that_equal_the_uncompiled_ones() -> None:
    dense = SwiGLU(16, hidden=32)
    experts = titan.build_experts(16, hidden=24, num_experts=4, top_k=2).inner_experts
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(weight.numel()))
    experts.compute_dtype = torch.bfloat16
    model, counts = nn.ModuleList([dense, experts]), torch.tensor([3, 0, 5, 2])
    x = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def run() -> list[tuple[Tensor, ...]]:
        weight = torch.randn(10, 16, generator=torch.Generator().manual_seed(2))
        outs = (dense(x), experts(x, counts))
        parameters = (list(dense.parameters()), list(experts.parameters()))
        return [
            (out.detach(), *torch.autograd.grad(out, (x, *mine), weight))
            for out, mine in zip(outs, parameters, strict=True)
        ]

    plain = run()
    compile_regions(model, static_rows=False)
    for got, expected, tolerance in zip(run(), plain, (1e-5, 2e-2), strict=True):
        assert max(difference(a, b) for a, b in zip(got, expected, strict=True)) <= tolerance


class TraceOnly(Callback):
    """Compile without a compiler."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        trainer.strategy.compile_backend = "aot_eager"


def test_a_run_counts_its_graphs_and_logs_them_by_reason_and_padded_rows_need_none_after_the_first_update(
    tmp_path: Path,
) -> None:
    collections = files(3)
    write_files(tmp_path, collections)
    config = config_of(
        tmp_path,
        packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=32, pad_to_budget=True),
        policy=PolicyConfig(compile=True),
        scoring=ScoringConfig(check_interval=1),
        trainer=TrainerConfig(max_steps=3),
    )
    run = fit(config, callbacks=[TraceOnly()])
    (event,) = run.events("compile")
    assert event["step"] == 1
    assert [row["compile/graphs"] for row in run.rows] == [len(event["graphs"])] * 3
    assert {graph["region"] for graph in event["graphs"]} >= {
        "attention._project",
        "kda._inputs",
        "titan._products",
    }
    assert {"first use"} < {graph["reason"] for graph in event["graphs"]}
    assert len({count for record in run.events("packing") for count in record["samples_per_pack"]}) > 1


def test_a_model_whose_forward_would_drop_boundaries_is_refused() -> None:
    class Deaf(nn.Module):
        def forward(self, tokens: Tensor, **unknown: Any) -> Tensor:
            return tokens

    with pytest.raises(
        Refusal, match=r"packing: the model \(Deaf\) takes no argument `context`.*packing=none"
    ):
        require_context(Deaf())
    model = build(tiny_config())
    require_context(model)
    model.layers["2"].mixer = Deaf()
    with pytest.raises(Refusal, match=r"packing: layers.2.mixer \(Deaf\)"):
        require_context(model)
