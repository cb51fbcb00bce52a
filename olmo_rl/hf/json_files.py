"""Reads JSON files of strangers: bounded in size and depth. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_rl.types import Refusal

LARGEST_JSON = 2**28  # bytes; the index of the largest published models has a few MB


def read_json(path: Path, *, where: str, fix: str) -> Any:
    """Return the value of a file. Raises Refusal for a file that is too large, nested too deeply, or no JSON;
    `where` opens the message and `fix` closes it.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise ValueError(f"it has {size} bytes, more than {LARGEST_JSON}")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{where} cannot be read ({error}): {fix}") from None
    except RecursionError:
        raise Refusal(f"{where} cannot be read (nested too deeply): {fix}") from None
