"""olmo_rl from Python: compose a configuration, run its recipe.

    import olmo_rl

    if __name__ == "__main__":  # several devices start processes, which import this file
        olmo_rl.train(olmo_rl.compose(["+experiment=packed_moe", "run_name=mine"]))

Nothing here imports torch: a recipe does.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from olmo_rl.chosen_checkpoint import damaged_weights, settled
from olmo_rl.config import RECIPES, Config, Recipe, register
from olmo_rl.full_disks import full_disks_refused
from olmo_rl.numbered_runs import (
    link_newest,
    removed_if_empty,
    unchosen,
    with_directory,
    without_links,
)
from olmo_rl.overrides import (
    conf_directory,
    explain_error,
    explain_forms,
    explain_typos,
    group_choices,
    is_named,
    keep_text,
)
from olmo_rl.refusals import refusals
from olmo_rl.refusals.runs import RUN_MARKS
from olmo_rl.replaced_runs import recover, replaced
from olmo_rl.requeued_runs import continued, is_requeued, kind_of, note_job
from olmo_rl.run_lease import lease
from olmo_rl.running.launchers import launched_rank, launched_world, rank_faults
from olmo_rl.types import Refusal

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from olmo_rl.data.inputs import Inputs

_launched_runs = itertools.count()  # of this process; all ranks of a launcher count alike
RECORDED = (*RUN_MARKS, Recipe.export)  # recipes that a requeued job goes on with, or starts again
UPCYCLING = (Recipe.train, Recipe.sft, Recipe.rollout)  # recipes that may start from upcycled weights


def compose(overrides: Sequence[str] = (), *, run_dir: str | Path | None = None) -> Config:
    """The configuration that `python train.py <overrides>` would run. `run_dir` None = outputs/<run_name>;
    without an override of run_name outputs/<run_name>-*, whose number `run` chooses and to which
    outputs/<run_name> then leads.

    Raises Refusal with every reason where an override or the configuration is invalid; `run` checks the run
    directory.
    """
    from hydra import compose as compose_values
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    groups = group_choices(conf_directory())
    added = [override for override in overrides if override.startswith("+")]
    if wrong := explain_forms(overrides, flags=()) or explain_typos(added, groups=groups):
        raise Refusal(wrong)
    try:
        with initialize_config_dir(config_dir=str(conf_directory()), version_base="1.3"):
            values = compose_values("train", overrides=keep_text(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise Refusal(explain_error(error, typos=explain_typos(overrides, groups=groups))) from error
    config = typed_config(values, run_dir="")
    if reasons := refusals(config):
        raise Refusal(reasons)
    if run_dir is None:
        run_dir = Path("outputs") / config.run_name if is_named(overrides) else unchosen(config.run_name)
    return replace(config, run_dir=str(run_dir))


def train(config: Config) -> None:
    """Train to the end: `run` for the recipes train and sft. Raises Refusal for another recipe."""
    if config.recipe not in (Recipe.train, Recipe.sft):
        raise Refusal(f"recipe={config.recipe.value}: nothing is trained; use olmo_rl.run")
    run(config)


def run(config: Config) -> None:
    """Run the recipe of a configuration, on all ranks of this job.

    Raises Refusal with every reason where the configuration, the run directory or the data are invalid,
    SystemExit(75) where a signal ended training after a checkpoint, Interrupted where nothing was saved, and
    RankFailed with the traceback of a rank that failed in another process.
    """
    with prepared(config) as accepted:
        run_recipe(accepted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """A configuration that nothing refuses, with its run directory and the path of its checkpoint; weights to
    start from exist. `inputs`: what was read to know it, None where the recipe reads for itself.
    """

    config: Config
    inputs: Inputs | None


@contextmanager
def prepared(config: Config) -> Iterator[Accepted]:
    """Refuse an invalid job with every reason; own the run directory while a block runs.

    One process of a job judges it, looks at the disk and chooses: this one, or rank 0 of a launcher's world,
    whose verdict the other ranks await outside of any collective.
    """
    launched = RECIPES[config.recipe].ranks and launched_world(os.environ) > 1
    if not launched:
        with _owned(config) as accepted:
            yield accepted
        return
    from olmo_rl.running.agreement import announced, announcing

    run = next(_launched_runs)
    if launched_rank(os.environ):
        if reasons := refusals(replace(config, run_dir="", ckpt_path=None)):  # which rank 0 settles
            raise Refusal(reasons)
        from olmo_rl.data.inputs import Inputs

        found, facts = announced(config, run=run)
        yield Accepted(config=found, inputs=Inputs.of_facts(facts))
        return
    with announcing(config, run=run) as announcement, _owned(config) as accepted:
        facts = {} if accepted.inputs is None else accepted.inputs.facts()
        announcement.settle(given=config, settled=accepted.config, facts=facts)
        yield accepted


@contextmanager
def _owned(given: Config) -> Iterator[Accepted]:
    """Choose and own the run directory for a block, after every refusal."""
    config, created = with_directory(given, environ=os.environ)
    try:
        with ExitStack() as stack:
            accepted = _accepted(without_links(config), stack=stack)
            config = accepted.config
            if config.run_dir and config.recipe in RUN_MARKS:
                link_newest(Path(config.run_dir))
            yield accepted
    finally:
        if created:
            removed_if_empty(Path(config.run_dir))


def _accepted(config: Config, *, stack: ExitStack) -> Accepted:
    """The verdict of the process that judges the job; `stack` holds the lease of the run directory. Raises
    Refusal with every reason.
    """
    reasons: list[str] = []
    if config.run_dir and config.recipe in RUN_MARKS:
        try:
            stack.enter_context(lease(config.run_dir))
        except Refusal as refusal:
            reasons.extend(refusal.reasons)
        else:
            if recover(config) and config.ckpt_path == "auto":
                reasons.append(
                    "ckpt_path=auto: the run in place is the one that an earlier overwrite=true was to "
                    "replace: give overwrite=true ckpt_path=null, or continue it with ckpt_path=last"
                )
    if config.run_dir and is_requeued(config.run_dir, kind=kind_of(config), environ=os.environ):
        config = continued(config)
    if config.recipe is Recipe.validate:  # it reports all reasons itself
        if reasons:
            raise Refusal(reasons)
        return Accepted(config=settled(config), inputs=None)
    reasons.extend(refusals(config))
    if not reasons and RECIPES[config.recipe].ranks:
        reasons.extend(rank_faults(config, environ=os.environ))
    if not reasons:
        reasons.extend(damaged_weights(config))
    from olmo_rl.data.preflight import examine

    findings = examine(config, reasons=reasons, keep=True)
    if reasons := findings.reasons or faults_of_code(config):
        raise Refusal(reasons)
    config = settled(config, owned=True)
    if config.upcycle.dense is not None and config.recipe in UPCYCLING:
        from olmo_rl.running.rank_process import ended_by_signals
        from olmo_rl.running.upcycled import upcycled

        with ended_by_signals():
            config = upcycled(config)
    return Accepted(config=config, inputs=findings.inputs)


def faults_of_code(config: Config) -> list[str]:
    """What a run would be refused for in callbacks, loggers and the dense model, where there are any: to see
    it takes imports of seconds.
    """
    if config.recipe not in (*UPCYCLING, Recipe.upcycle, Recipe.validate):
        return []
    if not (config.callbacks.extra or config.logger.extra or config.upcycle.dense is not None):
        return []
    from olmo_rl.running.code_faults import code_faults

    return code_faults(config)


def run_recipe(accepted: Accepted) -> None:
    """Run the recipe of a valid configuration: on the ranks of this job, or here where it needs none."""
    config, recipe = accepted.config, RECIPES[accepted.config.recipe]
    arguments = {"inputs": accepted.inputs} if recipe.reads and accepted.inputs is not None else {}
    with nullcontext() if launched_rank(os.environ) else _in_place(config):
        if recipe.ranks:
            from olmo_rl.running.rank_process import Named
            from olmo_rl.running.ranks import run_ranks

            run_ranks(Named(name=recipe.entry, arguments=arguments), config)
        else:
            module, _, function = recipe.entry.partition(":")
            with full_disks_refused(config.run_dir):
                getattr(importlib.import_module(module), function)(config, **arguments)


@contextmanager
def _in_place(config: Config) -> Iterator[None]:
    """Put aside what this run replaces, and record the job whose files are in place from here on."""
    with replaced(config):
        if config.run_dir and config.recipe in RECORDED:
            note_job(config.run_dir, kind=kind_of(config), environ=os.environ)
        yield


def typed_config(values: DictConfig, *, run_dir: str) -> Config:
    """Plain dataclasses from Hydra's container, with the run directory."""
    from omegaconf import OmegaConf

    config = cast(Config, OmegaConf.to_object(values))
    if config.run_dir:
        raise Refusal(f"run_dir={config.run_dir}: it follows from the run's name; set run_name")
    return replace(config, run_dir=run_dir)
