"""Supervised batches: prompts with their answers, packed by the same packer, live routing. Serves SFT and
warm starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from lightning.pytorch import LightningDataModule
from typing_extensions import override

from olmo_rl.config import Config
from olmo_rl.data.collate import batch_of_rank
from olmo_rl.data.packs import PackedBatch
from olmo_rl.data.tasks import Problem, Task
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.planning.packing import plan_step, unpacked_plan
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample


class DemonstrationDataModule(LightningDataModule):
    """Endless supervised steps of `samples_per_step` demonstrations, drawn by (seed, step) alone, so that
    resuming at a step continues where the run left off.
    """

    def __init__(self, config: Config, *, task: Task, tokenizer: Tokenizer, samples_per_step: int) -> None:
        super().__init__()
        self.config = config
        self.steps_left = 0
        self._task = task
        self._tokenizer = tokenizer
        self._samples_per_step = samples_per_step

    @override
    def train_dataloader(self) -> DemonstrationDataModule:
        return self

    def __len__(self) -> int:
        return int(cast(Any, self.trainer).max_steps)

    def __iter__(self) -> Iterator[PackedBatch]:
        for step in itertools.count(int(cast(Any, self.trainer).global_step)):
            yield self._batch(step)

    def _batch(self, step: int) -> PackedBatch:
        strategy = cast(ExpertParallelStrategy, cast(Any, self.trainer).strategy)
        seed = _step_seed(self.config.seed, step)
        problems = strategy.from_rank_zero(lambda: self._task.problems(self._samples_per_step, seed=seed))
        samples = [self._sample(problem, id=f"step{step}-{i}") for i, problem in enumerate(problems)]
        lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
        budget = self.config.budget
        if self.config.packed:
            ids = [sample.id for sample in samples]
            plan = plan_step(lengths, budget=budget, topology=strategy.topology, ids=ids)
        else:
            plan = unpacked_plan(lengths, topology=strategy.topology)
        batch = batch_of_rank(
            samples,
            plan=plan,
            rank=strategy.global_rank,
            layout=None,
            topology=strategy.topology,
            budget=budget,
        )
        cells = plan.packs_per_rank * plan.world_size
        batch.facts = {
            "packing/packs": float(plan.packs_per_rank),
            "packing/fill": float(lengths.sum()) / (cells * budget),
            "packing/samples_per_pack": len(samples) / cells,
            "packing/tokens_per_pack": float(lengths.sum()) / cells,
        }
        return batch

    def _sample(self, problem: Problem, *, id: str) -> Sample:
        prompt = self._tokenizer.encode(problem.prompt)
        answer = [*self._tokenizer.encode(problem.answer), self._tokenizer.eos_id]
        tokens = np.array([*prompt, *answer], dtype=np.int32)
        if len(tokens) > self.config.model.max_seq_len:
            raise Refusal(
                f"problem {problem.id}: prompt and answer have {len(tokens)} tokens, more than "
                f"model.max_seq_len={self.config.model.max_seq_len}: raise it, or choose easier problems"
            )
        return Sample(
            id=id,
            group=id,
            tokens=tokens,
            response_mask=np.arange(len(tokens)) >= len(prompt),
            behavior_logprobs=np.zeros(len(tokens), dtype=np.float32),
            reward=0.0,
        )


def _step_seed(seed: int, step: int) -> int:
    """Seeds of demonstrations, apart from those of rollouts."""
    return int(np.random.SeedSequence([seed, step], spawn_key=(1,)).generate_state(1, np.uint64)[0] >> 1)
