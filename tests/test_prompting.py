"""Prompts as turns of a chat: what is rendered, what stays the task's, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chat_cases import BOS, EOS, UNMARKED, save_tokenizer

from olmo_rl.config import Config, ModelConfig, TaskConfig, TaskKind
from olmo_rl.data.findings import Findings
from olmo_rl.data.preflight import look_into_task
from olmo_rl.data.tokenizers import load_tokenizer
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.problems import demonstration
from olmo_rl.tasks.prompting import task_of
from olmo_rl.types import Refusal

GYM = TaskConfig(
    kind=TaskKind.reasoning_gym, name="leg_counting", chat=True, system="Be brief.", eval_problems=4
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    name = save_tokenizer(tmp_path_factory.mktemp("chat"), template=UNMARKED)
    return Config(task=GYM, model=ModelConfig(vocab_size=300, tokenizer=name, max_seq_len=1024))


def test_a_prompt_is_the_turn_of_the_user_up_to_where_the_assistant_begins(config: Config) -> None:
    tokenizer = load_tokenizer(config.model.tokenizer)
    plain = build_task(config.task, seed=0).problems(3, seed=5)
    rendered = task_of(config, tokenizer=tokenizer).problems(3, seed=5)
    for before, after in zip(plain, rendered, strict=True):
        assert before.prompt.endswith("\n")
        question = before.prompt.rstrip("\n")
        assert after.prompt == (
            f"{BOS}<|system|>\nBe brief.{EOS}\n<|user|>\n{question}{EOS}\n<|assistant|>\n"
        )
        assert replace(after, prompt=before.prompt) == before
    # Special tokens of the text are ids of their own, not letters.
    ids = tokenizer.encode(rendered[0].prompt)
    assert ids.count(tokenizer.eos_id) == 2
    answer = demonstration(rendered[0], tokenizer=tokenizer)[1]
    assert answer[-1] == tokenizer.eos_id


def test_without_a_system_turn_the_template_has_the_say(config: Config) -> None:
    bare = replace(config, task=replace(GYM, system=None))
    (problem,) = task_of(bare, tokenizer=load_tokenizer(config.model.tokenizer)).problems(1, seed=0)
    assert problem.prompt.startswith(f"{BOS}<|user|>\n")


def test_held_out_problems_and_rewards_stay_the_tasks(config: Config) -> None:
    task = task_of(config, tokenizer=load_tokenizer(config.model.tokenizer))
    held_out = task.held_out(4)
    assert [problem.id for problem in held_out] == [p.id for p in build_task(GYM, seed=0).held_out(4)]
    assert task.reward(held_out[0], held_out[0].answer) == 1.0
    assert task.reward(held_out[0], "no") == 0.0
    assert task.counts == {}


def test_without_chat_the_task_is_what_it_was(config: Config) -> None:
    off = replace(config, task=replace(GYM, chat=False, system=None))
    task = task_of(off, tokenizer=load_tokenizer(config.model.tokenizer))
    assert task.problems(2, seed=1) == build_task(GYM, seed=0).problems(2, seed=1)


def test_a_tokenizer_without_a_template_is_refused_before_a_run_and_in_it(
    config: Config, tmp_path: Path
) -> None:
    plain = replace(config, model=replace(config.model, tokenizer=save_tokenizer(tmp_path, template=None)))
    with pytest.raises(Refusal, match=r"task\.chat=true: model\.tokenizer has no chat template"):
        task_of(plain, tokenizer=load_tokenizer(plain.model.tokenizer)).problems(1, seed=0)
    findings = Findings()
    look_into_task(plain, findings)
    assert any("has no chat template" in reason for reason in findings.reasons)


def test_the_length_of_a_prompt_counts_what_the_template_adds(config: Config) -> None:
    short = replace(config, model=replace(config.model, max_seq_len=100))
    findings = Findings()
    look_into_task(short, findings)
    assert any("model.max_seq_len=100" in reason for reason in findings.reasons)
