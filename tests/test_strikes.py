"""Five strikes of check_strikes: a signal, a full disk, a cut file, a flipped bit, a second start."""

from __future__ import annotations

from pathlib import Path

from programs import run_program

SEED = 249  # of one strike of each sort


def test_five_strikes_lose_nothing(tmp_path: Path) -> None:
    printed = run_program(tmp_path, "test_strikes:strike")
    assert "5 of 5" in printed, printed


def strike(directory: str) -> None:
    from benchmarks.check_strikes import strike_runs

    passed = strike_runs(
        Path(directory),
        rounds=5,
        seed=SEED,
        kinds=("train", "rollout"),
        report=lambda line: print(line, flush=True),
    )
    print(f"{passed} of 5", flush=True)
