"""Hand-written lines of JSON: an error of `json` becomes one Refusal with its place. No torch.

Refuses invalid JSON, an object that has a name twice (parsers keep either value), nesting deeper than the
parser goes, and text that cannot be encoded (half of a
surrogate pair, which JSON can spell as \\ud800).
"""

from __future__ import annotations

import json
from typing import Any

from olmo_rl.types import Refusal


def parse_line(line: bytes | str, *, where: str) -> object:
    """The value of one line; `where` (file and line) opens the message of a Refusal."""
    try:
        return json.loads(line, object_pairs_hook=_unique)
    except Refusal as refusal:
        raise Refusal(f"{where}: {refusal}") from None
    except ValueError as error:
        raise Refusal(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise Refusal(f"{where}: nested too deeply to read: flatten it, or leave the line out") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise Refusal(f"{name!r} stands twice in one object: keep one of them")
    return found


def text_fault(text: str) -> str | None:
    """The reason why `text` cannot be encoded; None where it can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"holds half of a surrogate pair (\\u{ord(text[error.start]):04x}) at character {error.start}, "
            "which is no text: repair or remove it"
        )
    return None
