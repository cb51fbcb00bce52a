"""What the packs of one step did: measures of each pack, and their sums and maxima over packs and ranks.

Every pack gives the same names, so that sums travel as one flat tensor: one all-reduce per step gives every
global count and mean, a second one the maxima. Means are sums divided once by a global count. Shapes: S
scored slots of a pack, D its documents, C columns, R replicas, L routed layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olmo_rl.data.means import Mean
from olmo_rl.data.packs import Pack, RouteTrace, Step
from olmo_rl.planning.schedule import Forecast
from olmo_rl.policy.loss import LossOutput, ScoredSlots
from olmo_rl.policy.moe import RouterStatistics, count_assignments
from olmo_rl.training.kept_samples import KeptSamples, differences_of
from olmo_rl.training.strategy import ExpertParallelStrategy

# Upper edges of |policy - behaviour|, ten per decade from 1e-8: a percentile is exact to one edge (x 1.26).
GAP_EDGES = 91
_MOST_LOG = 10.0  # of a log-prob difference in an estimate of a divergence, which would overflow


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackMeasures:
    """One pack, without its graph. `sums` by metric name; `maxima` float64 [3]: |training forward - scoring
    pass|, |log ratio|, ratio; `gaps`: the histogram of `gap`. `difference` float64 [S]: policy - behaviour;
    `gap` and `drift` float64 [S]: its magnitude, |training forward - scoring pass|. `broken` bool [D]:
    documents with a value that is not finite. `replayed` int64 [L, E]: assignments of recorded rows, None
    without replay. `sent` int64 [destinations, L]: assignments that the dispatcher sent to each destination,
    where a forecast gives their number; by slot of every destination where experts are lent.
    """

    sums: dict[str, Tensor]
    maxima: Tensor
    gaps: Tensor
    difference: Tensor
    gap: Tensor
    drift: Tensor
    slots: ScoredSlots
    broken: Tensor
    replayed: Tensor | None
    sent: Tensor | None

    @property
    def suspects(self) -> list[str]:
        """Ids of samples with values that are not finite. Waits for the device: use after the last pack."""
        return [self.slots.ids[d] for d in self.broken.nonzero().flatten().tolist()]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTotals:
    """One step over all packs and ranks: global `sums` by name, the 99th percentile of |policy - behaviour|,
    maxima, the entropy of each routed layer's assignments (none without replay), and the values of
    `expert_balance`, None without a forecast.

    `gap_counts`: the histogram of |policy - behaviour| over the edges of `gap_edges`; `kept`: the samples to
    keep, with `kept_gaps`, policy - behaviour of their scored tokens; `began` and `busy` by rank: when it
    began the update, seconds of the system's clock, and its CPU seconds from there to the end of its packs.
    """

    sums: dict[str, float]
    p99_gap: float | None
    max_drift: float
    max_log_ratio: float
    max_ratio: float
    expert_entropies: tuple[float, ...]
    balance: dict[str, Any] | None
    gap_counts: tuple[int, ...] = ()
    kept: KeptSamples | None = None
    kept_gaps: tuple[list[float], ...] = ()
    began: tuple[float, ...] = ()
    busy: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        return self.sums["loss/total"]

    @property
    def mean_drift(self) -> float | None:
        """Mean |training forward - scoring pass| log-prob of scored tokens; None if not compared."""
        return self._mean("sum/drift", over="count/scored")

    @property
    def mean_gap(self) -> float | None:
        """Mean |policy - behaviour| log-prob of scored tokens; None if not compared."""
        return self._mean("sum/gap", over="count/scored")

    @property
    def divergence(self) -> float | None:
        """Estimate of KL(behaviour | policy), mean over scored tokens; None if not compared."""
        return self._mean("sum/divergence", over="count/scored")

    @property
    def entropy(self) -> float | None:
        """Entropy of the policy, mean over scored tokens: exact where the loss has it, else estimated as the
        mean of -log-prob of the sampled tokens; None if not compared.
        """
        exact = self.sums.get("loss/mean_entropy")
        return self._mean("sum/surprisal", over="count/scored") if exact is None else exact

    @property
    def overlap(self) -> float | None:
        """Mean overlap of recorded routes with live top-k; None where no row is recorded."""
        return self._mean("sum/overlap", over="count/recorded_rows")

    def _mean(self, total: str, *, over: str) -> float | None:
        return Mean(total=self.sums[total], count=int(self.sums[over])).value if total in self.sums else None


def measure_pack(
    pack: Pack,
    *,
    slots: ScoredSlots,
    terms: dict[str, Tensor],
    result: LossOutput,
    logprobs: Tensor,
    scores: Tensor | None,
    compared: bool,
    router: RouterStatistics | None,
    trace: RouteTrace,
    num_experts: int,
    forecast: Forecast | None,
) -> PackMeasures:
    """Measures of one pack. `terms`: its loss terms; `logprobs` [S], without a graph; `scores` [S]: of a
    scoring pass; `compared`: whether the policy that wrote the samples has log-probs to compare with;
    `router`: under replay.
    """
    difference = (logprobs - pack["behavior_logprobs"][slots.slots]).double()
    gap = difference.abs()
    drift = torch.zeros_like(gap) if scores is None else (logprobs - scores).abs().double()
    sums = terms | {
        "count/tokens": torch.tensor(float(pack.real_tokens)),
        "count/rows": torch.tensor(float(pack.real_rows)),
        "count/padded_tokens": torch.tensor(float(pack.num_rows)),
        "count/scored": torch.tensor(float(len(slots.slots))),
        "count/packs": torch.tensor(1.0),
        "count/unshared_routes": torch.tensor(float(pack.unshared_routes)),
    }
    sums |= _replay_sums(pack, trace=trace, num_experts=num_experts)
    if compared:
        # k3 of http://joschu.net/blog/kl-approx.html, for tokens of the behaviour policy.
        divergence = torch.expm1(difference.clamp(max=_MOST_LOG)) - difference
        sums |= {
            "sum/gap": gap.sum(),
            "sum/drift": drift.sum(),
            "sum/divergence": divergence.sum(),
            "sum/surprisal": -logprobs.double().sum(),
        }
    largest = (torch.cat([drift, drift.new_zeros(1)]).max(), result.max_log_ratio, result.max_ratio)
    return PackMeasures(
        sums=sums,
        maxima=torch.stack([value.double() for value in largest]),
        gaps=_histogram(gap),
        difference=difference,
        gap=gap,
        drift=drift,
        slots=slots,
        broken=result.broken,
        replayed=None if router is None else router.dispatched.sum(1),
        sent=None if forecast is None else _sent(trace, forecast=forecast),
    )


def add_up(
    measures: Sequence[PackMeasures],
    *,
    step: Step,
    strategy: ExpertParallelStrategy,
    clocks: tuple[float, float],
    keep: int = 0,
) -> StepTotals:
    """Add up this rank's packs, then the two all-reduces. `clocks`: when this rank began the update and its
    CPU seconds since; `keep`: samples whose gaps are kept.
    """
    device = strategy.root_device
    names = sorted(measures[0].sums)
    flat = torch.stack(
        [torch.stack([one.sums[name].double().to(device) for name in names]) for one in measures]
    ).sum(0)
    gaps = torch.stack([one.gaps for one in measures]).sum(0)
    replayed = _replayed(measures).to(device)
    replica = strategy.topology.replica_of(strategy.global_rank)
    loads = _observed(measures, forecast=step.forecast, replica=replica).to(device)
    times = torch.zeros(2, strategy.world_size, dtype=torch.float64)
    times[:, strategy.global_rank] = torch.tensor(clocks, dtype=torch.float64)
    kept = KeptSamples.of(step.samples, count=keep)
    shown = _kept_gaps(measures, kept=kept, step=step)
    blocks = [flat, gaps, replayed.flatten(), loads.flatten(), times.flatten(), shown]
    sums = strategy.sum_over_ranks(torch.cat([block.to(device) for block in blocks]))
    totals, counts, assignments, observed, clock, differences = sums.split([len(block) for block in blocks])
    began, busy = clock.reshape(times.shape).tolist()
    balance = None
    if step.forecast is not None:
        balance = step.forecast.compare(observed.long().reshape(loads.shape).cpu().numpy())
    maxima = strategy.max_over_ranks(torch.stack([one.maxima for one in measures]).amax(0)).tolist()
    return StepTotals(
        sums=dict(zip(names, totals.tolist(), strict=True)),
        p99_gap=_percentile(counts.tolist(), share=0.99),
        max_drift=maxima[0],
        max_log_ratio=maxima[1],
        max_ratio=maxima[2],
        expert_entropies=tuple(
            expert_entropy(layer) for layer in assignments.reshape(replayed.shape).tolist()
        ),
        balance=balance,
        gap_counts=tuple(map(int, counts.tolist())),
        kept=kept,
        kept_gaps=kept.split(differences.cpu()),
        began=tuple(began),
        busy=tuple(busy),
    )


def gap_edges() -> list[float]:
    """Upper edges of the bins of |policy - behaviour|; the last bin has none."""
    return [float(edge) for edge in torch.logspace(-8, 1, GAP_EDGES, dtype=torch.float64)]


def _kept_gaps(measures: Sequence[PackMeasures], *, kept: KeptSamples, step: Step) -> Tensor:
    """float64 [N]: this rank's share of the gaps of kept samples."""
    if not kept.positions:
        return torch.zeros(0, dtype=torch.float64)
    samples = {sample.id: sample for sample in step.samples}
    wanted = {step.samples[place].id for place in kept.positions}
    differences: dict[str, Tensor] = {}
    for pack, one in zip(step.packs, measures, strict=True):
        differences |= differences_of(pack.ids, one.difference, samples=samples, wanted=wanted)
    return kept.block(differences, samples=step.samples)


