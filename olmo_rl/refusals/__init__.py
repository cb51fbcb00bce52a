"""Every rule that a configuration must keep, and the check of all of them.

All broken rules of a configuration are reported at once, one line each: the keys with their values, the
reason, the change. Rules judge the configured device and topology, not this machine's; the few that read the
disk are marked. Errors that only data can cause (a sample longer than the budget, missing routes) are
reported by the code that reads data. Bounds and conditions of single keys are generated from config.py; the
modules here relate several keys. No torch: a login node can check a configuration.
"""

from __future__ import annotations

from olmo_rl.config import Config, Recipe
from olmo_rl.refusals.batches import BALANCE, BATCH, CONTINUOUS, PACKING, ROLLOUTS
from olmo_rl.refusals.computing import COMPUTING
from olmo_rl.refusals.environments import ENVIRONMENT
from olmo_rl.refusals.rule import Rule, generated
from olmo_rl.refusals.runs import LOSS, RUN, TASK
from olmo_rl.refusals.shapes import MODEL, RANKS, UPCYCLE

GENERATED: tuple[Rule, ...] = generated()
WRITTEN: tuple[Rule, ...] = (
    *MODEL,
    *RANKS,
    *BATCH,
    *PACKING,
    *BALANCE,
    *ROLLOUTS,
    *CONTINUOUS,
    *COMPUTING,
    *LOSS,
    *TASK,
    *ENVIRONMENT,
    *RUN,
    *UPCYCLE,
)
RULES: tuple[Rule, ...] = (*GENERATED, *WRITTEN)


def refusals(config: Config) -> list[str]:
    """One line for every rule that `config` breaks; recipe=plan checks only those that concern planning."""
    rules = [rule for rule in RULES if rule.planning or config.recipe is not Recipe.plan]
    return [line for rule in rules if (line := rule.check(config)) is not None]
