"""Rules of environments of the verifiers library."""

from __future__ import annotations

from olmo_rl.config import Config, Recipe, Source
from olmo_rl.refusals.rule import Rule

_PLAYS = (Recipe.train, Recipe.rollout, Recipe.validate, Recipe.check)


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
        keys="task.chat environment.taskset",
        refuses="an environment makes its own conversations",
        fix="set task.chat=false",
        when=lambda c: _is_set(c) and c.task.chat,
    ),
)
