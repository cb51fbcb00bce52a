"""How busy engines were, and what follows for the age of samples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from olmo_rl.rollouts.occupancy import Activity, Occupancy, covered, idle_seconds, predicted_lag, spread


def test_seconds_without_a_request_of_any_client_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine a: requests of one client 1 to 4 and 2 to 6, of the other 8 to 9; b: none. Ten seconds."""
    now = [0.0]
    monkeypatch.setattr("olmo_rl.rollouts.occupancy.time.time", lambda: now[0])
    mine, theirs = Occupancy(), Occupancy()

    def at(second: float) -> None:
        now[0] = second

    at(1.0)
    first = mine.begin("a")
    at(2.0)
    second = mine.begin("a")
    at(4.0)
    mine.end("a", first, answered=True)
    at(6.0)
    mine.end("a", second, answered=False)
    at(8.0)
    theirs.begin("a")
    at(9.0)
    open_one = theirs.read()
    assert open_one.under_way == 1
    assert open_one.busy == {"a": [(8.0, 9.0)]}
    at(10.0)
    activity = mine.read()
    assert activity.busy == {"a": [(1.0, 6.0)]}
    assert activity.request_seconds == 3 + 4
    assert activity.seconds == [3.0]
    assert idle_seconds([activity, open_one], urls=["a"]) == (10.0, 4.0)
    assert idle_seconds([activity, open_one], urls=["a", "b"]) == (10.0, 7.0)


def test_a_request_that_is_read_while_under_way_counts_once_in_each_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = itertools.count()
    monkeypatch.setattr("olmo_rl.rollouts.occupancy.time.time", lambda: float(next(times)))
    occupancy = Occupancy()  # 0
    began = occupancy.begin("a")  # 1
    assert occupancy.read().busy == {"a": [(1.0, 2.0)]}
    occupancy.end("a", began, answered=True)  # 3
    found = occupancy.read()  # 4
    assert found.busy == {"a": [(2.0, 3.0)]}
    assert found.request_seconds == 1.0
    assert found.seconds == [2.0]


def test_spans_that_overlap_are_covered_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.2, 5.4)]) == 4


def test_a_group_takes_as_long_as_the_slowest_of_its_requests() -> None:
    """Of 1 and 3 s, two draws: the largest is 1 s in a quarter of the cases: (1 + 3 x 3) / 4 = 2.5 over 2."""
    assert spread([3.0, 1.0], group_size=2) == pytest.approx(2.5 / 2)
    assert spread([3.0, 1.0, 7.0], group_size=1) == pytest.approx(1)
    assert spread([], group_size=4) is None
    draws = np.random.default_rng(0).lognormal(size=2000)
    largest = np.random.default_rng(1).choice(draws, size=(20000, 4)).max(1).mean()
    assert spread(draws.tolist(), group_size=4) == pytest.approx(largest / draws.mean(), rel=0.02)


def test_the_predicted_lag_is_what_waits_at_a_publication_over_what_a_step_takes() -> None:
    assert predicted_lag(under_way=6, queued=8, spread=1.5, samples_per_step=8, max_lag=4) == 17 / 8
    assert predicted_lag(under_way=60, queued=8, spread=1.5, samples_per_step=8, max_lag=4) == 4


def test_a_window_without_any_request_is_idle_as_a_whole() -> None:
    nothing = Activity(begin=2.0, end=5.0, busy={}, request_seconds=0.0, seconds=[], under_way=0)
    assert idle_seconds([nothing], urls=["a"]) == (3.0, 3.0)
