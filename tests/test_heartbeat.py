"""Which rank a watcher names, from reports as ranks write them."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from olmo_rl import progress
from olmo_rl.running import heartbeat
from olmo_rl.running.heartbeat import DIRECTORY, Beat, Watcher, beating, interval_of, job_of

WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
BEAT = Beat(job="j", host="far", pid=1, beats=1, notes=1, place="update 2", code="a.py:1 f", waits=False)


class Ranks:
    """Two ranks that report, and a watcher with a clock that the test sets."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory / DIRECTORY
        self.directory.mkdir()
        self.now = 1000.0
        self.beats = [BEAT, BEAT]
        self.lines: list[str] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watcher = Watcher(directory, ranks=[0, 1], job="j", interval=1.0)

    def second(self, *changes: dict[str, object] | None) -> None:
        """One second later; `changes` of each rank's report, None: it writes nothing."""
        self.now += 1
        for rank, change in enumerate(changes):
            if change is not None:
                before = self.beats[rank]
                self.beats[rank] = replace(before, beats=before.beats + 1, **change)  # type: ignore[arg-type]
                (self.directory / f"rank-{rank}").write_text(json.dumps(asdict(self.beats[rank])))
        self.watcher.look(self.lines.append)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


def test_a_rank_without_a_sign_of_life_is_named_once_again_when_twice_as_long_and_when_it_moves(
    ranks: Ranks,
) -> None:
    ranks.second({}, {})
    for _ in range(14):
        ranks.second({}, None)
    assert ranks.lines == []
    ranks.second({}, None)
    assert ranks.lines == [
        "rank 1 has not moved since update 2, in a.py:1 f, for 15 s on host far (process 1)"
    ]
    for _ in range(16):
        ranks.second({}, None)
    assert [line for line in ranks.lines if "for 30 s" in line] == ranks.lines[1:]
    assert len(ranks.watcher.lines()) == 1
    ranks.second({}, {"place": "update 3"})
    assert ranks.lines[2:] == ["rank 1 moves again: update 3"]
    assert ranks.watcher.lines() == []


def test_a_rank_that_works_alone_is_named_only_while_another_waits_for_it(ranks: Ranks) -> None:
    for _ in range(100):
        ranks.second({}, {})
    assert ranks.lines == []  # all of them generate, say
    ranks.second({"waits": True, "notes": 2}, {})
    assert [line[:6] for line in ranks.lines] == ["rank 1"]
    ranks.second({}, {"notes": 2})
    assert ranks.lines[1:] == ["rank 1 moves again: update 2"]


def test_reports_of_an_earlier_start_and_half_written_ones_name_nobody(ranks: Ranks) -> None:
    ranks.second({}, {"job": "earlier"})
    for _ in range(100):
        ranks.second({}, None)
    assert ranks.lines == []
    ranks.second({}, {"job": "j"})
    (ranks.directory / "rank-1").write_text('{"job":')
    for _ in range(20):
        ranks.second({}, None)
    assert [line[:6] for line in ranks.lines] == ["rank 1"]  # what was read before counts on
    (ranks.directory / "rank-1").unlink()
    ranks.second({}, None)
    assert ranks.watcher.lines() == []  # it ended well


def test_large_worlds_report_less_often() -> None:
    assert interval_of(8) == 1.0
    assert interval_of(512) == 8.0


def test_a_rank_reports_its_notes_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / DIRECTORY / "rank-1"
    with beating(str(tmp_path), environ=WORLD, watches=False):
        progress.note_update(7, packs=2)
        progress.note_pack(1)
        progress.note_phase("forward")
        while not path.exists() or "update 7, pack 1 of 2, phase forward" not in path.read_text():
            time.sleep(0.02)
        beat = json.loads(path.read_text())
        assert beat["pid"] == os.getpid()
        assert beat["job"] == job_of(WORLD)
        assert not beat["waits"]
    assert list(tmp_path.iterdir()) == []
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_one_rank_reports_nothing(tmp_path: Path) -> None:
    with beating(str(tmp_path), environ={}, watches=True):
        progress.note_phase("forward")
        assert list(tmp_path.iterdir()) == []


def test_a_note_costs_no_measurable_part_of_a_pack() -> None:
    """A bound against doing work there, not a measure of speed: a pack takes milliseconds at least."""
    progress.follow(progress.Progress())
    try:
        began = time.process_time()
        for number in range(10_000):
            progress.note_pack(number)
        assert (time.process_time() - began) / 10_000 < 1e-4
    finally:
        progress.follow(None)
    assert heartbeat.BEAT_SECONDS >= 1.0
