"""Refuse everything that can be refused, all at once, before weights load; else describe the run.

No process group and no weights: the model is built without storage. The configured device and topology are
judged, not this machine's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from olmo_rl.backends import backends_of, missing
from olmo_rl.config import Config
from olmo_rl.data.preflight import examine
from olmo_rl.library import faults_of_code
from olmo_rl.planning.lending_report import lending_line
from olmo_rl.planning.report import scoring_remark
from olmo_rl.refusals import refusals
from olmo_rl.types import Refusal, Topology


def run(config: Config) -> None:
    """The configuration, the files and the task it names, then the model."""
    findings = examine(config, reasons=refusals(config))
    if reasons := findings.reasons or faults_of_code(config):
        raise Refusal(reasons)
    model, topology = config.model, Topology(config.world_size, config.ep_degree)
    from olmo_rl.policy.footprint import memory_table  # after the refusals: they need no torch
    from olmo_rl.policy.weights import parameter_shapes

    shapes = parameter_shapes(model)
    total, active = count_parameters(config, shapes=shapes)
    ranks = f"{config.world_size} x {config.trainer.accelerator}"
    rows = f"rows of up to {config.budget:,} tokens" if config.packed else "off, one sample a forward"
    print(f"{config.run_name}: nothing is refused")
    show("ranks", f"{ranks}, expert-parallel degree {config.ep_degree}")
    show("model", f"{total:,} parameters, {active:,} active per token, {len(model.layer_types)} layers")
    if model.routed_layers:
        owned, routes = topology.experts_per_rank(model.num_experts), "replayed" if config.replay else "live"
        show("experts", f"{model.num_experts}, top {model.top_k}, {owned} on each rank, routes {routes}")
    mixers = ", ".join(
        f"{key.removeprefix('policy.')} {row.name}" for key, row in backends_of(config).items()
    )
    compiled = ", compiled by block" if config.policy.compile else ""
    show("mixers", f"{mixers}; computed in {config.policy.dtype.value}{compiled}")
    if model.routed_layers and config.expert_dtype is not config.policy.dtype:
        show("experts", f"computed in {config.expert_dtype.value}")
    for line in memory_table(config, shapes=shapes):
        show("memory", f"{line.name:<11} {line.bytes / 2**30:9.2f} GiB  {line.how}")
    whole = sum(line.bytes for line in memory_table(config, shapes=shapes)) / 2**30
    show("memory", f"{'sum':<11} {whole:9.2f} GiB  of the largest rank, an estimate")
    for lacking in missing(config):
        show("lacking", f"on this machine: {lacking}")
    if config.lends:
        show("lending", lending_line(config))
    show("packing", f"{rows}; balance {config.balance.kind.value}")
    if findings.files:
        samples = f"{findings.samples:,} samples of up to {findings.longest:,} tokens"
        show("files", f"{findings.files}, {samples}, {findings.updates} updates")
    for note in findings.notes:
        show("note", note)
    steps = max(config.batch.steps_per_collection, findings.most_updates)
    print(scoring_remark(config, steps_in_collection=steps))


def count_parameters(config: Config, *, shapes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Parameters of the whole model, and those used for one token."""
    model = config.model
    total = sum(math.prod(shape) for shape in shapes.values())
    expert = 3 * (model.latent_dim or model.dim) * model.expert_hidden
    return total, total - len(model.routed_layers) * expert * max(0, model.num_experts - model.top_k)


def show(name: str, text: str) -> None:
    print(f"  {name:<10} {text}")
