"""Chat data before a run: every row that it may read, rendered; faults by line, contents as notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from olmo_rl.config import Config, Overlong
from olmo_rl.data.chat import Document, render, too_long, within
from olmo_rl.data.chat_files import Place, RowFile
from olmo_rl.data.findings import Findings
from olmo_rl.data.inputs import KeptRows
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.data.turns import ChatRow

_REPORTED = 20  # refused rows of one key


@dataclass(kw_only=True, slots=True)
class ChatSurvey:
    """The rows under one key, up to `count` that are kept (None = all), rendered; invalid ones are reasons.

    Rows, refused and kept ones; tokens of all, trained ones of them, and of the longest; whether any turn of
    the assistant contains the end of sequence.
    """

    key: str
    path: str
    count: int | None
    config: Config
    tokenizer: Tokenizer
    findings: Findings
    rows: int = 0
    refused: int = 0
    kept: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    ends: bool = False

    def read(self, files: Sequence[RowFile]) -> None:
        """Look at the files, and hand their rows on where the run needs no others."""
        findings, room = self.findings, self.findings.inputs.free
        parts = [
            KeptRows(label=file.label, entries=self._entries(Place(file=index), file=file, room=room))
            for index, file in enumerate(files)
        ]
        if not self.rows and not findings.reasons:
            findings.reasons.append(f"{', '.join(file.label for file in files)}: no row in it")
        self._judge()
        if self.full and self.key == "sft.path":  # another pass, or a run that goes on, reads further
            return
        if not findings.reasons and 5 * self.tokens < room:
            findings.inputs.keep_chat(self.key, parts, tokens=self.tokens)

    @property
    def full(self) -> bool:
        """Whether as many rows are kept as the run may read."""
        return self.count is not None and self.kept >= self.count

    def _entries(self, start: Place, *, file: RowFile, room: int) -> list[tuple[ChatRow, Place]]:
        """The rows of one file with their documents, as far as `room` bytes hold them."""
        found: list[tuple[ChatRow, Place]] = []
        rows, train_on = file.rows(start), self.config.sft.train_on
        while not self.full and self.refused < _REPORTED:
            entry = self.findings.collect(partial(next, rows, None))
            if entry is None:
                break
            row, place = entry
            self.rows += 1
            render_row = partial(render, row, tokenizer=self.tokenizer, train_on=train_on)
            document = self.findings.collect(render_row)
            if document is None:
                self.refused += 1
                continue
            self._count(document, where=row.where)
            if 5 * self.tokens < room:
                found.append((replace(row, raw=b"", document=document), place))
        return found

    def _count(self, document: Document, *, where: str) -> None:
        overlong, longest = self.config.sft.overlong, self.config.model.max_seq_len
        ids, trained = document
        self.tokens += len(ids)
        self.trained += int(trained.sum())
        self.longest = max(self.longest, len(ids))
        self.ends = self.ends or self.tokenizer.eos_id in ids[trained]
        self.kept += within(document, longest=longest, overlong=overlong) is not None
        if len(ids) > longest and overlong is Overlong.refuse:
            self.findings.reasons.append(too_long(where, tokens=len(ids), longest=longest))
            self.refused += 1

    def _judge(self) -> None:
        """Reasons and notes about all rows together."""
        sft, size = self.config.sft, self.config.batch.samples_per_step or 0
        reasons, notes = self.findings.reasons, self.findings.notes
        if not self.tokens:
            return
        whole = not self.full and not self.refused
        given = self.kept * (sft.epochs or 1)
        if whole and not self.kept:
            reasons.append(
                f"{self.key}={self.path}: sft.overlong={sft.overlong.value} leaves none of its {self.rows} "
                f"conversations, the shortest exceeds model.max_seq_len={self.config.model.max_seq_len}: "
                "raise it, or name other data"
            )
        elif whole and self.key == "sft.path" and sft.epochs is not None and given < size:
            reasons.append(
                f"sft.epochs={sft.epochs}: the data hold {given} conversations, fewer than the "
                f"batch.samples_per_step={size} of one update: lower it or raise sft.epochs"
            )
        notes.append(
            f"{self.key}: the {'' if whole else 'first '}{self.rows} conversations have up to "
            f"{self.longest:,} tokens, {self.trained / self.tokens:.0%} of them the assistant's"
        )
        if not self.ends:
            notes.append(
                f"{self.key}: no turn of the assistant contains the tokenizer's end of sequence: the policy "
                "does not learn to stop"
            )
