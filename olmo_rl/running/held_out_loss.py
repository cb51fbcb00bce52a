"""Held-out loss of supervised runs: cross-entropy of conversations that are never trained.

Routes are live. Every rank runs as many forwards as every other: a last step that does not divide over the
ranks is filled with copies whose masks are false. One global sum divided by one global count of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmo_rl.collections.conversations import Conversations
from olmo_rl.collections.supervised import supervised_step
from olmo_rl.config import Config
from olmo_rl.data.chat_files import RowFile, open_chat, rows_in_order
from olmo_rl.data.means import Mean
from olmo_rl.data.packs import RouteMode, Step
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.running.callbacks import ContractLog, evaluation_due, log_known
from olmo_rl.training.scoring import score_pack
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.transfer import moved
from olmo_rl.types import Sample


class HeldOutLoss(Callback):
    """`eval/loss` before the first update, every `sft.eval_interval` updates and at the end; unknown where no
    token is scored. `files`: the held-out rows where they are in memory.
    """

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: Tokenizer,
        contract: ContractLog,
        files: Sequence[RowFile] | None = None,
    ) -> None:
        self._config = config
        self._files = files
        self._tokenizer = tokenizer
        self._contract = contract
        self._evaluated = -1

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not on_train_start, which reaches callbacks before the module is ready to run.
        if trainer.global_step == 0:
            self._evaluate(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if evaluation_due(trainer, pl_module, interval=self._config.sft.eval_interval):
            log_known(pl_module, "eval/loss", self._evaluate(trainer))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._evaluated:  # the data ended first
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> float | None:
        strategy = cast(ExpertParallelStrategy, trainer.strategy)
        total = torch.zeros(2, dtype=torch.float64, device=strategy.root_device)
        conversations = 0
        for samples in self._steps(strategy):
            conversations += len(samples)
            step = self._step(samples, strategy=strategy)
            for pack in moved(step.packs, device=strategy.root_device):
                logprobs = score_pack(pack, strategy=strategy, mode=RouteMode.live)
                total += torch.stack([-logprobs.double().sum(), logprobs.new_tensor(len(logprobs)).double()])
        loss, tokens = strategy.sum_over_ranks(total).tolist()
        mean = Mean(total=loss, count=int(tokens)).value
        self._evaluated = trainer.global_step
        self._contract.write(
            "evaluation",
            trainer=trainer,
            loss=mean,
            scored_tokens=int(tokens),
            conversations=conversations,
        )
        return mean

    def _steps(self, strategy: ExpertParallelStrategy) -> Iterator[list[Sample]]:
        """Held-out conversations in the order of their files, as many at a time as a step trains."""
        sft, count = self._config.sft, self._config.batch.samples_per_step
        assert sft.eval_path is not None, "no callback without held-out data"
        assert count is not None, "refusals require batch.samples_per_step for recipe=sft"
        files = self._files
        if files is None:
            files = open_chat(sft.eval_path, config=sft, key="sft.eval_path", split=sft.eval_split)
        held_out = Conversations(
            self._config,
            stream=rows_in_order(files),
            tokenizer=self._tokenizer,
            strategy=strategy,
        )
        left = sft.eval_samples
        while samples := held_out.draw(count if left is None else min(count, left)):
            left = None if left is None else left - len(samples)
            yield samples

    def _step(self, samples: list[Sample], *, strategy: ExpertParallelStrategy) -> Step:
        missing = -len(samples) % strategy.topology.world_size
        copies = [
            replace(samples[-1], id=f"{samples[-1].id}+{i}", loss_mask=np.zeros(len(samples[-1]), dtype=bool))
            for i in range(missing)
        ]
        return supervised_step([*samples, *copies], config=self._config, strategy=strategy)
