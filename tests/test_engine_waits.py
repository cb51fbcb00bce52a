"""Ranks that wait for engines: whatever one waits for, no other one waits for it inside a collective."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from engine_cases import MODEL_KEYS, listening, local_engine, server_of
from engine_proxy import Proxy
from launched import train_on_two_ranks

from olmo_rl.policy.weights import read_weights
from olmo_rl.running.metrics_csv import read_metrics

COLLECTIVE_SECONDS = 20
STUCK_SECONDS = 30  # beyond the limit of a collective


def overrides(*urls: str) -> list[str]:
    return [
        "+experiment=packed_moe",
        *MODEL_KEYS,
        "warm_start.steps=0",
        "task.eval_problems=2",
        "batch.samples_per_step=8",
        "rollouts=vllm",
        f"rollouts.urls=[{','.join(urls)}]",
        "rollouts.group_size=2",
        "rollouts.max_new_tokens=8",
        f"rollouts.timeout_seconds={STUCK_SECONDS}",
        f"strategy.timeout_seconds={COLLECTIVE_SECONDS}",
        "callbacks=quiet",
    ]


@pytest.mark.parametrize("stuck", ["request", "publication"])
def test_what_is_stuck_for_longer_than_a_collective_may_last_does_not_end_the_run(
    stuck: str, tmp_path: Path
) -> None:
    """One request of one rank, which another engine then answers; one control call of rank 0."""
    passed: list[str] = []

    async def once(body: dict[str, Any]) -> None:
        passed.append(str(body))
        if stuck == "request" and len(passed) == 3:  # of the held-out evaluation, or of the update
            await asyncio.sleep(10 * STUCK_SECONDS)

    slow, steady = (server_of(local_engine()) for _ in range(2))
    for server in (slow, steady):
        server.load = read_weights
    if stuck == "publication":
        load = slow.load

        def late(path: str) -> Any:
            if path.endswith("step-1"):
                time.sleep(STUCK_SECONDS)
            return load(path)

        slow.load = late
    with listening(slow.application()) as behind, listening(steady.application()) as other:
        proxy = Proxy(upstream=behind, before=once)
        with listening(proxy.application()) as url:
            code, printed = train_on_two_ranks(
                *overrides(url, other), "run_name=stuck", "trainer.max_steps=2", place=tmp_path
            )
    assert code == 0, printed
    rows = read_metrics(tmp_path / "outputs" / "stuck" / "metrics.csv")
    assert [row["rollouts/received"] for row in rows] == [8, 8]
    assert sum(row["rollouts/abandoned"] for row in rows) == 0
