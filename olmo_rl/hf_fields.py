"""The fields of one config.json: read by kind, held to what our decoder computes, refused where unknown.

Nothing raises here: what is refused is collected, and a sound value stands in for it, so that a reader goes
on and everything is told at once. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Fields that the forward does not depend on: bookkeeping, tokens of generation, losses and dropout-free
# training settings that a run of ours states for itself.
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


@dataclass(kw_only=True, slots=True)
class Fields:
    """A config.json being read: what was asked for, and what is refused."""

    values: Mapping[str, Any]
    reasons: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def get(self, key: str, absent: Any, *, null: Any = _AS_ABSENT) -> Any:
        """The field, which has the kind of `absent` (None: a count), or what the architecture takes where it
        is absent, or null.
        """
        self.read.add(key)
        value = self.values.get(key, absent)
        if value is None:
            return absent if null is _AS_ABSENT else null
        return value if self._is_like(1 if absent is None else absent, key=key, value=value) else absent

    def need(self, key: str, *, least: int = 1) -> Any:
        """A count that the architecture cannot do without here; 1 stands in for one that is missing."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            self.reasons.append(f"{key} is missing")
            return 1
        return value if self._is_like(1, key=key, value=value, least=least) else 1

    def hold(self, key: str, *allowed: Any) -> None:
        """Refuse a field that has another value than ours; absent fields have it."""
        self.read.add(key)
        if key in self.values and self.values[key] not in allowed:
            shown = " or ".join(json.dumps(value) for value in allowed)
            self.reasons.append(f"{key}={json.dumps(self.values[key])} is not supported, {shown} is")

    def choose(self, key: str, *allowed: str) -> str:
        """A field with one of some values, the first where it is absent."""
        self.hold(key, *allowed)
        value = self.values.get(key)
        return value if value in allowed else allowed[0]

    def rest(self) -> None:
        """Refuse what was never read."""
        for key in sorted(self.values.keys() - self.read - _WITHOUT_EFFECT):
            self.reasons.append(f"{key}={json.dumps(self.values[key])} is not known, it may change the model")

    def theta(self, default: float) -> float:
        """The base of RoPE, where it is the plain form, in the old spelling, the new one, or both alike."""
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

    def _is_like(self, like: Any, *, key: str, value: Any, least: int = 1) -> bool:
        """Whether `value` has the kind of `like`; refused where it has not. An int is a count of at least
        `least`, a list one of names where `like` has some, else of indices.
        """
        match like:
            case bool():
                kind, sound = "true or false", isinstance(value, bool)
            case int():
                kind, sound = f"an integer of at least {least}", type(value) is int and value >= least
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
