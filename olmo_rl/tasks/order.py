"""The order in which a run takes the training problems of its task: each once a pass, and it can be resumed.

`take` changes nothing: rank 0 takes, since some datasets draw from state that differs between processes, and
every rank then goes on behind what was taken (`advance`). The state is plain values: where the order goes on,
and what was taken and has to be given once more. No torch here.

Refuses: a task of which nothing can be drawn, and the state of another order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from olmo_rl.tasks.problems import BLOCK, Problem, Task
from olmo_rl.tasks.prompting import NOTHING_FITS
from olmo_rl.types import Refusal

ROLLOUTS, DEMONSTRATIONS = 0, 1  # orders of one task that do not follow each other
_PLACE = 1_000_000  # at which passes are compared
_BARREN = 100 * BLOCK  # problems made on demand in a row that do not fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Problems with their places in the order, the place behind them, and how many of those given back
    before are among them. `overlong`: problems that were passed over because they do not fit; `resting`:
    because they are set aside.
    """

    problems: Sequence[Problem]
    places: Sequence[int]
    behind: int
    given_back: int = 0
    overlong: int = 0
    resting: int = 0


@dataclass(kw_only=True, slots=True)
class PromptOrder:
    """Problems of `task` in the order `seed`. State: `place`, from which new ones are taken; the places of
    problems that come first because they were `returned`; by id, how many judged responses a listed problem
    had and how many of them solved it (`rates`), and the pass in which one that was set aside comes back
    (`back`).

    `rest`: passes that a problem is set aside for when all or none of its responses solved it, less where
    nothing else is left.
    """

    task: Task
    seed: int = ROLLOUTS
    place: int = 0
    rest: int = 0
    returned: list[int] = field(default_factory=list)
    rates: dict[str, list[int]] = field(default_factory=dict)
    back: dict[str, int] = field(default_factory=dict)
    _block: tuple[int, list[Problem]] = field(default=(-1, []), repr=False)

    def take(self, count: int) -> Taken:
        """The next `count` problems that fit: returned ones, then new ones. Where a whole pass holds only
        problems that are set aside, those that would come back first come back at once.

        Raises Refusal where a whole pass holds only problems that do not fit.
        """
        places = self.returned[:count]
        problems = [self.at(place) for place in places]
        given_back, place, overlong, barren, resting = len(places), self.place, 0, 0, 0
        # Two passes in a row hold a whole one, wherever they begin.
        limit = _BARREN if self.task.size is None else 2 * self.task.size
        # Since `began` nothing was taken; of what rested there, the first comes back in the pass `earliest`.
        released, began, earliest = 0, place, math.inf
        while len(problems) < count:
            problem = self.at(place)
            back = self._back(problem, place=place)
            if back > released:
                resting, barren, earliest = resting + 1, 0, min(earliest, back)
            elif self.task.fits(problem):
                problems.append(problem)
                places.append(place)
                barren, began, earliest = 0, place + 1, math.inf
            else:
                overlong, barren = overlong + 1, barren + 1
                if barren == limit:
                    raise Refusal(NOTHING_FITS)
            place += 1
            # Ends: every release leaves fewer that rest, and without any the limit above holds.
            if earliest < math.inf and self._whole_pass(began, place):
                released, began, earliest = int(earliest), place, math.inf
        return Taken(
            problems=problems,
            places=places,
            behind=place,
            given_back=given_back,
            overlong=overlong,
            resting=resting,
        )

    def advance(self, taken: Taken) -> None:
        """Go on behind what `take` gave; every rank gets the same."""
        del self.returned[: taken.given_back]
        self.place = taken.behind

    def give_back(self, places: Sequence[int]) -> None:
        """Problems that were taken and are not used after all come first the next time."""
        self.returned = [*places, *self.returned]

    def note(self, problem: Problem, *, place: int, asked: int, judged: int, solved: int) -> None:
        """Count the responses to a listed problem, and set it aside where they hold nothing to learn: all of
        the `asked` were judged, and all or none of them solved it.
        """
        if judged == 0 or (number := self._pass(problem, place=place)) is None:
            return
        tried = self.rates.setdefault(problem.id, [0, 0])
        tried[0] += judged
        tried[1] += solved
        self.back.pop(problem.id, None)
        if self.rest and judged == asked and solved in (0, judged):
            self.back[problem.id] = number + self.rest + 1

    def _back(self, problem: Problem, *, place: int) -> int:
        """The pass in which a problem that rests at `place` comes back; 0 where it does not rest."""
        back = self.back.get(problem.id, 0)
        number = self._pass(problem, place=place) if back else None
        return 0 if number is None or number >= back else back

    def _whole_pass(self, began: int, place: int) -> bool:
        """Whether the places from `began` up to `place` hold a whole pass over every listed part."""
        before, behind = self.task.epochs(began), self.task.epochs(place)
        return all(behind[name] - passed >= 2 for name, passed in before.items())

    def _pass(self, problem: Problem, *, place: int) -> int | None:
        """The number of the pass that a place lies in, from 0; None of problems made on demand."""
        passed = self.task.epochs(place).get(problem.part)
        return None if passed is None else int(passed)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over the training problems so far, by part of a mixture; nothing where they have no end."""
        return self.task.epochs(self.place)

    def state_dict(self, *, unused: Sequence[int] = ()) -> dict[str, Any]:
        """Plain values. `unused`: places of problems that were taken, and are to be given once more."""
        return {
            "place": self.place,
            "returned": [*unused, *self.returned],
            "order": self._identity(),
            "rates": {id: list(counts) for id, counts in self.rates.items()},
            "back": dict(self.back),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["order"] != (ours := self._identity()):
            raise Refusal(
                f"task, seed: the training problems (passes at place {_PLACE}, first one) are {ours}, they "
                f"were {state['order']} when the checkpoint was saved, so the run cannot go on in their "
                "order: restore them, or start from the weights with init_from"
            )
        self.place, self.returned = state["place"], list(state["returned"])
        self.rates = {id: list(counts) for id, counts in state.get("rates", {}).items()}
        self.back = dict(state.get("back", {}))

    def _identity(self) -> list[Any] | None:
        """What the order follows from: passes over each part at one place, and the first problem where all
        are listed; None where they are made on demand.
        """
        passes = [[name, passed] for name, passed in sorted(self.task.epochs(_PLACE).items())]
        return [*passes, None if self.task.size is None else self.at(0).id] if passes else None

    def at(self, place: int) -> Problem:
        """The problem at one place of the order."""
        number, index = divmod(place, BLOCK)
        if self._block[0] != number:
            found = self.task.problems(BLOCK, seed=self.seed, start=number * BLOCK)
            self._block = number, found
        return self._block[1][index]
