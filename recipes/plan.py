"""Plan without GPU, process group or torch: lengths and routes in; plan.json, pictures and a table out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import Config
from olmo_rl.data.files import collection_paths
from olmo_rl.data.inputs import Inputs
from olmo_rl.planning.cost_model import read_cost_model
from olmo_rl.planning.lending import Lent, expert_loads, lend, ranks_of_a_node
from olmo_rl.planning.lending_report import LendingGain, lending_lines
from olmo_rl.planning.packing import cut_into_steps, plan_step, unpacked_plan
from olmo_rl.planning.pads import Pads
from olmo_rl.planning.pictures import draw_loads, draw_packs
from olmo_rl.planning.placement import ExpertTotals, write_placement
from olmo_rl.planning.planners import compile_kernels, schedule_step
from olmo_rl.planning.report import ReportedStep, print_report, report_step, scoring_remark, write_plan
from olmo_rl.planning.schedule import Schedule, StepInput, known_schedule, step_loads
from olmo_rl.planning.synthetic import LONGEST, synthetic_collection
from olmo_rl.types import Collection, Refusal, Sample, Topology


def run(config: Config, *, inputs: Inputs | None = None) -> None:
    """Plan every optimizer step of every collection; nothing is written before all of them are planned.
    `inputs`: what the preflight read.
    """
    topology = Topology(config.world_size, config.ep_degree)
    layout = config.model.expert_layout if config.policy.replay is not False else None
    compile_kernels(config.balance, layout=layout, topology=topology)
    started = time.perf_counter()
    budget = config.budget if config.packed else None
    planned: list[ReportedStep] = []
    model = None if config.balance.cost_model is None else read_cost_model(config.balance.cost_model)
    if model is not None:
        model.check(topology)
    experts = ExpertTotals(topology)
    given: list[StepInput] = []
    tail: list[str] = []
    notes: list[str] = []
    most = config.batch.steps_per_collection
    for collection in read_collections(config, inputs=Inputs() if inputs is None else inputs):
        notes += collection.notes
        steps, rest = cut_into_steps(
            len(collection.samples),
            samples_per_step=config.batch.samples_per_step,
            world_size=topology.world_size,
            source=collection.source,
        )
        most = max(most, len(steps))
        for positions in steps:
            samples = [collection.samples[i] for i in positions]
            reported, step = plan_step_of(samples, collection=collection, number=len(planned), config=config)
            given = given or [step]  # of the first step, for its picture
            planned.append(reported)
            if step.loads is not None and collection.layout is not None and topology.ep_degree > 1:
                experts.add(samples, layout=collection.layout)
        tail += [collection.samples[i].id for i in rest]
    if not planned:
        raise Refusal(
            f"batch.samples_per_step={config.batch.samples_per_step}: no collection holds a complete step "
            f"({len(tail)} samples in all): lower it, or set it to null for one step per file"
        )
    notes += (
        []
        if model is None
        else list(model.lines([(p.number, p.schedule.before, p.schedule.after) for p in planned]))
    )
    directory, first = Path(config.run_dir), planned[0]
    written = [directory / "plan.json", directory / "packs.png"]
    write_plan(planned, topology=topology, budget=budget, untouched_tail=tail, path=written[0])
    draw_packs(
        first.schedule.plan,
        lengths=first.lengths,
        budget=budget,
        path=written[1],
        padding=config.padding,
        title="Optimizer step 0",
    )
    searched = first.schedule.plan.search is not None
    if given[0].loads is not None and config.packed and (searched or given[0].lent is not None):
        arrival = plan_step(first.lengths, budget=config.budget, topology=topology)
        written.append(directory / "loads.png")
        draw_loads(arrival, first.schedule.plan, step=given[0], path=written[-1])
    if experts.known:
        placement, layers = experts.placement()
        notes.append(
            f"balance/placement_floor {placement.floor:.3f}: busiest EP rank / mean, whatever the packs; "
            f"longest first: {placement.reached:.3f}"
        )
        if config.balance.write_permutation is not None:
            written.append(Path(config.balance.write_permutation))
            write_placement(placement, layers=layers, topology=topology, path=written[-1])
    notes += lending_lines([(p.number, p.lending) for p in planned if p.lending is not None], config=config)
    notes += remarks(config, steps_per_collection=most)
    notes.append(f"{time.perf_counter() - started:.1f} s. Written: {', '.join(map(str, written))}")
    print_report(planned, topology=topology, budget=budget, untouched_tail=tail, notes=notes)


def read_collections(config: Config, *, inputs: Inputs) -> Iterator[Collection]:
    """Every file of rollouts.path in name order; for a generating source one collection of the law."""
    if not config.generates:
        assert config.rollouts.path is not None, "refusals require rollouts.path for rollouts=files"
        for path in collection_paths(config.rollouts.path):
            yield inputs.take(path, config=config)
        return
    assert config.batch.samples_per_step is not None, "refusals require a size for generating sources"
    yield synthetic_collection(
        config.batch.samples_per_step * config.batch.steps_per_collection,
        layout=config.model.expert_layout if config.policy.replay is not False else None,
        seed=config.seed,
        group_size=config.rollouts.group_size,
        longest=min(LONGEST, config.model.max_seq_len),
    )


def plan_step_of(
    samples: list[Sample], *, collection: Collection, number: int, config: Config
) -> tuple[ReportedStep, StepInput]:
    """The plan of optimizer step `number` with its cost, and the planner's input."""
    topology, layout = Topology(config.world_size, config.ep_degree), collection.layout
    began, lent = time.perf_counter(), None
    loads = step_loads(samples, layout=layout, topology=topology, balance=config.balance)
    lends = config.lends and loads is not None
    if lends and layout is not None:
        lent = lend(
            samples,
            experts=expert_loads(samples, layout=layout, topology=topology),
            layout=layout,
            topology=topology,
            guests=config.balance.guests,
            node_ranks=ranks_of_a_node(topology, devices=config.trainer.devices),
        )
        loads = loads if lent is None else lent.loads
    given = step_input(samples, loads=loads, lent=lent, collection=collection, config=config)
    seconds = {"count": time.perf_counter() - began}
    schedule, gain = schedule_of(given, config=config), None
    if lends:
        at_home = schedule if lent is None else schedule_of(given.at_home, config=config)
        gain = LendingGain.of(schedule, step=given, at_home=at_home, config=config)
    schedule = replace(schedule, seconds=seconds | schedule.seconds)
    return report_step(schedule, given=given, number=number, packed=config.packed, lending=gain), given


