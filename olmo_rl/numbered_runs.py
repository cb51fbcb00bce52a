"""Numbered run directories, for runs that are not named: outputs/<name>-1, outputs/<name>-2 and so on.

`<name>` is the `run_name` of the experiment. A run directory that still awaits its number ends in `-*`; one
process of a job chooses the number and hands the directory to all ranks. `outputs/<name>` is a link to the
newest. `overwrite=true`, `ckpt_path=last` and `auto` take the newest directory of that name and recipe; a
job that the scheduler requeued returns to the directory that it began (requeued_runs.py). A number is taken
by creating its directory, so that two jobs never get one. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TypeVar

from olmo_rl.chosen_checkpoint import WITHOUT_EVALUATION, best_checkpoint
from olmo_rl.complete_files import write_complete
from olmo_rl.config import Config, Recipe
from olmo_rl.requeued_runs import is_requeued, jobs_file, kind_of, note_job
from olmo_rl.run_directory import complete_checkpoints
from olmo_rl.run_lease import this_process
from olmo_rl.types import Refusal

UNCHOSEN = "-*"
MARK = ".numbered"  # in every numbered directory: which kind of recipe began it
WITHOUT_FILES = (Recipe.validate, Recipe.serve, Recipe.report)

T = TypeVar("T")


def unchosen(run_name: str, *, root: str | Path = "outputs") -> str:
    """Return the run directory of a run without a name of its own, whose number is not chosen yet."""
    return str(Path(root) / f"{run_name}{UNCHOSEN}")


def with_directory(config: Config, *, environ: Mapping[str, str]) -> tuple[Config, bool]:
    """Return the configuration with its run directory chosen, and whether that directory was created for it.

    Raises Refusal where `ckpt_path=best` names no checkpoint or nothing can be created.
    """
    if not config.run_dir.endswith(UNCHOSEN):
        return replace(config, run_dir=_followed(config.run_dir)), False
    if config.recipe in WITHOUT_FILES:
        return replace(config, run_dir=""), False
    base, kind = Path(config.run_dir.removesuffix(UNCHOSEN)), kind_of(config)
    earlier = _earlier(base, kind=kind)
    own = next((path for path in earlier if is_requeued(path, kind=kind, environ=environ)), None)
    if own is not None:
        earlier = earlier[: earlier.index(own)]
    if config.ckpt_path == "best" and not (own is not None and complete_checkpoints(own)):
        found = best_checkpoint(earlier[-1]) if earlier else None
        if found is None:
            where = earlier[-1] if earlier else base
            raise Refusal(f"ckpt_path=best: {where}: {WITHOUT_EVALUATION}")
        config = replace(config, ckpt_path=str(found))
    elif own is None and earlier and _takes_newest(config, environ=environ):
        own = earlier[-1]
    if own is not None:
        return replace(config, run_dir=str(own)), False
    created = new_directory(base, kind=kind)
    note_job(created, kind=kind, environ=environ)
    return replace(config, run_dir=str(created)), True


def _takes_newest(config: Config, *, environ: Mapping[str, str]) -> bool:
    """Whether a command without a name means the newest run. The newest one may be of another command since
    a scheduler started this one first: a requeued job replaces none.
    """
    replaces = config.overwrite and not this_process(environ).restarts
    return replaces or config.ckpt_path in ("last", "auto")


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
    ours = [path / MARK, *path.glob(jobs_file(path, kind="*").name)]
    if {*path.iterdir()} <= {*ours}:
        for file in ours:
            file.unlink(missing_ok=True)
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
