"""Router losses: hand numbers, then an oracle in float64 that takes one row after another, then the real
trainer in other packs, under recomputation, and with the synthetic tails of another expert-parallel degree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import compose_fast
from model_cases import context_of
from torch import Tensor
from training_cases import LAYOUT, MODEL, SHAPES, Run, config_of, fit, identical, samples_of, write_files
from training_cases import largest_difference as difference

from olmo_rl.config import (
    AuxGrouping,
    CountSource,
    LossConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recompute,
    Reduction,
)
from olmo_rl.data.collate import collate
from olmo_rl.data.files import write_collection
from olmo_rl.data.packs import RouteMode
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.moe import (
    RouterStatistics,
    RouterTotals,
    balance_penalty,
    routed_length,
    router_losses,
    router_statistics,
)
from olmo_rl.policy.titan import Routed
from olmo_rl.refusals import refusals
from olmo_rl.types import Collection, Sample, Topology

EXACT = 1e-12  # of float64 sums in another order
ONE_RANK = Topology(1)
PACK, SEQUENCE = AuxGrouping.pack, AuxGrouping.sequence
TOKEN, RESPONSE = Reduction.token, Reduction.response


def statistics_of(
    scores: Sequence[Sequence[float]],
    *,
    ids: Sequence[Sequence[int]],
    lengths: Sequence[int],
    logits: Tensor | None = None,
    live: Sequence[Sequence[int]] | None = None,
    pads: int = 0,
    mode: RouteMode = RouteMode.live,
) -> RouterStatistics:
    """One layer's statistics as a decoder of one layer would give them."""
    table = torch.tensor(scores, dtype=torch.float64)
    chosen = torch.tensor(ids)
    routed = Routed(gates=table, ids=chosen, scores=table, logits=table.log() if logits is None else logits)
    context = context_of(
        lengths, mode=mode, routes={0: chosen} if mode is RouteMode.replay else None, pads=pads
    )
    now = chosen if live is None else torch.tensor(live)
    return RouterStatistics(*(part[None] for part in router_statistics(routed, live=now, context=context)))


def losses(statistics: RouterStatistics, *, rows: int, documents: int, **form: Any) -> list[float]:
    totals = RouterTotals(rows=rows, documents=documents)
    return [float(x) for x in router_losses(statistics, config=LossConfig(**form), totals=totals)]


# Six rows with means (.45, .3485, .10075, .10075), top-1 to experts 0 0 1 1 2 3; pads repeat row 0.
FIRST = [0.5111, 0.2, 0.18, 0.1089]
SIX = [
    FIRST,
    [0.46778, 0.3582, 0.0749, 0.09912],
    [0.40778, 0.3982, 0.0949, 0.09912],
    [0.43778, 0.3882, 0.0849, 0.08912],
    [0.44778, 0.3682, 0.0749, 0.10912],
    [0.42778, 0.3782, 0.0949, 0.09912],
]
CHOSEN = [[0], [0], [1], [1], [2], [3]]


def test_pads_leave_the_balancing_loss_of_six_rows_at_1_199_where_counting_them_gives_1_546() -> None:
    bare = statistics_of(SIX, ids=CHOSEN, lengths=[6])
    rows, ids = SIX + [FIRST] * 6, CHOSEN + [[0]] * 6
    padded = statistics_of(rows, ids=ids, lengths=[6, 4, 2], pads=6)
    naive = statistics_of(rows, ids=ids, lengths=[6, 6])
    assert losses(bare, rows=6, documents=1)[0] == pytest.approx(1.199, abs=5e-4)
    assert losses(naive, rows=12, documents=2)[0] == pytest.approx(1.546, abs=5e-4)
    for grouping, reduction in itertools.product(AuxGrouping, Reduction):
        form = {"router_aux_grouping": grouping, "router_aux_reduction": reduction}
        form |= {"router_z_reduction": reduction}
        want = losses(bare, rows=6, documents=1, **form)
        assert losses(padded, rows=6, documents=1, **form) == pytest.approx(want, rel=EXACT)


