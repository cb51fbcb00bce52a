"""Refusals of recipe=export: what it needs named, and what has no effect without it."""

from __future__ import annotations

import math
from pathlib import Path

from olmo_rl.config import PublicationKind, Recipe
from olmo_rl.refusals.rollouts import engines
from olmo_rl.refusals.rule import Rule, changed, outside, under

EXPORTS: tuple[Rule, ...] = (
    Rule(
        keys=("recipe", "init_from"),
        refuses="weights to export are not named",
        fix="set init_from to a checkpoint of a run or a weights file",
        example=("recipe=export",),
        when=lambda c: c.recipe is Recipe.export and c.init_from is None,
    ),
    Rule(
        keys=("export.path",),
        refuses="no effect without recipe=export",
        fix="leave it at its default",
        example=("export.path=somewhere",),
        when=lambda c: c.recipe is not Recipe.export,
        select=changed,
    ),
    Rule(
        keys=under("export", "dtype shard_gib"),
        refuses="no effect: nothing is exported, and no engine is sent weights",
        fix="leave it at its default, or choose recipe=export, rollouts=vllm or rollouts=sglang",
        example=("export.shard_gib=1.0",),
        when=lambda c: c.recipe is not Recipe.export and not engines(c),
        select=changed,
    ),
    Rule(
        keys=("export.shard_gib",),
        refuses="no effect: broadcast weights are no files",
        fix="leave it at its default, or choose rollouts.publication=directory",
        example=(
            "rollouts=sglang",
            "rollouts.urls=[http://host:30000]",
            "rollouts.publication=collective",
            "export.shard_gib=1.0",
        ),
        when=lambda c: (
            c.recipe is not Recipe.export
            and engines(c)
            and c.rollouts.publication is PublicationKind.collective
        ),
        select=changed,
    ),
    Rule(
        keys=("export.path",),
        refuses="something is there already, which an export never replaces (read from disk)",
        fix="choose another directory, or remove that one",
        example=("recipe=export", "init_from={run}", "export.path={run}"),
        when=lambda c: c.export.path is not None and Path(c.export.path).exists(),
    ),
    Rule(
        keys=("export.shard_gib",),
        refuses="not a finite number above 0",
        fix="give one",
        example=("recipe=export", "init_from={run}", "export.shard_gib=0.0"),
        select=outside(0.0, math.inf),
    ),
)
