"""Every configuration that we refuse, as one table, and the walk over it.

All refusals of a configuration are reported at once, one line each: the keys with their values, what is wrong
with them, what to change. Rows judge the configured device and topology, not this machine's; the few that
read the disk say so. What only data can break (a sample longer than the budget, missing routes) is refused by
those who read data. `python -m olmo_rl.refusals` prints the table as markdown, a page of the documentation.
No torch here: a login node can refuse.
"""

from __future__ import annotations

from olmo_rl.config import Config, Recipe
from olmo_rl.refusals.batches import BALANCE, BATCH, PACKING
from olmo_rl.refusals.computing import POLICY
from olmo_rl.refusals.exports import EXPORTS
from olmo_rl.refusals.imports import IMPORTS
from olmo_rl.refusals.rollouts import ROLLOUTS
from olmo_rl.refusals.rule import Rule
from olmo_rl.refusals.runs import LOSS, RUN, TASK, run_files
from olmo_rl.refusals.shapes import MODEL, NUMBERS, RANKS
from olmo_rl.refusals.supervised import SFT
from olmo_rl.refusals.upcycling import UPCYCLE

__all__ = ["RULES", "Rule", "markdown", "refusals", "run_files"]

RULES: tuple[Rule, ...] = (
    *NUMBERS,
    *MODEL,
    *RANKS,
    *BATCH,
    *PACKING,
    *BALANCE,
    *ROLLOUTS,
    *POLICY,
    *LOSS,
    *TASK,
    *SFT,
    *RUN,
    *IMPORTS,
    *EXPORTS,
    *UPCYCLE,
)


def refusals(config: Config) -> list[str]:
    """One line for every row that `config` breaks. recipe=plan walks only the rows that concern planning."""
    rules = [rule for rule in RULES if rule.planning or config.recipe is not Recipe.plan]
    return [line for rule in rules if (line := rule.check(config)) is not None]


def markdown() -> str:
    """The table as markdown, one line a row; the last column marks what recipe=plan refuses too."""
    lines = ["| keys | refused | change | plan |", "|---|---|---|---|"]
    for rule in RULES:
        keys = ", ".join(f"`{key}`" for key in rule.keys)
        lines.append(f"| {keys} | {rule.refuses} | {rule.fix} | {'yes' if rule.planning else ''} |")
    return "\n".join(lines)
