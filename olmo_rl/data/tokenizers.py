"""Text to token ids and back: bytes for tiny models, Hugging Face tokenizers for real ones. No torch here.

Refuses tokenizers that cannot be found, need code of their own, have no end-of-sequence token, or have more
ids than the embedding has rows.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from olmo_rl.config import ModelConfig
from olmo_rl.data.gguf import find_gguf, gguf_tokenizer
from olmo_rl.types import Refusal


class Tokenizer(Protocol):
    """Text to ids and back. `eos_id` ends a response."""

    @property
    def eos_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, no special tokens added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One id for each byte of UTF-8, then pad, bos, eos. Invalid bytes and unknown ids decode to U+FFFD."""

    pad_id: int = 256
    bos_id: int = 257
    eos_id: int = 258
    vocab_size: int = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        special = (self.pad_id, self.bos_id, self.eos_id)
        # 0xFF occurs nowhere in UTF-8.
        return bytes(min(i, 255) for i in ids if i not in special).decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class HfTokenizer:
    """A Hugging Face tokenizer with the same methods."""

    backend: Any
    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(name: str) -> Tokenizer:
    """Return the byte tokenizer, a Hugging Face tokenizer by directory or name, or that of a GGUF file."""
    if name == "bytes":
        return ByteTokenizer()
    if importlib.util.find_spec("transformers") is None:
        raise Refusal(f"model.tokenizer={name} needs transformers: pip install 'olmo_rl[hf]', or use bytes")
    from transformers import AutoTokenizer

    try:
        gguf = find_gguf(name, key="model.tokenizer")
        if gguf is None:
            _refuse_code(name)
            backend = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        else:
            backend = gguf_tokenizer(gguf, key="model.tokenizer")
    except Refusal:
        raise
    except Exception as error:  # readers of tokenizer files raise whatever they meet, Rust a bare Exception
        reason = (str(error).splitlines() or [""])[0]
        raise Refusal(f"model.tokenizer={name}: {reason} ({type(error).__name__})") from error
    if backend.eos_token_id is None:
        raise Refusal(f"model.tokenizer={name}: it has no end-of-sequence token, so no response could end")
    highest = max(backend.get_vocab().values(), default=-1)  # ids of added tokens may leave gaps
    return HfTokenizer(
        backend=backend, eos_id=int(backend.eos_token_id), vocab_size=max(len(backend), highest + 1)
    )


def _refuse_code(name: str) -> None:
    """Refuse a tokenizer that needs its own code; transformers would prompt on the terminal."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    named = get_tokenizer_config(name).get("auto_map")
    if named is not None:
        raise Refusal(
            f"model.tokenizer={name}: tokenizer_config.json has auto_map={json.dumps(named)}: such code "
            "is never run: give a tokenizer with tokenizer.json and without auto_map"
        )


def local_tokenizer(model: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer of `model` where nothing has to be fetched for it; None elsewhere."""
    present = model.tokenizer == "bytes" or Path(model.tokenizer).exists()
    return fitting_tokenizer(model) if present else None


def fitting_tokenizer(model: ModelConfig) -> Tokenizer:
    """Return the tokenizer of `model`; refuse one with ids that the embedding has no row for."""
    tokenizer = load_tokenizer(model.tokenizer)
    if tokenizer.vocab_size > model.vocab_size:
        raise Refusal(
            f"model.tokenizer={model.tokenizer} has {tokenizer.vocab_size} ids, the embedding fewer rows: "
            f"raise model.vocab_size={model.vocab_size}"
        )
    return tokenizer
