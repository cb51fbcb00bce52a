"""The one preflight: everything that a recipe would refuse in its files, its task and its tokenizer, before
it starts. `recipe=validate` reports it, every other recipe is refused by the part that applies to it.

`Findings` collects instead of raising, so that all reasons are reported at once. Files are looked at as far
as the run may read them, of generated problems the first ones. What was read is handed on (`inputs.py`).
No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from olmo_rl.backends import missing
from olmo_rl.config import Config, OverlongPrompt, Recipe, TaskKind
from olmo_rl.data.advantages import assign_advantages, can_train, filter_samples
from olmo_rl.data.chat_files import open_chat
from olmo_rl.data.chat_survey import ChatSurvey
from olmo_rl.data.files import collection_paths
from olmo_rl.data.findings import Findings
from olmo_rl.data.inputs import KEPT_BYTES
from olmo_rl.data.tokenizers import Tokenizer, fitting_tokenizer
from olmo_rl.hf.agreement import directory_reasons, format_of
from olmo_rl.planning.packing import cut_into_steps, plan_step, unpacked_plan
from olmo_rl.tasks.held_out import held_out_sets
from olmo_rl.tasks.judging import build_judge
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.problems import Problem, demonstration
from olmo_rl.tasks.prompting import NOTHING_FITS, rendered_task, tokens_of
from olmo_rl.types import Collection, Refusal, Topology

MAX_SEED = 2**32 - 1  # of Lightning and NumPy
_MANY = 100_000  # training prompts that are looked at, at most
_PROMPTS = 64  # generated training prompts whose length is looked at
_READS_FILES = (Recipe.train, Recipe.score, Recipe.plan, Recipe.validate)
_READS_TASK = (Recipe.train, Recipe.rollout, Recipe.sft, Recipe.validate, Recipe.evaluate)


def look_into_files(config: Config, findings: Findings, *, plan: bool) -> None:
    """Read every collection once, as training would; `plan` also filters it and forms its packs, which needs
    a sound topology.
    """
    path = config.rollouts.path
    if config.generates or path is None or config.recipe not in _READS_FILES:
        return
    for file in findings.collect(lambda: collection_paths(path)) or []:
        collection = findings.collect(partial(findings.inputs.read, file, config=config))
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
    if config.recipe is not Recipe.plan and config.needs_reference and len(findings.references) > 1:
        findings.reasons.append(
            f"{findings.references[True]} carries ref_logprobs, {findings.references[False]} does not: "
            f"loss.kl_coef={config.loss.kl_coef} would mix both. Record them in all files, or in none"
        )
    if findings.unknown_sampling:
        findings.notes.append(
            unknown_sampling(
                findings.unknown_sampling[0],
                temperature=config.rollouts.temperature,
                files=len(findings.unknown_sampling),
            )
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


def examine(config: Config, *, reasons: Sequence[str] = (), keep: bool = False) -> Findings:
    """Everything that the recipe of `config` would be refused for, after `reasons` of the configuration
    itself. `keep`: what is read is wanted afterwards.
    """
    findings = Findings(reasons=list(reasons))
    findings.inputs.free = KEPT_BYTES if keep and not reasons else 0
    look_into_files(config, findings, plan=not reasons and config.recipe is not Recipe.plan)
    look_into_task(config, findings)
    look_into_chat(config, findings)
    if config.recipe is not Recipe.plan:
        findings.reasons.extend(directory_reasons(config))
    if config.recipe is Recipe.export:
        findings.collect(lambda: format_of(config.model))
        findings.collect(lambda: fitting_tokenizer(config.model))
    if config.recipe is Recipe.serve:
        findings.reasons.extend(missing(config))
        findings.collect(lambda: fitting_tokenizer(config.model))
    return findings


def look_into_task(config: Config, findings: Findings) -> None:
    """Build the task and the tokenizer where the run needs them; references must be judged, and prompts and
    demonstrations must fit the model.
    """
    if config.recipe not in _READS_TASK or not (config.reads_prompts or config.demonstrates):
        return
    if not 0 <= config.seed <= MAX_SEED:  # it breaks a rule of the configuration
        return
    tokenizer = findings.collect(lambda: fitting_tokenizer(config.model))
    given: list[Problem] | None = None
    if config.task.kind is TaskKind.jsonl:
        given = findings.collect(lambda: findings.inputs.read_problems(config.task))
        if given is None:
            findings.collect(lambda: build_judge(config.task))
            return
    if tokenizer is None:
        findings.collect(lambda: build_task(config.task, seed=config.seed, problems=given))
        return
    task = findings.collect(lambda: rendered_task(config, tokenizer=tokenizer, problems=given))
    if task is None:
        return
    findings.notes.extend(findings.collect(task.check_references) or ())
    passes = [passed / _MANY for passed in task.epochs(_MANY).values() if passed > 0]
    count = min(_MANY, max((math.ceil(1 / rate - 1e-6) for rate in passes), default=_PROMPTS))
    problems = findings.collect(lambda: task.problems(count, seed=config.seed)) or []
    held_out: list[Problem] = []
    if config.reads_prompts:
        sets = findings.collect(lambda: held_out_sets(config, own=task, tokenizer=tokenizer)) or []
        held_out = [problem for one in sets for problem in one.problems]
        for one in sets:
            if one.name:
                findings.notes.extend(findings.collect(one.task.check_references) or ())
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
    """Read and render chat data as training would, as far as it may read them."""
    sft, model = config.sft, config.model
    if sft.path is None or config.recipe not in (Recipe.sft, Recipe.validate):
        return
    tokenizer = findings.collect(lambda: fitting_tokenizer(model))
    most = config.trainer.max_steps * (config.batch.samples_per_step or 0) + sft.shuffle_buffer
    for key, path, split, count in (
        ("sft.path", sft.path, sft.split, most),
        ("sft.eval_path", sft.eval_path, sft.eval_split, sft.eval_samples),
    ):
        if path is None or tokenizer is None:
            continue
        files = findings.collect(partial(open_chat, path, config=sft, key=key, split=split))
        if files is not None:
            survey = ChatSurvey(
                key=key, path=path, count=count, config=config, tokenizer=tokenizer, findings=findings
            )
            survey.read(files)


def unknown_sampling(path: Path, *, temperature: float, files: int = 1) -> str:
    """The note about files that do not record how their tokens were drawn."""
    more = f" (and {files - 1} more files)" if files > 1 else ""
    return (
        f"{path}{more}: sampling settings are unknown; training takes its tokens as drawn at "
        f"rollouts.temperature={temperature:g} from the whole vocabulary"
    )


def _plan(collection: Collection, *, config: Config) -> int:
    """Updates of the samples that the filters leave of one collection, each packed in order, so that a sample
    that does not fit is named.
    """
    topology, where = Topology(config.world_size, config.ep_degree), collection.source
    assign_advantages(collection.samples, config=config.loss)
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
