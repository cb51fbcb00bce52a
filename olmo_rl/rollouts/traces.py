"""Records of episodes -> samples. NumPy only.

A sample is one trainable branch of one agent's rollout: the tokens exactly as the engine read and wrote them,
never encoded again. Its response mask is true for the tokens that the policy wrote, in whichever turn; its
routes are those of every turn, so a token keeps the experts of the time when it was written, and the last
token, which was never read, has no row. A token that several branches share is trained in the first of them.
The version of a token is that of the engine's answer that wrote it, which the gateway noted; a sample counts
as old as its oldest.

Not trained, and counted: episodes and rollouts that failed, timed out or wrote nothing, and rollouts with a
token that no answer of the gateway accounts for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.data.validation import LARGEST_REWARD, checked_routes
from olmo_rl.rollouts.gateway import Slot, digest_of
from olmo_rl.types import ExpertLayout, Refusal, Sample

PREFIX = "environment"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One message: `tokens` int32 [T] that it adds, `mask` bool [T] of those that the policy wrote,
    `logprobs` float32 [number of them], `routes` [T, L, K] or None.
    """

    sampled: bool
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    routes: NDArray[np.integer] | None


@dataclass(kw_only=True, slots=True)
class Tally:
    """What became of episodes: `counts` by name, `values` of their metrics by rollout, `faults` with how
    often each occurred.
    """

    counts: Counter[str] = field(default_factory=Counter)
    values: dict[str, list[float]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)

    def counted(self) -> dict[str, float]:
        """Every count, by the name of its metric."""
        return {f"{PREFIX}/{name}": float(count) for name, count in self.counts.items()}

    def means(self) -> dict[str, float]:
        """Metrics of the environment, as means over the rollouts that have a value."""
        return {f"{PREFIX}/{name}": math.fsum(values) / len(values) for name, values in self.values.items()}


OUTCOMES = ("ok", "failed", "timeouts", "empty", "unaccounted")
COUNTED = ("episodes", *OUTCOMES, "rollouts", "branches", "turns", "truncated")


def samples_of(
    record: Mapping[str, Any],
    *,
    slot: Slot,
    group: str,
    agents: Sequence[str],
    layout: ExpertLayout | None,
    tally: Tally,
) -> list[Sample]:
    """The samples of one episode, in the order in which its rollouts first asked. `group`: of its task;
    where an environment has several `agents`, each has groups of its own.
    """
    for name in COUNTED:
        tally.counts[name] += name == "episodes"
    tally.faults.update(record["faults"])
    for trace in record["traces"]:
        tally.faults.update(trace["faults"])
    if not record["ok"]:
        tally.counts["timeouts" if record["timeout"] else "failed"] += 1
        return []
    traces = [trace for trace in record["traces"] if trace["trainable"]]
    traces.sort(key=lambda trace: slot.sessions[trace["id"]].place if trace["id"] in slot.sessions else -1)
    if any(trace["timeout"] for trace in traces):
        tally.counts["timeouts"] += 1
    samples: list[Sample] = []
    for number, trace in enumerate(traces):
        _describe(trace, tally=tally)
        if trace["timeout"] or not trace["ok"]:
            continue
        name = slot.name if len(traces) == 1 else f"{slot.name}-t{number}"
        own = group if len(agents) == 1 else f"{group}-{trace['agent']}"
        samples += _branches(trace, name=name, group=own, slot=slot, layout=layout, tally=tally)
    tally.counts["ok"] += bool(samples)
    return samples


def _describe(trace: Mapping[str, Any], *, tally: Tally) -> None:
    """Add one rollout's metrics."""
    counts = {"rollouts": 1, "turns": trace["turns"], "truncated": int(trace["truncated"]), **trace["tools"]}
    for name, count in counts.items():
        tally.counts[name] += count
    for name, value in trace["metrics"].items():
        if math.isfinite(value):
            tally.values.setdefault(f"metric/{name}", []).append(float(value))


