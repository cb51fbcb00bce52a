"""Lines of JSON that people write by hand: what `json` raises becomes one Refusal that says where. No torch.

Refuses what is no JSON, what nests deeper than the parser goes, and text that no file can hold again (half of
a surrogate pair, which JSON can spell as \\ud800).
"""

from __future__ import annotations

import json

from olmo_rl.types import Refusal


def parse_line(line: bytes | str, *, where: str) -> object:
    """The value that one line holds; `where` (file and line) opens the message of a Refusal."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise Refusal(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise Refusal(f"{where}: nested too deeply to read: flatten it, or leave the line out") from None


def text_fault(text: str) -> str | None:
    """What keeps `text` from being encoded; None where nothing does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"holds half of a surrogate pair (\\u{ord(text[error.start]):04x}) at character {error.start}, "
            "which is no text: repair or remove it"
        )
    return None
