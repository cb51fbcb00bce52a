"""Where a run writes its checkpoints, which of them are complete, and which one a run resumes from.

A checkpoint is a directory `checkpoints/step-<n>`. It is written under another name and renamed when all of
it is on disk; its manifest, written last, contains the version of the format and lists every file with its
size in bytes. So a checkpoint whose writing was cut at any byte never has its final name, and a file that
lost bytes afterwards is reported by name. A checkpoint of another version is refused.
No torch: the table of refusals reads this too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXIT_INTERRUPTED = 75  # interrupted; a checkpoint to resume from is there
MANIFEST = "manifest.json"
# Of checkpoints and contract logs: increase it when older files can no longer be read as they are.
FORMAT_VERSION = 1
LOG_EVENT = "log"  # the first event of a contract log, which contains its version
_READABLE = (0, FORMAT_VERSION)  # 0: written before versions existed, otherwise the same
SCRATCH = ".incomplete"
_PREFIX = "step-"
_THREADS = 8  # that read files for their checksums


def checkpoint_directory(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def checkpoint_path(run_dir: str | Path, *, step: int) -> Path:
    """Return the name that the checkpoint of an update has once it is complete."""
    return checkpoint_directory(run_dir) / f"{_PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    """Return the update after which a checkpoint of this name was saved."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def named_checkpoints(run_dir: str | Path) -> list[Path]:
    """List everything with the name of a checkpoint, complete or damaged, oldest first."""
    found = [
        path
        for path in checkpoint_directory(run_dir).glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdecimal()
    ]
    return sorted(found, key=step_of)


def complete_checkpoints(run_dir: str | Path) -> list[Path]:
    """List the checkpoints of a run that can be resumed from, oldest first."""
    return [path for path in named_checkpoints(run_dir) if checkpoint_fault(path) is None]


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to `step-<n>.damaged`, so that nothing counts it or deletes it; return its
    new path. One process of the job that owns the run directory calls it.
    """
    aside, number = checkpoint.with_name(f"{checkpoint.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")
    return checkpoint.rename(aside)


def stored_version(checkpoint: Path) -> object:
    """Return the version in the manifest of a checkpoint; that of the oldest ones where it cannot be read."""
    try:
        return json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")).get("version", 0)
    except (OSError, ValueError, AttributeError):
        return 0


def prune_checkpoints(run_dir: str | Path, *, keep: int, newest: Path, best: Path | None = None) -> None:
    """Delete all but the `keep` newest complete checkpoints up to `newest`, which was just saved, and the
    `best` one, and damaged ones older than those. Later ones do not count, and stay. Each loses its name
    first: one that is deleted in part is never taken for a checkpoint.
    """
    kept = [path for path in complete_checkpoints(run_dir) if step_of(path) <= step_of(newest)][-keep:]
    for path in named_checkpoints(run_dir):
        if path == kept[0]:
            break
        if path == best:
            continue
        scratch = path.with_name(path.name + SCRATCH)
        path.rename(scratch)
        shutil.rmtree(scratch)


def checkpoint_fault(path: str | Path, *, contents: bool = False) -> str | None:
    """Return why this checkpoint cannot be read, naming the file; None where it is complete. `contents`: read
    every file and compare its checksum, about a second for each 1.5 GB and thread.
    """
    path = Path(path)
    if not path.is_dir():
        return "no such directory"
    if path.name.endswith(SCRATCH):
        return "it was still being written when its run ended"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = {str(name): int(size) for name, size in manifest["bytes"].items()}
        version = manifest.get("version", 0)
        checksums = {str(name): str(digest) for name, digest in manifest.get("sha256", {}).items()}
        if "sha256" in manifest and checksums.keys() != expected.keys():  # older manifests have none
            raise KeyError("sha256")
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
    return _changed_file(path, checksums) if contents else None


def _changed_file(path: Path, checksums: dict[str, str]) -> str | None:
    """Return which file of a checkpoint differs from its checksum; None where none does."""
    found = sha256_of([path / name for name in checksums])
    changed = [
        name for (name, digest), other in zip(checksums.items(), found, strict=True) if digest != other
    ]
    return f"{changed[0]} differs from its checksum" if changed else None


def sha256_of(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of every file, read by several threads. A published hash of the standard library;
    processors with SHA instructions compute it as fast as most disks read.
    """

    def one(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=_THREADS) as threads:
        return list(threads.map(one, files))


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
    names = [file.name for file in files]
    manifest = {
        "version": FORMAT_VERSION,
        "bytes": {file.name: file.stat().st_size for file in files},
        "sha256": dict(zip(names, sha256_of(files), strict=True)),
    }
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
