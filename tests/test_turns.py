"""Conversations as people have them: tools, calls, flags, parts, roles; one form for every file format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_cases import EOS, MARKED, UNMARKED, save_tokenizer, write_rows

from olmo_rl.config import SftConfig, SftFormat, TrainOn
from olmo_rl.data.chat import render
from olmo_rl.data.chat_files import open_chat, rows_in_order
from olmo_rl.data.tokenizers import HfTokenizer, load_tokenizer
from olmo_rl.data.turns import ChatRow, conversation_of
from olmo_rl.types import Refusal

TOOLED = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endif %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if brief %}short:{% endif %}{% endif %}"
)
SCHEMA = {"type": "object", "city": {"type": "string"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
USER = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}],
}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "1"}
ANSWER = {"role": "assistant", "content": "go out"}


def row(value: object) -> ChatRow:
    return ChatRow(where="f.jsonl, line 3", id="f.jsonl:3", raw=json.dumps(value).encode())


def hf(directory: Path, template: str) -> HfTokenizer:
    tokenizer = load_tokenizer(save_tokenizer(directory, template=template))
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


def read(value: object, tokenizer: HfTokenizer, *, train_on: TrainOn = TrainOn.all) -> tuple[str, list[str]]:
    """The rendered text, and its trained spans."""
    tokens, trained = render(row(value), tokenizer=tokenizer, train_on=train_on)
    spans: list[list[int]] = []
    for t, (token, mine) in enumerate(zip(tokens.tolist(), trained.tolist(), strict=True)):
        if mine and (t == 0 or not trained[t - 1]):
            spans.append([])
        if mine:
            spans[-1].append(token)
    return tokenizer.backend.decode(tokens), [tokenizer.backend.decode(span) for span in spans]


def test_tools_and_calls_without_content_are_rendered_and_trained(tmp_path: Path) -> None:
    tokenizer = hf(tmp_path, TOOLED)
    text, trained = read({"messages": [USER, CALL, RESULT, ANSWER], "tools": TOOLS}, tokenizer)
    assert text.startswith('[{"type": "function", "function": {"name": "weather", "parameters":')
    call = 'weather({"city": "Paris"})' + EOS
    assert trained == [call, f"go out{EOS}"]
    same = {"messages": [USER, CALL, RESULT, ANSWER], "tools": json.dumps(TOOLS)}
    assert read(same, tokenizer) == (text, trained)
    parsed = json.loads(json.dumps(CALL))
    parsed["tool_calls"][0]["function"]["arguments"] = {"city": "Paris"}
    assert read({"messages": [USER, parsed, RESULT, ANSWER], "tools": TOOLS}, tokenizer) == (text, trained)


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["generation markers", "prefixes"])
@pytest.mark.parametrize(
    ("excluded", "included"), [({"weight": 0}, {"weight": 1}), ({"train": False}, {"train": True})]
)
def test_turns_with_weight_0_or_train_false_are_context_only(
    tmp_path: Path, template: str, excluded: dict[str, Any], included: dict[str, Any]
) -> None:
    tokenizer = hf(tmp_path, template)
    first, last = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "good bye"}
    text, both = read({"messages": [USER, first, USER, last]}, tokenizer)
    assert both == [f"hello{EOS}", f"good bye{EOS}"]
    for mine, other, expected in ((first, last, both[1:]), (last, first, both[:1])):
        turns = [
            turn if turn is USER else turn | (excluded if turn is mine else included if turn is other else {})
            for turn in (USER, first, USER, last)
        ]
        assert read({"messages": turns}, tokenizer) == (text, expected)
    assert read({"messages": [USER, first, USER, last]}, tokenizer, train_on=TrainOn.last) == (text, both[1:])


def test_a_template_that_rewrites_earlier_turns_trains_the_last_one_by_a_key(tmp_path: Path) -> None:
    # Earlier turns of the assistant lose what they thought.
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.role == 'user' or loop.last else "
        "m.content[-1:] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = hf(tmp_path, template)
    first, last = {"role": "assistant", "content": "think a"}, {"role": "assistant", "content": "think b"}
    turns = {"messages": [USER, first, USER, last]}
    with pytest.raises(Refusal, match=r"messages\[1\]: .*sft\.train_on=last"):
        read(turns, tokenizer)
    assert read(turns, tokenizer, train_on=TrainOn.last)[1] == [f"think b{EOS}"]


def test_a_developer_is_the_system_where_the_template_has_no_such_role(tmp_path: Path) -> None:
    developer, system = ({"role": role, "content": "be kind"} for role in ("developer", "system"))
    tokenizer = hf(tmp_path / "a", UNMARKED)
    assert read({"messages": [developer, USER, ANSWER]}, tokenizer) == read(
        {"messages": [system, USER, ANSWER]}, tokenizer
    )
    named = UNMARKED.replace("m.role }}", "'dev' if m.role == 'developer' else m.role }}")
    assert "<|dev|>" in read({"messages": [developer, USER, ANSWER]}, hf(tmp_path / "b", named))[0]


def test_content_may_be_a_list_of_text_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    tokenizer = hf(tmp_path, UNMARKED)
    assert read({"messages": [{**USER, "content": parts}, ANSWER]}, tokenizer) == read(
        {"messages": [USER, ANSWER]}, tokenizer
    )


def test_template_arguments_of_a_row_reach_the_template(tmp_path: Path) -> None:
    tokenizer = hf(tmp_path, TOOLED)
    turns = {"messages": [USER, {"role": "assistant", "content": "short:go"}]}
    assert read(turns, tokenizer)[1] == [f"short:go{EOS}"]
    assert read({**turns, "chat_template_kwargs": {"brief": True}}, tokenizer)[1] == [f"go{EOS}"]


def test_a_turn_ends_at_any_special_token_of_the_tokenizer(tmp_path: Path) -> None:
    template = UNMARKED.replace("{{ m.content + eos_token }}", "{{ m.content }}<|tool|>")
    assert read({"messages": [USER, ANSWER]}, hf(tmp_path, template))[1] == ["go out<|tool|>"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"mesages": [USER, ANSWER]}, "unknown name 'mesages': did you mean 'messages'"),
        ({"messages": [USER, ANSWER], "functions": []}, "unknown name 'functions'"),
        ({"messages": [USER, ANSWER], "prompt": "a"}, "'messages' and 'prompt' exclude each other"),
        (
            {"messages": [USER, {**ANSWER, "mood": "x"}]},
            "messages[1].mood: the chat template reads no such name",
        ),
        ({"messages": [USER, CALL]}, "messages[1].tool_calls: the chat template reads no such name"),
        (
            {"messages": [USER, {**ANSWER, "reasoning_content": "x"}]},
            "messages[1].reasoning_content: the chat",
        ),
        ({"messages": [USER, ANSWER], "tools": TOOLS}, "the chat template does not read 'tools'"),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"brief": 1}},
            "chat_template_kwargs.brief: the chat",
        ),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"tokenize": 1}},
            "chat_template_kwargs.tokenize",
        ),
        ({"messages": [USER, ANSWER], "tools": "{"}, "'tools': not JSON"),
        ({"messages": [USER, ANSWER], "tools": {}}, "'tools' is not a list"),
        (
            {"messages": [{**USER, "weight": 1}, ANSWER]},
            "messages[0]: weight and train belong to turns of the",
        ),
        (
            {"messages": [USER, {**ANSWER, "weight": 0.5}]},
            "messages[1].weight is 0.5: give 0 (not trained) or 1",
        ),
        ({"messages": [USER, {**ANSWER, "train": 1}]}, "messages[1].train is 1: give true or false"),
        ({"messages": [USER, {**ANSWER, "weight": 0, "train": True}]}, "contradict each other"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "exclude every turn of the assistant"),
        ({"messages": [USER, {**ANSWER, "content": None}]}, "messages[1].content is missing"),
        (
            {"messages": [USER, {**ANSWER, "content": [{"type": "image_url"}]}]},
            "content[0] is no text part but image",
        ),
    ],
)
def test_what_would_be_lost_is_refused_by_line_and_name(tmp_path: Path, value: object, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(value, hf(tmp_path, UNMARKED))
    (reason,) = caught.value.reasons
    assert reason.startswith("f.jsonl, line 3: ")
    assert words in reason


def rendered(path: Path, tokenizer: HfTokenizer, config: SftConfig) -> list[list[int]]:
    rows = rows_in_order(open_chat(str(path), config=config, key="sft.path", split="train")).take(9)
    return [render(row, tokenizer=tokenizer)[0].tolist() for row in rows]


def rows_of_all_kinds() -> Sequence[dict[str, Any]]:
    """Rows whose nested objects have different names, in different orders."""

    def called(arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            **CALL,
            "tool_calls": [{"function": {"arguments": arguments, "name": "f"}, "type": "function"}],
        }

    schema = {"name": "f", "parameters": {"properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}}
    return [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, called({"city": "Paris"}), RESULT, ANSWER], "tools": TOOLS},
        {"messages": [USER, called({"unit": "C", "city": "Rome"}), RESULT, {**ANSWER, "weight": 0}]},
        {"messages": [USER, ANSWER], "tools": [{"function": schema, "type": "function"}]},
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"brief": False}},
    ]


def test_the_same_row_gives_the_same_tokens_from_every_format(tmp_path: Path) -> None:
    import datasets

    tokenizer = hf(tmp_path / "tokenizer", TOOLED)
    rows = rows_of_all_kinds()
    write_rows(tmp_path / "x.jsonl", rows)
    cells = [{name: row.get(name) for name in ("messages", "tools", "chat_template_kwargs")} for row in rows]
    pq.write_table(pa.Table.from_pylist(cells), tmp_path / "x.parquet")
    datasets.Dataset.from_list(cells).save_to_disk(tmp_path / "saved")
    lines = rendered(tmp_path / "x.jsonl", tokenizer, SftConfig())
    assert len({tuple(line) for line in lines}) == 4  # rows 0 and 4 differ in an argument without effect
    assert rendered(tmp_path / "x.parquet", tokenizer, SftConfig()) == lines
    assert rendered(tmp_path / "saved", tokenizer, SftConfig(format=SftFormat.datasets)) == lines


def test_unknown_columns_are_refused_unless_they_are_ignored(tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER], "origin": "a"}]
    write_rows(tmp_path / "x.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        for ignore in ([], ["origin"]):
            config = SftConfig(ignore=ignore)
            files = open_chat(str(tmp_path / name), config=config, key="sft.path", split="train")
            if ignore:
                (found,) = rows_in_order(files).take(2)
                assert conversation_of(found).turns == [USER, ANSWER]
                continue
            with pytest.raises(Refusal, match=r"unknown name 'origin'.*list it in sft\.ignore"):
                conversation_of(rows_in_order(files).take(1)[0])
