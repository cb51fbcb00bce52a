"""A row of chat data -> its turns in one form, whatever file it comes from. No torch here.

A row has `messages`, or `prompt` and `response` for one user and one assistant turn; beside them `tools`,
a list of JSON schemas, and `chat_template_kwargs`, arguments of the chat template. `tools`,
`chat_template_kwargs` and the `arguments` of a tool call may also be JSON text.

A message has a `role`, `content` (text, or a list of text parts), and may have `name`, `tool_calls`,
`tool_call_id`, `reasoning_content`, and `weight` (0 or 1) or `train` (a boolean), which exclude an
assistant turn from training. Content may be null beside tool calls. Nulls of nested objects are absences,
and their names are put in one order, so that JSONL, parquet and datasets give the same tokens: tables add
every name to every row.

Refuses, by file, line and name: rows that are no conversation, unknown names and roles, no or empty
assistant turns, content that is not text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.data.json_lines import parse_line, text_fault
from olmo_rl.data.metadata import unknown_name
from olmo_rl.types import Refusal

ROLES = ("system", "developer", "user", "assistant", "tool")
COLUMNS = ("messages", "prompt", "response", "tools", "chat_template_kwargs")
FLAGS = ("weight", "train")
# Names of a message that every chat template may read, or leave unread without loss.
NAMES = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", *FLAGS)
# The usual order of names in JSON schemas of tools and in calls; all others follow in alphabetical order.
_ORDER = (
    "type",
    "function",
    "id",
    "name",
    "description",
    "parameters",
    "properties",
    "required",
    "arguments",
)

Turn = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """One row as its file has it. `where` names file and line, `id` the same in short; `raw` is the JSON
    line, or the cells of a table. `ignore`: names without meaning here. `document`: its token ids [T] and
    which of them are trained, where the row was rendered before; `raw` is then empty.
    """

    where: str
    id: str
    raw: bytes | Mapping[str, Any]
    ignore: tuple[str, ...] = ()
    document: tuple[NDArray[np.int32], NDArray[np.bool_]] | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Turns without flags; `trained`: positions of the assistant turns that are trained."""

    turns: list[Turn]
    trained: tuple[int, ...]
    tools: list[Any] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def conversation_of(row: ChatRow) -> Conversation:
    """The conversation of a row, checked: turns have known roles and content, the assistant speaks."""
    try:
        return _conversation(row)
    except RecursionError:
        raise Refusal(f"{row.where}: nested too deeply to read: flatten it, or leave the row out") from None
    except Refusal as refusal:
        prefix = f"{row.where}: "
        raise Refusal(
            [reason if reason.startswith(prefix) else prefix + reason for reason in refusal.reasons]
        ) from None


def _conversation(row: ChatRow) -> Conversation:
    cells = parse_line(row.raw, where=row.where) if isinstance(row.raw, bytes) else row.raw
    if not isinstance(cells, Mapping):
        raise Refusal('not an object: write {"messages": [...]} or prompt and response')
    for name, value in cells.items():
        if value is not None and name not in COLUMNS and name not in row.ignore:
            raise Refusal(f"{unknown_name(name, COLUMNS)}; rename it, or list it in sft.ignore")
    if cells.get("messages") is not None:
        if beside := [name for name in ("prompt", "response") if cells.get(name) is not None]:
            raise Refusal(f"'messages' and {beside[0]!r} exclude each other: keep one of them")
        turns, trained = _turns(cells["messages"])
    else:
        turns, trained = _pair(cells), (1,)
    tools = _parsed(cells.get("tools"), list, name="tools")
    arguments = _parsed(cells.get("chat_template_kwargs"), dict, name="chat_template_kwargs")
    return Conversation(
        turns=turns,
        trained=trained,
        tools=_canonical(tools) if tools else None,
        template_arguments=_canonical(arguments) if arguments else {},
    )


def _pair(cells: Mapping[str, Any]) -> list[Turn]:
    missing = [name for name in ("prompt", "response") if cells.get(name) is None]
    if len(missing) == 2:
        raise Refusal("neither 'messages' nor 'prompt' and 'response'")
    if missing:
        raise Refusal(f"{missing[0]!r} is missing")
    for name in ("prompt", "response"):
        _refuse_no_text(cells[name], name=f"{name!r}")
        if not cells[name]:
            raise Refusal(f"{name!r} is empty")
    return [
        {"role": "user", "content": cells["prompt"]},
        {"role": "assistant", "content": cells["response"]},
    ]


