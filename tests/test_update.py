"""One update through the real trainer, in float64: gradients against an oracle that takes one document at a
time, and against the same update under other budgets, filler, recomputation and scoring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from composing import CONF, compose
from oracle import OracleDocument, group_advantages, log_probability, number, policy_objective
from torch import Tensor
from training_cases import (
    LAYOUT,
    MODEL,
    SHAPES,
    Run,
    config_of,
    fit,
    identical,
    largest_difference,
    masked,
    samples_of,
    write_files,
)

from olmo_rl.config import (
    BatchConfig,
    KlEstimator,
    LossConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recompute,
    Reduction,
    ScoringConfig,
    ScoringMode,
    TrainerConfig,
)
from olmo_rl.data.collate import collate
from olmo_rl.data.packs import RouteMode
from olmo_rl.policy.hybrid import DecoderOutput, HybridDecoder
from olmo_rl.types import Sample, Topology

EXACT = 1e-12  # of float64 sums in another order
GRPO = {"kind": "grpo", "clip_low": 0.2, "clip_high": 0.28, "reduction": "token"}


def budget(tokens: int) -> PackingConfig:
    return PackingConfig(kind=PackingKind.consecutive, max_tokens=tokens)


def step_samples() -> list[Sample]:
    """Responses of 1 to 7 tokens; interior tokens of sample 2 and all of sample 5 are not trained."""
    samples = samples_of(SHAPES)
    samples[2] = masked(samples[2], keep=(4, 5, 8, 10))
    samples[5] = masked(samples[5])
    return samples


def run_step(run_dir: Path, samples: Sequence[Sample], **sections: object) -> Run:
    write_files(run_dir, [samples])
    return fit(config_of(run_dir, **sections), double=True)


def decoder_with(weights: dict[str, Tensor]) -> HybridDecoder:
    """A float64 decoder of its own with these weights."""
    decoder = HybridDecoder(MODEL, attention="reference").double()
    decoder.load_state_dict(weights)
    return decoder


def forward_alone(decoder: HybridDecoder, samples: Sequence[Sample]) -> DecoderOutput:
    pack = collate(samples, layout=LAYOUT, topology=Topology(1))
    return decoder(pack["tokens"], pack.context(mode=RouteMode.replay), None)


def oracle_documents(
    samples: Sequence[Sample],
    *,
    decoder: HybridDecoder,
    anchors: HybridDecoder | None = None,
    advantages: Sequence[float] | None = None,
) -> list[OracleDocument]:
    """Every sample alone in a forward of its own; anchors by `anchors`, else the policy itself."""
    if advantages is None:
        rewards, groups = [s.reward for s in samples], [s.group for s in samples]
        advantages = group_advantages(rewards, groups, normalize=True)
    documents = []
    for sample, advantage in zip(samples, advantages, strict=True):
        mask = sample.response_mask if sample.loss_mask is None else sample.loss_mask
        document = OracleDocument(
            tokens=sample.tokens.tolist(),
            logits=forward_alone(decoder, [sample]).logits,
            mask=mask.tolist(),
            anchor=[],
            behavior=sample.behavior_logprobs.tolist(),
            reference=[] if sample.ref_logprobs is None else sample.ref_logprobs.tolist(),
            advantage=advantage,
        )
        other = document
        if anchors is not None:
            other = replace(document, logits=forward_alone(anchors, [sample]).logits.detach())
        document.anchor = [
            number(log_probability(other, t)) if t in document.scored() else 0.0
            for t in range(len(document.tokens))
        ]
        documents.append(document)
    return documents


def gradients_of(decoder: HybridDecoder, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in decoder.named_parameters()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The step in one pack."""
    return run_step(tmp_path_factory.mktemp("whole"), step_samples())


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same step in several packs of unequal token counts."""
    return run_step(tmp_path_factory.mktemp("apart"), step_samples(), packing=budget(20))


def test_the_update_has_the_gradients_of_the_oracle(whole: Run) -> None:
    decoder = decoder_with(whole.recorder.weights[0])
    documents = oracle_documents(step_samples(), decoder=decoder)
    loss = policy_objective(documents, settings=GRPO)
    terms = whole.events("optimizer")[0]["terms"]
    assert terms["loss/total"] == pytest.approx(number(loss), rel=EXACT)
    assert largest_difference(whole.recorder.gradients[0], gradients_of(decoder, loss)) < EXACT
    assert whole.events("replay")[0]["overlap"] < 0.9, "replayed routes must differ from live ones to bite"


@pytest.mark.parametrize("tokens", [12, 31])
def test_no_budget_changes_the_gradients(whole: Run, tmp_path: Path, tokens: int) -> None:
    run = run_step(tmp_path / "run", step_samples(), packing=budget(tokens))
    assert run.events("packing")[0]["packs"] > 1
    assert largest_difference(run.recorder.gradients[0], whole.recorder.gradients[0]) < EXACT
    assert run.events("optimizer")[0]["grad_norm"] == pytest.approx(
        whole.events("optimizer")[0]["grad_norm"], rel=1e-6
    )


def test_no_order_of_the_samples_changes_the_gradients(whole: Run, tmp_path: Path) -> None:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    samples = step_samples()
    run = run_step(tmp_path / "run", [samples[i] for i in order], packing=budget(20))
    assert largest_difference(run.recorder.gradients[0], whole.recorder.gradients[0]) < EXACT


def test_the_mean_of_responses_is_the_oracles_in_one_pack_and_in_many(tmp_path: Path) -> None:
    loss = LossConfig(reduction=Reduction.response)
    runs = [
        run_step(tmp_path / str(tokens), step_samples(), loss=loss, packing=budget(tokens))
        for tokens in (64, 13)
    ]
    decoder = decoder_with(runs[0].recorder.weights[0])
    documents = oracle_documents(step_samples(), decoder=decoder)
    expected = policy_objective(documents, settings=GRPO | {"reduction": "response"})
    gradients = gradients_of(decoder, expected)
    for run in runs:
        assert run.events("optimizer")[0]["terms"]["loss/total"] == pytest.approx(number(expected), rel=EXACT)
        assert largest_difference(run.recorder.gradients[0], gradients) < EXACT
    assert runs[0].events("optimizer")[0]["global_responses"] == 7, "the masked response does not count"


def test_importance_weights_and_reference_kl_have_the_gradients_of_the_oracle(tmp_path: Path) -> None:
    loss = LossConfig(tis_low=0.7, tis_high=1.6, kl=KlEstimator.k2, kl_coef=0.05)
    run = run_step(tmp_path / "run", step_samples(), loss=loss, packing=budget(20))
    decoder = decoder_with(run.recorder.weights[0])
    expected = policy_objective(
        oracle_documents(step_samples(), decoder=decoder),
        settings=GRPO | {"tis_low": 0.7, "tis_high": 1.6, "kl": "k2", "kl_coef": 0.05},
    )
    terms = run.events("optimizer")[0]["terms"]
    assert 0 < terms["loss/tis_low"] < 1
    assert 0 < terms["loss/tis_high"] < 1
    assert terms["loss/kl"] > 0
    assert largest_difference(run.recorder.gradients[0], gradients_of(decoder, expected)) < EXACT


def test_masked_packs_change_neither_a_bit_of_the_gradients_nor_the_counters(
    apart: Run, tmp_path: Path
) -> None:
    filler = [masked(sample) for sample in samples_of(((8, 8), (9, 9), (6, 12)), seed=9, prefix="filler")]
    run = run_step(tmp_path / "run", [*step_samples(), *filler], packing=budget(20))
    assert run.events("packing")[0]["packs"] == apart.events("packing")[0]["packs"] + 3
    assert identical(run.recorder.gradients[0], apart.recorder.gradients[0])
    ours, theirs = run.events("optimizer")[0], apart.events("optimizer")[0]
    for name in ("grad_norm", "terms", "global_scored_tokens", "global_responses", "local_scored_tokens"):
        left, right = ours[name], theirs[name]
        if name == "terms":  # the routers see the filler's rows; weights of their losses are 0 here
            left = {key: value for key, value in left.items() if "router" not in key}
            right = {key: value for key, value in right.items() if "router" not in key}
        assert left == right, name


def test_a_masked_sample_inside_a_pack_does_not_touch_the_others(tmp_path: Path) -> None:
    samples = step_samples()
    without = [sample for sample in samples if sample.loss_mask is None or sample.loss_mask.any()]
    # The group of the masked sample must stay whole: its statistics come from all its rewards.
    partner = next(s for s in without if s.group == samples[5].group)
    others = [s for s in without if s is not partner]
    with_masked = [*others[:3], samples[5], *others[3:]]
    runs = [
        run_step(tmp_path / name, chosen) for name, chosen in (("with", with_masked), ("without", others))
    ]
    assert runs[0].events("packing")[0]["samples_per_pack"] == [7]
    assert largest_difference(runs[0].recorder.gradients[0], runs[1].recorder.gradients[0]) < EXACT
    assert runs[0].events("optimizer")[0]["global_scored_tokens"] == sum(int(s.scored.sum()) for s in others)


@pytest.mark.parametrize("mode", [ScoringMode.auto, ScoringMode.always])
@pytest.mark.parametrize("recompute", [Recompute.full, Recompute.selective])
def test_recomputation_and_scoring_first_change_no_bit_of_the_gradients(
    apart: Run, tmp_path: Path, recompute: Recompute, mode: ScoringMode
) -> None:
    run = run_step(
        tmp_path / "run",
        step_samples(),
        packing=budget(20),
        policy=PolicyConfig(recompute=recompute),
        scoring=ScoringConfig(mode=mode),
    )
    assert len(set(run.events("packing")[0]["samples_per_pack"])) > 1
    assert run.module.policy.recompute is recompute
    assert identical(run.recorder.gradients[0], apart.recorder.gradients[0])
    assert run.events("replay")[0]["mismatches"] == 0


def test_an_unpacked_update_has_the_same_gradients(whole: Run, tmp_path: Path) -> None:
    run = run_step(tmp_path / "run", step_samples(), packing=PackingConfig())
    assert run.events("packing")[0]["samples_per_pack"] == [1] * 8
    assert largest_difference(run.recorder.gradients[0], whole.recorder.gradients[0]) < EXACT


LOSSES = sorted(path.stem for path in (CONF / "loss").glob("*.yaml"))
BONUS = ("loss.entropy_coef=0.02", "loss.reduction=response")


@pytest.mark.parametrize(
    "overrides", [*((f"loss={name}",) for name in LOSSES), BONUS], ids=lambda overrides: overrides[0]
)
def test_every_loss_that_conf_offers_has_the_gradients_of_the_oracle(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """In a second step, where policy, anchor and behaviour differ, so that clips and weights act."""
    loss = compose(*overrides).loss
    samples = samples_of((*SHAPES, *SHAPES), seed=3)
    samples[9] = masked(samples[9], keep=(3, 4))
    run = run_step(
        tmp_path / "run",
        samples,
        loss=loss,
        packing=budget(20),
        batch=BatchConfig(samples_per_step=8),
        trainer=TrainerConfig(max_steps=2),
    )
    before, after = (decoder_with(weights) for weights in run.recorder.weights)
    advantages = group_advantages(
        [s.reward for s in samples], [s.group for s in samples], normalize=loss.normalize_advantages
    )
    held = [float(np.float32(advantage)) for advantage in advantages[8:]]  # packs hold float32
    documents = oracle_documents(samples[8:], decoder=after, anchors=before, advantages=held)
    settings = {f.name: getattr(loss, f.name) for f in fields(loss)}
    expected = policy_objective(
        documents, settings={name: getattr(value, "value", value) for name, value in settings.items()}
    )
    gradients = gradients_of(after, expected)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-4
    assert run.events("optimizer")[1]["terms"]["loss/total"] == pytest.approx(number(expected), rel=1e-10)
    assert largest_difference(run.recorder.gradients[1], gradients) < 1e-10


def test_steps_of_one_file_are_anchored_at_the_policy_before_the_first_of_them(tmp_path: Path) -> None:
    samples = samples_of((*SHAPES, *SHAPES), seed=3)
    run = run_step(
        tmp_path / "run",
        samples,
        packing=budget(20),
        batch=BatchConfig(samples_per_step=8),
        trainer=TrainerConfig(max_steps=2),
    )
    assert [event["decision"] for event in run.events("scoring")] == ["standalone", "standalone"]
    before, after = (decoder_with(weights) for weights in run.recorder.weights)
    advantages = group_advantages([s.reward for s in samples], [s.group for s in samples], normalize=True)
    documents = oracle_documents(samples[8:], decoder=after, anchors=before, advantages=advantages[8:])
    expected = policy_objective(documents, settings=GRPO)
    terms = run.events("optimizer")[1]["terms"]
    assert terms["loss/ratio_drift"] > 0.01
    assert terms["loss/clip_low"] + terms["loss/clip_high"] > 0
    assert terms["loss/total"] == pytest.approx(number(expected), rel=1e-10)
    assert largest_difference(run.recorder.gradients[1], gradients_of(after, expected)) < 1e-10
    ratios = [
        abs(number(log_probability(document, t)) - document.anchor[t])
        for document in documents
        for t in document.scored()
    ]
    assert run.events("scoring")[1]["mean_abs"] == pytest.approx(float(np.mean(ratios)), rel=1e-9)
    raw = [
        float(np.exp(number(log_probability(document, t)) - document.anchor[t]))
        for document in documents
        for t in document.scored()
    ]
    assert max(raw) > 1.28, "beyond the clip, and reported unclipped"
    assert terms["loss/ratio"] == pytest.approx(float(np.mean(raw)), rel=1e-9)
    assert run.events("optimizer")[1]["max_ratio"] == pytest.approx(max(raw), rel=1e-9)
    assert run.rows[1]["loss/max_ratio"] == pytest.approx(max(raw), rel=1e-6)
    assert run.events("scoring")[0]["mean_abs"] < 1e-12