def _branches(
    trace: Mapping[str, Any],
    *,
    name: str,
    group: str,
    slot: Slot,
    layout: ExpertLayout | None,
    tally: Tally,
) -> list[Sample]:
    nodes = [node_of(node) for node in trace["nodes"]]
    session = slot.sessions.get(trace["id"])
    branches = [branch["nodes"] for branch in trace["branches"] if branch["trainable"]]
    branches = [path for path in branches if any(nodes[place].mask.any() for place in path)]
    tally.counts["branches"] += len(branches)
    if not branches or session is None:
        tally.counts["empty"] += 1
        return []
    trained: set[int] = set()
    samples = []
    for number, path in enumerate(branches):
        version = _oldest(path, nodes=nodes, versions=session.versions)
        if version is None:
            tally.counts["unaccounted"] += 1
            tally.faults["a token that no answer of the gateway accounts for"] += 1
            return []
        try:
            routes = _routes(path, nodes=nodes, layout=layout)
        except Refusal as refusal:
            raise Refusal(f"episode {name}: {refusal}") from None
        chosen = [nodes[place] for place in path]
        tokens = np.concatenate([node.tokens for node in chosen])
        mask = np.concatenate([node.mask for node in chosen])
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        logprobs[mask] = np.concatenate([node.logprobs for node in chosen])
        first = np.concatenate([np.full(len(nodes[p].tokens), p not in trained) for p in path])
        trained.update(path)
        samples.append(
            Sample(
                id=name if len(branches) == 1 else f"{name}-b{number}",
                group=group,
                episode=name,
                tokens=tokens,
                response_mask=mask,
                loss_mask=None if first[mask].all() else mask & first,
                behavior_logprobs=logprobs,
                reward=_reward(trace["reward"]),
                policy_version=version,
                routes=routes,
                finish_reason="length" if trace["truncated"] else "stop",
                prompt=trace["prompt"],
                response=trace["reply"],
            )
        )
    return samples


def _reward(value: float | None) -> float:
    """NaN where nothing judged the rollout, or no number that can be trained on came out."""
    if value is None or not math.isfinite(value) or abs(value) > LARGEST_REWARD:
        return math.nan
    return value


def _oldest(path: Sequence[int], *, nodes: Sequence[Node], versions: Mapping[bytes, int]) -> int | None:
    """The oldest version behind a branch; None where one of its turns is of no answer."""
    found: list[int] = []
    read = np.zeros(0, dtype=np.int32)
    for place in path:
        read = np.concatenate([read, nodes[place].tokens])
        if nodes[place].mask.any():
            version = versions.get(digest_of(read))
            if version is None:
                return None
            found.append(version)
    return min(found)


def _routes(
    path: Sequence[int], *, nodes: Sequence[Node], layout: ExpertLayout | None
) -> NDArray[np.integer] | None:
    """[T-1, L, K]: rows of every turn without the last token's; None where routes are not recorded."""
    if layout is None:
        return None
    parts = [nodes[place] for place in path if len(nodes[place].tokens)]
    tokens = sum(len(part.tokens) for part in parts)
    rows = [part.routes for part in parts if part.routes is not None]
    if len(rows) < len(parts) or sum(map(len, rows)) != tokens:
        raise Refusal("a turn without the experts of its tokens: does the engine record routes?")
    routes = np.concatenate(rows)[:-1]
    checked_routes(routes, tokens=tokens, layout=layout)
    return routes


def node_of(record: Mapping[str, Any]) -> Node:
    """One node of a record."""
    routes = record["routes"]
    return Node(
        sampled=record["sampled"],
        tokens=np.frombuffer(record["tokens"], dtype="<i4").astype(np.int32),
        mask=np.frombuffer(record["mask"], dtype=np.bool_),
        logprobs=np.frombuffer(record["logprobs"], dtype="<f8").astype(np.float32),
        routes=None
        if routes is None
        else np.frombuffer(routes["data"], dtype=routes["dtype"]).reshape(routes["shape"]),
    )