def expert_entropy(assignments: list[float]) -> float:
    """The evenness of one layer's assignments over its experts: their entropy over that of an even spread,
    from 0 (one expert takes all) to 1; 0 where there is nothing to spread.
    """
    total = sum(assignments)
    if total == 0 or len(assignments) < 2:
        return 0.0
    shares = [count / total for count in assignments if count > 0]
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(assignments))


def _sent(trace: RouteTrace, *, forecast: Forecast) -> Tensor:
    """int64 [E, L]: this pack's assignments by destination; experts lie in contiguous blocks. Where experts
    are lent, by slot.
    """
    if forecast.slots > 1:
        return torch.stack([trace.slots[layer] for layer in forecast.layers]).T
    ep_degree = forecast.loads.shape[2]
    counts = torch.stack([trace.counts[layer] for layer in forecast.layers])
    return counts.reshape(len(counts), ep_degree, -1).sum(-1).T


def _replay_sums(pack: Pack, *, trace: RouteTrace, num_experts: int) -> dict[str, Tensor]:
    """Real rows replayed, (layer, expert) counts that differ from the recorded routes, overlap with live
    top-k.
    """
    rows = recorded_rows = mismatches = overlap = torch.zeros(())
    if pack.routes is not None and trace.overlap:
        rows = torch.tensor(float(pack.real_rows * len(pack.routed_layers)))
        recorded = [
            count_assignments(pack.routes[:, i], num_experts=num_experts)
            for i in range(len(pack.routed_layers))
        ]
        differs = [
            trace.counts[layer] != counts for layer, counts in zip(pack.routed_layers, recorded, strict=True)
        ]
        mismatches = torch.stack(differs).sum()
        overlap = torch.stack([trace.overlap[layer] for layer in pack.routed_layers]).sum()
        recorded_rows = torch.tensor(float(pack.recorded_rows * len(pack.routed_layers)))
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


def _replayed(measures: Sequence[PackMeasures]) -> Tensor:
    """float64 [L, E]: assignments of this rank's recorded rows; [0, 0] without replay."""
    parts = [one.replayed for one in measures if one.replayed is not None]
    return torch.stack(parts).sum(0).double() if parts else torch.zeros(0, 0, dtype=torch.float64)


def _observed(measures: Sequence[PackMeasures], *, forecast: Forecast | None, replica: int) -> Tensor:
    """float64 [C, R, E, L]: this rank's share of what every destination receives; sums stay exact."""
    if forecast is None:
        return torch.zeros(0, dtype=torch.float64)
    observed = torch.zeros(forecast.loads.shape, dtype=torch.float64)
    for column, one in enumerate(measures):
        assert one.sent is not None, "a forecast makes every pack count"
        observed[column, replica] = one.sent.double().cpu()
    return observed


def _percentile(counts: list[float], *, share: float) -> float | None:
    """Upper edge of the bin that holds the given share of values; None where there are none."""
    edges = [*gap_edges(), float("inf")]
    wanted, seen = share * sum(counts), 0.0
    for edge, count in zip(edges, counts, strict=True):
        seen += count
        if count > 0 and seen >= wanted:
            return edge
    return None
