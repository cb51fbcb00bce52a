"""Refusals of the objective, the task and the run itself."""

from __future__ import annotations

from pathlib import Path

from olmo_rl.config import Config, CountSource, LoggerKind, LossKind, Recipe, Reduction, TaskKind
from olmo_rl.hf_config import is_hf_directory
from olmo_rl.refusals.rule import Rule, changed, trains, value_of
from olmo_rl.run_directory import checkpoint_fault, complete_checkpoints

# What a run leaves in its directory, by the recipe that would write it again.
_TRAINING_MARKS = ("metrics.csv", "checkpoints", "reference", "training_contract_rank*.jsonl")
RUN_MARKS: dict[Recipe, tuple[str, ...]] = {
    Recipe.train: _TRAINING_MARKS,
    Recipe.sft: _TRAINING_MARKS,
    Recipe.rollout: ("rollouts",),
    Recipe.score: ("scores.jsonl",),
    Recipe["import"]: ("rollouts", "import_report.json"),
    Recipe.upcycle: ("upcycled",),
}


def run_files(config: Config) -> list[Path]:
    """What an earlier run of this recipe left in the run directory."""
    if not config.run_dir:
        return []
    return sorted(
        path for mark in RUN_MARKS.get(config.recipe, ()) for path in Path(config.run_dir).glob(mark)
    )


def _separate_scoring(config: Config) -> bool:
    return config.scores_separately(steps_in_collection=config.batch.steps_per_collection)


def _damaged(checkpoint: str | None) -> bool:
    """Whether this directory is no whole checkpoint; that it exists is another row's."""
    if checkpoint is None or checkpoint == "last" or not Path(checkpoint).exists():
        return False
    return checkpoint_fault(checkpoint) is not None


def _holds_no_weights(path: str | None) -> bool:
    """Whether a directory is neither a Hugging Face directory nor a whole checkpoint."""
    if path is None or not Path(path).is_dir() or is_hf_directory(path):
        return False
    return checkpoint_fault(path) is not None


def _is_cleared(config: Config, weights: str | None) -> bool:
    """Whether `weights` lie in what overwrite=true removes."""
    if weights is None or weights == "last":
        return False
    path = Path(weights).resolve()
    return any(path.is_relative_to(mark.resolve()) for mark in run_files(config))


def _uncontained(run_name: str) -> bool:
    path = Path(run_name)
    return not run_name or path.is_absolute() or ".." in path.parts


