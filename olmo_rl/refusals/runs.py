"""Rules of the objective, the task, the run directory, and the inputs that a recipe needs named."""

from __future__ import annotations

import math
from pathlib import Path

from olmo_rl.backends import NOT_INSTALLED, import_fault
from olmo_rl.chosen_checkpoint import WITHOUT_EVALUATION, WORDS, best_checkpoint
from olmo_rl.config import Config, Recipe, TaskKind
from olmo_rl.hf.formats import is_hf_directory
from olmo_rl.refusals.rule import Rule, value_of
from olmo_rl.run_directory import checkpoint_fault, complete_checkpoints, named_checkpoints
from olmo_rl.user_code import import_parts

# Names that a run leaves in its directory, by the recipe that would write them again.
_TRAINING_MARKS = (
    "metrics.csv",
    "checkpoints",
    "reference",
    "training_contract_rank*.jsonl",
    "samples",
    "report.html",
    "tensorboard",
    "profile",
    ".logger-id",
)
RUN_MARKS: dict[Recipe, tuple[str, ...]] = {
    Recipe.train: _TRAINING_MARKS,
    Recipe.sft: _TRAINING_MARKS,
    Recipe.rollout: ("rollouts",),
    Recipe.score: ("scores.jsonl",),
    Recipe.evaluate: ("evaluation.json", "answers"),
    Recipe["import"]: ("rollouts", "import_report.json"),
    Recipe.upcycle: ("upcycled",),
}


def run_files(config: Config) -> list[Path]:
    """Files of an earlier run of this recipe in the run directory."""
    if not config.run_dir:
        return []
    return sorted(
        path for mark in RUN_MARKS.get(config.recipe, ()) for path in Path(config.run_dir).glob(mark)
    )


def _absent(config: Config, key: str) -> bool:
    """Selects paths that do not exist."""
    path = value_of(config, key)
    if path is None or (key == "ckpt_path" and path in WORDS):
        return False
    return not Path(path).exists()


def _continues(config: Config) -> bool:
    """Whether this command goes on where an earlier one of the same directory stopped, or starts that one
    again: every recipe does, given `auto`, which a requeued job is.
    """
    return config.ckpt_path == "auto" or (config.trains and config.ckpt_path in WORDS)


def _best_is_absent(config: Config) -> bool:
    wanted = config.trains and config.ckpt_path == "best" and bool(config.run_dir)
    return wanted and bool(complete_checkpoints(config.run_dir)) and best_checkpoint(config.run_dir) is None


def _goes_back(config: Config) -> bool:
    """Whether `best` is older than the newest checkpoint of the run directory itself."""
    if not config.trains or config.ckpt_path != "best" or not config.run_dir:
        return False
    best = best_checkpoint(config.run_dir)
    return best is not None and best != complete_checkpoints(config.run_dir)[-1]


def _nothing_complete(config: Config) -> bool:
    """Whether there is no checkpoint for `last` and `best`; or, for `auto`, which would start, damaged ones
    alone.
    """
    wanted = config.ckpt_path in ("last", "best")
    wanted = wanted or (config.ckpt_path == "auto" and bool(named_checkpoints(config.run_dir)))
    return wanted and not complete_checkpoints(config.run_dir)


def _damaged(checkpoint: str | None) -> bool:
    """Whether this directory is no whole checkpoint; another rule refuses one that does not exist."""
    if checkpoint is None or checkpoint in WORDS or not Path(checkpoint).exists():
        return False
    return checkpoint_fault(checkpoint) is not None


def _holds_no_weights(path: str | None) -> bool:
    """Whether a directory is neither a Hugging Face directory nor a whole checkpoint."""
    if path is None or not Path(path).is_dir() or is_hf_directory(path):
        return False
    return checkpoint_fault(path) is not None


def _importable(entry: object) -> bool:
    """Whether an entry names a class in a module that is installed; one that does not import is reported with
    its own error.
    """
    parts = import_parts(entry.get("_target_")) if isinstance(entry, dict) else None
    return parts is not None and import_fault(parts[0]) != NOT_INSTALLED


def _is_cleared(config: Config, weights: str | None) -> bool:
    """Whether overwrite=true removes `weights`."""
    if weights is None or weights in WORDS:
        return False
    path = Path(weights).resolve()
    return any(path.is_relative_to(mark.resolve()) for mark in run_files(config))


def _uncontained(run_name: str) -> bool:
    path = Path(run_name)
    return not run_name or path.is_absolute() or ".." in path.parts


_TAKEN = (  # names behind `reward/`
    *("mean", "std", "best_of_group", "worst_of_group", "constant_groups", "kl"),
    *("verifier", "length_penalty"),
)

