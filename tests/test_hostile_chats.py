"""Conversations, chat templates and tokenizers nobody of this project wrote: refused by place, or read
as meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_cases import UNMARKED, save_tokenizer
from test_chat import hf, row

from olmo_rl.config import SftConfig, SftFormat
from olmo_rl.data.chat import render, user_prompt
from olmo_rl.data.chat_files import open_chat, rows_in_order
from olmo_rl.data.tokenizers import ByteTokenizer, load_tokenizer
from olmo_rl.data.turns import ChatRow, conversation_of
from olmo_rl.types import Refusal

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0",
        "messages[0].content.index('absent')",
        "range(10 ** 9)|list",
        "'a' * 10 ** 18",
        "m.n() if false else messages[0].content.split('')",
    ],
)
def test_a_template_whose_expressions_fail_is_refused(tmp_path: Path, expression: str) -> None:
    tokenizer = hf(tmp_path, "{{ " + expression + " }}")
    with pytest.raises(Refusal, match="f.jsonl, line 3: the chat template fails on this conversation"):
        render(row({"messages": [USER, ASSISTANT]}), tokenizer=tokenizer)
    with pytest.raises(Refusal, match="the chat template fails on this conversation"):
        user_prompt("hi", tokenizer=tokenizer, system=None)


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "a", "response": "b", "tools": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        json.dumps(
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 10**5}]},
                ]
            }
        ).encode(),
    ],
)
def test_parts_nested_too_deeply_are_refused(line: bytes) -> None:
    with pytest.raises(Refusal, match="f.jsonl, line 3: nested too deeply"):
        conversation_of(ChatRow(where="f.jsonl, line 3", id="3", raw=line))


def test_a_name_that_stands_twice_and_an_image_beside_a_text_are_refused() -> None:
    twice = b'{"prompt": "a", "response": "b", "response": "c"}'
    with pytest.raises(Refusal, match="line 3: 'response' stands twice"):
        conversation_of(ChatRow(where="f.jsonl, line 3", id="3", raw=twice))
    part = {"type": "text", "text": "What is this?", "image_url": "cat.png"}
    with pytest.raises(Refusal, match=r"messages\[0\].content\[0\].image_url stands beside a text"):
        conversation_of(row({"messages": [{"role": "user", "content": [part]}, ASSISTANT]}))
    absent = part | {"image_url": None}  # as tables write it
    conversation_of(row({"messages": [{"role": "user", "content": [absent]}, ASSISTANT]}))


@pytest.mark.parametrize("name", ["eos_token", "truncation", "continue_final_message"])
def test_a_row_sets_no_argument_of_the_tokenizer_itself(tmp_path: Path, name: str) -> None:
    tokenizer = hf(tmp_path, UNMARKED + "{# " + name + " #}")
    value = {"messages": [USER, ASSISTANT], "chat_template_kwargs": {name: "x"}}
    with pytest.raises(Refusal, match=f"chat_template_kwargs.{name}: the chat template reads no such"):
        render(row(value), tokenizer=tokenizer)


def opened(path: Path, **settings: Any) -> list[ChatRow]:
    files = open_chat(str(path), config=SftConfig(**settings), key="sft.path", split="train")
    return rows_in_order(files).take(10)


def test_directories_and_columns_that_stand_twice_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(Refusal, match=r"x\.jsonl is no file"):
        opened(tmp_path)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table([pa.array(["a"])] * 3, names=["prompt", "response", "response"]), path)
    with pytest.raises(Refusal, match="column 'response' stands twice"):
        opened(path)


def test_a_flipped_byte_of_a_chat_file_with_checksums_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = pa.table({"prompt": ["a" * 50] * 9, "response": ["b" * 50] * 9})
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, write_page_checksum=True, **options)
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"a" * 50) + 7] = ord("X")
    path.write_bytes(damaged)
    with pytest.raises(Refusal, match="not a sound parquet file"):
        opened(path)


def test_datasets_saved_with_a_format_give_all_columns_as_lists(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the hf extra")
    pairs = datasets.Dataset.from_list([{"prompt": "a", "response": "b"}])
    pairs.with_format(None, columns=["prompt"]).save_to_disk(tmp_path / "hidden")
    chats = datasets.Dataset.from_list([{"messages": [USER, ASSISTANT]}])
    chats.with_format("numpy").save_to_disk(tmp_path / "arrays")
    for name, text in (("hidden", "ab"), ("arrays", "hiyo")):
        (only,) = opened(tmp_path / name, format=SftFormat.datasets)
        tokens, _ = render(only, tokenizer=ByteTokenizer())
        assert ByteTokenizer().decode(tokens.tolist()) == text


@pytest.mark.parametrize("state", ["[]", "{}"])
def test_a_damaged_dataset_is_refused_by_key(tmp_path: Path, state: str) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the hf extra")
    datasets.Dataset.from_list([{"prompt": "a", "response": "b"}]).save_to_disk(tmp_path / "d")
    (tmp_path / "d" / "state.json").write_text(state)
    with pytest.raises(Refusal, match="sft.path=.* sft.format=datasets: "):
        opened(tmp_path / "d", format=SftFormat.datasets)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", lambda text: "{}"),
        ("tokenizer.json", lambda text: json.dumps(json.loads(text) | {"model": {"type": "Tomorrow"}})),
        ("tokenizer_config.json", lambda text: "[]"),
        ("tokenizer_config.json", lambda text: json.dumps(json.loads(text) | {"eos_token": 5})),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_key(
    tmp_path: Path, name: str, change: Callable[[str], str]
) -> None:
    directory = save_tokenizer(tmp_path, template=None)
    path = tmp_path / name
    path.write_text(change(path.read_text()))
    with pytest.raises(Refusal, match=f"model.tokenizer={directory}: "):
        load_tokenizer(directory)
