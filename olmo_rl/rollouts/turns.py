"""Several answers of one conversation -> one sample. Owns what a later turn knows better than an earlier one.

Every turn is read by the engine from its first token, so turn k brings routes for all tokens before it. The
rows of earlier turns stay what they were when those tokens were generated or first read; only the last token
of each earlier turn had no row of its own until the next turn read it: that row is taken from there.

Shapes: T_k tokens up to the end of turn k, prompt included; routes [T_k - 1, L, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olmo_rl.rollouts.wire import Completion
from olmo_rl.types import Refusal


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Conversation:
    """All turns as per-token arrays: `tokens` int32 [T], `response_mask` bool [T] (one span a turn),
    `logprobs` float32 [T] (0 outside the spans), `routes` [T-1, L, K] or None where any turn lacks them.
    """

    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    routes: NDArray[np.integer] | None
    finish_reason: str | None
    policy_version: int | None
    surplus_rows: int


def join_turns(turns: Sequence[Completion], *, where: str = "conversation") -> Conversation:
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
    versions = [turn.policy_version for turn in turns if turn.policy_version is not None]
    return Conversation(
        tokens=so_far,
        response_mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        routes=np.concatenate(routes) if recorded else None,
        finish_reason=turns[-1].finish_reason,
        policy_version=min(versions) if len(versions) == len(turns) else None,
        surplus_rows=sum(turn.surplus_rows for turn in turns),
    )
