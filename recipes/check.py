"""Asks this machine and every engine for what training will need, and prints a table. Nothing is changed.

A new check is a function in `CHECKS`. Exit code 2 where one fails.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from olmo_rl.checks import Check, Finding
from olmo_rl.config import Config
from olmo_rl.rollouts.engine_checks import check_engines
from olmo_rl.running.environment_checks import check_devices, check_disk, check_extras, check_torch
from olmo_rl.types import Refusal

CHECKS: tuple[Check, ...] = (check_torch, check_devices, check_extras, check_disk, check_engines)
WORDS = {True: "good", False: "FAILS", None: "unknown"}


def run(config: Config) -> None:
    """Every check, in order; refused with the fix of each that fails."""
    findings = [finding for check in CHECKS for finding in check(config)]
    Console().print(table_of(findings), soft_wrap=True)
    failed = [finding for finding in findings if finding.good is False]
    if failed:
        raise Refusal([f"{one.subject}: {one.name}: {one.found}: {one.fix}" for one in failed])


def table_of(findings: list[Finding]) -> Table:
    table = Table(title=f"{len(findings)} checks", title_justify="left")
    for heading in ("subject", "check", "result", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, finding.name, WORDS[finding.good], finding.found)
    return table
