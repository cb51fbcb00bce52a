"""Checks between an engine's answer and a sample: what files must satisfy, an answer must satisfy too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from olmo_rl.data.validation import LARGEST_LOGPROB, check_tokens, checked_routes
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.exchange import AbortedRequest, EngineFault
from olmo_rl.rollouts.wire import Completion, RouteAxis, completions_of
from olmo_rl.types import Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The properties of every right answer: `axis` None = routes are not read, `vocab_size` None = any id."""

    axis: RouteAxis | None
    vocab_size: int | None

    def most_bytes(self, tokens: int) -> int:
        """Bytes that an answer of `tokens` tokens, prompt included, has at most: text, log-probs, ids,
        routes.
        """
        routes = 0 if self.axis is None else max(self.axis.layers) * self.axis.top_k
        return 2**20 + tokens * (2048 + 16 * routes)


def fitting_answer(body: Any, *, request: Request, max_tokens: int, wanted: Wanted) -> Completion:
    """The one completion that answers `request`, with routes of the routed layers alone; EngineFault where
    there is none, or another, or a part.
    """
    try:
        found = completions_of(body, axis=wanted.axis, prompt=request.tokens)
        if len(found) != 1:
            raise EngineFault(f"answer: {len(found)} completions for one request")
        return _checked(found[0], request=request, max_tokens=max_tokens, wanted=wanted)
    except Refusal as refusal:
        raise EngineFault(str(refusal)) from None


def _checked(completion: Completion, *, request: Request, max_tokens: int, wanted: Wanted) -> Completion:
    if completion.finish_reason == "abort":
        raise AbortedRequest("answer: finish_reason 'abort'")
    if completion.finish_reason not in ("stop", "length"):
        raise EngineFault(f"answer: finish_reason {completion.finish_reason!r}")
    if not 0 < len(completion.tokens) <= max_tokens:
        raise EngineFault(f"answer: {len(completion.tokens)} tokens, asked for 1 to {max_tokens}")
    check_tokens(completion.tokens, vocab_size=wanted.vocab_size)
    if not np.isfinite(completion.logprobs).all():
        raise EngineFault("answer: a log-prob that is not finite")
    if (completion.logprobs > LARGEST_LOGPROB).any():
        raise EngineFault(f"answer: log-prob {completion.logprobs.max():g}, a probability above 1")
    if wanted.axis is not None:
        if completion.routes is None:
            raise EngineFault(
                "answer: no routed experts: start the engine with --enable-return-routed-experts"
            )
        checked_routes(
            wanted.axis.routed(completion.routes),
            tokens=len(completion.prompt) + len(completion.tokens),
            layout=wanted.axis.layout,
        )
    return completion


def generation_of(
    completion: Completion, *, request: Request, version: int | None, wanted: Wanted
) -> Generation:
    """The answer as a sample: as old as `version`, its engine's at the start, or older if it reports so; 0
    where nothing was published to an engine that names no version either.
    """
    versions = [v for v in (version, completion.policy_version) if v is not None] or [0]
    routes, axis = completion.routes, wanted.axis
    return Generation(
        id=request.id,
        tokens=np.concatenate([completion.prompt, completion.tokens]),
        logprobs=completion.logprobs,
        routes=None if routes is None or axis is None else axis.routed(routes),
        finish_reason=completion.finish_reason or "length",
        policy_version=min(versions),
        token_versions=completion.token_versions,
    )
