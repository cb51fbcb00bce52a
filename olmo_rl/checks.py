"""What a check of `recipe=check` reports. A check is a function of the configuration; recipes/check.py lists
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from olmo_rl.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check. `subject`: this machine, or the address of an engine; `good` None: it could
    not be determined, which refuses nothing; `found`: the value seen; `fix`: the change that mends it.
    """

    name: str
    subject: str
    good: bool | None
    found: str
    fix: str = ""


Check = Callable[[Config], Iterable[Finding]]
HERE = "this machine"
