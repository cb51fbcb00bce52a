"""One row of chat data -> token ids with a mask of the assistant turns that are trained. No torch here.

`turns` defines a row. A tokenizer with a chat template renders the turns, with the tools and
template arguments of the row: by the template's own generation markers where it has them, else turn by
turn, each rendering checked to continue the previous one. A tokenizer without one (bytes, characters)
writes the plain form: turns follow each other without marks, two turns in a row that are not the
assistant's are separated by a newline, an assistant turn ends with the end-of-sequence id.

Refuses, by file, line and name: parts of a row that the template does not read, text that cannot be
encoded, templates that fail, templates that rewrite earlier turns unless only the last one is trained. T
tokens of a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import Overlong, TrainOn
from olmo_rl.data.bounded import within_memory, within_seconds
from olmo_rl.data.json_lines import text_fault
from olmo_rl.data.tokenizers import HfTokenizer, Tokenizer
from olmo_rl.data.turns import NAMES, ChatRow, Conversation, Turn, conversation_of
from olmo_rl.types import Refusal, Sample

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Parts of a message that mean something to the policy: a template that does not read them loses them.
_MEANT = ("tool_calls", "reasoning_content")
# What the expressions of a template raise, beside errors of their own.
RENDER_SECONDS = 5.0  # of one conversation; it takes milliseconds
RENDER_BYTES = 2**30  # that rendering one conversation may take before a run starts
LONGEST_TEXT = 2**26  # characters of one rendered conversation
_TEMPLATE_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

Document = tuple[NDArray[np.int32], NDArray[np.bool_]]


def render(row: ChatRow, *, tokenizer: Tokenizer, train_on: TrainOn = TrainOn.all) -> Document:
    """int32 [T] ids of the conversation, bool [T]: those of assistant turns that are trained."""
    if row.document is not None:
        return row.document
    conversation = conversation_of(row)
    if train_on is TrainOn.last:
        last = max(i for i, turn in enumerate(conversation.turns) if turn["role"] == "assistant")
        conversation = replace(conversation, trained=tuple(i for i in conversation.trained if i == last))
    try:
        if not conversation.trained:
            raise Refusal("sft.train_on=last, and weight or train exclude the last turn of the assistant")
        if isinstance(tokenizer, HfTokenizer) and tokenizer.backend.chat_template:
            ids, trained = _by_template(conversation, backend=tokenizer.backend)
        else:
            ids, trained = _without_template(conversation, tokenizer=tokenizer)
        if not any(trained[1:]):
            raise Refusal(
                "no token of the assistant has a token before it, so nothing can be trained: does the chat "
                "template mark its turns?"
            )
    except Refusal as refusal:
        raise Refusal([f"{row.where}: {reason}" for reason in refusal.reasons]) from None
    return np.array(ids, dtype=np.int32), np.array(trained, dtype=np.bool_)


def within(document: Document, *, longest: int, overlong: Overlong) -> Document | None:
    """A document as it is trained under a context of `longest` tokens; None where it is dropped."""
    tokens, trained = document
    if len(tokens) <= longest:
        return document
    if overlong is Overlong.truncate and trained[1:longest].any():
        return tokens[:longest], trained[:longest]
    return None


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
    rendered = _apply(lambda: backend.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    if (fault := text_fault(str(rendered))) is not None:
        raise Refusal(f"the rendered prompt {fault}")
    return str(rendered)


def supervised_sample(id: str, tokens: NDArray[np.int32], *, trained: NDArray[np.bool_]) -> Sample:
    """A document without behaviour policy or reward; `trained` bool [T] marks the tokens of the
    cross-entropy.
    """
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


def _without_template(conversation: Conversation, *, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    if conversation.tools is not None or conversation.template_arguments:
        name = "tools" if conversation.tools is not None else "chat_template_kwargs"
        raise Refusal(f"{name!r} needs a chat template: choose a model.tokenizer that has one")
    ids: list[int] = []
    trained: list[bool] = []
    previous = "assistant"
    for index, turn in enumerate(conversation.turns):
        if parts := [name for name in turn if name not in ("role", "content")]:
            raise Refusal(
                f"messages[{index}].{parts[0]}: the plain form of a tokenizer without chat template has role "
                "and content only: choose a model.tokenizer with a chat template"
            )
        speaks = turn["role"] == "assistant"
        apart = "" if speaks or previous == "assistant" else "\n"
        part = tokenizer.encode(apart + turn["content"]) + ([tokenizer.eos_id] if speaks else [])
        ids += part
        trained += [index in conversation.trained] * len(part)
        previous = turn["role"]
    return ids, trained


def _by_template(conversation: Conversation, *, backend: Any) -> tuple[list[int], list[bool]]:
    if not backend.is_fast:
        raise Refusal("the tokenizer has no fast form, which records where in the text a token lies")
    template = _template_of(backend)
    # Arguments that rows may not set: those of the call, and the special tokens of the tokenizer.
    reserved = {*signature(backend.apply_chat_template).parameters, "messages", *backend.special_tokens_map}
    conversation = _readable(conversation, template=template, reserved=reserved)
    settings: dict[str, Any] = {"tools": conversation.tools, **conversation.template_arguments}
    if _MARKED.search(template):
        encoded = _apply(
            lambda: backend.apply_chat_template(
                conversation.turns,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **settings,
            )
        )
        ids, marks = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
        return ids, _chosen(marks, conversation=conversation)
    text, spans = _spans(conversation, backend=backend, settings=settings)
    encoded = backend(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    return ids, _overlapping(offsets, spans=spans)


def _readable(conversation: Conversation, *, template: str, reserved: Collection[str]) -> Conversation:
    """The conversation under the names that the template uses; refuses parts that it would lose."""
    if conversation.tools is not None and "tools" not in template:
        raise Refusal("the chat template does not read 'tools': choose another, or leave them out")
    for name in conversation.template_arguments:
        if name in reserved or not re.search(rf"\b{re.escape(name)}\b", template):
            raise Refusal(f"chat_template_kwargs.{name}: the chat template reads no such argument")
    turns: list[Turn] = []
    for index, turn in enumerate(conversation.turns):
        for name in turn:
            if name not in template and (name in _MEANT or name not in NAMES):
                raise Refusal(f"messages[{index}].{name}: the chat template reads no such name")
        if turn["role"] == "developer" and "developer" not in template:
            turn = {**turn, "role": "system"}  # the older name of the same role
        turns.append(turn)
    return replace(conversation, turns=turns)


def _chosen(marks: list[bool], *, conversation: Conversation) -> list[bool]:
    """Marks of the trained turns: one run of marked tokens for each assistant turn, in order."""
    spoken = [i for i, turn in enumerate(conversation.turns) if turn["role"] == "assistant"]
    if list(conversation.trained) == spoken:
        return marks
    starts = [t for t, mark in enumerate(marks) if mark and (t == 0 or not marks[t - 1])]
    if len(starts) != len(spoken):
        raise Refusal(
            f"the template marks {len(starts)} spans for {len(spoken)} turns of the assistant, so single "
            "turns cannot be excluded: separate them by other turns, or use another template"
        )
    chosen, turn = [], -1
    for t, mark in enumerate(marks):
        turn += t in starts
        chosen.append(mark and spoken[turn] in conversation.trained)
    return chosen


def _template_of(backend: Any) -> str:
    try:
        return str(backend.get_chat_template())
    except ValueError as error:
        raise Refusal(f"the tokenizer's chat template: {str(error).splitlines()[0]}") from None


def _apply(call: Callable[[], Any]) -> Any:
    """What a template makes of turns; a template may refuse them itself, and its text may be none."""
    from jinja2 import TemplateError  # a dependency of transformers' templates

    try:
        with within_memory(RENDER_BYTES):
            found = within_seconds(call, seconds=RENDER_SECONDS, what="the chat template")
        if isinstance(found, str) and len(found) > LONGEST_TEXT:
            raise Refusal(f"the chat template makes {len(found)} characters of one conversation")
        return found
    except Refusal:
        raise
    except TemplateError as error:
        raise Refusal(f"the chat template refuses this conversation: {error}") from None
    except UnicodeEncodeError:
        raise Refusal("a part of a message holds half of a surrogate pair, which is no text") from None
    except _TEMPLATE_FAULTS as error:
        raise Refusal(f"the chat template fails on this conversation: {error}") from None


def _spans(
    conversation: Conversation, *, backend: Any, settings: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and the characters of its trained turns: from behind the generation prompt to
    the token that ends the turn, or to where the next turn begins.
    """
    turns = conversation.turns

    def rendered(part: list[Turn], *, prompted: bool) -> str:
        text = _apply(
            lambda: backend.apply_chat_template(
                part, tokenize=False, add_generation_prompt=prompted, **settings
            )
        )
        if (fault := text_fault(text)) is not None:
            raise Refusal(f"the rendered conversation {fault}")
        return str(text)

    ends = _end_tokens(backend)
    text, spans = rendered(turns, prompted=False), []
    for index in conversation.trained:
        if index == 0:
            raise Refusal(
                "messages[0].role is 'assistant': a chat template without generation markers does not show "
                "where a first turn begins: put a turn of the user before it"
            )
        before = rendered(turns[:index], prompted=True)
        until = rendered(turns[: index + 1], prompted=False)
        if not (text.startswith(until) and until.startswith(before)):
            raise Refusal(
                f"messages[{index}]: the chat template rewrites this turn once others follow, so its tokens "
                "cannot be found: set sft.train_on=last, or use a template with {% generation %} markers"
            )
        spans.append((len(before), _end_of_turn(until, start=len(before), ends=ends)))
    return text, spans


def _end_tokens(backend: Any) -> tuple[str, ...]:
    """Texts of the special tokens, any of which may end a turn."""
    special = [str(token) for token in backend.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys([str(backend.eos_token), *special]))


def _end_of_turn(text: str, *, start: int, ends: tuple[str, ...]) -> int:
    """The end of a turn that ends `text`: blanks behind its end token are the template's."""
    stripped = text.rstrip()
    return len(stripped) if len(stripped) > start and stripped.endswith(ends) else len(text)


def _overlapping(offsets: list[tuple[int, int]], *, spans: list[tuple[int, int]]) -> list[bool]:
    """Which tokens hold a character of a span; both are in order."""
    trained: list[bool] = []
    position = 0
    for start, end in offsets:
        while position < len(spans) and start >= spans[position][1]:
            position += 1
        trained.append(position < len(spans) and end > spans[position][0] and end > start)
    return trained
