"""Tensors of packs. Owns the one table of per-token fields that drives concatenation, padding, alignment and
moves.

Shapes: T tokens of a pack, D documents, L routed layers, K experts per token. A pack is one row; there is no
batch axis.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olmo_rl.data.loans import LayerLoans
from olmo_rl.planning.forest import Forest
from olmo_rl.planning.lending import row_hashes
from olmo_rl.planning.schedule import Forecast, Schedule
from olmo_rl.types import Lending, PackPlan, Sample

T = TypeVar("T")
P = ParamSpec("P")


class PadRule(Enum):
    """The values of a pad row: `repeat` those of the row that it repeats; `token` the same, but the pad id
    where nothing may be repeated; or a constant.
    """

    repeat = "repeat"
    token = "token"
    false = "false"
    zero = "zero"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenField:
    """One per-token array of a pack: how it is read from a sample, its dtype, what pads hold."""

    name: str
    dtype: torch.dtype
    pad: PadRule
    read: Callable[[Sample], NDArray[np.generic]]


def _known(values: NDArray[np.float32] | None, sample: Sample) -> NDArray[np.float32]:
    """Log-probs with every slot outside the loss set to 0, so that a NaN there cannot travel."""
    if values is None:
        return np.zeros(len(sample), dtype=np.float32)
    return np.where(sample.scored, values, np.float32(0)).astype(np.float32)


def _advantage(sample: Sample) -> NDArray[np.float32]:
    value = 0.0 if sample.advantage is None else sample.advantage
    return np.full(len(sample), value, dtype=np.float32)


TOKEN_FIELDS: tuple[TokenField, ...] = (
    TokenField(name="tokens", dtype=torch.int64, pad=PadRule.token, read=lambda s: s.tokens),
    TokenField(
        name="positions",
        dtype=torch.int64,
        pad=PadRule.repeat,
        read=lambda s: np.arange(len(s), dtype=np.int64),
    ),
    TokenField(name="response_mask", dtype=torch.bool, pad=PadRule.false, read=lambda s: s.response_mask),
    TokenField(name="loss_mask", dtype=torch.bool, pad=PadRule.false, read=lambda s: s.scored),
    TokenField(
        name="behavior_logprobs",
        dtype=torch.float32,
        pad=PadRule.zero,
        read=lambda s: _known(s.behavior_logprobs, s),
    ),
    TokenField(
        name="ref_logprobs", dtype=torch.float32, pad=PadRule.zero, read=lambda s: _known(s.ref_logprobs, s)
    ),
    TokenField(name="advantages", dtype=torch.float32, pad=PadRule.zero, read=_advantage),
    TokenField(
        name="hashes",
        dtype=torch.int32,
        pad=PadRule.repeat,
        read=lambda s: row_hashes(s.id, len(s)).astype(np.int32),
    ),
)


class RouteMode(Enum):
    """The origin of a router's expert ids: its own top-k, the pack's recorded routes, or top-k that it
    records.
    """

    live = "live"
    replay = "replay"
    record = "record"


@dataclass(kw_only=True, slots=True)
class RouteTrace:
    """Reports of the routers about one forward, keyed by global layer id. Written by assignment, so a
    recomputed block overwrites its entry with the same value. `ids` [T, K] int64 (mode record), `overlap`
    scalar: sum over recorded rows of the share of ids that live top-k would also have chosen; `counts` int64
    [num_experts]: assignments of this rank's tokens, pads included; `slots` int64 [slots of all ranks]: the
    same by the slot to which the dispatcher sends them, where experts are lent.
    """

    ids: dict[int, Tensor] = field(default_factory=dict)
    overlap: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    slots: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackContext:
    """Inputs of a forward beside tokens. It is an ARGUMENT of the forward, so recomputation sees the same
    object.

    `positions` int64 [T] restart per document; `cu_seqlens` int32 [D+1] on the device, strictly increasing
    from 0, last entry T; `boundaries` the same numbers on the host (`cu_seqlens_cpu`: as a tensor). Where
    documents share rows (`forest`), T counts rows, D segments, and positions go on from the parent's end;
    `routes[layer]` int64 [T, K] by global layer id, present exactly when `mode` is replay; `real_tokens`:
    rows from here on are pads. `pad_routes` int64 [P, K] by layer id: ids that the last P rows take where
    routing is live, for pads of a constant token, which a router would send to the same experts every time.
    `loans` by layer id, and `hashes` int32 [T] of the rows: where experts are lent.
    """

    positions: Tensor
    cu_seqlens: Tensor
    boundaries: tuple[int, ...]
    max_seqlen: int
    real_tokens: int
    mode: RouteMode = RouteMode.live
    routes: Mapping[int, Tensor] | None = None
    trace: RouteTrace | None = None
    pad_routes: Mapping[int, Tensor] | None = None
    cu_seqlens_cpu: Tensor | None = None
    shared: Forest | None = None
    loans: Mapping[int, LayerLoans] | None = None
    hashes: Tensor | None = None
    _tables: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def forest(self) -> Forest:
        """The segments of this forward; without shared rows every document is a root."""
        return Forest.roots(self.boundaries) if self.shared is None else self.shared

    def table(self, make: Callable[Concatenate[PackContext, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`make(self, *args)`, made once for this forward, whichever layer asks first. Tables follow
        boundaries and parents alone.
        """
        key = (make, *args, *sorted(kwargs.items()))
        if key not in self._tables:
            self._tables[key] = make(self, *args, **kwargs)
        found: T = self._tables[key]
        return found

    def __post_init__(self) -> None:
        assert (self.mode is RouteMode.replay) == (self.routes is not None), (
            "routes are given exactly under replay"
        )
        assert self.boundaries[0] == 0, "boundaries start at 0"
        assert all(a < b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)), (
            "documents are never empty"
        )
        assert self.boundaries[-1] == self.positions.shape[0], "the last boundary is the number of rows"
        assert self.shared is None or self.shared.boundaries == self.boundaries, "boundaries are of segments"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """How the T tokens of a pack lie on R rows. `forest`: its segments; `cu_seqlens` int32 [S+1]: their
    boundaries; `row_of` int64 [T]: the row that reads each token; `first` int64 [R]: a token that each row
    reads. Rows from `real_rows` on are pads: roots that repeat beginnings of paths. `heads` int64 [P]: scored
    tokens that differ in the row that predicts them or in the token; `head_of` int64 [S]: which of them each
    scored token equals. `recorded_rows`: rows whose experts an engine chose.
    """

    forest: Forest
    cu_seqlens: Tensor
    row_of: Tensor
    first: Tensor
    heads: Tensor
    head_of: Tensor
    real_rows: int
    recorded_rows: int

    def map(self, move: Callable[[Tensor], Tensor]) -> SharedRows:
        """The same with `move` applied to every tensor."""
        return replace(
            self,
            cu_seqlens=move(self.cu_seqlens),
            row_of=move(self.row_of),
            first=move(self.first),
            heads=move(self.heads),
            head_of=move(self.head_of),
        )


