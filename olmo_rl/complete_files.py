"""Files and directories that are complete or absent: written under a hidden name, then renamed.

The hidden name ends in `.partial`, so that no reader takes it for the file, and names the process, so that
two processes that write the same file do not disturb each other. Checkpoints, which many processes write,
have their own way (`run_directory.finish_checkpoint`). A full disk is refused with numbers (full_disks.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from olmo_rl.full_disks import full_disks_refused


@contextmanager
def complete_file(path: Path, *, needed: int | None = None) -> Iterator[Path]:
    """Yield the path to write to; it becomes `path`, which it replaces, unless the block raises. Parents of
    `path` are created. `needed`: its bytes, for the report of a full disk.
    """
    partial = _partial(path)
    try:
        with full_disks_refused(path, needed=needed):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def complete_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to write to; it becomes `path` unless the block raises. Raises OSError where
    `path` is a directory that holds something.
    """
    partial = _partial(path)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with full_disks_refused(path):
            partial.mkdir(parents=True)
            yield partial
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_complete(path: Path, text: str) -> None:
    """Write `text` as UTF-8."""
    with complete_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
