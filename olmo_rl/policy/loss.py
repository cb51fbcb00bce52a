"""Which tokens are scored, and the GRPO family of objectives over their log-probs, all by document.

Owns which rows score which tokens, per-slot weights under global normalisers, surrogates, importance weights,
KL and entropy terms. Reads no files, talks to no other rank. Refuses nothing but a result of
`loss.surrogate` that is no `Surrogate`: values that are not finite are reported with the ids of their samples
(`LossOutput.suspects`), and whoever steps decides.

Contract: a step's loss is the sum over ALL scored slots (all packs, all ranks) of weight x objective. The
weights carry the one division by a global count, so packs, ranks and the order of samples only change the
order of a sum. Masked tokens are never gathered: no value of theirs, finite or not, reaches loss or gradient.

Shapes: T tokens of a pack, S scored slots, D documents. A response is one document's slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from olmo_rl.config import KlEstimator, LossConfig, LossKind, Reduction, WeightBound, WeightLevel
from olmo_rl.data.packs import Normalisers, Pack
from olmo_rl.types import Refusal
from olmo_rl.user_code import load_surrogate

_MOST_LOG_WEIGHT = 20.0  # of an importance weight in the reported mean before its bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredSlots:
    """The scored tokens of one pack, in order, all int64 [S]: `slots` are the tokens, `documents` the
    document of each (of `num_documents`, pads included). `ids[d]` is the sample of document d. `heads` [P]
    are those whose log-probs are computed, from the logits of the preceding `rows` [P]; `head_of` [S]: which
    of them each slot equals, None where they are the slots.
    """

    slots: Tensor
    heads: Tensor
    head_of: Tensor | None
    rows: Tensor
    documents: Tensor
    num_documents: int
    ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """One pack's share of a step's loss.

    `terms`: detached scalars that add up: summed over the packs and ranks of a step they are global means,
    with no further division; their names depend on the configuration alone. `max_log_ratio`: largest
    |policy - anchor| and `max_ratio`: largest ratio, both before any clipping, 0 without slots; combined by
    maximum. `broken` bool [D]: documents with a value that is not finite in a scored slot, whether or not a
    clip hides it from the loss.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    max_log_ratio: Tensor
    max_ratio: Tensor
    broken: Tensor
    ids: tuple[str, ...]

    @property
    def suspects(self) -> tuple[str, ...]:
        """Ids of samples with values that are not finite. Waits for the device: use after the last pack."""
        return tuple(self.ids[d] for d in self.broken.nonzero().flatten().tolist())


def scored_slots(pack: Pack) -> ScoredSlots:
    """Slots with a true loss mask. A document's first token has no row of its own document: never scored."""
    slots, shared = pack.scored_rows(), pack.shared
    heads = slots if shared is None else shared.heads
    return ScoredSlots(
        slots=slots,
        heads=heads,
        head_of=None if shared is None else shared.head_of,
        rows=pack.rows_of(heads - 1),
        documents=pack.document_ids[slots],
        num_documents=len(pack.boundaries) - 1,
        ids=pack.ids,
    )


def slot_weights(
    slots: ScoredSlots,
    *,
    reduction: Reduction,
    normalisers: Normalisers,
    dtype: torch.dtype,
    constant_length: int | None = None,
) -> Tensor:
    """[S] weights of each slot in the step's mean.

    `token`: 1 / global scored tokens. `response`: 1 / (scored tokens of the response x global responses that
    have any); the samples of one episode are one response. With `constant_length`: 1 / (constant_length x
    global responses), Dr.GRPO (arXiv 2503.20783): the sum over a response is not divided by the response's
    own length.
    """
    ones = torch.ones_like(slots.slots, dtype=dtype)
    if reduction is Reduction.token:
        return ones / max(1, normalisers.tokens)
    lengths = _per_document(ones, slots=slots) if constant_length is None else constant_length * ones
    if normalisers.episodes and constant_length is None:
        whole = [normalisers.episodes.get(id, 0) for id in slots.ids]
        whole += [0] * (slots.num_documents - len(whole))  # pads score nothing
        episodes = ones.new_tensor(whole)[slots.documents]
        lengths = torch.where(episodes > 0, episodes, lengths)
    return ones / (lengths * max(1, normalisers.responses))


def _per_document(values: Tensor, *, slots: ScoredSlots) -> Tensor:
    """[S] -> [S]: every slot gets the sum over its document's slots."""
    sums = values.new_zeros(slots.num_documents).index_add(0, slots.documents, values)
    return sums[slots.documents]


def _document_mean(values: Tensor, *, slots: ScoredSlots) -> Tensor:
    """[S] -> [S]: every slot gets the mean over its document's slots."""
    return _per_document(values, slots=slots) / _per_document(torch.ones_like(values), slots=slots)


