"""The command line: compose the configuration, check it, run its recipe.

Exit codes are those of manual.py. In a sweep, a job that is refused or fails ends itself only; the sweep then
ends with 2 if all failures are refusals, else with 1. Only this module, library.py, overrides.py and
numbered_sweeps.py use Hydra: recipes get a typed `Config`. Nothing imports torch before the recipe does, and
only ranks import Lightning.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from olmo_rl.complete_files import write_complete
from olmo_rl.config import Config, Recipe, register
from olmo_rl.library import prepared, run_recipe, typed_config
from olmo_rl.manual import manual
from olmo_rl.numbered_runs import WITHOUT_FILES, unchosen
from olmo_rl.overrides import (
    conf_directory,
    explain_error,
    explain_forms,
    explain_typos,
    group_choices,
    is_named,
    keep_text,
    sets,
    texts_of,
)
from olmo_rl.refusals.runs import RUN_NAME
from olmo_rl.replaced_runs import RESTORED
from olmo_rl.run_directory import EXIT_INTERRUPTED, complete_checkpoints
from olmo_rl.running.launchers import launched_rank
from olmo_rl.running.rank_process import end_with_launcher
from olmo_rl.types import Interrupted, RankFailed, Refusal

if TYPE_CHECKING:
    from omegaconf import DictConfig

FAILED, REFUSED = 1, 2
_LINE = re.compile(r"(.*), line (\d+)(.*)", re.DOTALL)
SIGNALLED = 128  # exit codes above it: a signal ended the job


def main() -> None:
    """`python train.py` and `olmo-rl`."""
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the job handled signals itself
        _say(["ended by SIGINT before anything started"])
        code = SIGNALLED + signal.SIGINT
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the job, or the jobs of a sweep, that the arguments describe; return the exit code."""
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        flags, unknown = get_args_parser().parse_known_args(list(arguments))
    except SystemExit as end:  # argparse ends with 2 for a flag without its value, which is REFUSED here
        return FAILED if end.code else 0
    directories = [conf_directory(), *([Path(flags.config_dir)] if flags.config_dir else [])]
    groups = group_choices(*directories)
    if flags.help:
        print(manual(groups))
        return 0
    if stray := explain_forms(flags.overrides, flags=unknown):
        _say(stray)
        return FAILED
    # Hydra accepts + for keys that no schema has.
    added = [override for override in flags.overrides if override.startswith("+")]
    if typos := explain_typos(added, groups=groups):
        _say(typos)
        return FAILED
    if "hydra/launcher=slurm" in flags.overrides and not _register_slurm():
        _say(["refused, one reason:", "  hydra/launcher=slurm needs submitit: pip install -e '.[slurm]'"])
        return REFUSED
    if stray := _stray_run_names(flags.overrides):
        _say(["refused, before the run directory is made:", *(f"  {reason}" for reason in stray)])
        return REFUSED
    register()
    end_with_launcher(os.environ)
    jobs = Jobs(parent=os.getpid())
    typed = keep_text(arguments)
    if _rank() > 0:
        typed.append("hydra/job_logging=none")
    entry = hydra.main(config_path=str(conf_directory()), config_name="train", version_base="1.3")(jobs.run)
    full_trace = os.environ.get("HYDRA_FULL_ERROR")
    program, before = sys.argv[0], sys.argv
    try:
        sys.argv = [program, *typed]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting
        entry()
    except (HydraException, OmegaConfBaseException) as error:
        if full_trace == "1":
            raise
        _say(explain_error(error, typos=explain_typos(flags.overrides, groups=groups)))
        return FAILED
    except OSError as error:  # of Hydra, which makes the run directory; `attempt` reports those of a job
        _say([f"refused: the run directory cannot be written: {error}: choose another run_name"])
        return REFUSED
    except SystemExit as end:
        return cast(int, end.code or 0)
    finally:
        sys.argv = before
        if full_trace is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_trace
    return jobs.exit_code()