LOSS = (
    Rule(
        keys=("loss.kl_coef", "recipe"),
        refuses="supervised updates have no KL term",
        fix="leave loss.kl_coef=0",
        example=("recipe=sft", "loss.kl_coef=0.01", "warm_start.steps=0"),
        when=lambda c: c.loss.kl_coef != 0 and c.recipe is Recipe.sft,
    ),
    Rule(
        keys=("loss.reference",),
        refuses="no effect with loss.kl_coef=0",
        fix="give loss.kl_coef, or leave loss.reference=null",
        example=("loss.reference={run}",),
        when=lambda c: c.loss.kl_coef == 0,
        select=changed,
    ),
    Rule(
        keys=("loss.reference",),
        refuses="no such file or directory (read from disk)",
        fix="give outputs/<run>/checkpoints/<step>, a weights file, or null: what the run starts from",
        example=("loss.kl_coef=0.01", "loss.reference=/nowhere"),
        when=lambda c: c.loss.reference is not None and not Path(c.loss.reference).exists(),
    ),
    Rule(
        keys=("loss.kl",),
        refuses="no effect with loss.kl_coef=0",
        fix="give loss.kl_coef, or leave loss.kl=k3",
        example=("loss.kl=k1",),
        when=lambda c: c.loss.kl_coef == 0,
        select=changed,
    ),
    Rule(
        keys=("loss.dual_clip", "loss"),
        refuses="no effect: this objective keeps the gradient of every token",
        fix="leave loss.dual_clip=null, or choose loss=grpo or loss=gspo",
        example=("loss=cispo", "loss.dual_clip=3.0"),
        when=lambda c: c.loss.kind is LossKind.cispo and c.loss.dual_clip is not None,
    ),
    Rule(
        keys=("loss.constant_length", "loss.reduction"),
        refuses="no effect: tokens are averaged over all responses together",
        fix="set loss.reduction=response, or leave loss.constant_length=null",
        example=("loss.constant_length=16",),
        when=lambda c: c.loss.constant_length is not None and c.loss.reduction is Reduction.token,
    ),
    Rule(
        keys=("loss.tis_level", "loss.tis_bound"),
        refuses="no effect without clips of the importance weight",
        fix="give loss.tis_low or loss.tis_high, or leave it at its default",
        example=("loss.tis_level=sequence",),
        when=lambda c: c.loss.tis_low is None and c.loss.tis_high is None,
        select=changed,
    ),
    Rule(
        keys=("loss.router_aux_weight", "loss.router_z_weight"),
        refuses="a router loss for a model without routers",
        fix="leave it at 0, or give model.num_experts",
        example=("model.num_experts=0", "loss.router_z_weight=0.001"),
        when=lambda c: not c.model.routed_layers,
        select=changed,
    ),
    Rule(
        keys=("loss.router_aux_grouping", "loss.router_aux_reduction", "loss.router_count_source"),
        refuses="no effect without a router balancing loss",
        fix="give loss.router_aux_weight, or leave it at its default",
        example=("loss.router_aux_grouping=sequence", "loss.router_z_weight=0.001"),
        when=lambda c: c.loss.router_aux_weight == 0,
        select=changed,
    ),
    Rule(
        keys=("loss.router_z_reduction",),
        refuses="no effect without a router z-loss",
        fix="give loss.router_z_weight, or leave loss.router_z_reduction=token",
        example=("loss.router_z_reduction=response", "loss.router_aux_weight=0.01"),
        when=lambda c: c.loss.router_z_weight == 0,
        select=changed,
    ),
    Rule(
        keys=("loss.router_count_source", "policy.replay", "recipe"),
        refuses="no effect: where routes are not replayed, the ids in use are those that live top-k chooses",
        fix="leave loss.router_count_source=dispatch",
        example=("loss.router_count_source=current", "loss.router_aux_weight=0.01", "policy.replay=false"),
        when=lambda c: (
            c.loss.router_count_source is CountSource.current
            and c.loss.router_aux_weight != 0
            and (not c.replay or c.recipe is Recipe.sft)
        ),
    ),
    Rule(
        keys=("scoring.check_interval", "scoring.tolerance"),
        refuses="no effect: every update has a scoring pass of its own, there is nothing to check",
        fix="leave it at its default, or set scoring.mode=auto batch.steps_per_collection=1",
        example=("scoring.mode=always", "scoring.tolerance=0.1"),
        when=_separate_scoring,
        select=changed,
    ),
)

TASK = (
    Rule(
        keys=("task", "task.name"),
        refuses="a dataset of reasoning-gym is not named",
        fix="set task.name, for example task.name=chain_sum",
        example=("task=reasoning_gym", "task.name=null"),
        when=lambda c: c.task.kind is TaskKind.reasoning_gym and c.task.name is None,
    ),
    Rule(
        keys=("task", "task.path"),
        refuses="the file with prompts and answers is not named",
        fix="set task.path",
        example=("task=jsonl",),
        when=lambda c: c.task.kind is TaskKind.jsonl and c.task.path is None,
    ),
    Rule(
        keys=("task.name",),
        refuses="no effect without task=reasoning_gym",
        fix="leave it null",
        example=("task.name=chain_sum",),
        when=lambda c: c.task.kind is not TaskKind.reasoning_gym,
        select=changed,
    ),
    Rule(
        keys=(
            "task.path",
            "task.verifier",
            "task.verifiers",
            "task.verifier_seconds",
            "task.on_verifier_failure",
        ),
        refuses="no effect without task=jsonl",
        fix="leave it at its default",
        example=("task.path=problems.jsonl", "+task.verifier._target_=builtins.float"),
        when=lambda c: c.task.kind is not TaskKind.jsonl,
        select=changed,
    ),
    Rule(
        keys=("task.chat", "model.tokenizer"),
        refuses="bytes have no chat template",
        fix="choose a model.tokenizer that has one, or task.chat=false",
        example=("task.chat=true",),
        when=lambda c: c.task.chat and c.model.tokenizer == "bytes",
    ),
    Rule(
        keys=("task.system",),
        refuses="no effect without task.chat",
        fix="set task.chat=true, or leave it null",
        example=("task.system=brief",),
        when=lambda c: not c.task.chat,
        select=changed,
    ),
    Rule(
        keys=("task.parameters",),
        refuses="no effect with task=jsonl: the file holds the problems",
        fix="leave it empty",
        example=("task=jsonl", "task.path=problems.jsonl", "+task.parameters.digits=2"),
        when=lambda c: c.task.kind is TaskKind.jsonl,
        select=changed,
    ),
    Rule(
        keys=("task.verifier",),
        refuses="a verifier without _target_",
        fix="give the function's import path: +task.verifier._target_=package.function",
        example=("task=jsonl", "task.path=problems.jsonl", "+task.verifier.target=f"),
        when=lambda c: bool(c.task.verifier) and "_target_" not in c.task.verifier,
    ),
)

