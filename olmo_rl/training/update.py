"""The packs of one optimizer update: what runs, and what each adds to the loss and to the sums.

Every pack adds to the same names, so that `update_report` can add them up over packs and ranks. Shapes: S
scored slots of a pack, L routed layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from olmo_rl.config import Config
from olmo_rl.data.packs import Pack, PackedBatch, RouteMode, RouteTrace
from olmo_rl.planning.schedule import Forecast
from olmo_rl.policy.hybrid import DecoderOutput, HybridDecoder
from olmo_rl.policy.loss import LossOutput, ScoredSlots, policy_loss, scored_slots, sft_loss
from olmo_rl.policy.moe import RouterTotals, count_assignments, routed_length, router_losses
from olmo_rl.training.strategy import ExpertParallelStrategy

# Upper edges of |policy - behaviour|, ten per decade from 1e-8: a percentile is exact to one edge (x 1.26).
GAP_EDGES = 91


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What an update optimises. `anchored`: needs policy anchors and so takes part in scoring; `replays`: has
    routes.
    """

    name: str
    anchored: bool
    replays: bool


POLICY = Objective(name="policy", anchored=True, replays=True)
SUPERVISED = Objective(name="supervised", anchored=False, replays=False)


@dataclass(kw_only=True, slots=True)
class PackReport:
    """One pack: its share of the global loss (with graph until backward), sums by metric name, [3] maxima
    (|training forward - scoring pass|, |log ratio|, ratio) and the histogram of gaps (all detached). `gap`
    and `drift` float64 [S]: |policy - behaviour|, |training forward - scoring pass|. `replayed` int64 [L, E]:
    assignments of recorded rows, None without replay. `sent` int64 [destinations, L]: assignments that the
    dispatcher sent to each destination, where a forecast says how many.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: Tensor
    gaps: Tensor
    gap: Tensor
    drift: Tensor
    slots: ScoredSlots
    result: LossOutput
    replayed: Tensor | None = None
    sent: Tensor | None = None


def score_pack(
    pack: Pack,
    *,
    strategy: ExpertParallelStrategy,
    mode: RouteMode,
    decoder: HybridDecoder | None = None,
) -> Tensor:
    """Log-probs [S] of the pack's scored slots by the present policy, or by `decoder`, without gradients."""
    slots = scored_slots(pack)
    with torch.no_grad():
        logprobs = strategy.forward_pack(pack, mode=mode, slots=slots, decoder=decoder).logprobs
    assert logprobs is not None, "a forward with slots gives log-probs"
    return logprobs


def run_pack(
    pack: Pack,
    *,
    strategy: ExpertParallelStrategy,
    mode: RouteMode,
    objective: Objective,
    config: Config,
    batch: PackedBatch,
    scored: Tensor | None,
    anchor_is_scored: bool,
    reference: Tensor | None = None,
) -> PackReport:
    """Forward one pack and form its share of the step's loss. `scored` [S]: what the scoring pass found,
    where it ran; `reference` [S]: what a frozen reference found, where the samples do not carry it.
    """
    slots = scored_slots(pack)
    trace = RouteTrace()
    output = strategy.forward_pack(
        pack, mode=mode, slots=slots, entropy=config.loss.entropy_coef != 0, trace=trace
    )
    logprobs = output.logprobs
    assert logprobs is not None, "a forward with slots gives log-probs"
    behavior = pack["behavior_logprobs"][slots.slots]
    if objective is SUPERVISED:
        result = sft_loss(
            logprobs,
            slots=slots,
            reduction=config.loss.reduction,
            normalisers=batch.normalisers,
        )
    else:
        if reference is None and config.loss.kl_coef != 0:
            reference = pack["ref_logprobs"][slots.slots]
        anchor = scored if scored is not None and anchor_is_scored else logprobs.detach()
        result = policy_loss(
            logprobs,
            anchor_logprobs=anchor,
            behavior_logprobs=behavior,
            ref_logprobs=reference,
            advantages=pack["advantages"][slots.slots],
            slots=slots,
            config=config.loss,
            normalisers=batch.normalisers,
            entropies=output.entropies,
        )
    balance, z = _router_losses(output, mode=mode, batch=batch, config=config)
    loss = result.loss
    if config.loss.router_aux_weight != 0:
        loss = loss + config.loss.router_aux_weight * balance
    if config.loss.router_z_weight != 0:
        loss = loss + config.loss.router_z_weight * z
    sums = {f"loss/{name}": value for name, value in result.terms.items()}
    sums |= {
        "loss/total": loss.detach(),
        "loss/router_balance": balance.detach(),
        "loss/router_z": z.detach(),
    }
    sums |= {
        "count/tokens": torch.tensor(float(pack.real_tokens)),
        "count/padded_tokens": torch.tensor(float(len(pack))),
        "count/scored": torch.tensor(float(len(slots.slots))),
        "count/packs": torch.tensor(1.0),
    }
    sums |= _replay_sums(pack, trace=trace, num_experts=config.model.num_experts)
    gap = (logprobs.detach() - behavior).abs().double()
    drift = torch.zeros_like(gap) if scored is None else (logprobs.detach() - scored).abs().double()
    if objective.anchored:  # demonstrations have no behaviour policy to agree with
        sums |= {"sum/gap": gap.sum(), "sum/drift": drift.sum()}
    largest = (torch.cat([drift, drift.new_zeros(1)]).max(), result.max_log_ratio, result.max_ratio)
    replaying = output.router is not None and mode is RouteMode.replay
    return PackReport(
        loss=loss,
        sums=sums,
        maxima=torch.stack([value.double() for value in largest]),
        gaps=_histogram(gap),
        gap=gap,
        drift=drift,
        slots=slots,
        result=result,
        replayed=output.router.dispatched.sum(1) if output.router is not None and replaying else None,
        sent=None if batch.forecast is None else _sent(trace, forecast=batch.forecast),
    )


