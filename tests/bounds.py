"""How long tests wait for others: a bound against hanging, which a busy machine stays far below."""

from __future__ import annotations

BOUND_SECONDS = 900
