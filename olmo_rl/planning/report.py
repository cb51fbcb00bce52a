"""A plan as JSON and as a table. Owns the format of plan.json.

plan.json is byte-identical for identical input: no clock, no path, floats rounded to nine decimals. Packing
off has no budget, so `budget` and `fill` are null there; without routes every expert field is null. Where
rows are padded, a block also has `padded_tokens`, the rows of all packs, and `before` and `after` count pads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from olmo_rl.complete_files import write_complete
from olmo_rl.config import Config, ScoringMode
from olmo_rl.planning.lending_report import LendingGain
from olmo_rl.planning.objective import Work, gap
from olmo_rl.planning.schedule import Schedule, StepInput, loan_rows
from olmo_rl.types import PackPlan, Topology

_TABLE_STEPS = 16  # steps that the table shows; plan.json holds all


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReportedStep:
    """One planned optimizer step. `fill`: real tokens over the budget of all packs, None without packing;
    `padded_tokens`: rows of all packs, None without padding; `lending`: None without guest slots.
    """

    number: int
    ids: Sequence[str]
    lengths: NDArray[np.int64]
    schedule: Schedule
    fill: float | None
    padded_tokens: int | None
    lending: LendingGain | None = None


def report_step(
    schedule: Schedule,
    *,
    given: StepInput,
    number: int,
    packed: bool,
    lending: LendingGain | None = None,
) -> ReportedStep:
    """The report of the `schedule` of `given`; without packing every sample is a pack."""
    world, tokens, plan = given.topology.world_size, int(given.lengths.sum()), schedule.plan
    if not packed:
        bounds = replace(schedule.bounds, packs_per_rank=len(given.ids) // world)
        schedule = replace(schedule, bounds=bounds)
    return ReportedStep(
        number=number,
        ids=given.ids,
        lengths=given.lengths,
        schedule=schedule,
        fill=tokens / (world * plan.packs_per_rank * given.budget) if packed else None,
        padded_tokens=None if given.pads is None else tokens + int(given.pads.work(plan).rows.sum()),
        lending=lending,
    )


def plan_document(
    steps: Sequence[ReportedStep], *, topology: Topology, budget: int | None, untouched_tail: Sequence[str]
) -> dict[str, Any]:
    """plan.json as a dictionary: packs as sample ids, work before and after, bounds, search log."""
    return {
        "topology": {"world_size": topology.world_size, "ep_degree": topology.ep_degree},
        "budget": budget,
        "blocks": [
            {
                "step": step.number,
                "ranks": [
                    [[step.ids[i] for i in pack] for pack in rank] for rank in step.schedule.plan.packs
                ],
                "packs_per_rank": step.schedule.plan.packs_per_rank,
                "fill": _rounded(step.fill),
                "before": {name: _rounded(value) for name, value in asdict(step.schedule.before).items()},
                "after": {name: _rounded(value) for name, value in asdict(step.schedule.after).items()},
                "lower_bounds": asdict(step.schedule.bounds),
                "search": None if step.schedule.plan.search is None else asdict(step.schedule.plan.search),
            }
            | ({} if step.padded_tokens is None else {"padded_tokens": step.padded_tokens})
            | ({} if step.lending is None else {"lending": _lending(step.lending, plan=step.schedule.plan)})
            for step in steps
        ],
        "untouched_tail": list(untouched_tail),
    }


def _lending(gain: LendingGain, *, plan: PackPlan) -> dict[str, Any]:
    """The gain of loans, and the loans of every routed layer: expert, host, slot, first, below."""
    values: dict[str, Any] = {name: _rounded(value) for name, value in asdict(gain).items()}
    return values | {"loans": [] if plan.lending is None else loan_rows(plan.lending)}


def _rounded(value: int | float | None) -> int | float | None:
    return round(value, 9) if isinstance(value, float) else value


def write_plan(
    steps: Sequence[ReportedStep],
    *,
    topology: Topology,
    budget: int | None,
    untouched_tail: Sequence[str],
    path: Path,
) -> None:
    """Write plan.json: complete or absent."""
    document = plan_document(steps, topology=topology, budget=budget, untouched_tail=untouched_tail)
    write_complete(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def scoring_remark(config: Config, *, steps_in_collection: int) -> str:
    """The line that announces whether training runs a scoring pass."""
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
    steps: Sequence[ReportedStep],
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
    console.print(plan_table(steps, title=title))
    console.print("Percentages: above the lower bound, which divides samples and may be out of reach.")
    for line in (*padding_lines(steps), *search_lines(steps), *load_lines(steps)):
        console.print(line, highlight=False, markup=False)
    if untouched_tail:
        console.print(f"Left out: {len(untouched_tail)} samples at the end of collections, no complete step.")
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def plan_table(steps: Sequence[ReportedStep], *, title: str) -> Table:
    """One line per step, three (arrival, planned, bound) where anything was searched.

    Gap is that of J, the sum of all work relative to arrival. Samples are those of a mean pack, percentages
    are gaps above the lower bounds.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    searched = any(step.schedule.plan.search is not None for step in steps)
    experts = any(step.schedule.after.expert_work is not None for step in steps)
    table.add_column("step", justify="right")
    if searched:
        table.add_column("order")
    headings = (["gap"] if searched else []) + ["packs", "samples", "fill", "token work", "pair work"]
    for heading in headings + (["expert work", "skew", "worst"] if experts else []):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in steps[:_TABLE_STEPS]:
        if searched:
            for number, name, work in (
                (str(step.number), "arrival", step.schedule.before),
                ("", "planned", step.schedule.after),
            ):
                above = f"{100 * gap(work, bounds=step.schedule.bounds, base=step.schedule.before):.1f}%"
                table.add_row(number, name, above, *_cells(step, work, experts=experts))
            table.add_row("", "bound", "0.0%", *_bound_cells(step, experts=experts))
        else:
            table.add_row(str(step.number), *_cells(step, step.schedule.after, experts=experts))
    if len(steps) > _TABLE_STEPS:
        table.caption = f"and {len(steps) - _TABLE_STEPS} more steps in plan.json"
    return table


