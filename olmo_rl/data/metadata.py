"""The metadata of a rollout file: what its routes refer to, and under which settings its tokens were drawn.

Refuses names and values that mean nothing here. Expert counts come together or not at all; a sampling setting
that is not named is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from olmo_rl.types import Collection, ExpertLayout, Refusal, Sampling

METADATA_NAMES = (
    "num_experts",
    "top_k",
    "routed_layers",
    "route_layers",
    "model",
    "tokenizer",
    "sampling",
)
SAMPLING_NAMES = tuple(entry.name for entry in fields(Sampling))


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """The metadata of one file. `all_layers`: the layer axis of its routes also counts dense layers."""

    layout: ExpertLayout | None = None
    all_layers: bool = False
    model: str | None = None
    tokenizer: str | None = None
    sampling: Sampling = field(default_factory=Sampling)


def unknown_name(name: str, known: Sequence[str]) -> str:
    """The message about an unknown name, with the nearest known one."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown name {name!r}: " + (
        f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    )


def metadata_of(raw: Any, *, where: str) -> Metadata:
    """The metadata object of a file; {} where there is none."""
    if not isinstance(raw, dict):
        raise Refusal(
            f"{where}: the metadata is {raw!r}, expected an object with {', '.join(METADATA_NAMES)}"
        )
    for name in raw:
        if name not in METADATA_NAMES:
            raise Refusal(f"{where}: metadata: {unknown_name(name, METADATA_NAMES)}")
    for name in ("model", "tokenizer"):
        if raw.get(name) is not None and not isinstance(raw[name], str):
            raise Refusal(f"{where}: metadata {name} is {raw[name]!r}: expected text")
    if raw.get("route_layers", "routed") not in ("all", "routed"):
        raise Refusal(
            f"{where}: metadata route_layers is {raw['route_layers']!r}: expected 'all' or 'routed'"
        )
    expert_names = ("num_experts", "top_k", "routed_layers")
    missing = [name for name in expert_names if raw.get(name) is None]
    layout = None
    if not missing:
        layout = _layout(*(raw[name] for name in expert_names), where=where)
    elif len(missing) < len(expert_names) or "route_layers" in raw:
        raise Refusal(
            f"{where}: metadata lacks {', '.join(missing)}: routes need {', '.join(expert_names)} together"
        )
    return Metadata(
        layout=layout,
        all_layers=raw.get("route_layers") == "all",
        model=raw.get("model"),
        tokenizer=raw.get("tokenizer"),
        sampling=sampling_of(raw.get("sampling", {}), where=f"{where}: metadata"),
    )


def sampling_of(raw: Any, *, where: str) -> Sampling:
    """Sampling settings from an object with any of their names; null: not recorded."""
    if not isinstance(raw, dict):
        raise Refusal(f"{where}: sampling is {raw!r}, expected an object with {', '.join(SAMPLING_NAMES)}")
    for name, value in raw.items():
        if name not in SAMPLING_NAMES:
            raise Refusal(f"{where}: sampling: {unknown_name(name, SAMPLING_NAMES)}")
        numeric = type(value) in (int, float) and abs(value) < 2**63  # neither NaN nor infinite
        if value is not None and (not numeric or (name == "top_k" and value != int(value))):
            kind = "an integer" if name == "top_k" else "a number"
            raise Refusal(
                f"{where}: sampling.{name} is {value!r:.80}: expected {kind}, or null where unknown"
            )
    known = {name: value for name, value in raw.items() if value is not None}
    settings: dict[str, Any] = {n: int(v) if n == "top_k" else float(v) for n, v in known.items()}
    return Sampling(**settings)


def _layout(num_experts: Any, top_k: Any, routed_layers: Any, *, where: str) -> ExpertLayout:
    if type(num_experts) is not int or not 1 <= num_experts < 2**31:
        raise Refusal(
            f"{where}: metadata num_experts is {num_experts!r}: expected an integer in 1..{2**31 - 1}"
        )
    if type(top_k) is not int or not 1 <= top_k <= num_experts:
        raise Refusal(
            f"{where}: metadata top_k is {top_k!r}: expected an integer in 1..num_experts={num_experts}"
        )
    layers = routed_layers if isinstance(routed_layers, list) else []
    if not layers or any(type(x) is not int or x < 0 for x in layers) or len(set(layers)) != len(layers):
        raise Refusal(
            f"{where}: metadata routed_layers is {routed_layers!r}: expected a list of distinct layer ids"
        )
    return ExpertLayout(num_experts=num_experts, top_k=top_k, routed_layers=tuple(layers))


def describe(collection: Collection) -> dict[str, Any]:
    """The metadata of a collection as it is written."""
    layout = collection.layout
    experts = (
        {}
        if layout is None
        else {
            "num_experts": layout.num_experts,
            "top_k": layout.top_k,
            "routed_layers": list(layout.routed_layers),
        }
    )
    named = {"model": collection.model, "tokenizer": collection.tokenizer}
    known = collection.sampling.known()
    return (
        experts
        | {name: value for name, value in named.items() if value is not None}
        | ({"sampling": known} if known else {})
    )