def sft_loss(
    logprobs: Tensor, *, slots: ScoredSlots, reduction: Reduction, normalisers: Normalisers
) -> LossOutput:
    """Cross-entropy: minus the weighted sum of [S] log-probs."""
    weights = slot_weights(slots, reduction=reduction, normalisers=normalisers, dtype=logprobs.dtype)
    loss = -(weights * logprobs).sum()
    return LossOutput(
        loss=loss,
        terms={"cross_entropy": loss.detach()},
        max_log_ratio=logprobs.new_zeros(()),
        max_ratio=logprobs.new_zeros(()),
        broken=_broken_documents(logprobs, slots=slots),
        ids=slots.ids,
    )


def policy_loss(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    slots: ScoredSlots,
    config: LossConfig,
    normalisers: Normalisers,
    entropies: Tensor | None = None,
) -> LossOutput:
    """One pack's share of the step's policy loss. Tensors are [S]; `logprobs` and `entropies` carry
    gradients.

        sum over slots of weight x (keep x tis x surrogate + kl_coef x KL - entropy_coef x entropy)

    `surrogate` is anchor -> policy (`surrogate_of`), `tis` behaviour -> anchor, `keep` leaves out responses
    too far off policy. `ref_logprobs` is needed where `kl_coef` is not 0, `entropies` where `entropy_coef` is
    not 0.

    Terms: `policy`, `kl`, `entropy` are contributions to the loss and add up to it. The others are means over
    scored tokens: `ratio` (before clipping), `ratio_clipped` (in the interval of the clips), `ratio_drift`
    (|log ratio| of tokens), `clip_low`, `clip_high`, `dual_clip`, `tis_low`, `tis_high`, `off_policy` (shares
    of tokens), `tis` (before its bounds, a weight counts as at most exp(20)), `tis_clipped`, `ref_kl`,
    `mean_entropy`.
    """
    assert (config.kl_coef == 0) or (ref_logprobs is not None), "a KL term needs reference log-probs"
    assert (config.entropy_coef == 0) or (entropies is not None), "an entropy bonus needs entropies"
    anchor, behavior = anchor_logprobs.detach(), behavior_logprobs.detach()
    advantages = advantages.to(logprobs.dtype)
    weights = slot_weights(
        slots,
        reduction=config.reduction,
        normalisers=normalisers,
        dtype=logprobs.dtype,
        constant_length=config.constant_length,
    )
    log_ratio = logprobs - anchor
    found = surrogate_of(config)(
        logprobs, log_ratio=log_ratio, advantages=advantages, slots=slots, config=config
    )
    if not isinstance(found, Surrogate):
        raise Refusal(
            f"loss.surrogate={config.surrogate}: it returned a {type(found).__name__}: return "
            "olmo_rl.policy.loss.Surrogate(objective, ratio, clips)"
        )
    surrogate, ratio, clips = found
    terms: dict[str, Tensor] = {"policy": surrogate}
    shares = {"ratio": ratio, "ratio_drift": log_ratio.abs()} | clips
    if config.surrogate is None:  # one of the user's may have other clips, or none
        shares["ratio_clipped"] = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.tis_low is not None or config.tis_high is not None:
        tis, bounds = behavior_weights(anchor - behavior, slots=slots, config=config)
        terms["policy"] = terms["policy"] * tis
        shares |= bounds
    if config.max_sequence_kl is not None:
        drift = behavior - logprobs.detach()
        keep = near_policy(drift, advantages=advantages, slots=slots, limit=config.max_sequence_kl)
        terms["policy"] = terms["policy"] * keep
        shares["off_policy"] = 1 - keep
    if config.kl_coef != 0 and ref_logprobs is not None:
        divergence = kl_estimate(logprobs, ref_logprobs=ref_logprobs, estimator=config.kl)
        terms["kl"] = config.kl_coef * divergence
        shares["ref_kl"] = divergence
    if config.entropy_coef != 0 and entropies is not None:
        terms["entropy"] = -config.entropy_coef * entropies
        shares["mean_entropy"] = entropies
    objective = torch.stack(list(terms.values())).sum(0)
    # A value that a clip or a zero weight hides from the objective may still poison the gradient.
    everything = objective + ratio + logprobs + anchor + behavior + advantages
    sums = {name: (weights * term).sum().detach() for name, term in terms.items()}
    sums |= {name: share.detach().sum() / max(1, normalisers.tokens) for name, share in shares.items()}
    return LossOutput(
        loss=(weights * objective).sum(),
        terms=sums,
        max_log_ratio=torch.cat([log_ratio.detach().abs(), log_ratio.new_zeros(1)]).max(),
        max_ratio=torch.cat([ratio.detach(), ratio.new_zeros(1)]).max(),
        broken=_broken_documents(everything, slots=slots),
        ids=slots.ids,
    )


def _broken_documents(values: Tensor, *, slots: ScoredSlots) -> Tensor:
    """[S] -> bool [D]: documents with a value that is not finite."""
    bad = (~values.detach().isfinite()).long()
    return bad.new_zeros(slots.num_documents).index_add(0, slots.documents, bad) > 0


class Surrogate(NamedTuple):
    """The result of a policy objective, each [S]: `objective` to minimise, with gradient; the `ratio` anchor
    -> policy before clipping; `clips`, 1 where a clip acts and 0 elsewhere, by name.
    """

    objective: Tensor
    ratio: Tensor
    clips: dict[str, Tensor]