RUN = (
    Rule(
        keys=("run_name",),
        refuses="the run directory would not lie under outputs/",
        fix="give a relative name without ..",
        example=("run_name=../elsewhere",),
        when=lambda c: _uncontained(c.run_name),
        planning=True,
    ),
    Rule(
        keys=("run_name", "recipe"),
        refuses="the run directory holds an earlier run of this recipe (read from disk)",
        fix="continue it with ckpt_path=last, replace it with overwrite=true, or choose another run_name",
        example=("run_dir={run}",),
        when=lambda c: bool(run_files(c)) and not c.overwrite and not (trains(c) and c.ckpt_path == "last"),
    ),
    Rule(
        keys=("ckpt_path", "run_name"),
        refuses="the run directory holds no complete checkpoint (read from disk)",
        fix="start with ckpt_path=null",
        example=("ckpt_path=last", "run_dir={run}"),
        when=lambda c: (
            trains(c) and bool(c.run_dir) and c.ckpt_path == "last" and not complete_checkpoints(c.run_dir)
        ),
    ),
    Rule(
        keys=("ckpt_path",),
        refuses="no whole checkpoint: files are missing, cut, or were still being written (read from disk)",
        fix="give another outputs/<run>/checkpoints/step-<n>, or last",
        example=("ckpt_path={run}",),
        when=lambda c: trains(c) and _damaged(c.ckpt_path),
    ),
    Rule(
        keys=("ckpt_path", "overwrite"),
        refuses="continuing a run and replacing it exclude each other",
        fix="drop one of them",
        example=("ckpt_path=last", "overwrite=true"),
        when=lambda c: trains(c) and c.ckpt_path == "last" and c.overwrite,
    ),
    Rule(
        keys=("ckpt_path", "init_from", "loss.reference", "overwrite"),
        refuses="overwrite=true would delete these weights before they are read",
        fix="choose another run_name",
        example=("init_from={run}/checkpoints/step-3.incomplete", "run_dir={run}", "overwrite=true"),
        when=lambda c: c.overwrite,
        select=lambda c, key: key != "overwrite" and _is_cleared(c, value_of(c, key)),
    ),
    Rule(
        keys=("ckpt_path", "init_from"),
        refuses="a resumed run brings its weights with it",
        fix="drop one of them",
        example=("ckpt_path=last", "init_from=weights"),
        when=lambda c: c.ckpt_path is not None and c.init_from is not None,
    ),
    Rule(
        keys=("ckpt_path", "recipe"),
        refuses="only train and sft resume",
        fix="name the weights with init_from",
        example=("recipe=rollout", "ckpt_path=last"),
        when=lambda c: c.ckpt_path is not None and not trains(c),
    ),
    Rule(
        keys=("ckpt_path", "init_from"),
        refuses="no such file or directory (read from disk)",
        fix="give outputs/<run>/checkpoints/<step>, a weights file, or null",
        example=("init_from=/nowhere",),
        select=lambda c, key: (path := getattr(c, key)) not in (None, "last") and not Path(path).exists(),
    ),
    Rule(
        keys=("init_from", "loss.reference"),
        refuses="a directory without config.json, and no whole checkpoint (read from disk)",
        fix="give outputs/<run>/checkpoints/step-<n>, a .safetensors file, or a Hugging Face directory",
        example=("init_from={run}",),
        select=lambda c, key: _holds_no_weights(value_of(c, key)),
    ),
    Rule(
        keys=("warm_start.steps", "recipe"),
        refuses="a warm start belongs to train and rollout",
        fix="set warm_start.steps=0",
        example=("recipe=sft", "warm_start.steps=5"),
        when=lambda c: c.warm_start.steps > 0 and c.recipe in (Recipe.sft, Recipe.score),
    ),
    Rule(
        keys=("callbacks.keep_checkpoints",),
        refuses="no effect: without callbacks.checkpoint_interval a run leaves one checkpoint",
        fix="give callbacks.checkpoint_interval, or leave it at its default",
        example=("callbacks.keep_checkpoints=5", "callbacks.checkpoint_interval=null"),
        when=lambda c: c.callbacks.checkpoint_interval is None,
        select=changed,
    ),
    Rule(
        keys=("logger.project", "logger.offline"),
        refuses="no effect with logger=csv",
        fix="leave it at its default, or choose logger=wandb",
        example=("logger.offline=false",),
        when=lambda c: c.logger.kind is LoggerKind.csv,
        select=changed,
    ),
)
