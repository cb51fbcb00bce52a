"""Faults of a run that only its own imports show: the user's callbacks and loggers, and the dense model."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

from olmo_rl.config import Config
from olmo_rl.policy.upcycling import refuse_misfits
from olmo_rl.running.trainer import extra_faults
from olmo_rl.types import Refusal


def code_faults(config: Config) -> list[str]:
    """One line for each; the dense model is read where everything else is right."""
    reasons = extra_faults(config.callbacks.extra, Callback, key="callbacks.extra")
    reasons += extra_faults(config.logger.extra, Logger, key="logger.extra")
    if reasons or config.upcycle.dense is None:
        return reasons
    try:
        refuse_misfits(config)
    except Refusal as refusal:
        return list(refusal.reasons)
    return []
