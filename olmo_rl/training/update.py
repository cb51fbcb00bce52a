"""One optimizer update, pack by pack: what runs, what is summed, what is reported.

Sums travel as one flat tensor: every pack adds to the same names in the same order, so one all-reduce per
update gives every global count and mean, and a second one the maxima. Shapes: S scored slots of a pack, L
routed layers.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from olmo_rl.config import Config, ScoringConfig
from olmo_rl.data.packs import Pack, PackedBatch, RouteMode, RouteTrace
from olmo_rl.planning.schedule import Forecast
from olmo_rl.policy.loss import (
    LossOutput,
    policy_loss,
    scored_slots,
    sft_loss,
    token_entropies,
    token_logprobs,
)
from olmo_rl.policy.moe import count_assignments
from olmo_rl.training.scoring import Decision
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
    """One pack: its share of the global loss (with graph until backward), sums by metric name, [2] maxima
    (|training forward - scoring pass|, |log ratio|) and the histogram of gaps (all detached). `sent` int64
    [E, L]: assignments that the dispatcher sent to each destination, where a forecast says how many.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: Tensor
    gaps: Tensor
    result: LossOutput
    sent: Tensor | None = None


def score_pack(pack: Pack, *, strategy: ExpertParallelStrategy, mode: RouteMode) -> Tensor:
    """Log-probs [S] of the pack's scored slots by the present policy, without gradients."""
    slots = scored_slots(pack)
    with torch.no_grad():
        output = strategy.forward_pack(pack, mode=mode, rows=slots.rows)
        return token_logprobs(output.logits, targets=pack["tokens"][slots.slots])


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
) -> PackReport:
    """Forward one pack and form its share of the step's loss. `scored` [S]: what the scoring pass found,
    where it ran.
    """
    slots = scored_slots(pack)
    trace = RouteTrace()
    output = strategy.forward_pack(pack, mode=mode, rows=slots.rows, trace=trace)
    logprobs = token_logprobs(output.logits, targets=pack["tokens"][slots.slots])
    behavior = pack["behavior_logprobs"][slots.slots]
    if objective is SUPERVISED:
        result = sft_loss(
            logprobs,
            slots=slots,
            reduction=config.loss.reduction,
            normalisers=batch.normalisers,
        )
    else:
        anchor = scored if scored is not None and anchor_is_scored else logprobs.detach()
        result = policy_loss(
            logprobs,
            anchor_logprobs=anchor,
            behavior_logprobs=behavior,
            ref_logprobs=pack["ref_logprobs"][slots.slots] if config.loss.kl_coef > 0 else None,
            advantages=pack["advantages"][slots.slots],
            slots=slots,
            config=config.loss,
            normalisers=batch.normalisers,
            entropies=token_entropies(output.logits) if config.loss.entropy_coef != 0 else None,
        )
    real_tokens = sum(len(sample) for sample in batch.samples)
    balance = output.router_balance.sum() * (pack.real_tokens / real_tokens)
    z = output.router_z.sum() / real_tokens
    loss = result.loss + config.loss.router_aux_weight * balance + config.loss.router_z_weight * z
    sums = {f"loss/{name}": value for name, value in result.terms.items()}
    sums |= {
        "loss/total": loss.detach(),
        "loss/router_balance": balance.detach(),
        "loss/router_z": z.detach(),
    }
    sums |= {
        "count/tokens": torch.tensor(float(pack.real_tokens)),
        "count/scored": torch.tensor(float(len(slots.slots))),
        "count/packs": torch.tensor(1.0),
    }
    sums |= _replay_sums(pack, trace=trace, num_experts=config.model.num_experts)
    gap = (logprobs.detach() - behavior).abs().double()
    drift = torch.zeros_like(gap) if scored is None else (logprobs.detach() - scored).abs().double()
    if objective.anchored:  # demonstrations have no behaviour policy to agree with
        sums |= {"sum/gap": gap.sum(), "sum/drift": drift.sum()}
    maxima = torch.stack([torch.cat([drift, drift.new_zeros(1)]).max(), result.max_log_ratio.double()])
    return PackReport(
        loss=loss,
        sums=sums,
        maxima=maxima,
        gaps=_histogram(gap),
        result=result,
        sent=None if batch.forecast is None else _sent(trace, forecast=batch.forecast),
    )


