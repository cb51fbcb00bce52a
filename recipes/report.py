"""A page about a run, two runs, or a sweep: health, curves, time, packs, experts, generations. No torch."""

from __future__ import annotations

from pathlib import Path

from olmo_rl.config import Config
from olmo_rl.report.writing import write_report


def run(config: Config) -> None:
    """Write the page, and print where it is."""
    assert config.run is not None, "a rule of the configuration"
    written = write_report(
        Path(config.run),
        compare=None if config.compare is None else Path(config.compare),
        path=None if config.report_path is None else Path(config.report_path),
    )
    print(f"report: {written} ({written.stat().st_size / 2**20:.1f} MiB)", flush=True)
