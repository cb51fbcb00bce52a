"""Weight versions as engines report them: of an answer, and of each of its tokens.

Read in: `weight_version` of choice or body (our own server, vLLM), `metadata.weight_version` and
`metadata.weight_versions` by spans of tokens (SGLang 0.5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.types import Refusal

_LONGEST_VERSION = 20  # digits; such a version counts no steps


def oldest_version(choice: Mapping[str, Any], *, body: Mapping[str, Any], where: str) -> int | None:
    """The oldest weights that wrote a token of `choice`; None where one of them is unknown."""
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    given = choice.get("weight_version", body.get("weight_version", metadata.get("weight_version")))
    spans = metadata.get("weight_versions")
    if spans is None:
        return version_of(given)
    if not isinstance(spans, list) or not all(isinstance(span, Mapping) for span in spans):
        raise Refusal(f"{where}: metadata.weight_versions is no list of spans")
    versions = [version_of(given), *(version_of(span.get("version")) for span in spans)]
    known = [version for version in versions if version is not None]
    return min(known) if len(known) == len(versions) else None


def token_versions(body: Mapping[str, Any], *, count: int) -> NDArray[np.int32] | None:
    """int32 [G] from spans {version, start, end} that cover all tokens, in order; else None."""
    metadata = body.get("metadata")
    spans = metadata.get("weight_versions") if isinstance(metadata, Mapping) else None
    found = np.full(count, -1, dtype=np.int32)
    for span in spans if isinstance(spans, list) else []:
        version, start, end = version_of(span.get("version")), span.get("start"), span.get("end")
        if version is None or not 0 <= version < 2**31 or type(start) is not int or type(end) is not int:
            return None
        if not 0 <= start <= end <= count:
            return None
        found[start:end] = version
    return found if count and (found >= 0).all() else None


def version_of(value: Any) -> int | None:
    """A weight version as the number it is or spells; None for engines that were given no number."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    if not isinstance(value, str) or not value.isdecimal() or len(value) >= _LONGEST_VERSION:
        return None
    return int(value)
