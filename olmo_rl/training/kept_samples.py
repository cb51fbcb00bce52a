"""Which samples of an update a run keeps for people to read, and how their log-prob gaps reach every rank.

The choice follows from the samples alone, which every rank has, so that all ranks agree without a word. The
gaps of a sample lie on the rank that packed it: they travel as a block of the update's one sum over ranks, in
which each rank fills in its own. Shapes: S scored slots of a pack, N kept tokens of all kept samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from olmo_rl.types import Sample

MOST_TOKENS = 1024  # of one response that are kept token by token


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSamples:
    """The kept samples of an update: their `positions` among its samples, and `scored`: how many of the kept
    tokens of each are scored.
    """

    positions: tuple[int, ...]
    scored: tuple[int, ...]

    @staticmethod
    def of(samples: Sequence[Sample], *, count: int) -> KeptSamples:
        """Keep `count` samples, evenly over their order by reward, with the lowest and the highest one."""
        positions = chosen([sample.reward for sample in samples], count=count)
        return KeptSamples(
            positions=positions, scored=tuple(len(scored_places(samples[place])) for place in positions)
        )

    def block(self, differences: Mapping[str, Tensor], *, samples: Sequence[Sample]) -> Tensor:
        """float64 [N]: `differences` [tokens] of the samples that this rank packed, by id; 0 elsewhere."""
        parts = []
        for place, count in zip(self.positions, self.scored, strict=True):
            found = differences.get(samples[place].id)
            parts.append(torch.zeros(count, dtype=torch.float64) if found is None else found[:count].cpu())
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def split(self, block: Tensor) -> tuple[list[float], ...]:
        """The kept gaps of each sample, in order of its scored tokens, from a block that ranks added up."""
        return tuple(part.tolist() for part in block.split(list(self.scored)))


def chosen(rewards: Sequence[float], *, count: int) -> tuple[int, ...]:
    """Positions of `count` rewards, evenly over their order; all where there are fewer. Unknown rewards come
    first, equal ones in order of arrival.
    """
    order = sorted(range(len(rewards)), key=lambda i: rewards[i] if math.isfinite(rewards[i]) else -math.inf)
    if len(order) <= count:
        return tuple(order)
    if count == 1:
        return (order[-1],)
    return tuple(order[round(i * (len(order) - 1) / (count - 1))] for i in range(count))


def kept_span(sample: Sample) -> slice:
    """The tokens of a sample that are kept one by one: from the first generated one, `MOST_TOKENS` of
    them.
    """
    start = int(np.argmax(sample.response_mask)) if sample.response_mask.any() else len(sample)
    return slice(start, min(len(sample), start + MOST_TOKENS))


def scored_places(sample: Sample) -> list[int]:
    """The kept tokens that are scored, counted from the first kept one."""
    places: list[int] = np.flatnonzero(sample.scored[kept_span(sample)]).tolist()
    return places


def differences_of(
    ids: Sequence[str], difference: Tensor, *, samples: Mapping[str, Sample], wanted: set[str]
) -> dict[str, Tensor]:
    """The parts of `difference` [S] of one pack that belong to the wanted samples, by id. The slots of a pack
    lie document by document, so that the host knows where each begins.
    """
    if wanted.isdisjoint(ids):
        return {}
    found, start = {}, 0
    for id in ids:
        count = int(samples[id].scored.sum())
        if id in wanted:
            found[id] = difference[start : start + count]
        start += count
    return found
