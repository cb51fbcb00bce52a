"""Configurations for tests, composed from conf/ as the command line does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from olmo_rl.config import Config, register
from olmo_rl.overrides import group_choices, keep_text

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
GROUPS = group_choices(CONF)


def compose(*overrides: str) -> Config:
    """The typed configuration of a command line."""
    return cast(Config, OmegaConf.to_object(_compose(*keep_text(overrides))))


def compose_fast(*overrides: str) -> Config:
    """The same for overrides that choose groups before they set keys: choices are composed once and kept."""
    chosen = [text for text in overrides if text.lstrip("+").partition("=")[0] in GROUPS]
    values = _kept(*chosen).copy()
    for text in keep_text(text for text in overrides if text not in chosen):
        override = OverridesParser.create().parse_override(text)
        OmegaConf.update(values, override.key_or_group, override.value(), force_add=text.startswith("+"))
    return cast(Config, OmegaConf.to_object(values))


@functools.cache
def _kept(*choices: str) -> DictConfig:
    return _compose(*choices)


def _compose(*overrides: str) -> DictConfig:
    register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return hydra_compose("train", overrides=list(overrides))


def header_commands() -> dict[str, str]:
    """The command in the header of every experiment, sweep and debug file, by path below conf/."""
    commands = {}
    for group in ("experiment", "sweep", "debug"):
        for path in sorted((CONF / group).glob("*.yaml")):
            commands[f"{group}/{path.stem}"] = path.read_text().splitlines()[1].removeprefix("# ")
    return commands
