"""One row of chat data -> token ids with a mask of what the assistant said. No torch here.

A row is an object with `messages`, a list of {"role", "content"}, or, where it has none, with `prompt` and
`response`, which stand for one user and one assistant turn; other names of a row are left alone. A tokenizer
with a chat template renders the turns: by the template's own generation markers where it has them, else turn
by turn, each rendering checked to continue the previous one. A tokenizer without one (bytes, characters)
writes the plain form: turns follow each other without marks, two turns in a row that are not the
assistant's are set apart by a newline, an assistant turn ends with the end-of-sequence id.

Refuses, by file, line and name: rows that are no conversation, roles it does not know, no or empty assistant
turns, text that cannot be encoded, templates that fail or rewrite earlier turns. T tokens of a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.data.json_lines import parse_line, text_fault
from olmo_rl.data.tokenizers import HfTokenizer, Tokenizer
from olmo_rl.types import Refusal, Sample

ROLES = ("system", "user", "assistant", "tool")
COLUMNS = ("messages", "prompt", "response")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Turn = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """One row as it lies in its file. `where` names file and line, `id` the same in short; `raw` is the JSON
    line, or the cells of a table.
    """

    where: str
    id: str
    raw: bytes | Mapping[str, Any]


def render(row: ChatRow, *, tokenizer: Tokenizer) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """int32 [T] ids of the conversation, bool [T]: those of assistant turns."""
    turns = turns_of(row)
    try:
        if isinstance(tokenizer, HfTokenizer) and tokenizer.backend.chat_template:
            ids, trained = _by_template(turns, backend=tokenizer.backend)
        else:
            ids, trained = _plain(turns, tokenizer=tokenizer)
        if not any(trained[1:]):
            raise Refusal(
                "no token of the assistant has a token before it, so nothing can be trained: does the chat "
                "template mark its turns?"
            )
    except Refusal as refusal:
        raise Refusal([f"{row.where}: {reason}" for reason in refusal.reasons]) from None
    return np.array(ids, dtype=np.int32), np.array(trained, dtype=np.bool_)


def user_prompt(text: str, *, tokenizer: Tokenizer, system: str | None) -> str:
    """`text` as the turn of a user, after one of the system where there is one, rendered up to where the
    assistant begins.
    """
    if not (isinstance(tokenizer, HfTokenizer) and tokenizer.backend.chat_template):
        raise Refusal(
            "task.chat=true: model.tokenizer has no chat template: choose one that has, or task.chat=false"
        )
    turns: list[Turn] = [] if system is None else [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": text})
    backend = tokenizer.backend
    _template_of(backend)
    return str(_apply(lambda: backend.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)))


def supervised_sample(id: str, tokens: NDArray[np.int32], *, trained: NDArray[np.bool_]) -> Sample:
    """A document without behaviour policy or reward; `trained` bool [T] is what cross-entropy looks at."""
    return Sample(
        id=id,
        group=id,
        tokens=tokens,
        response_mask=trained,
        behavior_logprobs=np.zeros(len(tokens), dtype=np.float32),
        reward=0.0,
    )


def too_long(where: str, *, tokens: int, longest: int) -> str:
    """The refusal of a conversation beyond the model's context."""
    return (
        f"{where}: the conversation has {tokens} tokens, more than model.max_seq_len={longest}: raise it, or "
        "set sft.overlong=drop or sft.overlong=truncate"
    )


def turns_of(row: ChatRow) -> list[Turn]:
    """The turns of a row, checked: each has a known role and content, and the assistant speaks."""
    cells = parse_line(row.raw, where=row.where) if isinstance(row.raw, bytes) else row.raw
    if not isinstance(cells, Mapping):
        raise Refusal(f'{row.where}: not an object: write {{"messages": [...]}} or prompt and response')
    if cells.get("messages") is not None:
        turns, fault = cells["messages"], _messages_fault(cells["messages"])
    else:
        turns = [
            {"role": "user", "content": cells.get("prompt")},
            {"role": "assistant", "content": cells.get("response")},
        ]
        fault = _pair_fault(cells)
    if fault is not None:
        raise Refusal(f"{row.where}: {fault}")
    # A table gives every message every column; None says that a message has no such part.
    return [{name: value for name, value in turn.items() if value is not None} for turn in turns]


def _pair_fault(cells: Mapping[str, Any]) -> str | None:
    missing = [name for name in ("prompt", "response") if cells.get(name) is None]
    if len(missing) == 2:
        return "neither 'messages' nor 'prompt' and 'response'"
    if missing:
        return f"{missing[0]!r} is missing"
    for name in ("prompt", "response"):
        if (fault := _text_fault(cells[name], name=f"{name!r}")) is not None:
            return fault
        if not cells[name]:
            return f"{name!r} is empty"
    return None


