"""Full disks: what a writer raises becomes a refusal that names the place, what it needs and what is free.

Writers report a full disk in three ways: with the system's number (files, Arrow), with that number in a text
(safetensors, which is written in Rust), and without it (torch: there free space below what is needed counts).
No torch.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from olmo_rl.types import Refusal

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def full_disks_refused(place: str | Path, *, needed: int | None = None) -> Iterator[None]:
    """Raise Refusal, with numbers, where a block finds no space on a disk. `place`: what it writes, unless
    the error names a file; `needed`: its size in bytes where that is known.
    """
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        if (number := _number(error)) is None:
            raise
        where = Path(getattr(error, "filename", None) or place or ".")
        directory = next(path for path in (where, *where.absolute().parents) if path.is_dir())
        usage = shutil.disk_usage(directory)
        quota = " of this user (a quota)" if number == errno.EDQUOT else ""
        wants = "cannot be written" if needed is None else f"needs {needed / 2**20:,.1f} MiB"
        raise Refusal(
            f"disk full: {where} {wants}, {usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB are "
            f"free there{quota}: free space, and give the command again with ckpt_path=auto"
        ) from error


def disk_full(error: BaseException, *, directory: Path, needed: int) -> str | None:
    """Return a sentence about the disk that a failed save of a checkpoint ran out of, None where it failed
    for another reason. `needed`: bytes of the checkpoint.
    """
    free = shutil.disk_usage(directory).free
    if _number(error) is None and free >= needed:
        return None
    mount = directory.resolve()
    while not mount.is_mount():
        mount = mount.parent
    return (
        f"disk full: a checkpoint in {directory} needs {needed / 2**20:,.0f} MiB, {mount} has "
        f"{free / 2**20:,.0f} MiB free"
    )


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and everything that it was raised from, of several ranks too."""
    found, left = [], [error]
    while left:
        one = left.pop()
        found.append(one)
        left += [
            cause for cause in (one.__cause__, one.__context__) if cause is not None and cause not in found
        ]
        failures = getattr(one, "failures", {})  # torch's CheckpointException: rank -> (error, traceback)
        left += [failure[0] for failure in failures.values() if failure[0] not in found]
    return found


def _number(error: BaseException) -> int | None:
    """The system's number for a full disk or a used-up quota that an error or a cause of it carries."""
    for cause in causes(error):
        for number in _NUMBERS:
            if getattr(cause, "errno", None) == number or f"(os error {number})" in str(cause):
                return number
    return None
