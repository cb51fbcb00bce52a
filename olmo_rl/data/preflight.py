"""What a run would refuse in its files, its task and its tokenizer, found before it starts. No torch.

`Findings` collects instead of raising, so that everything is told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from olmo_rl.config import Config, Recipe
from olmo_rl.data.files import check_layout, collection_paths, read_collection
from olmo_rl.data.tasks import build_task
from olmo_rl.data.tokenizers import load_tokenizer
from olmo_rl.planning.packing import cut_into_steps, plan_step, unpacked_plan
from olmo_rl.types import Collection, Refusal, Topology

MAX_SEED = 2**32 - 1  # of Lightning and NumPy
_PROMPTS = 64  # training prompts whose length is looked at

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Findings:
    """What was refused, and what the files hold."""

    reasons: list[str] = field(default_factory=list)
    files: int = 0
    samples: int = 0
    longest: int = 0
    updates: int = 0
    most_updates: int = 0  # of one file
    boundaries: dict[int, Path] = field(default_factory=dict)  # updates at a file's end -> the file
    notes: list[str] = field(default_factory=list)

    def collect(self, job: Callable[[], T]) -> T | None:
        """What `job` returns; None where it is refused, and why goes to `reasons`."""
        try:
            return job()
        except Refusal as refusal:
            self.reasons.extend(refusal.reasons)
            return None


def look_into_files(config: Config, findings: Findings, *, plan: bool) -> None:
    """Read every collection as training would; `plan` also forms its packs, which needs a sound topology."""
    path = config.rollouts.path
    if config.generates or path is None:
        return
    for file in findings.collect(lambda: collection_paths(path)) or []:
        collection = findings.collect(partial(read_for, config, path=file))
        if collection is None:
            continue
        findings.files += 1
        findings.samples += len(collection.samples)
        findings.longest = max(findings.longest, int(collection.lengths.max()))
        findings.notes.extend(collection.notes)
        if plan:
            updates = findings.collect(partial(_plan, collection, config=config)) or 0
            findings.updates += updates
            findings.most_updates = max(findings.most_updates, updates)
            if updates:
                findings.boundaries[findings.updates] = file
    if plan and findings.files and not findings.updates and not findings.reasons:
        findings.reasons.append(
            f"{path}: no collection holds the batch.samples_per_step={config.batch.samples_per_step} samples "
            "of one update: lower it"
        )
    if plan and config.recipe in (Recipe.train, Recipe.validate):
        findings.reasons.extend(_stops_inside(config, findings.boundaries))


def _stops_inside(config: Config, boundaries: Mapping[int, Path]) -> Iterator[str]:
    """Checkpoints fall on the ends of files: a run that stops elsewhere would lose its last updates."""
    steps = config.trainer.max_steps
    later = [count for count in boundaries if count > steps]
    if steps in boundaries or not later or config.batch.filter_zero_variance or config.batch.filter_truncated:
        return
    earlier = [count for count in boundaries if count < steps]
    choices = [*earlier[-1:], min(later)]
    yield (
        f"trainer.max_steps={steps} ends inside {boundaries[min(later)]}, where no checkpoint can be saved: "
        f"choose {' or '.join(map(str, choices))}"
    )


def refuse_files(config: Config) -> None:
    """Raise one Refusal of everything that the files of this run would be refused for, before anything
    starts.
    """
    findings = Findings()
    look_into_files(config, findings, plan=True)
    if findings.reasons:
        raise Refusal(findings.reasons)


def look_into_task(config: Config, findings: Findings) -> None:
    """Build the task and the tokenizer where the run needs them; they must fit the model."""
    if not (config.generates or config.warm_start.steps > 0) or not 0 <= config.seed <= MAX_SEED:
        return  # a seed out of range has a row of its own in the table of refusals
    model = config.model
    tokenizer = findings.collect(lambda: load_tokenizer(model.tokenizer))
    task = findings.collect(lambda: build_task(config.task, seed=config.seed))
    if tokenizer is None or task is None:
        return
    if tokenizer.vocab_size > model.vocab_size:
        findings.reasons.append(
            f"model.tokenizer={model.tokenizer} has {tokenizer.vocab_size} ids, the embedding fewer rows: "
            f"raise model.vocab_size={model.vocab_size}"
        )
    problems = findings.collect(
        lambda: [*task.problems(_PROMPTS, seed=config.seed), *task.held_out(config.task.eval_problems)]
    )
    lengths = [(len(tokenizer.encode(problem.prompt)), problem.id) for problem in problems or []]
    longest, id = max(lengths, default=(0, ""))
    if config.generates and longest + config.rollouts.max_new_tokens > model.max_seq_len:
        findings.reasons.append(
            f"problem {id!r} has a prompt of {longest} tokens, with rollouts.max_new_tokens="
            f"{config.rollouts.max_new_tokens} more than model.max_seq_len={model.max_seq_len}: raise the "
            "latter, or lower the former"
        )


def read_for(config: Config, *, path: Path) -> Collection:
    """One collection as training takes it: routes, token ids, lengths and reference log-probs must fit the
    configuration.
    """
    model, replay = config.model, config.replay
    collection = read_collection(
        path,
        require_routes=replay,
        layout=model.expert_layout,
        vocab_size=model.vocab_size,
        num_layers=len(model.layer_types),
    )
    check_layout(collection, expected=model.expert_layout, replay=replay, max_seq_len=model.max_seq_len)
    missing = [sample.id for sample in collection.samples if sample.ref_logprobs is None]
    if config.loss.kl_coef > 0 and missing:
        raise Refusal(
            f"{path}: sample {missing[0]!r} has no ref_logprobs ({len(missing)} such samples), which "
            f"loss.kl_coef={config.loss.kl_coef} needs: record them, or set loss.kl_coef=0"
        )
    return collection


def _plan(collection: Collection, *, config: Config) -> int:
    """Complete updates of one collection, each packed in order, so that what does not fit is named."""
    topology, where = Topology(config.world_size, config.ep_degree), collection.source
    lengths = collection.lengths
    blocks, _ = cut_into_steps(
        len(lengths),
        samples_per_step=config.batch.samples_per_step,
        world_size=topology.world_size,
        source=where,
    )
    for block in blocks:
        ids = [collection.samples[i].id for i in block]
        if config.packed:
            plan_step(lengths[block], budget=config.budget, topology=topology, ids=ids, source=where)
        else:
            unpacked_plan(lengths[block], topology=topology, ids=ids, source=where)
    return len(blocks)
