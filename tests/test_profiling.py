"""trainer.profile_steps: a trace and a table of the updates after the first two."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from training_cases import config_of, files, fit, write_files

from olmo_rl.config import TrainerConfig
from olmo_rl.running.profiling import ProfiledUpdates


def test_a_profile_has_the_operators_of_as_many_updates_as_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    write_files(run_dir, files(4))
    config = config_of(run_dir, trainer=TrainerConfig(max_steps=4))
    fit(config, callbacks=[ProfiledUpdates(str(run_dir), count=1)])
    assert sorted(path.name for path in (run_dir / "profile").iterdir()) == ["rank-0.json.gz", "rank-0.txt"]
    assert "aten::mm" in (run_dir / "profile" / "rank-0.txt").read_text()
    trace = json.loads(gzip.decompress((run_dir / "profile" / "rank-0.json.gz").read_bytes()))
    steps = [event for event in trace["traceEvents"] if event.get("name", "").startswith("Optimizer.step")]
    assert len(steps) == 1
    assert "profile of 1 updates: " in capsys.readouterr().out


def test_a_run_that_ends_before_the_first_profiled_update_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path / "run", files(1))
    fit(config_of(tmp_path / "run"), callbacks=[ProfiledUpdates(str(tmp_path / "run"), count=3)])
    assert "trainer.profile_steps=3: nothing was profiled" in capsys.readouterr().out
    assert not (tmp_path / "run" / "profile").exists()
