"""Samples and one rank's plan -> packs. Owns concatenation, document boundaries, each sample's replay tail
and pads.

Everything per token comes from `packs.TOKEN_FIELDS`; routes are appended sample by sample, so that a sample
of T tokens always has T rows: T-1 recorded ones and its own synthetic tail (`planning.loads.tail_routes`).
Pads repeat rows of the pack in the order of `planning.pads.pad_documents`, with their routes.

Refused: missing or misshapen routes, naming the sample; padding a pack that was padded to another length, and
a per-token field that the table lacks (`ValueError`: both are internal errors).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from olmo_rl.data.packs import TOKEN_FIELDS, Normalisers, Pack, PadRule, SharedRows, Step
from olmo_rl.planning.loads import placeholder_routes, tail_routes
from olmo_rl.planning.pads import pad_documents, stripes
from olmo_rl.planning.sharing import find_sharing, lay
from olmo_rl.types import NO_PADDING, ExpertLayout, PackPlan, Padding, Refusal, Sample, Topology


def collate(
    samples: Sequence[Sample],
    *,
    layout: ExpertLayout | None,
    topology: Topology,
    padding: Padding = NO_PADDING,
    share: bool = False,
) -> Pack:
    """Concatenate complete samples into one pack, in the order given, then pad it.

    `layout` not None means replay: every sample must carry routes [T-1, L, K]; the pack's routes are [R, L,
    K]. `share`: equal rows of samples are one row of the pack (`planning.sharing`).
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
    pack = Pack(
        ids=tuple(sample.id for sample in samples),
        fields=fields,
        document_ids=_document_ids(boundaries),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        boundaries=boundaries,
        real_tokens=boundaries[-1],
        routes=None if layout is None else _routes(samples, layout=layout, topology=topology),
        routed_layers=() if layout is None else layout.routed_layers,
        placeholders=tuple(sample.has_placeholders for sample in samples),
    )
    if share:
        _share_rows(pack, samples=samples, padding=padding)
        if pack.shared is not None:
            return pack
    return pad_pack(pack, padding=padding, layout=layout, topology=topology)


def pad_pack(pack: Pack, *, padding: Padding, layout: ExpertLayout | None, topology: Topology) -> Pack:
    """The pack with its pads; unchanged where it has them already, or needs none.

    Pads are documents of their own with positions from 0. They never score a token, and nothing of theirs is
    counted as real. `layout`: of the pack's routes; without routes `padding.experts` stands in for it.
    """
    rows = padding.rows(pack.real_tokens)
    if rows == len(pack):
        return pack
    if len(pack) != pack.real_tokens:
        raise ValueError(f"a pack of {len(pack)} rows was padded before, now to {rows}: pad it once")
    lengths = [b - a for a, b in zip(pack.boundaries, pack.boundaries[1:], strict=False)]
    documents = pad_documents(lengths, rows=rows, placeholders=pack.placeholders)
    source = torch.cat([torch.arange(tokens) + pack.boundaries[d] for d, tokens in documents])
    striped = stripes(pack.placeholders)
    ends = pack.real_tokens + np.cumsum([tokens for _, tokens in documents])
    boundaries = (*pack.boundaries, *ends.tolist())
    routes, pad_routes, routed_layers = pack.routes, None, pack.routed_layers
    experts = layout if layout is not None else padding.experts
    if striped and experts is not None:
        dealt = placeholder_routes(len(source), layout=experts, topology=topology)
        pad_routes, routed_layers = torch.from_numpy(dealt), experts.routed_layers
    if routes is not None:
        routes = torch.cat([routes, routes[source] if pad_routes is None else pad_routes])
    return Pack(
        ids=pack.ids,
        fields=_padded_fields(pack, source=source, pad_id=padding.pad_id if striped else None),
        document_ids=_document_ids(boundaries),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        boundaries=boundaries,
        real_tokens=pack.real_tokens,
        routes=routes,
        routed_layers=routed_layers,
        placeholders=pack.placeholders,
        pad_routes=pad_routes,
    )


