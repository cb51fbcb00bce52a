"""metrics.csv: one row per update, written as it happens. Survives resuming, where Lightning's own logger
starts over.
"""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from olmo_rl.run_directory import whole_lines


class MetricsCsv(Logger):
    """Rows keyed by `step`. Columns grow when a new metric appears; a row for a step already present replaces
    it and everything after it, so that a resumed run continues the file instead of repeating updates.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._columns: list[str] = ["step"]
        self._rows: list[dict[str, str]] = []

    @property
    @override
    def name(self) -> str:
        return "metrics_csv"

    @property
    @override
    def version(self) -> str:
        return ""

    @override
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration lies in .hydra/; there is nothing to add here."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None, "metrics belong to an update"
        self.read_existing()
        row = {"step": str(step)} | {name: repr(float(value)) for name, value in sorted(metrics.items())}
        row.pop("epoch", None)
        continues = not self._rows or int(self._rows[-1]["step"]) < step
        kept = self._rows if continues else [old for old in self._rows if int(old["step"]) < step]
        new_columns = [name for name in row if name not in self._columns]
        self._columns += new_columns
        kept.append(row)
        self._rows = kept
        if new_columns or not continues or not self._path.is_file():
            self._rewrite()
        else:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def read_existing(self) -> None:
        """Pick up the rows of the run that this one continues."""
        if self._rows or not self._path.is_file():
            return
        whole_lines(self._path)
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file)
            self._columns = list(reader.fieldnames or ["step"])
            self._rows = list(reader)

    def _rewrite(self) -> None:
        scratch = self._path.with_suffix(".csv.tmp")
        with scratch.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        scratch.replace(self._path)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a metrics.csv with the values that are present."""
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
