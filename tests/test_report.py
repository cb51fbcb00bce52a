"""report.html and its parts: what it reads, what it finds in prepared runs, what it refuses, its size."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_cases import collapsing, prepared_run, straggling, write_many

from olmo_rl.config import CallbacksConfig, Config
from olmo_rl.planning.schedule import Forecast
from olmo_rl.report.health import Health, ends_of, health_of, verdict
from olmo_rl.report.page import thinned
from olmo_rl.report.reading import RunRecord, read_run
from olmo_rl.report.slowness import find_slowness
from olmo_rl.report.writing import write_report
from olmo_rl.running.closing import closing_lines, print_closing
from olmo_rl.running.sample_files import SCHEMA
from olmo_rl.training.measures import gap_edges
from olmo_rl.types import Refusal

MOST_MIB = 20
BOUND_SECONDS = 60.0  # against hanging, not a measure of speed


def read(path: Path) -> RunRecord:
    return read_run(path, key="run")


def line_of(record: RunRecord, title: str) -> Health:
    (found,) = [line for line in health_of(record) if line.title == title]
    return found


def data_of(page: Path) -> dict[str, Any]:
    """The data inside of a page, as its script reads them."""
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared")
    prepared_run(directory / "healthy")
    collapsing(directory / "collapsing")
    straggling(directory / "straggling")
    return directory


def test_a_healthy_run_is_called_healthy_on_every_line(runs: Path) -> None:
    record = read(runs / "healthy")
    assert record.notes == []
    lines = health_of(record)
    assert len(lines) == 10
    assert {line.level for line in lines} == {"good"}
    assert verdict(lines) == "healthy"
    assert closing_lines(lines) == ["this run looks healthy"]


def test_a_collapsing_entropy_is_found_with_what_to_change(runs: Path) -> None:
    record = read(runs / "collapsing")
    line = line_of(record, "Entropy")
    assert line.level == "bad"
    assert line.found.startswith("collapses: ")
    assert "loss.entropy_coef" in line.advice
    assert verdict(health_of(record)) == "unhealthy: entropy"
    assert any("collapses" in text and "Try: " in text for text in closing_lines(health_of(record)))


def test_a_rank_that_begins_late_is_named_with_the_share_that_it_costs(runs: Path) -> None:
    slow = find_slowness(read(runs / "straggling"))
    assert slow.straggler.startswith("rank 2 begins 0.5 s after the first one and is last in 100%")
    assert slow.seconds == pytest.approx(3.0, abs=0.1)
    assert slow.gain == pytest.approx(0.5 / 3.0, abs=0.02)
    assert line_of(read(runs / "straggling"), "Speed").level == "bad"
    assert find_slowness(read(runs / "healthy")).straggler == ""


def test_of_a_run_resumed_on_more_ranks_those_of_today_are_compared(tmp_path: Path) -> None:
    run = straggling(tmp_path / "run")
    log = run / "training_contract_rank0.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["event"] == "time" and event["step"] <= 20:  # rank 1 of two was the late one then
            event |= {"began": [1000.0, 1009.0], "busy": [1.0, 1.0]}
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    slow = find_slowness(read(run))
    assert [one.rank for one in slow.ranks] == [0, 1, 2, 3]
    assert slow.straggler.startswith("rank 2 begins 0.5 s after the first one and is last in 100%")
    events[-2 if events[-1]["event"] == "evaluation" else -1] |= {"began": [5.0], "busy": [1.0]}
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert find_slowness(read(run)).ranks == [], "one rank today: nobody waits"


def test_a_closing_that_fails_is_one_line_and_the_run_stays_as_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepared_run(tmp_path / "run", updates=12)
    log = run / "training_contract_rank0.jsonl"
    log.write_text(log.read_text().replace('"fill": ', '"fill": "half", "was": '))
    config = Config(run_dir=str(run), callbacks=CallbacksConfig(report=True))
    print_closing(config, interrupted=False)
    (warning, directory) = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: no closing report: TypeError: ")
    assert directory == f"run directory: {run}"


@pytest.mark.parametrize(
    ("kind", "words", "advice"),
    [
        ("busy", "rank 1 computes 1.6 times the others", "balance=anneal"),
        ("optimizer", "its machine is slower", "preflight"),
    ],
)
def test_a_rank_with_more_work_and_one_on_a_slow_machine_are_told_apart(
    tmp_path: Path, kind: str, words: str, advice: str
) -> None:
    factors: dict[str, Any] = {kind: {1: 1.6}}
    slow = find_slowness(read(prepared_run(tmp_path / "run", **factors)))
    assert words in slow.straggler
    assert advice in slow.advice
    # Forward and backward are 1.9 of 3.0 seconds, of which 1 - 1/1.6 is waited for.
    assert slow.gain == pytest.approx((1 - 1 / 1.6) * 1.9 / 3.0, abs=0.02)


def test_the_slowest_update_has_its_reason(tmp_path: Path) -> None:
    def change(step: int, done: float, row: dict[str, float]) -> dict[str, float]:
        long = {"time/rollout_s": 4.0, "rollouts/response_tokens": 700.0}
        return row | long if step == 41 else row

    ((step, seconds, reason),) = find_slowness(read(prepared_run(tmp_path / "run", change=change))).why
    assert (step, seconds) == (41, pytest.approx(6.1, abs=0.1))
    assert reason.startswith("rollout took +3.1 s over its median of 0.9")
    assert "responses were 3.5 times as long as usual" in reason


def test_without_its_settings_a_run_is_not_said_to_pack_nothing(tmp_path: Path) -> None:
    run = prepared_run(tmp_path / "run", updates=12)
    (run / ".hydra" / "config.yaml").unlink()
    assert line_of(read(run), "Packing").found == "packs are 91% full"
    (run / ".hydra" / "config.yaml").write_text("packing:\n  kind: none\n")
    assert line_of(read(run), "Packing").found == "off: one sample a forward"


def test_skews_of_lent_experts_are_those_of_ranks() -> None:
    slots = np.array([3, 1, 0, 4]).reshape(1, 1, 4, 1)  # two ranks of two slots: 4 and 4
    found = Forecast(loads=slots, layers=(1,), slots=2).compare(slots)
    assert (found["layer_skew"], found["layer_skew_before"]) == ([1.0], None)


@pytest.mark.parametrize(
    ("rewards", "level", "words"),
    [
        ([1e6 + 1000.0 * i for i in range(40)], "good", "rises: 1.002e+06"),
        ([-1e-9 * i for i in range(40)], "bad", "falls"),
        ([3.0] * 40, "bad", "every update has 3"),
        ([math.nan] * 40, "unknown", "no reward/mean"),
        ([1.0, 2.0], "unknown", "2 updates show no trend yet"),
    ],
)
def test_rewards_of_any_scale_are_judged(
    tmp_path: Path, rewards: list[float], level: str, words: str
) -> None:
    lines = ["step,reward/mean", *(f"{i + 1},{reward!r}" for i, reward in enumerate(rewards))]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    line = line_of(read(tmp_path), "Reward")
    assert line.level == level
    assert words in line.found
    assert write_report(tmp_path).stat().st_size > 0


def test_values_that_are_not_finite_leave_no_trace_in_the_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,reward/mean,grad/norm\n1,nan,inf\n2,0.5,1.0\n")
    assert data_of(write_report(tmp_path))["series"] == {
        "grad/norm": [[2], [1.0]],
        "reward/mean": [[2], [0.5]],
    }


def test_ends_are_means_of_the_first_and_the_last_tenth() -> None:
    ends = ends_of(np.arange(100.0))
    assert ends is not None
    assert (ends.first, ends.last) == (4.5, 94.5)
    assert ends.noise == pytest.approx(2 * math.sqrt(2 * np.arange(10.0).var(ddof=1) / 10))
    assert ends_of(np.arange(9.0)) is None


def test_a_thinned_curve_keeps_its_ends_and_a_spike_of_one_update() -> None:
    values = np.sin(np.arange(10_000) / 500)
    values[6543] = 40.0
    kept = thinned(values, most=100)
    assert len(kept) <= 100
    assert {0, 6543, 9999} <= set(kept.tolist())
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert thinned(values[:7], most=100).tolist() == list(range(7))


def test_bins_of_the_gap_histogram_are_tenths_of_a_decade_from_1e_8() -> None:
    assert gap_edges() == pytest.approx([10 ** (i / 10 - 8) for i in range(91)], rel=1e-9)


def test_a_torn_last_line_is_left_out_and_noted_and_nothing_is_changed(runs: Path, tmp_path: Path) -> None:
    run = prepared_run(tmp_path / "run", updates=12)
    for name in ("metrics.csv", "training_contract_rank0.jsonl"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[:-7])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    record = read(run)
    assert record.steps.tolist() == list(range(1, 12))
    assert sum("torn" in note for note in record.notes) == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_without_metrics_a_log_of_another_version_and_damaged_samples_are_noted(tmp_path: Path) -> None:
    run = prepared_run(tmp_path / "run", updates=12)
    (run / "metrics.csv").unlink()
    log = run / "training_contract_rank0.jsonl"
    log.write_text(log.read_text().replace('"version": 1', '"version": 99', 1))
    (run / "samples" / "step-12.parquet").write_bytes(b"PAR1")
    (run / ".hydra" / "config.yaml").write_text("a: [")
    notes = "\n".join(read(run).notes)
    assert "metrics.csv is missing" in notes
    assert "version 99" in notes
    assert "step-12.parquet is left out" in notes
    assert "config.yaml is left out" in notes
    data = data_of(write_report(run))
    assert data["verdict"] == "unknown: nothing is logged yet"
    assert data["notes"]


def test_a_run_that_is_under_way_is_shown_as_running(tmp_path: Path) -> None:
    run = prepared_run(tmp_path / "run", updates=12)
    (run / ".lease").write_text("{}")
    assert read(run).status == "running"
    os.utime(run / ".lease", (0, 0))  # a process that was killed left it
    assert read(run).status == "ended"


def test_two_runs_are_compared_with_the_settings_and_metrics_that_only_one_has(
    runs: Path, tmp_path: Path
) -> None:
    def change(step: int, done: float, row: dict[str, float]) -> dict[str, float]:
        del row["grad/norm"]
        return row | {"own/metric": 1.0}

    other = prepared_run(tmp_path / "other", change=change, config="seed: 7\n")
    data = data_of(write_report(runs / "healthy", compare=other, path=tmp_path / "both.html"))
    found = {name: (a, b) for name, a, b in data["differences"]}
    assert found["own/metric"] == (None, 1.0)
    assert found["grad/norm"][1] is None
    assert found["packing/fill"] == (0.91, 0.91)
    assert ["seed", None, 7] in data["settings_differ"]
    assert (data["name"], data["other"]["name"]) == ("healthy", "other")


@pytest.mark.parametrize(("name", "full"), [("second", False), ("first", True)])
def test_compared_runs_of_one_name_are_named_by_their_directories(
    tmp_path: Path, name: str, full: bool
) -> None:
    paths = [tmp_path / "a" / "first", tmp_path / "b" / name]
    for path in paths:
        prepared_run(path, updates=12)
        (path / ".hydra" / "config.yaml").write_text("run_name: same\n")
    data = data_of(write_report(paths[0], compare=paths[1], path=tmp_path / "both.html"))
    assert [data["name"], data["other"]["name"]] == [str(path) if full else path.name for path in paths]


def test_a_reward_that_is_not_finite_is_unknown_in_the_page(tmp_path: Path) -> None:
    run = prepared_run(tmp_path / "run", updates=12)
    path = run / "samples" / "step-12.parquet"
    rows = [row | {"reward": math.nan, "advantage": math.inf} for row in pq.read_table(path).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    samples = [one for one in data_of(write_report(run))["samples"] if one["step"] == 12]
    assert {(one["reward"], one["advantage"]) for one in samples} == {(None, None)}


def test_a_sweep_is_one_page_with_what_its_jobs_differ_in(tmp_path: Path) -> None:
    for number in range(3):
        prepared_run(tmp_path / "sweep" / str(number), updates=12, config=f"optim:\n  lr: {10.0**-number}\n")
    data = data_of(write_report(tmp_path / "sweep"))
    assert data["keys"] == ["optim.lr"]
    assert [job["settings"] for job in data["jobs"]] == [[1.0], [0.1], [0.01]]
    with pytest.raises(Refusal, match="is a sweep: name one of its runs"):
        write_report(tmp_path / "sweep", compare=tmp_path / "sweep" / "0")


@pytest.mark.parametrize(
    ("name", "reason"), [("missing", "no such directory"), ("empty", "neither metrics.csv nor")]
)
def test_a_directory_without_a_run_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match=rf"run=.*{name}: .*{reason}"):
        write_report(tmp_path / name)


def test_a_page_that_cannot_be_written_is_refused_with_another_place_to_choose(
    runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match=r"report_path=.*/file/report.html cannot be written: .*report_path"):
        write_report(runs / "healthy", path=tmp_path / "file" / "report.html")


def test_texts_of_a_run_never_become_markup(runs: Path) -> None:
    page = write_report(runs / "healthy")
    text = page.read_text()
    assert text.count("</script>") == 2, "a response with a closing tag ends no script"
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert any("</script>" in sample["prompt"] for sample in data_of(page)["samples"])


def test_ten_thousand_updates_are_a_small_page(tmp_path: Path) -> None:
    run = write_many(tmp_path / "run", updates=10_000)
    started = time.monotonic()
    page = write_report(run)
    assert time.monotonic() - started < BOUND_SECONDS
    assert page.stat().st_size < MOST_MIB * 2**20
    data = data_of(page)
    assert data["updates"] == 10_000
    assert len(data["series"]) > 90
    assert len(data["time"]["steps"]) == 100