def _cells(step: ReportedStep, work: Work, *, experts: bool) -> list[str]:
    ranks, packs = step.schedule.plan.world_size, work.packs_per_rank
    fill = "-" if step.fill is None else f"{step.fill * step.schedule.plan.packs_per_rank / packs:.3f}"
    cells = [
        f"{ranks} x {packs}",
        f"{len(step.ids) / (ranks * packs):.1f}",
        fill,
        _above(work.token_work, step.schedule.bounds.token_work),
        _above(work.pair_work, step.schedule.bounds.pair_work),
    ]
    if experts and work.expert_work is not None and step.schedule.bounds.expert_work is not None:
        cells += [
            _above(work.expert_work, step.schedule.bounds.expert_work),
            f"{work.skew_mean:.3f}",
            f"{work.skew_max:.3f}",
        ]
    return cells


def _bound_cells(step: ReportedStep, *, experts: bool) -> list[str]:
    bounds = step.schedule.bounds
    cells = [f"{step.schedule.plan.world_size} x {bounds.packs_per_rank}", "", ""]
    cells += [_short(bounds.token_work), _short(bounds.pair_work)]
    if experts and bounds.expert_work is not None:
        cells += [_short(bounds.expert_work), "", ""]
    return cells


def padding_lines(steps: Sequence[ReportedStep]) -> Iterator[str]:
    """One line for every padded step: its real tokens and its rows."""
    for step in steps[:_TABLE_STEPS]:
        if step.padded_tokens is not None:
            tokens = int(step.lengths.sum())
            yield (
                f"Step {step.number}: {tokens:,} tokens in {step.padded_tokens:,} padded rows "
                f"({tokens / step.padded_tokens:.3f}); work counts pads, bounds do not"
            )


def search_lines(steps: Sequence[ReportedStep]) -> Iterator[str]:
    """One line for every searched step: the start, the search log, where the time went."""
    for step in steps[:_TABLE_STEPS]:
        log = step.schedule.plan.search
        if log is None:
            continue
        rejected = ", ".join(f"{name} {count:,}" for name, count in log.rejected.items() if count)
        split = ", ".join(f"{name} {1000 * value:.1f}" for name, value in step.schedule.seconds.items())
        yield (
            f"Step {step.number}: {f'start {step.schedule.start}, ' if step.schedule.start else ''}"
            f"{log.proposals:,} proposals, "
            f"{log.accepted:,} accepted, stopped by {log.stop_reason}"
            + (" (another run may plan otherwise)" if log.stop_reason == "deadline" else "")
            + (f"; rejected by {rejected}" if rejected else "")
            + (f"; ms: {split}" if split else "")
        )


def load_lines(steps: Sequence[ReportedStep]) -> Iterator[str]:
    """The largest destination load of every searched step beside that of the order of arrival: it bounds the
    memory of the busiest rank. A rise is a warning.
    """
    for step in steps[:_TABLE_STEPS]:
        before, after = step.schedule.before, step.schedule.after
        old, new = before.max_destination_load, after.max_destination_load
        if step.schedule.plan.search is None or old is None or new is None:
            continue
        line = f"Step {step.number}: largest destination load {_short(old)} before, {_short(new)} planned"
        if new > old:
            line += (
                f" (+{100 * (new / old - 1):.0f}%): the busiest rank needs more memory; "
                f"balance.max_destination_load={old} keeps it"
            )
        yield line


def _above(value: int, bound: int) -> str:
    return f"{_short(value)} +{100 * (value / bound - 1):.0f}%" if bound else _short(value)


def _short(value: float) -> str:
    """Three significant digits with a unit: 1234567 is 1.23M."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
