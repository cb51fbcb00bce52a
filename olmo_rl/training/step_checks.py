"""What ends a run before a step: losses that are not finite, forwards that disagree, an engine that does.

These are guards that the configuration sets (`loss.on_nonfinite`, `scoring.tolerance`,
`scoring.max_behavior_gap`), so a run that trips one ends as a refusal: exit code 2, what, where (sample ids)
and what to change, no traceback. Whether one trips follows from sums over all ranks, so all ranks refuse
alike and nobody waits; only then are ids gathered, which every rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from olmo_rl.config import Config
from olmo_rl.training.measures import PackMeasures, StepTotals
from olmo_rl.training.scoring import Decision
from olmo_rl.types import Refusal

Gather = Callable[[object], list[Any]]

_NAMED = 16  # sample ids in one message


def nonfinite(
    totals: StepTotals,
    *,
    norm: float,
    measures: Sequence[PackMeasures],
    update: int,
    skips_in_a_row: int,
    gather: Gather,
) -> Refusal:
    """Why the run ends at an update whose loss or gradient is not finite. A collective of all ranks."""
    mine = [id for one in measures for id in one.suspects]
    suspects = [id for part in gather(mine) for id in part]
    where = f"samples {_named(suspects)}" if suspects else "the gradient only, every loss was finite"
    advice = (
        f"loss.on_nonfinite=skip gave up after {skips_in_a_row} such updates in a row, raise batch.max_skips "
        "or look at these samples"
        if skips_in_a_row > 0
        else "loss.on_nonfinite=abort ends here, loss.on_nonfinite=skip would count such updates and go on"
    )
    return Refusal(
        f"update {update}: loss {totals.loss}, gradient norm {norm}: {where}. Nothing was stepped; {advice}"
    )


def refuse_disagreement(
    totals: StepTotals,
    *,
    measures: Sequence[PackMeasures],
    decision: Decision,
    update: int,
    config: Config,
    gather: Gather,
) -> None:
    """End the run where the training forward disagrees with the scoring pass, or the engine with the trainer.
    A collective of all ranks where it does, nothing else where it does not.
    """
    scoring = config.scoring
    drift, gap = totals.mean_drift, totals.mean_gap
    if decision is Decision.checked and drift is not None and not drift <= scoring.tolerance:
        worst = _worst(measures, values=[one.drift for one in measures], gather=gather)
        raise Refusal(
            f"update {update}: training forward and scoring pass differ by {drift:.3g} in the "
            f"mean, scoring.tolerance={scoring.tolerance}: nothing was stepped. Most in samples {worst}. Set "
            "scoring.mode=always to train on a separate pass, and report this: both ran the same packs"
        )
    if scoring.max_behavior_gap is not None and gap is not None and not gap <= scoring.max_behavior_gap:
        worst = _worst(measures, values=[one.gap for one in measures], gather=gather)
        raise Refusal(
            f"update {update}: engine agreement: mean |policy - behaviour| {gap:.3g} exceeds "
            f"scoring.max_behavior_gap={scoring.max_behavior_gap}: nothing was stepped. Most in samples "
            f"{worst}. Check that the engine has this run's weights and records log-probs at "
            "rollouts.temperature, or raise the bound"
        )


def _worst(measures: Sequence[PackMeasures], *, values: Sequence[Tensor], gather: Gather) -> str:
    """Samples of all ranks by their mean of `values` [S] of each pack, largest first."""
    mine: list[tuple[float, str]] = []
    for one, value in zip(measures, values, strict=True):
        sums = value.new_zeros(one.slots.num_documents).index_add(0, one.slots.documents, value)
        counts = torch.bincount(one.slots.documents, minlength=one.slots.num_documents)
        means = (sums / counts.clamp(min=1)).tolist()
        mine += [(mean, id) for mean, id in zip(means, one.slots.ids, strict=False)]
    found = sorted((pair for part in gather(mine) for pair in part), key=lambda pair: (-pair[0], pair[1]))
    return _named([f"{id} ({mean:.3g})" for mean, id in found])


def _named(ids: Sequence[str]) -> str:
    """The first ids in words, and how many there are beyond them."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(ids[:_NAMED]) + more
