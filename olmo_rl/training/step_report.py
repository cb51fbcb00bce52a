"""What one update did, over all ranks: metrics, events of the contract log.

Sums travel as one flat tensor: every pack adds to the same names in the same order, so one all-reduce per
update gives every global count and mean, and a second one the maxima. Means are sums divided once by a global
count. Shapes: C columns, R replicas, L routed layers, E experts.
"""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from olmo_rl.data.packs import PackedBatch
from olmo_rl.training.scoring import Decision
from olmo_rl.training.update import GAP_EDGES, PackReport


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """What one update did, over all ranks. `totals` are global sums by name, `expert_entropies` of the routed
    layers in order, none without replay; `versions`: samples by the policy version that wrote them;
    `reference`: frozen or recorded, None where it has no part.
    """

    decision: Decision
    totals: dict[str, float]
    p99_gap: float
    versions: Counter[int]
    batch: PackedBatch
    coverage: float
    max_drift: float
    max_log_ratio: float
    max_ratio: float
    expert_entropies: tuple[float, ...]
    grad_norm: float = 0.0
    lr: float = 0.0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    publish_seconds: float = 0.0
    balance: dict[str, Any] | None = None
    reference: str | None = None
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
        replayed = _replayed(reports).to(device)
        loads = _observed(reports, batch=batch, replica=replica).to(device)
        sums = sum_over_ranks(torch.cat([flat, gaps, replayed.flatten(), loads.flatten()]))
        sizes = [len(flat), len(gaps), replayed.numel(), loads.numel()]
        totals, counts, assignments, observed = sums.split(sizes)
        balance = None
        if batch.forecast is not None:
            balance = batch.forecast.compare(observed.long().reshape(loads.shape).cpu().numpy())
        maxima = max_over_ranks(torch.stack([r.maxima for r in reports]).amax(0)).tolist()
        return cls(
            decision=decision,
            totals=dict(zip(names, totals.tolist(), strict=True)),
            p99_gap=_percentile(counts.tolist(), share=0.99),
            versions=Counter(sample.policy_version for sample in batch.samples),
            batch=batch,
            coverage=_coverage(batch),
            max_drift=maxima[0],
            max_log_ratio=maxima[1],
            max_ratio=maxima[2],
            expert_entropies=tuple(
                expert_entropy(layer) for layer in assignments.reshape(replayed.shape).tolist()
            ),
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
            "throughput/padded_tokens_per_second": self.totals["count/padded_tokens"] / self.seconds,
            "time/update_s": self.seconds,
            **{f"time/{phase}_s": seconds for phase, seconds in self.phases.items()},
            "time/publish_s": self.publish_seconds,
            "memory/peak_allocated_gib": peak_memory_gib(),
        }
        if "sum/gap" in self.totals:
            metrics |= {
                "mismatch/mean": self.mean_gap,
                "mismatch/p99": self.p99_gap,
                "loss/max_log_ratio": self.max_log_ratio,
                "loss/max_ratio": self.max_ratio,
            }
        if self.totals["replay/rows"] > 0:
            metrics |= {"replay/coverage": self.coverage, "replay/overlap": self.overlap}
        if self.expert_entropies:
            metrics |= {
                "replay/expert_entropy": sum(self.expert_entropies) / len(self.expert_entropies),
                "replay/expert_entropy_min": min(self.expert_entropies),
            }
        return metrics

    def events(self) -> dict[str, dict[str, Any]]:
        """Values of the contract log by event."""
        replay: dict[str, Any] = {
            "rows": int(self.totals["replay/rows"]),
            "mismatches": int(self.totals["replay/mismatches"]),
            "coverage": self.coverage,
            "overlap": self.overlap,
            "expert_entropy": list(self.expert_entropies),
        }
        optimizer: dict[str, Any] = {
            "terms": {name: value for name, value in self.totals.items() if name.startswith("loss/")},
            "max_log_ratio": self.max_log_ratio,
            "max_ratio": self.max_ratio,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "policy_versions": [min(self.versions), max(self.versions)],
            "samples_by_version": {str(v): count for v, count in sorted(self.versions.items())},
            "reference": self.reference,
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


def expert_entropy(assignments: list[float]) -> float:
    """How evenly one layer's assignments fall on its experts: their entropy over that of an even spread, from
    0 (one expert takes all) to 1; 0 where there is nothing to spread.
    """
    total = sum(assignments)
    if total == 0 or len(assignments) < 2:
        return 0.0
    shares = [count / total for count in assignments if count > 0]
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(assignments))


def _replayed(reports: list[PackReport]) -> Tensor:
    """float64 [L, E]: assignments of this rank's recorded rows; [0, 0] without replay."""
    parts = [report.replayed for report in reports if report.replayed is not None]
    return torch.stack(parts).sum(0).double() if parts else torch.zeros(0, 0, dtype=torch.float64)


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