def _sent(trace: RouteTrace, *, forecast: Forecast) -> Tensor:
    """int64 [E, L]: this pack's assignments by destination; experts lie in contiguous blocks."""
    ep_degree = forecast.loads.shape[2]
    counts = torch.stack([trace.counts[layer] for layer in forecast.layers])
    return counts.reshape(len(counts), ep_degree, -1).sum(-1).T


def _replay_sums(pack: Pack, *, trace: RouteTrace, num_experts: int) -> dict[str, Tensor]:
    """Rows replayed, (layer, expert) counts that differ from the recorded routes, overlap with live top-k."""
    rows = recorded_rows = mismatches = overlap = torch.zeros(())
    if pack.routes is not None and trace.overlap:
        rows = torch.tensor(float(len(pack) * len(pack.routed_layers)))
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
    return torch.bincount(torch.bucketize(gaps, edges), minlength=GAP_EDGES + 1).double()


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """What one update did, over all ranks. `totals` are global sums by name."""

    decision: Decision
    totals: dict[str, float]
    p99_gap: float
    versions: tuple[int, int]
    batch: PackedBatch
    coverage: float
    max_drift: float
    max_log_ratio: float
    grad_norm: float = 0.0
    lr: float = 0.0
    seconds: float = 0.0
    publish_seconds: float = 0.0
    balance: dict[str, Any] | None = None
    stepped: bool = True

    @classmethod
    def of(
        cls,
        reports: Iterable[PackReport],
        *,
        batch: PackedBatch,
        decision: Decision,
        device: torch.device,
        replica: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
        max_over_ranks: Callable[[Tensor], Tensor],
    ) -> UpdateReport:
        """Add up this rank's packs, then the two all-reduces."""
        reports = list(reports)
        names = sorted(reports[0].sums)
        flat = torch.stack(
            [torch.stack([r.sums[name].double().to(device) for name in names]) for r in reports]
        ).sum(0)
        gaps = torch.stack([r.gaps for r in reports]).sum(0)
        loads = _observed(reports, batch=batch, replica=replica).to(device)
        sums = sum_over_ranks(torch.cat([flat, gaps, loads.flatten()]))
        values = sums[: len(flat) + len(gaps)].tolist()
        balance = None
        if batch.forecast is not None:
            observed = sums[len(values) :].long().reshape(loads.shape)
            balance = batch.forecast.compare(observed.cpu().numpy())
        max_drift, max_log_ratio = max_over_ranks(torch.stack([r.maxima for r in reports]).amax(0)).tolist()
        versions = [sample.policy_version for sample in batch.samples]
        return cls(
            decision=decision,
            totals=dict(zip(names, values, strict=False)),
            p99_gap=_percentile(values[len(names) :], share=0.99),
            versions=(min(versions), max(versions)),
            batch=batch,
            coverage=_coverage(batch),
            max_drift=max_drift,
            max_log_ratio=max_log_ratio,
            balance=balance,
        )

    def warn_of_mismatch(self, *, update: int) -> None:
        """One line on rank 0 where the dispatcher counted something else than was planned."""
        if self.balance is not None and not self.balance["equal"]:
            rank_zero_warn(
                f"update {update}: {self.balance['mismatch']} expert loads differ from the plan, first "
                f"{self.balance['where'][0]}: routes changed after planning"
            )

    @property
    def finite(self) -> bool:
        return bool(torch.tensor([self.totals["loss/total"], self.grad_norm]).isfinite().all())

    def check_scoring(self, scoring: ScoringConfig) -> None:
        """Abort before the step where the training forward disagrees with the scoring pass, or engine with
        trainer.
        """
        if self.decision is Decision.checked and not self.mean_drift <= scoring.tolerance:
            raise RuntimeError(
                f"scoring check: training forward and scoring pass differ by {self.mean_drift:.3g} in the "
                f"mean, scoring.tolerance={scoring.tolerance}: nothing was stepped. Set scoring.mode=always "
                "to train on a separate pass, and report this: both ran the same packs"
            )
        if scoring.max_behavior_gap is not None and not self.mean_gap <= scoring.max_behavior_gap:
            raise RuntimeError(
                f"engine agreement: mean |policy - behaviour| {self.mean_gap:.3g} exceeds "
                f"scoring.max_behavior_gap={scoring.max_behavior_gap}: nothing was stepped"
            )

    @property
    def mean_drift(self) -> float:
        return self.totals.get("sum/drift", 0.0) / max(1.0, self.totals["count/scored"])

    @property
    def mean_gap(self) -> float:
        return self.totals.get("sum/gap", 0.0) / max(1.0, self.totals["count/scored"])

    @property
    def overlap(self) -> float:
        return self.totals["sum/overlap"] / max(1.0, self.totals["count/recorded_rows"])

    def metrics(self) -> dict[str, float]:
        """By the metric names of the README; the batch's own facts come beside them."""
        metrics = {name: value for name, value in self.totals.items() if name.startswith("loss/")}
        metrics |= {
            "grad/norm": self.grad_norm,
            "optim/lr": self.lr,
            "throughput/real_tokens_per_second": self.totals["count/tokens"] / self.seconds,
            "throughput/padded_tokens_per_second": self.totals["count/tokens"] / self.seconds,
            "time/update_s": self.seconds,
            "time/publish_s": self.publish_seconds,
            "memory/peak_allocated_gib": peak_memory_gib(),
        }
        if "sum/gap" in self.totals:
            metrics |= {
                "mismatch/mean": self.mean_gap,
                "mismatch/p99": self.p99_gap,
                "loss/max_log_ratio": self.max_log_ratio,
            }
        if self.totals["replay/rows"] > 0:
            metrics |= {"replay/coverage": self.coverage, "replay/overlap": self.overlap}
        return metrics

    def events(self) -> dict[str, dict[str, Any]]:
        """Values of the contract log by event."""
        replay: dict[str, Any] = {
            "rows": int(self.totals["replay/rows"]),
            "mismatches": int(self.totals["replay/mismatches"]),
            "coverage": self.coverage,
            "overlap": self.overlap,
        }
        optimizer: dict[str, Any] = {
            "terms": {name: value for name, value in self.totals.items() if name.startswith("loss/")},
            "max_log_ratio": self.max_log_ratio,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "policy_versions": list(self.versions),
            "local_scored_tokens": sum(int(pack["loss_mask"].sum()) for pack in self.batch.packs),
            "global_scored_tokens": self.batch.normalisers.tokens,
            "global_responses": self.batch.normalisers.responses,
            "scoring": self.decision.value,
            "stepped": self.stepped,
        }
        scoring: dict[str, Any] = {
            "decision": self.decision.value,
            "mean_abs": self.mean_drift,
            "max_abs": self.max_drift,
        }
        events = {"scoring": scoring, "replay": replay, "optimizer": optimizer}
        return events | self._balance_events()

    def _balance_events(self) -> dict[str, dict[str, Any]]:
        schedule = self.batch.schedule
        events: dict[str, dict[str, Any]] = {}
        if schedule is not None and schedule.plan.search is not None:
            events["expert_schedule"] = schedule.event(ids=[s.id for s in self.batch.samples])
        if schedule is not None and self.balance is not None:
            events["expert_balance"] = self.balance | {
                "token_work": schedule.after.token_work,
                "pair_work": schedule.after.pair_work,
                "columns": schedule.after.packs_per_rank,
                "update_s": self.seconds,
            }
        return events


