"""Answers of vLLM and SGLang kept as JSON lines: bodies of completions, or records around them.

A line is an answer body as `wire.py` reads them, or a record {"response": body} or {"turns": [body, ...]}
with, beside it, `sample_id`, `group_id`, `reward` (one number, or a list with one for every choice),
`policy_version`, `prompt_token_ids`. The choices of one body are one group unless `group_id` says otherwise.
Read in: vLLM 0.21 and 0.22, SGLang 0.5.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from olmo_rl.rollouts.found import FoundSample, nothing, number_of, text_of, unknown_fields
from olmo_rl.rollouts.turns import Conversation, join_turns
from olmo_rl.rollouts.wire import RouteAxis, completions_of, version_of
from olmo_rl.types import Refusal

RECORD = (
    "response",
    "turns",
    "sample_id",
    "group_id",
    "reward",
    "policy_version",
    "prompt_token_ids",
    "prompt",
)


def read_completions(path: Path, *, axis: RouteAxis | None, reward_key: str | None) -> Iterator[FoundSample]:
    """Every choice of every line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}: not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{where}: not a JSON value (is the line cut?): {error}") from None
        if not isinstance(record, Mapping):
            raise Refusal(f"{where}: {type(record).__name__} instead of an object")
        wrapped = "response" in record or "turns" in record
        yield from _line(
            record if wrapped else {"response": record},
            where=where,
            line=number,
            axis=axis,
            reward_key=reward_key,
        )


def _line(
    record: Mapping[str, Any], *, where: str, line: int, axis: RouteAxis | None, reward_key: str | None
) -> Iterator[FoundSample]:
    prompt = record.get("prompt_token_ids")
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list):
            raise Refusal(f"{where}: turns is {type(turns).__name__}, expected a list")
        answers = [
            completions_of(body, axis=axis, where=f"{where}, turn {i}") for i, body in enumerate(turns)
        ]
        several = [i for i, answer in enumerate(answers) if len(answer) != 1]
        if several:
            raise Refusal(f"{where}: turn {several[0]} has {len(answers[several[0]])} choices, expected one")
        samples = [join_turns([answer[0] for answer in answers], where=where)]
    else:
        found = completions_of(record["response"], axis=axis, prompt=prompt, where=where)
        samples = [join_turns([one], where=where) for one in found]
    body = record["turns"][0] if "turns" in record else record["response"]
    name = _name(record, body=body, line=line)
    for number, sample in enumerate(samples):
        at = where if len(samples) == 1 else f"{where}, choice {number}"
        yield _found(
            sample,
            record,
            id=name if len(samples) == 1 else f"{name}:{number}",
            group=str(record["group_id"]) if record.get("group_id") is not None else None,
            alone=len(samples) == 1,
            body_name=name,
            reward=_reward(record, number=number, count=len(samples), key=reward_key, where=at),
            replayed=axis is not None,
            where=at,
        )


def _name(record: Mapping[str, Any], *, body: Any, line: int) -> str:
    if record.get("sample_id") is not None:
        return str(record["sample_id"])
    given = body.get("id") if isinstance(body, Mapping) else None
    return str(given) if given is not None else f"line-{line}"


def _reward(
    record: Mapping[str, Any], *, number: int, count: int, key: str | None, where: str
) -> float | None:
    reward = record.get("reward")
    if isinstance(reward, list):
        if len(reward) != count:
            raise Refusal(f"{where}: {len(reward)} rewards for {count} choices")
        reward = reward[number]
    return number_of(reward, key=key, name="reward", where=where)


def _found(
    sample: Conversation,
    record: Mapping[str, Any],
    *,
    id: str,
    group: str | None,
    alone: bool,
    body_name: str,
    reward: float | None,
    replayed: bool,
    where: str,
) -> FoundSample:
    if not sample.response_mask.any():
        return nothing(where, reason="no response")
    version = version_of(record.get("policy_version"))
    version = sample.policy_version if version is None else version
    if group is None and not alone:
        group = body_name
    lacks = [
        name
        for name, value in (("group_id", group), ("reward", reward), ("weight_version", version))
        if value is None
    ]
    if replayed and sample.routes is None:
        lacks.append("routed_experts")
    return FoundSample(
        where=where,
        id=id,
        group=group,
        tokens=sample.tokens,
        response_mask=sample.response_mask,
        logprobs=np.where(sample.response_mask, sample.logprobs, np.float32(0)),
        reward=reward,
        routes=sample.routes,
        surplus_rows=sample.surplus_rows,
        policy_version=version,
        finish_reason=sample.finish_reason,
        prompt=text_of(record.get("prompt")),
        lacks=lacks,
        ignored=unknown_fields(record, known=RECORD),
    )