def _turns(messages: object) -> tuple[list[Turn], tuple[int, ...]]:
    if not isinstance(messages, list):
        raise Refusal("'messages' is not a list")
    if not messages:
        raise Refusal("'messages' is empty")
    turns = [_turn(message, where=f"messages[{index}]") for index, message in enumerate(messages)]
    spoken = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not spoken:
        raise Refusal("no turn of the assistant, so nothing to train on: leave the row out")
    trained = tuple(index for index in spoken if _is_trained(messages[index], where=f"messages[{index}]"))
    if not trained:
        raise Refusal("weight or train exclude every turn of the assistant: leave the row out")
    return turns, trained


def _turn(message: object, *, where: str) -> Turn:
    if not isinstance(message, Mapping):
        raise Refusal(f"{where} is not an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refusal(f"{where}.role is {role!r}: known are {', '.join(ROLES)}")
    # A table gives every message every name; None means that a message has no such part.
    turn = {name: value for name, value in message.items() if value is not None and name not in FLAGS}
    if role != "assistant" and any(message.get(flag) for flag in FLAGS):
        raise Refusal(f"{where}: weight and train belong to turns of the assistant, this one is the {role}'s")
    calls = turn.pop("tool_calls", None)
    if calls:
        turn["tool_calls"] = _calls(calls, where=where)
    if "content" not in turn and calls:
        turn["content"] = ""
    turn["content"] = _content(turn.get("content"), name=f"{where}.content")
    if role == "assistant" and not turn["content"] and not (calls or turn.get("reasoning_content")):
        raise Refusal(f"{where}.content is empty: there is nothing to learn from that turn")
    for name, value in turn.items():
        if isinstance(value, str):
            _refuse_no_text(value, name=f"{where}.{name}")
    return {"role": role, "content": turn.pop("content"), **turn}


def _content(content: object, *, name: str) -> str:
    """Text, or the text of all parts."""
    if not isinstance(content, list):
        _refuse_no_text(content, name=name)
        return str(content)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            shown = kind if isinstance(kind, str) and kind != "text" else type(part).__name__
            raise Refusal(f"{name}[{index}] is no text part but {shown}: only text can be trained on")
        if beside := [
            key for key, value in part.items() if key not in ("type", "text") and value is not None
        ]:
            raise Refusal(
                f"{name}[{index}].{beside[0]} stands beside a text, and only text can be trained on"
            )
        _refuse_no_text(part["text"], name=f"{name}[{index}].text")
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls: object, *, where: str) -> list[Any]:
    """Tool calls with their arguments as objects, as chat templates print them."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise Refusal(f"{where}.tool_calls is not a list of objects")
    made = []
    for index, call in enumerate(_canonical(calls)):
        inner = call.get("function", call)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise Refusal(f"{where}.tool_calls[{index}] names no function")
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = None  # text that is no JSON stays text
            inner = {**inner, "arguments": parsed if isinstance(parsed, dict) else arguments}
        made.append({**call, "function": inner} if "function" in call else inner)
    return made


def _is_trained(message: Mapping[str, Any], *, where: str) -> bool:
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise Refusal(f"{where}.weight is {weight!r}: give 0 (not trained) or 1")
    if train is not None and not isinstance(train, bool):
        raise Refusal(f"{where}.train is {train!r}: give true or false")
    if weight is not None and train is not None and bool(weight) != train:
        raise Refusal(f"{where}: weight={weight} and train={json.dumps(train)} contradict each other")
    return bool(weight if weight is not None else train if train is not None else True)


def _parsed(value: object, kind: type, *, name: str) -> Any:
    """A list or an object, also as JSON text; None where there is none."""
    if isinstance(value, str):
        value = parse_line(value, where=f"{name!r}")
    if value is not None and not isinstance(value, kind):
        raise Refusal(f"{name!r} is not {'a list' if kind is list else 'an object'}, nor JSON text of one")
    return value


def _canonical(value: Any) -> Any:
    """Nested values without nulls of objects, their names in one order."""
    if isinstance(value, Mapping):
        known = {name: place for place, name in enumerate(_ORDER)}
        names = sorted(value, key=lambda name: (known.get(name, len(known)), str(name)))
        return {name: _canonical(value[name]) for name in names if value[name] is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_canonical(part) for part in value]
    return value


def _refuse_no_text(value: object, *, name: str) -> None:
    if value is None:
        raise Refusal(f"{name} is missing")
    if not isinstance(value, str):
        raise Refusal(f"{name} is not text")
    if (fault := text_fault(value)) is not None:
        raise Refusal(f"{name} {fault}")