@dataclass(kw_only=True, slots=True)
class Pack:
    """One forward: per-token tensors by field name (`pack["tokens"]`, [T]), boundaries, and routes [R, L, K]
    or None. A token is what a sample holds, a row what the model computes: R = T and row t reads token t,
    unless documents share rows (`shared`).

    `ids[d]` is the sample of document d, `document_ids` int64 [T] its index per token. Pads, where there are
    any, are the rows from `real_tokens` on and form documents after `len(ids)`. `placeholders[d]`: pads may
    not repeat document d. `pad_routes` int64 [P, L, K]: ids of P pads that repeat nothing. `scored`:
    `scored_rows` once it was asked for. `unshared_routes`: rows that would be shared if equal
    tokens had equal routes. `lending`: the loans of its step, None where experts stay at home.
    """

    ids: tuple[str, ...]
    fields: dict[str, Tensor]
    document_ids: Tensor
    cu_seqlens: Tensor
    boundaries: tuple[int, ...]
    real_tokens: int
    routes: Tensor | None
    routed_layers: tuple[int, ...]
    placeholders: tuple[bool, ...]
    pad_routes: Tensor | None = None
    scored: Tensor | None = None
    shared: SharedRows | None = None
    unshared_routes: int = 0
    lending: Lending | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __len__(self) -> int:
        return self.boundaries[-1]

    @property
    def num_rows(self) -> int:
        """Rows that the model computes, pads included."""
        return len(self) if self.shared is None else self.shared.forest.boundaries[-1]

    @property
    def real_rows(self) -> int:
        """Rows that are not pads."""
        return self.real_tokens if self.shared is None else self.shared.real_rows

    @property
    def recorded_rows(self) -> int:
        """Rows whose experts an engine chose: every document ends in a synthetic one."""
        return self.real_tokens - len(self.ids) if self.shared is None else self.shared.recorded_rows

    @property
    def row_tokens(self) -> Tensor:
        """int64 [R]: the token that each row reads."""
        return self["tokens"] if self.shared is None else self["tokens"].index_select(0, self.shared.first)

    def rows_of(self, tokens: Tensor) -> Tensor:
        """The rows that read tokens, both int64."""
        return tokens if self.shared is None else self.shared.row_of.index_select(0, tokens)

    def scored_rows(self) -> Tensor:
        """int64 [S]: tokens with a true loss mask. A document's first token has no row of its own document
        that could score it: never one of them.
        """
        if self.scored is not None:
            return self.scored
        mask = self["loss_mask"].clone()
        mask[self.cu_seqlens[:-1].long()] = False
        return mask.nonzero().flatten()

    def map(self, move: Callable[[Tensor], Tensor]) -> Pack:
        """The pack with `move` applied to every tensor. Scored rows are found before, on the host: a device
        could only give their number after a synchronisation.
        """
        return replace(
            self,
            fields={name: move(tensor) for name, tensor in self.fields.items()},
            document_ids=move(self.document_ids),
            cu_seqlens=move(self.cu_seqlens),
            routes=None if self.routes is None else move(self.routes),
            pad_routes=None if self.pad_routes is None else move(self.pad_routes),
            scored=move(self.scored_rows()),
            shared=None if self.shared is None else self.shared.map(move),
        )

    def to(self, device: torch.device) -> Pack:
        """The pack on `device`: the one place where a pack moves."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def context(
        self,
        *,
        mode: RouteMode,
        trace: RouteTrace | None = None,
        loans: Mapping[int, LayerLoans] | None = None,
    ) -> PackContext:
        """The boundaries, positions and (under replay) routes of this pack's forward. `loans`: those of
        `lending` on this rank.
        """
        assert (loans is None) == (self.lending is None), "every forward of a step runs under its loans"
        routes = pad_routes = None
        if mode is RouteMode.replay:
            assert self.routes is not None, "replay needs recorded routes"
            routes = {layer: self.routes[:, i] for i, layer in enumerate(self.routed_layers)}
        elif self.pad_routes is not None:
            pad_routes = {layer: self.pad_routes[:, i] for i, layer in enumerate(self.routed_layers)}
        shared, boundaries, positions = self.shared, self.boundaries, self["positions"]
        if shared is not None:
            boundaries, positions = shared.forest.boundaries, positions.index_select(0, shared.first)
        return PackContext(
            positions=positions,
            cu_seqlens=self.cu_seqlens if shared is None else shared.cu_seqlens,
            boundaries=boundaries,
            max_seqlen=max(b - a for a, b in zip(boundaries, boundaries[1:], strict=False)),
            real_tokens=self.real_rows,
            mode=mode,
            routes=routes,
            trace=trace,
            pad_routes=pad_routes,
            cu_seqlens_cpu=torch.tensor(boundaries, dtype=torch.int32),
            shared=None if shared is None else shared.forest,
            loans=loans,
            hashes=None if loans is None else self["hashes"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisers:
    """Global denominators of one optimizer step, over all packs of all ranks: scored tokens, and responses
    with at least one scored token. The samples of one episode are one response; `episodes`: its scored
    tokens, by the id of each sample that shares it with another.
    """

    tokens: int
    responses: int
    episodes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Step:
    """One optimizer step as one rank runs it. It never changes, and refers to no other step.

    `samples`: all samples of the step in order of arrival, on every rank; `normalisers`: their global
    denominators. `plan` assigns them to packs, `schedule` is the plan with its evidence where a planner made
    it; `packs`: this rank's, on the host. Without packs nothing in the step can train, and every rank skips
    it alike. `forecast`: what every destination should receive, where routes are replayed over several ranks.
    `anchors[i]`: log-probs [S] of the scored slots of pack i by the policy before the first step of its
    collection, where a scoring pass of its own computed them. `facts`: metrics that are equal on every rank.
    `steps_in_collection`: the steps of its collection, this one included; `source`: the file, or the engine.
    """

    samples: Sequence[Sample]
    normalisers: Normalisers
    plan: PackPlan | None
    packs: tuple[Pack, ...]
    budget: int
    schedule: Schedule | None = None
    forecast: Forecast | None = None
    anchors: tuple[Tensor, ...] | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    steps_in_collection: int = 1
    source: str = ""
