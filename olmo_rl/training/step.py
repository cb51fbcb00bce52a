"""One optimizer step, top to bottom: `run_step` moves each pack, runs the decoder with replayed routes, forms
the loss, runs backward, clips, decides with all ranks whether to step, and steps; `publish` sends the weights
to the engines.

Losses are divided by global counts first, gradients are summed over ranks and synchronised on the last pack,
and two all-reduces sum its measures (measures.py). A step with values that are not finite is not taken.
Shapes: S scored slots of a pack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from olmo_rl.config import Config, OnNonfinite
from olmo_rl.data.packs import Pack, RouteMode, RouteTrace, Step
from olmo_rl.policy import sharded
from olmo_rl.policy.hybrid import DecoderOutput, HybridDecoder
from olmo_rl.policy.loss import LossOutput, ScoredSlots, policy_loss, scored_slots, sft_loss
from olmo_rl.policy.moe import RouterTotals, routed_length, router_losses
from olmo_rl.progress import note_pack, note_phase, note_update
from olmo_rl.training.frozen_reference import FrozenReference, check_recorded
from olmo_rl.training.measures import PackMeasures, StepTotals, add_up, measure_pack
from olmo_rl.training.memory import peak_memory_gib, reset_peak_memory
from olmo_rl.training.scoring import Decision, ScoringSchedule, score_pack
from olmo_rl.training.step_checks import nonfinite, refuse_disagreement
from olmo_rl.training.stopwatch import Stopwatch
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.transfer import moved
from olmo_rl.training.update_norms import is_measured, measured_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The objective of an update. `anchored`: needs policy anchors and so takes part in scoring; `replays`:
    has routes.
    """

    name: str
    anchored: bool
    replays: bool


