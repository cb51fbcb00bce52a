"""The whole loop over HTTP, as a user runs it: one training command of two ranks, two servers in processes of
their own, one of which is killed in the middle and started again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bounds import BOUND_SECONDS

from olmo_rl.running.metrics_csv import read_metrics

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[1]
SAMPLES = 16


class Server:
    """`recipe=serve` in a process of its own, at a port that stays."""

    def __init__(self, place: Path, *, api: str, port: int = 0) -> None:
        command = [sys.executable, str(ROOT / "train.py"), "recipe=serve", f"serve.port={port}"]
        command += [f"serve.api={api}"]
        self.process = subprocess.Popen(
            [*command, "model=hybrid_tiny"], cwd=place, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = next(line.split()[-1] for line in self.process.stdout if "http://" in line)
        self.port = int(self.url.rpartition(":")[2])

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/olmo_rl/status", timeout=BOUND_SECONDS) as answer:
            return dict(json.loads(answer.read()))


@pytest.fixture
def servers(tmp_path: Path, engines: str) -> Iterator[list[Server]]:
    started = [Server(tmp_path, api=engines), Server(tmp_path, api=engines)]
    yield started
    for server in started:
        server.process.kill()
        server.process.wait()


def wait_until(true: Callable[[], bool], *, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while not true():
        assert process.poll() is None, f"training ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def events(run_dir: Path, name: str, *, rank: int = 0) -> list[dict[str, Any]]:
    path = run_dir / f"training_contract_rank{rank}.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in whole if event["event"] == name]


@pytest.mark.parametrize("engines", ["vllm", "sglang"])
def test_a_run_loses_no_sample_to_a_killed_server_and_asks_it_again_when_it_is_back(
    tmp_path: Path, servers: list[Server], engines: str
) -> None:
    """vllm: weights in Hugging Face directories; sglang: broadcast."""
    dying, lasting = servers
    run_dir = tmp_path / "outputs" / "served"
    overrides = (
        "+experiment=packed_moe",
        "model=hybrid_tiny",
        "run_name=served",
        "trainer.max_steps=1000",  # ended by a signal
        "warm_start.steps=0",
        "task.eval_problems=0",
        f"batch.samples_per_step={SAMPLES}",
        f"rollouts={engines}",
        *(["rollouts.publication=collective"] if engines == "sglang" else []),
        f"rollouts.urls=[{dying.url},{lasting.url}]",
        "rollouts.group_size=4",
        "rollouts.max_new_tokens=24",
        "rollouts.max_lag=1",  # one collection ahead
        "callbacks=quiet",
    )
    with (tmp_path / "train.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *overrides], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: len(events(run_dir, "optimizer")) >= 2, process=process)
        wait_until(lambda: dying.status()["requests"] > 0, process=process)
        dying.process.send_signal(signal.SIGKILL)
        trained = len(events(run_dir, "optimizer"))
        wait_until(lambda: len(events(run_dir, "optimizer")) >= trained + 3, process=process)
        servers.append(again := Server(tmp_path, api=engines, port=dying.port))
        wait_until(lambda: again.status()["requests"] > 0, process=process)
        assert again.status()["version"] >= trained
        trained = len(events(run_dir, "optimizer"))
        wait_until(lambda: len(events(run_dir, "optimizer")) >= trained + 2, process=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_SECONDS) == 75
    finally:
        os.kill(process.pid, signal.SIGKILL) if process.poll() is None else None

    rows = read_metrics(run_dir / "metrics.csv")
    asked, received, retried, abandoned = (
        sum(row[f"rollouts/{name}"] for row in rows) for name in ("asked", "received", "retried", "abandoned")
    )
    print(f"{len(rows)} updates: asked {asked:g} = received {received:g} + abandoned {abandoned:g}", end="")
    assert asked == received + abandoned
    assert retried >= 1, "what the killed server had under way was asked again"
    ids = [
        id
        for rank in (0, 1)
        for event in events(run_dir, "packing", rank=rank)
        for pack in event["sample_ids"]
        for id in pack
    ]
    assert max(Counter(ids).values()) == 1
    assert len(ids) == received == SAMPLES * len(rows)
    assert all(row["mismatch/mean"] < 1e-4 for row in rows), "log-probs and routes are those of the weights"
    versions: Counter[int] = Counter()
    for step, event in enumerate(events(run_dir, "optimizer")):
        by_version = {int(version): count for version, count in event["samples_by_version"].items()}
        assert sum(by_version.values()) == SAMPLES
        assert set(by_version) <= {step - 1, step}, "at most rollouts.max_lag behind"
        versions.update(by_version)
    print(f", retried {retried:g}; samples by policy version {dict(sorted(versions.items()))}")
