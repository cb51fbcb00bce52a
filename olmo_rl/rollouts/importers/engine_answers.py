"""Answers of vLLM and SGLang kept as JSON lines: bodies of completions, or records around them.

A line is an answer body as `wire.py` reads them, or a record {"response": body} or {"turns": [body, ...]}
with, beside it, `sample_id`, `group_id`, `reward` (one number, or a list with one for every choice),
`policy_version`, `prompt_token_ids`, `sampling` (the settings of the request by the names of
`types.Sampling`). The choices of one body are one group unless `group_id` names another. An answer that was
aborted, or that has no finish reason, is left out.

Every turn of a conversation is read by the engine from its first token, so turn k has routes for all tokens
before it. The rows of earlier turns stay those of the forward pass that generated or first read their tokens;
only the last token of each earlier turn had no row of its own until the next turn read it.

Shapes: T_k tokens up to the end of turn k, prompt included; routes [T_k - 1, L, K].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.data.columns import converted
from olmo_rl.data.json_lines import parse_line
from olmo_rl.data.metadata import sampling_of
from olmo_rl.rollouts.importers.foreign import ForeignSample, ReadOptions, located, text_of, unknown_fields
from olmo_rl.rollouts.versions import version_of
from olmo_rl.rollouts.wire import Completion, RouteAxis, completions_of
from olmo_rl.types import Kind, Refusal, Sampling

RECORD = (
    "response",
    "turns",
    "sample_id",
    "group_id",
    "reward",
    "policy_version",
    "prompt_token_ids",
    "prompt",
    "sampling",
)
FINISHED = ("stop", "length", "tool_calls")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JoinedTurns:
    """All turns as per-token arrays: `tokens` int32 [T], `response_mask` bool [T] (one span a turn),
    `logprobs` float32 [T] (0 outside the spans), `routes` [T-1, L, K] or None where any turn lacks them.
    `unfinished`: the finish reasons of turns that did not end by themselves or at their limit.
    """

    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    routes: NDArray[np.integer] | None
    finish_reason: str | None
    unfinished: tuple[str | None, ...]
    policy_version: int | None
    surplus_rows: int


def join_turns(turns: Sequence[Completion], *, where: str = "conversation") -> JoinedTurns:
    """One conversation from its turns in order; each prompt must continue everything before it, id by id."""
    if not turns:
        raise Refusal(f"{where}: no turns")
    so_far = np.zeros(0, dtype=np.int32)
    mask: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    routes: list[NDArray[np.integer]] = []
    for number, turn in enumerate(turns):
        if len(turn.prompt) < len(so_far) or (turn.prompt[: len(so_far)] != so_far).any():
            raise Refusal(
                f"{where}: turn {number} does not continue the tokens of turn {number - 1}: text was encoded "
                "again, or history was rewritten; import such turns as samples of their own"
            )
        read = len(turn.prompt) - len(so_far)
        mask.append(np.repeat([False, True], [read, len(turn.tokens)]))
        logprobs.append(np.concatenate([np.zeros(read, dtype=np.float32), turn.logprobs]))
        if turn.routes is not None:
            routes.append(turn.routes[max(0, len(so_far) - 1) :])
        so_far = np.concatenate([turn.prompt, turn.tokens])
    recorded = len(routes) == len(turns)
    routes = [part for part in routes if len(part)] or routes[:1]
    if len({part.shape[1:] for part in routes}) > 1:
        axes = ", ".join(str(part.shape[1:]) for part in routes)
        raise Refusal(f"{where}: routes of the turns have (layers, top_k) {axes}: record all turns alike")
    versions = [turn.policy_version for turn in turns if turn.policy_version is not None]
    return JoinedTurns(
        tokens=so_far,
        response_mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        routes=np.concatenate(routes) if recorded else None,
        finish_reason=turns[-1].finish_reason,
        unfinished=tuple(turn.finish_reason for turn in turns if turn.finish_reason not in FINISHED),
        policy_version=min(versions) if len(versions) == len(turns) else None,
        surplus_rows=sum(turn.surplus_rows for turn in turns),
    )


def read_completions(path: Path, *, options: ReadOptions) -> Iterator[ForeignSample]:
    """Every choice of every line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}: not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        record = parse_line(line, where=where)
        if not isinstance(record, Mapping):
            raise Refusal(f"{where}: {type(record).__name__} instead of an object")
        wrapped = "response" in record or "turns" in record
        with located(where):
            if "response" in record and "turns" in record:
                raise Refusal("response and turns exclude each other: keep one of them")
            yield from _line(
                record if wrapped else {"response": record}, where=where, line=number, axis=options.axis
            )


