"""What each attention backend can do, as data: no torch here, so that a login node can refuse a
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBackend:
    """A capability row. `documents`: honours document boundaries. `needs`: what must be importable, None =
    torch.
    """

    name: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    documents: bool
    needs: str | None = None


_ALL = frozenset({"float32", "float64", "bfloat16", "float16"})

ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    row.name: row
    for row in (
        AttentionBackend(name="torch", devices=frozenset({"cpu", "cuda"}), dtypes=_ALL, documents=False),
        AttentionBackend(name="reference", devices=frozenset({"cpu", "cuda"}), dtypes=_ALL, documents=True),
    )
}


def choose_attention(requested: str, *, packed: bool) -> str:
    """The backend that `policy.attention=auto` stands for; any other name is returned as it is."""
    if requested != "auto":
        return requested
    return "reference" if packed else "torch"
