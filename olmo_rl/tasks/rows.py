"""Problems from rows of a file: lines of JSON, parquet, or a table of Hugging Face datasets. No torch here.

Refuses files that are missing or malformed, with every row at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from olmo_rl.config import SftFormat, TaskConfig
from olmo_rl.data.dataset_tables import load_table
from olmo_rl.data.json_lines import parse_line, text_fault
from olmo_rl.tasks.problems import Problem
from olmo_rl.types import Refusal

REPORTED = 20  # faults of one file


def read_problems(config: TaskConfig) -> list[Problem]:
    """The problems of `task.path`, in their order. Raises Refusal with every row at fault."""
    path = config.path
    assert path is not None, "callers know that there is a path"
    problems: list[Problem] = []
    faults: list[str] = []
    for id, row in _rows(config, path=path):
        where = f"{path}, {id.replace('-', ' ')}"
        fault = _fault(row, config=config)
        if isinstance(row, Refusal):
            faults.extend(row.reasons)
        elif fault is not None:
            faults.append(f"{where}: {fault}")
        else:
            assert isinstance(row, dict), "else it is at fault"
            problems.append(
                Problem(
                    id=id,
                    prompt=row[config.prompt_column],
                    reference=row.get(config.answer_column),
                    domain=row.get("domain"),
                    row=row,
                )
            )
    if not problems and not faults:
        faults = [f"{path}: no problem in it"]
    if faults:
        raise Refusal(faults[:REPORTED])
    return problems


def _rows(config: TaskConfig, *, path: str) -> Iterator[tuple[str, object]]:
    """Every row by an id that names its place; a Refusal in place of a line that is no JSON."""
    if config.format is SftFormat.datasets:
        table = load_table(
            path, subset=config.subset, split=config.split, where=f"task.path={path} task.format=datasets"
        )
        yield from ((f"row-{number}", row) for number, row in enumerate(table))
        return
    file = Path(path)
    if not file.is_file():
        raise Refusal(
            f"task.path={path}: no such file; a directory that datasets saved, or a dataset of the Hugging "
            "Face Hub, needs task.format=datasets"
        )
    if config.format is SftFormat.parquet or (config.format is SftFormat.auto and file.suffix == ".parquet"):
        yield from ((f"row-{number}", row) for number, row in enumerate(_parquet(file)))
        return
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if line.strip():
            yield f"line-{number}", _parsed(line, where=f"{path}, line {number}")


def _parsed(line: bytes, *, where: str) -> object:
    try:
        return parse_line(line, where=where)
    except Refusal as refusal:
        return refusal


def _parquet(file: Path) -> list[dict[str, Any]]:
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            names = opened.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise Refusal(f"{file}: column {twice[0]!r} stands twice")
            rows: list[dict[str, Any]] = opened.read().to_pylist()
            return rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{file}: not a sound parquet file: {str(error).splitlines()[0]}") from None


def _fault(row: object, *, config: TaskConfig) -> str | None:
    """Why a row is no problem; None where it is one."""
    prompt, answer = config.prompt_column, config.answer_column
    if isinstance(row, Refusal):
        return None
    if not isinstance(row, dict):
        return f'not an object: write {{"{prompt}": ..., "{answer}": ...}}'
    for key in (prompt, answer):
        if key == answer and config.rewards and row.get(key) is None:
            continue  # a reward that asks for it is refused where it is built
        if not isinstance(row.get(key), str):
            return f"{key!r} is {'missing' if key not in row else 'not text: quote it'}"
        if (fault := text_fault(row[key])) is not None:
            return f"{key!r} {fault}"
    if not isinstance(row.get("domain"), str | None):
        return "'domain' is not text: quote it"
    return f"{prompt!r} is empty" if not row[prompt] else None