class SurrogateFunction(Protocol):
    """A policy objective, one of `SURROGATES` or the user's (`loss.surrogate`)."""

    def __call__(
        self,
        logprobs: Tensor,
        *,
        log_ratio: Tensor,
        advantages: Tensor,
        slots: ScoredSlots,
        config: LossConfig,
    ) -> Surrogate:
        """`logprobs` [S] of the policy and `log_ratio` [S], policy - anchor, carry gradients; `advantages`
        [S] do not. The caller multiplies weights and sums over slots.
        """
        ...


def grpo(
    logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor, slots: ScoredSlots, config: LossConfig
) -> Surrogate:
    """-min(r A, c(r) A) with r = exp(policy - anchor), one ratio a token, A the advantage and
    c(r) = clip(r, 1 - clip_low, 1 + clip_high) (arXiv 2402.03300; unequal clips: DAPO, arXiv 2503.14476).

    `dual_clip` d: where A < 0 the surrogate is at most -d A (arXiv 1912.09729).
    """
    del logprobs, slots
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio = log_ratio.exp()
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clips = {
        "clip_low": ((ratio < low) & (advantages < 0)).to(ratio),
        "clip_high": ((ratio > high) & (advantages > 0)).to(ratio),
    }
    if config.dual_clip is not None:
        ceiling = -config.dual_clip * advantages
        clips["dual_clip"] = ((surrogate > ceiling) & (advantages < 0)).to(ratio)
        surrogate = torch.where(advantages < 0, torch.minimum(surrogate, ceiling), surrogate)
    return Surrogate(surrogate, ratio, clips)


def gspo(
    logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor, slots: ScoredSlots, config: LossConfig
) -> Surrogate:
    """As `grpo` with one ratio a response, exp(mean of policy - anchor over its scored tokens)
    (arXiv 2507.18071).
    """
    mean = _document_mean(log_ratio, slots=slots)
    return grpo(logprobs, log_ratio=mean, advantages=advantages, slots=slots, config=config)


def cispo(
    logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor, slots: ScoredSlots, config: LossConfig
) -> Surrogate:
    """-c(r) A log policy, where c(r) carries no gradient: no token loses its own (arXiv 2506.13585)."""
    del slots
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio = log_ratio.detach().exp()
    clips = {"clip_low": (ratio < low).to(ratio), "clip_high": (ratio > high).to(ratio)}
    return Surrogate(-ratio.clamp(low, high) * advantages * logprobs, ratio, clips)


SURROGATES: dict[LossKind, SurrogateFunction] = {
    LossKind.grpo: grpo,
    LossKind.gspo: gspo,
    LossKind.cispo: cispo,
}


def surrogate_of(config: LossConfig) -> SurrogateFunction:
    """The function of `loss.surrogate`, else that of `loss.kind`."""
    if config.surrogate is None:
        return SURROGATES[config.kind]
    return load_surrogate(config.surrogate)


def behavior_weights(
    log_weights: Tensor, *, slots: ScoredSlots, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """[S] anchor - behaviour log-probs -> [S] importance weights without gradient, and where their bounds
    act.

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl): w = exp(anchor - behaviour), by
    token or as the product over the response. Outside [tis_low, tis_high] it is clipped or, with
    `tis_bound=mask`, 0 (IcePop, arXiv 2510.18855). Denominators stay those of the loss mask.
    """
    if config.tis_level is WeightLevel.sequence:
        log_weights = _per_document(log_weights, slots=slots)
    weights = log_weights.detach().exp()
    low = config.tis_low if config.tis_low is not None else 0.0
    high = config.tis_high if config.tis_high is not None else float("inf")
    below, above = weights < low, weights > high
    if config.tis_bound is WeightBound.mask:
        bounded = torch.where(below | above, torch.zeros_like(weights), weights)
    else:
        bounded = weights.clamp(low, high)
    # The product over a long response overflows, and one such weight would be the whole mean.
    reported = log_weights.detach().clamp(max=_MOST_LOG_WEIGHT).exp()
    shares = {"tis": reported, "tis_low": below.to(weights), "tis_high": above.to(weights)}
    return bounded, shares | {"tis_clipped": bounded}


def near_policy(drift: Tensor, *, advantages: Tensor, slots: ScoredSlots, limit: float) -> Tensor:
    """[S] behaviour - policy log-probs -> [S] 1, or 0 for all tokens of a response with a negative advantage
    and a mean drift above `limit`: off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556).
    """
    far = (_document_mean(drift, slots=slots) > limit) & (advantages < 0)
    return (~far).to(drift)


def kl_estimate(logprobs: Tensor, *, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """[S] estimates of KL(policy | reference) on tokens of the policy
    (http://joschu.net/blog/kl-approx.html).

    With d = policy - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a loss k1 only adds noise: its
    gradient averages to zero on policy. The expected gradient of k2 is that of the divergence.
    """
    difference = logprobs - ref_logprobs.detach()
    if estimator is KlEstimator.k1:
        return difference
    if estimator is KlEstimator.k2:
        return difference.square() / 2
    return torch.expm1(-difference) + difference
