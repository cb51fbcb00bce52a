"""The queue of continuous generation: pacing, what a step takes, what is awaited or given up, checkpoints."""

from __future__ import annotations

import io
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import samples_of

from olmo_rl.collections.group_queue import Group, GroupQueue, Ticket
from olmo_rl.types import Refusal, Sample


def queue_of(*, size: int = 2, max_lag: int = 1, cancels: bool = False, attempts: int = 4) -> GroupQueue:
    return GroupQueue(groups_per_step=size, max_lag=max_lag, cancels=cancels, attempts=attempts)


def finished(ticket: Ticket, *, version: int, size: int = 2) -> Group:
    group = Group(ticket=ticket, version=version)
    for number, sample in enumerate(samples_of()[:size]):
        sample.id, sample.group, sample.policy_version = f"{ticket.name}-s{number}", ticket.name, version
        group.add(number, sample, ages={version: 3})
    return group


def names(groups: list[Group]) -> list[str]:
    return [group.ticket.name for group in groups]


def test_as_much_is_asked_for_as_the_bound_lets_be_trained() -> None:
    """Two groups a step, lag 1: version 0 may write what the steps 0 and 1 train, four groups."""
    queue = queue_of()
    asked = queue.ask(version=0, next_step=0, steps_left=None)
    assert [ticket.name for ticket in asked] == ["c0-a0-p0", "c0-a0-p1", "c1-a0-p0", "c1-a0-p1"]
    assert queue.ask(version=0, next_step=0, steps_left=None) == []
    for ticket in asked[:2]:
        queue.finish(finished(ticket, version=0), trains=True)
    assert names(queue.take(0)) == ["c0-a0-p0", "c0-a0-p1"]
    assert queue.ask(version=0, next_step=1, steps_left=None) == []
    assert len(queue.ask(version=1, next_step=1, steps_left=None)) == 2


def test_nothing_is_asked_for_that_no_step_of_the_run_trains() -> None:
    assert len(queue_of(max_lag=5).ask(version=0, next_step=0, steps_left=2)) == 4


def test_the_last_step_that_may_train_a_group_waits_for_it_and_trains_it_first() -> None:
    queue = queue_of()
    slow, *quick = queue.ask(version=0, next_step=0, steps_left=None)
    for ticket in quick[:2]:
        queue.finish(finished(ticket, version=0), trains=True)
    assert queue.is_ready(0)
    queue.take(0)
    queue.finish(finished(quick[2], version=0), trains=True)
    for ticket in queue.ask(version=1, next_step=1, steps_left=None):
        queue.finish(finished(ticket, version=1), trains=True)
    assert len(queue.finished) == 3
    assert queue.awaited(1) == 1
    assert not queue.is_ready(1)
    queue.finish(finished(slow, version=0), trains=True)
    assert queue.is_ready(1)
    assert names(queue.take(1)) == [quick[2].name, slow.name]


def test_a_group_that_cannot_make_it_is_given_up_and_its_problem_is_asked_again() -> None:
    queue = queue_of(cancels=True)
    slow, *quick = queue.ask(version=0, next_step=0, steps_left=None)
    for ticket in quick[:2]:
        queue.finish(finished(ticket, version=0), trains=True)
    queue.take(0)
    assert queue.overdue(0) == []
    queue.finish(finished(quick[2], version=0), trains=True)
    for ticket in queue.ask(version=1, next_step=1, steps_left=None):
        queue.finish(finished(ticket, version=1), trains=True)
    assert queue.is_ready(1)
    queue.take(1)
    assert queue.overdue(1) == [slow]
    assert queue.give_up(slow, failed=False)
    assert [t.name for t in queue.ask(version=2, next_step=2, steps_left=None)][0] == "c0-a1-p0"


def test_a_group_that_fails_at_every_attempt_leaves_room_for_another_problem() -> None:
    queue = queue_of(attempts=2, size=1)
    first, _ = queue.ask(version=0, next_step=0, steps_left=None)
    assert queue.give_up(first, failed=True)
    (again,) = queue.ask(version=0, next_step=0, steps_left=None)
    assert again == Ticket(index=0, position=0, attempt=1)
    assert not queue.is_exhausted
    assert not queue.give_up(again, failed=True)
    assert queue.is_exhausted
    assert queue.take(0) == []
    assert not queue.is_exhausted


def test_a_step_whose_groups_all_fail_comes_to_an_end() -> None:
    """No group is asked for in their place, which it would have to wait for."""
    queue, lost = queue_of(attempts=2), 0
    while not queue.is_ready(0):
        queue.ask(version=0, next_step=0, steps_left=None)
        queue.give_up(next(iter(queue.under_way)), failed=True)
        lost += 1
        assert lost <= 4
    assert queue.take(0) == []
    assert queue.ask(version=0, next_step=0, steps_left=None)


