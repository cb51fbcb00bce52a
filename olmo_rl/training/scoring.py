"""When the policy anchor comes from a scoring pass of its own, and whether the training forward agrees with
it.

A skipped pass is legal with one optimizer step per collection, no reference pass and no dropout: the anchor
then is the training forward itself. The first update of each process and every `scoring.check_interval`
updates run both and compare them before the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from olmo_rl.config import Config
from olmo_rl.data.packs import Pack, RouteMode
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.loss import scored_slots
from olmo_rl.training.strategy import ExpertParallelStrategy


class Decision(Enum):
    """The scoring of one optimizer update; every optimizer record carries it."""

    checked = "checked"
    skipped = "skipped"
    standalone = "standalone"


@dataclass(kw_only=True, slots=True)
class ScoringSchedule:
    """Counts the updates of this process. Packs do not count as updates; resuming starts at the first update
    again.
    """

    config: Config
    updates: int = 0

    def decide(self, *, steps_in_collection: int) -> Decision:
        """The decision for the next update; call once per update."""
        update, self.updates = self.updates, self.updates + 1
        if self.config.scores_separately(steps_in_collection=steps_in_collection):
            return Decision.standalone
        interval = self.config.scoring.check_interval
        if update == 0 or (interval > 0 and update % interval == 0):
            return Decision.checked
        return Decision.skipped


def score_pack(
    pack: Pack,
    *,
    strategy: ExpertParallelStrategy,
    mode: RouteMode,
    decoder: HybridDecoder | None = None,
) -> Tensor:
    """Log-probs [S] of the pack's scored slots by the present policy, or by `decoder`, without gradients."""
    slots = scored_slots(pack)
    with torch.no_grad():
        logprobs = strategy.forward_pack(pack, mode=mode, slots=slots, decoder=decoder).logprobs
    assert logprobs is not None, "a forward with slots gives log-probs"
    return logprobs
