"""Chat data as a source of supervised documents, the same for every number of ranks.

All ranks walk through the same rows; each parses and tokenizes its share of a draw and the shares are
exchanged, so that a step takes the next rows in the order of the stream however many ranks there are. A row
that is refused is refused by every rank alike. Owns the counts of conversations used, dropped and cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.config import Config, Overlong
from olmo_rl.data.chat import ChatRow, render, supervised_sample, too_long
from olmo_rl.data.chat_files import ChatStream
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample

_REPORTED = 20  # invalid rows of one draw that are reported

Document = tuple[NDArray[np.int32], NDArray[np.bool_]]


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
        """The next `count` conversations that are kept. Every rank exchanges as often: all see all rows."""
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
        """The epoch of the last row (from 0), and what was used, dropped and cut since the run began."""
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
        shares = self._strategy.gather_objects([self._try(row) for row in rows[rank::ranks]])
        results = [shares[i % ranks][i // ranks] for i in range(len(rows))]
        reasons = [reason for result in results if isinstance(result, Refusal) for reason in result.reasons]
        if reasons:
            raise Refusal(reasons[:_REPORTED])
        return results

    def _try(self, row: ChatRow) -> Document | Refusal:
        """A refusal is a result here: the other ranks wait for this one's share."""
        try:
            return render(row, tokenizer=self._tokenizer)
        except Refusal as refusal:
            return refusal

    def _fitted(self, document: Document, *, where: str) -> Document | None:
        """The document as it is trained; None where it is dropped."""
        tokens, trained = document
        longest, overlong = self._config.model.max_seq_len, self._config.sft.overlong
        if len(tokens) <= longest:
            return document
        if overlong is Overlong.refuse:
            raise Refusal(too_long(where, tokens=len(tokens), longest=longest))
        if overlong is Overlong.drop or not trained[1:longest].any():
            self._counts["dropped"] += 1
            return None
        self._counts["truncated"] += 1
        return tokens[:longest], trained[:longest]
