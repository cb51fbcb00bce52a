"""The objective once more, in float64, one document at a time and one token at a time. Imports nothing of
olmo_rl.

Torch serves only as a calculator with derivatives: every tensor below is a scalar taken from a document's
logits. Settings come as a plain dictionary with the names of `loss.*`; a missing name means that the setting
is off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class OracleDocument:
    """One sample alone: `logits` [T, V] float64 with gradients; every list has an entry for each of the T
    tokens."""

    tokens: list[int]
    logits: Tensor
    mask: list[bool]
    anchor: list[float]
    behavior: list[float]
    reference: list[float]
    advantage: float

    def scored(self) -> list[int]:
        return [t for t in range(len(self.tokens)) if self.mask[t] and t > 0]


def number(x: Any) -> float:
    return float(x.detach()) if isinstance(x, Tensor) else float(x)


def log_probability(document: OracleDocument, t: int) -> Tensor:
    """log p(token t | tokens before t), from the logits of the row before it."""
    row = document.logits[t - 1]
    largest = max(float(x) for x in row.detach())
    total: Any = 0.0
    for x in row:
        total = total + torch.exp(x - largest)
    return row[document.tokens[t]] - largest - torch.log(total)


def entropy(document: OracleDocument, t: int) -> Tensor:
    row = document.logits[t - 1]
    total: Any = 0.0
    for x in row:
        total = total + torch.exp(x)
    result: Any = 0.0
    for x in row:
        result = result - torch.exp(x) / total * torch.log(torch.exp(x) / total)
    return result


def clip(x: Any, low: float, high: float) -> Any:
    if number(x) < low:
        return torch.tensor(low, dtype=torch.float64)
    if number(x) > high:
        return torch.tensor(high, dtype=torch.float64)
    return x


def surrogate(document: OracleDocument, t: int, *, settings: dict[str, Any]) -> Any:
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    advantage, kind = document.advantage, settings["kind"]
    policy = log_probability(document, t)
    if kind == "cispo":
        weight = min(max(math.exp(number(policy) - document.anchor[t]), low), high)
        return -weight * advantage * policy
    if kind == "gspo":
        total: Any = 0.0
        for u in document.scored():
            total = total + log_probability(document, u) - document.anchor[u]
        ratio = torch.exp(total / len(document.scored()))
    else:
        ratio = torch.exp(policy - document.anchor[t])
    plain, clipped = ratio * advantage, clip(ratio, low, high) * advantage
    loss = -plain if number(plain) < number(clipped) else -clipped
    bound = settings.get("dual_clip")
    if bound is not None and advantage < 0 and number(loss) > -bound * advantage:
        loss = torch.tensor(-bound * advantage, dtype=torch.float64)
    return loss


def importance(document: OracleDocument, t: int, *, settings: dict[str, Any]) -> float:
    low, high = settings.get("tis_low"), settings.get("tis_high")
    if low is None and high is None:
        return 1.0
    if settings.get("tis_level") == "sequence":
        weight = 1.0
        for u in document.scored():
            weight *= math.exp(document.anchor[u] - document.behavior[u])
    else:
        weight = math.exp(document.anchor[t] - document.behavior[t])
    masks = settings.get("tis_bound") == "mask"
    if low is not None and weight < low:
        return 0.0 if masks else low
    if high is not None and weight > high:
        return 0.0 if masks else high
    return weight


def keeps(document: OracleDocument, *, settings: dict[str, Any]) -> bool:
    limit = settings.get("max_sequence_kl")
    if limit is None or document.advantage >= 0:
        return True
    drift = 0.0
    for t in document.scored():
        drift += document.behavior[t] - number(log_probability(document, t))
    return drift / len(document.scored()) <= limit


def divergence(document: OracleDocument, t: int, *, settings: dict[str, Any]) -> Any:
    d = log_probability(document, t) - document.reference[t]
    return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[settings.get("kl", "k3")]


def token_objective(document: OracleDocument, t: int, *, settings: dict[str, Any]) -> Any:
    loss: Any = torch.zeros((), dtype=torch.float64)
    if keeps(document, settings=settings):
        loss = surrogate(document, t, settings=settings) * importance(document, t, settings=settings)
    if settings.get("kl_coef", 0.0):
        loss = loss + settings["kl_coef"] * divergence(document, t, settings=settings)
    if settings.get("entropy_coef", 0.0):
        loss = loss - settings["entropy_coef"] * entropy(document, t)
    return loss


def reduce(values: list[list[Any]], *, settings: dict[str, Any]) -> Any:
    """Per-token values of each document -> one number. Documents without a scored token count nowhere."""
    active = [document for document in values if document]
    total: Any = torch.zeros((), dtype=torch.float64)
    if settings["reduction"] == "token":
        count = 0
        for document in active:
            for value in document:
                total, count = total + value, count + 1
        return total / count if count else total
    for document in active:
        inner: Any = 0.0
        for value in document:
            inner = inner + value
        total = total + inner / (settings.get("constant_length") or len(document))
    return total / len(active) if active else total


def policy_objective(documents: list[OracleDocument], *, settings: dict[str, Any]) -> Any:
    """The step's loss."""
    values = [
        [token_objective(document, t, settings=settings) for t in document.scored()] for document in documents
    ]
    return reduce(values, settings=settings)


def cross_entropy(documents: list[OracleDocument], *, settings: dict[str, Any]) -> Any:
    values = [[-log_probability(document, t) for t in document.scored()] for document in documents]
    return reduce(values, settings=settings)


def group_advantages(rewards: list[float], groups: list[str], *, normalize: bool) -> list[float]:
    """Advantages by definition; a reward that is NaN gets 0 and is nowhere counted."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward) or len(set(peers)) < 2:
            result.append(0.0)
            continue
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in peers) / len(peers))
        result.append((reward - mean) / (deviation if normalize else 1.0))
    return result


def rloo_advantages(
    rewards: list[float], groups: list[str], *, votes: list[bool] | None = None
) -> list[float]:
    """Reward minus the mean of all other voters of the group; NaN rewards get 0 and do not vote."""
    voting = [True] * len(rewards) if votes is None else votes
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [
            rewards[j]
            for j in range(len(rewards))
            if j != i and groups[j] == group and voting[j] and not math.isnan(rewards[j])
        ]
        known = not math.isnan(reward) and bool(others)
        result.append(reward - math.fsum(others) / len(others) if known else 0.0)
    return result


def batch_advantages(rewards: list[float], *, votes: list[bool] | None = None) -> list[float]:
    """Reward minus the mean of all voters over their population deviation, two passes."""
    voting = [True] * len(rewards) if votes is None else votes
    voters = [r for r, votes_too in zip(rewards, voting, strict=True) if votes_too and not math.isnan(r)]
    if len(set(voters)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(voters) / len(voters)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in voters) / len(voters))
    return [0.0 if math.isnan(r) else (r - mean) / deviation for r in rewards]
