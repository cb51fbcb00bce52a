"""The nouns every floor shares: samples, collections, topology and pack plans. NumPy only, no torch.

The fields of `Sample` are the one table from which rollout files, importers, checkpoints and checks follow
(`FIELDS`): adding a field is one line there.

Per-token arrays are aligned to the token they describe: entry t describes token t. Routes are the exception
that engines impose: row t holds the experts chosen while token t was read, so a sample of T tokens has T-1
rows and the last token's row is synthetic (see `planning.loads.tail_routes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Refusal(ValueError):
    """Configuration or data that we refuse. The process ends with exit code 2 and prints `reasons`, no
    traceback.

    Each reason is one line: what is wrong, where (config key, or file, sample id, layer, row), what to
    change.
    """

    def __init__(self, reasons: str | Sequence[str]) -> None:
        self.reasons: tuple[str, ...] = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__("\n".join(self.reasons))

    def __reduce__(self) -> tuple[type[Refusal], tuple[tuple[str, ...]]]:
        return (Refusal, (self.reasons,))


class Interrupted(SystemExit):
    """A signal ended the job before it could save: the code is 128 + signal, as a shell has it."""


class RankFailed(RuntimeError):
    """A process that we started for one rank failed.

    The message is that process's traceback, or `signum` the signal that killed it. The traceback of the
    process that raises this adds nothing: print the message alone.
    """

    def __init__(self, message: str, *, signum: int | None = None) -> None:
        super().__init__(message)
        self.signum = signum


class Kind(Enum):
    """The type of one field of a sample. Tokens, masks, log-probs and routes are arrays; all of these but
    `routes` are per-token lists. Shapes: T tokens, L layers, K experts per token.
    """

    name = "non-empty text"
    text = "text"
    integer = "64-bit integer"
    number = "float64"
    flag = "true or false"
    tokens = "int32 [T]"
    mask = "bool [T]"
    logprobs = "float32 [T]"
    routes = "integers [T-1, L, K]"
    parts = "number or null by name"

    @property
    def per_token(self) -> bool:
        """Whether entry t describes token t."""
        return self in (Kind.tokens, Kind.mask, Kind.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleField:
    """One row of `FIELDS`: an attribute of `Sample`, its kind, whether rollout files store it (a run computes
    the others), in which column, whether every row of a file needs it, and its default in memory
    (`dataclasses.MISSING`: none).
    """

    name: str
    kind: Kind
    stored: bool
    column: str
    required: bool
    default: Any


def _stored(kind: Kind, *, column: str | None = None, required: bool = False) -> dict[str, Any]:
    """Metadata of a field of rollout files, in a column of its own name unless another is given."""
    return {"kind": kind, "stored": True, "column": column, "required": required}


def _computed(kind: Kind) -> dict[str, Any]:
    """Metadata of a field that a run computes and that no rollout file stores."""
    return {"kind": kind, "stored": False, "column": None, "required": False}


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """One prompt and its response.

    `response_mask`: the tokens that the policy generated; `loss_mask`: the subset that is trained (None = all
    of it). Log-probs are defined where `response_mask` is true. The layer axis of `routes` is in the order of
    `ExpertLayout.routed_layers`. `policy_version` counts the optimizer steps behind the sample's oldest
    token. `episode`: samples of equal episodes are parts of one, as the branches of a conversation, and count
    once; None: the sample is an episode of its own. `reward_parts`: the parts of the reward, where it has
    several, before weights; a part that does not judge is None. `has_placeholders`: some tokens stand for an
    image or audio, so padding never repeats them.
    """

    id: str = field(metadata=_stored(Kind.name, column="sample_id", required=True))
    group: str = field(metadata=_stored(Kind.name, column="group_id", required=True))
    tokens: NDArray[np.int32] = field(metadata=_stored(Kind.tokens, required=True))
    response_mask: NDArray[np.bool_] = field(metadata=_stored(Kind.mask, required=True))
    behavior_logprobs: NDArray[np.float32] = field(metadata=_stored(Kind.logprobs, required=True))
    reward: float = field(metadata=_stored(Kind.number, required=True))
    policy_version: int = field(default=0, metadata=_stored(Kind.integer, required=True))
    loss_mask: NDArray[np.bool_] | None = field(default=None, metadata=_stored(Kind.mask))
    ref_logprobs: NDArray[np.float32] | None = field(default=None, metadata=_stored(Kind.logprobs))
    advantage: float | None = field(default=None, metadata=_computed(Kind.number))
    routes: NDArray[np.integer] | None = field(default=None, metadata=_stored(Kind.routes))
    finish_reason: str | None = field(default=None, metadata=_stored(Kind.text))
    prompt: str | None = field(default=None, metadata=_stored(Kind.text))
    response: str | None = field(default=None, metadata=_stored(Kind.text))
    episode: str | None = field(default=None, metadata=_stored(Kind.text, column="episode_id"))
    has_placeholders: bool = field(default=False, metadata=_stored(Kind.flag))
    reward_parts: Mapping[str, float | None] | None = field(default=None, metadata=_computed(Kind.parts))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def scored(self) -> NDArray[np.bool_]:
        """bool [T]: tokens that enter the loss. The first token of a document has no preceding row and never
        does.
        """
        mask = self.response_mask if self.loss_mask is None else self.response_mask & self.loss_mask
        mask = mask.copy()
        mask[:1] = False
        return mask


FIELDS: tuple[SampleField, ...] = tuple(
    SampleField(
        name=entry.name,
        kind=entry.metadata["kind"],
        stored=entry.metadata["stored"],
        column=entry.metadata["column"] or entry.name,
        required=entry.metadata["required"],
        default=entry.default,
    )
    for entry in fields(Sample)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The settings under which an engine drew its tokens; None: not recorded.

    `top_k` 0 (or -1) and `top_p` 1 keep the whole vocabulary. Log-probs are trained at one temperature over
    the whole vocabulary, so any other known value describes another distribution than the one that is
    trained.
    """

    temperature: float | None = field(default=None, metadata={"neutral": (1.0,)})
    top_p: float | None = field(default=None, metadata={"neutral": (1.0,)})
    top_k: int | None = field(default=None, metadata={"neutral": (0, -1)})
    min_p: float | None = field(default=None, metadata={"neutral": (0.0,)})
    repetition_penalty: float | None = field(default=None, metadata={"neutral": (1.0,)})
    presence_penalty: float | None = field(default=None, metadata={"neutral": (0.0,)})
    frequency_penalty: float | None = field(default=None, metadata={"neutral": (0.0,)})

    def known(self) -> dict[str, float]:
        """The recorded settings, by name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def deviations(self, *, temperature: float = 1.0) -> dict[str, float]:
        """The recorded settings under which tokens follow another distribution than the model's own at
        `temperature`.
        """
        neutral = {entry.name: entry.metadata["neutral"] for entry in fields(self)}
        neutral["temperature"] = (temperature,)
        return {name: value for name, value in self.known().items() if value not in neutral[name]}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """The experts that routes refer to: `num_experts` logical experts, `top_k` of them per token, in
    `routed_layers` (global ids).
    """

    num_experts: int
    top_k: int
    routed_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Static rows: a pack becomes a row of the next multiple of `multiple_of` tokens; 1 = no pads.

    Pads repeat the pack's own documents. Where none of them may be repeated, pads hold the token `pad_id`,
    and their routes refer to `experts` if routes are not replayed (None without experts).
    """

    multiple_of: int = 1
    pad_id: int = 0
    experts: ExpertLayout | None = None

    @property
    def active(self) -> bool:
        return self.multiple_of > 1

    def rows(self, tokens: int) -> int:
        """Rows of a pack of `tokens` tokens, pads included."""
        return -(-tokens // self.multiple_of) * self.multiple_of


NO_PADDING = Padding()


@dataclass(kw_only=True, slots=True)
class Collection:
    """The samples that a rollout source delivers at once. `layout` is None where no expert metadata exists
    (length-only files).

    `sampling`: how its tokens were drawn. `notes`: one line for the user about each thing that was there and
    is not used. `counts`: what happened on the way, by metric name, over all ranks; `facts`: metrics that do
    not add up, the last round of a collection has them.
    """

    samples: list[Sample]
    layout: ExpertLayout | None
    source: str
    model: str | None = None
    tokenizer: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    notes: tuple[str, ...] = ()
    counts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [samples]: tokens of each sample."""
        return np.array([len(sample) for sample in self.samples], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks and experts. A replica is `ep_degree` consecutive ranks that hold all experts once, in contiguous
    blocks.
    """

    world_size: int
    ep_degree: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ep_degree < 1 or self.world_size % self.ep_degree:
            raise Refusal(
                f"strategy.ep_degree={self.ep_degree} does not divide the world size {self.world_size}: "
                "choose an expert-parallel degree that divides trainer.devices x trainer.num_nodes"
            )

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.ep_degree

    def replica_of(self, rank: int) -> int:
        return rank // self.ep_degree

    def experts_per_rank(self, num_experts: int) -> int:
        if num_experts % self.ep_degree:
            raise Refusal(
                f"model.num_experts={num_experts} is not divisible by strategy.ep_degree={self.ep_degree}: "
                "every expert-parallel rank owns the same number of experts"
            )
        return num_experts // self.ep_degree

    def destinations(self, num_experts: int) -> NDArray[np.int64]:
        """int64 [num_experts]: owner of every expert."""
        return np.arange(num_experts, dtype=np.int64) // self.experts_per_rank(num_experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchLog:
    """How a plan was found. `stop_reason`: none | proposals | no_progress | deadline | bounds."""

    seed: int
    proposals: int
    accepted: int
    stop_reason: str
    rejected: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loan:
    """A share of one expert in one layer: guest slot `slot` of EP rank `host` computes the rows whose hash
    lies in [`first`, `below`), of 65,536. The first share of an expert starts at 0, each further one where
    the one before it ends; the expert's owner computes the rest.
    """

    expert: int
    host: int
    slot: int
    first: int
    below: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lending:
    """The loans of one optimizer step, by routed layer in the order of `ExpertLayout.routed_layers`. Every EP
    rank has `guests` guest slots in every layer.
    """

    guests: int
    layers: tuple[tuple[Loan, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlan:
    """One optimizer step: `packs[rank][column]` is a tuple of positions into the step's sample list.

    `search` is None where the order of arrival was kept. `rows[rank][column]`: rows of each pack where
    samples share rows, whose order and number per rank then are free; None: every token is a row. `lending`:
    the loans that the step runs under; None: every expert computes all of its rows at home.
    """

    packs: tuple[tuple[tuple[int, ...], ...], ...]
    search: SearchLog | None = None
    rows: tuple[tuple[int, ...], ...] | None = None
    lending: Lending | None = None

    @property
    def world_size(self) -> int:
        return len(self.packs)

    @property
    def packs_per_rank(self) -> int:
        return len(self.packs[0])

    @property
    def positions(self) -> list[int]:
        """Every position, rank by rank, column by column."""
        return [i for rank in self.packs for pack in rank for i in pack]

    def check(self, lengths: Sequence[int] | NDArray[np.int64], budget: int) -> None:
        """Raise AssertionError unless every sample is packed exactly once, no pack is empty or over budget,
        all ranks run the same number of packs and, where nothing was searched or shared, rank w holds
        positions w, w + W, ... in order.
        """
        assert sorted(self.positions) == list(range(len(lengths))), "every sample must be packed exactly once"
        assert len({len(rank) for rank in self.packs}) == 1, "all ranks must run the same number of packs"
        for rank, packs in enumerate(self.packs):
            if self.search is None and self.rows is None:
                arrival = list(range(rank, len(lengths), self.world_size))
                assert [i for pack in packs for i in pack] == arrival, f"rank {rank}: not in order of arrival"
            for column, pack in enumerate(packs):
                assert pack, f"rank {rank} column {column} is an empty pack"
                tokens = sum(int(lengths[i]) for i in pack)
                if self.rows is not None:
                    assert self.rows[rank][column] <= tokens, "sharing saves rows"
                    tokens = self.rows[rank][column]
                assert tokens <= budget, f"rank {rank} column {column}: {tokens} tokens, budget {budget}"
