"""Groups of continuous generation from their request to their training step, as plain state without a clock
or an engine: what may be asked for, what a step takes, what has to be waited for or given up.

A group whose oldest token was written by weights of version v may be trained by the steps of versions up to
v + `max_lag`, its last step. Pacing keeps that possible: a new group is asked for only while, with it, the
steps up to its last one can train everything asked for so far. A step takes finished groups, those with the
earliest last step first. Where it would leave more groups with a last step of at most d than the steps after
it up to d can train, the surplus has to be finished first (`overdue=wait`: nothing is lost for being slow),
or is given up (`overdue=cancel`). In either case no group that its engine finished is thrown away.

Every rank holds an equal queue, since all see the same events in the same order. The order of the finished
groups is the order in which they arrived, which a checkpoint records.

Shapes: a step has `groups_per_step` groups, a group `group_size` samples.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from olmo_rl.collections.pending import sample_of_state, sample_state
from olmo_rl.types import Refusal, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """One group: problem `position` of the step's worth of problems `index`, asked for the `attempt`-th time,
    from 0.
    """

    index: int
    position: int
    attempt: int = 0

    @property
    def name(self) -> str:
        """The id of the group, the same as in collections mode."""
        return f"c{self.index}-a{self.attempt}-p{self.position}"

    def state(self) -> list[int]:
        return [self.index, self.position, self.attempt]

    @classmethod
    def of_state(cls, state: Iterable[int]) -> Ticket:
        index, position, attempt = state
        return cls(index=index, position=position, attempt=attempt)

    @property
    def problem(self) -> tuple[int, int]:
        """What all attempts share."""
        return self.index, self.position


@dataclass(kw_only=True, slots=True, eq=False)
class Group:
    """Samples of one ticket by their number in it: some while it is under way, all of the group where it is
    finished. `version`: the oldest weights that a token of it can have. `ages`: its generated tokens by the
    version that wrote them, or the oldest possible one.
    """

    ticket: Ticket
    version: int
    samples: dict[int, Sample] = field(default_factory=dict)
    ages: Counter[int] = field(default_factory=Counter)

    def add(self, number: int, sample: Sample, *, ages: Mapping[int, int]) -> None:
        """Take one answer; the group is as old as its oldest."""
        self.samples[number] = sample
        self.version = min(self.version, sample.policy_version)
        self.ages.update(ages)

    def state(self) -> dict[str, Any]:
        return {
            "ticket": self.ticket.state(),
            "version": self.version,
            "samples": {number: sample_state(sample) for number, sample in self.samples.items()},
            "ages": dict(self.ages),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Group:
        return cls(
            ticket=Ticket.of_state(state["ticket"]),
            version=state["version"],
            samples={number: sample_of_state(sample) for number, sample in state["samples"].items()},
            ages=Counter(state["ages"]),
        )


class GroupQueue:
    """State: tickets under way with the oldest version that they can have, finished groups in order of
    arrival, and what is asked for next. `unit`: groups that divide over the ranks together.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_lag: int,
        cancels: bool,
        attempts: int,
        unit: int = 1,
        index: int = 0,
    ) -> None:
        self.under_way: dict[Ticket, int] = {}
        self.finished: list[Group] = []
        self._size, self._max_lag, self._cancels = groups_per_step, max_lag, cancels
        self._attempts, self._unit = attempts, unit
        self._index, self._position = index, 0
        self._again: deque[Ticket] = deque()
        self._lost_since_step = 0

    @property
    def outstanding(self) -> int:
        """Groups that were asked for and are not in a step."""
        return len(self.under_way) + len(self.finished)

    @property
    def problems(self) -> list[tuple[int, int]]:
        """Those that engines are asked about, or will be once more."""
        return [ticket.problem for ticket in (*self.under_way, *self._again)]

    def room(self, *, version: int, next_step: int, steps_left: int | None) -> int:
        """Groups more that may be asked of engines with weights `version`. `next_step`: the version that the
        next step to be taken trains; `steps_left`: steps that the run still takes, None without an end. None
        while that step is exhausted: it has to come to an end.
        """
        if self.is_exhausted:
            return 0
        steps = self._max_lag + 1 + version - next_step
        if steps_left is not None:
            steps = min(steps, steps_left)
        return max(0, self._size * steps - self.outstanding)

    def ask(self, *, version: int, next_step: int, steps_left: int | None) -> list[Ticket]:
        """Tickets to ask for now, all that there is room for; given up ones come first."""
        tickets = []
        for _ in range(self.room(version=version, next_step=next_step, steps_left=steps_left)):
            ticket = self._again.popleft() if self._again else self._new()
            self.under_way[ticket] = version
            tickets.append(ticket)
        return tickets

    def _new(self) -> Ticket:
        ticket = Ticket(index=self._index, position=self._position)
        self._position += 1
        if self._position == self._size:
            self._index, self._position = self._index + 1, 0
        return ticket

    def finish(self, group: Group, *, trains: bool) -> None:
        """Take a group that is complete, as old as its oldest sample; one that filters took (`trains` false)
        leaves room for another.
        """
        self.under_way.pop(group.ticket)
        if trains:
            group.version = min(sample.policy_version for sample in group.samples.values())
            self.finished.append(group)
        else:
            self._lost_since_step += 1

    def give_up(self, ticket: Ticket, *, failed: bool) -> bool:
        """Note a group that will not be answered, because its engines `failed` or it is overdue; whether its
        problem is asked again, as another attempt.
        """
        self.under_way.pop(ticket)
        self._lost_since_step += failed
        if ticket.attempt + 1 >= self._attempts:
            return False
        self._again.append(Ticket(index=ticket.index, position=ticket.position, attempt=ticket.attempt + 1))
        return True

    def drop_over_age(self, step: int) -> list[Group]:
        """Finished groups that `step` may not train any more: of engines that were older than they said, or
        of a run with another bound. They are out of the queue.
        """
        old = [group for group in self.finished if group.version + self._max_lag < step]
        self.finished = [group for group in self.finished if group.version + self._max_lag >= step]
        self._lost_since_step += len(old)
        return old

    def awaited(self, step: int) -> int:
        """Groups under way that have to be finished before `step` can be taken without breaking the bound for
        any group.
        """
        return max((self._surplus(step, last) for last in self._last_steps()), default=0)

    def _last_steps(self) -> list[int]:
        return sorted({version + self._max_lag for version in self.under_way.values()})

    def _surplus(self, step: int, last: int) -> int:
        """Groups under way, of those with a last step of at most `last`, that no step after `step` has room
        for, once `step` took all finished ones that it can of them.
        """
        waiting = sum(version + self._max_lag <= last for version in self.under_way.values())
        done = sum(group.version + self._max_lag <= last for group in self.finished)
        if done >= self._size:
            return 0  # the step is full of them, and the others fit by the pacing
        return max(0, waiting - self._size * max(0, last - step))

    def is_ready(self, step: int) -> bool:
        """Whether `step` can be taken: full, with nothing to wait for; or not to be filled any more."""
        if not self._cancels and self.awaited(step) > 0:
            return False
        return len(self.finished) >= self._size or self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """Whether as many groups were lost since the last step as its attempts allow."""
        return self._lost_since_step > (self._attempts - 1) * self._size

    def take(self, step: int) -> list[Group]:
        """The groups of `step`, those with the earliest last step first, then in order of arrival; fewer than
        a step holds where it is exhausted.
        """
        count = min(self._size, len(self.finished))
        if count < self._size:
            count -= count % self._unit
        taken = sorted(self.finished, key=lambda group: group.version)[:count]
        chosen = {id(group) for group in taken}
        self.finished = [group for group in self.finished if id(group) not in chosen]
        self._lost_since_step = 0
        return taken

    def overdue(self, step: int) -> list[Ticket]:
        """Tickets under way that cannot be trained within the bound once `step` was taken, the oldest first;
        none unless they are to be cancelled.
        """
        if not self._cancels:
            return []
        oldest = sorted(self.under_way.items(), key=lambda item: item[1])
        found: list[Ticket] = []
        for last in self._last_steps():
            room = self._size * max(0, last - step)
            outstanding = sum(version + self._max_lag <= last for version in self.under_way.values())
            outstanding += sum(group.version + self._max_lag <= last for group in self.finished)
            surplus = outstanding - len(found) - room
            found += [ticket for ticket, _ in oldest[len(found) : len(found) + max(0, surplus)]]
        return found

    def state(self, partial: Mapping[Ticket, Group]) -> dict[str, Any]:
        """Plain values and tensors: finished groups in their order, `partial` answers of those under way."""
        empty = {ticket: Group(ticket=ticket, version=version) for ticket, version in self.under_way.items()}
        return {
            "finished": [group.state() for group in self.finished],
            "under_way": [(partial.get(ticket) or group).state() for ticket, group in empty.items()],
            "again": [ticket.state() for ticket in self._again],
            "next": [self._index, self._position, self._size],
            "lost_since_step": self._lost_since_step,
        }

    def load(self, state: Mapping[str, Any], *, group_size: int) -> list[Group]:
        """Take over the queue of a checkpoint; returns the groups that were under way, with the answers that
        they had, which are to be asked for again by `resume`. Raises Refusal for groups of another size.
        """
        groups = [Group.of_state(group) for group in state["finished"]]
        begun = [Group.of_state(group) for group in state["under_way"]]
        sizes = {len(group.samples) for group in groups} - {group_size}
        if sizes or any(number >= group_size for group in begun for number in group.samples):
            found = sizes.pop() if sizes else "another number of"
            raise Refusal(
                f"rollouts.group_size={group_size}: the queue of ckpt_path has groups of {found} samples: "
                "set the group size of the run that is resumed, or start a new one with init_from"
            )
        self.finished, self.under_way = groups, {group.ticket: group.version for group in begun}
        self._again = deque(Ticket.of_state(ticket) for ticket in state["again"])
        self._index, self._position, size = state["next"]
        if size != self._size and self._position:  # of another batch: its ids end with the problems it had
            self._index, self._position = self._index + 1, 0
        self._lost_since_step = state["lost_since_step"]
        return begun

    def resume(self, group: Group, *, version: int) -> None:
        """Ask again for what a group that was under way lacks: its version stays where it has answers."""
        self.under_way[group.ticket] = min(version, group.version) if group.samples else version
