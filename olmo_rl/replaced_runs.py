"""What `overwrite=true` replaces: the earlier run stays until the new one has something to resume from.

The files of the earlier run are moved to `.replaced-<recipe>` inside the run directory. They are deleted when
the first checkpoint or collection of the new run is complete; a recipe that saves neither deletes them when
it ends well. A new run that is refused or dies before puts them back; where it was killed, the next command
does. Files that the new run wrote until then are moved to `.ended-<recipe>`. Every step is a rename inside
one directory, and each of them can be the last one of a killed process. No torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from olmo_rl.config import Config, Recipe
from olmo_rl.refusals.runs import run_files
from olmo_rl.requeued_runs import jobs_file, kind_of
from olmo_rl.run_directory import complete_checkpoints

RESTORED = "the run that overwrite=true was to replace is in place again"


@contextmanager
def replaced(config: Config) -> Iterator[None]:
    """Put the earlier run aside while a block runs the new one, where `overwrite` asks for it. One process of
    a job calls it, and owns the lease of the run directory.
    """
    if not config.overwrite or not run_files(config):
        yield
        return
    aside, moving = _aside(config), _moving(config)
    for path in _run_files(config):
        _move(path, moving)
    moving.rename(aside)
    try:
        yield
    except BaseException as error:
        if recover(config):
            error.add_note(RESTORED)
        raise
    discard_replaced(config)


def recover(config: Config) -> bool:
    """Settle what an `overwrite=true` left that did not end well: delete the replaced run where the new one
    has a complete checkpoint or collection, else put it back. Return whether it was put back.
    """
    aside, moving = _aside(config), _moving(config)
    if aside.is_dir():
        if _stands(config):
            discard_replaced(config)
            return False
        ended = Path(config.run_dir) / f".ended-{kind_of(config)}"
        ended.mkdir(exist_ok=True)
        for path in _run_files(config):
            _move(path, ended)
        aside.rename(moving)
        print(
            f"{config.run_dir}: {RESTORED}; files of the one that ended before its first checkpoint are in "
            f"{ended}",
            flush=True,
        )
    if not moving.is_dir():
        return False
    for path in sorted(moving.iterdir()):
        path.rename(Path(config.run_dir) / path.name)
    moving.rmdir()
    return True


def discard_replaced(config: Config) -> None:
    """Delete the replaced run, because the new one stands."""
    remove(_aside(config))


def remove(path: Path) -> None:
    """Delete a file, a directory or a link, never the target of a link; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run_files(config: Config) -> list[Path]:
    """The files of the run in place, and the jobs that wrote them."""
    jobs = jobs_file(config.run_dir, kind=kind_of(config))
    return [*run_files(config), *([jobs] if jobs.exists() else [])]


def _stands(config: Config) -> bool:
    """Whether the run in place has something to go on from."""
    if config.recipe is Recipe.rollout:
        return any(Path(config.run_dir).glob("rollouts/collection-*.parquet"))
    return config.trains and bool(complete_checkpoints(config.run_dir))


def _aside(config: Config) -> Path:
    return Path(config.run_dir) / f".replaced-{kind_of(config)}"


def _moving(config: Config) -> Path:
    """The directory that exists only while files move, either way."""
    return Path(config.run_dir) / f".moving-{kind_of(config)}"


def _move(path: Path, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    remove(directory / path.name)
    path.rename(directory / path.name)
