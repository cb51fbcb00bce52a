"""Mixture of experts as this project uses it: where expert ids come from, what routers report, the latent
layer.

Owns router losses and the rules of replay. Under `RouteMode.replay` ids come from `context.routes[layer]` and
gate weights from the CURRENT scores at those ids, so gradients reach the gate; selection-only terms play no
part. Routing is never live where replay was asked for: a missing layer or a row count that does not fit is
refused. Ids themselves (range, duplicates) are validated where samples are read.

Router losses look at the rows that take part: real tokens, and under replay only those whose experts an
engine chose. A document's last row is synthetic there, its ids depend on the expert-parallel degree, and so
does everything that later routers see in it: with it, the same samples would give another loss on another
topology. Pads take no part.

Shapes: T tokens of a pack (pads included), C width of the model, E experts, K experts per token, D documents
of a pack, L routed layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from olmo_rl.config import AuxGrouping, CountSource, LossConfig, ModelConfig, Reduction
from olmo_rl.data.loans import LayerLoans
from olmo_rl.data.packs import PackContext, RouteMode
from olmo_rl.policy import titan
from olmo_rl.policy.compiling import region
from olmo_rl.policy.norms import RMSNorm
from olmo_rl.types import Refusal


class RouterStatistics(NamedTuple):
    """Statistics for the router losses, by document and over the rows that take part, so that every form of
    them is arithmetic after the forward. One layer: `rows` int64 [D], how many; `dispatched` and `current`
    int64 [D, E], assignments of the ids that were used and of live top-k; `scores` [D, E], sums of scores
    normalised by token, and `z` [D], sums of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5, before its
    mean), both with gradient. Of a decoder: the same with L layers in front.
    """

    rows: Tensor
    dispatched: Tensor
    current: Tensor
    scores: Tensor
    z: Tensor


class RouterTotals(NamedTuple):
    """Global denominators of router losses over all packs of all ranks: rows that take part, and documents
    that have any.
    """

    rows: int
    documents: int


_COMMUNICATION = (
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.wait_tensor.default,
)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`, run again in the backward; what all-to-all delivered is kept, not communicated
    twice.
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _COMMUNICATION else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        early_stop=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)`: dense feed-forward and shared expert."""

    def __init__(self, dim: int, *, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    @region()
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtureOfExperts(nn.Module):
    """Router and shared expert at model width; routed tokens at latent width where the model has one:
    down-projected before dispatch, combined in latent space, normalised on request, up-projected.
    """

    def __init__(self, config: ModelConfig, *, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.router = titan.build_router(
            config.dim,
            num_experts=config.num_experts,
            top_k=config.top_k,
            score_function=config.score_function,
            route_norm=config.route_norm,
            route_scale=config.route_scale,
        )
        width = config.dim if config.latent_dim is None else config.latent_dim
        self.routed_experts = titan.build_experts(
            width, hidden=config.expert_hidden, num_experts=config.num_experts, top_k=config.top_k
        )
        self.shared_experts = (
            SwiGLU(config.dim, hidden=config.shared_hidden) if config.shared_hidden else None
        )
        latent = config.latent_dim is not None
        self.latent_down = nn.Linear(config.dim, width, bias=False) if latent else None
        self.latent_norm = RMSNorm(width, eps=config.norm_eps) if latent and config.latent_norm else None
        self.latent_up = nn.Linear(width, config.dim, bias=False) if latent else None

    def forward(
        self, x: Tensor, context: PackContext, *, recompute: bool = False
    ) -> tuple[Tensor, RouterStatistics]:
        """`x` [T, C] -> output [T, C] and the statistics for router losses. Writes `context.trace` where
        there is one.

        `recompute`: the experts run again in the backward instead of keeping their activations.
        """
        replayed = replayed_ids(context, layer=self.layer, top_k=self.router.top_k)
        pads = None if context.pad_routes is None else context.pad_routes[self.layer]
        routed = self.router(x, replayed, pads)
        counts = count_assignments(routed.ids, num_experts=self.router.num_experts)
        live = routed.ids if replayed is None else self.router.choose(routed.scores)
        self._report(routed, counts, live=live, context=context)
        statistics = router_statistics(routed, live=live, context=context)
        loans = None if context.loans is None else context.loans[self.layer]
        if loans is not None:
            routed, counts = self._placed(routed, loans=loans, context=context)
        experts = partial(recomputed, self._experts) if recompute else self._experts
        return experts(x, routed, counts, loans), statistics

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Decoding: `x` [B, C] -> output [B, C] and the live ids int64 [B, K]."""
        routed = self.router(x)
        counts = count_assignments(routed.ids, num_experts=self.router.num_experts)
        return self._experts(x, routed, counts), routed.ids

    @torch.no_grad()
    def _placed(
        self, routed: titan.Routed, *, loans: LayerLoans, context: PackContext
    ) -> tuple[titan.Routed, Tensor]:
        """The router call with slots in place of experts, which is what the dispatcher sees, and its counts
        int64 [slots]. Writes `context.trace` where there is one.
        """
        assert context.hashes is not None, "loans come with the hashes of rows"
        slots = loans.place(routed.ids, context.hashes)
        counts = count_assignments(slots, num_experts=loans.num_slots)
        if context.trace is not None:
            context.trace.slots[self.layer] = counts
        return routed._replace(ids=slots), counts

    def _experts(
        self, x: Tensor, routed: titan.Routed, counts: Tensor, loans: LayerLoans | None = None
    ) -> Tensor:
        y = x if self.latent_down is None else self.latent_down(x)
        y = self.routed_experts(y, routed.gates, routed.ids, counts, loans)
        y = self._up(y)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    @region()
    def _up(self, y: Tensor) -> Tensor:
        """The output of the experts, [T, width] -> [T, C]."""
        if self.latent_norm is not None:
            y = self.latent_norm(y)
        return y if self.latent_up is None else self.latent_up(y)

    @torch.no_grad()
    def _report(self, routed: titan.Routed, counts: Tensor, *, live: Tensor, context: PackContext) -> None:
        trace = context.trace
        if trace is None:
            return
        trace.counts[self.layer] = counts
        if context.mode is RouteMode.record:
            trace.ids[self.layer] = routed.ids
        if context.mode is RouteMode.replay:
            taking_part = context.table(routed_rows).taking_part
            trace.overlap[self.layer] = (route_overlap(routed.ids, live=live) * taking_part).sum()


class RoutedRows(NamedTuple):
    """The rows that router losses look at, counted by units: runs of rows that the same documents count.
    `units` int64 [T], the unit of every row, of `num_units`; `taking_part` bool [T], whether it counts: not a
    pad, and under replay not a row that no engine chose experts for. `unit` and `document` int64 [pairs]:
    which units each of `num_documents` counts; None where the units are the documents.
    """

    units: Tensor
    num_units: int
    taking_part: Tensor
    unit: Tensor | None
    document: Tensor | None
    num_documents: int


def routed_rows(context: PackContext) -> RoutedRows:
    """The rows of a forward that take part in router losses. A row that several documents share counts for
    each of them. Under replay the last row of a document is synthetic, so it does not count for that one; it
    does for those that go on from it.
    """
    if context.forest.branches:
        return _shared_rows(context)
    ends = context.cu_seqlens[1:].long()
    rows = torch.arange(context.positions.shape[0], device=ends.device)
    documents = torch.bucketize(rows, ends, right=True)
    taking_part = rows < context.real_tokens
    if context.mode is RouteMode.replay:
        taking_part = taking_part & (rows + 1 != ends[documents])
    return RoutedRows(documents, len(ends), taking_part, None, None, len(ends))


def _shared_rows(context: PackContext) -> RoutedRows:
    forest = context.forest
    cut = set(forest.leaves) if context.mode is RouteMode.replay else set()
    # A segment in which a document ends is a unit without its last row, and that row a unit of its own.
    lengths: list[int] = []
    whole: list[list[int]] = []  # the units of a segment for those that go on
    ending: list[list[int]] = []  # ... for those that end in it
    for s, length in enumerate(forest.lengths):
        parts = [length - 1, 1] if s in cut else [length]
        numbers = [len(lengths) + i for i in range(len(parts))]
        lengths += parts
        whole.append(numbers)
        ending.append(numbers[:-1] if s in cut else numbers)
    pairs = [
        (number, sample)
        for sample, leaf in enumerate(forest.leaves)
        for s in forest.path(leaf)
        for number in (ending if s == leaf else whole)[s]
    ]
    device = context.positions.device
    unit, document = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous().to(device)
    units = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
    taking_part = torch.zeros(len(lengths), dtype=torch.bool, device=device)
    taking_part[unit] = True
    return RoutedRows(units, len(lengths), taking_part[units], unit, document, len(forest.leaves))


def routed_length(length: int, *, mode: RouteMode) -> int:
    """Rows of a document of `length` tokens that take part in router losses."""
    return length - 1 if mode is RouteMode.replay else length


def replayed_ids(context: PackContext, *, layer: int, top_k: int) -> Tensor | None:
    """int64 [T, K] that this layer must use, or None where it chooses for itself."""
    if context.mode is not RouteMode.replay:
        return None
    assert context.routes is not None
    ids = context.routes.get(layer)
    if ids is None:
        raise Refusal(
            f"replay: layer {layer} routes tokens but the recorded routes name {len(context.routes)} layers "
            f"{sorted(context.routes)}: record routes with this model, or set policy.replay=false"
        )
    expected = (context.boundaries[-1], top_k)
    if tuple(ids.shape) != expected:
        raise Refusal(
            f"replay: layer {layer} has routes of shape {tuple(ids.shape)}, this pack and model.top_k need "
            f"{expected}: record routes with this model"
        )
    return ids.contiguous()  # a layer's slice of [T, layers, K] is strided


def count_assignments(ids: Tensor, *, num_experts: int) -> Tensor:
    """int64 [E]: rows each expert gets from `ids` [T, K]. Counted from the ids themselves (not from a boolean
    map), so counts and dispatched rows agree whatever the ids are.
    """
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids.reshape(-1), torch.ones_like(ids).reshape(-1))


def router_statistics(routed: titan.Routed, *, live: Tensor, context: PackContext) -> RouterStatistics:
    """One layer's statistics from its router call; `live` int64 [T, K]: what top-k chooses now."""
    rows, experts = context.table(routed_rows), routed.scores.shape[-1]
    counted = rows.taking_part.long()

    def spread(values: Tensor) -> Tensor:
        """[units, ...] -> [D, ...], for every document the sum over its units."""
        if rows.unit is None or rows.document is None:
            return values
        sums = values.new_zeros(rows.num_documents, *values.shape[1:])
        return sums.index_add(0, rows.document, values.index_select(0, rows.unit))

    def count(ids: Tensor) -> Tensor:
        places = (rows.units[:, None] * experts + ids).reshape(-1)
        ones = counted[:, None].expand_as(ids).reshape(-1)
        found = ones.new_zeros(rows.num_units * experts).scatter_add_(0, places, ones)
        return spread(found.view(rows.num_units, experts))

    def add(values: Tensor) -> Tensor:
        kept = torch.where(rows.taking_part.view(-1, *[1] * (values.ndim - 1)), values, 0)
        return spread(kept.new_zeros(rows.num_units, *kept.shape[1:]).index_add(0, rows.units, kept))

    dispatched = count(routed.ids)
    return RouterStatistics(
        rows=spread(counted.new_zeros(rows.num_units).index_add(0, rows.units, counted)),
        dispatched=dispatched,
        current=dispatched if live is routed.ids else count(live),
        scores=add(routed.scores / routed.scores.sum(dim=-1, keepdim=True)),
        z=add(torch.logsumexp(routed.logits, dim=-1).square()),
    )


def balance_penalty(assignments: Tensor, *, scores: Tensor, rows: Tensor) -> Tensor:
    """E * sum_e f_e P_e of each of G sets of tokens, [..., G]: f_e the share of assignments that expert e
    received (int64 [..., G, E], no gradient), P_e the mean of its normalised score (`scores` [..., G, E] are
    sums over the `rows` [..., G] of a set). 1 at perfect balance, 0 for an empty set. Switch Transformer
    (arXiv 2101.03961), eq. 4 to 6.
    """
    share = assignments.to(scores.dtype) / assignments.sum(dim=-1, keepdim=True).clamp(min=1)
    mean_score = scores / rows.clamp(min=1)[..., None]
    return assignments.shape[-1] * (share * mean_score).sum(dim=-1)


def router_losses(
    statistics: RouterStatistics, *, config: LossConfig, totals: RouterTotals
) -> tuple[Tensor, Tensor]:
    """A decoder's share of the step's balancing loss and z-loss from one pack: scalars, unweighted, summed
    over layers.

    Every row has a penalty: that of its pack or its document (`router_aux_grouping`), or its own z. Added
    over the packs and ranks of a step, `token` gives the mean over all rows that take part, `response` the
    mean over documents of their means. With `sequence` grouping, and for z always, the result does not
    depend on how documents fall into packs.
    """
    rows, scores = statistics.rows, statistics.scores
    counted = (
        statistics.current if config.router_count_source is CountSource.current else statistics.dispatched
    )
    sets = rows
    if config.router_aux_grouping is AuxGrouping.pack:
        counted, scores, sets = (part.sum(dim=1, keepdim=True) for part in (counted, scores, rows))

    def weights(reduction: Reduction) -> Tensor:
        """[L, D], of each document in the step's mean."""
        if reduction is Reduction.token:
            return rows.to(scores.dtype) / max(1, totals.rows)
        return (rows > 0).to(scores.dtype) / max(1, totals.documents)

    penalties = balance_penalty(
        counted, scores=scores, rows=sets
    )  # [L, D], or [L, 1] where documents share it
    z = statistics.z / rows.clamp(min=1)
    return (
        (penalties * weights(config.router_aux_reduction)).sum(),
        (z * weights(config.router_z_reduction)).sum(),
    )


def route_overlap(ids: Tensor, *, live: Tensor) -> Tensor:
    """[T]: the share of each row of `ids` [T, K] that also is in that row of `live` [T, K]."""
    return (ids.unsqueeze(-1) == live.unsqueeze(-2)).any(dim=-1).to(torch.float32).mean(-1)
