"""Problems and the protocol of a task: prompts with verifiers, training and held-out ones. No torch here.

A task puts its training problems in an endless order by seed, holds others out, and judges responses. A
held-out problem is the same in every run, whatever the seed, and is never a training problem. A reward is a
finite number, or NaN where a verifier cannot judge: such samples are counted and not trained (`advantages`).

Refuses: unknown names, more held-out problems than there are, tasks without a training problem.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from olmo_rl.data.tokenizers import Tokenizer
from olmo_rl.tasks.rewards import Judged
from olmo_rl.types import Refusal

# One problem in so many is held out where problems can be distinguished by a hash.
HELD_OUT_EVERY = 10
# Problems that are made on demand are made so many at a time; those of one block differ.
BLOCK = 16
# Draws of held-out problems use this seed, whatever the run's.
HELD_OUT_SEED = 1_000_003


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A prompt and its reference answer, None where the dataset gives none. `domain` selects the verifier;
    the dataset verifies responses with `entry`. `row`: its columns in the data; `part`: the task of a
    mixture that it is from.
    """

    id: str
    prompt: str
    reference: str | None
    domain: str | None = None
    entry: Mapping[str, Any] | None = None
    part: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        """The reference answer, for demonstrations."""
        if self.reference is None:
            raise Refusal(
                f"problem {self.id}: its dataset verifies answers but gives none, so nothing can be "
                "demonstrated: set warm_start.steps=0, or choose another task.name"
            )
        return self.reference


class Task(Protocol):
    """Prompts, and rewards of responses. Equal arguments give equal problems. `counts`: by
    name, judgements that went wrong since the start.
    """

    @property
    def counts(self) -> Mapping[str, int]: ...

    @property
    def size(self) -> int | None:
        """The number of training problems; None where they are made on demand."""
        ...

    def problems(self, count: int, *, seed: int, start: int = 0) -> list[Problem]:
        """The training problems `start` to `start + count` of the endless order `seed`. Where there are
        `size` of them, each comes once a pass, in another order every pass.
        """
        ...

    def epochs(self, place: int) -> dict[str, float]:
        """Passes over listed problems at `place` of an order: by the part of a mixture, else under "".
        Problems that are made on demand have none.
        """
        ...

    def fits(self, problem: Problem) -> bool:
        """Whether a run may draw this training problem, or has to leave it out."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """The same `count` different problems in every run; none of them is ever a training problem."""
        ...

    def reward(self, problem: Problem, response: str) -> float:
        """The reward of one response: finite, or NaN where the verifier cannot judge."""
        ...

    def judge(self, problem: Problem, responses: Sequence[str]) -> list[Judged]:
        """The verdicts on responses to one prompt."""
        ...

    @property
    def judges_groups(self) -> bool:
        """Whether verdicts need all responses to one prompt, so that one rank has to have them."""
        ...

    def start(self, *, seconds: float) -> None:
        """Start what judging needs, within `seconds`, before ranks wait for each other."""
        ...

    def check_references(self) -> tuple[str, ...]:
        """Refuse references that verifiers cannot judge; returns remarks on the others."""
        ...


class MadeOnDemand:
    """Defaults of tasks that draw their problems and judge them without code of users."""

    def reward(self, problem: Problem, response: str) -> float:
        raise NotImplementedError

    def judge(self, problem: Problem, responses: Sequence[str]) -> list[Judged]:
        return [Judged(reward=self.reward(problem, response)) for response in responses]

    @property
    def judges_groups(self) -> bool:
        return False

    def start(self, *, seconds: float) -> None:
        pass

    def check_references(self) -> tuple[str, ...]:
        return ()

    @property
    def counts(self) -> Mapping[str, int]:
        return {}

    @property
    def size(self) -> int | None:
        return None

    def epochs(self, place: int) -> dict[str, float]:
        return {} if self.size is None else {"": place / self.size}

    def fits(self, problem: Problem) -> bool:
        return True


def demonstration(problem: Problem, *, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the prompt, and of the reference answer with the end of sequence behind it."""
    return tokenizer.encode(problem.prompt), [*tokenizer.encode(problem.answer), tokenizer.eos_id]


def is_held_out(key: str) -> bool:
    """Whether the problem behind `key` is held out: one in `HELD_OUT_EVERY`, by its SHA-256."""
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_EVERY == 0


def refuse_unknown(names: Sequence[str], *, known: Sequence[str], where: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Refusal([f"{where}: unknown {name!r}{_nearest(name, known)}" for name in unknown])


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f", the nearest known name is {near[0]!r}" if near else ""


def passes(
    pool: Sequence[Problem], *, start: int, count: int, seeds: tuple[int, ...], where: str
) -> list[Problem]:
    """Problems `start` to `start + count` of passes over `pool`, each shuffled by (seeds, number of the
    pass).
    """
    if not pool:
        raise Refusal(f"{where}: no problem is left for training, all of them are held out")
    found: list[Problem] = []
    while len(found) < count:
        number, first = divmod(start + len(found), len(pool))
        order = _shuffled(len(pool), seeds=(*seeds, number))
        found += [pool[i] for i in order[first : first + count - len(found)].tolist()]
    return found


@lru_cache(maxsize=16)  # blocks of one pass, of every part of a mixture, ask for the same order again
def _shuffled(size: int, *, seeds: tuple[int, ...]) -> NDArray[np.int32]:
    """int32 [size]: the numbers below `size` in the order of `seeds`, to be read only."""
    order = np.random.default_rng(seeds).permutation(size).astype(np.int32)
    order.flags.writeable = False
    return order


def blocks(
    *, start: int, count: int, draw: Callable[[int, int, int], list[Problem]], where: str
) -> list[Problem]:
    """Problems `start` to `start + count` of an endless sequence of blocks of `BLOCK` problems, made on
    demand: `draw(missing, block, round)` gives different ones, fewer where it finds no more; a further round
    fills the block.
    """
    found: list[Problem] = []
    while len(found) < count:
        number, first = divmod(start + len(found), BLOCK)
        block: list[Problem] = []
        for round in itertools.count():
            if len(block) == BLOCK:
                break
            part = draw(BLOCK - len(block), number, round)
            if not part:
                raise Refusal(f"{where}: no problem is left for training, all of them are held out")
            block += part
        found += block[first : first + count - len(found)]
    return found


def take_held_out(found: list[Problem], *, count: int, where: str) -> list[Problem]:
    if len(found) < count:
        raise Refusal(
            f"task.eval_problems={count}: {where} has {len(found)} held-out problems: "
            f"set task.eval_problems={len(found)} or less, or add problems"
        )
    return found[:count]