def step_input(
    samples: list[Sample],
    *,
    loads: NDArray[np.int32] | None,
    lent: Lent | None,
    collection: Collection,
    config: Config,
) -> StepInput:
    """A step as the planner sees it, under the loans of `lent`, which `loads` [N, E, L] count."""
    topology = Topology(config.world_size, config.ep_degree)
    return StepInput(
        lengths=np.array([len(sample) for sample in samples], dtype=np.int64),
        ids=[sample.id for sample in samples],
        loads=loads,
        budget=config.budget,
        topology=topology,
        balance=config.balance,
        source=collection.source,
        pads=Pads.of(
            samples,
            padding=config.padding,
            topology=topology,
            loads=loads if lent is None else lent.slots,
            layout=collection.layout,
            layer_stride=config.balance.layer_stride,
            table=None if lent is None else lent.table,
        ),
        lent=lent,
    )


def schedule_of(step: StepInput, *, config: Config) -> Schedule:
    """The plan of one step; without packing every sample is a pack."""
    if config.packed:
        return schedule_step(step)
    plan = unpacked_plan(step.lengths, topology=step.topology, ids=step.ids, source=step.source)
    return known_schedule(plan, step=step, arrival=plan, seconds={})


def remarks(config: Config, *, steps_per_collection: int) -> Iterator[str]:
    """Remarks on what the plan leaves out."""
    if config.generates:
        source = config.rollouts.source.value
        yield f"rollouts={source} has no samples yet: lengths and routes follow a synthetic law."
    if config.batch.filter_zero_variance or config.batch.filter_truncated:
        yield "Filters act when training, before the cut into steps: this plan holds every sample."
    yield scoring_remark(config, steps_in_collection=steps_per_collection)
