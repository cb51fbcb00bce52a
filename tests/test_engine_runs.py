"""Runs against engines that are slow, compute with other weights, or sample from less than they report."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from engine_cases import MODEL_KEYS, listening, local_engine, server_of
from engine_proxy import Proxy
from launched import train_on_two_ranks
from torch import Tensor

from olmo_rl.cli import run as run_command
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


def run_alone(url: str, *more: str) -> int:
    """The exit code of one process, in the working directory."""
    return run_command(
        [*overrides(url), "run_name=alone", "strategy=single", "trainer=cpu", "trainer.max_steps=2", *more]
    )


def altered(path: str) -> dict[str, Tensor]:
    """Weights as they were published, but for the output layer of the second publication."""
    weights = read_weights(path)
    if path.endswith("step-1"):
        weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0)
    return weights


def test_an_engine_that_has_the_weights_agrees_after_every_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training that waits for it long is noted once, with the numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("olmo_rl.collections.sources.STARVING_SECONDS", 0.0)
    server = server_of(local_engine())
    server.load = read_weights
    with listening(server.application()) as url:
        assert run_alone(url) == 0
    rows = read_metrics(Path("outputs/alone/metrics.csv"))
    gaps = [row["mismatch/published"] for row in rows]
    print(f"mean differences after publication: {gaps}")
    assert max(gaps) < 1e-4
    noted = re.findall(r"training waited \d+ s for 8 answers of 1 engines", capsys.readouterr().out)
    assert len(noted) == 1
    assert all(row["rollouts/wait_s"] > 0 for row in rows)


def test_an_engine_with_other_weights_is_refused_before_they_are_trained_on_or_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run trained on with exit code 0 before."""
    monkeypatch.chdir(tmp_path)
    server = server_of(local_engine())
    server.load = altered
    with listening(server.application()) as url:
        assert run_alone(url) == 2
        words = f"{url}: log-probs of version 1 differ from the trainer's by "
        assert words in capsys.readouterr().err
        with pytest.warns(UserWarning, match=words):
            assert run_alone(url, "overwrite=true", "rollouts.on_gap=warn") == 0
        assert read_metrics(Path("outputs/alone/metrics.csv"))[0]["mismatch/published"] > 0.05
        assert run_alone(url, "overwrite=true", "rollouts.on_gap=ignore") == 0


def test_an_engine_that_answers_greedily_is_found_by_draws_of_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    server = server_of(local_engine())
    server.load = read_weights
    generate = server.engine.generate
    server.engine.generate = lambda *given, **settings: generate(*given, **settings | {"greedy": True})  # type: ignore[method-assign]
    with listening(server.application()) as url:
        assert run_alone(url) == 2
    assert f"{url}: 12 draws gave one token, of probability 0.0" in capsys.readouterr().err
