"""The one preflight: everything that a run would refuse in its files, its task and its tokenizer, before it
starts. `recipe=validate` reports it, every recipe that starts ranks is refused by it.

`Findings` collects instead of raising, so that all reasons are reported at once. Files that a run reads
whole are looked at whole; of generated problems and of streamed rows, the first ones. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from olmo_rl.config import Config, Overlong, OverlongPrompt, Recipe
from olmo_rl.data.advantages import assign_advantages, can_train, filter_samples
from olmo_rl.data.chat import render, too_long, within
from olmo_rl.data.chat_files import open_chat, rows_in_order
from olmo_rl.data.files import collection_paths, has_reference, read_collection
from olmo_rl.data.tokenizers import Tokenizer, fitting_tokenizer
from olmo_rl.data.validation import check_layout, check_sampling
from olmo_rl.hf.agreement import directory_reasons
from olmo_rl.planning.packing import cut_into_steps, plan_step, unpacked_plan
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.problems import Problem, demonstration
from olmo_rl.tasks.prompting import NOTHING_FITS, rendered_task, tokens_of
from olmo_rl.types import Collection, Refusal, Topology

MAX_SEED = 2**32 - 1  # of Lightning and NumPy
_PROMPTS = 64  # generated training prompts whose length is looked at
_REPORTED = 20  # refused rows of one file
_ROWS = 64  # rows of streamed chat data that are looked at

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Findings:
    """The reasons for a refusal, and the contents of the files."""

    reasons: list[str] = field(default_factory=list)
    files: int = 0
    samples: int = 0
    longest: int = 0
    updates: int = 0
    most_updates: int = 0  # of one file
    notes: list[str] = field(default_factory=list)
    references: dict[bool, Path] = field(default_factory=dict)  # carried or not -> the first such file
    unknown_sampling: list[Path] = field(default_factory=list)  # files without a recorded temperature

    def collect(self, job: Callable[[], T]) -> T | None:
        """The result of `job`; None where it is refused, with its reasons added to `reasons`."""
        try:
            return job()
        except Refusal as refusal:
            self.reasons.extend(refusal.reasons)
            return None


def look_into_files(config: Config, findings: Findings, *, plan: bool) -> None:
    """Read every collection once, as training would; `plan` also filters it and forms its packs, which needs
    a sound topology.
    """
    path = config.rollouts.path
    if config.generates or path is None or config.recipe is Recipe.sft:
        return
    for file in findings.collect(lambda: collection_paths(path)) or []:
        collection = findings.collect(partial(read_for, config, path=file))
        if collection is None:
            continue
        findings.files += 1
        findings.samples += len(collection.samples)
        findings.longest = max(findings.longest, int(collection.lengths.max()))
        findings.notes.extend(collection.notes)
        findings.references.setdefault(collection.samples[0].ref_logprobs is not None, file)
        if collection.sampling.temperature is None:
            findings.unknown_sampling.append(file)
        if plan:
            updates = findings.collect(partial(_plan, collection, config=config)) or 0
            findings.updates += updates
            findings.most_updates = max(findings.most_updates, updates)
    if config.loss.kl_coef != 0 and len(findings.references) > 1:
        findings.reasons.append(
            f"{findings.references[True]} carries ref_logprobs, {findings.references[False]} does not: "
            f"loss.kl_coef={config.loss.kl_coef} would mix both. Record them in all files, or in none"
        )
    if findings.unknown_sampling:
        findings.notes.append(
            unknown_sampling(findings.unknown_sampling[0], files=len(findings.unknown_sampling))
        )
    if plan and findings.files and not findings.updates and not findings.reasons:
        filters = [
            f"batch.{n}" for n in ("filter_zero_variance", "filter_truncated") if getattr(config.batch, n)
        ]
        findings.reasons.append(
            f"{path}: no collection holds the batch.samples_per_step={config.batch.samples_per_step} samples "
            "of one update"
            + (f" after {' and '.join(filters)}: lower it, or leave filters out" if filters else ": lower it")
        )


def examine(config: Config, *, reasons: Sequence[str] = ()) -> Findings:
    """Everything that a run of `config` would be refused for, after `reasons` of the configuration itself."""
    findings = Findings(reasons=list(reasons))
    look_into_files(config, findings, plan=not reasons)
    look_into_task(config, findings)
    look_into_chat(config, findings)
    findings.reasons.extend(directory_reasons(config))
    return findings


def preflight(config: Config) -> None:
    """Raise one Refusal of everything that a run of this accepted configuration would be refused for."""
    findings = examine(config)
    if findings.reasons:
        raise Refusal(findings.reasons)


def look_into_task(config: Config, findings: Findings) -> None:
    """Build the task and the tokenizer where the run needs them; references must be judged, and prompts and
    demonstrations must fit the model.
    """
    if not (config.reads_prompts or config.demonstrates) or not 0 <= config.seed <= MAX_SEED:
        return  # a seed out of range breaks a rule of the configuration
    tokenizer = findings.collect(lambda: fitting_tokenizer(config.model))
    if tokenizer is None:
        findings.collect(lambda: build_task(config.task, seed=config.seed))
        return
    task = findings.collect(lambda: rendered_task(config, tokenizer=tokenizer))
    if task is None:
        return
    findings.notes.extend(findings.collect(task.check_references) or ())
    count = _PROMPTS if task.size is None else max(1, task.size)
    problems = findings.collect(lambda: task.problems(count, seed=config.seed)) or []
    held_out: list[Problem] = []
    if config.reads_prompts:
        held_out = findings.collect(lambda: task.held_out(config.task.eval_problems)) or []
    if config.task.overlong is OverlongPrompt.leave_out:
        for name, part in (("training", problems), ("held-out", held_out)):
            findings.collect(partial(_leave_out, part, name, findings, tokenizer=tokenizer, config=config))
        return
    if config.demonstrates:
        findings.collect(partial(_check_demonstrations, problems, tokenizer=tokenizer, config=config))
    if config.reads_prompts:
        findings.collect(partial(_check_prompts, problems + held_out, tokenizer=tokenizer, config=config))


def _leave_out(
    problems: list[Problem], name: str, findings: Findings, *, tokenizer: Tokenizer, config: Config
) -> None:
    """Note how many problems are left out; refuse where none stays."""
    longest = config.model.max_seq_len
    over = sum(tokens_of(problem, config=config, tokenizer=tokenizer) > longest for problem in problems)
    if problems and over == len(problems):
        raise Refusal(f"{name} problems: {NOTHING_FITS}")
    if over:
        findings.notes.append(
            f"task.overlong=leave_out: {over} of {len(problems)} {name} problems are left out"
        )


def _check_prompts(problems: list[Problem], *, tokenizer: Tokenizer, config: Config) -> None:
    longest, id = max(((len(tokenizer.encode(p.prompt)), p.id) for p in problems), default=(0, ""))
    if longest + config.rollouts.max_new_tokens > config.model.max_seq_len:
        raise Refusal(
            f"problem {id!r} has a prompt of {longest} tokens, with rollouts.max_new_tokens="
            f"{config.rollouts.max_new_tokens} more than model.max_seq_len={config.model.max_seq_len}: raise "
            "the latter, lower the former, or set task.overlong=leave_out"
        )


def _check_demonstrations(problems: list[Problem], *, tokenizer: Tokenizer, config: Config) -> None:
    parts = ((demonstration(problem, tokenizer=tokenizer), problem.id) for problem in problems)
    longest, id = max(((len(prompt) + len(answer), id) for (prompt, answer), id in parts), default=(0, ""))
    if longest > config.model.max_seq_len:
        raise Refusal(
            f"problem {id!r}: prompt and answer, which supervised updates read, have {longest} tokens, more "
            f"than model.max_seq_len={config.model.max_seq_len}: raise it, choose easier problems, or set "
            "task.overlong=leave_out"
        )


def look_into_chat(config: Config, findings: Findings) -> None:
    """Read and render the first rows of chat data as training would."""
    sft, model = config.sft, config.model
    if sft.path is None or config.recipe not in (Recipe.sft, Recipe.validate):
        return
    tokenizer = findings.collect(lambda: fitting_tokenizer(model))
    for key, path, split in (
        ("sft.path", sft.path, sft.split),
        ("sft.eval_path", sft.eval_path, sft.eval_split),
    ):
        if path is None or tokenizer is None:
            continue
        # Held-out rows are read whole at every evaluation.
        count = _ROWS if key == "sft.path" else sft.eval_samples
        _look_into_rows(
            path, count=count, findings=findings, tokenizer=tokenizer, config=config, key=key, split=split
        )


def _look_into_rows(
    path: str,
    *,
    count: int | None,
    findings: Findings,
    tokenizer: Tokenizer,
    config: Config,
    key: str,
    split: str,
) -> None:
    """Render the first `count` rows (None = all), report invalid ones, and note their contents."""
    sft, longest = config.sft, config.model.max_seq_len
    stream = findings.collect(lambda: rows_in_order(open_chat(path, config=sft, key=key, split=split)))
    refused = rows = kept = tokens = scored = most = 0
    ends = False
    while stream is not None and (count is None or rows < count) and refused < _REPORTED:
        part = findings.collect(partial(stream.take, min(_ROWS, _ROWS if count is None else count - rows)))
        if not part:
            break
        for row in part:
            document = findings.collect(partial(render, row, tokenizer=tokenizer, train_on=sft.train_on))
            rows += 1
            if document is None:
                refused += 1
                continue
            ids, trained = document
            tokens, scored, most = tokens + len(ids), scored + int(trained.sum()), max(most, len(ids))
            ends = ends or tokenizer.eos_id in ids[trained]
            kept += within(document, longest=longest, overlong=sft.overlong) is not None
            if len(ids) > longest and sft.overlong is Overlong.refuse:
                findings.reasons.append(too_long(row.where, tokens=len(ids), longest=longest))
                refused += 1
    if not tokens:
        return
    if key == "sft.eval_path" and not kept and not refused:
        findings.reasons.append(
            f"{key}={path}: sft.overlong={sft.overlong.value} leaves none of its {rows} conversations, the "
            f"shortest exceeds model.max_seq_len={longest}: raise it, or name other data"
        )
    findings.notes.append(
        f"{key}: the first {rows} conversations have up to {most:,} tokens, {scored / tokens:.0%} of them "
        "the assistant's"
    )
    if not ends:
        findings.notes.append(
            f"{key}: no turn of the assistant contains the tokenizer's end of sequence: the policy does not "
            "learn to stop"
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
    if config.recipe is not Recipe.score:
        check_sampling(collection)
    if config.loss.kl_coef != 0:
        _check_reference(collection, config=config, path=path)
    return collection


def unknown_sampling(path: Path, *, files: int = 1) -> str:
    """The note about files that do not record how their tokens were drawn."""
    more = f" (and {files - 1} more files)" if files > 1 else ""
    return (
        f"{path}{more}: sampling settings are unknown; training takes its tokens as drawn at temperature 1 "
        "from the whole vocabulary"
    )


def _check_reference(collection: Collection, *, config: Config, path: Path) -> None:
    """A file has reference log-probs for all of its samples or for none; they replace a reference model."""
    missing = [sample.id for sample in collection.samples if sample.ref_logprobs is None]
    if missing and len(missing) < len(collection.samples):
        raise Refusal(
            f"{path}: sample {missing[0]!r} has no ref_logprobs ({len(missing)} such samples), others have: "
            f"loss.kl_coef={config.loss.kl_coef} would mix two references. Record them for all, or for none"
        )
    if not missing and config.loss.reference is not None:
        raise Refusal(
            f"loss.reference={config.loss.reference}: no effect, {path} carries ref_logprobs, and these are "
            "used: leave loss.reference=null, or drop the column"
        )


def carries_reference(config: Config) -> bool:
    """Whether recorded files carry the log-probs of their reference: all do or none, so the first is read."""
    assert config.rollouts.path is not None, "refusals require rollouts.path for rollouts=files"
    return has_reference(collection_paths(config.rollouts.path)[0])


def _plan(collection: Collection, *, config: Config) -> int:
    """Updates of the samples that the filters leave of one collection, each packed in order, so that a sample
    that does not fit is named.
    """
    topology, where = Topology(config.world_size, config.ep_degree), collection.source
    assign_advantages(collection.samples, normalize=config.loss.normalize_advantages)
    samples, _ = filter_samples(collection.samples, config=config.batch)
    size, count = config.batch.samples_per_step, len(samples)
    if size is None and count < len(collection.samples):
        count -= count % topology.world_size
    blocks, _ = cut_into_steps(count, samples_per_step=size, world_size=topology.world_size, source=where)
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    for block in blocks:
        ids = [samples[i].id for i in block]
        if config.packed:
            plan_step(lengths[block], budget=config.budget, topology=topology, ids=ids, source=where)
        else:
            unpacked_plan(lengths[block], topology=topology, ids=ids, source=where)
    return sum(can_train([samples[i] for i in block]) for block in blocks)
