"""An episode of the library -> a plain record that crosses to the trainer: bytes, numbers, texts.

Objects of the library are read by attribute, so this module needs none of it. A node's tokens are those that
it adds to its conversation; log-probs are of its sampled tokens alone; routes have a row for each token, of
which a branch's last one was never read by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

SHOWN = 300  # characters of a reason


def episode_record(episode: Any, *, slot: int) -> dict[str, Any]:
    """The record of a finished episode, whatever became of it."""
    return {
        "slot": slot,
        "ok": bool(episode.ok),
        "timeout": bool(episode.is_timeout),
        "faults": [fault_of(error) for error in episode.errors],
        "traces": [trace_record(trace) for trace in episode.traces],
    }


def failed_record(slot: int, *, fault: str, timeout: bool = False) -> dict[str, Any]:
    """The record of an episode that ended without a trace."""
    return {"slot": slot, "ok": False, "timeout": timeout, "faults": [fault[:SHOWN]], "traces": []}


def trace_record(trace: Any) -> dict[str, Any]:
    """The record of one agent's rollout. `reward` None: nothing judged it."""
    branches = trace.branches
    place = {id(node): number for number, node in enumerate(trace.nodes)}
    judged = [reward for reward in trace.rewards.values() if reward is not None]
    return {
        "id": str(trace.id),
        "agent": str(trace.agent.name),
        "trainable": bool(trace.agent.trainable),
        "ok": bool(trace.ok),
        "timeout": bool(trace.is_timeout),
        "truncated": bool(trace.is_truncated),
        "faults": [fault_of(error) for error in trace.errors],
        "reward": float(trace.reward) if judged else None,
        "metrics": {str(name): float(value) for name, value in trace.metrics.items() if value is not None},
        "turns": int(trace.num_turns),
        "tools": {str(name): int(value) for name, value in trace.info.get("chat_loop", {}).items()},
        "prompt": str(trace.task.data.prompt_text),
        "reply": str(trace.last_reply),
        "nodes": [_node(node) for node in trace.nodes],
        "branches": [
            {"nodes": [place[id(node)] for node in branch.nodes], "trainable": bool(branch.trainable)}
            for branch in branches
        ],
    }


def fault_of(error: Any) -> str:
    """A failure in one line."""
    first = (str(error.message).strip().splitlines() or [""])[0]
    return f"{error.type}: {first}"[:SHOWN]


def _node(node: Any) -> dict[str, Any]:
    routes = node.routed_experts
    return {
        "sampled": bool(node.sampled),
        "tokens": np.asarray(node.token_ids, dtype="<i4").tobytes(),
        "mask": np.asarray(node.mask, dtype=np.bool_).tobytes(),
        "logprobs": np.asarray(node.logprobs, dtype="<f8").tobytes(),
        "routes": None if routes is None else array_record(routes),
    }


def array_record(array: Any) -> Mapping[str, Any]:
    """An array as bytes in C order."""
    whole = np.ascontiguousarray(array)
    return {"shape": list(whole.shape), "dtype": whole.dtype.str, "data": whole.tobytes()}
