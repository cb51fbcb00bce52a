"""The loss: hand-computed numbers first, then invariance to packing, then an independent fp64 oracle."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import OracleDocument, cross_entropy, policy_objective
from torch import Tensor

from olmo_rl.backends import missing
from olmo_rl.config import (
    BatchConfig,
    Config,
    Filter,
    KlEstimator,
    LossConfig,
    LossKind,
    Reduction,
    WeightBound,
    WeightLevel,
)
from olmo_rl.data.advantages import filter_samples
from olmo_rl.data.collate import collate, count_normalisers
from olmo_rl.data.packs import Normalisers, Pack
from olmo_rl.policy.logprobs import token_entropies, token_logprobs
from olmo_rl.policy.loss import (
    SURROGATES,
    LossOutput,
    ScoredSlots,
    Surrogate,
    policy_loss,
    scored_slots,
    sft_loss,
    slot_weights,
)
from olmo_rl.types import Refusal, Sample, Topology

VOCABULARY = 7
# Response lengths that differ a lot, behind prompts of 1 to 4 tokens.
RESPONSES = (1, 3, 7, 2, 5, 6)


def make_sample(
    tokens: list[int],
    *,
    mask: list[int],
    id: str = "s",
    advantage: float = 1.0,
    behavior: list[float] | None = None,
    reference: list[float] | None = None,
    loss_mask: list[int] | None = None,
    finish_reason: str | None = None,
) -> Sample:
    values = [0.0] * len(tokens) if behavior is None else behavior
    return Sample(
        id=id,
        group=id,
        tokens=np.array(tokens, dtype=np.int32),
        response_mask=np.array(mask, dtype=np.bool_),
        loss_mask=None if loss_mask is None else np.array(loss_mask, dtype=np.bool_),
        behavior_logprobs=np.array(values, dtype=np.float32),
        ref_logprobs=None if reference is None else np.array(reference, dtype=np.float32),
        reward=0.0,
        advantage=advantage,
        finish_reason=finish_reason,
    )


def make_pack(samples: list[Sample]) -> Pack:
    return collate(samples, layout=None, topology=Topology(1))


def run(
    logprobs: Tensor,
    *,
    slots: ScoredSlots,
    advantages: list[float],
    config: LossConfig | None = None,
    anchor: list[float] | None = None,
    behavior: list[float] | None = None,
    reference: list[float] | None = None,
    entropies: Tensor | None = None,
    normalisers: Normalisers | None = None,
) -> LossOutput:
    """`policy_loss` on plain numbers; what is not given equals the policy (no ratio, no drift)."""

    def column(values: list[float] | None) -> Tensor:
        return logprobs.detach() if values is None else torch.tensor(values, dtype=logprobs.dtype)

    tokens, responses = len(slots.slots), len(set(slots.documents.tolist()))
    return policy_loss(
        logprobs,
        anchor_logprobs=column(anchor),
        behavior_logprobs=column(behavior),
        ref_logprobs=None if reference is None else column(reference),
        advantages=torch.tensor(advantages, dtype=logprobs.dtype),
        slots=slots,
        config=config or LossConfig(),
        normalisers=normalisers or Normalisers(tokens=tokens, responses=responses),
        entropies=entropies,
    )


def fully_scored(*lengths: int) -> ScoredSlots:
    """Slots of a pack of full-response documents behind one prompt token each."""
    return scored_slots(
        make_pack([make_sample([1] * (n + 1), mask=[0] + [1] * n, id=f"s{i}") for i, n in enumerate(lengths)])
    )


def leaf(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradient(output: LossOutput, of: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(output.loss, of)
    return found.tolist()


def test_labels_are_shifted_inside_documents_only() -> None:
    pack = make_pack(
        [make_sample([1, 2, 3], mask=[0, 1, 1], id="a"), make_sample([4, 5], mask=[0, 1], id="b")]
    )
    slots = scored_slots(pack)
    assert slots.slots.tolist() == [1, 2, 4]
    assert slots.rows.tolist() == [0, 1, 3]
    assert pack["tokens"][slots.slots].tolist() == [2, 3, 5]
    assert slots.documents.tolist() == [0, 0, 1]
    assert (slots.num_documents, slots.ids) == (2, ("a", "b"))


def test_the_first_token_of_a_document_is_never_scored_from_its_neighbour() -> None:
    pack = make_pack([make_sample([1, 2], mask=[1, 1]), make_sample([3, 4], mask=[1, 1])])
    assert scored_slots(pack).slots.tolist() == [1, 3]
    # Even where a mask claims otherwise, as a wrong collation would.
    pack.fields["loss_mask"] = torch.ones(4, dtype=torch.bool)
    assert scored_slots(pack).slots.tolist() == [1, 3]


def test_each_response_is_scored_by_the_rows_of_its_own_document_alone() -> None:
    pack = make_pack([make_sample([1, 2, 3], mask=[0, 1, 1]), make_sample([4, 5], mask=[0, 1])])
    logits = torch.randn(5, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_(True)
    slots = scored_slots(pack)
    logprobs = token_logprobs(logits[slots.rows], targets=pack["tokens"][slots.slots])
    for slot, rows in ((0, {0}), (1, {1}), (2, {3})):
        (grad,) = torch.autograd.grad(logprobs[slot], logits, retain_graph=True)
        assert set(grad.abs().sum(-1).nonzero().flatten().tolist()) == rows


def test_logprobs_are_those_of_the_tempered_distribution_in_float32() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.bfloat16)
    found = token_logprobs(logits.double(), targets=torch.tensor([1]))
    assert found.item() == pytest.approx(math.log(0.75), abs=1e-2)
    assert token_logprobs(logits, targets=torch.tensor([1])).dtype is torch.float32
    hot = token_logprobs(torch.tensor([[0.0, 2 * math.log(3.0)]]), targets=torch.tensor([1]), temperature=2.0)
    assert hot.item() == pytest.approx(math.log(0.75), abs=1e-6)
    huge = token_logprobs(torch.tensor([[1e4, 0.0]]), targets=torch.tensor([1]))
    assert huge.item() == -1e4


def test_entropy_of_even_odds_is_the_logarithm_of_their_number() -> None:
    logits = torch.tensor([[5.0] * 8, [0.0] * 4 + [-math.inf] * 4])
    assert token_entropies(logits).tolist() == pytest.approx([math.log(8), math.log(4)], abs=1e-6)


def test_the_loss_is_one_global_mean_and_not_a_mean_of_pack_means() -> None:
    normalisers = Normalisers(tokens=1000, responses=2)
    total = torch.zeros((), dtype=torch.float64)
    for count, mean in ((100, 2.0), (900, 0.5)):
        logprobs = torch.full((count,), -mean, dtype=torch.float64)
        slots = fully_scored(count)
        total += sft_loss(logprobs, slots=slots, reduction=Reduction.token, normalisers=normalisers).loss
    assert total.item() == pytest.approx(0.65, abs=1e-12)


def test_ranks_with_few_tokens_weigh_by_their_tokens() -> None:
    normalisers = Normalisers(tokens=4, responses=2)
    shares = []
    for values in ([1.0, 2.0, 3.0], [1.0]):
        logprobs = -torch.tensor(values, dtype=torch.float64)
        slots = fully_scored(len(values))
        shares.append(
            sft_loss(logprobs, slots=slots, reduction=Reduction.token, normalisers=normalisers).loss.item()
        )
    assert sum(shares) == pytest.approx(1.75, abs=1e-12)


def test_response_mean_counts_responses_and_not_packs() -> None:
    def response_and_token_mean(packs: list[list[list[float]]], *, responses: int = 2) -> tuple[float, float]:
        means = []
        for reduction in (Reduction.response, Reduction.token):
            share = 0.0
            for documents in packs:
                slots = fully_scored(*(len(values) for values in documents))
                logprobs = -torch.tensor(list(itertools.chain(*documents)), dtype=torch.float64)
                normalisers = Normalisers(tokens=4, responses=responses)
                share += sft_loss(
                    logprobs, slots=slots, reduction=reduction, normalisers=normalisers
                ).loss.item()
            means.append(share)
        return means[0], means[1]

    assert response_and_token_mean([[[4.0], [1.0, 1.0, 1.0]]]) == pytest.approx((2.5, 1.75))
    assert response_and_token_mean([[[4.0]], [[1.0, 1.0, 1.0]]]) == pytest.approx((2.5, 1.75))
    # A fully masked response adds neither a value nor a count.
    assert response_and_token_mean([[[4.0], [], [1.0, 1.0, 1.0]]]) == pytest.approx((2.5, 1.75))


def test_an_episode_of_two_branches_is_one_response() -> None:
    """Branches of 1 and 3 tokens beside a response of 2: each token of the episode weighs 1 / (4 x 2)."""
    samples = [
        make_sample([1, 2], mask=[0, 1], id="a"),
        make_sample([1, 2, 3, 4], mask=[0, 1, 1, 1], id="b"),
        make_sample([1, 2, 3], mask=[0, 1, 1], id="c"),
    ]
    samples[0].episode = samples[1].episode = "e"
    normalisers = count_normalisers(samples)
    assert normalisers == Normalisers(tokens=6, responses=2, episodes={"a": 4, "b": 4})
    weights = [
        slot_weights(
            scored_slots(make_pack(part)),
            reduction=Reduction.response,
            normalisers=normalisers,
            dtype=torch.float64,
        ).tolist()
        for part in (samples, samples[1:])
    ]
    assert weights == [[0.125] * 4 + [0.25] * 2, [0.125] * 3 + [0.25] * 2], "whichever packs they lie in"


def test_a_masked_response_does_not_count_as_a_response() -> None:
    samples = [
        make_sample([1, 2], mask=[0, 1], id="a"),
        make_sample([1, 2, 3], mask=[0, 1, 1], loss_mask=[0, 0, 0], id="b"),
        make_sample([1], mask=[0], id="c"),
    ]
    assert count_normalisers(samples) == Normalisers(tokens=1, responses=1)


def test_tokens_of_a_masked_truncated_sample_leave_numerator_and_denominator() -> None:
    samples = [
        make_sample([1] * 26, mask=[0] + [1] * 25, id="kept", finish_reason="stop"),
        make_sample([1] * 6, mask=[0] + [1] * 5, id="cut", finish_reason="length"),
    ]
    kept, counts = filter_samples(samples, config=BatchConfig(filter=Filter.mask, filter_truncated=True))
    normalisers = count_normalisers(kept)
    assert counts["truncated"] == 1
    assert normalisers.tokens == 25
    slots = scored_slots(make_pack(kept))
    logprobs = leaf([-2.0] * 25)
    output = sft_loss(logprobs, slots=slots, reduction=Reduction.token, normalisers=normalisers)
    assert output.loss.item() == pytest.approx(2.0, abs=1e-12)
    # The denominator is the number of tokens whose gradient can be non-zero.
    assert sum(g != 0 for g in gradient(output, logprobs)) == normalisers.tokens


def test_full_documents_of_three_and_two_tokens_have_three_scored_tokens() -> None:
    samples = [make_sample([1, 2, 3], mask=[1, 1, 1], id="a"), make_sample([4, 5], mask=[1, 1], id="b")]
    assert count_normalisers(samples).tokens == 3
    assert len(scored_slots(make_pack(samples)).slots) == 3
    assert sum(len(scored_slots(make_pack([sample])).slots) for sample in samples) == 3


def test_nonfinite_values_in_masked_slots_change_nothing() -> None:
    sample = make_sample([1, 2, 3], mask=[0, 1, 1], loss_mask=[0, 1, 0], behavior=[math.nan, 0.0, math.nan])
    pack = make_pack([sample])
    slots = scored_slots(pack)
    everywhere = leaf([0.0, 0.0, math.nan])
    output = policy_loss(
        everywhere[slots.slots],
        anchor_logprobs=torch.tensor([math.nan, 0.0, math.nan], dtype=torch.float64)[slots.slots],
        behavior_logprobs=pack["behavior_logprobs"][slots.slots],
        ref_logprobs=None,
        advantages=pack["advantages"][slots.slots],
        slots=slots,
        config=LossConfig(tis_low=0.9, tis_high=1.1),
        normalisers=count_normalisers([sample]),
    )
    assert output.loss.item() == -1.0
    assert gradient(output, everywhere) == [0.0, -1.0, 0.0]
    assert output.suspects == ()
    # Masked rows of the logits neither: the gather never touches them.
    logits = torch.zeros(3, VOCABULARY, dtype=torch.float64)
    logits[1:] = math.nan
    logits.requires_grad_(True)
    logprobs = token_logprobs(logits[slots.rows], targets=pack["tokens"][slots.slots])
    (grad,) = torch.autograd.grad(logprobs.sum(), logits)
    assert grad.isfinite().all()


@pytest.mark.parametrize("where", ["policy", "anchor", "behavior", "reference", "advantage"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_nonfinite_value_in_a_scored_slot_names_its_sample(where: str, value: float) -> None:
    columns = {name: [0.0, 0.0, 0.0] for name in ("policy", "anchor", "behavior", "reference", "advantage")}
    columns[where][2] = value
    output = run(
        leaf(columns["policy"]),
        slots=fully_scored(2, 1),
        advantages=columns["advantage"],
        anchor=columns["anchor"],
        behavior=columns["behavior"],
        reference=columns["reference"],
        # Clips and masks that would hide the value from the loss.
        config=LossConfig(
            kl_coef=0.1, tis_low=0.9, tis_high=1.1, tis_bound=WeightBound.mask, max_sequence_kl=9.0
        ),
    )
    assert output.suspects == ("s1",)


def test_minus_infinity_against_minus_infinity_is_named_and_not_taken_for_a_ratio_of_one() -> None:
    output = run(
        leaf([-math.inf, 0.0]), slots=fully_scored(1, 1), anchor=[-math.inf, 0.0], advantages=[1.0, 1.0]
    )
    assert output.suspects == ("s0",)


def test_a_ratio_that_overflows_behind_the_clip_is_named() -> None:
    # The clipped value is finite, but its gradient is 0 x inf.
    logprobs = torch.zeros(2, requires_grad=True)
    output = run(logprobs, slots=fully_scored(1, 1), anchor=[-200.0, 0.0], advantages=[1.0, 1.0])
    assert output.loss.isfinite()
    assert output.suspects == ("s0",)
    assert output.max_log_ratio.item() == 200.0


@pytest.mark.parametrize("reduction", list(Reduction))
def test_nothing_to_train_on_gives_zero_loss_and_zero_gradients(reduction: Reduction) -> None:
    samples = [
        make_sample([1, 2], mask=[0, 0], id="empty response"),
        make_sample([1, 2, 3], mask=[0, 1, 1], loss_mask=[0, 0, 0], id="all masked"),
    ]
    pack = make_pack(samples)
    slots = scored_slots(pack)
    logits = torch.randn(5, VOCABULARY, requires_grad=True, generator=torch.Generator().manual_seed(0))
    logprobs = token_logprobs(logits[slots.rows], targets=pack["tokens"][slots.slots])
    config = LossConfig(
        reduction=reduction, kl_coef=0.1, tis_high=2.0, max_sequence_kl=1.0, entropy_coef=0.1, dual_clip=3.0
    )
    output = run(
        logprobs,
        slots=slots,
        advantages=[],
        reference=[],
        entropies=token_entropies(logits[slots.rows]),
        config=config,
        normalisers=count_normalisers(samples),
    )
    (grad,) = torch.autograd.grad(output.loss, logits)
    assert output.loss.item() == 0.0
    assert grad.abs().max().item() == 0.0
    assert all(value.item() == 0.0 for value in output.terms.values())
    assert output.max_log_ratio.item() == 0.0
    supervised = sft_loss(
        logprobs, slots=slots, reduction=reduction, normalisers=Normalisers(tokens=0, responses=0)
    )
    assert supervised.loss.item() == 0.0


@pytest.mark.parametrize("reduction", list(Reduction))
def test_fully_masked_packs_leave_loss_and_gradients_bit_identical(reduction: Reduction) -> None:
    samples = [
        make_sample([1, 2, 3], mask=[0, 1, 1], id="a"),
        make_sample([1, 2], mask=[0, 1], id="b", advantage=-1),
    ]
    filler = make_sample([4, 5, 6], mask=[0, 1, 1], loss_mask=[0, 0, 0], id="filler", advantage=3.0)

    def loss_and_gradient(packs: list[list[Sample]]) -> tuple[float, list[float]]:
        normalisers = count_normalisers([sample for pack in packs for sample in pack])
        logits = (
            torch.linspace(-1, 1, 3 * VOCABULARY, dtype=torch.float64).reshape(3, -1).requires_grad_(True)
        )
        loss = torch.zeros((), dtype=torch.float64)
        for members in packs:
            pack = make_pack(members)
            slots = scored_slots(pack)
            logprobs = token_logprobs(logits[slots.rows % 3], targets=pack["tokens"][slots.slots])
            advantages = pack["advantages"][slots.slots].tolist()
            loss = (
                loss
                + run(
                    logprobs,
                    slots=slots,
                    advantages=advantages,
                    config=LossConfig(reduction=reduction),
                    normalisers=normalisers,
                ).loss
            )
        (grad,) = torch.autograd.grad(loss, logits)
        return loss.item(), grad.flatten().tolist()

    assert loss_and_gradient([samples]) == loss_and_gradient([samples, [filler], [filler, filler]])


def test_the_clip_is_asymmetric_and_takes_the_pessimistic_side() -> None:
    ratios = [1.5, 1.5, 0.5, 0.5, 1.1]
    advantages = [1.0, -1.0, 1.0, -1.0, 2.0]
    logprobs = leaf([math.log(r) for r in ratios])
    output = run(logprobs, slots=fully_scored(5), anchor=[0.0] * 5, advantages=advantages)
    # -min(r A, clip(r, 0.8, 1.28) A): -1.28, 1.5, -0.5, 0.8, -2.2
    assert output.loss.item() == pytest.approx((-1.28 + 1.5 - 0.5 + 0.8 - 2.2) / 5, abs=1e-12)
    assert gradient(output, logprobs) == pytest.approx([0.0, 0.3, -0.1, 0.0, -0.44], abs=1e-12)
    assert output.terms["clip_high"].item() == pytest.approx(0.2)
    assert output.terms["clip_low"].item() == pytest.approx(0.2)
    assert output.terms["ratio"].item() == pytest.approx(sum(ratios) / 5, abs=1e-12)
    assert output.max_log_ratio.item() == pytest.approx(math.log(2.0), abs=1e-12)


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone() -> None:
    logprobs = leaf([math.log(5.0), math.log(5.0), math.log(2.0)])
    output = run(
        logprobs,
        slots=fully_scored(3),
        anchor=[0.0] * 3,
        advantages=[-1.0, 1.0, -1.0],
        config=LossConfig(dual_clip=3.0),
    )
    assert output.loss.item() == pytest.approx((3.0 - 1.28 + 2.0) / 3, abs=1e-12)
    assert gradient(output, logprobs) == pytest.approx([0.0, 0.0, 2 / 3], abs=1e-12)
    assert output.terms["dual_clip"].item() == pytest.approx(1 / 3)


def test_gspo_has_one_ratio_a_response_whatever_else_is_in_the_pack() -> None:
    logprobs = leaf([0.2, 0.0, 0.5])
    config = LossConfig(kind=LossKind.gspo, reduction=Reduction.response, clip_low=0.05, clip_high=0.12)
    output = run(
        logprobs, slots=fully_scored(2, 1), anchor=[0.0] * 3, advantages=[1.0, 1.0, 2.0], config=config
    )
    # Ratios exp(0.1) and exp(0.5); the second is clipped to 1.12 and has no gradient.
    assert output.loss.item() == pytest.approx(-(math.exp(0.1) + 2 * 1.12) / 2, abs=1e-12)
    assert gradient(output, logprobs) == pytest.approx([-math.exp(0.1) / 4] * 2 + [0.0], abs=1e-12)
    assert output.terms["clip_high"].item() == pytest.approx(1 / 3)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    logprobs = leaf([math.log(0.3), math.log(0.6)])
    output = run(
        logprobs,
        slots=fully_scored(2),
        anchor=[math.log(0.1), math.log(0.6)],
        advantages=[1.0, -2.0],
        config=LossConfig(kind=LossKind.cispo),
    )
    assert output.loss.item() == pytest.approx((-1.28 * math.log(0.3) + 2 * math.log(0.6)) / 2, abs=1e-12)
    assert gradient(output, logprobs) == pytest.approx([-0.64, 1.0], abs=1e-12)


def test_dr_grpo_divides_by_a_constant_length() -> None:
    logprobs = leaf([0.0] * 4)
    config = LossConfig(reduction=Reduction.response, constant_length=10)
    output = run(logprobs, slots=fully_scored(3, 1), advantages=[1.0, 1.0, 1.0, -1.0], config=config)
    assert output.loss.item() == pytest.approx(-(3 - 1) / (10 * 2), abs=1e-12)


def tis_weights(config: LossConfig) -> tuple[list[float], LossOutput]:
    """Effective importance weights, read off the gradient: anchor / behaviour is 2, 0.5 | 1.05, one advantage
    each."""
    logprobs = leaf([0.0, 0.0, 0.0])
    output = run(
        logprobs,
        slots=fully_scored(2, 1),
        anchor=[0.0, 0.0, 0.0],
        behavior=[-math.log(2.0), -math.log(0.5), -math.log(1.05)],
        advantages=[1.0, 1.0, 1.0],
        config=config,
    )
    return [-3 * g for g in gradient(output, logprobs)], output


def test_importance_weights_lead_from_behaviour_to_anchor_and_are_clipped_on_both_sides() -> None:
    weights, output = tis_weights(LossConfig(tis_low=0.9, tis_high=1.1))
    assert weights == pytest.approx([1.1, 0.9, 1.05], abs=1e-12)
    assert output.terms["tis"].item() == pytest.approx((2 + 0.5 + 1.05) / 3, abs=1e-12)
    assert output.terms["tis_low"].item() == pytest.approx(1 / 3)
    assert output.terms["tis_high"].item() == pytest.approx(1 / 3)
    assert tis_weights(LossConfig(tis_high=1.1))[0] == pytest.approx([1.1, 0.5, 1.05], abs=1e-12)
    assert tis_weights(LossConfig(tis_low=0.9))[0] == pytest.approx([2.0, 0.9, 1.05], abs=1e-12)
    assert tis_weights(LossConfig())[0] == pytest.approx([1.0, 1.0, 1.0], abs=1e-12)
    masked = LossConfig(tis_low=0.9, tis_high=1.1, tis_bound=WeightBound.mask)
    assert tis_weights(masked)[0] == pytest.approx([0.0, 0.0, 1.05], abs=1e-12)
    # By response the product counts: 2 x 0.5 = 1.
    sequence = LossConfig(tis_low=0.9, tis_high=1.1, tis_level=WeightLevel.sequence)
    assert tis_weights(sequence)[0] == pytest.approx([1.0, 1.0, 1.05], abs=1e-12)


def test_a_product_of_weights_that_overflows_is_clipped_like_any_other() -> None:
    logprobs = torch.zeros(300, requires_grad=True)
    config = LossConfig(tis_high=2.0, tis_level=WeightLevel.sequence)
    output = run(
        logprobs, slots=fully_scored(300), anchor=[0.0] * 300, behavior=[-1.0] * 300, advantages=[1.0] * 300,
        config=config,
    )  # fmt: skip
    assert output.loss.item() == pytest.approx(-2.0, rel=1e-5)
    assert output.suspects == ()


def test_off_policy_masking_leaves_out_bad_responses_far_from_the_policy() -> None:
    logprobs = leaf([-1.0, -1.0, -1.0, -1.0])
    output = run(
        logprobs,
        slots=fully_scored(2, 1, 1),
        # Mean drift behaviour - policy: 0.5, 0.5 and 0.2.
        behavior=[0.0, -1.0, -0.5, -0.8],
        advantages=[-1.0, -1.0, 1.0, -1.0],
        config=LossConfig(max_sequence_kl=0.4),
    )
    assert gradient(output, logprobs) == pytest.approx([0.0, 0.0, -0.25, 0.25], abs=1e-12)
    assert output.terms["off_policy"].item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        (KlEstimator.k1, 0.5, 1.0),
        (KlEstimator.k2, 0.125, 0.5),
        (KlEstimator.k3, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_kl_estimates_have_their_textbook_values_and_slopes(
    estimator: KlEstimator, value: float, slope: float
) -> None:
    logprobs = leaf([-1.0])
    config = LossConfig(kl=estimator, kl_coef=0.1)
    output = run(logprobs, slots=fully_scored(1), advantages=[0.0], reference=[-1.5], config=config)
    assert output.loss.item() == pytest.approx(0.1 * value, abs=1e-12)
    assert output.terms["ref_kl"].item() == pytest.approx(value, abs=1e-12)
    assert output.terms["kl"].item() == pytest.approx(0.1 * value, abs=1e-12)
    assert gradient(output, logprobs) == pytest.approx([0.1 * slope], abs=1e-12)


def test_contributions_add_up_to_the_loss() -> None:
    output = run(
        leaf([-1.0, -2.0]),
        slots=fully_scored(1, 1),
        advantages=[1.0, -1.0],
        anchor=[-1.1, -2.3],
        reference=[-1.5, -1.0],
        entropies=leaf([0.7, 0.2]),
        config=LossConfig(kl_coef=0.1, entropy_coef=0.01, reduction=Reduction.response),
    )
    parts = [output.terms[name].item() for name in ("policy", "kl", "entropy")]
    assert parts[2] == pytest.approx(-0.01 * 0.45, abs=1e-12)
    assert sum(parts) == pytest.approx(output.loss.item(), abs=1e-12)


def test_metric_terms_of_uneven_ranks_add_up_to_the_global_mean() -> None:
    # 3 of 12 tokens clipped on one rank, 3 of 4 on the other: 6 / 16, not the mean of 0.25 and 0.75.
    normalisers = Normalisers(tokens=16, responses=2)
    clipped = 0.0
    for count in (12, 4):
        logprobs = leaf([1.0] * 3 + [0.0] * (count - 3))
        output = run(
            logprobs,
            slots=fully_scored(count),
            anchor=[0.0] * count,
            advantages=[1.0] * count,
            normalisers=normalisers,
        )
        clipped += output.terms["clip_high"].item()
    assert clipped == pytest.approx(0.375, abs=1e-12)


FAMILY = {
    "grpo": {},
    "grpo response": {"reduction": Reduction.response},
    "kl k1": {"kl": KlEstimator.k1, "kl_coef": 0.3},
    "kl k2": {"kl": KlEstimator.k2, "kl_coef": 0.3, "reduction": Reduction.response},
    "kl k3": {"kl": KlEstimator.k3, "kl_coef": 0.3},
    "tis": {"tis_low": 0.9, "tis_high": 1.1},
    "tis mask": {"tis_low": 0.8, "tis_high": 1.3, "tis_bound": WeightBound.mask},
    "tis sequence": {"tis_high": 1.5, "tis_level": WeightLevel.sequence, "reduction": Reduction.response},
    "tis sequence mask": {"tis_low": 0.5, "tis_level": WeightLevel.sequence, "tis_bound": WeightBound.mask},
    "dual clip": {"dual_clip": 1.35},
    "gspo": {"kind": LossKind.gspo, "reduction": Reduction.response, "clip_low": 0.03, "clip_high": 0.04},
    "gspo by token, dual clip": {"kind": LossKind.gspo, "dual_clip": 1.02},
    "cispo": {"kind": LossKind.cispo},
    "dr grpo": {"reduction": Reduction.response, "constant_length": 5},
    "off-policy mask": {"max_sequence_kl": 0.0},
    "entropy": {"entropy_coef": 0.02, "reduction": Reduction.response},
    "all": {
        "reduction": Reduction.response, "kl_coef": 0.2, "kl": KlEstimator.k2, "tis_low": 0.8, "tis_high":
        1.2, "tis_level": WeightLevel.sequence, "dual_clip": 1.2, "max_sequence_kl": 0.1, "entropy_coef":
        0.01,
    },
}  # fmt: skip


def plain_settings(config: LossConfig) -> dict[str, object]:
    names = (
        "kind", "reduction", "clip_low", "clip_high", "dual_clip", "constant_length", "tis_low", "tis_high",
        "tis_level", "tis_bound", "max_sequence_kl", "entropy_coef", "kl", "kl_coef",
    )  # fmt: skip
    values = {name: getattr(config, name) for name in names}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def random_documents() -> tuple[list[Sample], list[OracleDocument]]:
    """Six samples with uneven responses and interior masked tokens; values that float32 holds exactly."""
    generator = np.random.default_rng(7)
    samples, documents = [], []
    for i, length in enumerate(RESPONSES):
        prompt = 1 + i % 4
        total = prompt + length
        tokens = generator.integers(0, VOCABULARY, size=total).tolist()
        mask = [t >= prompt for t in range(total)]
        trained = [not (t == prompt + 1 and length > 4) for t in range(total)]
        logits = torch.tensor(
            generator.normal(size=(total, VOCABULARY)), dtype=torch.float64, requires_grad=True
        )
        policy = [0.0] + [logits[t - 1].log_softmax(-1)[tokens[t]].item() for t in range(1, total)]
        noisy = {
            name: (np.array(policy) + generator.normal(scale=scale, size=total)).astype(np.float32)
            for name, scale in (("anchor", 0.3), ("behavior", 0.2), ("reference", 0.5))
        }
        advantage = float(np.float32(generator.normal()))
        samples.append(
            make_sample(
                tokens,
                mask=[int(m) for m in mask],
                loss_mask=[int(m) for m in trained],
                id=f"s{i}",
                advantage=advantage,
                behavior=noisy["behavior"].tolist(),
                reference=noisy["reference"].tolist(),
            )
        )
        documents.append(
            OracleDocument(
                tokens=tokens,
                logits=logits,
                mask=[a and b for a, b in zip(mask, trained, strict=True)],
                anchor=noisy["anchor"].tolist(),
                behavior=noisy["behavior"].tolist(),
                reference=noisy["reference"].tolist(),
                advantage=advantage,
            )
        )
    return samples, documents


SAMPLES, DOCUMENTS = random_documents()


def packed_loss_and_gradients(packs: list[list[int]], *, config: LossConfig) -> tuple[float, list[Tensor]]:
    """Pack, score, add up; gradients of the logits of each document, in order of the samples."""
    normalisers = count_normalisers(SAMPLES)
    logits = [document.logits.detach().clone().requires_grad_(True) for document in DOCUMENTS]
    loss = torch.zeros((), dtype=torch.float64)
    for members in packs:
        pack = make_pack([SAMPLES[i] for i in members])
        slots = scored_slots(pack)
        rows = torch.cat([logits[i] for i in members])[slots.rows]
        anchor = torch.tensor(
            list(itertools.chain(*(DOCUMENTS[i].anchor for i in members))), dtype=torch.float64
        )
        output = policy_loss(
            token_logprobs(rows, targets=pack["tokens"][slots.slots]),
            anchor_logprobs=anchor[slots.slots],
            behavior_logprobs=pack["behavior_logprobs"][slots.slots],
            ref_logprobs=pack["ref_logprobs"][slots.slots] if config.kl_coef else None,
            advantages=pack["advantages"][slots.slots],
            slots=slots,
            config=config,
            normalisers=normalisers,
            entropies=token_entropies(rows) if config.entropy_coef else None,
        )
        assert output.suspects == ()
        loss = loss + output.loss
    return loss.item(), list(torch.autograd.grad(loss, logits))


@pytest.mark.parametrize("name", list(FAMILY))
def test_loss_and_gradients_equal_the_oracle(name: str) -> None:
    config = LossConfig(**FAMILY[name])
    expected = policy_objective(DOCUMENTS, settings=plain_settings(config))
    expected_grads = torch.autograd.grad(
        expected, [document.logits for document in DOCUMENTS], materialize_grads=True
    )
    assert max(grad.abs().max().item() for grad in expected_grads) > 1e-3
    for packs in ([[0, 1, 2, 3, 4, 5]], [[i] for i in range(6)], [[3, 0], [5, 1, 2], [4]]):
        loss, grads = packed_loss_and_gradients(packs, config=config)
        assert loss == pytest.approx(expected.item(), rel=1e-12, abs=1e-13)
        for found, wanted in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_every_member_of_the_family_is_a_different_objective() -> None:
    losses = {name: packed_loss_and_gradients([[0, 1, 2, 3, 4, 5]], config=LossConfig(**FAMILY[name]))[0]
              for name in FAMILY}  # fmt: skip
    assert len({round(loss, 9) for loss in losses.values()}) == len(FAMILY)


@settings(max_examples=30, deadline=None)
@given(
    order=st.permutations(range(len(RESPONSES))),
    cuts=st.sets(st.integers(1, len(RESPONSES) - 1)),
    name=st.sampled_from(list(FAMILY)),
)
def test_neither_order_nor_packs_change_loss_or_gradients(
    order: list[int], cuts: set[int], name: str
) -> None:
    config = LossConfig(**FAMILY[name])
    edges = [0, *sorted(cuts), len(order)]
    packs = [list(order[a:b]) for a, b in itertools.pairwise(edges)]
    loss, grads = packed_loss_and_gradients(packs, config=config)
    wanted, wanted_grads = packed_loss_and_gradients([[i] for i in range(len(RESPONSES))], config=config)
    assert loss == pytest.approx(wanted, rel=1e-12, abs=1e-13)
    for found, expected in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("reduction", list(Reduction))
def test_supervised_loss_and_gradients_equal_the_oracle(reduction: Reduction) -> None:
    expected = cross_entropy(DOCUMENTS, settings={"reduction": reduction.value})
    wanted = torch.autograd.grad(
        expected, [document.logits for document in DOCUMENTS], materialize_grads=True
    )
    logits = [document.logits.detach().clone().requires_grad_(True) for document in DOCUMENTS]
    pack = make_pack(SAMPLES)
    slots = scored_slots(pack)
    logprobs = token_logprobs(torch.cat(logits)[slots.rows], targets=pack["tokens"][slots.slots])
    output = sft_loss(logprobs, slots=slots, reduction=reduction, normalisers=count_normalisers(SAMPLES))
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert output.terms["cross_entropy"].item() == output.loss.item()
    for found, expected_grad in zip(torch.autograd.grad(output.loss, logits), wanted, strict=True):
        torch.testing.assert_close(found, expected_grad, rtol=1e-12, atol=1e-13)


def squared_ratio(
    logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor, slots: ScoredSlots, config: LossConfig
) -> Surrogate:
    """An objective of a user: A (1 - r)^2 / 2 - A log policy."""
    ratio = log_ratio.exp()
    return Surrogate(advantages * (1 - ratio).square() / 2 - advantages * logprobs, ratio, {})


def only_the_objective(
    logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor, slots: ScoredSlots, config: LossConfig
) -> Tensor:
    """A function of a user that forgets the ratio and the shares."""
    return -advantages * logprobs


def test_an_objective_that_returns_no_surrogate_is_refused() -> None:
    pack = make_pack([make_sample([1, 2, 3], mask=[0, 1, 1], advantage=2.0)])
    logprobs = torch.tensor([-1.0, -0.5], requires_grad=True)
    with pytest.raises(Refusal, match=r"loss\.surrogate=test_loss:only_the_objective: it returned a Tensor"):
        policy_loss(
            logprobs,
            anchor_logprobs=logprobs,
            behavior_logprobs=logprobs,
            ref_logprobs=None,
            advantages=torch.tensor([2.0, 2.0]),
            slots=scored_slots(pack),
            config=LossConfig(surrogate="test_loss:only_the_objective"),
            normalisers=Normalisers(tokens=2, responses=1),
        )


def test_every_kind_of_loss_has_its_objective() -> None:
    assert set(SURROGATES) == set(LossKind)


def test_an_objective_named_by_import_path_replaces_the_kind() -> None:
    pack = make_pack([make_sample([1, 2, 3], mask=[0, 1, 1], advantage=2.0)])
    slots = scored_slots(pack)
    logprobs = torch.tensor([-1.0, -0.5], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([-1.0, -0.5 - math.log(2)], dtype=torch.float64)
    output = policy_loss(
        logprobs,
        anchor_logprobs=anchor,
        behavior_logprobs=anchor,
        ref_logprobs=None,
        advantages=torch.tensor([2.0, 2.0], dtype=torch.float64),
        slots=slots,
        config=LossConfig(surrogate="test_loss:squared_ratio"),
        normalisers=Normalisers(tokens=2, responses=1),
    )
    # Ratios 1 and 2: (0 + 2 * 1 / 2) / 2 for the square, (2 * 1 + 2 * 0.5) / 2 for the log-probs.
    assert output.loss.item() == pytest.approx(0.5 + 1.5)
    output.loss.backward()
    # d/dlogp of A (1 - r)^2 / 2 is -A r (1 - r): 0 and 4; of -A logp: -2; divided by two tokens.
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("grpo", "loss.surrogate=grpo: not an import path: give package.module.function"),
        ("no_such_module:loss", "loss.surrogate=no_such_module:loss: no_such_module does not import"),
        ("test_loss:absent", "loss.surrogate=test_loss:absent: test_loss has no function absent"),
        (
            "test_loss:make_sample",
            "loss.surrogate=test_loss:make_sample: called (logprobs, *, log_ratio, advantages, ",
        ),
    ],
)
def test_an_objective_that_cannot_be_loaded_is_reported_before_ranks_start(path: str, reason: str) -> None:
    (line,) = missing(Config(loss=LossConfig(surrogate=path)))
    assert line.startswith(reason)
