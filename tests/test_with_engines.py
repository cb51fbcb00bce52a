"""launch/with_engines.sh: engines and trainer of one machine start and end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from bounds import BOUND_SECONDS
from engine_cases import MODEL_KEYS

from olmo_rl.running.metrics_csv import read_metrics

ROOT = Path(__file__).parents[1]
SERVE = " ".join(
    [sys.executable, str(ROOT / "train.py"), "recipe=serve", "serve.port={port}", "run_name=engine{number}"]
    + [f"'{key}'" for key in MODEL_KEYS]
)
RUN = (
    "+experiment=packed_moe",
    *MODEL_KEYS,
    "run_name=run",
    "warm_start.steps=0",
    "strategy=single",
    "trainer=cpu",
    "task.eval_problems=0",
    "batch.samples_per_step=8",
    "rollouts=vllm",
    "rollouts.group_size=2",
    "rollouts.max_new_tokens=8",
    "callbacks=quiet",
)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens at."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                for number in range(1, count):
                    socket.create_server(("127.0.0.1", port + number)).close()
            except OSError:
                continue
            return int(port)
    raise AssertionError("no free ports")


def started(place: Path, *arguments: str, engine: str, engines: int = 1) -> tuple[subprocess.Popen[str], int]:
    port = free_ports(engines)
    given = {"ENGINE": engine, "ENGINES": str(engines), "PORT": str(port), "PYTHON": sys.executable}
    process = subprocess.Popen(
        [str(ROOT / "launch" / "with_engines.sh"), *arguments],
        cwd=place,
        env=os.environ | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, port


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_engines_serve_a_run_and_end_with_it_and_a_signal_saves_first(tmp_path: Path) -> None:
    process, port = started(tmp_path, *RUN, "trainer.max_steps=100000", engine=SERVE, engines=2)
    metrics = tmp_path / "outputs" / "run" / "metrics.csv"
    deadline = time.monotonic() + BOUND_SECONDS
    while not metrics.is_file() or len(read_metrics(metrics)) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert listens(port)
    assert listens(port + 1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=BOUND_SECONDS)
    assert process.returncode == 75, printed
    assert not listens(port)
    assert not listens(port + 1)


def test_an_engine_that_does_not_start_ends_everything_with_its_last_words(tmp_path: Path) -> None:
    engine = f"{sys.executable} -c 'import sys; sys.exit(\"no such flag of engine {{number}}\")'"
    process, _ = started(tmp_path, *RUN, engine=engine)
    printed, _ = process.communicate(timeout=BOUND_SECONDS)
    assert process.returncode == 1
    assert "engine 0 ended before it answered /health; the end of engine-0.log:\n" in printed
    assert "no such flag of engine 0" in printed
    assert not (tmp_path / "outputs" / "run").exists()
