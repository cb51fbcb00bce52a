"""Commands and files that README.md and docs/ show, found in their fenced blocks.

A `bash` block holds commands that a test executes. A comment on the line above the fence overrides that:
`<!-- validate: reason -->` composes and validates the configuration, for what needs GPUs, several ranks, a
server or a download; `<!-- external: reason -->` marks other programs, `<!-- invalid -->` commands that end
with exit code 2. A block with `title="path"` is a file that the reader writes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>\w+)(?:: [^\n]*)? -->\n *)?```(?P<language>\w*)"
    r"(?: title=\"(?P<title>[^\"\n]+)\")?\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
MARKS = (None, "validate", "external", "invalid")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block; `mark` selects how its commands are tested, `title` names the file it is."""

    language: str
    text: str
    mark: str | None
    title: str | None

    def commands(self) -> Iterator[list[str]]:
        """The words of every command, continued lines joined, comments left out."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for match in FENCE.finditer(page.read_text()):
        indent = len(match["indent"])
        text = "".join(line[indent:] or "\n" for line in match["text"].splitlines(keepends=True))
        assert match["mark"] in MARKS, f"{page.name}: unknown mark {match['mark']!r}"
        found.append(Block(language=match["language"], text=text, mark=match["mark"], title=match["title"]))
    return found
