"""The reference pages of the documentation, generated from the schema, the rules and conf/ as Markdown.

`python -m olmo_rl.reference` prints all pages; `--output DIRECTORY` writes each to a file there.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from olmo_rl.config import RECIPES, Config
from olmo_rl.keys import Key
from olmo_rl.manual import EXIT_CODES
from olmo_rl.overrides import RENAMED, SET_BY_USERS, conf_directory, group_choices
from olmo_rl.refusals import WRITTEN
from olmo_rl.refusals.rule import as_text


def pages() -> dict[str, str]:
    """Markdown by file name."""
    return {
        "configuration.md": configuration(),
        "refusals.md": refusals_page(),
        "command_line.md": command_line(),
    }


def configuration() -> str:
    """Every key by section: type, default, documentation, limits and the condition of its effect."""
    keys = list(SET_BY_USERS.values())
    parts = [
        "# Configuration keys\n",
        "Set a key with `key=value` on the command line. The default applies where neither a file of `conf/` "
        "nor the command line sets the key. A value outside the limits is refused, and so is a value other "
        "than the default where the key has no effect.\n",
        "## Top level\n",
        _keys(key for key in keys if "." not in key.name),
    ]
    config = Config()
    for item in fields(config):
        section = getattr(config, item.name)
        if is_dataclass(section):
            parts += [
                f"## {item.name}\n",
                f"{(type(section).__doc__ or '').strip()}\n",
                _keys(key for key in keys if key.name.startswith(f"{item.name}.")),
            ]
    if RENAMED:
        parts += [
            "## Renamed keys\n",
            _table(("old", "new"), [(_code(a), _code(b)) for a, b in RENAMED.items()]),
        ]
    return "\n".join(parts)


def refusals_page() -> str:
    """Every rule that relates several keys."""
    rows = [
        (", ".join(map(_code, rule.keys.split())), rule.refuses, rule.fix, "yes" if rule.planning else "")
        for rule in WRITTEN
    ]
    return "\n".join(
        [
            "# Refused combinations\n",
            "All broken rules are reported at once, one line each, before weights load; the exit code is 2. "
            "`recipe=plan` checks only the rules marked `plan`. Limits of single keys, and conditions of "
            "their effect, are in the [table of keys](configuration.md).\n",
            _table(("keys", "refused", "change", "plan"), rows),
        ]
    )


def command_line() -> str:
    """Recipes, groups and exit codes."""
    groups = group_choices(conf_directory())
    return "\n".join(
        [
            "# Command line\n",
            "`python train.py [group=choice ...] [key=value ...] [flags]`, or `olmo-rl` where the package is "
            "installed; the flags are those of Hydra.\n",
            "## Recipes\n",
            _table(
                ("recipe", "result", "processes"),
                [
                    (_code(f"recipe={recipe.value}"), entry.doc, "one a rank" if entry.ranks else "one")
                    for recipe, entry in RECIPES.items()
                ],
            ),
            "## Groups\n",
            "`group=choice` replaces a choice; `experiment`, `sweep` and `debug` are added: "
            "`+experiment=packed_moe`.\n",
            _table(
                ("group", "choices"),
                [(_code(name), ", ".join(map(_code, words))) for name, words in groups.items()],
            ),
            "## Exit codes\n",
            _table(("code", "meaning"), [(_code(code), meaning) for code, meaning in EXIT_CODES.items()]),
        ]
    )


def _keys(keys: Iterable[Key]) -> str:
    rows = []
    for key in keys:
        limits = "" if key.bounds is None else key.bounds.text
        effect = "; ".join(f"no effect {need.reason}" for need in key.needs)
        rows.append((_code(key.name), _type(key), _code(as_text(key.default)), key.doc, limits, effect))
    return _table(("key", "type", "default", "meaning", "limits", "condition"), rows)


def _type(key: Key) -> str:
    """Choices with their documentation, or the name of the type."""
    if key.name == "recipe":
        return "a [recipe](command_line.md#recipes)"
    if key.choices:
        words = [
            f"{_code(choice.value)}{f' ({doc})' if (doc := getattr(choice, 'doc', '')) else ''}"
            for choice in key.choices
        ]
        return f"{'list of ' if typing.get_origin(key.hint) is list else ''}{', '.join(words)}"
    return _name(key.hint)


def _name(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return " or ".join(_name(part) for part in inner)
    if origin is list:
        return f"list of {_name(inner[0])}"
    if origin is dict:
        return "mapping"
    words = {bool: "boolean", int: "integer", float: "number", str: "text", types.NoneType: "null"}
    return words[hint]


def _code(word: str) -> str:
    return f"`{word}`"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print or write the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m olmo_rl.reference", description="Generate the reference."
    )
    parser.add_argument("--output", type=Path, help="directory for one file a page; default: standard output")
    output: Path | None = parser.parse_args().output
    for name, text in pages().items():
        if output is None:
            print(text)
        else:
            output.mkdir(parents=True, exist_ok=True)
            (output / name).write_text(text)


if __name__ == "__main__":
    main()
