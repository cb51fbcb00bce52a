"""A plan as JSON and as a table. Owns the format of plan.json.

plan.json is byte-identical for identical input: no clock, no path, floats rounded to nine decimals. Packing
off has no budget, so `budget` and `fill` are null there; without routes every expert field is null. Where
rows are padded, a block also has `padded_tokens`, the rows of all packs, and `before` and `after` count pads.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from olmo_rl.config import Config, ScoringMode
from olmo_rl.planning.objective import Bounds, Work, gap, lower_bounds, measure
from olmo_rl.planning.pads import Pads
from olmo_rl.types import PackPlan, Topology

_TABLE_STEPS = 16  # steps that the table shows; plan.json holds all


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One planned optimizer step. `before` is the work of the order of arrival, `after` that of `plan`;
    `start` and `seconds` are told by a search. `padded_tokens`: rows of all packs, None without pads.
    """

    step: int
    ids: tuple[str, ...]
    lengths: NDArray[np.int64]
    plan: PackPlan
    before: Work
    after: Work
    bounds: Bounds
    fill: float | None
    padded_tokens: int | None = None
    start: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)


def describe_step(
    plan: PackPlan,
    *,
    step: int,
    ids: Sequence[str],
    lengths: NDArray[np.int64],
    loads: NDArray[np.int32] | None,
    arrival: PackPlan,
    topology: Topology,
    budget: int | None,
    pads: Pads | None = None,
) -> Block:
    """Measure `plan` and the `arrival` plan of the same samples, with their `pads` where rows are padded.
    `budget` None means packing off.
    """
    added = None if pads is None else pads.work(plan)
    at_first = added if pads is None or plan is arrival else pads.work(arrival)
    tokens = int(lengths.sum())
    bounds = lower_bounds(
        lengths=lengths, loads=loads, topology=topology, budget=budget or int(lengths.max())
    )
    if budget is None:
        bounds = replace(bounds, packs_per_rank=len(ids) // topology.world_size)
    return Block(
        step=step,
        ids=tuple(ids),
        lengths=lengths,
        plan=plan,
        before=measure(arrival, lengths=lengths, loads=loads, topology=topology, pads=at_first),
        after=measure(plan, lengths=lengths, loads=loads, topology=topology, pads=added),
        bounds=bounds,
        fill=None if budget is None else tokens / (topology.world_size * plan.packs_per_rank * budget),
        padded_tokens=None if added is None else tokens + int(added.rows.sum()),
    )


def plan_document(
    blocks: Sequence[Block], *, topology: Topology, budget: int | None, untouched_tail: Sequence[str]
) -> dict[str, Any]:
    """plan.json as a dictionary: packs as sample ids, work before and after, bounds, search log."""
    return {
        "version": 1,
        "topology": {"world_size": topology.world_size, "ep_degree": topology.ep_degree},
        "budget": budget,
        "blocks": [
            {
                "step": block.step,
                "ranks": [[[block.ids[i] for i in pack] for pack in rank] for rank in block.plan.packs],
                "packs_per_rank": block.plan.packs_per_rank,
                "fill": _rounded(block.fill),
                "before": {name: _rounded(value) for name, value in asdict(block.before).items()},
                "after": {name: _rounded(value) for name, value in asdict(block.after).items()},
                "lower_bounds": asdict(block.bounds),
                "search": None if block.plan.search is None else asdict(block.plan.search),
            }
            | ({} if block.padded_tokens is None else {"padded_tokens": block.padded_tokens})
            for block in blocks
        ],
        "untouched_tail": list(untouched_tail),
    }


def _rounded(value: int | float | None) -> int | float | None:
    return round(value, 9) if isinstance(value, float) else value


def write_plan(
    blocks: Sequence[Block],
    *,
    topology: Topology,
    budget: int | None,
    untouched_tail: Sequence[str],
    path: Path,
) -> None:
    """Write plan.json; the name appears only when the file is complete."""
    document = plan_document(blocks, topology=topology, budget=budget, untouched_tail=untouched_tail)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def scoring_remark(config: Config, *, steps_in_collection: int) -> str:
    """What training will do about a scoring pass of its own."""
    if config.scores_separately(steps_in_collection=steps_in_collection):
        why = (
            "scoring.mode=always"
            if config.scoring.mode is ScoringMode.always
            else f"loss.kl_coef={config.loss.kl_coef}"
            if config.loss.kl_coef > 0
            else f"{steps_in_collection} optimizer steps from one collection"
        )
        return f"Scoring: standalone, a pass of its own for every update ({why})."
    interval = config.scoring.check_interval
    again = f" and every {interval} updates" if interval else ""
    return f"Scoring: checked at the first update of each process{again}, skipped otherwise."


def print_report(
    blocks: Sequence[Block],
    *,
    topology: Topology,
    budget: int | None,
    untouched_tail: Sequence[str],
    notes: Sequence[str],
) -> None:
    """The table, what was left out, and notes, on the terminal (100 columns where output is a file)."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    packs = "packing off" if budget is None else f"packs of up to {budget:,} tokens"
    title = f"{topology.world_size} ranks, {topology.num_replicas} x EP {topology.ep_degree}, {packs}"
    console.print(plan_table(blocks, title=title))
    console.print("Percentages: above the lower bound, which divides samples and may be out of reach.")
    for line in (*padding_lines(blocks), *search_lines(blocks)):
        console.print(line, highlight=False, markup=False)
    if untouched_tail:
        console.print(f"Left out: {len(untouched_tail)} samples at the end of collections, no complete step.")
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def plan_table(blocks: Sequence[Block], *, title: str) -> Table:
    """One line per step, three (arrival, planned, bound) where anything was searched.

    Gap is that of J, the sum of all work relative to arrival. Samples are those of a mean pack, percentages
    are gaps above the lower bounds.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    searched = any(block.plan.search is not None for block in blocks)
    experts = any(block.after.expert_work is not None for block in blocks)
    table.add_column("step", justify="right")
    if searched:
        table.add_column("order")
    headings = (["gap"] if searched else []) + ["packs", "samples", "fill", "token work", "pair work"]
    for heading in headings + (["expert work", "skew", "worst"] if experts else []):
        table.add_column(heading, justify="right", no_wrap=True)
    for block in blocks[:_TABLE_STEPS]:
        if searched:
            for step, name, work in (
                (str(block.step), "arrival", block.before),
                ("", "planned", block.after),
            ):
                above = f"{100 * gap(work, bounds=block.bounds, base=block.before):.1f}%"
                table.add_row(step, name, above, *_cells(block, work, experts=experts))
            table.add_row("", "bound", "0.0%", *_bound_cells(block, experts=experts))
        else:
            table.add_row(str(block.step), *_cells(block, block.after, experts=experts))
    if len(blocks) > _TABLE_STEPS:
        table.caption = f"and {len(blocks) - _TABLE_STEPS} more steps in plan.json"
    return table


def _cells(block: Block, work: Work, *, experts: bool) -> list[str]:
    ranks, packs = block.plan.world_size, work.packs_per_rank
    fill = "-" if block.fill is None else f"{block.fill * block.plan.packs_per_rank / packs:.3f}"
    cells = [
        f"{ranks} x {packs}",
        f"{len(block.ids) / (ranks * packs):.1f}",
        fill,
        _above(work.token_work, block.bounds.token_work),
        _above(work.pair_work, block.bounds.pair_work),
    ]
    if experts and work.expert_work is not None and block.bounds.expert_work is not None:
        cells += [
            _above(work.expert_work, block.bounds.expert_work),
            f"{work.skew_mean:.3f}",
            f"{work.skew_max:.3f}",
        ]
    return cells


def _bound_cells(block: Block, *, experts: bool) -> list[str]:
    bounds = block.bounds
    cells = [f"{block.plan.world_size} x {bounds.packs_per_rank}", "", ""]
    cells += [_short(bounds.token_work), _short(bounds.pair_work)]
    if experts and bounds.expert_work is not None:
        cells += [_short(bounds.expert_work), "", ""]
    return cells


def padding_lines(blocks: Sequence[Block]) -> Iterator[str]:
    """One line for every padded step: its real tokens and its rows."""
    for block in blocks[:_TABLE_STEPS]:
        if block.padded_tokens is not None:
            tokens = int(block.lengths.sum())
            yield (
                f"Step {block.step}: {tokens:,} tokens in {block.padded_tokens:,} padded rows "
                f"({tokens / block.padded_tokens:.3f}); work counts pads, bounds do not"
            )


def search_lines(blocks: Sequence[Block]) -> Iterator[str]:
    """One line for every searched step: the start, the search log, where the time went."""
    for block in blocks[:_TABLE_STEPS]:
        log = block.plan.search
        if log is None:
            continue
        rejected = ", ".join(f"{name} {count:,}" for name, count in log.rejected.items() if count)
        split = ", ".join(f"{name} {1000 * value:.1f}" for name, value in block.seconds.items())
        yield (
            f"Step {block.step}: {f'start {block.start}, ' if block.start else ''}"
            f"{log.proposals:,} proposals, "
            f"{log.accepted:,} accepted, stopped by {log.stop_reason}"
            + (f"; rejected by {rejected}" if rejected else "")
            + (f"; ms: {split}" if split else "")
        )


def _above(value: int, bound: int) -> str:
    return f"{_short(value)} +{100 * (value / bound - 1):.0f}%" if bound else _short(value)


def _short(value: float) -> str:
    """Three significant digits with a unit: 1234567 is 1.23M."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
