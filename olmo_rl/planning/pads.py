"""The documents that the padding of a row repeats, and the work that it adds to a plan. No torch.

Pads follow every real token. They repeat the pack's own documents from the first one on, whole documents in
order and a beginning of the last, again and again until the row is full, so that experts receive what the
pack sends them anyway. Documents with placeholders of images or audio are never repeated: pads pass over
them, and where a pack holds nothing else they only take over its document lengths (`stripes`).

Shapes: D documents of a pack, N samples, W ranks, C columns, E expert-parallel ranks, S slots of experts on
them, L looked-at layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.lending import SlotTable, folded, row_hashes
from olmo_rl.planning.loads import count_compiled, placeholder_routes
from olmo_rl.types import ExpertLayout, PackPlan, Padding, Sample, Topology


def stripes(placeholders: Sequence[bool]) -> bool:
    """Whether pads hold a constant token and striped routes: every document has placeholders."""
    return all(placeholders)


def pad_documents(
    lengths: Sequence[int], *, rows: int, placeholders: Sequence[bool]
) -> list[tuple[int, int]]:
    """The documents of the pad span of a row of `rows` tokens, in order: (document that is repeated,
    tokens). `lengths` [D] and `placeholders` [D] describe the pack. Only the last one can be a beginning; no
    pad document is longer than the longest of the pack.
    """
    left = rows - sum(lengths)
    assert left >= 0, f"{sum(lengths)} tokens do not fit a row of {rows}"
    sources = [d for d, placed in enumerate(placeholders) if not placed] or list(range(len(lengths)))
    documents: list[tuple[int, int]] = []
    for d in cycle(sources):
        if left == 0:
            break
        documents.append((d, min(lengths[d], left)))
        left -= documents[-1][1]
    return documents


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PadWork:
    """Work that padding adds to every cell of one plan, int64: `rows` [W, C] tokens, `pairs` [W, C] squared
    lengths of pad documents, `loads` [W, C, E, L] assignments (None where routes are not known), by slot,
    [W, C, S, L], where experts are lent.
    """

    rows: NDArray[np.int64]
    pairs: NDArray[np.int64]
    loads: NDArray[np.int64] | None

    def by_rank(self, ranks: int) -> PadWork:
        """The same with loads by EP rank."""
        return self if self.loads is None else replace(self, loads=folded(self.loads, ranks=ranks))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pads:
    """The samples of one step and how their rows are padded. `loads` int32 [N, E, L] as
    `loads.collection_loads` counts them with `layer_stride`, or None; where experts are lent, `table` has the
    loans and `loads` are by slot, int32 [N, S, L].
    """

    samples: Sequence[Sample]
    padding: Padding
    topology: Topology
    loads: NDArray[np.int32] | None
    layout: ExpertLayout | None
    layer_stride: int = 1
    table: SlotTable | None = None

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        *,
        padding: Padding,
        topology: Topology,
        loads: NDArray[np.int32] | None,
        layout: ExpertLayout | None,
        layer_stride: int,
        table: SlotTable | None = None,
    ) -> Pads | None:
        """The pads of a step, None where rows are not padded."""
        if not padding.active:
            return None
        return cls(
            samples=samples,
            padding=padding,
            topology=topology,
            loads=loads,
            layout=layout,
            layer_stride=layer_stride,
            table=table,
        )

    def work(self, plan: PackPlan) -> PadWork:
        """The work of the padding of `plan`, counted from scratch."""
        shape = (plan.world_size, plan.packs_per_rank)
        rows, pairs = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        loads = None if self.loads is None else np.zeros((*shape, *self.loads.shape[1:]), dtype=np.int64)
        for rank, packs in enumerate(plan.packs):
            for column, pack in enumerate(packs):
                spans = self._spans(pack)
                rows[rank, column] = sum(tokens for _, tokens in spans)
                pairs[rank, column] = sum(tokens * tokens for _, tokens in spans)
                if loads is not None and spans:
                    loads[rank, column] = self._loads(pack, spans=spans)
        return PadWork(rows=rows, pairs=pairs, loads=loads)

    def _spans(self, pack: Sequence[int]) -> list[tuple[int, int]]:
        lengths = [len(self.samples[i]) for i in pack]
        return pad_documents(
            lengths,
            rows=self.padding.rows(sum(lengths)),
            placeholders=[self.samples[i].has_placeholders for i in pack],
        )

    def _loads(self, pack: Sequence[int], *, spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """int64 [E, L]: assignments of the pads of one pack."""
        assert self.loads is not None
        assert self.layout is not None, "loads are counted in a layout"
        if stripes([self.samples[i].has_placeholders for i in pack]):
            count = sum(tokens for _, tokens in spans)
            hashes = np.concatenate([self._hashes(pack[document], tokens) for document, tokens in spans])
            dealt = placeholder_routes(count, layout=self.layout, topology=self.topology)
            return self._count(dealt, hashes=hashes)
        whole = np.zeros(len(pack), dtype=np.int64)
        added = np.zeros(self.loads.shape[1:], dtype=np.int64)
        for document, tokens in spans:
            sample = self.samples[pack[document]]
            if tokens == len(sample):
                whole[document] += 1  # its synthetic tail row is repeated too
            else:
                assert sample.routes is not None, "loads are counted from routes"
                hashes = self._hashes(pack[document], tokens)
                added += self._count(sample.routes[:tokens], hashes=hashes)
        return added + np.tensordot(whole, self.loads[list(pack)], axes=1)

    def _hashes(self, position: int, rows: int) -> NDArray[np.uint16]:
        """uint16 [rows]: pads have the hashes of the rows that they repeat, whatever routes they take."""
        return row_hashes(self.samples[position].id, rows)

    def _count(self, routes: NDArray[np.integer], *, hashes: NDArray[np.uint16]) -> NDArray[np.int64]:
        assert self.layout is not None
        if self.table is not None:
            return self.table.count(routes, hashes)[0]
        table = self.topology.destinations(self.layout.num_experts)
        counts, bad = count_compiled(
            routes, table=table, ep_degree=self.topology.ep_degree, layer_stride=self.layer_stride
        )
        assert bad < 0, "routes were checked when their sample was counted"
        return counts


def padded_tokens(plan: PackPlan, *, lengths: NDArray[np.integer], padding: Padding) -> int:
    """Rows of all packs of `plan`, pads included."""
    return sum(padding.rows(sum(int(lengths[i]) for i in pack)) for rank in plan.packs for pack in rank)
