"""Rules of environments of the verifiers library."""

from __future__ import annotations

from olmo_rl.config import Config, Recipe, Source
from olmo_rl.refusals.rule import KEYS, Rule, changed

_PLAYS = (Recipe.train, Recipe.rollout, Recipe.validate, Recipe.check)
_READ = ("task.kind", "task.eval_problems", "task.eval_interval")  # the kind is that of the group
_UNREAD = (
    "task",
    *(name for name in KEYS if name.startswith("task.") and name not in _READ),
    *(name for name in KEYS if name.startswith("evaluation.")),
    "rollouts.length_penalty",
    "rollouts.length_buffer",
)


def _is_set(config: Config) -> bool:
    return config.environment.taskset is not None


ENVIRONMENT = (
    Rule(
        keys="environment.taskset recipe",
        refuses="only train and rollout play episodes",
        fix="leave environment.taskset=null",
        when=lambda c: _is_set(c) and c.recipe not in _PLAYS,
    ),
    Rule(
        keys="environment.taskset rollouts",
        refuses="recorded collections need no environment",
        fix="choose rollouts=local, rollouts=vllm or rollouts=sglang",
        when=lambda c: _is_set(c) and not c.generates,
    ),
    Rule(
        keys="environment.taskset rollouts trainer.num_nodes",
        refuses="the engines of this run listen on their own nodes alone",
        fix="choose rollouts=vllm or rollouts=sglang",
        when=lambda c: _is_set(c) and c.rollouts.source is Source.local and c.trainer.num_nodes > 1,
    ),
    Rule(
        keys="environment.renderer model.tokenizer",
        refuses="plain text is for bytes: a tokenizer with a chat template needs its own renderer",
        fix="name it: +environment.renderer.name=qwen3",
        when=lambda c: _is_set(c) and not c.environment.renderer and c.model.tokenizer != "bytes",
    ),
    Rule(
        keys="model.tokenizer environment.taskset",
        refuses="the library reads tokenizers of Hugging Face directories and names",
        fix="name such a directory",
        when=lambda c: (
            _is_set(c) and (c.model.tokenizer.startswith("package:") or c.model.tokenizer.endswith(".gguf"))
        ),
    ),
    Rule(
        keys=" ".join(_UNREAD),
        refuses="no effect with environment.taskset: prompts, rewards and evaluation are the environment's",
        fix="leave their defaults, or environment.taskset=null",
        when=lambda c: _is_set(c) and c.recipe in _PLAYS,
        select=changed,
    ),
)
