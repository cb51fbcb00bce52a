"""Which checkpoint a run starts from: `ckpt_path=last|auto|best|<path>`, settled once by one process.

`last` is the newest complete checkpoint of the run. `best` is the complete checkpoint with the best held-out
evaluation: the highest reward of recipe=train (`eval/accuracy`), the lowest loss of recipe=sft (`eval/loss`),
recorded in the contract log for exactly the update of that checkpoint; of equal ones the newest. `auto` is
`last` where there is a complete checkpoint, else a start. No torch: the table of refusals reads this too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from olmo_rl.config import Config, Recipe
from olmo_rl.run_directory import (
    MANIFEST,
    checkpoint_directory,
    checkpoint_fault,
    complete_checkpoints,
    named_checkpoints,
    set_aside,
    step_of,
    stored_version,
    version_fault,
)
from olmo_rl.types import Refusal

WORDS = ("last", "auto", "best")  # of ckpt_path; everything else is a path
CONTRACT = "training_contract_rank0.jsonl"


def settled(config: Config, *, owned: bool = False) -> Config:
    """Return the configuration with `ckpt_path` as the path of one checkpoint whose files have their
    checksums, or null for a start. `auto` without a complete checkpoint sets aside what an attempt left.

    Prints which damaged checkpoints are passed over. `owned`: this process owns the run directory, and
    renames them, so that no later command takes one of them for whole. Raises Refusal where there is no such
    checkpoint.
    """
    if config.ckpt_path is None:
        return config
    if config.recipe is Recipe.export:  # it keeps what an earlier attempt wrote
        return config
    if not config.trains:  # recipe=rollout continues after the collections that exist, others start again
        return replace(config, ckpt_path=None, overwrite=config.recipe is not Recipe.rollout)
    if config.ckpt_path == "auto":
        if not complete_checkpoints(config.run_dir):
            return replace(config, ckpt_path=None, overwrite=True)
        config = replace(config, ckpt_path="last", init_from=None)
    if config.ckpt_path == "last":
        return replace(config, ckpt_path=str(_newest(config, owned=owned)))
    path = best_checkpoint(config.run_dir) if config.ckpt_path == "best" else Path(str(config.ckpt_path))
    if path is None:
        raise Refusal(f"ckpt_path=best: {config.run_dir}: {WITHOUT_EVALUATION}")
    if (fault := checkpoint_fault(path, contents=True)) is not None:
        raise Refusal(f"ckpt_path={path}: no whole checkpoint, {fault}: give another, or last")
    return replace(config, ckpt_path=str(path))


def resolve_checkpoint(config: Config) -> str | None:
    """Return the directory that `ckpt_path` names, None for a fresh run. The checksums of a path were
    verified when it was settled.

    Raises Refusal where there is none.
    """
    if config.ckpt_path is None or config.ckpt_path in WORDS:
        return settled(config).ckpt_path
    if (fault := checkpoint_fault(config.ckpt_path)) is not None:
        raise Refusal(f"ckpt_path={config.ckpt_path}: no whole checkpoint, {fault}: give another, or last")
    return config.ckpt_path


def damaged_weights(config: Config) -> list[str]:
    """Return one line for `init_from` and for `loss.reference` where they are checkpoints whose files differ
    from their checksums. Reads every byte of them.
    """
    lines = []
    for key, path in (("init_from", config.init_from), ("loss.reference", config.loss.reference)):
        if path is None or not (Path(path) / MANIFEST).is_file():  # files and directories of others
            continue
        if (fault := checkpoint_fault(path, contents=True)) is not None:
            lines.append(f"{key}={path}: no whole checkpoint, {fault}: give another one")
    return lines


WITHOUT_EVALUATION = (
    "no complete checkpoint has a held-out evaluation of its own update; let task.eval_interval or "
    "sft.eval_interval divide callbacks.checkpoint_interval, or give ckpt_path=last"
)


def best_checkpoint(run_dir: str | Path) -> Path | None:
    """Return the complete checkpoint of a run with the best held-out evaluation, None where none has one."""
    log = Path(run_dir) / CONTRACT
    if not log.is_file():
        return None
    with log.open(encoding="utf-8") as lines:
        events = [event for line in lines if (event := _event(line)) is not None]
    rewards, losses = evaluations_of(events, name="accuracy"), evaluations_of(events, name="loss")
    values = rewards or {step: None if loss is None else -loss for step, loss in losses.items()}
    judged = [
        (value, step_of(path), path)
        for path in complete_checkpoints(run_dir)
        if (value := values.get(step_of(path))) is not None and math.isfinite(value)
    ]
    return max(judged)[-1] if judged else None


def evaluations_of(events: Iterable[dict[str, Any]], *, name: str = "accuracy") -> dict[int, float | None]:
    """Return the held-out values under `name` in a contract log by update. An update that is repeated after
    a resume removes those of the policies that it undoes.
    """
    found: dict[int, float | None] = {}
    for event in events:
        if event["event"] == "evaluation" and name in event:
            found[event["step"]] = event[name]
        elif event["event"] == "optimizer" and found and event["step"] <= max(found):
            found = {step: value for step, value in found.items() if step < event["step"]}
    return found


def _event(line: str) -> dict[str, Any] | None:
    """One line of a contract log; None for one that a killed process left unfinished."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "step"} <= event.keys() else None


def _newest(config: Config, *, owned: bool) -> Path:
    """Return the newest complete checkpoint whose files have their checksums, and print which are passed
    over. Raises Refusal where there is none, and where a newer one has another version.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(named_checkpoints(config.run_dir)):
        if (fault := version_fault(stored_version(path))) is not None:
            raise Refusal(f"ckpt_path=last: {path}: {fault}, or give the path of another checkpoint")
        if (fault := checkpoint_fault(path, contents=True)) is None:
            for other, reason in damaged:
                kept = f" and renamed to {set_aside(other).name}" if owned else ""
                print(f"{other} is damaged, {reason}: passed over{kept}", flush=True)
            return path
        damaged.append((path, fault))
    raise Refusal(
        f"ckpt_path=last: {checkpoint_directory(config.run_dir)} holds no complete checkpoint: "
        "start with ckpt_path=null overwrite=true, or give a path"
    )
