"""The one preflight: what validate refuses, no recipe starts with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from chat_cases import conversation, write_rows
from composing import compose_fast

from olmo_rl.cli import run as run_command
from olmo_rl.config import Config, OverlongPrompt
from olmo_rl.data.preflight import examine
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.library import faults_of_code
from olmo_rl.tasks.order import PromptOrder
from olmo_rl.tasks.prompting import rendered_task, task_of
from olmo_rl.types import Refusal

SMALL = ("+experiment=packed_moe", "model=hybrid_tiny", "callbacks=quiet")
SIZES = (
    "batch.samples_per_step=8",
    "rollouts.group_size=4",
    "rollouts.max_new_tokens=4",
    "trainer.max_steps=1",
)


def problems(path: Path, *, count: int = 80, long: int | None = None) -> Path:
    rows = [{"prompt": f"{i}=" + ("x" * 400 if i == long else ""), "answer": f"{i}"} for i in range(count)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("recipe", ["train", "rollout", "validate"])
@pytest.mark.parametrize(
    ("setting", "content", "words"),
    [
        ("task.path=missing.jsonl", None, "task.path=missing.jsonl: no such file"),
        ("task.path=bad.jsonl", '{"prompt": "a", "answer": "b"}\n{oops\n', "bad.jsonl, line 2: not JSON"),
        (
            "task.path=few.jsonl",
            '{"prompt": "a", "answer": "b"}\n',
            "task.eval_problems=200: task.path=few.jsonl has",
        ),
        (
            "+task.verifier._target_=no_such.module",
            "",
            "_target_=no_such.module: no_such does not import (No module named 'no_such'): correct it",
        ),
        (
            "+task.verifier._target_=math.no_such",
            "",
            "no attribute 'no_such': name a function of that module",
        ),
        ("model.tokenizer=/nowhere", "", "model.tokenizer=/nowhere"),
        ("model.vocab_size=100", "", "model.vocab_size=100 model.tokenizer=bytes"),
    ],
)
def test_faults_of_the_task_are_found_before_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    setting: str,
    content: str | None,
    words: str,
) -> None:
    def started(*arguments: object) -> None:
        raise AssertionError("ranks started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("olmo_rl.running.ranks.run_ranks", started)
    problems(tmp_path / "p.jsonl", count=3000)
    if content:
        (tmp_path / setting.partition("=")[2]).write_text(content)
    path = () if setting.startswith("task.path") else ("task.path=p.jsonl",)
    assert run_command([*SMALL, *SIZES, "task=jsonl", *path, setting, f"recipe={recipe}"]) == 2
    assert words in capsys.readouterr().err


def test_an_unreadable_file_of_problems_hides_no_fault_of_its_verifier(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{oops\n")
    settings = ("task=jsonl", f"task.path={tmp_path}/bad.jsonl", "+task.verifier._target_=no_such.module")
    for tokenizer in ("bytes", "/nowhere"):
        reasons = examine(compose_fast(*SMALL, *settings, f"model.tokenizer={tokenizer}")).reasons
        found = [
            words for line in reasons for words in ("not JSON", "no_such does not import") if words in line
        ]
        assert found == ["not JSON", "no_such does not import"]


def overlong(tmp_path: Path, *settings: str) -> Config:
    path = problems(tmp_path / "p.jsonl", long=61)
    task = ("task=jsonl", f"task.path={path}", "task.eval_problems=2", "warm_start.steps=0")
    return compose_fast(*SMALL, *task, "model.max_seq_len=64", "packing.max_tokens=64", *settings)


def test_one_overlong_prompt_of_a_file_is_found_wherever_it_stands(tmp_path: Path) -> None:
    findings = examine(overlong(tmp_path))
    assert findings.reasons == [
        "problem 'line-62' has a prompt of 403 tokens, with rollouts.max_new_tokens=16 more than "
        "model.max_seq_len=64: raise the latter, lower the former, or set task.overlong=leave_out"
    ]


def test_overlong_prompts_are_left_out_and_counted_by_a_key(tmp_path: Path) -> None:
    config = overlong(tmp_path, "task.overlong=leave_out")
    findings = examine(config)
    assert findings.reasons == []
    (note,) = findings.notes
    assert note.startswith("task.overlong=leave_out: 1 of ")
    everything = rendered_task(config, tokenizer=ByteTokenizer())
    size = everything.size
    assert size is not None
    task = task_of(config, tokenizer=ByteTokenizer())
    taken = PromptOrder(task=task, seed=3).take(size - 1)
    assert "line-62" not in {problem.id for problem in taken.problems}
    assert len({problem.prompt for problem in taken.problems}) == len(taken.problems) == size - 1
    assert taken.overlong <= 1
    assert PromptOrder(task=task, seed=3).take(2 * size - 2).overlong >= 1
    assert task.held_out(2) == everything.held_out(2)
    assert PromptOrder(task=task_of(config, tokenizer=ByteTokenizer()), seed=3).take(size - 1) == taken
    short = replace(config, model=replace(config.model, max_seq_len=17))
    (first, _) = examine(short).reasons
    assert "leaves no problem" in first
    with pytest.raises(Refusal, match="leaves no problem"):
        PromptOrder(task=task_of(short, tokenizer=ByteTokenizer())).take(4)


def test_prompts_that_fit_are_drawn_alike_whether_overlong_ones_are_refused_or_left_out(
    tmp_path: Path,
) -> None:
    config = compose_fast(*SMALL)
    lenient = replace(config, task=replace(config.task, overlong=OverlongPrompt.leave_out))
    drawn = [PromptOrder(task=task_of(c, tokenizer=ByteTokenizer())).take(64) for c in (config, lenient)]
    assert drawn[0] == drawn[1]


def test_held_out_conversations_of_which_none_is_kept_are_refused_by_key(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [{"messages": conversation(i)} for i in range(20)])
    held = write_rows(tmp_path / "held.jsonl", [{"prompt": "a" * 80, "response": "b"}] * 70)
    context = ("model.max_seq_len=64", "packing.max_tokens=64")
    for choice in ("drop", "truncate"):
        settings = (f"sft.path={train}", f"sft.eval_path={held}", *context, f"sft.overlong={choice}")
        (reason,) = examine(compose_fast("+experiment=sft_chat", *settings)).reasons
        assert reason.startswith(
            f"sft.eval_path={held}: sft.overlong={choice} leaves none of its 70 conversations"
        )


def test_held_out_rows_are_looked_at_whole(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [{"messages": conversation(i)} for i in range(20)])
    rows: list[object] = [{"messages": conversation(i)} for i in range(100)]
    held = write_rows(tmp_path / "held.jsonl", [*rows, {"messages": []}])
    settings = (f"sft.path={train}", f"sft.eval_path={held}")
    (reason,) = examine(compose_fast("+experiment=sft_chat", *settings)).reasons
    assert reason == f"{held}, line 101: 'messages' is empty"
    assert examine(compose_fast("+experiment=sft_chat", *settings, "sft.eval_samples=100")).reasons == []


def test_rows_to_train_on_are_looked_at_as_far_as_the_run_may_read_them(tmp_path: Path) -> None:
    rows: list[object] = [{"messages": conversation(i)} for i in range(100)]
    path = write_rows(tmp_path / "train.jsonl", [*rows, {"messages": []}])
    settings = (
        "+experiment=sft_chat",
        f"sft.path={path}",
        "sft.shuffle_buffer=8",
        "batch.samples_per_step=10",
    )
    assert examine(compose_fast(*settings, "trainer.max_steps=10")).reasons == [
        f"{path}, line 101: 'messages' is empty"
    ]
    findings = examine(compose_fast(*settings, "trainer.max_steps=9"))
    assert findings.reasons == []
    assert findings.notes[0].startswith("sft.path: the first 98 conversations have up to ")


def test_a_package_that_raises_where_it_is_imported_is_a_refusal_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from olmo_rl import backends

    for name, line in (("raising", "raise OSError('no such symbol')"), ("ending", "raise SystemExit(3)")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line)
        (tmp_path / name / "inner.py").touch()
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "__init__.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert backends.import_fault("raising.inner") == "does not import (OSError: no such symbol)"
    assert backends.import_fault("ending.inner") == "does not import (SystemExit: 3)"
    assert backends.import_fault("lacking.inner") == "does not import (No module named 'no_such_dependency')"
    assert backends.import_fault("no_such_package.inner") == backends.NOT_INSTALLED
    assert backends.import_fault("raising_not.inner") == backends.NOT_INSTALLED
    extra = "callbacks.extra=[{_target_: ending.inner.Callback}]"
    (reason,) = faults_of_code(compose_fast(extra))
    assert reason.startswith(
        "callbacks.extra[0]._target_=ending.inner.Callback: ending.inner does not import"
    )


def test_a_missing_logger_is_a_fault_of_this_machine_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from olmo_rl import backends

    monkeypatch.setattr(backends, "importable", lambda name: name != "wandb")
    assert any("logger=wandb needs wandb" in line for line in backends.missing(compose_fast("logger=wandb")))
    assert not any("wandb" in line for line in backends.missing(compose_fast()))
