"""What a terminal of 100 columns shows of a run, and what a file gets in its place."""

from __future__ import annotations

import io
import re
import threading
from collections import deque
from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer
from rich.console import Console
from training_cases import SMALL_PACKS, config_of, files, fit, samples_of, write_files

from olmo_rl.config import TrainerConfig
from olmo_rl.progress import Progress
from olmo_rl.running.display import (
    ProgressDisplay,
    Shown,
    duration,
    figures_of,
    head_of,
    sample_line,
    seconds_of,
    spark,
)

VALUES = {
    "reward/mean": 0.41234,
    "rollouts/response_tokens": 1234.5,
    "policy/entropy": 0.8312,
    "grad/norm": 0.4123,
    "mismatch/mean": 0.00212,
    "packing/fill": 0.934,
    "rollouts/lag": 0.0,
    "throughput/real_tokens_per_second": 18233.4,
    "loss/clip_low": 0.002,
    "loss/clip_high": 0.0113,
    "time/update_s": 3.0,
    "time/forward_s": 0.812,
    "time/backward_s": 1.134,
    "time/transfer_s": 0.0004,
    "time/plan_ms": 25.0,
}


def test_the_head_has_phase_pack_and_time_left() -> None:
    shown = Shown(label="updates", total=40, done=10, started=100.0, seconds=deque([3.0, 5.0]))
    progress = Progress(update=11, pack=2, packs=5, phase="backward")
    line = head_of(shown, progress=progress, now=165.0)
    assert line == "updates ━━━━━··············· 10/40  backward, pack 2 of 5  1:05 gone, 2:00 left"
    progress.phase = "rollout"
    assert "10/40  generating  1:05 gone" in head_of(shown, progress=progress, now=165.0)
    assert head_of(Shown(label="updates", total=4, started=0.0), progress=None, now=3.0).endswith(
        "0/4  0:03 gone"
    )


def test_figures_and_seconds_are_those_of_the_update_and_unknown_ones_are_left_out() -> None:
    assert figures_of(VALUES) == (
        "reward 0.412  length 1,234.5  entropy 0.831  grad 0.412  mismatch 0.0021  fill 93%  lag 0  "
        "tokens/s 18,233  clipped 1.3%"
    )
    assert seconds_of(VALUES) == "seconds: plan 0.03  forward 0.81  backward 1.13"
    assert figures_of({}) == seconds_of({}) == ""


def test_a_curve_of_rewards_runs_from_its_lowest_to_its_highest() -> None:
    assert spark([-3.0, 4.0, 0.5]) == "▁█▅"
    assert spark([2.0, 2.0]) == "▁▁"
    assert spark([1.0]) == ""


def test_a_response_fits_its_line_whatever_it_holds() -> None:
    (sample,) = samples_of(((2, 3),))
    sample.prompt, sample.response, sample.reward = "12+34=\n" * 40, "46", 1.0
    line = sample_line(sample, width=100)
    assert len(line) <= 100
    assert "\n" not in line
    assert line.startswith("response (reward 1): '12+34= 12+34=")
    assert line.endswith("-> '46'")


def test_durations_read_as_minutes_and_hours() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 3600, 90061)] == [
        "0:00", "1:00", "59:59", "1:00:00", "25:01:01",
    ]  # fmt: skip


def run_with(display: ProgressDisplay, tmp_path: Path, *others: Callback) -> None:
    collections = files(3)
    for samples in collections:
        for sample in samples:
            sample.prompt, sample.response = "1+1=", f"answer of {sample.id}"
    write_files(tmp_path / "run", collections)
    config = config_of(tmp_path / "run", packing=SMALL_PACKS, trainer=TrainerConfig(max_steps=3))
    callbacks: list[Callback] = [display, *others]
    fit(config, callbacks=callbacks)


def test_a_terminal_shows_phases_from_the_start_and_ends_with_the_last_update(tmp_path: Path) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, color_system=None)
    run_with(ProgressDisplay(label="updates", total=3, console=console), tmp_path)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).replace("\u00a0", " ")
    assert "updates ···················· 0/3" in text
    last = text.rstrip().splitlines()[-5:]
    assert all(len(line) <= 100 for line in last)
    assert "3/3" in " ".join(last)
    assert "reward 0." in " ".join(last)
    assert "seconds: " in " ".join(last)
    assert "-> 'answer of f2-" in " ".join(last)


def test_a_file_gets_plain_lines_with_figures_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(ProgressDisplay(label="updates", total=3, console=Console(file=io.StringIO())), tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("updates")]
    assert lines[0] == "updates 0/3  loading weights"
    assert re.fullmatch(r"updates 1/3  \d+:\d\d left  reward 0\.\d+  length .* tokens/s .*", lines[1])
    assert re.fullmatch(r"updates 3/3  reward 0\.\d+  .*", lines[2])
    assert not any("\x1b" in line for line in lines)


class Failure(Callback):
    """Raises after the second update, and keeps the values that the display had after the first one."""

    def __init__(self, display: ProgressDisplay) -> None:
        self.display, self.values, self.copy = display, dict[str, float](), dict[str, float]()

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("failed on purpose")
        self.values = self.display.shown.values
        self.copy = dict(self.values)


def test_a_run_that_fails_gives_the_terminal_back(tmp_path: Path) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, color_system=None)
    display = ProgressDisplay(label="updates", total=3, console=console)
    failure = Failure(display)
    with pytest.raises(RuntimeError, match="failed on purpose"):
        run_with(display, tmp_path, failure)
    assert written.getvalue().count("\x1b[?25l") == written.getvalue().count("\x1b[?25h") == 1, "the cursor"
    assert not any(thread.__class__.__name__ == "_RefreshThread" for thread in threading.enumerate())
    assert failure.values == failure.copy, "a thread that draws walks through them"
    assert display.shown.values != failure.copy