def test_documents_of_two_and_six_tokens_with_penalties_1_and_3_average_to_2_5_and_to_2() -> None:
    # All to expert 0 of four: the penalty is 4 x its mean score. z is (log of the sum of exp)^2 = 1 and 3.
    scores = [[0.25] * 4] * 2 + [[0.75, 0.15, 0.05, 0.05]] * 6
    ones = torch.full((8, 4), 1.0 - math.log(4), dtype=torch.float64)
    logits = torch.cat([ones[:2], ones[2:] - 1.0 + math.sqrt(3)])
    statistics = statistics_of(scores, ids=[[0]] * 8, lengths=[2, 6], logits=logits)
    for reduction, expected in ((TOKEN, 2.5), (RESPONSE, 2.0)):
        form = {"router_aux_reduction": reduction, "router_z_reduction": reduction}
        found = losses(statistics, rows=8, documents=2, router_aux_grouping=SEQUENCE, **form)
        assert found == pytest.approx([expected, expected], rel=EXACT)
    # As one set: 4 x the mean score of all eight rows, and then every document has that penalty.
    for reduction in Reduction:
        form = {"router_aux_reduction": reduction, "router_z_reduction": reduction}
        assert losses(statistics, rows=8, documents=2, **form)[0] == pytest.approx(2.5, rel=EXACT)


def test_the_penalty_is_1_at_balance_and_0_for_a_set_without_rows() -> None:
    scores, rows = torch.tensor([[1.25, 0.75], [1.0, 1.0], [0.0, 0.0]]), torch.tensor([2, 2, 0])
    found = balance_penalty(torch.tensor([[2, 0], [1, 1], [0, 0]]), scores=scores, rows=rows)
    assert found.tolist() == [1.25, 1.0, 0.0]  # 2 (1 x .625), 2 (.5 x .5 + .5 x .5)


def test_scores_that_do_not_add_to_1_are_normalised_by_token_first() -> None:
    statistics = statistics_of([[0.8, 0.4]], ids=[[0]], lengths=[1])
    assert losses(statistics, rows=1, documents=1)[0] == pytest.approx(4 / 3)


def test_the_last_row_of_every_document_takes_no_part_under_replay() -> None:
    scores = [[0.7, 0.3], [0.6, 0.4], [0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.3, 0.7]]
    ids = [[0], [1], [1], [0], [1], [0]]
    statistics = statistics_of(scores, ids=ids, lengths=[3, 1, 2], mode=RouteMode.replay)
    assert statistics.rows.tolist() == [[2, 0, 1]]
    assert statistics.dispatched.tolist() == [[[1, 1], [0, 0], [0, 1]]]
    torch.testing.assert_close(
        statistics.scores[0], torch.tensor([[1.3, 0.7], [0, 0], [0.5, 0.5]], dtype=torch.float64)
    )
    live = statistics_of(scores, ids=ids, lengths=[3, 1, 2])
    assert live.rows.tolist() == [[3, 1, 2]]
    # One row each in sets of two and one; a document without rows is no document of the mean.
    form = {"router_aux_grouping": SEQUENCE, "router_aux_reduction": RESPONSE}
    first, last = 2 * (0.5 * 0.65 + 0.5 * 0.35), 2 * 0.5
    assert losses(statistics, rows=3, documents=2, **form)[0] == pytest.approx((first + last) / 2)


def test_counts_come_from_the_ids_that_were_used_or_from_what_top_k_chooses_now() -> None:
    scores = [[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]]
    statistics = statistics_of(
        scores, ids=[[1], [1], [0]], live=[[0], [0], [0]], lengths=[3], mode=RouteMode.replay
    )
    used = losses(statistics, rows=2, documents=1, router_count_source=CountSource.dispatch)
    now = losses(statistics, rows=2, documents=1, router_count_source=CountSource.current)
    assert used[0] == pytest.approx(2 * 0.35)
    assert now[0] == pytest.approx(2 * 0.65)
    assert used[1] == now[1]


