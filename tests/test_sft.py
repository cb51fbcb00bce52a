"""Supervised runs on chat data: what they train on, resuming inside an epoch, ranks, held-out loss."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_cases import UNMARKED, conversation, save_tokenizer, write_rows
from composing import compose
from torch import Tensor
from training_cases import MODEL, Recorder, config_of, identical

from olmo_rl.cli import run as run_command
from olmo_rl.config import (
    BatchConfig,
    Config,
    Overlong,
    PackingConfig,
    PackingKind,
    Recipe,
    RolloutsConfig,
    SftConfig,
    Source,
    TaskConfig,
    TrainerConfig,
)
from olmo_rl.data.chat import ChatRow, render, supervised_sample
from olmo_rl.data.collate import collate
from olmo_rl.data.findings import Findings
from olmo_rl.data.packs import RouteMode
from olmo_rl.data.preflight import look_into_chat, look_into_task
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.run_directory import complete_checkpoints
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.ranks import run_ranks
from olmo_rl.types import Refusal, Sample, Topology
from recipes import sft, validate

PADDED = PackingConfig(kind=PackingKind.consecutive, max_tokens=64, pad_to_budget=True)


def chat_config(run_dir: Path, *, path: Path | str, steps: int, **sections: Any) -> Config:
    """Four conversations an update; `sft` of `sections` gives the fields beside the path."""
    fields: dict[str, Any] = {
        "recipe": Recipe.sft,
        "sft": SftConfig(path=str(path), **sections.pop("sft", {})),
        "rollouts": RolloutsConfig(source=Source.local, group_size=2),
        "batch": BatchConfig(samples_per_step=4),
        "packing": PADDED,
        "trainer": TrainerConfig(max_steps=steps),
    }
    return config_of(run_dir, **(fields | sections))


def train(config: Config) -> Recorder:
    recorder = Recorder()
    run_ranks(lambda config: sft.train(config, watchers=[recorder]), config)
    return recorder


def rows_of(config: Config) -> list[dict[str, float]]:
    return read_metrics(Path(config.run_dir) / "metrics.csv")


def events(config: Config, name: str) -> list[dict[str, Any]]:
    lines = (Path(config.run_dir) / "training_contract_rank0.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == name]


def weights_at_the_end(config: Config) -> Path:
    return complete_checkpoints(config.run_dir)[-1]


def cross_entropy(weights: Mapping[str, Tensor], samples: Sequence[Sample]) -> tuple[float, int]:
    """Sum over trained tokens, each document alone, and their number."""
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.load_state_dict(dict(weights))
    total, count = 0.0, 0
    for sample in samples:
        pack = collate([sample], layout=None, topology=Topology(1))
        with torch.no_grad():
            logits = decoder(pack["tokens"], pack.context(mode=RouteMode.live), None).logits.double()
        logprobs = logits.log_softmax(-1)
        for t in np.flatnonzero(sample.response_mask).tolist():
            total -= float(logprobs[t - 1, sample.tokens[t]])
            count += 1
    return total, count


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """Fourteen conversations in two files: an update of four straddles epochs."""
    rows = [{"messages": conversation(i)} for i in range(14)]
    write_rows(tmp_path / "chat" / "a.jsonl", rows[:9])
    write_rows(tmp_path / "chat" / "b.jsonl", rows[9:])
    return tmp_path / "chat"


def test_resuming_inside_an_epoch_gives_the_samples_and_weights_of_one_run(
    tmp_path: Path, chat: Path
) -> None:
    shuffled: dict[str, Any] = {"sft": {"shuffle_buffer": 5}}
    whole = chat_config(tmp_path / "whole", path=chat, steps=10, **shuffled)
    straight = train(whole)
    parts = chat_config(tmp_path / "parts", path=chat, steps=5, **shuffled)
    first = train(parts)
    second = train(replace(parts, ckpt_path="last", trainer=TrainerConfig(max_steps=10)))

    assert first.ids + second.ids == straight.ids
    ids = [id for step in straight.ids for id in step]
    assert len(set(ids)) == 40
    by_epoch = [[id for id in ids if id.startswith(f"{epoch}:")] for epoch in range(3)]
    assert [len(part) for part in by_epoch] == [14, 14, 12]
    assert len({id[2:] for id in by_epoch[0]}) == 14
    assert identical(first.weights[0], straight.weights[0])
    assert identical(second.weights[0], straight.weights[5])
    assert identical(second.weights[-1], straight.weights[-1])
    assert identical(second.gradients[-1], straight.gradients[-1])
    same = ("loss/total", "grad/norm", "sft/epoch", "sft/conversations", "sft/tokens", "optim/lr")
    assert [{n: row[n] for n in same} for row in rows_of(parts)] == [
        {n: row[n] for n in same} for row in rows_of(whole)
    ]
    assert [row["sft/epoch"] for row in rows_of(whole)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert rows_of(whole)[-1]["sft/conversations"] == 40
    assert rows_of(whole)[0]["packing/fill"] < 1
    packing = events(whole, "packing")[0]
    assert packing["real_tokens"] == rows_of(whole)[0]["sft/tokens"]
    assert {len(pack) for batch in straight.batches for pack in batch.packs} == {64}, "rows are padded"


def test_supervised_loss_is_the_cross_entropy_of_assistant_tokens_alone(tmp_path: Path, chat: Path) -> None:
    config = chat_config(tmp_path / "run", path=chat, steps=1, sft={"shuffle_buffer": 1})
    recorder = train(config)
    samples = recorder.batches[0].samples
    total, count = cross_entropy(recorder.weights[0], samples)
    text = b"".join(
        bytes(min(255, token) for token in sample.tokens[sample.response_mask].tolist()) for sample in samples
    )
    (row,) = rows_of(config)
    assert row["sft/scored_tokens"] == count
    assert math.isclose(row["loss/total"], total / count, rel_tol=1e-5)
    said = [turn["content"] for i in range(4) for turn in conversation(i) if turn["role"] == "assistant"]
    assert text == b"".join(part.encode() + b"\xff" for part in said)


def test_epochs_end_the_run_and_a_later_one_goes_on_with_what_was_left_out(
    tmp_path: Path, chat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = chat_config(tmp_path / "run", path=chat, steps=50, sft={"epochs": 1, "shuffle_buffer": 4})
    first = train(config)
    assert len(first.ids) == 3
    assert "2 conversations at the end do not fill an update" in capsys.readouterr().out
    assert weights_at_the_end(config).name == "step-3"
    again = replace(config, ckpt_path="last", sft=replace(config.sft, epochs=2))
    second = train(again)
    assert len(second.ids) == 4, "28 conversations are seven updates"
    used = [id for step in first.ids + second.ids for id in step]
    assert len(set(used)) == 28


def test_data_that_fill_no_update_are_refused(tmp_path: Path, chat: Path) -> None:
    config = chat_config(
        tmp_path / "run", path=chat, steps=5, sft={"epochs": 1}, batch=BatchConfig(samples_per_step=16)
    )
    with pytest.raises(Refusal, match=r"sft\.epochs=1: the data hold 14 conversations.*samples_per_step=16"):
        train(config)


def test_overlong_conversations_are_refused_dropped_or_cut_as_asked_and_counted(tmp_path: Path) -> None:
    rows: list[dict[str, str]] = [{"prompt": f"{i}", "response": f"r{i}"} for i in range(8)]
    rows[2] = {"prompt": "p" * 30, "response": "r" * 40}  # 71 tokens, 34 of them trained when cut
    rows[5] = {"prompt": "p" * 70, "response": "r"}  # nothing to train once it is cut
    path = write_rows(tmp_path / "chat.jsonl", rows)

    def run(name: str, overlong: Overlong) -> tuple[list[int], dict[str, float]]:
        config = chat_config(
            tmp_path / name, path=path, steps=2, sft={"shuffle_buffer": 1, "overlong": overlong}
        )
        recorder = train(config)
        ids = [id for step in recorder.ids for id in step]
        return [int(id.rpartition(":")[2]) for id in ids], rows_of(config)[-1]

    with pytest.raises(Refusal, match=r"chat\.jsonl, line 3: .* 71 tokens, more than model\.max_seq_len=64"):
        run("refused", Overlong.refuse)
    lines, counts = run("dropped", Overlong.drop)
    assert lines == [1, 2, 4, 5, 7, 8, 1, 2]
    assert (counts["sft/dropped"], counts["sft/truncated"], counts["sft/conversations"]) == (2, 0, 8)
    lines, counts = run("cut", Overlong.truncate)
    assert lines == [1, 2, 3, 4, 5, 7, 8, 1]
    assert (counts["sft/dropped"], counts["sft/truncated"]) == (1, 1)

    write_rows(tmp_path / "long.jsonl", [rows[2]] * 6)
    config = chat_config(
        tmp_path / "all", path=tmp_path / "long.jsonl", steps=2, sft={"overlong": Overlong.drop}
    )
    with pytest.raises(Refusal, match=r"sft\.overlong=drop: no conversation fits"):
        train(config)


def test_a_refused_row_saves_what_was_trained_and_the_run_goes_on_there_once_it_is_mended(
    tmp_path: Path,
) -> None:
    rows: list[Any] = [{"messages": conversation(i)} for i in range(12)]
    good = (tmp_path / "chat.jsonl", rows)
    bad = '{"messages": [{"role": "user", "content": "' + "x" * 20 + '"}]}'
    write_rows(*good)
    whole = chat_config(tmp_path / "whole", path=good[0], steps=3, sft={"shuffle_buffer": 1})
    straight = train(whole)

    lines = good[0].read_text().splitlines()
    size = good[0].stat().st_size
    mended, lines[6] = lines[6], bad.ljust(len(lines[6]))[: len(lines[6])]
    good[0].write_text("\n".join(lines) + "\n")
    assert good[0].stat().st_size == size
    config = chat_config(tmp_path / "run", path=good[0], steps=3, sft={"shuffle_buffer": 1})
    with pytest.raises(Refusal, match=r"chat\.jsonl, line 7: "):
        train(config)
    assert weights_at_the_end(config).name == "step-1"
    lines[6] = mended
    good[0].write_text("\n".join(lines) + "\n")
    resumed = train(replace(config, ckpt_path="last"))
    assert resumed.ids == straight.ids[1:]
    assert identical(resumed.weights[-1], straight.weights[-1])


def test_held_out_loss_is_the_mean_over_tokens_at_the_start_the_interval_and_the_end(
    tmp_path: Path, chat: Path
) -> None:
    held_out = write_rows(tmp_path / "held.jsonl", [{"messages": conversation(i)} for i in range(20, 26)])
    config = chat_config(
        tmp_path / "run",
        path=chat,
        steps=5,
        sft={"eval_path": held_out, "eval_interval": 2, "eval_samples": 5},
    )
    recorder = train(config)
    found = events(config, "evaluation")
    assert [(event["step"], event["conversations"]) for event in found] == [(0, 5), (2, 5), (4, 5), (5, 5)]
    tokens = sum(
        len(turn["content"]) + 1
        for i in range(20, 25)
        for turn in conversation(i)
        if turn["role"] == "assistant"
    )
    assert {event["scored_tokens"] for event in found} == {tokens}
    assert found[-1]["loss"] < found[0]["loss"]
    logged = {row["step"]: row["eval/loss"] for row in rows_of(config) if "eval/loss" in row}
    assert logged == pytest.approx({event["step"]: event["loss"] for event in found[1:]}, rel=1e-6)
    samples = [
        supervised_sample(str(i), tokens, trained=trained)
        for i, (tokens, trained) in enumerate(
            render(ChatRow(where="", id="", raw={"messages": conversation(i)}), tokenizer=ByteTokenizer())
            for i in range(20, 25)
        )
    ]
    total, count = cross_entropy(recorder.weights[0], samples)
    assert math.isclose(found[0]["loss"], total / count, rel_tol=1e-5)


# What users type


def test_the_command_trains_on_a_chat_template_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": conversation(i)} for i in range(40)]
    arguments = [
        "+experiment=sft_chat",
        f"model.tokenizer={save_tokenizer(tmp_path / 'tokenizer', template=UNMARKED)}",
        f"sft.path={write_rows(tmp_path / 'chat.jsonl', rows[:33])}",
        f"sft.eval_path={write_rows(tmp_path / 'held_out.jsonl', rows[33:])}",
        "model.vocab_size=300",
        "model.max_seq_len=96",
        "packing.max_tokens=192",
        "packing.pad_to_budget=true",
        "batch.samples_per_step=10",
        "callbacks=quiet",
    ]
    assert run_command([*arguments, "trainer.max_steps=3"]) == 0
    assert run_command([*arguments, "trainer.max_steps=6", "ckpt_path=last"]) == 0
    found = read_metrics(Path("outputs/sft_chat/metrics.csv"))
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["sft/conversations"] for row in found] == [10, 20, 30, 40, 50, 60]
    assert found[-1]["eval/loss"] < found[2]["eval/loss"]
    assert all(0 < row["packing/fill"] < 1 for row in found)
    assert all(row["throughput/real_tokens_per_second"] > 0 for row in found)


def test_without_a_path_the_tasks_demonstrations_are_trained_and_resume_where_they_were(
    tmp_path: Path,
) -> None:
    def demonstrations(name: str, steps: int) -> Config:
        config = chat_config(tmp_path / name, path="", steps=steps)
        return replace(config, sft=SftConfig(), task=TaskConfig(eval_problems=0))

    straight = train(demonstrations("whole", 4))
    first = train(demonstrations("parts", 2))
    second = train(replace(demonstrations("parts", 4), ckpt_path="last"))
    assert first.ids + second.ids == straight.ids
    assert identical(second.weights[-1], straight.weights[-1])


def test_validate_looks_at_the_rows_and_notes_their_contents(
    tmp_path: Path, chat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validate.run(compose("+experiment=sft_chat", "recipe=validate", f"sft.path={chat}"))
    out = capsys.readouterr().out
    tokens = [sum(len(turn["content"]) for turn in conversation(i)) + 1 + i % 3 for i in range(14)]
    assert f"sft.path: the 14 conversations have up to {max(tokens)} tokens" in out
    silent = UNMARKED.replace("m.content + eos_token", "m.content")
    tokenizer = save_tokenizer(tmp_path / "silent", template=silent)
    given = ("recipe=validate", f"sft.path={chat}", f"model.tokenizer={tokenizer}", "model.vocab_size=300")
    validate.run(compose("+experiment=sft_chat", *given))
    assert "the policy does not learn to stop" in capsys.readouterr().out


def test_all_that_rows_would_be_refused_for_is_reported_at_once(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"prompt": "a", "response": "b"},
        {"messages": []},
        {"prompt": "a" * 70, "response": "b"},
    ]
    lines += [{"prompt": "a", "response": "\ud800"}]
    path = write_rows(tmp_path / "chat.jsonl", lines)
    deep = tmp_path / "deep.jsonl"
    deep.write_bytes(b"[" * 200_000 + b"\n")
    given = (f"sft.path={path}", f"sft.eval_path={deep}", "model.max_seq_len=64", "packing.max_tokens=64")
    findings = Findings()
    look_into_chat(compose("+experiment=sft_chat", *given), findings)
    starts = [f"{path}, line {n}: " for n in (2, 3, 4)] + [f"{deep}, line 1: nested too deeply"]
    assert len(findings.reasons) == 4
    for reason, start in zip(findings.reasons, starts, strict=True):
        assert reason.startswith(start)
    assert "sft.overlong=drop" in findings.reasons[1]
    findings = Findings()
    look_into_chat(compose("+experiment=sft_chat", *given, "model.tokenizer=/nowhere"), findings)
    assert len(findings.reasons) == 1
    assert "model.tokenizer=/nowhere" in findings.reasons[0]


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path: Path, chat: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=UNMARKED)
    given = (f"sft.path={chat}", f"model.tokenizer={tokenizer}")
    findings = Findings()
    look_into_chat(compose("+experiment=sft_chat", *given, "model.vocab_size=259"), findings)
    (reason,) = findings.reasons
    assert "the embedding fewer rows: raise model.vocab_size=259" in reason


def test_demonstrations_longer_than_the_context_are_seen_before_anything_runs() -> None:
    for given in (("recipe=sft",), ("recipe=validate", "warm_start.steps=3")):
        findings = Findings()
        short = ("model.max_seq_len=8", "rollouts.max_new_tokens=1", "task.eval_problems=0")
        look_into_task(compose(*given, *short), findings)
        assert any("prompt and answer" in reason and "10 tokens" in reason for reason in findings.reasons)
    findings = Findings()
    look_into_task(compose("recipe=sft", "model.max_seq_len=10", "rollouts.max_new_tokens=1"), findings)
    assert findings.reasons == [], "prompts of rollouts are not a matter of supervised runs"


def test_a_format_that_does_not_fit_and_keys_without_effect_are_refused_by_the_command(
    tmp_path: Path, chat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = ("sft.format=parquet", "sft.split=test", f"sft.path={chat}")
    assert run_command(["+experiment=sft_chat", *refused]) == 2
    assert "sft.split=test: no effect without sft.format=datasets" in capsys.readouterr().err
    assert run_command(["+experiment=sft_chat", "sft.format=parquet", f"sft.path={chat}"]) == 2
    assert "no .parquet file in it" in capsys.readouterr().err
