"""Where a run writes its checkpoints, which of them are complete, and which one a run resumes from.

A checkpoint is a directory `checkpoints/step-<n>`. It is written under another name and renamed when all of
it is on disk; its manifest, written last, contains the version of the format and lists every file with its
size in bytes. So a checkpoint whose writing was cut at any byte never has its final name, and a file that
lost bytes afterwards is reported by name. A checkpoint of another version is refused.
No torch: the table of refusals reads this too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from olmo_rl.config import Config
from olmo_rl.types import Refusal

EXIT_INTERRUPTED = 75  # interrupted; a checkpoint to resume from is there
MANIFEST = "manifest.json"
# Of checkpoints and contract logs: increase it when older files can no longer be read as they are.
FORMAT_VERSION = 1
LOG_EVENT = "log"  # the first event of a contract log, which contains its version
_READABLE = (0, FORMAT_VERSION)  # 0: written before versions existed, otherwise the same
SCRATCH = ".incomplete"
_PREFIX = "step-"


def checkpoint_directory(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def checkpoint_path(run_dir: str | Path, *, step: int) -> Path:
    """Return the name that the checkpoint of an update has once it is complete."""
    return checkpoint_directory(run_dir) / f"{_PREFIX}{step}"


def named_checkpoints(run_dir: str | Path) -> list[Path]:
    """List everything with the name of a checkpoint, complete or damaged, oldest first."""
    found = [
        path
        for path in checkpoint_directory(run_dir).glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdecimal()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def complete_checkpoints(run_dir: str | Path) -> list[Path]:
    """List the checkpoints of a run that can be resumed from, oldest first."""
    return [path for path in named_checkpoints(run_dir) if checkpoint_fault(path) is None]


def checkpoint_fault(path: str | Path) -> str | None:
    """Return why this checkpoint cannot be read, naming the file; None where it is complete."""
    path = Path(path)
    if not path.is_dir():
        return "no such directory"
    if path.name.endswith(SCRATCH):
        return "it was still being written when its run ended"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = {str(name): int(size) for name, size in manifest["bytes"].items()}
        version = manifest.get("version", 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or damaged"
    if (fault := version_fault(version)) is not None:
        return fault
    for name, size in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} holds {file.stat().st_size} bytes of {size}"
    return None


def resolve_checkpoint(config: Config) -> str | None:
    """The directory that `ckpt_path` names, None for a fresh run. `last` is the newest complete checkpoint.

    Raises Refusal where there is none.
    """
    if config.ckpt_path is None:
        return None
    if config.ckpt_path == "last":
        found = complete_checkpoints(config.run_dir)
        if not found:
            raise Refusal(
                f"ckpt_path=last: {checkpoint_directory(config.run_dir)} holds no complete checkpoint: "
                "start with ckpt_path=null overwrite=true, or give a path"
            )
        return str(found[-1])
    fault = checkpoint_fault(config.ckpt_path)
    if fault is not None:
        raise Refusal(f"ckpt_path={config.ckpt_path}: no whole checkpoint, {fault}: give another, or last")
    return config.ckpt_path


def passed_over(config: Config) -> list[str]:
    """One line for every damaged checkpoint that `ckpt_path=last` skips, newest first."""
    if config.ckpt_path != "last":
        return []
    lines = []
    for path in reversed(named_checkpoints(config.run_dir)):
        fault = checkpoint_fault(path)
        if fault is None:
            break
        lines.append(f"{path} is damaged, {fault}: passed over")
    return lines


def version_fault(version: object) -> str | None:
    """Return why a checkpoint or a contract log of this version cannot be read; None where it can."""
    if version in _READABLE:
        return None
    readable = " and ".join(map(str, _READABLE))
    return (
        f"its format has version {version}, this olmo_rl reads versions {readable}: use the olmo_rl that "
        "wrote it, or start a new run"
    )


def log_fault(path: Path) -> str | None:
    """Return why no line may be appended to a contract log; None where one may. A log without a version, or
    without lines, has version 0.
    """
    with path.open(encoding="utf-8") as lines:
        first = next(lines, "{}")
    try:
        event = json.loads(first)
        return version_fault(event["version"] if event.get("event") == LOG_EVENT else 0)
    except (ValueError, KeyError, AttributeError):
        return "its first line is damaged"


def finish_checkpoint(scratch: Path, *, final: Path) -> None:
    """Write the manifest of a checkpoint and give it its final name; every file is on disk before.

    One process calls it, after all others have written their files.
    """
    files = sorted(path for path in scratch.iterdir() if path.is_file() and path.name != MANIFEST)
    for file in files:
        _to_disk(file)
    manifest = {"version": FORMAT_VERSION, "bytes": {file.name: file.stat().st_size for file in files}}
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _to_disk(scratch / MANIFEST)
    _to_disk(scratch)
    scratch.rename(final)
    _to_disk(final.parent)


def whole_lines(path: Path) -> None:
    """Cut a last line that a killed process left unfinished, before lines are appended."""
    if path.is_file() and not (text := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
