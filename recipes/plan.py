"""Plan without GPU, process group or torch: lengths and routes in; plan.json, packs.png and a table out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from olmo_rl.config import BalanceKind, Config
from olmo_rl.data.files import collection_paths, read_collection
from olmo_rl.planning.loads import collection_loads
from olmo_rl.planning.packing import cut_into_steps, plan_step, unpacked_plan
from olmo_rl.planning.report import Block, describe_step, draw_packs, print_report, scoring_remark, write_plan
from olmo_rl.planning.synthetic import LONGEST, synthetic_collection
from olmo_rl.types import Collection, Refusal, Sample, Topology


def run(config: Config) -> None:
    """Plan every optimizer step of every collection; nothing is written before all of them are planned."""
    started = time.perf_counter()
    topology = Topology(config.world_size, config.ep_degree)
    budget = config.budget if config.packed else None
    blocks: list[Block] = []
    tail: list[str] = []
    notes: list[str] = []
    most = config.batch.steps_per_collection
    for collection in read_collections(config):
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
            blocks.append(plan_step_of(samples, collection=collection, step=len(blocks), config=config))
        tail += [collection.samples[i].id for i in rest]
    if not blocks:
        raise Refusal(
            f"batch.samples_per_step={config.batch.samples_per_step}: no collection holds a complete step "
            f"({len(tail)} samples in all): lower it, or set it to null for one step per file"
        )
    directory, first = Path(config.run_dir), blocks[0]
    write_plan(blocks, topology=topology, budget=budget, untouched_tail=tail, path=directory / "plan.json")
    picture = directory / "packs.png"
    draw_packs(first.plan, lengths=first.lengths, budget=budget, path=picture, title="Optimizer step 0")
    notes += remarks(config, steps_per_collection=most)
    notes.append(f"{time.perf_counter() - started:.1f} s. Written: {directory / 'plan.json'}, {picture}")
    print_report(blocks, topology=topology, budget=budget, untouched_tail=tail, notes=notes)


def read_collections(config: Config) -> Iterator[Collection]:
    """Every file of rollouts.path in name order; for a generating source one collection of the law."""
    replay = config.policy.replay is not False
    layout = config.model.expert_layout if replay else None
    if not config.generates:
        assert config.rollouts.path is not None, "refusals require rollouts.path for rollouts=files"
        for path in collection_paths(config.rollouts.path):
            yield read_collection(path, require_routes=replay, layout=layout)
        return
    assert config.batch.samples_per_step is not None, "refusals require a size for generating sources"
    yield synthetic_collection(
        config.batch.samples_per_step * config.batch.steps_per_collection,
        layout=layout,
        seed=config.seed,
        group_size=config.rollouts.group_size,
        longest=min(LONGEST, config.model.max_seq_len),
    )


def plan_step_of(samples: list[Sample], *, collection: Collection, step: int, config: Config) -> Block:
    """The plan of one optimizer step and what it costs."""
    topology, budget = Topology(config.world_size, config.ep_degree), config.budget
    ids, source = [sample.id for sample in samples], collection.source
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    loads = None
    if samples[0].routes is not None and collection.layout is not None:
        stride = config.balance.layer_stride
        loads = collection_loads(samples, layout=collection.layout, topology=topology, layer_stride=stride)
    if config.packed:
        arrival = plan_step(lengths, budget=budget, topology=topology, ids=ids, source=source)
    else:
        arrival = unpacked_plan(lengths, topology=topology, ids=ids, source=source)
    plan = arrival
    if config.balance.kind is not BalanceKind.none:
        from olmo_rl.planning.search import plan_batch  # brings compiled kernels: only for a search

        plan = plan_batch(
            lengths, ids=ids, loads=loads, budget=budget, topology=topology, balance=config.balance
        )
    return describe_step(
        plan,
        step=step,
        ids=ids,
        lengths=lengths,
        loads=loads,
        arrival=arrival,
        topology=topology,
        budget=budget if config.packed else None,
    )


def remarks(config: Config, *, steps_per_collection: int) -> Iterator[str]:
    """What a reader of the plan would otherwise assume."""
    if config.generates:
        source = config.rollouts.source.value
        yield f"rollouts={source} has no samples yet: lengths and routes follow a synthetic law."
    if config.batch.filter_zero_variance or config.batch.filter_truncated:
        yield "Filters act when training, before the cut into steps: this plan holds every sample."
    yield scoring_remark(config.scoring, steps_per_collection=steps_per_collection)
