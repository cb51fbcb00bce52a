"""Where collections come from: the local engine, or files. Owns generation shared over ranks.

A source draws one round at a time; filters and the cut into optimizer batches are the DataModule's. Every
rank calls `draw` with equal arguments and receives equal collections, so every rank meets the same
collectives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from olmo_rl.config import Config
from olmo_rl.data.files import collection_paths
from olmo_rl.data.preflight import read_for
from olmo_rl.data.tasks import Problem
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.training.build import LocalRollouts
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, Sample


class Source(Protocol):
    """Draws collections by index; `generates` tells whether a short collection can be filled by drawing
    again.
    """

    generates: bool

    def draw(self, index: int, *, attempt: int, groups: int) -> Collection | None:
        """Collection `index`, round `attempt`, about `groups` groups; None when the source is exhausted."""
        ...


class FileSource:
    """Recorded collections, one file each, in name order, each once."""

    generates = False

    def __init__(self, config: Config) -> None:
        assert config.rollouts.path is not None, "refusals require rollouts.path for rollouts=files"
        self.paths: list[Path] = collection_paths(config.rollouts.path)
        self._config = config

    def draw(self, index: int, *, attempt: int, groups: int) -> Collection | None:
        del groups
        if attempt > 0 or index >= len(self.paths):
            return None
        collection = read_for(self._config, path=self.paths[index])
        for note in collection.notes:
            rank_zero_only(print)(note, flush=True)
        return collection


class LocalSource:
    """Prompts of a task answered by the local engine; ranks share the requests and exchange the samples."""

    generates = True

    def __init__(
        self,
        config: Config,
        *,
        local: LocalRollouts,
        strategy: ExpertParallelStrategy,
    ) -> None:
        self._config = config
        self._task = local.task
        self._tokenizer = local.tokenizer
        self._engine = local.engine
        self._strategy = strategy
        self._layout = config.model.expert_layout

    def draw(self, index: int, *, attempt: int, groups: int) -> Collection | None:
        rollouts = self._config.rollouts
        seed = _seed(self._config.seed, index, attempt)
        # Some datasets draw from state that differs between processes.
        problems = self._strategy.from_rank_zero(lambda: self._task.problems(groups, seed=seed))
        requests: list[tuple[str, str, Problem]] = []
        for number, problem in enumerate(problems):
            group = f"c{index}-a{attempt}-p{number}"
            requests += [(group, f"{group}-s{i}", problem) for i in range(rollouts.group_size)]
        mine = requests[self._strategy.global_rank :: self._strategy.world_size]
        generations = self._engine.generate(
            [Request(id=id, tokens=self._tokenizer.encode(problem.prompt)) for _, id, problem in mine],
            max_new_tokens=rollouts.max_new_tokens,
            stop_token=self._tokenizer.eos_id,
            temperature=rollouts.temperature,
            top_p=rollouts.top_p,
            seed=seed,
        )
        samples = [
            self._sample(group, id=id, problem=problem, generation=generation)
            for (group, id, problem), generation in zip(mine, generations, strict=True)
        ]
        by_id = {sample.id: sample for part in self._strategy.gather_objects(samples) for sample in part}
        return Collection(
            samples=[by_id[id] for _, id, _ in requests],
            layout=self._layout,
            source="local",
            tokenizer=self._config.model.tokenizer,
        )

    def _sample(self, group: str, *, id: str, problem: Problem, generation: Generation) -> Sample:
        prompt = len(generation.tokens) - len(generation.logprobs)
        response = response_text(generation, tokenizer=self._tokenizer)
        mask = np.arange(len(generation.tokens)) >= prompt
        logprobs = np.zeros(len(generation.tokens), dtype=np.float32)
        logprobs[prompt:] = generation.logprobs
        return Sample(
            id=id,
            group=group,
            tokens=np.asarray(generation.tokens, dtype=np.int32),
            response_mask=mask,
            behavior_logprobs=logprobs,
            reward=self._task.reward(problem, response),
            policy_version=generation.policy_version,
            routes=generation.routes,
            finish_reason=generation.finish_reason,
            prompt=problem.prompt,
            response=response,
        )


def response_text(generation: Generation, *, tokenizer: Tokenizer) -> str:
    """What the policy wrote, without the token that ends it."""
    ids = [int(token) for token in generation.tokens[len(generation.tokens) - len(generation.logprobs) :]]
    if ids and ids[-1] == tokenizer.eos_id:
        ids.pop()
    return tokenizer.decode(ids)


def _seed(*parts: int) -> int:
    """One 63-bit seed from several integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