# The oracle


def decoder_of(weights: dict[str, Tensor] | None = None) -> HybridDecoder:
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.init_weights(0)
    decoder.double()
    if weights is not None:
        decoder.load_state_dict(weights)
    return decoder


def router_calls(
    decoder: HybridDecoder, samples: Sequence[Sample], *, topology: Topology = ONE_RANK, mode: RouteMode
) -> list[tuple[Tensor, list[list[int]]]]:
    """Logits [T, E] with their graph and the ids of every routed layer, from one forward of these samples."""
    calls: list[tuple[Tensor, list[list[int]]]] = []
    hooks = [
        block.moe.router.register_forward_hook(lambda m, a, out: calls.append((out.logits, out.ids.tolist())))
        for block in decoder.blocks
        if block.moe_enabled
    ]
    pack = collate(samples, layout=LAYOUT, topology=topology)
    decoder(pack["tokens"], pack.context(mode=mode), None)
    for hook in hooks:
        hook.remove()
    return calls


def oracle(
    decoder: HybridDecoder, packs: Sequence[Sequence[Sample]], *, mode: RouteMode, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Balancing loss and z-loss of a step, from the definition: row after row, expert after expert."""
    cut = 1 if mode is RouteMode.replay else 0
    documents = sum(len(sample) > cut for pack in packs for sample in pack)
    all_rows = sum(len(sample) - cut for pack in packs for sample in pack)
    balance = z = torch.zeros((), dtype=torch.float64)
    for pack in packs:
        starts = [sum(len(s) for s in pack[:i]) for i in range(len(pack))]
        rows_of = [list(range(a, a + len(s) - cut)) for a, s in zip(starts, pack, strict=True)]
        for logits, ids in router_calls(decoder, pack, mode=mode):
            by_document = [switch(logits, rows=rows, ids=ids, config=config) for rows in rows_of]
            together = switch(logits, rows=[r for rows in rows_of for r in rows], ids=ids, config=config)
            for rows, alone in zip(rows_of, by_document, strict=True):
                if not rows:
                    continue
                penalty = together if config.router_aux_grouping is PACK else alone
                by_token = config.router_aux_reduction is TOKEN
                balance = balance + penalty * (len(rows) / all_rows if by_token else 1 / documents)
                for row in rows:
                    square = torch.log(sum(torch.exp(x) for x in logits[row])) ** 2
                    by_token = config.router_z_reduction is TOKEN
                    z = z + square / (all_rows if by_token else len(rows) * documents)
    return balance, z


def switch(logits: Tensor, *, rows: list[int], ids: list[list[int]], config: LossConfig) -> Tensor:
    """E * sum_e f_e P_e over these rows."""
    total = torch.zeros((), dtype=torch.float64)
    if not rows:
        return total
    experts = logits.shape[1]
    for e in range(experts):
        assigned, mass = 0, torch.zeros((), dtype=torch.float64)
        for row in rows:
            now = sorted(range(experts), key=lambda i: -float(logits[row, i].detach()))[: MODEL.top_k]  # noqa: B023
            used = ids[row] if config.router_count_source is CountSource.dispatch else now
            assigned += used.count(e)
            mass = mass + torch.exp(logits[row, e]) / sum(torch.exp(x) for x in logits[row])
        total = total + experts * assigned / (len(rows) * MODEL.top_k) * mass / len(rows)
    return total


def gradients_of(decoder: HybridDecoder, loss: Tensor) -> dict[str, Tensor]:
    decoder.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in decoder.named_parameters()
    }


def form_of(grouping: AuxGrouping, aux: Reduction, z: Reduction, source: CountSource) -> LossConfig:
    return LossConfig(
        router_aux_weight=0.3,
        router_z_weight=0.02,
        router_aux_grouping=grouping,
        router_aux_reduction=aux,
        router_z_reduction=z,
        router_count_source=source,
    )


def shares(
    decoder: HybridDecoder,
    packs: Sequence[Sequence[Sample]],
    *,
    config: LossConfig,
    mode: RouteMode = RouteMode.replay,
    topology: Topology = ONE_RANK,
) -> tuple[Tensor, Tensor]:
    """The step's router losses as the trainer forms them: each pack's share under global totals, added."""
    lengths = [routed_length(len(sample), mode=mode) for pack in packs for sample in pack]
    totals = RouterTotals(rows=sum(lengths), documents=sum(length > 0 for length in lengths))
    balance = z = torch.zeros((), dtype=torch.float64)
    for samples in packs:
        pack = collate(samples, layout=LAYOUT, topology=topology)
        out = decoder(pack["tokens"], pack.context(mode=mode), None)
        assert out.router is not None
        more = router_losses(out.router, config=config, totals=totals)
        balance, z = balance + more[0], z + more[1]
    return balance, z


def step_samples() -> list[Sample]:
    """Documents of 1 to 11 tokens; the one of a single token has no row that an engine chose."""
    return samples_of(((1, 0), *SHAPES), group_size=3)


PACKS = [[0, 1, 2], [3], [4, 5, 6], [7, 8]]


def packs_of(samples: Sequence[Sample], packs: Sequence[Sequence[int]] = PACKS) -> list[list[Sample]]:
    return [[samples[i] for i in pack] for pack in packs]


@pytest.mark.parametrize("mode", [RouteMode.replay, RouteMode.live])
@pytest.mark.parametrize(
    "form",
    [
        form_of(PACK, TOKEN, TOKEN, CountSource.dispatch),
        form_of(PACK, RESPONSE, RESPONSE, CountSource.current),
        form_of(SEQUENCE, TOKEN, RESPONSE, CountSource.current),
        form_of(SEQUENCE, RESPONSE, TOKEN, CountSource.dispatch),
    ],
    ids=lambda form: f"{form.router_aux_grouping.value}-{form.router_aux_reduction.value}",
)
def test_every_form_and_its_gradients_are_the_oracles(form: LossConfig, mode: RouteMode) -> None:
    decoder, packs = decoder_of(), packs_of(step_samples())
    balance, z = shares(decoder, packs, config=form, mode=mode)
    found = gradients_of(decoder, form.router_aux_weight * balance + form.router_z_weight * z)
    want_balance, want_z = oracle(decoder, packs, mode=mode, config=form)
    want = gradients_of(decoder, form.router_aux_weight * want_balance + form.router_z_weight * want_z)
    assert balance.item() == pytest.approx(float(want_balance), rel=EXACT)
    assert z.item() == pytest.approx(float(want_z), rel=EXACT)
    assert difference(found, want) < EXACT
    assert max(float(gradient.abs().max()) for gradient in want.values()) > 1e-3


def test_all_forms_differ_from_each_other() -> None:
    decoder, packs = decoder_of(), packs_of(step_samples())
    with torch.no_grad():
        values = {
            (grouping, aux, source): float(
                shares(decoder, packs, config=form_of(grouping, aux, TOKEN, source))[0]
            )
            for grouping, aux, source in itertools.product(AuxGrouping, Reduction, CountSource)
        }
        by_z = [
            float(shares(decoder, packs, config=form_of(PACK, TOKEN, z, CountSource.dispatch))[1])
            for z in Reduction
        ]
    ordered = sorted([*values.values()])
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 1e-4
    assert abs(by_z[0] - by_z[1]) > 1e-3


def test_grouped_by_sequence_no_packing_changes_value_or_gradients_and_grouped_by_pack_it_does() -> None:
    decoder, samples = decoder_of(), step_samples()
    layouts = [PACKS, [[i] for i in range(9)], [list(range(9))], [[8, 2, 5], [1, 0, 7, 3], [6, 4]]]
    for aux, z, source in itertools.product((TOKEN, RESPONSE), (RESPONSE,), CountSource):
        form = form_of(SEQUENCE, aux, z, source)
        found = [shares(decoder, packs_of(samples, packs), config=form) for packs in layouts]
        grads = [gradients_of(decoder, 0.3 * b + 0.02 * zs) for b, zs in found]
        for other in grads[1:]:
            assert difference(other, grads[0]) < EXACT
        assert [float(b) for b, _ in found] == pytest.approx([float(found[0][0])] * 4, rel=EXACT)
    with torch.no_grad():
        form = form_of(PACK, TOKEN, TOKEN, CountSource.dispatch)
        whole, single = (float(shares(decoder, packs_of(samples, p), config=form)[0]) for p in layouts[1:3])
    assert abs(whole - single) > 0.05


@pytest.mark.parametrize("grouping", AuxGrouping)
def test_the_synthetic_tails_of_another_expert_parallel_degree_change_nothing(grouping: AuxGrouping) -> None:
    """Up to rounding: with other tails an expert multiplies another number of rows, and some CPUs' kernels
    then round the real ones otherwise.
    """
    packs = packs_of(step_samples())
    topologies = (Topology(1), Topology(2, 2), Topology(4, 4))
    tails = [collate(packs[0], layout=LAYOUT, topology=t).routes for t in topologies]
    assert not torch.equal(tails[0], tails[1]), "tails must differ to bite"
    for source in CountSource:
        form = form_of(grouping, TOKEN, RESPONSE, source)
        found = []
        for topology in topologies:
            decoder = decoder_of()
            balance, z = shares(decoder, packs, config=form, topology=topology)
            found.append((float(balance), float(z), gradients_of(decoder, balance + z)))
        for other in found[1:]:
            assert other[:2] == pytest.approx(found[0][:2], rel=EXACT)
            assert difference(other[2], found[0][2]) < EXACT
    # Had tails taken part, so would what synthetic experts made of them, z-loss included.
    last = [len(packs[0][0]) + len(packs[0][1]) - 1]
    seen = [router_calls(decoder_of(), packs[0], topology=t, mode=RouteMode.replay) for t in topologies]
    assert torch.equal(seen[0][0][0][last], seen[1][0][0][last])
    assert not torch.equal(seen[0][1][0][last], seen[1][1][0][last])


# The trainer


def run_step(run_dir: Path, **sections: Any) -> Run:
    write_files(run_dir, [samples_of(SHAPES)])
    return fit(config_of(run_dir, **sections), double=True)


def budget(tokens: int) -> PackingConfig:
    return PackingConfig(kind=PackingKind.consecutive, max_tokens=tokens)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One step in several packs, without router losses."""
    return run_step(tmp_path_factory.mktemp("plain"), packing=budget(20))


@pytest.mark.parametrize(
    "form",
    [
        form_of(PACK, TOKEN, TOKEN, CountSource.dispatch),
        form_of(SEQUENCE, RESPONSE, RESPONSE, CountSource.current),
    ],
    ids=["pack", "sequence"],
)
def test_the_trainer_adds_both_losses_to_the_objective_once(
    plain: Run, tmp_path: Path, form: LossConfig
) -> None:
    run = run_step(tmp_path / "run", packing=budget(20), loss=form)
    decoder = decoder_of(run.recorder.weights[0])
    plan = run.recorder.batches[0].plan
    assert plan is not None
    packs = packs_of(samples_of(SHAPES), plan.packs[0])
    assert len(packs) > 1
    balance, z = oracle(decoder, packs, mode=RouteMode.replay, config=form)
    terms, without = run.events("optimizer")[0]["terms"], plain.events("optimizer")[0]["terms"]
    assert terms["loss/router_balance"] == pytest.approx(float(balance), rel=EXACT)
    assert terms["loss/router_z"] == pytest.approx(float(z), rel=EXACT)
    added = 0.3 * balance + 0.02 * z
    assert terms["loss/total"] == pytest.approx(without["loss/total"] + float(added), rel=EXACT)
    more = gradients_of(decoder, added)
    expected = {name: gradient + more[name] for name, gradient in plain.recorder.gradients[0].items()}
    assert difference(run.recorder.gradients[0], expected) < 1e-11


def test_recomputation_doubles_no_router_loss_and_changes_no_bit(tmp_path: Path) -> None:
    form = form_of(SEQUENCE, RESPONSE, TOKEN, CountSource.current)
    runs = [
        run_step(
            tmp_path / choice.value, packing=budget(20), loss=form, policy=PolicyConfig(recompute=choice)
        )
        for choice in Recompute
    ]
    for run in runs[1:]:
        assert identical(run.recorder.gradients[0], runs[0].recorder.gradients[0])
        assert run.events("optimizer")[0]["terms"] == runs[0].events("optimizer")[0]["terms"]


def test_packed_and_unpacked_steps_agree_where_the_loss_is_grouped_by_sequence(tmp_path: Path) -> None:
    form = form_of(SEQUENCE, TOKEN, RESPONSE, CountSource.dispatch)
    packings = {"packed": budget(64), "apart": budget(20), "unpacked": PackingConfig()}
    runs = [run_step(tmp_path / name, packing=packing, loss=form) for name, packing in packings.items()]
    for run in runs[1:]:
        assert difference(run.recorder.gradients[0], runs[0].recorder.gradients[0]) < 1e-11
        for name in ("loss/router_balance", "loss/router_z"):
            want = runs[0].events("optimizer")[0]["terms"][name]
            assert run.events("optimizer")[0]["terms"][name] == pytest.approx(want, rel=EXACT)


def test_the_planner_may_arrange_documents_whose_balancing_loss_is_their_own() -> None:
    base = ("+experiment=balanced_moe", "loss.router_aux_weight=0.01")
    (line,) = refusals(compose_fast(*base))
    assert line.startswith("balance=anneal loss.router_aux_weight=0.01 loss.router_aux_grouping=pack: ")
    assert refusals(compose_fast(*base, "loss.router_aux_grouping=sequence")) == []


# How evenly experts are used


def test_expert_entropy_is_global_by_layer_over_recorded_rows(tmp_path: Path) -> None:
    samples = samples_of(SHAPES)
    for sample in samples:  # first routed layer: experts 0 and 1 alone; second: as they are
        sample.routes[:, 0] = [0, 1]
    write_files(tmp_path / "run", [samples])
    run = fit(config_of(tmp_path / "run", packing=budget(20)))
    counts = [[0] * 4, [0] * 4]
    for sample in samples:
        for row in sample.routes:
            for layer in (0, 1):
                for id in row[layer]:
                    counts[layer][id] += 1
    by_layer = []
    for layer in counts:
        parts = [n / sum(layer) for n in layer if n]
        by_layer.append(-sum(p * math.log(p) for p in parts) / math.log(4))
    assert by_layer[0] == pytest.approx(0.5)
    assert run.events("replay")[0]["expert_entropy"] == pytest.approx(by_layer, rel=1e-12)
    row = run.rows[0]
    assert row["replay/expert_entropy"] == pytest.approx(sum(by_layer) / 2, rel=1e-6)
    assert row["replay/expert_entropy_min"] == pytest.approx(0.5, rel=1e-6)


def test_one_expert_for_every_token_is_accepted_and_logged_as_entropy_0(tmp_path: Path) -> None:
    samples = samples_of(SHAPES)
    for sample in samples:
        sample.routes = sample.routes[..., :1] * 0
    model = replace(MODEL, top_k=1, route_norm=False)
    config = config_of(tmp_path / "run", model=model)
    write_top_1(tmp_path / "run", samples)
    run = fit(config)
    assert run.rows[0]["replay/expert_entropy"] == run.rows[0]["replay/expert_entropy_min"] == 0.0
    assert run.events("replay")[0]["mismatches"] == 0


def write_top_1(run_dir: Path, samples: list[Sample]) -> None:
    layout = replace(LAYOUT, top_k=1)
    collection = Collection(samples=samples, layout=layout, source="test")
    write_collection(collection, run_dir / "files" / "collection-00000.parquet")