def _line(
    record: Mapping[str, Any], *, where: str, line: int, axis: RouteAxis | None
) -> Iterator[ForeignSample]:
    if "turns" in record:
        if record.get("prompt_token_ids") is not None:
            raise Refusal("prompt_token_ids beside turns: each turn has its own, move them into its answer")
        answers = [
            _only(body, axis=axis, where=f"{where}, turn {i}") for i, body in enumerate(_turns(record))
        ]
        samples = [join_turns(answers, where=where)]
    else:
        prompt = record.get("prompt_token_ids")
        found = completions_of(record["response"], axis=axis, prompt=prompt, where=where)
        samples = [join_turns([one], where=where) for one in found]
        if not samples:
            yield ForeignSample(where=where, left_out="no choices")
    body = record["turns"][0] if "turns" in record else record["response"]
    name, alone = _name(record, body=body, line=line), len(samples) == 1
    given = record.get("sampling")
    sampling = Sampling() if given is None else sampling_of(given, where=where)
    for number, sample in enumerate(samples):
        at = where if alone else f"{where}, choice {number}"
        group = record.get("group_id")
        version = record.get("policy_version")
        if version is not None and version_of(version) is None:
            raise Refusal(f"policy_version is {version!r:.80}: it counts optimizer steps, from 0")
        yield ForeignSample(
            where=at,
            values={
                "id": name if alone else f"{name}:{number}",
                "group": name if group is None and not alone else group,
                "tokens": sample.tokens,
                "response_mask": sample.response_mask,
                "behavior_logprobs": np.where(sample.response_mask, sample.logprobs, np.float32(0)),
                "reward": _reward(record, number=number, count=len(samples), where=at),
                "routes": sample.routes,
                "policy_version": sample.policy_version if version is None else version_of(version),
                "finish_reason": sample.finish_reason,
                "prompt": text_of(record.get("prompt")),
            },
            sampling=sampling,
            surplus_rows=sample.surplus_rows,
            left_out=_why_left_out(sample),
            ignored=unknown_fields(record, known=RECORD),
        )


def _turns(record: Mapping[str, Any]) -> list[Any]:
    turns = record["turns"]
    if not isinstance(turns, list):
        raise Refusal(f"turns is {type(turns).__name__}, expected a list")
    return turns


def _only(body: Any, *, axis: RouteAxis | None, where: str) -> Completion:
    """The one answer of a turn."""
    found = completions_of(body, axis=axis, where=where)
    if len(found) != 1:
        raise Refusal(f"{where}: {len(found)} choices, expected one")
    return found[0]


def _why_left_out(sample: JoinedTurns) -> str | None:
    if not sample.response_mask.any():
        return "no response"
    if sample.unfinished:
        return f"finish reason {sample.unfinished[0]}"
    return None


def _name(record: Mapping[str, Any], *, body: Any, line: int) -> str:
    if record.get("sample_id") is not None:
        return str(converted(record["sample_id"], kind=Kind.name, name="sample_id"))
    given = body.get("id") if isinstance(body, Mapping) else None
    return str(given) if given is not None else f"line-{line}"


def _reward(record: Mapping[str, Any], *, number: int, count: int, where: str) -> Any:
    reward = record.get("reward")
    if not isinstance(reward, list):
        return reward
    if len(reward) != count:
        raise Refusal(f"{where}: {len(reward)} rewards for {count} choices")
    return reward[number]
