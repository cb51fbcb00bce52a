"""How busy engines are with the requests of one client: when each had any, how many at once, how long one
took.

Written by the client's event loop, read by the thread that trains. Times are those of the wall clock, in
seconds, so that clients of several nodes can be laid over each other.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One client between two readings. `busy`: spans with a request under way, by engine; `request_seconds`:
    of all requests together; `seconds`: of each that was answered; `under_way`: requests at the end.
    """

    begin: float
    end: float
    busy: dict[str, list[Span]]
    request_seconds: float
    seconds: list[float]
    under_way: int


class Occupancy:
    """State: the requests under way by engine, and what happened since the last reading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.time()
        self._open: dict[str, list[float]] = defaultdict(list)
        self._since: dict[str, float] = {}  # engines with requests: since when there was always one
        self._busy: dict[str, list[Span]] = defaultdict(list)
        self._request_seconds = 0.0
        self._seconds: list[float] = []

    def begin(self, url: str) -> float:
        """Note a request; returns its time, with which it ends."""
        with self._lock:
            now = time.time()
            self._open[url].append(now)
            self._since.setdefault(url, now)
            return now

    def end(self, url: str, began: float, *, answered: bool) -> None:
        """Note the end of the request that `begin` noted at `began`."""
        with self._lock:
            now = time.time()
            self._open[url].remove(began)
            self._request_seconds += now - max(began, self._began)
            if answered:
                self._seconds.append(now - began)
            if not self._open[url]:
                self._busy[url].append((max(self._since.pop(url), self._began), now))

    def read(self) -> Activity:
        """Everything since the last reading; requests under way count up to now."""
        with self._lock:
            now = time.time()
            busy = {url: list(spans) for url, spans in self._busy.items()}
            seconds = self._request_seconds
            for url, since in self._since.items():
                busy.setdefault(url, []).append((max(since, self._began), now))
                seconds += sum(now - max(began, self._began) for began in self._open[url])
            activity = Activity(
                begin=self._began,
                end=now,
                busy=busy,
                request_seconds=seconds,
                seconds=self._seconds,
                under_way=sum(len(begun) for begun in self._open.values()),
            )
            self._began, self._busy = now, defaultdict(list)
            self._request_seconds, self._seconds = 0.0, []
            return activity


def covered(spans: Iterable[Span]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, reached = 0.0, -np.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def idle_seconds(activities: Sequence[Activity], *, urls: Sequence[str]) -> tuple[float, float]:
    """Seconds of the first client's window, and the mean over engines of those in which no client had a
    request under way there.
    """
    begin, end = activities[0].begin, activities[0].end
    idle = 0.0
    for url in urls:
        spans = [span for activity in activities for span in activity.busy.get(url, ())]
        idle += (end - begin) - covered(
            (max(a, begin), min(b, end)) for a, b in spans if b > begin and a < end
        )
    return end - begin, max(0.0, idle / len(urls))


def spread(seconds: Sequence[float], *, group_size: int) -> float | None:
    """How much longer a group of independent requests takes than one of them, by the durations `seconds`: the
    mean of the largest of `group_size` draws over the mean; None without durations.
    """
    if not seconds:
        return None
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    largest = float((ordered * np.diff(ranks**group_size)).sum())
    mean = float(ordered.mean())
    return largest / mean if mean > 0 else None


def predicted_lag(
    *, under_way: float, queued: float, spread: float, samples_per_step: int, max_lag: int
) -> float:
    """Updates from the first token of a sample to its step, by Little's law: the samples that wait at a
    publication, over those that a step takes. `under_way` requests (utilisation x concurrency) belong to
    groups of which `spread` times as many samples were begun; `queued` ones are finished.
    """
    return min(float(max_lag), (spread * under_way + queued) / samples_per_step)