def _messages_fault(messages: object) -> str | None:
    if not isinstance(messages, list):
        return "'messages' is not a list"
    if not messages:
        return "'messages' is empty"
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            return f"{where} is not an object with role and content"
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            return f"{where}.role is {role!r}: known are {', '.join(ROLES)}"
        if (fault := _text_fault(message.get("content"), name=f"{where}.content")) is not None:
            return fault
        if role == "assistant" and not message["content"] and not _more_parts(message):
            return f"{where}.content is empty: there is nothing to learn from that turn"
    if not any(message["role"] == "assistant" for message in messages):
        return "no turn of the assistant, so nothing to train on: leave the row out"
    return None


def _text_fault(value: object, *, name: str) -> str | None:
    if value is None:
        return f"{name} is missing"
    if not isinstance(value, str):
        return f"{name} is not text"
    fault = text_fault(value)
    return None if fault is None else f"{name} {fault}"


def _more_parts(message: Mapping[str, Any]) -> list[str]:
    """Names of what a message has beside role and content."""
    return [name for name, value in message.items() if value is not None and name not in ("role", "content")]


def _plain(turns: list[Turn], *, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    trained: list[bool] = []
    previous = "assistant"
    for index, turn in enumerate(turns):
        if parts := _more_parts(turn):
            raise Refusal(
                f"messages[{index}].{parts[0]}: the plain form of a tokenizer without chat template has role "
                "and content only: choose a model.tokenizer with a chat template"
            )
        speaks = turn["role"] == "assistant"
        apart = "" if speaks or previous == "assistant" else "\n"
        part = tokenizer.encode(apart + turn["content"]) + ([tokenizer.eos_id] if speaks else [])
        ids += part
        trained += [speaks] * len(part)
        previous = turn["role"]
    return ids, trained


def _by_template(turns: list[Turn], *, backend: Any) -> tuple[list[int], list[bool]]:
    if not backend.is_fast:
        raise Refusal("the tokenizer has no fast form, which says where in the text a token lies")
    if _MARKED.search(_template_of(backend)):
        encoded = _apply(
            lambda: backend.apply_chat_template(
                turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        )
        ids, trained = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    else:
        text, spans = _spans(turns, backend=backend)
        encoded = backend(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        trained = _overlapping(offsets, spans=spans)
    return ids, trained


def _template_of(backend: Any) -> str:
    try:
        return str(backend.get_chat_template())
    except ValueError as error:
        raise Refusal(f"the tokenizer's chat template: {str(error).splitlines()[0]}") from None


def _apply(call: Callable[[], Any]) -> Any:
    """What a template makes of turns; a template may refuse them itself, and its text may be none."""
    from jinja2 import TemplateError  # transformers brings it with its templates

    try:
        return call()
    except TemplateError as error:
        raise Refusal(f"the chat template refuses this conversation: {error}") from None
    except UnicodeEncodeError:
        raise Refusal("a part of a message holds half of a surrogate pair, which is no text") from None


def _spans(turns: list[Turn], *, backend: Any) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and the characters of its assistant turns: from behind the generation prompt
    to the turn's end-of-sequence, or to where the next turn begins.
    """

    def rendered(part: list[Turn], *, prompted: bool) -> str:
        text = _apply(
            lambda: backend.apply_chat_template(part, tokenize=False, add_generation_prompt=prompted)
        )
        if (fault := text_fault(text)) is not None:
            raise Refusal(f"the rendered conversation {fault}")
        return str(text)

    text, spans = rendered(turns, prompted=False), []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        if index == 0:
            raise Refusal(
                "messages[0].role is 'assistant': a chat template without generation markers cannot say "
                "where a first turn begins: put a turn of the user before it"
            )
        before = rendered(turns[:index], prompted=True)
        until = rendered(turns[: index + 1], prompted=False)
        if not (text.startswith(until) and until.startswith(before)):
            raise Refusal(
                f"messages[{index}]: the chat template writes this turn otherwise once others follow, so its "
                "tokens cannot be told apart: use a template with {% generation %} markers"
            )
        spans.append((len(before), _end_of_turn(until, start=len(before), eos=backend.eos_token)))
    return text, spans


def _end_of_turn(text: str, *, start: int, eos: str) -> int:
    """Where a turn that ends `text` is over: blanks behind its end-of-sequence are the template's."""
    found = text.rfind(eos, start)
    return len(text) if found < 0 or text[found + len(eos) :].strip() else found + len(eos)


def _overlapping(offsets: list[tuple[int, int]], *, spans: list[tuple[int, int]]) -> list[bool]:
    """Which tokens hold a character of a span; both are in order."""
    trained: list[bool] = []
    position = 0
    for start, end in offsets:
        while position < len(spans) and start >= spans[position][1]:
            position += 1
        trained.append(position < len(spans) and end > spans[position][0] and end > start)
    return trained
