"""Chat data as a source of supervised documents, the same for every number of ranks.

All ranks walk through the same rows; each parses and tokenizes its share of a draw and the shares are
exchanged, so that a step takes the next rows in the order of the stream however many ranks there are. A row
that is invalid is refused by every rank. Owns the counts of conversations used, dropped and cut.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from olmo_rl.config import Config, Overlong
from olmo_rl.data.chat import Document, render, supervised_sample, too_long, within
from olmo_rl.data.chat_files import ChatStream
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.data.turns import ChatRow
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample


class Conversations:
    """Rendered conversations of a stream, those beyond the context treated by `sft.overlong`."""

    def __init__(
        self, config: Config, *, stream: ChatStream, tokenizer: Tokenizer, strategy: ExpertParallelStrategy
    ) -> None:
        self._config = config
        self._stream = stream
        self._tokenizer = tokenizer
        self._strategy = strategy
        self._counts = {"conversations": 0, "dropped": 0, "truncated": 0}
        self._fruitful_epoch = 0  # the last one that gave a document

    def draw(self, count: int) -> list[Sample]:
        """The next `count` conversations that are kept. Every rank makes the same exchanges, since all ranks
        read all rows.
        """
        kept: list[Sample] = []
        while len(kept) < count and (rows := self._stream.take(count - len(kept))):
            for row, document in zip(rows, self._rendered(rows), strict=True):
                if (fitted := self._fitted(document, where=row.where)) is not None:
                    kept.append(supervised_sample(row.id, fitted[0], trained=fitted[1]))
                    self._fruitful_epoch = self._stream.cursor.epoch
            if self._stream.cursor.epoch > self._fruitful_epoch + 1:
                raise Refusal(
                    f"sft.overlong={self._config.sft.overlong.value}: no conversation fits into "
                    f"model.max_seq_len={self._config.model.max_seq_len}: raise it"
                )
        self._counts["conversations"] += len(kept)
        return kept

    def facts(self) -> dict[str, float]:
        """The epoch of the last row (from 0), and the conversations used, dropped and truncated since the run
        began.
        """
        counts = {f"sft/{name}": float(count) for name, count in self._counts.items()}
        return counts | {"sft/epoch": float(self._stream.cursor.epoch)}

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self._stream.state_dict(), "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self._counts = dict(state["counts"])
        self._fruitful_epoch = self._stream.cursor.epoch

    def _rendered(self, rows: list[ChatRow]) -> list[Document]:
        rank, ranks = self._strategy.global_rank, self._strategy.topology.world_size
        # A refusal is a result here: the other ranks wait for this one's share.
        shares = self._strategy.gather_objects(
            [
                outcome(partial(render, row, tokenizer=self._tokenizer, train_on=self._config.sft.train_on))
                for row in rows[rank::ranks]
            ]
        )
        results = [shares[i % ranks][i // ranks] for i in range(len(rows))]
        return together(results)

    def _fitted(self, document: Document, *, where: str) -> Document | None:
        """The document as it is trained; None where it is dropped."""
        longest, overlong = self._config.model.max_seq_len, self._config.sft.overlong
        if len(document[0]) <= longest:
            return document
        if overlong is Overlong.refuse:
            raise Refusal(too_long(where, tokens=len(document[0]), longest=longest))
        fitted = within(document, longest=longest, overlong=overlong)
        self._counts["dropped" if fitted is None else "truncated"] += 1
        return fitted
