"""Sources of collections: an engine of this process, serving engines, or files. Owns generation shared
over ranks.

A source draws one round at a time; filters and the cut into optimizer batches are the DataModule's. Every
rank calls `draw` with equal arguments and receives equal collections, so every rank meets the same
collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from olmo_rl.collections.generation import RolloutParts
from olmo_rl.config import Config, OverlongPrompt, RolloutsConfig
from olmo_rl.config import Source as SourceKind
from olmo_rl.data.files import collection_paths
from olmo_rl.data.inputs import Inputs
from olmo_rl.data.preflight import unknown_sampling
from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.requests import Counts
from olmo_rl.tasks.order import PromptOrder, Taken
from olmo_rl.tasks.problems import Problem, Task
from olmo_rl.tasks.shaping import ROUNDING, shaped, verdict_of
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, Sample, Sampling

STARVING_SECONDS = 60.0


class RolloutSource(Protocol):
    """Draws collections by index; `generates`: whether a short collection can be filled by drawing
    again.
    """

    generates: bool

    def draw(self, index: int, *, attempt: int, groups: int) -> Collection | None:
        """Collection `index`, round `attempt`, about `groups` groups; None when the source is exhausted. A
        source that does not generate is asked from a thread, ahead of time, and must not communicate.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the source goes on behind what it delivered, as plain values, the same on every rank."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FileSource:
    """Recorded collections, one file each, in name order, each once. `inputs`: what the preflight read."""

    generates = False

    def __init__(self, config: Config, *, inputs: Inputs | None = None) -> None:
        assert config.rollouts.path is not None, "refusals require rollouts.path for rollouts=files"
        self.paths: list[Path] = collection_paths(config.rollouts.path)
        self._config = config
        self._inputs = Inputs() if inputs is None else inputs
        self._noted = False  # that sampling settings are unknown

    def draw(self, index: int, *, attempt: int, groups: int) -> Collection | None:
        del groups
        if attempt > 0 or index >= len(self.paths):
            return None
        self._inputs.forget(self.paths[:index])
        collection = self._inputs.take(self.paths[index], config=self._config)
        if collection.sampling.temperature is None and not self._noted:
            self._noted = True
            collection.notes += (
                unknown_sampling(self.paths[index], temperature=self._config.rollouts.temperature),
            )
        return collection

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the number of the collection is all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


@dataclass(kw_only=True, slots=True, eq=False)
class Asked:
    """The requests of one round over all ranks, as (group, id, problem), this rank's, and its answers;
    `answered` by serving engines, of whose time nobody knows how long it takes.
    """

    key: tuple[int, int, int]
    requests: list[tuple[str, str, Problem]]
    mine: list[tuple[str, str, Problem]]
    answers: Callable[[], Sequence[Generation | None]]
    places: Sequence[int]  # of the problems in their order
    overlong: int  # problems that were passed over for them
    resting: int
    counts: Counts | None = None  # of a serving engine, whole once the answers are there
    answered: Future[list[Generation | None]] | None = None