LOSS = (
    Rule(
        keys="loss.kl_coef loss.kl_reward_coef recipe",
        refuses="supervised updates have no KL term",
        fix="leave loss.kl_coef=0 and loss.kl_reward_coef=0",
        when=lambda c: c.needs_reference and c.recipe is Recipe.sft,
    ),
    Rule(
        keys="loss.tis_low loss.tis_high",
        refuses="the lower clip of the importance weight lies above the upper one",
        fix="swap them",
        when=lambda c: (c.loss.tis_low or 0.0) > (math.inf if c.loss.tis_high is None else c.loss.tis_high),
    ),
)

TASK = (
    Rule(
        keys="task task.name",
        refuses="a dataset of reasoning-gym is not named",
        fix="set task.name, for example task.name=chain_sum",
        when=lambda c: c.task.kind is TaskKind.reasoning_gym and c.task.name is None,
    ),
    Rule(
        keys="task task.path",
        refuses="the file with prompts and answers is not named",
        fix="set task.path",
        when=lambda c: c.task.kind is TaskKind.jsonl and c.task.path is None,
    ),
    Rule(
        keys="task task.mix",
        refuses="tasks to mix are not named, or a name is no word",
        fix="give each a name: '+task.mix.sums={kind:addition,weight:1}'",
        when=lambda c: (
            c.task.kind is TaskKind.mixed
            and not (c.task.mix and all(str(name).isidentifier() for name in c.task.mix))
        ),
    ),
    Rule(
        keys="task.chat model.tokenizer",
        refuses="bytes have no chat template",
        fix="choose a model.tokenizer that has one, or task.chat=false",
        when=lambda c: c.task.chat and c.model.tokenizer == "bytes",
    ),
    Rule(
        keys="task.verifier",
        refuses="a verifier without _target_",
        fix="give the function's import path: +task.verifier._target_=package.function",
        when=lambda c: bool(c.task.verifier) and "_target_" not in c.task.verifier,
    ),
    Rule(
        keys="task.verifier task.verifiers task.rewards",
        refuses="task.rewards is the whole reward, other verifiers would judge nothing",
        fix="move them into task.rewards, each with a name, or drop it",
        when=lambda c: bool(c.task.rewards) and bool(c.task.verifier or c.task.verifiers),
    ),
    Rule(
        keys="task.rewards",
        refuses=f"a name that is no word, or that a metric of the reward has: {', '.join(_TAKEN)}",
        fix="rename this reward",
        when=lambda c: any(not str(n).isidentifier() or n in _TAKEN for n in c.task.rewards),
    ),
    Rule(
        keys="evaluation.samples evaluation.temperature",
        refuses="greedy responses to one problem are all equal",
        fix="set evaluation.temperature, or evaluation.samples=1",
        when=lambda c: c.evaluation.samples > 1 and c.evaluation.temperature == 0,
    ),
    Rule(
        keys="evaluation.pass_at evaluation.samples",
        refuses="pass@k needs at least k responses to a problem, and a k of at least 1",
        fix="raise evaluation.samples, or leave larger ones out",
        when=lambda c: any(k not in range(1, c.evaluation.samples + 1) for k in c.evaluation.pass_at),
    ),
    Rule(
        keys="evaluation.sets",
        refuses="a set whose name is no word, or that of the task's own problems (task)",
        fix="rename it",
        when=lambda c: not all(str(n).isidentifier() and n != "task" for n in c.evaluation.sets),
    ),
    Rule(
        keys="recipe task.eval_problems evaluation.sets",
        refuses="nothing is held out to be evaluated",
        fix="set task.eval_problems, or name sets",
        when=lambda c: c.recipe is Recipe.evaluate and c.task.eval_problems == 0 and not c.evaluation.sets,
    ),
    Rule(
        keys="recipe init_from rollouts",
        refuses="weights to evaluate are not named",
        fix="set init_from to a checkpoint, a weights file or a Hugging Face directory, or choose "
        "rollouts=vllm or rollouts=sglang",
        when=lambda c: c.recipe is Recipe.evaluate and c.init_from is None and not c.asks_engines,
    ),
    Rule(
        keys="recipe init_from rollouts",
        refuses="serving engines are asked as they are, no weights are sent to them",
        fix="drop init_from, or choose rollouts=local",
        when=lambda c: c.recipe is Recipe.evaluate and c.init_from is not None and c.asks_engines,
    ),
    Rule(
        keys="recipe rollouts",
        refuses="recorded responses are not evaluated, they have rewards",
        fix="choose rollouts=local",
        when=lambda c: c.recipe is Recipe.evaluate and not c.generates,
    ),
    Rule(
        keys="rollouts.length_buffer rollouts.max_new_tokens",
        refuses="the length penalty would begin before the response",
        fix="choose rollouts.length_buffer up to rollouts.max_new_tokens",
        when=lambda c: (
            c.generates
            and c.rollouts.length_buffer is not None
            and c.rollouts.length_buffer > c.rollouts.max_new_tokens
        ),
    ),
)

