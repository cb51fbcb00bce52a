"""How far every response is from the reference policy, for rewards that count it (`loss.kl_reward_coef`).

The divergence of a response is the sum over its trained tokens of behaviour minus reference log-prob, one
unbiased estimate of KL(behaviour | reference) in nats. Files that carry `ref_logprobs` give it without a
forward; else the frozen reference scores the samples as a collection is drawn, before there are steps.

Refuses samples whose reference differs from that of the others of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from olmo_rl.collections.pending import anchors_by_sample
from olmo_rl.collections.supervised import supervised_step
from olmo_rl.config import Config
from olmo_rl.training.frozen_reference import FrozenReference, check_recorded
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.transfer import moved
from olmo_rl.types import Sample


def divergences_of(
    samples: Sequence[Sample],
    *,
    config: Config,
    reference: FrozenReference | None,
    strategy: ExpertParallelStrategy,
) -> NDArray[np.float64]:
    """float64 [samples]: nats of every response. A collective of all ranks where a reference is asked."""
    check_recorded(samples, frozen=reference is not None)
    if not samples:
        return np.zeros(0)
    scores = (
        {} if reference is None else _scored(samples, config=config, reference=reference, strategy=strategy)
    )
    found = []
    for sample in samples:
        behaviour = sample.behavior_logprobs[sample.scored].astype(np.float64)
        if sample.ref_logprobs is not None:
            references = sample.ref_logprobs[sample.scored].astype(np.float64)
        else:
            references = scores[sample.id]
        found.append(float((behaviour - references).sum()))
    return np.array(found, dtype=np.float64)


def _scored(
    samples: Sequence[Sample],
    *,
    config: Config,
    reference: FrozenReference,
    strategy: ExpertParallelStrategy,
) -> dict[str, NDArray[np.float64]]:
    """Reference log-probs of the scored tokens by sample id; ranks share the samples."""
    # All ranks run as many samples: copies without a scored token fill up.
    missing = -len(samples) % strategy.topology.world_size
    last = samples[-1]
    copies = [
        replace(last, id=f"{last.id}+{i}", loss_mask=np.zeros(len(last), dtype=np.bool_))
        for i in range(missing)
    ]
    step = supervised_step([*samples, *copies], config=config, strategy=strategy)
    found = reference.score(moved(step.packs, device=strategy.root_device), strategy=strategy)
    mine = {
        id: values.double().numpy() for id, values in anchors_by_sample(step.packs, anchors=found).items()
    }
    return {id: values for part in strategy.gather_objects(mine) for id, values in part.items()}
