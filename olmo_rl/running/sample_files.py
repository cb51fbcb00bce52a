"""samples/step-<n>.parquet: generations of every update for people to read, with what training made of them.

Rank 0 writes them. Their number is bounded: beyond `MOST_FILES` every second older one is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmo_rl.complete_files import complete_file
from olmo_rl.config import Config
from olmo_rl.data.packs import Step
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.running.loggers import TensorBoardRun, WandbRun
from olmo_rl.training.kept_samples import kept_span, scored_places
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import StepResult
from olmo_rl.types import Sample

MOST_FILES = 512
SHOW_INTERVAL = 50  # updates between tables of samples in loggers that show them
REPLACEMENT = "\ufffd"
SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "sample_id": pa.string(),
        "group_id": pa.string(),
        "prompt": pa.string(),
        "response": pa.string(),
        "pieces": pa.list_(pa.string()),
        "gaps": pa.list_(pa.float32()),
        "tokens": pa.int64(),
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "finish_reason": pa.string(),
        "policy_version": pa.int64(),
    }
)


class SampleFiles(Callback):
    """Writes the samples that an update kept. `tokenizer`: of their tokens; None where it is unknown, which
    leaves `pieces` null and texts as the source recorded them.
    """

    def __init__(self, config: Config, *, tokenizer: Tokenizer | None) -> None:
        self._directory = Path(config.run_dir) / "samples"
        self._tokenizer = tokenizer

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Delete samples of updates that this run makes again."""
        if trainer.is_global_zero:
            for path in sample_files(self._directory):
                if number_of(path) > trainer.global_step:
                    path.unlink()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Step, batch_idx: int
    ) -> None:
        result = cast(PolicyModule, pl_module).result
        if not trainer.is_global_zero or result is None or not result.stepped:
            return
        rows = rows_of(result, step=trainer.global_step, tokenizer=self._tokenizer)
        if not rows:
            return
        with complete_file(self._directory / f"step-{trainer.global_step}.parquet") as path:
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
        thin(self._directory)
        step = trainer.global_step
        if step == 1 or step % SHOW_INTERVAL == 0 or step == trainer.max_steps:
            for logger in trainer.loggers:
                if isinstance(logger, WandbRun | TensorBoardRun):
                    logger.log_samples(rows, step=step)


def sample_files(directory: Path) -> list[Path]:
    """The files of a run, by update."""
    found = [path for path in directory.glob("step-*.parquet") if path.stem[len("step-") :].isdecimal()]
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    """The update whose samples a file holds."""
    return int(path.stem.removeprefix("step-"))


def thin(directory: Path) -> None:
    """Delete every second file of all but the newest, once there are more than `MOST_FILES`."""
    found = sample_files(directory)
    if len(found) > MOST_FILES:
        for path in found[1:-1:2]:
            path.unlink()


def rows_of(result: StepResult, *, step: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """One row for each kept sample of an update."""
    totals, samples = result.totals, result.step.samples
    if totals.kept is None:
        return []
    return [
        row_of(samples[place], step=step, gaps=gaps, tokenizer=tokenizer)
        for place, gaps in zip(totals.kept.positions, totals.kept_gaps, strict=True)
    ]


def row_of(
    sample: Sample, *, step: int, gaps: Sequence[float], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """A row of `SCHEMA`. `gaps`: policy - behaviour of the kept tokens that are scored, in order."""
    span = kept_span(sample)
    aligned: list[float | None] = [None] * (span.stop - span.start)
    for place, gap in zip(scored_places(sample), gaps, strict=True):
        aligned[place] = gap
    prompt, response, pieces = sample.prompt, sample.response, None
    if tokenizer is not None:
        pieces = pieces_of(sample.tokens[span].tolist(), tokenizer=tokenizer)
        if prompt is None:
            prompt = tokenizer.decode(sample.tokens[: span.start].tolist())
        if response is None:
            response = tokenizer.decode(sample.tokens[span.start :].tolist())
    return {
        "step": step,
        "sample_id": sample.id,
        "group_id": sample.group,
        "prompt": prompt,
        "response": response,
        "pieces": pieces,
        "gaps": aligned,
        "tokens": int(sample.response_mask.sum()),
        "reward": sample.reward,
        "advantage": sample.advantage,
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
    }


def pieces_of(ids: Sequence[int], *, tokenizer: Tokenizer) -> list[str]:
    """The text that each token adds to those before it. A character of several tokens belongs to the last of
    them; special tokens add nothing.
    """
    pieces: list[str] = []
    start = read = 0  # the tokens before `read` are in the pieces; those from `start` on are their context
    for place in range(len(ids)):
        before = tokenizer.decode(ids[start:read])
        text = tokenizer.decode(ids[start : place + 1])
        if text.endswith(REPLACEMENT) and place + 1 < len(ids) and place - read < 3:
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, read = read, place + 1
    return pieces
