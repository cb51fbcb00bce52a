"""What every rank receives while a column runs, before and after planning, as a picture. Shapes as in
objective.py: C columns, R replicas, E expert-parallel ranks, L routed layers.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.objective import destination_loads
from olmo_rl.planning.pads import Pads
from olmo_rl.types import PackPlan, Topology


def column_loads(
    plan: PackPlan, *, loads: NDArray[np.int32], topology: Topology, pads: Pads | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [C, W] assignments that each rank receives in a column, all layers together, and int64 [C] its
    expert work: the busiest rank of every layer, which is at least the busiest rank of the column. What pads
    add is counted.
    """
    added = None if pads is None else pads.work(plan)
    load = destination_loads(plan, loads=loads, topology=topology, pads=added)
    return load.sum(axis=-1).reshape(len(load), -1), load.max(axis=(1, 2)).sum(axis=-1)


def draw_loads(
    before: PackPlan,
    after: PackPlan,
    *,
    loads: NDArray[np.int32],
    topology: Topology,
    path: Path,
    pads: Pads | None = None,
) -> None:
    """One panel a plan: a dot per rank and column, a line at the column's expert work, the mean rank and
    column.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, plan) in zip(panels, (("arrival", before), ("planned", after)), strict=True):
        ranks, work = column_loads(plan, loads=loads, topology=topology, pads=pads)
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
    temporary = path.with_name(f".{path.name}.partial")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
