"""Reads the fields of one config.json by type, compares them with what our decoder computes, and refuses
unknown ones.

Nothing raises here: reasons are collected and a valid value replaces each refused one, so that reading
continues and all reasons are reported at once. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Fields that no forward depends on: bookkeeping, token ids of generation, and settings of training that our
# runs configure themselves.
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "output_router_logits",
        "router_aux_loss_coef",
        "id2label",
        "label2id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "problem_type",
        "is_encoder_decoder",
    }
)
_AS_ABSENT = object()
LARGEST_COUNT = 2**31 - 1  # of anything; counts of layers and experts, of which lists are made, are smaller
MOST_LAYERS, MOST_EXPERTS = 10_000, 2**15 - 1


@dataclass(kw_only=True, slots=True)
class Fields:
    """A config.json being read: `read` names the fields read so far, `reasons` the refused ones."""

    values: Mapping[str, Any]
    reasons: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def get(self, key: str, absent: Any, *, null: Any = _AS_ABSENT) -> Any:
        """Return a field of the type of `absent` (None: a count); `absent` where it is missing, and `null`
        (default: `absent`) where it is null.
        """
        self.read.add(key)
        value = self.values.get(key, absent)
        if value is None:
            return absent if null is _AS_ABSENT else null
        return value if self._is_like(1 if absent is None else absent, key=key, value=value) else absent

    def need(self, key: str, *, least: int = 1, most: int = LARGEST_COUNT) -> Any:
        """Return a required count in [least, most]; 1 replaces a missing or invalid one."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            self.reasons.append(f"{key} is missing")
            return 1
        return value if self._is_like(1, key=key, value=value, least=least, most=most) else 1

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse a field with a value outside of `allowed`; a missing field passes."""
        self.read.add(key)
        if key in self.values and self.values[key] not in allowed:
            shown = " or ".join(json.dumps(value) for value in allowed)
            self.reasons.append(f"{key}={json.dumps(self.values[key])} is not supported, {shown} is")

    def choose(self, key: str, *allowed: str) -> str:
        """Return a field with one of the `allowed` values; the first where it is missing or invalid."""
        self.require(key, *allowed)
        value = self.values.get(key)
        return value if value in allowed else allowed[0]

    def refuse_unread(self) -> None:
        """Refuse every field that was never read."""
        for key in sorted(self.values.keys() - self.read - _WITHOUT_EFFECT):
            self.reasons.append(f"{key}={json.dumps(self.values[key])} is not known, it may change the model")

    def theta(self, default: float) -> float:
        """Return the base of plain RoPE from the old spelling, the new one, or both where they agree."""
        given = {"rope_theta": {"rope_theta": self.values.get("rope_theta")}}
        given |= {key: self.values.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
        self.read.update(given)
        bases = []
        for key, form in given.items():
            plain = isinstance(form, dict) and form.keys() <= {"rope_type", "type", "rope_theta"}
            if not plain or form.get("rope_type", form.get("type", "default")) != "default":
                self.reasons.append(f"{key}={json.dumps(form)} is not supported, plain RoPE is")
                continue
            base = form.get("rope_theta")
            if base is not None and self._is_like(default, key=key, value=base):
                bases.append(float(base))
        if len(set(bases)) > 1:
            self.reasons.append(f"rope_theta is given as {' and '.join(map(str, bases))}: leave one")
        return bases[-1] if bases else default

    def _is_like(self, like: Any, *, key: str, value: Any, least: int = 1, most: int = LARGEST_COUNT) -> bool:
        """Return whether `value` has the type of `like`, and refuse it otherwise. An int is a count in
        [least, most]; a list contains names where `like` does, otherwise indices.
        """
        match like:
            case bool():
                kind, sound = "true or false", isinstance(value, bool)
            case int():
                kind, sound = f"an integer of at least {least}", type(value) is int and value >= least
                if sound and value > most:
                    kind, sound = f"at most {most}", False
            case float():
                kind, sound = "a number", type(value) in (int, float)
            case [str(), *_]:
                kind = "a list of names"
                sound = isinstance(value, list) and all(isinstance(item, str) for item in value)
            case _:
                assert isinstance(like, list), f"{key}: no kind is known for {like!r}"
                kind = "a list of indices"
                sound = isinstance(value, list) and all(type(item) is int for item in value)
        if not sound:
            self.reasons.append(f"{key}={json.dumps(value)} is not {kind}")
        return sound
