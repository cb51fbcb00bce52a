"""The arguments of a command line: texts that stay texts, and typos explained."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from olmo_rl.keys import Key
from olmo_rl.refusals.rule import KEYS

SET_BY_USERS: dict[str, Key] = {name: key for name, key in KEYS.items() if name != "run_dir"}
RENAMED = {key.was: key.name for key in KEYS.values() if key.was is not None}
REMOVED = {
    "balance.level": "the key is gone, a search always sets the boundaries of packs; leave it out",
    "balance=greedy": "the choice is gone; set balance=anneal balance.proposals=0 for the best start",
}

# Names that other trainers give to our keys.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "batch_size": "batch.samples_per_step",
    "num_generations": "rollouts.group_size",
    "output_dir": "run_name",
    "resume_from_checkpoint": "ckpt_path",
}
OMEGACONF_CLASSES = ("full_key:", "reference_type=", "object_type=")  # what its messages add for programmers


def conf_directory() -> Path:
    """conf/ of a clone, or of the installed package."""
    clone = Path(__file__).resolve().parent.parent / "conf"
    return clone if (clone / "train.yaml").is_file() else Path(__file__).resolve().parent / "conf"


def group_choices(*directories: Path) -> dict[str, list[str]]:
    """The choices of every group below the configuration directories, without Hydra's own settings."""
    groups: dict[str, list[str]] = {}
    for directory in directories:
        for path in sorted(directory.rglob("*.yaml")):
            group = path.parent.relative_to(directory).as_posix()
            if group != "." and group.split("/")[0] != "hydra":
                groups.setdefault(group, []).append(path.stem)
    return groups


def keep_text(arguments: Iterable[str]) -> list[str]:
    """Arguments with values of text keys quoted wherever Hydra's grammar would read something else.

    `run_name=010` and `run_name=1E5` stay as typed, `rollouts.path=/a/b=c` parses. Quoted values, null,
    interpolations, sweeps with `choice(...)` and other functions are not changed.
    """
    result = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        key = SET_BY_USERS.get(name.lstrip("+"))
        is_text = bool(equals) and key is not None and key.text
        result.append(f"{name}={_as_text(value)}" if is_text else argument)
    return result


def sets(overrides: Iterable[str], key: str) -> bool:
    """Whether an override sets this key."""
    return any(override.lstrip("+").startswith(f"{key}=") for override in overrides)


def is_named(overrides: Iterable[str]) -> bool:
    """Whether an override names the run itself."""
    return sets(overrides, "run_name")


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
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=value, quote=Quote.single).with_quotes()


def texts_of(override: str) -> list[str]:
    """The values of an override of a text key, one for each job of a sweep over it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString

    parsed = OverridesParser.create().parse_override(override)
    values: Iterable[Any] = parsed.sweep_iterator() if parsed.is_sweep_override() else [parsed.value()]
    return [value.text if isinstance(value, QuotedString) else str(value) for value in values]


def explain_forms(overrides: Iterable[str], *, flags: Sequence[str]) -> list[str]:
    """One line where arguments are no settings: unknown `flags`, `key value`, a space before `=`."""
    stray = [text for text in overrides if text.startswith("=") or ("=" not in text and text[:1] != "~")]
    stray = [text for text in flags if text not in stray] + stray
    if not stray:
        return []
    name = stray[0].lstrip("-").partition("=")[0].replace("-", "_")
    near = _nearest(name, [*SET_BY_USERS]) if name else ""
    return [f"{' '.join(stray)}: write key=value, without dashes and without spaces around ={near}"]


def explain_typos(overrides: Iterable[str], *, groups: dict[str, list[str]]) -> list[str]:
    """One line for every override of a key or choice that does not exist, with the nearest that does."""
    names = [*SET_BY_USERS, *groups]
    opens = tuple(f"{key.name}." for key in SET_BY_USERS.values() if key.open)
    lines = []
    for override in overrides:
        name, equals, value = override.lstrip("+~").partition("=")
        name = name.partition("@")[0]
        if not equals or name.startswith(("hydra.", "hydra/", *opens)):
            continue
        if name in groups:
            unknown = [choice for choice in value.split(",") if choice not in groups[name]]
            if override.startswith("+") or "." not in value:
                for one in unknown:
                    missing = f"no such choice{_nearest(one, groups[name])}"
                    lines.append(f"{name}={one}: {REMOVED.get(f'{name}={one}', missing)}")
        elif name in RENAMED:
            lines.append(f"{override}: the key has another name now; set {RENAMED[name]}={value}")
        elif name in REMOVED:
            lines.append(f"{override}: {REMOVED[name]}")
        elif name not in names:
            lines.append(f"{override}: no such key{_nearest(name, names)}")
    return lines


def explain_error(error: Exception, *, typos: Sequence[str]) -> list[str]:
    """The typos where there are some, else Hydra's own report of an override, without our classes."""
    if typos:
        return list(typos)
    parts: list[Any] = [getattr(error, "override", None), error, error.__cause__]
    lines = [line for part in parts if part is not None for line in str(part).splitlines()]
    return [line for line in lines if line.strip() and not line.strip().startswith(OMEGACONF_CLASSES)]


def _nearest(word: str, words: list[str]) -> str:
    """The nearest word, compared whole, then by its last part; else all words if they are few."""
    known = ELSEWHERE.get(word.rpartition(".")[2])
    found = [known] if known in words else difflib.get_close_matches(word, words, n=1)
    if not found:
        tails = [name.rpartition(".")[2] for name in words]
        near = difflib.get_close_matches(word.rpartition(".")[2], tails, n=1)
        found = [name for name, tail in zip(words, tails, strict=True) if tail in near]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; there are {', '.join(words)}" if len(words) < 12 else "; python train.py --help lists all keys"
