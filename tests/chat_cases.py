"""Shared by the tests of chat data: conversations whose every text differs, and a small tokenizer with a chat
template, saved as people save theirs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import transformers

BOS, EOS = "<|begin|>", "<|end|>"
_HEAD = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n"
_TAIL = "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
UNMARKED = _HEAD + "{{ m.content + eos_token }}\n" + _TAIL
MARKED = (
    _HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}\n"
    + "{% else %}{{ m.content + eos_token }}\n{% endif %}"
    + _TAIL
)


def save_tokenizer(directory: Path, *, template: str | None) -> str:
    """A byte-level BPE of a few merges, special tokens for roles and ends; 1 token a byte at most."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOS, EOS, *roles],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["a b c hello there good bye be kind"] * 4, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token=BOS, eos_token=EOS, additional_special_tokens=roles
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return str(directory)


def conversation(number: int) -> list[dict[str, str]]:
    """One to three exchanges; no two conversations have a text in common."""
    turns = []
    for turn in range(1 + number % 3):
        turns.append({"role": "user", "content": f"{number}.{turn}?" + "q" * (number % 7)})
        turns.append({"role": "assistant", "content": f"{number * 10 + turn}" + "r" * (number % 5)})
    return turns


def write_rows(path: Path, rows: Sequence[Any], *, blanks: bool = False) -> str:
    """JSON lines, a blank one before each where asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    between = "\n" if blanks else ""
    path.write_text("".join(f"{between}{json.dumps(row)}\n" for row in rows))
    return str(path)
