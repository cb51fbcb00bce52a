"""Chat data: what a row may be, what of it is trained, and the order in which rows come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_cases import BOS, EOS, MARKED, UNMARKED, conversation, save_tokenizer, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_rl.config import SftConfig, SftFormat
from olmo_rl.data.chat import render
from olmo_rl.data.chat_files import ChatStream, RowFile, open_chat, rows_in_order
from olmo_rl.data.tokenizers import ByteTokenizer, HfTokenizer, load_tokenizer
from olmo_rl.data.turns import ChatRow, conversation_of
from olmo_rl.types import Refusal

TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "good bye"},
]


def row(value: object) -> ChatRow:
    return ChatRow(where="f.jsonl, line 3", id="f.jsonl:3", raw=json.dumps(value).encode())


def hf(directory: Path, template: str) -> HfTokenizer:
    tokenizer = load_tokenizer(save_tokenizer(directory, template=template))
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


def trained_text(value: object, tokenizer: Any) -> list[str]:
    """The runs of trained tokens, special ones included."""
    tokens, trained = render(row(value), tokenizer=tokenizer)
    runs: list[list[int]] = []
    for t, (token, mine) in enumerate(zip(tokens.tolist(), trained.tolist(), strict=True)):
        if mine and (t == 0 or not trained[t - 1]):
            runs.append([])
        if mine:
            runs[-1].append(token)
    if isinstance(tokenizer, ByteTokenizer):
        return ["".join("$" if token == tokenizer.eos_id else chr(token) for token in run) for run in runs]
    return [tokenizer.backend.decode(run) for run in runs]


def test_the_plain_form_trains_every_turn_of_the_assistant_with_its_end_and_nothing_else() -> None:
    tokens, trained = render(row({"messages": TURNS}), tokenizer=ByteTokenizer())
    text = "".join("$" if token == 258 else chr(token) for token in tokens.tolist())
    assert text == "be kind\nhi therehello$byegood bye$"
    assert "".join("^" if mine else "." for mine in trained) == "." * 16 + "^" * 6 + "." * 3 + "^" * 9
    assert tokens.dtype.name == "int32"


def test_a_prompt_with_a_response_is_a_task_demonstration_byte_for_byte() -> None:
    tokens, trained = render(row({"prompt": "1+2=", "response": "3"}), tokenizer=ByteTokenizer())
    assert tokens.tolist() == [*b"1+2=", *b"3", 258]
    assert trained.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["generation markers", "prefixes"])
def test_a_chat_template_renders_and_its_assistant_turns_alone_are_trained(
    tmp_path: Path, template: str
) -> None:
    tokenizer = hf(tmp_path, template)
    tokens, _ = render(row({"messages": TURNS}), tokenizer=tokenizer)
    whole = tokenizer.backend.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    assert tokens.tolist() == whole
    assert tokens[0] == tokenizer.backend.convert_tokens_to_ids(BOS)
    # The newline that the template writes behind the end of a turn is not the assistant's.
    assert trained_text({"messages": TURNS}, tokenizer) == [f"hello{EOS}", f"good bye{EOS}"]
    assert trained_text({"prompt": "a", "response": "b c"}, tokenizer) == [f"b c{EOS}"]


def test_a_token_that_reaches_into_a_turn_is_trained(tmp_path: Path) -> None:
    # "a: " prompts, "b" answers, and the vocabulary joins blank and letter.
    template = "{% for m in messages %}{{ m.role[0] + ': ' + m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}a: {% endif %}"
    tokenizer = hf(tmp_path, template)
    assert trained_text({"prompt": "a", "response": "b"}, tokenizer) == [f" b{EOS}"]


def test_templates_that_rewrite_or_refuse_turns_are_refused_with_the_turn(tmp_path: Path) -> None:
    last = "{% for m in messages %}{{ m.role + m.content if loop.last else m.content }}{% endfor %}"
    with pytest.raises(Refusal, match=r"f\.jsonl, line 3: messages\[2\]: .*set sft\.train_on=last"):
        render(row({"messages": TURNS}), tokenizer=hf(tmp_path / "last", last))
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Refusal, match=r"line 3: .*roles must alternate"):
        render(row({"messages": TURNS}), tokenizer=hf(tmp_path / "strict", strict))
    marked = "{{ m.content + eos_token }}{% endgeneration %}"
    nothing = MARKED.replace(marked, "{% endgeneration %}{{ m.content }}")
    with pytest.raises(Refusal, match="nothing can be trained"):
        render(row({"messages": TURNS}), tokenizer=hf(tmp_path / "nothing", nothing))
    with pytest.raises(Refusal, match=r"messages\[0\].role is 'assistant'"):
        render(row({"messages": TURNS[2:]}), tokenizer=hf(tmp_path / "first", UNMARKED))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "not an object"),
        ({}, "neither 'messages' nor 'prompt' and 'response'"),
        ({"prompt": "a"}, "'response' is missing"),
        ({"prompt": "a", "response": 4}, "'response' is not text"),
        ({"prompt": "", "response": "a"}, "'prompt' is empty"),
        ({"messages": "hi"}, "'messages' is not a list"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["hi"]}, "messages[0] is not an object"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role is 'bot': known are system"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role is ['user']"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        (
            {"messages": [{"role": "user", "content": [{"image": "a"}]}]},
            "messages[0].content[0] is no text part",
        ),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content is not text"),
        ({"messages": TURNS[:2]}, "no turn of the assistant"),
        ({"messages": [*TURNS[:2], {"role": "assistant", "content": ""}]}, "messages[2].content is empty"),
        ({"messages": [*TURNS[:2], {"role": "assistant", "content": "\ud800"}]}, r"half of a surrogate pair"),
        ({"messages": [{**TURNS[1], "name": "x"}, TURNS[2]]}, "messages[0].name"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_by_line_and_name(value: object, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        render(row(value), tokenizer=ByteTokenizer())
    (reason,) = caught.value.reasons
    assert reason.startswith("f.jsonl, line 3: ")
    assert words in reason


@pytest.mark.parametrize(
    "line", [b"{not json", b"[" * 100_000, b'{"messages": ' + b'{"a":' * 100_000, b"\xff\xfe"], ids=range(4)
)
def test_a_line_that_cannot_be_parsed_is_refused_by_line(line: bytes) -> None:
    with pytest.raises(Refusal, match=r"^f\.jsonl, line 3: (not JSON|nested too deeply)"):
        conversation_of(ChatRow(where="f.jsonl, line 3", id="", raw=line))


def test_half_a_surrogate_pair_in_another_part_of_a_message_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content + (m.name or '') }}{% endfor %}"
    turns = [{**TURNS[1], "name": "\ud800"}, TURNS[2]]
    with pytest.raises(Refusal, match="line 3: .*surrogate pair"):
        render(row({"messages": turns}), tokenizer=hf(tmp_path, template))


def write_all(directory: Path, count: int) -> dict[str, list[RowFile]]:
    """The same rows as JSONL (with blank lines), as parquet in small row groups, and as saved datasets."""
    import datasets

    rows = [{"messages": conversation(i), "other": i} for i in range(count)]
    write_rows(directory / "a" / "x.jsonl", rows[: count // 2], blanks=True)
    write_rows(directory / "a" / "y.jsonl", rows[count // 2 :])
    (directory / "b").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), directory / "b" / "x.parquet", row_group_size=3)
    table = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": table, "test": table.select(range(2))}).save_to_disk(directory / "c")
    saved, plain = SftConfig(format=SftFormat.datasets, ignore=["other"]), SftConfig(ignore=["other"])
    return {
        "jsonl": open_chat(str(directory / "a"), config=plain, key="sft.path", split="train"),
        "parquet": open_chat(str(directory / "b"), config=plain, key="sft.path", split="train"),
        "datasets": open_chat(str(directory / "c"), config=saved, key="sft.path", split="train"),
    }


def contents(rows: list[ChatRow]) -> list[str]:
    return [conversation_of(row).turns[0]["content"] for row in rows]


def test_three_formats_give_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    files = write_all(tmp_path, 23)
    expected = [conversation(i)[0]["content"] for i in range(23)]
    shuffled: list[list[str]] = []
    for found in files.values():
        assert contents(rows_in_order(found).take(100)) == expected
        shuffled.append(contents(ChatStream(found, seed=4, shuffle_buffer=8, epochs=2).take(100)))
    assert shuffled[0] == shuffled[1] == shuffled[2]
    first, second = shuffled[0][:23], shuffled[0][23:]
    assert sorted(first) == sorted(second) == sorted(expected)
    assert first != second
    assert first != expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
@pytest.mark.parametrize("buffer", [1, 5, 1000])
def test_a_stream_goes_on_from_any_cursor(tmp_path: Path, kind: str, buffer: int) -> None:
    files = write_all(tmp_path, 23)[kind]

    def stream() -> ChatStream:
        return ChatStream(files, seed=9, shuffle_buffer=buffer, epochs=3)

    whole = [row.id for row in stream().take(1000)]
    assert len(set(whole)) == len(whole) == 69
    for taken in (0, 1, 4, 22, 23, 24, 46, 60, 69):
        earlier, later = stream(), stream()
        head = [row.id for row in earlier.take(taken)]
        state = json.loads(json.dumps(earlier.state_dict()))
        later.load_state_dict(state)
        assert head + [row.id for row in later.take(1000)] == whole, taken
        assert later.take(1) == []


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    buffer=st.integers(1, 12),
    epochs=st.integers(1, 3),
    draws=st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_every_row_comes_once_an_epoch_whatever_the_draws(
    tmp_path_factory: pytest.TempPathFactory, rows: int, buffer: int, epochs: int, draws: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("rows")
    write_rows(directory / "x.jsonl", [{"messages": conversation(i)} for i in range(rows)])
    files = open_chat(str(directory), config=SftConfig(), key="sft.path", split="train")
    stream = ChatStream(files, seed=1, shuffle_buffer=buffer, epochs=epochs)
    taken = [row.id for draw in draws for row in stream.take(draw)]
    expected = [row.id for row in ChatStream(files, seed=1, shuffle_buffer=buffer, epochs=epochs).take(10**6)]
    assert taken == expected[: len(taken)]
    assert len(taken) == min(sum(draws), rows * epochs)
    assert [id.split(":")[0] for id in expected] == [str(e) for e in range(epochs) for _ in range(rows)]
    assert len(set(expected)) == len(expected)


def test_nothing_but_a_buffer_of_rows_is_read_ahead(tmp_path: Path) -> None:
    rows = [{"messages": conversation(i)} for i in range(10)]
    write_rows(tmp_path / "x.jsonl", rows)
    with (tmp_path / "x.jsonl").open("ab") as file:
        file.write(b"{broken\n")
    files = open_chat(str(tmp_path / "x.jsonl"), config=SftConfig(), key="sft.path", split="train")
    taken = ChatStream(files, seed=0, shuffle_buffer=4, epochs=1).take(6)
    assert len(contents(taken)) == 6
    with pytest.raises(Refusal, match=r"x\.jsonl, line 11: not JSON"):
        contents(ChatStream(files, seed=0, shuffle_buffer=4, epochs=1).take(11))


def test_a_cursor_of_other_data_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.jsonl", [{"messages": conversation(i)} for i in range(10)])

    def stream(**changes: Any) -> ChatStream:
        files = open_chat(str(tmp_path), config=SftConfig(), key="sft.path", split="train")
        return ChatStream(files, **({"seed": 0, "shuffle_buffer": 4, "epochs": None} | changes))

    state = stream().state_dict()
    with pytest.raises(Refusal, match=r"sft.shuffle_buffer is 5, it was 4"):
        stream(shuffle_buffer=5).load_state_dict(state)
    with pytest.raises(Refusal, match=r"seed is 1, it was 0"):
        stream(seed=1).load_state_dict(state)
    write_rows(tmp_path / "y.jsonl", [{"messages": conversation(11)}])
    with pytest.raises(Refusal, match=r"files and sizes is .*y\.jsonl"):
        stream().load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("missing.jsonl", SftConfig(), "no such file or directory.*sft.format=datasets"),
        ("empty", SftConfig(), r"no \.jsonl or \.parquet file in it.*sft.format=datasets"),
        ("x.txt", SftConfig(), "neither .jsonl nor .parquet"),
        ("blank.jsonl", SftConfig(), r"blank\.jsonl 2: no row in it"),
        ("cut.parquet", SftConfig(), r"cut\.parquet: not a sound parquet file"),
        ("other.parquet", SftConfig(), "no column 'messages'"),
        ("saved", SftConfig(format=SftFormat.datasets, split="dev"), "no split 'dev', there are train"),
        ("other", SftConfig(format=SftFormat.datasets), "no column 'messages'"),
        ("empty", SftConfig(format=SftFormat.datasets), "sft.path=.*empty sft.format=datasets: "),
    ],
)
def test_data_that_cannot_be_read_are_refused(
    tmp_path: Path, name: str, config: SftConfig, words: str
) -> None:
    import datasets

    (tmp_path / "empty").mkdir()
    for text, file in (("\n \n"[:2], "blank.jsonl"), ("a", "x.txt"), ("PAR1 cut", "cut.parquet")):
        (tmp_path / file).write_text(text)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    other = datasets.Dataset.from_list([{"text": "a"}])
    other.save_to_disk(tmp_path / "other")
    datasets.DatasetDict({"train": other}).save_to_disk(tmp_path / "saved")
    with pytest.raises(Refusal, match=words):
        rows_in_order(
            open_chat(str(tmp_path / name), config=config, key="sft.path", split=config.split)
        ).take(1)


def test_a_file_of_any_name_is_read_as_the_format_says(tmp_path: Path) -> None:
    write_rows(tmp_path / "chat.txt", [{"prompt": "a", "response": "b"}])
    config = SftConfig(format=SftFormat.jsonl)
    files = open_chat(str(tmp_path / "chat.txt"), config=config, key="sft.path", split="train")
    (row,) = rows_in_order(files).take(2)
    assert (row.where, row.id) == (f"{tmp_path}/chat.txt, line 1", "0:chat.txt:1")
