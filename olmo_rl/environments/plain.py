"""A renderer of the library for tiny models: conversations as plain text, a tool call as `name(arguments)`.

System, user and tool messages are their text and a line break; an assistant's turn is its text, then its
calls, then the end token. The arguments of a tool with one parameter of text are written as they are, those
of any other tool as a JSON object: `calculator(37+58)`, `search({"query":"x","pages":2})`. A conversation
goes on behind the tokens that the engine wrote, which are never encoded again: an episode has one branch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus
from renderers.configs import BaseRendererConfig

_CALL = re.compile(r"(?P<text>.*?)(?P<name>[A-Za-z_]\w*)\((?P<arguments>.*)\)\s*", re.DOTALL)


class PlainConfig(BaseRendererConfig):
    """The renderer has no settings."""


class PlainRenderer:
    """Messages to token ids and back. The tokenizer is one of Hugging Face with an end-of-sequence token."""

    config_class = PlainConfig
    supports_tools = True
    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: PlainConfig | None = None) -> None:
        del config
        self._tokenizer = tokenizer
        self._end = int(tokenizer.eos_token_id)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """The conversation from its beginning; an assistant speaks next without any prompt of its own."""
        del add_generation_prompt
        return self._rendered([], messages, tools=tools)

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """The ids of `render` alone."""
        return list(self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> RenderedTokens | None:
        """The new messages behind what was read and written; a turn that was cut gets its end token."""
        if any(message.get("role") == "assistant" for message in new_messages):
            return None
        before = [*previous_prompt_ids, *previous_completion_ids]
        if before[-1:] != [self._end]:
            before.append(self._end)
        return self._rendered(before, new_messages, tools=tools)

    def _rendered(
        self,
        before: list[int],
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> RenderedTokens:
        ids, owners = list(before), [-1] * len(before)
        sampled, content = [False] * len(before), [False] * len(before)
        for index, message in enumerate(messages):
            speaks = message.get("role") == "assistant"
            text = _text(message.get("content"))
            if speaks:
                text += "".join(map(_call_text(tools), message.get("tool_calls") or []))
            body = self._encoded(text)
            close = [self._end] if speaks else self._encoded("\n")
            ids += body + close
            owners += [index] * (len(body) + len(close))
            sampled += [speaks] * (len(body) + len(close))
            content += [True] * len(body) + [speaks] * len(close)
        return RenderedTokens(
            token_ids=ids,
            message_indices=owners,
            sampled_mask=sampled,
            is_content=content,
            message_roles=[str(message.get("role") or "") for message in messages],
            message_tool_names=[message.get("name") for message in messages],
        )

    def _encoded(self, text: str) -> list[int]:
        """Ids of a text; what is spelled like a special token stays text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """Text, and the call at its end where it names a tool of `tools`. Special tokens are no text."""
        del prompt_ids
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        known = {tool["function"]["name"]: tool["function"] for tool in tools or []}
        match = _CALL.fullmatch(text)
        if match is None or match["name"] not in known:
            return ParsedResponse(content=text)
        call = ParsedToolCall(raw=text[len(match["text"]) :], name=match["name"])
        call.arguments, call.status = _arguments(match["arguments"], function=known[match["name"]])
        return ParsedResponse(content=match["text"], tool_calls=[call])

    def get_stop_token_ids(self) -> list[int]:
        """The end of a turn."""
        return [self._end]


def _text(content: object) -> str:
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("a message with other parts than text: the plain renderer has no images")
        return "".join(map(str, parts))
    return "" if content is None else str(content)


def _call_text(tools: Sequence[Mapping[str, Any]] | None) -> Any:
    """A function from a call to its text."""
    known = {tool["function"]["name"]: tool["function"] for tool in tools or []}

    def written(call: Mapping[str, Any]) -> str:
        function = call.get("function", call)
        name, arguments = function["name"], function.get("arguments") or "{}"
        values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        only = _only_text_parameter(known.get(name))
        inside = values[only] if only in values and len(values) == 1 else json.dumps(values)
        return f"{name}({inside})"

    return written


def _arguments(text: str, *, function: Mapping[str, Any]) -> tuple[dict[str, Any] | str, ToolCallParseStatus]:
    only = _only_text_parameter(function)
    if only is not None and not text.lstrip().startswith("{"):
        return {only: text}, ToolCallParseStatus.OK
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text, ToolCallParseStatus.INVALID_JSON
    if not isinstance(values, dict):
        return text, ToolCallParseStatus.INVALID_JSON
    return values, ToolCallParseStatus.OK


def _only_text_parameter(function: Mapping[str, Any] | None) -> str | None:
    """The name of the one parameter, where it is a text."""
    properties = ((function or {}).get("parameters") or {}).get("properties") or {}
    if len(properties) != 1:
        return None
    ((name, schema),) = properties.items()
    return str(name) if isinstance(schema, Mapping) and schema.get("type") == "string" else None
