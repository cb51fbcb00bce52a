"""The byte tokenizer of this project as a Hugging Face directory, which renderers of the library read."""

from __future__ import annotations

import json
from pathlib import Path

from olmo_rl.data.tokenizers import ByteTokenizer

SPECIAL = ("<pad>", "<bos>", "<eos>")  # ids 256, 257, 258
# Bytes that stand for themselves where bytes are written as characters; all others follow behind U+0100.
_PRINTABLE = frozenset([*range(33, 127), *range(161, 173), *range(174, 256)])


def write_byte_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: one id for each byte, then the special ids."""
    tokenizer = ByteTokenizer()
    others = (code for code in range(256, 512))
    vocabulary = {chr(byte if byte in _PRINTABLE else next(others)): byte for byte in range(256)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_as_characters = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    written = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": tokenizer.pad_id + place, "content": name, **special} for place, name in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {**bytes_as_characters, "trim_offsets": False},
        "post_processor": None,
        "decoder": {**bytes_as_characters, "trim_offsets": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