def _share_rows(pack: Pack, *, samples: Sequence[Sample], padding: Padding) -> None:
    """Let the pack's tokens lie on as few rows as `samples` need, and pad these; nothing changes where none
    are shared.

    Raises ValueError where two rows have the same key but other experts: the hash of experts then failed.
    """
    replayed = pack.routes is not None
    laid = lay(samples, replayed=replayed, padding=padding)
    forest, row_of, first, recorded = laid.forest, laid.row_of, laid.first, laid.recorded
    if replayed:
        by_tokens = find_sharing(samples, replayed=False)
        pack.unshared_routes = laid.real_rows - by_tokens.rows(0, len(samples))
    if not forest.branches:
        return
    if pack.routes is not None:
        everything = pack.routes.numpy()
        pack.routes = torch.from_numpy(everything[first])
        twice = (recorded & (first[row_of] != np.arange(len(row_of)))).nonzero()[0]
        mine, theirs = (np.sort(everything[rows], axis=-1) for rows in (twice, first[row_of[twice]]))
        if not np.array_equal(mine, theirs):
            raise ValueError("samples with equal keys have other experts: planning.sharing hashed two alike")
    scored = pack.scored_rows().numpy()
    pairs = np.stack([row_of[scored - 1], pack["tokens"].numpy()[scored]])
    _, head, head_of = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    pack.shared = SharedRows(
        forest=forest,
        cu_seqlens=torch.tensor(forest.boundaries, dtype=torch.int32),
        row_of=torch.from_numpy(row_of),
        first=torch.from_numpy(first),
        heads=torch.from_numpy(scored[head]),
        head_of=torch.from_numpy(head_of.reshape(-1)),
        real_rows=laid.real_rows,
        recorded_rows=len(np.unique(row_of[recorded])),
    )


def _padded_fields(pack: Pack, *, source: Tensor, pad_id: int | None) -> dict[str, Tensor]:
    """Every field with its pads by its row of the table. `source` int64 [P]: the rows that pads repeat;
    `pad_id` None where tokens are repeated too.
    """
    rules = {row.name: row.pad for row in TOKEN_FIELDS}
    if pack.fields.keys() != rules.keys():
        unlike = sorted(pack.fields.keys() ^ rules.keys())
        raise ValueError(f"fields {unlike} have no pad rule or no values: declare them in packs.TOKEN_FIELDS")
    fields = {}
    for name, tensor in pack.fields.items():
        if len(tensor) != pack.real_tokens:
            raise ValueError(f"field {name} has {len(tensor)} rows, the pack {pack.real_tokens}")
        rule = rules[name]
        if rule is PadRule.repeat or (rule is PadRule.token and pad_id is None):
            pads = tensor[source]
        elif rule is PadRule.token and pad_id is not None:
            pads = torch.full_like(source, pad_id, dtype=tensor.dtype)
        else:
            pads = torch.zeros_like(source, dtype=tensor.dtype)
        fields[name] = torch.cat([tensor, pads])
    return fields


def _document_ids(boundaries: Sequence[int]) -> Tensor:
    """int64 [T]: the document of every row."""
    lengths = torch.tensor(boundaries).diff()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


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
    any. The samples of one episode are one response.
    """
    scored = [int(sample.scored.sum()) for sample in samples]
    names = [("sample", s.id) if s.episode is None else ("episode", s.episode) for s in samples]
    tokens, parts = Counter[tuple[str, str]](), Counter(names)
    for name, count in zip(names, scored, strict=True):
        tokens[name] += count
    return Normalisers(
        tokens=sum(scored),
        responses=sum(count > 0 for count in tokens.values()),
        episodes={s.id: tokens[name] for s, name in zip(samples, names, strict=True) if parts[name] > 1},
    )


def step_of_rank(
    samples: Sequence[Sample],
    *,
    plan: PackPlan,
    rank: int,
    layout: ExpertLayout | None,
    topology: Topology,
    budget: int,
    padding: Padding = NO_PADDING,
    share: bool = False,
) -> Step:
    """One optimizer step as `rank` runs it: its packs of the plan under the step's global denominators."""
    return Step(
        samples=tuple(samples),
        normalisers=count_normalisers(samples),
        plan=plan,
        packs=tuple(
            replace(
                collate(
                    [samples[i] for i in pack], layout=layout, topology=topology, padding=padding, share=share
                ),
                lending=plan.lending,
            )
            for pack in plan.packs[rank]
        ),
        budget=budget,
    )


def empty_step(*, budget: int) -> Step:
    """A step that nothing can train: every rank skips it."""
    return Step(
        samples=(), normalisers=Normalisers(tokens=0, responses=0), plan=None, packs=(), budget=budget
    )
