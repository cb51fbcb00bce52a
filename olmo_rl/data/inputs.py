"""What the preflight read of a run's files, handed on: the run uses what was judged, and reads no file twice.

Collections, rendered conversations and problems are kept up to `KEPT_BYTES` in all. Of everything else the
stamp is known (size and time of change): the run reads such a file again, and refuses one that is another by
then. What is handed to the processes of ranks is plain values. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from olmo_rl.config import Config, Recipe, TaskConfig
from olmo_rl.data.chat_files import Place, RowFile
from olmo_rl.data.files import collection_paths, has_reference, read_collection
from olmo_rl.data.turns import ChatRow
from olmo_rl.data.validation import check_layout, check_sampling
from olmo_rl.tasks.problems import Problem
from olmo_rl.tasks.rows import read_problems
from olmo_rl.types import FIELDS, Collection, Refusal

KEPT_BYTES = 2**28
_ROW_BYTES = 500  # of a sample or a row, beside its arrays

Stamp = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRows:
    """The rendered rows of one file of chat data, each with the place behind it; read like the file."""

    label: str
    entries: Sequence[tuple[ChatRow, Place]]

    def rows(self, start: Place) -> Iterator[tuple[ChatRow, Place]]:
        for row, place in self.entries:
            if place.number > start.number:
                yield row, replace(place, file=start.file)


@dataclass(kw_only=True, slots=True)
class Inputs:
    """What was read. `free`: bytes that may still be kept; 0 keeps nothing. `problems`: those of
    `task.path`, None where it was not read.
    """

    free: int = 0
    problems: list[Problem] | None = None
    collections: dict[str, Collection] = field(default_factory=dict)
    chats: dict[str, list[RowFile]] = field(default_factory=dict)  # by key
    stamps: dict[str, Stamp] = field(default_factory=dict)
    carries_reference: bool | None = None  # whether the first collection has reference log-probs

    def read(self, path: Path, *, config: Config) -> Collection:
        """One collection as training takes it, which is kept while there is room."""
        stamp = self.stamps.setdefault(str(path), stamp_of(path))
        collection = read_for(config, path=path)
        self._refuse_change(path, stamp=stamp)
        if self.carries_reference is None:
            self.carries_reference = collection.samples[0].ref_logprobs is not None
        if self._keeps(sum(map(_bytes_of, collection.samples))):
            self.collections[str(path)] = collection
        return collection

    def take(self, path: Path, *, config: Config) -> Collection:
        """The collection of a file, from memory once, else read again."""
        kept = self.collections.pop(str(path), None)
        if kept is not None:
            return kept
        if (stamp := self.stamps.get(str(path))) is not None:
            self._refuse_change(path, stamp=stamp)
        return read_for(config, path=path)

    def forget(self, paths: Sequence[Path]) -> None:
        """Drop collections that the run has behind it."""
        for path in paths:
            self.collections.pop(str(path), None)

    def keep_chat(self, key: str, files: Sequence[KeptRows], *, tokens: int) -> None:
        """Keep the rendered conversations of a key where there is room."""
        if self._keeps(5 * tokens + _ROW_BYTES * sum(len(file.entries) for file in files)):
            self.chats[key] = list(files)

    def read_problems(self, config: TaskConfig) -> list[Problem] | None:
        """The problems of a task's file, None where it is not named, which are kept while there is room."""
        if config.path is None:
            return None
        problems = read_problems(config)
        size = sum(len(str(value)) for problem in problems for value in problem.row.values())
        if self._keeps(size + _ROW_BYTES * len(problems)):
            self.problems = problems
        return problems

    def facts(self) -> dict[str, Any]:
        """The facts for the other ranks of a launcher, values of JSON: they read large values themselves."""
        stamps = {name: list(stamp) for name, stamp in self.stamps.items()}
        return {"stamps": stamps, "carries_reference": self.carries_reference}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Inputs:
        """The inverse; {} where nothing was read."""
        stamps = {name: (size, changed) for name, (size, changed) in facts.get("stamps", {}).items()}
        return cls(stamps=stamps, carries_reference=facts.get("carries_reference"))

    def _keeps(self, size: int) -> bool:
        if size > self.free:
            return False
        self.free -= size
        return True

    def _refuse_change(self, path: Path, *, stamp: Stamp) -> None:
        if stamp_of(path) != stamp:
            raise Refusal(
                f"{path}: the file changed after it was checked at the start of the run: write to another "
                "name and rename it, and start the run again"
            )


def stamp_of(path: Path) -> Stamp:
    """Size in bytes and time of the last change in nanoseconds; zeros where there is no such file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _bytes_of(sample: object) -> int:
    values = (getattr(sample, entry.name) for entry in FIELDS)
    return _ROW_BYTES + sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def read_for(config: Config, *, path: Path) -> Collection:
    """One collection as the recipe takes it: routes, token ids, lengths and reference log-probs must fit the
    configuration. recipe=plan never consults the model beside a file.
    """
    model = config.model
    if config.recipe is Recipe.plan:
        replay = config.policy.replay is not False
        return read_collection(path, require_routes=replay, layout=model.expert_layout if replay else None)
    collection = read_collection(
        path,
        require_routes=config.replay,
        layout=model.expert_layout,
        vocab_size=model.vocab_size,
        num_layers=len(model.layer_types),
    )
    check_layout(
        collection, expected=model.expert_layout, replay=config.replay, max_seq_len=model.max_seq_len
    )
    if config.recipe is not Recipe.score:
        check_sampling(collection, temperature=config.rollouts.temperature)
    if config.needs_reference:
        _check_reference(collection, config=config, path=path)
    return collection


def _check_reference(collection: Collection, *, config: Config, path: Path) -> None:
    """A file has reference log-probs for all of its samples or for none; they replace a reference model."""
    missing = [sample.id for sample in collection.samples if sample.ref_logprobs is None]
    if missing and len(missing) < len(collection.samples):
        raise Refusal(
            f"{path}: sample {missing[0]!r} has no ref_logprobs ({len(missing)} such samples), others have: "
            f"loss.kl_coef={config.loss.kl_coef} would mix two references. Record them for all, or for none"
        )
    if not missing and config.loss.reference is not None:
        raise Refusal(
            f"loss.reference={config.loss.reference}: no effect, {path} carries ref_logprobs, and these are "
            "used: leave loss.reference=null, or drop the column"
        )


def carries_reference(config: Config) -> bool:
    """Whether recorded files carry the log-probs of their reference: all do or none, so the first is read."""
    assert config.rollouts.path is not None, "refusals require rollouts.path for rollouts=files"
    return has_reference(collection_paths(config.rollouts.path)[0])