def _observed(reports: list[PackReport], *, batch: PackedBatch, replica: int) -> Tensor:
    """float64 [C, R, E, L]: this rank's share of what every destination receives; sums stay exact."""
    if batch.forecast is None:
        return torch.zeros(0, dtype=torch.float64)
    observed = torch.zeros(batch.forecast.loads.shape, dtype=torch.float64)
    for column, report in enumerate(reports):
        assert report.sent is not None, "a forecast makes every pack count"
        observed[column, replica] = report.sent.double().cpu()
    return observed


def _percentile(counts: list[float], *, share: float) -> float:
    """Upper edge of the bin that holds the given share of values; 0 where there are none."""
    edges = [*torch.logspace(-8, 1, GAP_EDGES, dtype=torch.float64).tolist(), float("inf")]
    wanted, seen = share * sum(counts), 0.0
    for edge, count in zip(edges, counts, strict=True):
        seen += count
        if count > 0 and seen >= wanted:
            return edge
    return 0.0


def _coverage(batch: PackedBatch) -> float:
    """Share of rows that need a recorded route and have one (every document's tail is synthetic and not
    counted).
    """
    needed = sum(len(sample) - 1 for sample in batch.samples)
    have = sum(0 if sample.routes is None else len(sample.routes) for sample in batch.samples)
    return have / needed if needed else 1.0


def peak_memory_gib() -> float:
    """Peak allocated GPU memory of this process, or its peak resident memory on CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
