"""The gain of lending experts in planned steps, and its cost on a stated machine. No torch.

Owns X, the expert work of a plan over that of perfect balance, with and without packing and lending, and the
estimate of seconds: products of the assignments that the busiest ranks no longer compute, against the weights
and gradients that travel. A pack sends the same weights whatever its length, so lending pays from some number
of tokens a pack on. Latencies, and what overlaps, are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from olmo_rl.config import Config, Dtype, ModelConfig, Recompute
from olmo_rl.planning.schedule import Schedule, StepInput
from olmo_rl.types import Lending, Topology

SHOWN = 16  # steps that are reported; plan.json holds all
_BYTES = {Dtype.bfloat16: 2, Dtype.float32: 4, Dtype.float64: 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """One assignment and one guest on the stated machine: `product` seconds of an assignment in an expert,
    forward and backward; `exchange` seconds of one guest's weights and gradient, and their `bytes`.
    """

    product: float
    exchange: float
    bytes: int

    @classmethod
    def of(cls, config: Config) -> Costs:
        """Backward products count twice their forward; recomputed ones count again, and full recomputation
        sends weights again.
        """
        size, recompute = expert_parameters(config.model), config.policy.recompute
        passes = 3 if recompute is Recompute.none else 4
        sent = size * _BYTES[config.expert_dtype] * (3 if recompute is Recompute.full else 2)
        return cls(
            product=2 * size * passes / (config.plan.tflops * 1e12),
            exchange=sent / (config.plan.link_gigabytes * 1e9),
            bytes=sent,
        )


def expert_parameters(model: ModelConfig) -> int:
    """Elements of one routed expert."""
    return 3 * (model.dim if model.latent_dim is None else model.latent_dim) * model.expert_hidden


def lending_line(config: Config) -> str:
    """What lending exchanges in a pack and layer, and where it pays, before any routes are known."""
    costs, guests = Costs.of(config), config.balance.guests
    # A pack of T tokens has T x top_k assignments a rank and layer; X falls by a tenth.
    least = guests * costs.exchange / (0.1 * config.model.top_k * costs.product)
    size = f"{guests * costs.bytes / 2**20:,.1f} MiB"
    return (
        f"{guests} guest slots a layer; {size} out of a rank or into it in a pack and layer; pays from "
        f"packs of about {least:,.0f} tokens on for every 0.1 less of expert work over perfect balance "
        f"({_machine(config)})"
    )


def _machine(config: Config) -> str:
    return f"{config.plan.link_gigabytes:g} GB/s, {config.plan.tflops:g} TFLOP/s"


def exchanged(lending: Lending, *, topology: Topology, num_experts: int) -> int:
    """Guests that travel one after another in a pack: those that the busiest sender or host of every layer
    sends or receives, summed over layers.
    """
    owned, most = topology.experts_per_rank(num_experts), 0
    for loans in lending.layers:
        sent, received = Counter(loan.expert // owned for loan in loans), Counter(loan.host for loan in loans)
        most += max([*sent.values(), *received.values()], default=0)
    return most


@dataclass(frozen=True, kw_only=True, slots=True)
class LendingGain:
    """One step: X over perfect balance in order of arrival and as planned, experts at home and lent.
    `loans` of the step, `bytes` that the busiest ranks exchange for them, `exact_bytes` where every rank has
    as many guests as experts of its own; `spent` and `won` seconds; `tokens` of a mean pack.
    """

    as_it_is: float
    packed: float
    lent: float
    lent_and_packed: float
    loans: int
    bytes: int
    exact_bytes: int
    spent: float
    won: float
    tokens: float

    @classmethod
    def of(cls, schedule: Schedule, *, step: StepInput, at_home: Schedule, config: Config) -> LendingGain:
        """`schedule` and `step` under the loans, `at_home` the plan without them."""
        assert step.loads is not None, "loans follow from loads"
        world, lending, costs = step.topology.world_size, step.lending, Costs.of(config)
        perfect = int(step.loads.sum(dtype="int64")) / world
        works = [
            at_home.before.expert_work,
            at_home.after.expert_work,
            schedule.before.expert_work,
            schedule.after.expert_work,
        ]
        packs = schedule.plan.packs_per_rank
        guests = 0
        if lending is not None:
            guests = packs * exchanged(lending, topology=step.topology, num_experts=config.model.num_experts)
        as_it_is, packed, lent, both = (0 if work is None else work / perfect for work in works)
        return cls(
            as_it_is=as_it_is,
            packed=packed,
            lent=lent,
            lent_and_packed=both,
            loans=0 if lending is None else sum(map(len, lending.layers)),
            bytes=guests * costs.bytes,
            exact_bytes=packs
            * step.loads.shape[2]
            * step.topology.experts_per_rank(config.model.num_experts)
            * costs.bytes,
            spent=guests * costs.exchange,
            won=(packed - both) * perfect * costs.product,
            tokens=int(step.lengths.sum()) / (world * packs),
        )


def lending_lines(gains: Sequence[tuple[int, LendingGain]], *, config: Config) -> Iterator[str]:
    """Two lines for every step, as many as the table shows: X over perfect balance, then bytes, seconds and
    whether lending pays.
    """
    for number, gain in gains[:SHOWN]:
        at_home = f"{gain.as_it_is:.3f} as it is, {gain.packed:.3f} packed"
        lent = f"{gain.lent:.3f} lent, {gain.lent_and_packed:.3f} lent and packed ({gain.loans} loans)"
        yield (
            f"Step {number}: expert work over perfect balance {at_home}, {lent}; exactly balanced at run "
            f"time it is 1, with twice the slots and up to {gain.exact_bytes / 2**20:,.1f} MiB exchanged"
        )
        if not gain.loans:
            continue
        line = (
            f"Step {number}: lending exchanges {gain.bytes / 2**20:,.1f} MiB on the busiest ranks, "
            f"{1000 * gain.spent:.3g} ms, and saves {1000 * gain.won:.3g} ms of products "
            f"({_machine(config)}): "
        )
        if gain.won <= 0:
            yield line + "it saves nothing here"
            continue
        least, pays = gain.tokens * gain.spent / gain.won, gain.won > gain.spent
        yield line + (
            f"it {'pays' if pays else 'does not pay'}, from packs of about {least:,.0f} tokens on (these "
            f"have {gain.tokens:,.0f})"
        )
