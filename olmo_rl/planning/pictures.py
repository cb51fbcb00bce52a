"""Pictures of a plan: packs of every rank, and what every rank receives before and after planning. Shapes as
in objective.py: C columns, W ranks, R replicas, E expert-parallel ranks, L routed layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from olmo_rl.complete_files import complete_file
from olmo_rl.planning.objective import destination_loads
from olmo_rl.planning.pads import Pads
from olmo_rl.planning.schedule import StepInput
from olmo_rl.types import NO_PADDING, PackPlan, Padding, Topology

PADS = "#f0b8a8"  # their colour in packs.png


def _packs_as_bars(plan: PackPlan) -> tuple[PackPlan, NDArray[np.int64]]:
    """The plan with one document a pack, and the rows of these packs."""
    assert plan.rows is not None, "rows are those of a plan that shares them"
    rows = np.array([count for rank in plan.rows for count in rank], dtype=np.int64)
    numbers = iter(range(len(rows)))
    packs = tuple(tuple((next(numbers),) for _ in rank) for rank in plan.packs)
    return replace(plan, packs=packs, rows=None), rows


def draw_packs(
    plan: PackPlan,
    *,
    lengths: Sequence[int] | NDArray[np.int64],
    budget: int | None,
    path: Path,
    padding: Padding = NO_PADDING,
    title: str = "Packs of one optimizer step",
) -> None:
    """Draw one optimizer step: a row per rank, packs side by side, documents as bars against the budget, pads
    behind them.

    All packs of a column run together. `budget` None (packing off) leaves each column as wide as its longest
    document.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    tokens = np.asarray(lengths, dtype=np.int64)
    if plan.rows is not None:
        # Samples share rows, so a pack has one bar: its rows, not the tokens of its samples.
        plan, tokens = _packs_as_bars(plan)
    widths = [
        budget or max(int(tokens[i]) for rank in plan.packs for i in rank[column])
        for column in range(plan.packs_per_rank)
    ]
    gap = sum(widths) * min(0.012, 0.15 / len(widths))
    starts = np.concatenate([[0], np.cumsum(np.array(widths) + gap)])
    slots, bars, values, pads = [], [], [], []
    for rank, packs in enumerate(plan.packs):
        for column, pack in enumerate(packs):
            left = float(starts[column])
            slots.append(_box(left, left + widths[column], rank))
            for position in pack:
                right = left + int(tokens[position])
                bars.append(_box(left, right, rank))
                values.append(int(tokens[position]))
                left = right
            rows = padding.rows(int(tokens[list(pack)].sum()))
            if (end := float(starts[column]) + rows) > left:
                pads.append(_box(left, end, rank))
    height = min(14.0, 1.7 + 0.32 * plan.world_size)
    figure = Figure(figsize=(11, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    scale = Normalize(vmin=0, vmax=int(tokens.max()))
    # Edges thin out with their number, so that short documents and narrow packs stay visible between them.
    edge = min(0.5, 90 * plan.world_size / len(values))
    frame = min(0.5, 40 / len(widths))
    axes.add_collection(PolyCollection(slots, facecolors="#eeeeee", edgecolors="#999999", linewidths=frame))
    axes.add_collection(
        PolyCollection(
            bars, array=np.array(values), cmap="YlGnBu", norm=scale, edgecolors="white", linewidths=edge
        )
    )
    axes.add_collection(PolyCollection(pads, facecolors=PADS, edgecolors="none"))
    axes.set_xlim(-gap, starts[-1])
    axes.set_ylim(plan.world_size - 0.4, -0.6)
    every = max(1, plan.packs_per_rank // 16)
    axes.set_xticks(
        [float(starts[c]) + widths[c] / 2 for c in range(0, plan.packs_per_rank, every)],
        [f"{c}" for c in range(0, plan.packs_per_rank, every)],
    )
    axes.set_yticks(range(0, plan.world_size, max(1, plan.world_size // 16)))
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    wide = (
        f"each box is {budget:,} tokens wide, grey is unused" + (", red are pads" if pads else "")
        if budget
        else "packing off: one document a forward"
    )
    axes.set(xlabel=f"pack (all ranks run one column together; {wide})", ylabel="rank")
    shape = f"{len(tokens)} samples, {plan.packs_per_rank} packs on each of {plan.world_size} ranks"
    fill = f", fill {tokens.sum() / (plan.world_size * sum(widths)):.3f}" if budget else ""
    axes.set_title(f"{title}: {shape}{fill}", loc="left")
    figure.colorbar(
        ScalarMappable(norm=scale, cmap="YlGnBu"), ax=axes, label="tokens of a document", pad=0.01
    )
    with complete_file(path) as partial:
        figure.savefig(partial, format="png")


def _box(left: float, right: float, rank: int) -> list[tuple[float, float]]:
    return [(left, rank - 0.4), (right, rank - 0.4), (right, rank + 0.4), (left, rank + 0.4)]


def column_loads(
    plan: PackPlan, *, loads: NDArray[np.int32], topology: Topology, pads: Pads | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [C, W] assignments that each rank receives in a column, all layers together, and int64 [C] its
    expert work: the busiest rank of every layer, which is at least the busiest rank of the column. What pads
    add is counted.
    """
    added = None if pads is None else pads.work(plan).by_rank(topology.ep_degree)
    load = destination_loads(plan, loads=loads, topology=topology, pads=added)
    return load.sum(axis=-1).reshape(len(load), -1), load.max(axis=(1, 2)).sum(axis=-1)


def draw_loads(before: PackPlan, after: PackPlan, *, step: StepInput, path: Path) -> None:
    """One panel a plan of `step`, experts at home before, as the plan lends them after: a dot per rank and
    column, a line at the column's expert work, the mean rank and column.
    """
    topology = step.topology
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    planned = "planned" if step.lent is None else "planned and lent"
    drawn = (("arrival", before, step.at_home), (planned, after, step))
    for axes, (name, plan, given) in zip(panels, drawn, strict=True):
        assert given.loads is not None, "loads are drawn where they are known"
        ranks, work = column_loads(plan, loads=given.loads, topology=topology, pads=given.pads)
        columns = np.arange(len(work))
        axes.vlines(columns, ranks.min(axis=1), work, color="#cfd8dc", linewidth=6, zorder=1)
        for rank in range(topology.world_size):
            offset = (rank - (topology.world_size - 1) / 2) * 0.5 / topology.world_size
            axes.scatter(columns + offset, ranks[:, rank], s=14, color="#1f77b4", zorder=2, linewidths=0)
        axes.hlines(work, columns - 0.35, columns + 0.35, color="#d62728", linewidth=1.6, zorder=3)
        axes.axhline(ranks.mean(), color="#555555", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_title(f"{name}: expert work {int(work.sum()):,}", loc="left", fontsize=10)
        axes.set_xticks(columns[:: max(1, len(columns) // 16)])
        axes.set_xlim(-0.6, len(columns) - 0.4)
        axes.set_xlabel("column (all ranks run it together)")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("assignments received, all layers")
    panels[0].set_ylim(bottom=0)
    figure.suptitle(
        "Blue: one rank. Red: expert work, the busiest rank of each layer. Dotted: a mean rank and column.",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    with complete_file(path) as partial:
        figure.savefig(partial, format="png")
