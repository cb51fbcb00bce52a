"""Continuous generation, as all ranks see it: engines work on groups while steps train, and a step starts
when finished groups fill it.

Ranks share the groups: each asks for its own and judges their answers (group_requests.py). At every step they
exchange what was finished, and decide on equal queues (group_queue.py) what is asked for, cancelled, taken;
only the problems come from rank 0. While a step waits for answers, ranks exchange again and again: none is
inside a collective for longer than a lap for the sake of an engine. The wait ends in a Refusal when no
request ended anywhere for as long as one is granted: `rollouts.wait_seconds`, and `rollouts.timeout_seconds`
for each of its attempts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from olmo_rl.collections.collecting import Drawn, describe
from olmo_rl.collections.generation import RolloutParts
from olmo_rl.collections.group_queue import Group, GroupQueue, Ticket
from olmo_rl.collections.group_requests import GroupRequests, Report
from olmo_rl.collections.planner import StepPlanner
from olmo_rl.collections.step_facts import Ledger, lag_facts, prediction
from olmo_rl.config import Config, Overdue, OverlongPrompt, RolloutsConfig
from olmo_rl.data.advantages import assign_advantages, filter_samples
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.tasks.order import PromptOrder, Taken
from olmo_rl.tasks.problems import Problem
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, Refusal, Sample

LAP_SECONDS = 0.25  # between two exchanges of a step that waits
STARVING_SECONDS = 60.0  # of waiting, and more than half of the time: then it is reported, once


class ContinuousSource:
    """Draws steps. State: the queue, equal on all ranks; the requests of this rank; counts."""

    generates = True

    def __init__(self, config: Config, *, parts: RolloutParts, strategy: ExpertParallelStrategy) -> None:
        rollouts, size, max_lag = config.rollouts, config.batch.samples_per_step, config.rollouts.max_lag
        assert isinstance(parts.engine, RemoteEngine), "refusals require serving engines"
        assert size is not None, "refusals require samples of a step"
        assert max_lag is not None, "refusals require a bound"
        self._config, self._task, self._strategy = config, parts.task, strategy
        self._size, self._max_lag = size, max_lag
        self._unit = _whole_groups(rollouts.group_size, ranks=strategy.world_size)
        self._queue = self._new_queue(index=0)
        self._requests = GroupRequests(
            config, engine=parts.engine, task=parts.task, tokenizer=parts.tokenizer
        )
        self._ledger = Ledger()
        self._order = PromptOrder(task=parts.task)
        self._places: dict[tuple[int, int], int] = {}  # of problems under way in their order
        self._problems: dict[tuple[int, int], Problem] = {}
        self._owners: dict[Ticket, int] = {}
        self._asked = 0
        self._filtered: list[Sample] = []  # of groups that filters took since the last step
        self._begun: list[Group] = []  # of a checkpoint, to be asked for again
        self._waited = 0.0
        self._started = time.monotonic()
        self._noted = False

    def draw(self, index: int, *, attempt: int, groups: int) -> Collection | None:
        raise AssertionError("continuous generation draws steps")

    def draw_step(self, *, step: int, steps_left: int | None, planner: StepPlanner) -> Drawn:
        """The samples of the step that trains policy version `step`, whole groups, once it is full; fewer
        where attempts ended. A collective of all ranks. `steps_left`: of the run, this one included.
        """
        began = time.monotonic()
        self._requests.start_waiting()
        self._ask_again(step)
        reports = self._exchange(step)
        expected = prediction(
            self._ledger,
            under_way=sum(report.activity.under_way for report in reports),
            queued=len(self._queue.finished),
            group_size=self._config.rollouts.group_size,
            samples_per_step=self._size,
            max_lag=self._max_lag,
        )
        awaited = self._fill(step, steps_left=steps_left, reports=reports)
        waited = time.monotonic() - began
        taken = self._queue.take(step)
        for ticket in self._queue.overdue(step):
            self._give_up(ticket, failed=False)
        samples = [group.samples[number] for group in taken for number in sorted(group.samples)]
        self._waited += waited
        drawn = [*samples, *self._filtered]
        self._ledger.counts.update(
            {f"batch/{name}": n for name, n in assign_advantages(drawn, config=self._config.loss).items()}
        )
        facts = describe(drawn) | lag_facts(taken, step=step)
        facts |= {
            "rollouts/samples": float(len(drawn)),
            "rollouts/trainer_idle_s": waited,
            "rollouts/queued": float(len(self._queue.finished)),
            "batch/left_out": 0.0,
        }
        if expected is not None:
            facts["rollouts/lag_predicted"] = expected
        for name, epoch in self._order.epochs.items():
            facts["rollouts/epoch" + (f"/{name}" if name else "")] = epoch
        notes = self._starving(step, awaited=awaited)
        facts |= self._ledger.close_step(slots=self._slots)
        self._filtered = []
        layout = self._config.model.expert_layout if self._config.replay else None
        counts = planner.count(layout)
        counts.arrive(samples)
        return Drawn(
            samples=samples,
            counts=counts,
            facts=facts,
            source=self._config.rollouts.source.value,
            filtered=False,
            notes=notes,
        )

    def _fill(self, step: int, *, steps_left: int | None, reports: Sequence[Report]) -> int:
        """Exchange until `step` is ready; returns the most groups that it had to wait for by their age."""
        queue, awaited = self._queue, 0
        while True:
            self._ask(queue.ask(version=step, next_step=step, steps_left=steps_left), version=step)
            if queue.is_ready(step):
                return awaited
            awaited = max(awaited, queue.awaited(step) if len(queue.finished) >= self._groups else 0)
            quiet = min(report.quiet for report in reports)  # the same on all ranks, which decide alike
            if quiet > (patience := patience_of(self._config.rollouts)):
                raise Refusal(
                    f"rollouts.urls: no request was answered for {quiet:.0f} s (rollouts.wait_seconds + "
                    f"(rollouts.retries + 1) x rollouts.timeout_seconds = {patience:g}): update {step + 1} "
                    f"has {len(queue.finished)} of {self._groups} groups, {len(queue.under_way)} are under "
                    "way: look at the engines"
                )
            self._requests.wait(LAP_SECONDS)
            reports = self._exchange(step)

    def _exchange(self, step: int) -> list[Report]:
        """Bring together what all ranks have finished, then raise on all of them what was refused at one. A
        collective of all ranks.
        """
        reports = self._bring_together(step)
        together([report if report.refusal is None else report.refusal for report in reports])
        faults = [report.fault for report in reports if report.fault is not None]
        if faults:
            raise RuntimeError(f"requests to engines ended: {faults[0]}")
        return reports

    def _bring_together(self, step: int) -> list[Report]:
        """Bring together what all ranks have finished, whatever was refused. A collective of all ranks."""
        reports: list[Report] = self._strategy.gather_objects(self._requests.report())
        self._ledger.add(
            [report.counts for report in reports],
            [report.activity for report in reports],
            urls=self._config.rollouts.urls,
        )
        arrived = [(at, rank, group) for rank, report in enumerate(reports) for at, group in report.finished]
        for _, _, group in sorted(arrived, key=lambda item: (item[0], item[1])):
            self._arrive(group)
        for report in reports:
            for ticket in report.failed:
                self._give_up(ticket, failed=True)
        old = self._queue.drop_over_age(step)
        self._ledger.counts["batch/over_age"] += sum(len(group.samples) for group in old)
        return reports

    def _arrive(self, group: Group) -> None:
        """Filter one whole group, on every rank alike."""
        samples = [group.samples[number] for number in sorted(group.samples)]
        kept, found = filter_samples(samples, config=self._config.batch)
        self._ledger.counts.update({f"batch/{name}": count for name, count in found.items()})
        group.samples = dict(enumerate(kept))
        self._owners.pop(group.ticket, None)
        self._queue.finish(group, trains=bool(kept))
        if not kept:
            self._filtered += samples

    def _ask(self, tickets: Sequence[Ticket], *, version: int) -> None:
        self._hand_out([Group(ticket=ticket, version=version) for ticket in tickets])

    def _hand_out(self, groups: Sequence[Group]) -> None:
        """Let each rank ask for its share of these groups. A collective where problems are missing."""
        self._draw_problems([group.ticket for group in groups])
        ranks = self._strategy.world_size
        for group in groups:
            self._owners[group.ticket] = self._asked % ranks
            self._asked += 1
        mine = [group for group in groups if self._owners[group.ticket] == self._strategy.global_rank]
        self._requests.ask(
            mine,
            problems={group.ticket: self._problems[group.ticket.problem] for group in mine},
        )

    def _draw_problems(self, tickets: Sequence[Ticket]) -> None:
        """Take problems for those of these tickets that have none, chosen by rank 0: new ones, or at their
        place where a checkpoint had one. Those that no ticket needs any more are forgotten.
        """
        needed = set(self._queue.problems)
        self._places = {key: place for key, place in self._places.items() if key in needed}
        self._problems = {key: problem for key, problem in self._problems.items() if key in needed}
        keys = dict.fromkeys(ticket.problem for ticket in tickets)
        new = [key for key in keys if key not in self._places]
        known = [key for key in keys if key in self._places and key not in self._problems]
        if not new and not known:
            return

        def draw() -> tuple[Taken, list[Problem]]:
            return self._order.take(len(new)), [self._order.at(self._places[key]) for key in known]

        ((taken, found),) = together([self._strategy.from_rank_zero(lambda: outcome(draw))])
        self._order.advance(taken)
        if self._config.task.overlong is OverlongPrompt.leave_out:
            self._ledger.counts["overlong_prompts"] += taken.overlong
        self._places |= dict(zip(new, taken.places, strict=True))
        self._problems |= dict(zip(new, taken.problems, strict=True))
        self._problems |= dict(zip(known, found, strict=True))

    def _give_up(self, ticket: Ticket, *, failed: bool) -> None:
        """Take a group out, its requests ended in their engines; its problem is asked again while attempts
        last.
        """
        if self._requests.holds(ticket):
            self._requests.cancel(ticket)
        self._owners.pop(ticket, None)
        again = self._queue.give_up(ticket, failed=failed)
        self._ledger.counts["groups_again" if again else "groups_lost"] += 1

    @property
    def _groups(self) -> int:
        return self._size // self._config.rollouts.group_size

    @property
    def _slots(self) -> int:
        return self._config.rollouts.concurrency * self._strategy.world_size

    def _starving(self, step: int, *, awaited: int) -> tuple[str, ...]:
        """A note, once, where training mostly waits for engines: the numbers, and what to change."""
        seconds = time.monotonic() - self._started
        if self._noted or self._waited < STARVING_SECONDS or self._waited < seconds / 2:
            return ()
        self._noted = True
        rollouts, used = self._config.rollouts, self._ledger.utilisation(self._slots) or 0.0
        if awaited:
            reason = f"{awaited} groups had reached rollouts.max_lag={self._max_lag} unfinished"
            change = "raise rollouts.max_lag, lower rollouts.max_new_tokens, or set rollouts.overdue=cancel"
        elif used > 0.9:
            reason = f"{used:.0%} of {self._slots} requests that rollouts.concurrency allows were under way"
            change = "add engines, or raise rollouts.concurrency where they can take more at once"
        else:
            reason = (
                f"{len(self._queue.under_way)} groups, all that rollouts.max_lag={self._max_lag} allows, "
            )
            reason += f"keep {used:.0%} of {self._slots} requests under way"
            change = "add engines, or raise rollouts.max_lag"
        return (
            f"update {step + 1}: training has waited {self._waited:.0f} of {seconds:.0f} s for "
            f"{len(rollouts.urls)} engines, which were idle {self._ledger.engine_idle:.0f} of the last "
            f"{self._ledger.window:.0f} s: {reason}: {change}",
        )

    def pass_over(self, groups: int) -> None:
        raise AssertionError("continuous generation resumes its queue")

    def state_dict(self) -> dict[str, Any]:
        """Where the order of problems goes on; those that engines are asked about are given once more, unless
        a queue knows them.
        """
        return self._order.state_dict(unused=[self._places[key] for key in self._known()])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state)

    def _known(self) -> list[tuple[int, int]]:
        return [key for key in dict.fromkeys(self._queue.problems) if key in self._places]

    def queue_state(self, *, step: int) -> dict[str, Any]:
        """What a checkpoint needs beside: the queue in its order, answers of groups under way, counts. A
        collective of all ranks. Raises no Refusal of a request or a verifier: the next step does.
        """
        if not self._begun:  # else nothing happened since a checkpoint was loaded
            self._bring_together(step)
        gathered = self._strategy.gather_objects(self._requests.partial)
        partial = {group.ticket: group for groups in gathered for group in groups}
        partial |= {group.ticket: group for group in self._begun}
        return {
            "queue": self._queue.state(partial),
            "places": [[*key, self._places[key]] for key in self._known()],
            "ledger": self._ledger.state(),
        }

    def load_queue(self, state: Mapping[str, Any] | None, *, collections_drawn: int) -> None:
        """Go on from a checkpoint, once the order of problems did; None: one of a run that drew
        collections.
        """
        if state is None:
            self._queue = self._new_queue(index=collections_drawn)
            return
        self._begun = self._queue.load(state["queue"], group_size=self._config.rollouts.group_size)
        self._ledger.load(state["ledger"])
        self._places = {(index, position): place for index, position, place in state["places"]}
        asked = set(self._places.values())
        self._order.returned = [place for place in self._order.returned if place not in asked]

    def _ask_again(self, step: int) -> None:
        """Ask for what was under way when the checkpoint was saved."""
        for group in self._begun:
            self._queue.resume(group, version=step)
            group.version = self._queue.under_way[group.ticket]
        self._hand_out(self._begun)
        self._begun = []  # not before: their answers would be lost where problems are refused

    def _new_queue(self, *, index: int) -> GroupQueue:
        rollouts = self._config.rollouts
        return GroupQueue(
            groups_per_step=self._groups,
            max_lag=self._max_lag,
            cancels=rollouts.overdue is Overdue.cancel,
            attempts=rollouts.max_attempts,
            unit=self._unit,
            index=index,
        )


def refuse_lost_queue(state: Mapping[str, Any] | None) -> None:
    """Refuse a checkpoint with finished groups in a run that would not train them."""
    groups = [] if state is None else state["queue"]["finished"]
    if groups:
        raise Refusal(
            f"rollouts.mode=collections: the queue of ckpt_path has {len(groups)} finished groups, which "
            "this run would not train: set rollouts.mode=continuous, or start a new run with init_from"
        )


def patience_of(rollouts: RolloutsConfig) -> float:
    """Seconds that one request is granted: for all of its attempts, and for engines that are gone."""
    return rollouts.wait_seconds + (rollouts.retries + 1) * rollouts.timeout_seconds


def _whole_groups(group_size: int, *, ranks: int) -> int:
    """The fewest groups whose samples divide over the ranks."""
    return next(count for count in range(1, ranks + 1) if count * group_size % ranks == 0)
