"""What people type: the schema's keys with their documentation, texts that stay texts, typos explained."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from olmo_rl import choices, config, sections
from olmo_rl.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the schema. `text`: its values are strings. `open`: keys below it are free."""

    name: str
    default: Any
    doc: str
    text: bool
    open: bool
    choices: tuple[str, ...] = ()


def field_docs() -> dict[tuple[str, str], str]:
    """The comment behind every field and every choice of the schema, by class and name."""
    docs = {}
    for source in map(inspect.getsource, (config, sections, choices)):
        lines = source.splitlines()
        for node in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign | ast.Assign):
                    target = (
                        statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
                    )
                    tail = lines[(statement.end_lineno or 1) - 1][statement.end_col_offset or 0 :]
                    docs[node.name, _member(target)] = tail.strip().removeprefix("#").strip()
    return docs


def _member(target: ast.expr) -> str:
    """The name that a statement of a class binds; `vars()["import"]` binds a word that Python keeps."""
    return ast.literal_eval(target.slice) if isinstance(target, ast.Subscript) else ast.unparse(target)


def schema_keys() -> list[Key]:
    """Every key that holds a value, in the order of the schema."""
    docs = field_docs()

    def walk(node: Any, prefix: str) -> Iterable[Key]:
        hints = typing.get_type_hints(type(node))
        for item in fields(node):
            value, hint = getattr(node, item.name), hints[item.name]
            if is_dataclass(value):
                yield from walk(value, f"{prefix}{item.name}.")
                continue
            yield Key(
                name=prefix + item.name,
                default=value,
                doc=docs[type(node).__name__, item.name],
                text=hint in (str, str | None),
                open="dict" in str(hint),
                choices=tuple(member.value for member in hint) if isinstance(value, Enum) else (),
            )

    return list(walk(Config(), ""))


def group_choices(conf: Path) -> dict[str, list[str]]:
    """The choices of every group below the configuration directory, Hydra's own settings aside."""
    groups: dict[str, list[str]] = {}
    for path in sorted(conf.glob("*/*.yaml")):
        if path.parent.name != "hydra":
            groups.setdefault(path.parent.name, []).append(path.stem)
    return groups


def keep_text(arguments: Iterable[str]) -> list[str]:
    """Arguments with values of text keys quoted wherever Hydra's grammar would read something else.

    `run_name=010` and `run_name=1E5` stay what was typed, `rollouts.path=/a/b=c` parses. Quoted values, null,
    interpolations, sweeps with `choice(...)` and other functions pass as they are.
    """
    texts = {key.name for key in schema_keys() if key.text}
    result = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        is_text = bool(equals) and key.lstrip("+") in texts
        result.append(f"{key}={_as_text(value)}" if is_text else argument)
    return result


def _as_text(value: str) -> str:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    if value[:1] in ("'", '"') or "${" in value:
        return value
    try:
        parsed = OverridesParser.create().parse_override(f"key={value}").value()
    except HydraException:
        return ",".join(_quote(piece) for piece in value.split(","))
    if isinstance(parsed, ChoiceSweep) and parsed.simple_form:
        return ",".join(_as_text(piece) for piece in value.split(","))
    return _quote(value) if isinstance(parsed, bool | int | float) else value


def _quote(value: str) -> str:
    """Hydra's quoting: backslashes count double before a quote."""
    inner = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value, count=0)
    return f"'{inner}'"


def explain_typos(arguments: Iterable[str], *, groups: dict[str, list[str]]) -> list[str]:
    """One line for every override of a key or choice that does not exist, with the nearest that does."""
    keys = schema_keys()
    names = [key.name for key in keys] + list(groups)
    opens = tuple(f"{key.name}." for key in keys if key.open)
    lines = []
    for argument in arguments:
        key, equals, value = argument.lstrip("+~").partition("=")
        key = key.partition("@")[0]
        if argument.startswith("-") or not equals or key.startswith(("hydra.", "hydra/", *opens)):
            continue
        if key in groups:
            unknown = [choice for choice in value.split(",") if choice not in groups[key]]
            if argument.startswith("+") or "." not in value:
                lines += [
                    f"{key}={choice}: no such choice{_nearest(choice, groups[key])}" for choice in unknown
                ]
        elif key not in names:
            lines.append(f"{argument}: no such key{_nearest(key, names)}")
    return lines


def _nearest(word: str, words: list[str]) -> str:
    """The word meant, judged whole, then by its last part; all words where none is near and they are few."""
    found = difflib.get_close_matches(word, words, n=1)
    if not found:
        tails = [name.rpartition(".")[2] for name in words]
        near = difflib.get_close_matches(word.rpartition(".")[2], tails, n=1)
        found = [name for name, tail in zip(words, tails, strict=True) if tail in near]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; there are {', '.join(words)}" if len(words) < 12 else "; python train.py --help lists all keys"