def _router_losses(
    output: DecoderOutput, *, mode: RouteMode, batch: PackedBatch, config: Config
) -> tuple[Tensor, Tensor]:
    """This pack's share of the step's balancing loss and z-loss, unweighted; zeros for a dense model. Every
    rank knows all samples of the step, so denominators are global without asking anybody.
    """
    if output.router is None:
        return torch.zeros(()), torch.zeros(())
    rows = [routed_length(len(sample), mode=mode) for sample in batch.samples]
    totals = RouterTotals(rows=sum(rows), documents=sum(count > 0 for count in rows))
    return router_losses(output.router, config=config.loss, totals=totals)


def _sent(trace: RouteTrace, *, forecast: Forecast) -> Tensor:
    """int64 [E, L]: this pack's assignments by destination; experts lie in contiguous blocks."""
    ep_degree = forecast.loads.shape[2]
    counts = torch.stack([trace.counts[layer] for layer in forecast.layers])
    return counts.reshape(len(counts), ep_degree, -1).sum(-1).T


def _replay_sums(pack: Pack, *, trace: RouteTrace, num_experts: int) -> dict[str, Tensor]:
    """Real rows replayed, (layer, expert) counts that differ from the recorded routes, overlap with live
    top-k.
    """
    rows = recorded_rows = mismatches = overlap = torch.zeros(())
    if pack.routes is not None and trace.overlap:
        rows = torch.tensor(float(pack.real_tokens * len(pack.routed_layers)))
        recorded = [
            count_assignments(pack.routes[:, i], num_experts=num_experts)
            for i in range(len(pack.routed_layers))
        ]
        differs = [
            trace.counts[layer] != counts for layer, counts in zip(pack.routed_layers, recorded, strict=True)
        ]
        mismatches = torch.stack(differs).sum()
        overlap = torch.stack([trace.overlap[layer] for layer in pack.routed_layers]).sum()
        # Every document ends in a synthetic row, which no engine chose.
        recorded_rows = torch.tensor(float((pack.real_tokens - len(pack.ids)) * len(pack.routed_layers)))
    return {
        "replay/rows": rows,
        "replay/mismatches": mismatches,
        "sum/overlap": overlap,
        "count/recorded_rows": recorded_rows,
    }


def _histogram(gaps: Tensor) -> Tensor:
    """Counts of |policy - behaviour| over logarithmic edges: sums over packs and ranks, unlike a
    percentile.
    """
    edges = torch.logspace(-8, 1, GAP_EDGES, dtype=gaps.dtype, device=gaps.device)
    counts = torch.zeros(GAP_EDGES + 1, dtype=torch.float64, device=gaps.device)
    return counts.index_add_(0, torch.bucketize(gaps, edges), torch.ones_like(gaps, dtype=torch.float64))
