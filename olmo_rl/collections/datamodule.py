"""Collections -> optimizer steps. Owns the data cursor, also inside a collection.

All ranks hold all samples of a collection, so filters, denominators and plans are plain arithmetic that
agrees by construction; only drawing and the planner's broadcast communicate. One Lightning batch is one
optimizer step.

With `balance.overlap` every step of a collection is planned while earlier ones are scored or trained, and a
recorded collection is read, counted and planned while the one before it trains (with `rollouts.max_lag` it is
only read and counted: ages follow from updates that have not happened yet). A source that generates
on policy cannot be ahead of the weights that it generates with.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray
from typing_extensions import override

from olmo_rl.collections.collecting import Drawn, cut, draw_collection
from olmo_rl.collections.continuous import ContinuousSource, refuse_lost_queue
from olmo_rl.collections.open_collection import OpenCollection
from olmo_rl.collections.pending import Pending
from olmo_rl.collections.planner import StepPlanner
from olmo_rl.collections.reward_divergence import divergences_of
from olmo_rl.collections.sources import RolloutSource
from olmo_rl.collections.step_loader import StepLoader
from olmo_rl.config import Config
from olmo_rl.progress import note_phase
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample


class RolloutDataModule(LightningDataModule):
    """Serves the steps of this rank. State: how many collections were opened (seeds and files follow from
    it), where the source goes on behind them, and the rest of the present one.
    """

    def __init__(self, config: Config, *, source: RolloutSource) -> None:
        super().__init__()
        self.config = config
        self.source = source
        self.collections_drawn = 0
        self._source_state: dict[str, Any] = source.state_dict()  # behind the present collection
        self._skips_in_a_row = 0
        self._planner: StepPlanner | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: Future[Drawn | OpenCollection | None] | None = None
        self._open: OpenCollection | None = None
        self._resumed: Pending | None = None

    @override
    def setup(self, stage: str) -> None:
        if self._planner is None:
            self._planner = StepPlanner(self.config, strategy=self.strategy)
            self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")

    @override
    def teardown(self, stage: str) -> None:
        if self._planner is not None and self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._planner.close()
            self._planner = self._reader = self._ahead = None

    @override
    def train_dataloader(self) -> StepLoader:
        return StepLoader(self)

    @override
    def predict_dataloader(self) -> StepLoader:
        return StepLoader(self)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The cursor, and the steps of the present collection that were not trained. A collective of all
        ranks.
        """
        pending = self._resumed
        if self._open is not None:
            generates = self.source.generates
            pending = self._open.pending(finished=self.policy.finished_step, generates=generates)
        queue = {}
        if isinstance(self.source, ContinuousSource):
            queue["queue"] = self.source.queue_state(step=self.policy_version)
            self._source_state = self.source.state_dict()
        return {
            "collections_drawn": self.collections_drawn,
            "skips_in_a_row": self._skips_in_a_row,
            "source": self._source_state,
            "pending": None if pending is None else pending.state(),
            **queue,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.collections_drawn = state_dict["collections_drawn"]
        self._skips_in_a_row = state_dict["skips_in_a_row"]
        if source := state_dict.get("source"):  # absent before sources had a state
            self.source.load_state_dict(source)
            self._source_state = source
        pending = state_dict["pending"]
        self._resumed = None if pending is None else Pending.of_state(pending)
        queue = state_dict.get("queue")
        if isinstance(self.source, ContinuousSource):
            self.source.load_queue(queue, collections_drawn=self.collections_drawn)
        else:
            refuse_lost_queue(queue)

    def next_collection(self) -> OpenCollection | None:
        """The optimizer steps of the next collection; None at the end."""
        self._open = None  # trained: nothing of it is left to save
        opened = self._next_open()
        if opened is None:
            return None
        self._open, self._resumed = opened, None
        self._read_ahead(opened)
        if not opened.resumed:
            self._count_skips(opened.trains, facts=opened.facts)
        if self.policy.scores_ahead(steps_in_collection=opened.steps_in_collection):
            opened.score(self.policy.score_step)
        return opened

    def _next_open(self) -> OpenCollection | None:
        if self._resumed is not None:
            return self._reopened(self._resumed)
        started = time.perf_counter()
        note_phase("rollout")
        if isinstance(self.source, ContinuousSource):
            found: Drawn | OpenCollection | None = self._open_step(self.source)
        elif self._ahead is None:
            found = self._draw(self.collections_drawn)
        else:
            ahead, self._ahead = self._ahead, None
            found = ahead.result()
        if found is None:
            return None
        if isinstance(found, Drawn):
            found = self._cut(found, version=self.policy_version)
        self.collections_drawn += 1
        self._source_state = self.source.state_dict()
        _print(found.notes)
        found.facts["time/rollout_s"] = time.perf_counter() - started
        return found

    def _draw(self, index: int) -> Drawn | None:
        version = self.policy_version if self.source.generates else None
        return draw_collection(
            self.config,
            source=self.source,
            planner=self.planner,
            index=index,
            version=version,
            divergences=self._divergences if self._takes_divergence else None,
        )

    @property
    def _takes_divergence(self) -> bool:
        """Whether rewards count the divergence from the reference: in training alone."""
        return self.config.loss.kl_reward_coef != 0 and cast(Any, self.trainer).training

    def _divergences(self, samples: Sequence[Sample]) -> NDArray[np.float64]:
        return divergences_of(
            samples, config=self.config, reference=self.policy.reference, strategy=self.strategy
        )

    def _open_step(self, source: ContinuousSource) -> OpenCollection:
        """The next step of continuous generation, as a collection of its own."""
        version, steps = self.policy_version, cast(Any, self.trainer).max_steps
        steps_left = None if steps in (-1, None) else steps - version
        drawn = source.draw_step(step=version, steps_left=steps_left, planner=self.planner)
        return OpenCollection(
            drawn,
            blocks=[drawn.samples],
            config=self.config,
            planner=self.planner,
            strategy=self.strategy,
        )

    def _cut(self, drawn: Drawn, *, version: int) -> OpenCollection:
        """Cut a collection into steps and let the planner start on them."""
        blocks = cut(
            drawn,
            config=self.config,
            generates=self.source.generates,
            version=version,
            world_size=self.strategy.world_size,
        )
        return OpenCollection(
            drawn, blocks=blocks or [[]], config=self.config, planner=self.planner, strategy=self.strategy
        )

    def _reopened(self, pending: Pending) -> OpenCollection:
        """The rest of a collection after a checkpoint: from the checkpoint itself, or from its file."""
        drawn = self._drawn_again(pending)
        blocks, left_out = pending.blocks(drawn.samples, world_size=self.strategy.world_size)
        drawn.facts = dict(pending.facts)
        if left_out:
            drawn.facts["batch/left_out"] = drawn.facts.get("batch/left_out", 0.0) + left_out
        return OpenCollection(
            drawn,
            blocks=blocks,
            config=self.config,
            planner=self.planner,
            strategy=self.strategy,
            pending=pending,
        )

    def _drawn_again(self, pending: Pending) -> Drawn:
        if pending.samples is not None:
            counts = self.planner.count(self.config.model.expert_layout if self.config.replay else None)
            counts.arrive(pending.samples)
            return Drawn(
                samples=pending.samples, counts=counts, facts={}, source=pending.source, filtered=False
            )
        if self.source.generates:
            raise Refusal(
                f"ckpt_path: the checkpoint lies inside {pending.source}, and this run generates: resume it "
                "with rollouts=files and the same rollouts.path"
            )
        found = self._draw(self.collections_drawn - 1)
        if found is None:
            raise Refusal(
                f"ckpt_path: the checkpoint lies inside {pending.source}, file "
                f"{self.collections_drawn} of rollouts.path, which holds fewer now: restore it"
            )
        _print(found.notes)
        return found

    def _read_ahead(self, opened: OpenCollection) -> None:
        """Start on the next file, where one may still be trained."""
        steps = cast(Any, self.trainer).max_steps
        assert self._reader is not None
        wanted = steps in (-1, None) or self.policy_version + sum(opened.trains) < steps
        overlaps = self.planner.searches and self.config.balance.overlap
        # A reference is asked on the main thread alone: that is a collective.
        if self.source.generates or not overlaps or not wanted or self._takes_divergence:
            return
        index = self.collections_drawn

        def read() -> Drawn | OpenCollection | None:
            drawn = self._draw(index)
            if drawn is None or self.config.rollouts.max_lag is not None:
                return drawn
            return self._cut(drawn, version=0)  # nothing is too old

        self._ahead = self._reader.submit(read)

    def _count_skips(self, trains: list[bool], *, facts: Mapping[str, float]) -> None:
        """Raise Refusal after many collections in a row without anything to train on."""
        for training in trains:
            self._skips_in_a_row = 0 if training else self._skips_in_a_row + 1
        limit = self.config.batch.max_skips
        if self._skips_in_a_row > limit:
            skipped = (
                f"batch.max_skips={limit}: {self._skips_in_a_row} steps in a row had nothing to train on"
            )
            failed = facts.get("batch/failed_rewards", 0.0)
            if failed > 0 and failed == facts.get("rollouts/samples"):
                raise Refusal(
                    f"{skipped}: the verifier gave none of the last {failed:.0f} samples a reward (NaN, or a "
                    "failure that is left out): correct it"
                )
            raise Refusal(
                f"{skipped}: every sample was filtered or masked. Warm the policy up (warm_start.steps), "
                "choose an easier task, or turn batch.filter_zero_variance and batch.filter_truncated off"
            )

    @property
    def planner(self) -> StepPlanner:
        assert self._planner is not None, "Lightning sets the data module up before it asks for batches"
        return self._planner

    @property
    def strategy(self) -> ExpertParallelStrategy:
        return cast(ExpertParallelStrategy, cast(Any, self.trainer).strategy)

    @property
    def policy(self) -> PolicyModule:
        return cast(PolicyModule, cast(Any, self.trainer).lightning_module)

    @property
    def policy_version(self) -> int:
        return int(cast(Any, self.trainer).global_step)


def _print(notes: tuple[str, ...]) -> None:
    for note in notes:
        rank_zero_only(print)(note, flush=True)
