"""Refusals of recipe=import: what it needs named, and what has no effect without it."""

from __future__ import annotations

import math
from pathlib import Path

from olmo_rl.config import Recipe
from olmo_rl.refusals.rule import Rule, below, changed, under

IMPORT = Recipe["import"]

IMPORTS: tuple[Rule, ...] = (
    Rule(
        keys=("recipe", "source", "path"),
        refuses="rollouts to import are not named",
        fix="set source to the system that recorded them and path to its file or directory",
        example=("recipe=import",),
        when=lambda c: c.recipe is IMPORT and (c.source is None or c.path is None),
    ),
    Rule(
        keys=("path",),
        refuses="no such file or directory (read from disk)",
        fix="give a file of that system, or a directory of them",
        example=("recipe=import", "source=miles", "path=/nowhere"),
        when=lambda c: c.recipe is IMPORT and c.path is not None and not Path(c.path).exists(),
    ),
    Rule(
        keys=(
            "source",
            "path",
            *under("imports", "reward_key default_reward group_size leave_out_bad_routes"),
        ),
        refuses="no effect without recipe=import",
        fix="leave it at its default; rollouts=files rollouts.path reads our own files",
        example=("imports.group_size=4",),
        when=lambda c: c.recipe is not IMPORT,
        select=changed,
    ),
    Rule(
        keys=("imports.group_size",),
        refuses="a count below 1",
        fix="give at least 1, or null for the groups that were recorded",
        example=("recipe=import", "source=miles", "path=/", "imports.group_size=0"),
        when=lambda c: c.recipe is IMPORT,
        select=below(1),
    ),
    Rule(
        keys=("imports.default_reward",),
        refuses="not a finite number",
        fix="give one, or null to refuse samples without a reward",
        example=("recipe=import", "source=miles", "path=/", "imports.default_reward=nan"),
        when=lambda c: c.imports.default_reward is not None and not math.isfinite(c.imports.default_reward),
    ),
    Rule(
        keys=("imports.leave_out_bad_routes", "policy.replay"),
        refuses="routes are not read, so none can be bad",
        fix="leave it false, or choose policy.replay=null",
        example=(
            "recipe=import",
            "source=miles",
            "path=/",
            "policy.replay=false",
            "imports.leave_out_bad_routes=true",
        ),
        when=lambda c: c.recipe is IMPORT and c.imports.leave_out_bad_routes and not c.replay,
    ),
)
