"""Writes report.html of a run, of two runs side by side, or of a sweep."""

from __future__ import annotations

from pathlib import Path

from olmo_rl.report.page import page_of, sweep_page, write_page
from olmo_rl.report.reading import RunRecord, is_run, jobs_of, name_apart, read_run
from olmo_rl.types import Refusal

NAME = "report.html"


def write_report(run: Path, *, compare: Path | None = None, path: Path | None = None) -> Path:
    """Write the report of a run, beside another one, or of a sweep, and return its path, by default in the
    directory that it describes. Raises Refusal where nothing can be read, or the page cannot be written.
    """
    target = run / NAME if path is None else path
    if run.is_dir() and not is_run(run) and (jobs := jobs_of(run)):
        if compare is not None:
            raise Refusal(f"compare={compare}: run={run} is a sweep: name one of its runs, {run}/<n>")
        page = sweep_page(run, [read_run(job, key="run") for job in jobs])
    else:
        record = read_run(run, key="run")
        other = None if compare is None else read_run(compare, key="compare")
        if other is not None:
            name_apart(record, other)
        page = page_of(record, other=other)
    write_page(page, target, key=f"run={run}" if path is None else f"report_path={path}")
    return target


def write_last_report(record: RunRecord) -> str:
    """Write the report of a run that ends; return one line about it. A run that ended well stays so where its
    report cannot be written: the line gives the reason.
    """
    path = record.path / NAME
    try:
        write_page(page_of(record), path, key="callbacks.report=true")
    except Refusal as refusal:
        return f"{NAME} is not written: {refusal}"
    return f"report: {path}"
