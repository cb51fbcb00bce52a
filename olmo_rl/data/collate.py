"""Samples and one rank's plan -> packs. Owns concatenation, document boundaries and each sample's replay
tail.

Everything per token comes from `packs.TOKEN_FIELDS`; routes are appended sample by sample, so that a sample
of T tokens always brings T rows: T-1 recorded ones and its own synthetic tail (`planning.loads.tail_routes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from olmo_rl.data.packs import TOKEN_FIELDS, Normalisers, Pack, PackedBatch
from olmo_rl.planning.loads import tail_routes
from olmo_rl.types import ExpertLayout, PackPlan, Refusal, Sample, Topology


def collate(samples: Sequence[Sample], *, layout: ExpertLayout | None, topology: Topology) -> Pack:
    """Concatenate complete samples into one pack, in the order given.

    `layout` not None means replay: every sample must carry routes [T-1, L, K]; the pack's routes are [T, L,
    K].
    """
    assert samples, "a pack holds at least one sample"
    boundaries = (0, *np.cumsum([len(sample) for sample in samples]).tolist())
    fields = {
        row.name: torch.from_numpy(np.concatenate([row.read(sample) for sample in samples])).to(row.dtype)
        for row in TOKEN_FIELDS
    }
    for name, tensor in fields.items():
        assert tensor.shape == (boundaries[-1],), (
            f"field {name} has {tuple(tensor.shape)} rows, not {boundaries[-1]}"
        )
    lengths = torch.tensor([len(sample) for sample in samples])
    return Pack(
        ids=tuple(sample.id for sample in samples),
        fields=fields,
        document_ids=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        boundaries=boundaries,
        real_tokens=boundaries[-1],
        routes=None if layout is None else _routes(samples, layout=layout, topology=topology),
        routed_layers=() if layout is None else layout.routed_layers,
    )


def _routes(samples: Sequence[Sample], *, layout: ExpertLayout, topology: Topology) -> Tensor:
    """int64 [T, L, K]: recorded rows of each sample, each followed by the sample's own tail."""
    rows: list[np.ndarray] = []
    for sample in samples:
        expected = (len(sample) - 1, len(layout.routed_layers), layout.top_k)
        if sample.routes is None or sample.routes.shape != expected:
            found = "none" if sample.routes is None else str(sample.routes.shape)
            raise Refusal(
                f"sample {sample.id}: routes {found}, expected {expected} [tokens-1, layers, top_k]: "
                "record routes when generating, or set policy.replay=false"
            )
        rows.append(sample.routes.astype(np.int64))
        rows.append(tail_routes(sample.id, layout=layout, topology=topology)[None])
    return torch.from_numpy(np.concatenate(rows))


def count_normalisers(samples: Sequence[Sample]) -> Normalisers:
    """Global denominators of one optimizer step, from all its samples: scored tokens, responses that have
    any.
    """
    scored = [int(sample.scored.sum()) for sample in samples]
    return Normalisers(tokens=sum(scored), responses=sum(count > 0 for count in scored))


def batch_of_rank(
    samples: Sequence[Sample],
    *,
    plan: PackPlan,
    rank: int,
    layout: ExpertLayout | None,
    topology: Topology,
    budget: int,
) -> PackedBatch:
    """One optimizer step as `rank` runs it: its column of packs under the step's global denominators."""
    return PackedBatch(
        packs=[
            collate([samples[i] for i in pack], layout=layout, topology=topology) for pack in plan.packs[rank]
        ],
        normalisers=count_normalisers(samples),
        plan=plan,
        samples=list(samples),
        budget=budget,
    )
