"""Supervised batches: documents with answers, packed by the same packer, live routing. Serves SFT and warm
starts.

Owns the content of a supervised step and the count of steps drawn; a source gives the documents in order.
Refuses demonstrations longer than the model's context and data that do not fill one step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from olmo_rl.collections.step_loader import StepLoader
from olmo_rl.config import Config, OverlongPrompt
from olmo_rl.data.chat import supervised_sample
from olmo_rl.data.collate import step_of_rank
from olmo_rl.data.packs import Step
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.planning.packing import plan_step, unpacked_plan
from olmo_rl.tasks.order import DEMONSTRATIONS, PromptOrder
from olmo_rl.tasks.problems import Problem, Task, demonstration
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample


class SupervisedSource(Protocol):
    """A source of documents. Every rank draws the same; checkpoints hold its state."""

    def draw(self, count: int) -> list[Sample]:
        """The next `count` documents, the same on all ranks; fewer only where the data end."""
        ...

    def facts(self) -> dict[str, float]:
        """Metrics of the source after the last draw."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SupervisedDataModule(LightningDataModule):
    """Steps of `samples_per_step` documents until the source ends; the incomplete last step is left
    out and reported. State: steps drawn, and the source's.
    """

    def __init__(self, config: Config, *, source: SupervisedSource, samples_per_step: int) -> None:
        super().__init__()
        self.config = config
        self.source = source
        self._step: Step | None = None
        self.steps_drawn = 0
        self._samples_per_step = samples_per_step

    @override
    def train_dataloader(self) -> StepLoader:
        return StepLoader(self)

    @override
    def state_dict(self) -> dict[str, Any]:
        """A step counts once its update ended: a draw that was refused, or an update that failed, will be
        drawn again.
        """
        finished = cast(PolicyModule, cast(Any, self.trainer).lightning_module).finished_step
        return self._after if self._step is not None and self._step is finished else self._before

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps_drawn = state_dict["steps_drawn"]
        self.source.load_state_dict(state_dict["source"])

    def next_collection(self) -> Sequence[Step] | None:
        """One step, or None at the end."""
        started = time.perf_counter()
        self._before, self._step = self._state(), None
        samples = self.source.draw(self._samples_per_step)
        if len(samples) < self._samples_per_step:
            self._end(len(samples))
            return None
        self.steps_drawn += 1
        self._after = self._state()
        step = supervised_step(samples, config=self.config, strategy=self.strategy)
        facts = dict(step.facts) | self.source.facts() | {"time/data_s": time.perf_counter() - started}
        self._step = replace(step, facts=facts)
        return [self._step]

    def _state(self) -> dict[str, Any]:
        return {"steps_drawn": self.steps_drawn, "source": self.source.state_dict()}

    def _end(self, left: int) -> None:
        if self.steps_drawn == 0:
            raise Refusal(
                f"sft.epochs={self.config.sft.epochs}: the data hold {left} conversations, fewer than the "
                f"batch.samples_per_step={self._samples_per_step} of one update: lower it or raise sft.epochs"
            )
        if left:
            note = f"{left} conversations at the end do not fill an update and are left out"
            rank_zero_only(print)(note, flush=True)

    @property
    def strategy(self) -> ExpertParallelStrategy:
        return cast(ExpertParallelStrategy, cast(Any, self.trainer).strategy)


def supervised_step(samples: Sequence[Sample], *, config: Config, strategy: ExpertParallelStrategy) -> Step:
    """One step of `samples` in their order, as this rank runs it."""
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    ids = [sample.id for sample in samples]
    if config.packed:
        plan = plan_step(lengths, budget=config.budget, topology=strategy.topology, ids=ids)
    else:
        plan = unpacked_plan(lengths, topology=strategy.topology, ids=ids)
    step = step_of_rank(
        samples,
        plan=plan,
        rank=strategy.global_rank,
        layout=None,
        topology=strategy.topology,
        budget=config.budget,
        padding=config.padding,
    )
    cells = plan.packs_per_rank * plan.world_size
    facts = {
        "packing/packs": float(plan.packs_per_rank),
        "packing/fill": float(lengths.sum()) / (cells * config.budget),
        "packing/samples_per_pack": len(samples) / cells,
        "packing/tokens_per_pack": float(lengths.sum()) / cells,
        "sft/tokens": float(lengths.sum()),
        "sft/scored_tokens": float(step.normalisers.tokens),
    }
    return replace(step, facts=facts)


class TaskDemonstrations:
    """A task's problems with their answers, pass after pass."""

    def __init__(
        self, config: Config, *, task: Task, tokenizer: Tokenizer, strategy: ExpertParallelStrategy
    ) -> None:
        self._config = config
        self._order = PromptOrder(task=task, seed=DEMONSTRATIONS)
        self._tokenizer = tokenizer
        self._strategy = strategy
        self._draws = self._overlong = 0

    def draw(self, count: int) -> list[Sample]:
        """Rank 0 chooses, because another process might make other problems."""
        drawn = self._strategy.from_rank_zero(lambda: outcome(lambda: self._order.take(count)))
        (taken,) = together([drawn])
        self._order.advance(taken)
        self._overlong += taken.overlong
        samples = [
            self._sample(problem, id=f"step{self._draws}-{i}") for i, problem in enumerate(taken.problems)
        ]
        self._draws += 1
        return samples

    def facts(self) -> dict[str, float]:
        epochs = self._order.epochs
        known = {"sft/epoch" + (f"/{name}" if name else ""): epoch for name, epoch in epochs.items()}
        if self._config.task.overlong is OverlongPrompt.leave_out:
            known["sft/dropped"] = float(self._overlong)
        return known

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self._draws, "overlong": self._overlong, "order": self._order.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._draws, self._overlong = state["draws"], state.get("overlong", 0)
        if "order" in state:  # absent before problems had an order
            self._order.load_state_dict(state["order"])

    def _sample(self, problem: Problem, *, id: str) -> Sample:
        prompt, answer = demonstration(problem, tokenizer=self._tokenizer)
        tokens = np.array([*prompt, *answer], dtype=np.int32)
        if len(tokens) > self._config.model.max_seq_len:
            raise Refusal(
                f"problem {problem.id}: prompt and answer have {len(tokens)} tokens, more than "
                f"model.max_seq_len={self._config.model.max_seq_len}: raise it, or choose easier problems"
            )
        return supervised_sample(id, tokens, trained=np.arange(len(tokens)) >= len(prompt))
