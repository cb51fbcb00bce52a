"""Numbered run directories, for runs that are not named: outputs/<name>-1, outputs/<name>-2 and so on.

`<name>` is the `run_name` of the experiment. A run directory that still awaits its number ends in `-*`; one
process of a job chooses the number and hands the directory to all ranks. `outputs/<name>` is a link to the
newest. `overwrite=true`, `ckpt_path=last` and `auto` take the newest directory of that name and recipe; a
job that the scheduler requeued returns to the directory that it began. A number is taken by creating its
directory, so that two jobs never get one. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import TypeVar

from olmo_rl.chosen_checkpoint import WITHOUT_EVALUATION, best_checkpoint
from olmo_rl.complete_files import write_complete
from olmo_rl.config import Config, Recipe
from olmo_rl.run_lease import this_process
from olmo_rl.types import Refusal

UNCHOSEN = "-*"
MARK = ".numbered"  # in every numbered directory: which kind of recipe began it
JOBS = ".jobs"  # one line for every job of a scheduler that ran here
WITHOUT_FILES = (Recipe.validate, Recipe.serve)

T = TypeVar("T")


def unchosen(run_name: str, *, root: str | Path = "outputs") -> str:
    """Return the run directory of a run without a name of its own, whose number is not chosen yet."""
    return str(Path(root) / f"{run_name}{UNCHOSEN}")


def kind_of(config: Config) -> str:
    """Return the kind of a run: train and sft write the same files."""
    return "train" if config.trains else config.recipe.value


def with_directory(config: Config, *, environ: Mapping[str, str]) -> tuple[Config, bool]:
    """Return the configuration with its run directory chosen, and whether that directory was created for it.

    Raises Refusal where `ckpt_path=best` names no checkpoint or nothing can be created.
    """
    if not config.run_dir.endswith(UNCHOSEN):
        return replace(config, run_dir=_followed(config.run_dir)), False
    if config.recipe in WITHOUT_FILES:
        return replace(config, run_dir=""), False
    base = Path(config.run_dir.removesuffix(UNCHOSEN))
    earlier = _earlier(base, kind=kind_of(config))
    if (requeued := _of_this_job(earlier, environ=environ)) is not None:
        return replace(config, run_dir=str(requeued)), False
    if this_process(environ).restarts and (config.overwrite or config.ckpt_path == "auto"):
        earlier = []  # runs of other commands: an earlier attempt of this one began none
    if config.ckpt_path == "best":
        found = best_checkpoint(earlier[-1]) if earlier else None
        if found is None:
            where = earlier[-1] if earlier else base
            raise Refusal(f"ckpt_path=best: {where}: {WITHOUT_EVALUATION}")
        config = replace(config, ckpt_path=str(found))
    elif earlier and (config.overwrite or config.ckpt_path in ("last", "auto")):
        return replace(config, run_dir=str(earlier[-1])), False
    created = new_directory(base, kind=kind_of(config))
    note_job(created, environ=environ)
    return replace(config, run_dir=str(created)), True


def new_directory(base: Path, *, kind: str) -> Path:
    """Create the next numbered directory of a name. Raises Refusal where it cannot be written."""
    number = max((_number(path, base=base) or 0 for path in _siblings(base)), default=0)
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        while True:
            number += 1
            path = base.with_name(f"{base.name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:  # another job was faster
                continue
            write_complete(path / MARK, json.dumps({"kind": kind}) + "\n")
            return path
    except OSError as error:
        raise Refusal(
            f"run_name: the run directory {base}{UNCHOSEN} cannot be written, {error.strerror}: make "
            f"{base.parent} writable, or choose another run_name"
        ) from error


def removed_if_empty(path: Path) -> None:
    """Remove a directory that was created for a run which was refused before it wrote anything."""
    if {entry.name for entry in path.iterdir()} <= {MARK, JOBS}:
        for name in (MARK, JOBS):
            (path / name).unlink(missing_ok=True)
        path.rmdir()
        base = path.with_name(path.name.rpartition("-")[0])
        if base.is_symlink() and os.readlink(base) == path.name:
            base.unlink()
            if left := [sibling for sibling in _siblings(base) if _kind(sibling) is not None]:
                link_newest(max(left, key=lambda sibling: _number(sibling, base=base) or 0))


def link_newest(path: Path) -> None:
    """Let `outputs/<name>` lead to this numbered directory, unless it leads to a newer one. A directory of
    that name, of a run that was named so, stays what it is.
    """
    name, _, number = path.name.rpartition("-")
    if not (path / MARK).is_file():
        return
    link = path.with_name(name)
    if link.is_symlink() and (_number(Path(os.readlink(link)), base=link) or 0) > int(number):
        return
    if link.exists() and not link.is_symlink():
        print(f"run directory: {path}; {link} is a run of that name and stays", flush=True)
        return
    fresh = path.with_name(f".{name}.{os.getpid()}.link")
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.name)
        fresh.replace(link)
    except OSError as error:  # a file system without links
        print(f"run directory: {path}; {link} cannot be a link, {error.strerror}", flush=True)


def note_job(run_dir: str | Path, *, environ: Mapping[str, str]) -> None:
    """Record which job of a scheduler owns a run directory, for its return after a requeue."""
    owner = this_process(environ)
    if owner.job is not None:
        with (Path(run_dir) / JOBS).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(owner)) + "\n")


def without_links(value: T) -> T:
    """Return a configuration whose paths lead through no link to the newest run, which moves while it runs.
    Other values are returned as they are.
    """
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: without_links(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **changed)
    if isinstance(value, list):
        return [without_links(part) for part in value]  # type: ignore[return-value]
    return _followed(value) if isinstance(value, str) and os.sep in value else value  # type: ignore[return-value]


def _followed(path: str) -> str:
    """The path with the link to a numbered directory in it replaced by that directory."""
    try:
        for link in (Path(path), *Path(path).parents):
            if link.is_symlink() and (link.parent / os.readlink(link) / MARK).is_file():
                return str(link.parent / os.readlink(link) / Path(path).relative_to(link))
    except OSError:  # a long text with a slash, which is no path
        return path
    return path


def _earlier(base: Path, *, kind: str) -> list[Path]:
    """The runs of this name and kind, oldest first; one that was given the name itself comes before them."""
    found = [path for path in _siblings(base) if _number(path, base=base) and _kind(path) == kind]
    named = [base] if base.is_dir() and not base.is_symlink() else []
    return named + sorted(found, key=lambda path: _number(path, base=base) or 0)


def _siblings(base: Path) -> list[Path]:
    return list(base.parent.iterdir()) if base.parent.is_dir() else []


def _number(path: Path, *, base: Path) -> int | None:
    """The number of a directory of this name; None for other names."""
    name, _, number = path.name.rpartition("-")
    return int(number) if name == base.name and number.isdecimal() and number.isascii() else None


def _kind(path: Path) -> str | None:
    """The kind of the run in a numbered directory; None for other directories."""
    try:
        return str(json.loads((path / MARK).read_text(encoding="utf-8"))["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_this_job(directories: list[Path], *, environ: Mapping[str, str]) -> Path | None:
    """The directory that this job owned before the scheduler requeued it."""
    mine = this_process(environ)
    if mine.job is None or mine.restarts == 0:
        return None
    for path in reversed(directories):
        jobs = path / JOBS
        if jobs.is_file() and any(_job(line) == mine.job for line in jobs.read_text().splitlines()):
            return path
    return None


def _job(line: str) -> str | None:
    try:
        owner = json.loads(line)
    except ValueError:  # a killed process left it unfinished
        return None
    return owner.get("job") if isinstance(owner, dict) else None