class GeneratingSource:
    """Prompts of a task answered by an engine; ranks share the requests and exchange the samples.

    With serving engines and `rollouts.max_lag` of at least 2 x `batch.steps_per_collection` - 1 the next
    collection is generated while the present one trains: one collection behind the weights, no more.
    """

    generates = True

    def __init__(self, config: Config, *, parts: RolloutParts, strategy: ExpertParallelStrategy) -> None:
        self._config = config
        self._task = parts.task
        self._order = PromptOrder(task=parts.task, rest=config.task.set_aside)
        self._tokenizer = parts.tokenizer
        self._engine = parts.engine
        self._strategy = strategy
        self._layout = config.model.expert_layout
        self._ahead: Asked | None = None
        self._noted_starving = False

    def draw(self, index: int, *, attempt: int, groups: int) -> Collection | None:
        key = (index, attempt, groups)
        asked = self._ahead
        if asked is not None and asked.key[:2] == key[:2]:
            self._ahead = None
            if asked.key != key:  # another number of groups is wanted
                self._order.give_back(asked.places)
        if asked is None or asked.key != key:
            asked = self._ask(key)
        began = time.monotonic()
        if asked.answered is not None:
            self._strategy.meet(asked.answered)
        waited = time.monotonic() - began
        parts = together(self._strategy.gather_objects(outcome(lambda: self._judged(asked))))
        by_id = {sample.id: sample for mine, _ in parts for sample in mine}
        collection = Collection(
            samples=[by_id[id] for _, id, _ in asked.requests if id in by_id],
            layout=self._layout,
            source=self._config.rollouts.source.value,
            tokenizer=self._config.model.tokenizer,
            sampling=sampling_of(self._config.rollouts),
            counts={name: sum(counts[name] for _, counts in parts) for name in parts[0][1]},
        )
        self._note(asked, collection.samples)
        if self._config.task.set_aside:
            collection.counts["rollouts/set_aside"] = asked.resting
        if self._config.task.overlong is OverlongPrompt.leave_out:
            collection.counts["rollouts/overlong_prompts"] = asked.overlong
        for name, epoch in self._order.epochs.items():
            collection.facts["rollouts/epoch" + (f"/{name}" if name else "")] = epoch
        if asked.answered is not None:
            collection.counts["rollouts/wait_s"] = waited
            collection.notes += self._starving(asked, waited=waited)
        if attempt == 0 and self._looks_ahead:
            self._ahead = self._ask((index + 1, 0, groups))
        return collection

    def _note(self, asked: Asked, samples: Sequence[Sample]) -> None:
        """Count how often every problem was solved, on all ranks alike."""
        rollouts, solved_from = self._config.rollouts, self._config.evaluation.solved_from
        verdicts: dict[str, list[bool]] = {}
        for sample in samples:
            value = verdict_of(sample, rollouts=rollouts)
            if np.isfinite(value):
                verdicts.setdefault(sample.group, []).append(value >= solved_from - ROUNDING)
        problems = dict.fromkeys(group for group, _, _ in asked.requests)
        by_group = {group: problem for group, _, problem in asked.requests}
        for group, place in zip(problems, asked.places, strict=True):
            found = verdicts.get(group, [])
            self._order.note(
                by_group[group],
                place=place,
                asked=rollouts.group_size,
                judged=len(found),
                solved=sum(found),
            )

    def _judged(self, asked: Asked) -> tuple[list[Sample], dict[str, float]]:
        """This rank's samples with their rewards, and its counts."""
        answers = asked.answers()
        before = self._task.counts
        groups: dict[str, list[tuple[str, Problem, Generation]]] = {}
        for (group, id, problem), generation in zip(asked.mine, answers, strict=True):
            if generation is not None:
                groups.setdefault(group, []).append((id, problem, generation))
        samples = [sample for group, answered in groups.items() for sample in self._samples(group, answered)]
        counted = {
            f"rollouts/{name}": float(count - before[name]) for name, count in self._task.counts.items()
        }
        return samples, counted | ({} if asked.counts is None else asked.counts.metrics())

    def _starving(self, asked: Asked, *, waited: float) -> tuple[str, ...]:
        """A note, once, where training waits for engines."""
        if waited < STARVING_SECONDS or self._noted_starving:
            return ()
        self._noted_starving = True
        rollouts = self._config.rollouts
        flight = rollouts.concurrency * self._strategy.world_size
        return (
            f"collection {asked.key[0]}: training waited {waited:.0f} s for {len(asked.requests)} answers of "
            f"{len(rollouts.urls)} engines, up to {flight} requests in flight: add engines, raise "
            "rollouts.concurrency, or let rollouts.max_lag generate one collection ahead",
        )

    @property
    def _looks_ahead(self) -> bool:
        """Whether the collection after this one may be as old as it would be."""
        lag = 2 * self._config.batch.steps_per_collection - 1
        allowed = self._config.rollouts.max_lag
        return isinstance(self._engine, RemoteEngine) and allowed is not None and allowed >= lag

    def _ask(self, key: tuple[int, int, int]) -> Asked:
        """Hand this rank's requests to the engine; serving engines work on them from now on."""
        index, attempt, groups = key
        rollouts = self._config.rollouts
        seed = seed_of(self._config.seed, index, attempt)
        taken = self._take(groups)
        requests: list[tuple[str, str, Problem]] = []
        for number, problem in enumerate(taken.problems):
            group = f"c{index}-a{attempt}-p{number}"
            requests += [(group, f"{group}-s{i}", problem) for i in range(rollouts.group_size)]
        mine = self._share(requests)
        prompts = [Request(id=id, tokens=self._tokenizer.encode(problem.prompt)) for _, id, problem in mine]
        settings: dict[str, Any] = {
            "max_new_tokens": rollouts.max_new_tokens,
            "stop_token": self._tokenizer.eos_id,
            "temperature": rollouts.temperature,
            "top_p": rollouts.top_p,
            "seed": seed,
        }
        if isinstance(self._engine, RemoteEngine):
            counts = Counts()
            answered = self._engine.start(prompts, counts=counts, **settings)
            return Asked(
                key=key,
                requests=requests,
                mine=mine,
                answers=answered.result,
                counts=counts,
                places=taken.places,
                overlong=taken.overlong,
                resting=taken.resting,
                answered=answered,
            )
        generate = partial(self._engine.generate, prompts, **settings)
        return Asked(
            key=key,
            requests=requests,
            mine=mine,
            answers=generate,
            places=taken.places,
            overlong=taken.overlong,
            resting=taken.resting,
        )

    def _share(self, requests: list[tuple[str, str, Problem]]) -> list[tuple[str, str, Problem]]:
        """This rank's requests: every n-th one, or those of every n-th group where groups are judged."""
        size = self._config.rollouts.group_size if self._task.judges_groups else 1
        rank, ranks = self._strategy.global_rank, self._strategy.world_size
        return [request for i, request in enumerate(requests) if i // size % ranks == rank]

    def _take(self, groups: int) -> Taken:
        """The next problems, chosen by rank 0. A collective of all ranks."""
        found = self._strategy.from_rank_zero(lambda: outcome(lambda: self._order.take(groups)))
        (taken,) = together([found])
        self._order.advance(taken)
        return taken

    def pass_over(self, groups: int) -> None:
        """Go on behind the problems of a collection that exists already. A collective of all ranks."""
        self._take(groups)

    def state_dict(self) -> dict[str, Any]:
        """Where the order of problems goes on. Those of a collection ahead are given once more."""
        return self._order.state_dict(unused=() if self._ahead is None else self._ahead.places)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state)

    def _samples(self, group: str, answered: Sequence[tuple[str, Problem, Generation]]) -> list[Sample]:
        """The samples of those answers to one prompt that this rank has."""
        samples = [
            unjudged(generation, group=group, id=id, problem=problem, tokenizer=self._tokenizer)
            for id, problem, generation in answered
        ]
        judge_together(samples, problem=answered[0][1], task=self._task, rollouts=self._config.rollouts)
        return samples


