"""The text of `python train.py --help`, generated from the schema and the choices in conf/."""

from __future__ import annotations

import textwrap
from dataclasses import fields, is_dataclass

from olmo_rl.config import RECIPES, Config
from olmo_rl.keys import Key
from olmo_rl.overrides import SET_BY_USERS
from olmo_rl.refusals.rule import as_text

WIDTH = 100

INTRODUCTION = """\
olmo_rl trains Mixture-of-Experts language models with GRPO: packed rows, replayed routes.

usage: python train.py [group=choice ...] [key=value ...] [flags]

  python train.py +experiment=packed_moe                      learn 2-digit addition on a CPU
  python train.py +experiment=packed_moe recipe=validate      report every invalid setting at once
  python train.py +experiment=packed_moe trainer.max_steps=300 run_name=longer
  python train.py +experiment=packed_moe ckpt_path=last       continue the newest run
  python train.py +experiment=packed_moe recipe=rollout run_name=r rollouts.collections=2
  python train.py +experiment=packed_moe rollouts=files rollouts.path=outputs/r/rollouts run_name=t
  python train.py recipe=plan packing=consecutive rollouts=files rollouts.path=FILE
  python train.py -m +experiment=packed_moe packing.max_tokens=256,512
"""

FLAGS = """\
flags
  -m             sweep over comma-separated values, one job each
  --cfg job      print the composed configuration and stop
  --hydra-help   Hydra's own flags
"""

EXIT_CODES = {
    "0": "success",
    "1": "internal error (read the traceback), or an override that Hydra rejects: a typo, a wrong type, an "
    "unknown choice. torchrun always exits with 1; the log has the code. A sweep exits with 2 if all failed "
    "jobs were invalid, else with 1",
    "2": "invalid configuration or data, with reasons and changes; or a guard ended the run "
    "(loss.on_nonfinite, scoring.tolerance, scoring.max_behavior_gap)",
    "75": "interrupted after a checkpoint; continue with ckpt_path=last",
    "128 + n": "ended by signal n with nothing to resume; start again",
}

TAIL = """\
A named run writes outputs/<run_name>/. Another one writes the next numbered directory of its
experiment, outputs/<name>-<n>/, and outputs/<name> leads to the newest. Job n of a sweep writes
<n>/ below.
"""


def manual(groups: dict[str, list[str]]) -> str:
    """The whole text, at most WIDTH columns."""
    recipes = [_row(f"  {recipe.value}", entry.doc, column=13) for recipe, entry in RECIPES.items()]
    choices = [_row(f"  {group}", "  ".join(names), column=13) for group, names in groups.items()]
    parts = [
        INTRODUCTION,
        "recipes (recipe=...)\n" + "\n".join(recipes) + "\n",
        "groups (group=choice; + before experiment, sweep and debug)\n" + "\n".join(choices) + "\n",
        "keys, with the value they have where nothing sets them\n" + "\n".join(_keys()) + "\n",
        FLAGS,
        "exit codes\n"
        + "\n".join(_row(f"  {code}", text, column=13) for code, text in EXIT_CODES.items())
        + "\n",
        TAIL,
    ]
    return "\n".join(parts).rstrip()


def _keys() -> list[str]:
    keys = SET_BY_USERS.values()
    lines = [_key(key) for key in keys if "." not in key.name]
    config = Config()
    for item in fields(config):
        node = getattr(config, item.name)
        if is_dataclass(node):
            about = (type(node).__doc__ or "").splitlines()[0]
            lines += [
                "",
                *textwrap.wrap(
                    f"{item.name}: {about}", WIDTH - 2, initial_indent="  ", subsequent_indent="  "
                ),
            ]
            lines += [_key(key) for key in keys if key.name.startswith(f"{item.name}.")]
    return lines


def _key(key: Key) -> str:
    words = [" | ".join(choice.value for choice in key.choices) if key.name != "recipe" else ""]
    words.append("" if key.bounds is None else key.bounds.text)
    notes = ", ".join(word for word in words if word)
    doc = f"{key.doc} ({notes})" if notes else key.doc
    return _row(f"  {key.name}={as_text(key.default)}", doc, column=43)


def _row(left: str, right: str, *, column: int) -> str:
    """Two columns; the right one wraps, a left one that is too wide has a line of its own."""
    lines = textwrap.wrap(right, WIDTH - column)
    head = [left.ljust(column) + lines[0]] if len(left) < column else [left, " " * column + lines[0]]
    return "\n".join([*head, *(" " * column + line for line in lines[1:])])
