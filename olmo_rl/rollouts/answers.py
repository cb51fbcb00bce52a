"""What counts as an answer to a request: the checks between a server's words and a sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from olmo_rl.data.validation import LARGEST_LOGPROB
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.wire import Completion, RouteAxis, completions_of
from olmo_rl.types import Refusal


class EngineFault(Exception):
    """One attempt failed at one engine; the request may succeed at another."""


def fitting_answer(body: Any, *, request: Request, max_tokens: int, axis: RouteAxis | None) -> Completion:
    """The one completion that answers `request`; EngineFault where there is none, or another, or a part."""
    try:
        found = completions_of(body, axis=axis, prompt=request.tokens)
    except Refusal as refusal:
        raise EngineFault(str(refusal)) from None
    if len(found) != 1:
        raise EngineFault(f"{len(found)} completions for one request")
    completion = found[0]
    if not 0 < len(completion.tokens) <= max_tokens:
        raise EngineFault(f"answer: {len(completion.tokens)} tokens, asked for 1 to {max_tokens}")
    if not np.isfinite(completion.logprobs).all():
        raise EngineFault("answer: a log-prob that is not finite")
    if (completion.logprobs > LARGEST_LOGPROB).any():
        raise EngineFault("answer: a log-prob above 0")
    if completion.finish_reason not in ("stop", "length"):
        raise EngineFault(f"answer: finish_reason {completion.finish_reason!r}")
    if axis is not None and completion.routes is None:
        raise EngineFault("answer: no routed experts: start the engine with --enable-return-routed-experts")
    return completion


def generation_of(
    completion: Completion, *, request: Request, version: int | None, axis: RouteAxis | None
) -> Generation:
    """The answer as a sample: as old as `version`, its engine's at the start, or older if it says so."""
    versions = [v for v in (version, completion.policy_version) if v is not None]
    assert versions, "an engine gets requests once its version is known"
    routes = completion.routes
    return Generation(
        id=request.id,
        tokens=np.concatenate([completion.prompt, completion.tokens]),
        logprobs=completion.logprobs,
        routes=None if routes is None or axis is None else axis.routed(routes),
        finish_reason=completion.finish_reason or "length",
        policy_version=min(versions),
    )
