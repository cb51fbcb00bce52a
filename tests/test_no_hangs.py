"""One rank of two fails in the middle of a run, or both do: every rank ends soon and reports the first cause.

Each case is a real run of the train recipe on two processes; two go at a time, because most of their time
is imports.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from bounds import BOUND_SECONDS
from lightning.pytorch import Callback
from training_cases import MODEL, config_of, files, write_files

from olmo_rl.config import (
    BatchConfig,
    CallbacksConfig,
    Config,
    PackingConfig,
    PackingKind,
    RolloutsConfig,
    Source,
    StrategyConfig,
    TaskConfig,
    TaskKind,
    TrainerConfig,
)
from olmo_rl.run_directory import complete_checkpoints
from olmo_rl.running.ranks import run_ranks
from olmo_rl.types import RankFailed, Refusal

pytestmark = pytest.mark.usefixtures("forked")

TIMEOUT_SECONDS = 4 * BOUND_SECONDS  # how long a collective would hang
RANKS = 2


def worth(response: str, answer: str) -> float:
    """A verifier that fails on the rank that the callback names."""
    return float("inf") if "JUDGES_BADLY" in os.environ else float(len(response) % 2)


class Strike(Callback):
    """Notes who runs; then, on rank 1, does to its process what the case is named after."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = Path(config.run_dir)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / f"pid{trainer.global_rank}").write_text(str(os.getpid()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_rank != 1 or trainer.global_step != 1:
            return
        (self._directory / "struck").write_text(str(time.time()))
        match self._config.run_name:
            case "killed":
                self._await_checkpoint()  # written beside training: a kill before its end leaves none
                os.kill(os.getpid(), signal.SIGKILL)
            case "callback":
                raise ZeroDivisionError("the first cause")
            case "verifier":
                os.environ["JUDGES_BADLY"] = "from now on"

    def _await_checkpoint(self) -> None:
        deadline = time.monotonic() + BOUND_SECONDS
        while not complete_checkpoints(self._directory) and time.monotonic() < deadline:
            time.sleep(0.02)


def run_rank(config: Config) -> None:
    from recipes.train import train

    train(config, watchers=[Strike(config)])


def config_for(directory: Path, name: str, **sections: Any) -> Config:
    fields: dict[str, Any] = {
        "trainer": TrainerConfig(devices=RANKS, max_steps=4),
        "strategy": StrategyConfig(ep_degree=2, timeout_seconds=TIMEOUT_SECONDS),
        "callbacks": CallbacksConfig(progress=False, pictures=False, checkpoint_interval=None),
    }
    return config_of(directory / name, **(fields | sections))


def cases(directory: Path) -> list[Config]:
    good = files(4)
    stranger = [replace(good[2][0], tokens=good[2][0].tokens + MODEL.vocab_size), *good[2][1:]]
    for name, collections in {
        "killed": good,
        "callback": good,
        "refused alike": [*good[:2], stranger],
    }.items():
        write_files(directory / name, collections)
    (directory / "problems.jsonl").write_text(
        "".join(f'{{"prompt": "{"ab" * (i % 4)}{i}?", "answer": "{i}"}}\n' for i in range(100))
    )
    saving = CallbacksConfig(progress=False, pictures=False, checkpoint_interval=1)
    own = TaskConfig(
        kind=TaskKind.jsonl,
        path=str(directory / "problems.jsonl"),
        verifier={"_target_": "test_no_hangs.worth"},
        eval_problems=0,
    )
    return [
        config_for(directory, "killed", callbacks=saving),
        config_for(directory, "callback"),
        config_for(directory, "refused alike"),
        config_for(
            directory,
            "verifier",
            task=own,
            rollouts=RolloutsConfig(source=Source.local, group_size=4, max_new_tokens=4),
            batch=BatchConfig(samples_per_step=8, filter_zero_variance=False),
            packing=PackingConfig(kind=PackingKind.consecutive),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Ended:
    error: Exception | None
    seconds: float | None  # since the strike
    checkpoints: list[str]


def run(config: Config) -> Ended:
    error: Exception | None = None
    try:
        run_ranks(run_rank, config)
    except (RankFailed, Refusal) as failure:
        error = failure
    run_dir, ended = Path(config.run_dir), time.time()
    for rank in range(RANKS):
        assert not Path(f"/proc/{(run_dir / f'pid{rank}').read_text()}").exists(), f"rank {rank} lives on"
    struck = run_dir / "struck"
    return Ended(
        error=error,
        seconds=ended - float(struck.read_text()) if struck.is_file() else None,
        checkpoints=[path.name for path in complete_checkpoints(run_dir)],
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    configs = cases(tmp_path_factory.mktemp("hangs"))
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = dict(zip([config.run_name for config in configs], pool.map(run, configs), strict=True))
    return results.__getitem__


def test_a_killed_rank_ends_the_run_is_named_and_leaves_the_checkpoint_before_it(
    ended: Callable[[str], Ended],
) -> None:
    done = ended("killed")
    assert str(done.error).startswith("rank 1 was killed by SIGKILL")
    assert done.seconds is not None
    assert done.seconds < BOUND_SECONDS
    assert done.checkpoints == ["step-1"]


def test_an_exception_in_a_callback_of_one_rank_ends_the_run_and_is_the_cause_that_is_told(
    ended: Callable[[str], Ended],
) -> None:
    done = ended("callback")
    assert str(done.error).startswith("rank 1 failed:\nTraceback")
    assert str(done.error).rstrip().endswith("ZeroDivisionError: the first cause")
    assert done.seconds is not None
    assert done.seconds < BOUND_SECONDS
    assert done.checkpoints == []


def test_a_sample_that_one_rank_alone_refuses_ends_the_run_with_that_refusal(
    ended: Callable[[str], Ended],
) -> None:
    """All ranks raise it together, so that the updates made before it are saved."""
    done = ended("verifier")
    assert isinstance(done.error, Refusal)
    assert "task.verifier failed on a response to" in str(done.error)
    assert "it returned inf" in str(done.error)
    assert done.seconds is not None
    assert done.seconds < BOUND_SECONDS
    assert done.checkpoints == ["step-2"]


def test_a_refusal_that_meets_every_rank_saves_the_updates_before_it(ended: Callable[[str], Ended]) -> None:
    done = ended("refused alike")
    assert isinstance(done.error, Refusal)
    assert "collection-00002" in str(done.error)
    assert done.checkpoints == ["step-2"]
