"""Every file of a run is read once: training uses what the preflight judged. inotify counts all opens."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chat_cases import conversation, write_rows
from composing import compose_fast
from launched import train_on_two_ranks
from opens import counted_opens
from test_trained_files import sample, write

from olmo_rl.cli import run as run_command
from olmo_rl.config import Config
from olmo_rl.data.inputs import Inputs
from olmo_rl.data.preflight import examine
from olmo_rl.library import run
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.types import Refusal

TINY = ("model=dense_tiny", "packing=consecutive", "callbacks=quiet", "batch.samples_per_step=8")


def files_of(directory: Path) -> Path:
    directory.mkdir()
    for name in ("a.parquet", "b.jsonl"):
        write(directory / name, [sample(i) for i in range(8)])
    return directory


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return replace(compose_fast(*overrides), run_dir=str(tmp_path / "run"))


def test_training_opens_every_rollout_file_once(tmp_path: Path) -> None:
    files = files_of(tmp_path / "files")
    given = ("rollouts=files", f"rollouts.path={files}", "trainer.max_steps=5", "loss.kl_coef=0.1")
    with counted_opens(files) as opens:
        run(config_of(tmp_path, *TINY, *given))
    assert opens == {"a.parquet": 1, "b.jsonl": 1}
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == [1, 2]


def test_a_run_of_which_no_update_came_about_ends_with_a_refusal(tmp_path: Path) -> None:
    unlikely = np.full(8, -9e3, dtype=np.float32)
    path = write(tmp_path / "a.parquet", [sample(i, behavior_logprobs=unlikely) for i in range(16)])
    loss = ("loss.tis_low=0", "loss.on_nonfinite=skip")  # weights of exp(9000)
    given = (*TINY, "rollouts=files", f"rollouts.path={path}", "trainer.max_steps=5", *loss)
    with pytest.raises(Refusal, match="nothing was trained: 2 updates were skipped"):
        run(config_of(tmp_path, *given))


def test_a_plan_opens_every_rollout_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(tmp_path / "files")
    monkeypatch.chdir(tmp_path)
    given = (*TINY, "rollouts=files", f"rollouts.path={files}", "recipe=plan", "policy.replay=false")
    with counted_opens(files) as opens:
        assert run_command([*given, "run_name=p"]) == 0
    assert opens == {"a.parquet": 1, "b.jsonl": 1}
    assert len(json.loads((tmp_path / "outputs" / "p" / "plan.json").read_text())["blocks"]) == 2


def test_chat_data_are_opened_once_over_all_epochs_and_evaluations(tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    train = write_rows(chats / "train.jsonl", [{"messages": conversation(i)} for i in range(12)])
    held = write_rows(chats / "held.jsonl", [{"messages": conversation(i)} for i in range(20, 24)])
    given = (f"sft.path={train}", f"sft.eval_path={held}", "sft.eval_interval=1", "sft.epochs=3")
    with counted_opens(chats) as opens:
        run(config_of(tmp_path, *TINY, "recipe=sft", *given, "trainer.max_steps=9"))
    assert opens == {"train.jsonl": 1, "held.jsonl": 1}
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all("eval/loss" in row for row in rows)


def test_the_rows_of_an_epoch_are_those_of_the_file_in_the_same_order(tmp_path: Path) -> None:
    rows = [{"messages": conversation(i)} for i in range(12)]
    path = write_rows(tmp_path / "train.jsonl", rows, blanks=True)
    given = ("recipe=sft", f"sft.path={path}", "sft.epochs=2", "trainer.max_steps=9", "sft.shuffle_buffer=4")
    runs = {}
    for name, kept in (("kept", True), ("read", False)):
        config = replace(compose_fast(*TINY, *given), run_dir=str(tmp_path / name))
        if kept:
            run(config)
        else:
            from olmo_rl.running.ranks import run_ranks
            from recipes import sft

            run_ranks(sft.train, config)
        runs[name] = [row["loss/cross_entropy"] for row in read_metrics(tmp_path / name / "metrics.csv")]
    assert runs["kept"] == runs["read"]
    assert len(runs["kept"]) == 3


def test_the_problems_of_a_task_are_read_once(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    path = tasks / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}=", "answer": "{i}"}}\n' for i in range(60)))
    task = ("task=jsonl", f"task.path={path}", "task.eval_problems=2", "rollouts.max_new_tokens=2")
    with counted_opens(tasks) as opens:
        run(config_of(tmp_path, *TINY, *task, "trainer.max_steps=1"))
    assert opens == {"p.jsonl": 1}


def test_each_rank_of_a_launcher_reads_a_file_once_and_one_verdict_serves_all(tmp_path: Path) -> None:
    files = files_of(tmp_path / "files")
    given = (*TINY, "rollouts=files", f"rollouts.path={files}", "trainer.devices=2", "trainer.max_steps=5")
    with counted_opens(files) as opens:
        code, printed = train_on_two_ranks(*given, "run_name=two", place=tmp_path)
    assert (code, opens) == (0, {"a.parquet": 2, "b.jsonl": 2}), printed
    (files / "c.jsonl").write_text('{"tokens": [1]}\n')
    code, printed = train_on_two_ranks(*given, "run_name=bad", place=tmp_path)
    assert code == 2
    assert printed.count("sample_id is missing") == 1, printed
    assert "Traceback" not in printed


def test_a_file_that_is_not_in_memory_is_read_again_and_refused_once_it_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [sample(i) for i in range(8)])
    config = compose_fast(*TINY, "rollouts=files", f"rollouts.path={path}")
    inputs = examine(config, keep=True).inputs
    kept = inputs.collections[str(path)]
    assert inputs.take(path, config=config) is kept
    assert [s.id for s in inputs.take(path, config=config).samples] == [s.id for s in kept.samples]
    sent = Inputs.of_facts(json.loads(json.dumps(inputs.facts())))
    assert (sent.collections, sent.stamps, sent.carries_reference) == ({}, inputs.stamps, False)
    os.utime(path, ns=(0, 1))
    with pytest.raises(Refusal, match=r"a\.parquet: the file changed after it was checked"):
        sent.take(path, config=config)
    assert Inputs().take(path, config=config).samples, "nothing is known of it"


def test_no_more_is_kept_than_there_is_room(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.parquet", [sample(i) for i in range(8)]) for name in "ab"]
    config = compose_fast(*TINY, "rollouts=files", f"rollouts.path={tmp_path}")
    inputs = Inputs(free=8 * 600)  # of the 500 and a few dozen that a sample needs
    for path in paths:
        inputs.read(path, config=config)
    assert list(inputs.collections) == [str(paths[0])]
    inputs.forget(paths)
    assert inputs.collections == {}