@dataclass(kw_only=True, slots=True)
class Jobs:
    """The jobs of this command, which Hydra calls one by one, and their exit codes.

    A launcher may run jobs in other processes; there a failure ends the process, so that a scheduler sees it.
    """

    parent: int
    codes: list[int] = field(default_factory=list)

    def run(self, values: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra = HydraConfig.get()
        name = f"job {hydra.job.num}: " if hydra.mode is RunMode.MULTIRUN else ""
        code = attempt(lambda: execute(values), name=name)
        self.codes.append(code)
        if code and os.getpid() != self.parent:
            raise SystemExit(code)

    def exit_code(self) -> int:
        """The code of all failures where they agree, else 1; prints their number for a sweep."""
        failures = [code for code in self.codes if code]
        if len(self.codes) > 1 and failures:
            refused = failures.count(REFUSED)
            _say([f"sweep: {len(self.codes)} jobs, {refused} refused, {len(failures) - refused} failed"])
        if not failures:
            return 0
        return failures[0] if len(set(failures)) == 1 else FAILED


def attempt(job: Callable[[], None], *, name: str) -> int:
    """Run one job and report why it failed; return its exit code. An interruption ends the whole sweep."""
    try:
        job()
    except Refusal as refusal:
        if _rank() == 0:
            reasons = gather_lines(refusal.reasons)
            count = f"{len(reasons)} reasons" if len(reasons) > 1 else "one reason"
            _say([f"{name}refused, {count}:", *(f"  {reason}" for reason in reasons)])
        return REFUSED
    except RankFailed as failure:  # its message is the rank's own traceback
        print(failure, file=sys.stderr, flush=True)
        return FAILED
    except SystemExit as end:
        code = cast(int, end.code or 0)
        if code == EXIT_INTERRUPTED or code > SIGNALLED:
            raise
        return code
    except Exception:  # the outermost frame of a job: report it in full, the other jobs of a sweep go on
        traceback.print_exc()
        return FAILED
    return 0


def execute(values: DictConfig) -> None:
    """One job: type the configuration, check it, run its recipe."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    config = typed_config(values, run_dir="")
    config = replace(config, run_dir=run_directory(hydra, run_name=config.run_name))
    with prepared(config) as accepted:
        config = accepted.config
        if _rank() == 0 and config.run_dir:
            keep_records(config, values=values, hydra=hydra)
        try:
            run_recipe(accepted)
        except Interrupted as end:
            restored = RESTORED in getattr(end, "__notes__", ())  # its checkpoints are those of another run
            raise SystemExit(_after_signal(config, code=cast(int, end.code), restored=restored)) from None
        except Refusal as refusal:
            if _rank() > 0:  # it may be this rank's alone, of its share of the requests
                _say([f"rank {_rank()} refused:", *(f"  {reason}" for reason in refusal.reasons)])
            raise


def run_directory(hydra: Any, *, run_name: str) -> str:
    """The run directory that the arguments ask for: of a job of a sweep, of a named run, or one whose number
    is chosen later.
    """
    from hydra.types import RunMode

    overrides = hydra.overrides
    if hydra.mode is RunMode.MULTIRUN or sets(overrides.hydra, "hydra.run.dir"):
        return str(hydra.runtime.output_dir)
    outputs = Path(hydra.runtime.cwd) / "outputs"
    return str(outputs / run_name) if is_named(overrides.task) else unchosen(run_name, root=outputs)


def keep_records(config: Config, *, values: DictConfig, hydra: Any) -> None:
    """Write the configuration as composed and the overrides into `.hydra`, once the run is accepted; into
    `.hydra-<recipe>` beside the records of another recipe.
    """
    from omegaconf import OmegaConf

    if config.recipe in WITHOUT_FILES:
        return
    directory = Path(config.run_dir) / ".hydra"
    kept = directory / "config.yaml"
    if kept.is_file() and OmegaConf.select(OmegaConf.load(kept), "recipe") != config.recipe.name:
        directory = directory.with_name(f".hydra-{config.recipe.value}")
    records = {"config": values, "hydra": OmegaConf.create({"hydra": hydra})}
    for name, record in {**records, "overrides": hydra.overrides.task}.items():
        write_complete(directory / f"{name}.yaml", OmegaConf.to_yaml(record))


def _after_signal(config: Config, *, code: int, restored: bool) -> int:
    """The exit code of a job that a signal ended outside of its updates, after a report: 75 where the run
    directory holds a checkpoint of this job or an earlier one that it continued.
    """
    name = signal.Signals(code - SIGNALLED).name
    saved = complete_checkpoints(config.run_dir) if config.trains and not restored else []
    rest = f"{saved[-1].name} is saved, continue with ckpt_path=last" if saved else "no checkpoint to resume"
    if config.recipe is Recipe.rollout:
        whole = len(list(Path(config.run_dir).glob("rollouts/collection-*.parquet")))
        rest = f"{whole} collections are written, each whole"
    if _rank() == 0:
        _say([f"{config.run_name}: ended by {name}; {rest}"])
    return EXIT_INTERRUPTED if saved else code


def _stray_run_names(overrides: Sequence[str]) -> list[str]:
    """Refusals of run names, before Hydra makes directories of that name."""
    from hydra.errors import HydraException

    lines = []
    plain = [text.lstrip("+") for text in overrides]  # Hydra accepts + and ++ for keys of the schema
    for override in keep_text(text for text in plain if text.startswith("run_name=")):
        try:
            names = texts_of(override)
        except HydraException:  # Hydra reports it itself
            continue
        lines += [RUN_NAME.check(replace(Config(), run_name=name)) for name in names]
    return [line for line in lines if line is not None]


def gather_lines(reasons: Sequence[str]) -> list[str]:
    """The reasons, with four or more that differ in a line number alone as one that lists the lines."""
    lines: dict[tuple[str, str], list[str]] = {}
    for reason in reasons:
        found = _LINE.match(reason)
        before, line, after = found.groups() if found else (reason, "", "")
        lines.setdefault((before, after), []).append(line)
    result = []
    for (before, after), numbers in lines.items():
        if len(numbers) < 4:
            result += [f"{before}, line {number}{after}" if number else before for number in numbers]
        else:
            shown = ", ".join(numbers[:3])
            result.append(f"{before}, lines {shown} and {len(numbers) - 3} more{after}")
    return result


def _register_slurm() -> bool:
    """Make hydra/launcher=slurm known to Hydra, which does not find it in an editable installation; False
    where a package is missing.
    """
    from hydra.core.plugins import Plugins

    launcher = getattr(importlib.import_module("hydra_plugins.olmo_rl_slurm"), "SlurmSweep", None)
    if launcher is None:
        return False
    Plugins.instance().register(launcher)
    return True


def _rank() -> int:
    """This process's rank where a launcher started it, else 0."""
    return launched_rank(os.environ) or 0


def _say(lines: Sequence[str]) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)