POLICY = Objective(name="policy", anchored=True, replays=True)
SUPERVISED = Objective(name="supervised", anchored=False, replays=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Learner:
    """The parts that every step of a run uses. `backward` runs backward on a pack's loss, `apply` steps the
    optimizer and its schedule, `on_pack` sees how many packs of how many are done.
    """

    config: Config
    objective: Objective
    strategy: ExpertParallelStrategy
    decoder: HybridDecoder
    reference: FrozenReference | None
    optimizer: torch.optim.Optimizer
    scoring: ScoringSchedule
    watch: Stopwatch
    backward: Callable[[Tensor], None]
    apply: Callable[[], None]
    on_pack: Callable[[int, int], None] | None = None

    @property
    def device(self) -> torch.device:
        return self.strategy.root_device

    @property
    def mode(self) -> RouteMode:
        return route_mode(self.config, objective=self.objective)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """The result of one step, over all ranks. `stepped`: the optimizer stepped, which it does not where loss
    or gradient are not finite; `reference`: frozen or recorded, None where the loss has no reference;
    `seconds` of the step, `phases` of its parts; `grad_norms`: by the names of `sharded.PARTS`;
    `update_norms`: metrics of what the step changed, in the updates that measure it; `lag`: updates between
    the policy that wrote a sample and the one that trains on it, mean and most, None where versions are
    those of another run; `peak_gib`: peak memory.
    """

    step: Step
    decision: Decision
    totals: StepTotals
    grad_norm: float
    lr: float
    stepped: bool
    reference: str | None
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    grad_norms: dict[str, float] = field(default_factory=dict)
    update_norms: dict[str, float] = field(default_factory=dict)
    lag: tuple[float, int] | None = None
    peak_gib: float = 0.0


def route_mode(config: Config, *, objective: Objective) -> RouteMode:
    """Replayed routes where the objective has them; live routing otherwise."""
    return RouteMode.replay if config.replay and objective.replays else RouteMode.live


def run_step(step: Step, *, learner: Learner, update: int, skips_in_a_row: int) -> StepResult:
    """One update from this rank's packs. A collective of all ranks. `update`: its number, from 1;
    `skips_in_a_row`: updates just before it that were not finite.

    Raises Refusal on all ranks alike, with nothing stepped, where a guard of the configuration trips.
    """
    note_update(update, packs=len(step.packs))
    watch, scored_before = learner.watch, learner.watch.seconds()["score"]
    started = time.perf_counter() - scored_before
    clocks = time.time(), time.process_time()
    reset_peak_memory(learner.device)
    with watch.lap("score"):
        decision, scores = _score(step, learner=learner)
        references = _score_reference(step, learner=learner)
    measures = accumulate_gradients(
        step,
        learner=learner,
        scores=scores,
        anchor_is_scored=decision is Decision.standalone,
        references=references,
    )
    totals = add_up(
        measures,
        step=step,
        strategy=learner.strategy,
        clocks=(clocks[0], time.process_time() - clocks[1]),
        keep=learner.config.callbacks.samples if learner.objective.anchored else 0,
    )
    with watch.lap("clip"):
        max_norm = learner.config.optim.max_grad_norm
        norm, *norms = sharded.clip_grad_norms(learner.decoder, max_norm=max_norm).tolist()
    lr = learner.optimizer.param_groups[0]["lr"]
    stepped = _may_step(
        totals,
        norm=norm,
        measures=measures,
        decision=decision,
        update=update,
        skips_in_a_row=skips_in_a_row,
        learner=learner,
    )
    changes: dict[str, float] = {}
    if stepped:
        with watch.lap("optimizer"):
            if is_measured(update):
                strategy = learner.strategy
                changes = measured_step(learner.decoder, learner.apply, add=strategy.sum_over_ranks)
            else:
                learner.apply()
    phases = watch.seconds()
    return StepResult(
        step=step,
        decision=decision,
        totals=totals,
        grad_norm=norm,
        lr=lr,
        stepped=stepped,
        reference=_reference_kind(learner),
        seconds=time.perf_counter() - started,
        phases=phases,
        grad_norms=_by_part(learner.decoder, norms),
        lag=_lag(step, update=update) if learner.config.generates and learner.objective.anchored else None,
        update_norms=changes,
        peak_gib=peak_memory_gib(learner.device),
    )


def _by_part(decoder: HybridDecoder, norms: Sequence[float]) -> dict[str, float]:
    """Norms by the name of each part that the decoder has."""
    present = {sharded.part_of(name) for name, _ in decoder.named_parameters()}
    return {part: norms[place] for place, part in enumerate(sharded.PARTS) if place in present}


def _lag(step: Step, *, update: int) -> tuple[float, int]:
    """Updates between the policy that wrote a sample and the one that trains on it: mean and most."""
    lags = [update - 1 - sample.policy_version for sample in step.samples]
    return sum(lags) / len(lags), max(lags)


def publish(
    decoder: HybridDecoder, *, version: int, to: Callable[[HybridDecoder, int], dict[str, float]] | None
) -> dict[str, float]:
    """Send the weights of `version` to the engines, if there are any; return the metrics of that. A
    collective of all ranks.
    """
    if to is None:
        return {}
    note_phase("publish")
    return to(decoder, version)


def score_step(step: Step, *, learner: Learner) -> tuple[Tensor, ...]:
    """Log-probs [S] of the scored slots of every pack by the present policy, without gradients."""
    packs = moved(step.packs, device=learner.device)
    return tuple(score_pack(pack, strategy=learner.strategy, mode=learner.mode) for pack in packs)


def _score(step: Step, *, learner: Learner) -> tuple[Decision, Sequence[Tensor] | None]:
    """The scoring of this update, and the log-probs of each pack that a pass of its own found:
    the step's anchors, or those of a check that the training forward is compared with.
    """
    if not learner.objective.anchored:
        return Decision.skipped, None
    decision = learner.scoring.decide(steps_in_collection=step.steps_in_collection)
    if decision is Decision.checked:
        return decision, score_step(step, learner=learner)
    assert decision is Decision.skipped or step.anchors is not None, "a collection is scored as it is opened"
    return decision, step.anchors


def _score_reference(step: Step, *, learner: Learner) -> list[Tensor] | None:
    """Log-probs of the frozen reference for every pack, None where it has no part. Its weights never change,
    so each step is scored when it trains.
    """
    if learner.config.loss.kl_coef == 0 or not learner.objective.anchored:
        return None
    check_recorded(step.samples, frozen=learner.reference is not None)
    if learner.reference is None:
        return None
    return learner.reference.score(moved(step.packs, device=learner.device), strategy=learner.strategy)


def _reference_kind(learner: Learner) -> str | None:
    if not learner.objective.anchored or learner.config.loss.kl_coef <= 0:
        return None
    return "recorded" if learner.reference is None else "frozen"


def accumulate_gradients(
    step: Step,
    *,
    learner: Learner,
    scores: Sequence[Tensor] | None,
    anchor_is_scored: bool,
    references: Sequence[Tensor] | None,
) -> list[PackMeasures]:
    """Forward and backward of this rank's packs, one after another. Nothing here waits for the device."""
    watch, measures = learner.watch, []
    for index, pack in enumerate(moved(step.packs, device=learner.device, watch=watch)):
        note_pack(index + 1)
        sharded.set_gradient_sync(learner.decoder, last=index == len(step.packs) - 1)
        with watch.lap("forward"):
            loss, measured = run_pack(
                pack,
                step=step,
                learner=learner,
                scores=None if scores is None else scores[index].to(learner.device),
                anchor_is_scored=anchor_is_scored,
                reference=None if references is None else references[index],
            )
        with watch.lap("backward"):
            learner.backward(loss)
        del loss  # and its graph, before the next pack needs the memory
        measures.append(measured)
        if learner.on_pack is not None:
            learner.on_pack(index + 1, len(step.packs))
    return measures


def run_pack(
    pack: Pack,
    *,
    step: Step,
    learner: Learner,
    scores: Tensor | None,
    anchor_is_scored: bool,
    reference: Tensor | None,
) -> tuple[Tensor, PackMeasures]:
    """Forward one pack: its share of the step's loss, with its graph, and its measures, without.

    `scores` [S]: what a scoring pass found, where it ran; `reference` [S]: what a frozen reference found,
    where the samples do not carry it.
    """
    slots, trace, config = scored_slots(pack), RouteTrace(), learner.config
    output = learner.strategy.forward_pack(
        pack, mode=learner.mode, slots=slots, entropy=config.loss.entropy_coef != 0, trace=trace
    )
    assert output.logprobs is not None, "a forward with slots gives log-probs"
    anchor = scores if scores is not None and anchor_is_scored else output.logprobs.detach()
    result = _objective_loss(
        output, pack=pack, slots=slots, anchor=anchor, reference=reference, step=step, learner=learner
    )
    balance, z = _router_losses(output, step=step, learner=learner)
    loss = result.loss
    if config.loss.router_aux_weight != 0:
        loss = loss + config.loss.router_aux_weight * balance
    if config.loss.router_z_weight != 0:
        loss = loss + config.loss.router_z_weight * z
    terms = {f"loss/{name}": value for name, value in result.terms.items()} | {
        "loss/total": loss.detach(),
        "loss/router_balance": balance.detach(),
        "loss/router_z": z.detach(),
    }
    measured = measure_pack(
        pack,
        slots=slots,
        terms=terms,
        result=result,
        logprobs=output.logprobs.detach(),
        scores=scores,
        compared=learner.objective.anchored,  # demonstrations have no behaviour policy to agree with
        router=output.router if learner.mode is RouteMode.replay else None,
        trace=trace,
        num_experts=config.model.num_experts,
        forecast=step.forecast,
    )
    return loss, measured


def _objective_loss(
    output: DecoderOutput,
    *,
    pack: Pack,
    slots: ScoredSlots,
    anchor: Tensor,
    reference: Tensor | None,
    step: Step,
    learner: Learner,
) -> LossOutput:
    """The pack's share of the loss of the objective, without router losses."""
    loss, logprobs = learner.config.loss, output.logprobs
    assert logprobs is not None
    if learner.objective is SUPERVISED:
        return sft_loss(logprobs, slots=slots, reduction=loss.reduction, normalisers=step.normalisers)
    if reference is None and loss.kl_coef != 0:
        reference = pack["ref_logprobs"][slots.slots]
    return policy_loss(
        logprobs,
        anchor_logprobs=anchor,
        behavior_logprobs=pack["behavior_logprobs"][slots.slots],
        ref_logprobs=reference,
        advantages=pack["advantages"][slots.slots],
        slots=slots,
        config=loss,
        normalisers=step.normalisers,
        entropies=output.entropies,
    )


def _router_losses(output: DecoderOutput, *, step: Step, learner: Learner) -> tuple[Tensor, Tensor]:
    """The pack's share of the step's balancing loss and z-loss, unweighted; zeros for a dense model. Every
    rank has all samples of the step, so denominators are global without a collective.
    """
    if output.router is None:
        return torch.zeros(()), torch.zeros(())
    rows = [routed_length(len(sample), mode=learner.mode) for sample in step.samples]
    totals = RouterTotals(rows=sum(rows), documents=sum(count > 0 for count in rows))
    return router_losses(output.router, config=learner.config.loss, totals=totals)


def _may_step(
    totals: StepTotals,
    *,
    norm: float,
    measures: Sequence[PackMeasures],
    decision: Decision,
    update: int,
    skips_in_a_row: int,
    learner: Learner,
) -> bool:
    """Whether the optimizer may step: agreed by all ranks, since loss and norm are global."""
    config, gather = learner.config, learner.strategy.gather_objects
    if bool(torch.tensor([totals.loss, norm]).isfinite().all()):
        if learner.objective.anchored:
            refuse_disagreement(
                totals, measures=measures, decision=decision, update=update, config=config, gather=gather
            )
        return True
    skips = 0
    if config.loss.on_nonfinite is OnNonfinite.skip:
        learner.optimizer.zero_grad()
        skips = skips_in_a_row + 1
        if skips <= config.batch.max_skips:
            return False
    raise nonfinite(totals, norm=norm, measures=measures, update=update, skips_in_a_row=skips, gather=gather)
