"""Reward functions that processes import by name; nothing heavy is imported here."""

from __future__ import annotations


def rank_in_group(responses: list[str]) -> list[float]:
    """The share of responses that are shorter."""
    return [sum(len(r) < len(own) for r in responses) / len(responses) for own in responses]


def is_unique(response: str, responses: list[str]) -> bool:
    return responses.count(response) == 1
