"""recipe=import: convert rollouts of another system into rollout files, and report their contents. No GPU."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from olmo_rl.complete_files import write_complete
from olmo_rl.config import Config
from olmo_rl.data.files import write_collection
from olmo_rl.rollouts.importers.importing import ImportReport, import_file, import_paths
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.types import Collection, Refusal


def run(config: Config) -> None:
    """Read every file of `imports.path`, then write: a refusal leaves nothing behind."""
    source, recorded = config.imports.source, config.imports.path
    assert source is not None, "refusals require imports.source"
    assert recorded is not None, "refusals require imports.path"
    layout = config.model.expert_layout if config.replay else None
    axis = None
    if layout is not None:
        axis = RouteAxis(layout=layout, num_layers=len(config.model.layer_types))
    found: list[tuple[Collection, ImportReport]] = []
    reasons: list[str] = []
    for path in import_paths(Path(recorded), source=source):
        try:
            found.append(
                import_file(
                    path,
                    source=source,
                    options=config.imports,
                    axis=axis,
                    vocab_size=config.model.vocab_size,
                )
            )
        except Refusal as refusal:
            reasons += refusal.reasons
    if reasons:
        raise Refusal(reasons)
    directory = Path(config.run_dir) / "rollouts"
    for number, (collection, _) in enumerate(found):
        write_collection(collection, directory / f"collection-{number:05d}.parquet")
    reports = [report.as_json() for _, report in found]
    path = Path(config.run_dir) / "import_report.json"
    write_complete(path, json.dumps({"source": source, "files": reports}, indent=2) + "\n")
    console = Console()
    for _, report in found:
        console.print(_table(report))
    console.print(f"rollouts: {directory}", soft_wrap=True)
    console.print(f"report: {path}", soft_wrap=True)


def _table(report: ImportReport) -> Table:
    """The report of one file in two columns, without absent entries."""
    table = Table(title=report.file, title_justify="left", show_header=False)
    for name, value in report.as_json().items():
        if name == "file" or value in ({}, [], 0, None):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
        table.add_row(name.replace("_", " "), _shown(value))
    return table


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