RUN_NAME = Rule(
    keys="run_name",
    refuses="the run directory would not lie under outputs/",
    fix="give a relative name without ..",
    when=lambda c: _uncontained(c.run_name),
    planning=True,
)
RUN = (
    RUN_NAME,
    Rule(
        keys="run_name recipe",
        refuses="the run directory holds an earlier run of this recipe (read from disk)",
        fix="continue it with ckpt_path=last, replace it with overwrite=true, or choose another run_name",
        when=lambda c: bool(run_files(c)) and not c.overwrite and not _continues(c),
    ),
    Rule(
        keys="ckpt_path run_name",
        refuses="the run directory holds no complete checkpoint (read from disk)",
        fix="start with ckpt_path=null",
        when=lambda c: c.trains and bool(c.run_dir) and _nothing_complete(c),
    ),
    Rule(
        keys="ckpt_path run_name",
        refuses=WITHOUT_EVALUATION.partition("; ")[0] + " (read from disk)",
        fix=WITHOUT_EVALUATION.partition("; ")[2],
        when=_best_is_absent,
    ),
    Rule(
        keys="ckpt_path run_name",
        refuses="the best checkpoint of the run directory is not its newest, and a run never goes back (read "
        "from disk)",
        fix="choose another run_name and give the path of that checkpoint, or give ckpt_path=last",
        when=_goes_back,
    ),
    Rule(
        keys="ckpt_path",
        refuses="no whole checkpoint: files are missing, cut, or were still being written (read from disk)",
        fix="give another outputs/<run>/checkpoints/step-<n>, or last",
        when=lambda c: c.trains and _damaged(c.ckpt_path),
    ),
    Rule(
        keys="ckpt_path overwrite",
        refuses="continuing a run and replacing it exclude each other",
        fix="drop one of them",
        when=lambda c: _continues(c) and c.overwrite,
    ),
    Rule(
        keys="ckpt_path init_from loss.reference overwrite",
        refuses="overwrite=true would delete these weights before they are read",
        fix="choose another run_name",
        when=lambda c: c.overwrite,
        select=lambda c, key: key != "overwrite" and _is_cleared(c, value_of(c, key)),
    ),
    Rule(
        keys="ckpt_path init_from",
        refuses="a resumed run takes its weights from the checkpoint",
        fix="drop one of them",
        when=lambda c: c.ckpt_path not in (None, "auto") and c.init_from is not None,
    ),
    Rule(
        keys="ckpt_path recipe",
        refuses="only train and sft resume",
        fix="name the weights with init_from; ckpt_path=auto starts again, and continues recipe=rollout",
        when=lambda c: c.ckpt_path is not None and not c.trains and not _continues(c),
    ),
    Rule(
        keys="ckpt_path init_from loss.reference imports.path",
        refuses="no such file or directory (read from disk)",
        fix="give one that exists: outputs/<run>/checkpoints/<step>, a weights file, recorded rollouts",
        select=_absent,
    ),
    Rule(
        keys="init_from loss.reference",
        refuses="a directory without config.json, and no whole checkpoint (read from disk)",
        fix="give outputs/<run>/checkpoints/step-<n>, a .safetensors file, or a Hugging Face directory",
        select=lambda c, key: _holds_no_weights(value_of(c, key)),
    ),
    Rule(
        keys="callbacks.extra logger.extra",
        refuses="an entry without _target_, or whose module is not installed",
        fix="give import paths of classes: [{_target_: package.module.Class}]",
        select=lambda c, key: not all(map(_importable, value_of(c, key))),
    ),
    Rule(
        keys="warm_start.steps recipe",
        refuses="a warm start belongs to train and rollout",
        fix="set warm_start.steps=0",
        when=lambda c: c.warm_start.steps > 0 and c.recipe in (Recipe.sft, Recipe.score),
    ),
    Rule(
        keys="recipe imports.source imports.path",
        refuses="rollouts to import are not named",
        fix="set imports.source to the system that recorded them and imports.path to its file or directory",
        when=lambda c: c.recipe is Recipe["import"] and (c.imports.source is None or c.imports.path is None),
    ),
    Rule(
        keys="recipe run",
        refuses="the run to report on is not named",
        fix="set run to its directory, outputs/<run>, or to that of a sweep",
        when=lambda c: c.recipe is Recipe.report and c.run is None,
    ),
    Rule(
        keys="recipe init_from",
        refuses="weights to export are not named",
        fix="set init_from to a checkpoint of a run or a weights file",
        when=lambda c: c.recipe is Recipe.export and c.init_from is None,
    ),
    Rule(
        keys="export.path",
        refuses="it exists already, and an export never replaces anything (read from disk)",
        fix="choose another directory, or remove that one",
        when=lambda c: c.export.path is not None and Path(c.export.path).exists() and c.ckpt_path != "auto",
    ),
)