def unjudged(
    generation: Generation, *, group: str, id: str, problem: Problem, tokenizer: Tokenizer
) -> Sample:
    """An answer as a sample whose reward is not known yet: NaN."""
    prompt = len(generation.tokens) - len(generation.logprobs)
    mask = np.arange(len(generation.tokens)) >= prompt
    logprobs = np.zeros(len(generation.tokens), dtype=np.float32)
    logprobs[prompt:] = generation.logprobs
    return Sample(
        id=id,
        group=group,
        tokens=np.asarray(generation.tokens, dtype=np.int32),
        response_mask=mask,
        behavior_logprobs=logprobs,
        reward=np.nan,
        policy_version=generation.policy_version,
        routes=generation.routes,
        finish_reason=generation.finish_reason,
        prompt=problem.prompt,
        response=response_text(generation, tokenizer=tokenizer),
    )


def judge_together(
    samples: Sequence[Sample], *, problem: Problem, task: Task, rollouts: RolloutsConfig
) -> None:
    """Give answers to one problem their rewards."""
    verdicts = task.judge(problem, [sample.response or "" for sample in samples])
    for sample, verdict in zip(samples, verdicts, strict=True):
        judged = shaped(verdict, tokens=int(sample.response_mask.sum()), rollouts=rollouts)
        sample.reward, sample.reward_parts = judged.reward, judged.parts or None


def sampling_of(rollouts: RolloutsConfig) -> Sampling:
    """The settings under which an engine draws: all of them of the local engine, those that are sent of a
    serving engine, which fills in the others.
    """
    sent = Sampling(temperature=rollouts.temperature, top_p=rollouts.top_p)
    if rollouts.source is not SourceKind.local:
        return sent
    return replace(
        sent, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )


def response_text(generation: Generation, *, tokenizer: Tokenizer) -> str:
    """The text that the policy generated, without its end token."""
    ids = [int(token) for token in generation.tokens[len(generation.tokens) - len(generation.logprobs) :]]
    if ids and ids[-1] == tokenizer.eos_id:
        ids.pop()
    return tokenizer.decode(ids)


def seed_of(*parts: int) -> int:
    """One 63-bit seed from several integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