def test_a_group_that_is_older_than_its_engine_said_is_counted_and_not_trained() -> None:
    queue = queue_of(max_lag=1)
    tickets = queue.ask(version=4, next_step=4, steps_left=None)
    queue.finish(finished(tickets[0], version=2), trains=True)
    queue.finish(finished(tickets[1], version=3), trains=True)
    assert names(queue.drop_over_age(4)) == [tickets[0].name]
    assert names(queue.finished) == [tickets[1].name]


@dataclass(kw_only=True)
class World:
    """A queue whose groups finish at random; what was asked, finished and trained, step by step."""

    queue: GroupQueue
    dice: random.Random
    step: int = 0
    asked: list[str] = field(default_factory=list)
    trained: list[list[str]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def run_step(self, *, steps_left: int | None) -> None:
        self.ask(next_step=self.step, steps_left=steps_left)
        while not self.queue.is_ready(self.step):
            self.finish_one()
            self.ask(next_step=self.step, steps_left=steps_left)
        taken = self.queue.take(self.step)
        self.trained.append(names(taken))
        self.lags += [self.step - group.version for group in taken]
        for ticket in self.queue.overdue(self.step):
            self.cancelled.append(ticket.name)
            self.queue.give_up(ticket, failed=False)
        for _ in range(self.dice.randrange(4)):  # while it trains
            if self.queue.under_way:
                self.finish_one()
        self.step += 1

    def ask(self, *, next_step: int, steps_left: int | None) -> None:
        tickets = self.queue.ask(version=self.step, next_step=next_step, steps_left=steps_left)
        self.asked += [ticket.name for ticket in tickets]

    def finish_one(self) -> None:
        """Mostly a young one, so that slow ones are overtaken."""
        tickets = sorted(self.queue.under_way, key=lambda ticket: ticket.name)
        ticket = tickets[-1] if self.dice.random() < 0.7 else self.dice.choice(tickets)
        version = self.queue.under_way[ticket]
        self.queue.finish(finished(ticket, version=version, size=1), trains=self.dice.random() < 0.9)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 12))
def test_whatever_finishes_when_nothing_is_too_old_trained_twice_or_thrown_away(
    seed: int, size: int, max_lag: int, cancels: bool, steps: int
) -> None:
    queue = queue_of(size=size, max_lag=max_lag, cancels=cancels, attempts=10**6)
    world = World(queue=queue, dice=random.Random(seed))
    for left in range(steps, 0, -1):
        world.run_step(steps_left=left)
        assert queue.outstanding <= size * min(max_lag + 1, left)
        assert queue.drop_over_age(world.step) == []
    trained = [name for groups in world.trained for name in groups]
    assert [len(groups) for groups in world.trained] == [size] * steps
    assert max(world.lags) <= max_lag
    assert len(set(trained)) == len(trained)
    assert len(set(world.asked)) == len(world.asked)
    assert queue.outstanding == 0, "the last step takes what is left"
    assert cancels or not world.cancelled


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(0, 6), st.booleans())
def test_a_queue_that_travelled_through_a_checkpoint_goes_on_as_if_nothing_had_happened(
    seed: int, saved_at: int, cancels: bool
) -> None:
    """Finished groups are trained in the recorded order, those under way finish as before."""
    whole, parts = (
        World(queue=queue_of(size=2, max_lag=2, cancels=cancels, attempts=10**6), dice=random.Random(seed))
        for _ in range(2)
    )
    for step in range(8):
        if step == saved_at:
            stored = io.BytesIO()
            torch.save(parts.queue.state({}), stored)
            stored.seek(0)
            versions = dict(parts.queue.under_way)
            parts.queue = queue_of(size=2, max_lag=2, cancels=cancels, attempts=10**6)
            for group in parts.queue.load(torch.load(stored, weights_only=True), group_size=1):
                parts.queue.resume(group, version=versions[group.ticket])
        whole.run_step(steps_left=None)
        parts.run_step(steps_left=None)
    assert parts.trained == whole.trained
    assert parts.asked == whole.asked


def test_answers_of_unfinished_groups_travel_and_keep_their_age() -> None:
    queue = queue_of(size=1)
    ticket, other = queue.ask(version=3, next_step=3, steps_left=None)
    begun = Group(ticket=ticket, version=3)
    sample: Sample = samples_of()[0]
    sample.policy_version = 3
    begun.add(1, sample, ages={3: 4, 4: 1})
    state = queue.state({ticket: begun})
    after = queue_of(size=1)
    found = after.load(state, group_size=2)
    for group in found:
        after.resume(group, version=4)
    assert after.under_way == {ticket: 3, other: 4}
    assert list(found[0].samples) == [1]
    assert found[0].ages == Counter({3: 4, 4: 1})


def test_a_queue_of_groups_of_another_size_is_refused_by_key() -> None:
    queue = queue_of()
    ticket = queue.ask(version=0, next_step=0, steps_left=None)[0]
    queue.finish(finished(ticket, version=0), trains=True)
    with pytest.raises(Refusal, match=r"rollouts.group_size=4: the queue of ckpt_path has groups of 2"):
        queue_of().load(queue.state({}), group_size=4)
