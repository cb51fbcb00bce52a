"""Where a rank is in its work, noted by the code that does it and read by the thread that reports it.

A note is an assignment to an object of the process: it costs less than a microsecond, so that every pack and
phase has one. No torch.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """The place of a rank. `update`: the one under way, from 1; `pack`, `packs`: of that update on this rank;
    `collective`: the last one that began; `notes`: how often anything was noted.
    """

    update: int | None = None
    pack: int | None = None
    packs: int | None = None
    phase: str = "start"
    collective: str | None = None
    notes: int = 0

    @property
    def text(self) -> str:
        """The place in one phrase: `update 12, pack 3 of 5, phase backward, last collective x`."""
        parts = [] if self.update is None else [f"update {self.update}"]
        if self.pack is not None:
            parts.append(f"pack {self.pack} of {self.packs}")
        parts.append(f"phase {self.phase}")
        if self.collective is not None:
            parts.append(f"last collective {self.collective}")
        return ", ".join(parts)


_CURRENT: ContextVar[Progress | None] = ContextVar("progress", default=None)


def follow(progress: Progress | None) -> None:
    """Let the notes of this thread go to `progress`, None: nowhere."""
    _CURRENT.set(progress)


def current() -> Progress | None:
    """Where the notes of this thread go."""
    return _CURRENT.get()


def note_update(update: int, *, packs: int) -> None:
    """An update of `packs` packs on this rank begins."""
    if (progress := _CURRENT.get()) is not None:
        progress.update, progress.pack, progress.packs = update, None, packs
        progress.notes += 1


def note_pack(pack: int) -> None:
    """A pack of this update begins, counted from 1."""
    if (progress := _CURRENT.get()) is not None:
        progress.pack = pack
        progress.notes += 1


def note_phase(phase: str) -> None:
    """Another kind of work begins."""
    if (progress := _CURRENT.get()) is not None:
        progress.phase = phase
        progress.notes += 1


def note_collective(name: str) -> None:
    """A collective begins."""
    if (progress := _CURRENT.get()) is not None:
        progress.collective = name
        progress.notes += 1
