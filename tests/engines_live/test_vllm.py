"""The whole loop against a real vLLM 0.32.0 on a CPU: `make test-engines`.

One server, whose `generation_config.json` asks for top_k=1, which no request may follow. Each test prints its
figures. vLLM's own fault on a CPU: after `reload_weights` it answers with other log-probs than its weights
have, so log-probs are compared before the first reload, and the protocol after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounds import BOUND_SECONDS
from composing import ROOT, compose
from engine_cases import listening, score
from engine_proxy import Proxy
from test_engine_schemas import start_lines
from vllm_process import HOME, MODEL, Vllm, export

from olmo_rl.config import RolloutsConfig, Source
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import load_weights
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.wire import RouteAxis
from olmo_rl.running.metrics_csv import read_metrics

pytestmark = pytest.mark.engines
SAMPLES = 16
COUNTED = ("asked", "received", "retried", "abandoned")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    assert (HOME / ".complete").is_file(), f"no vLLM in {HOME}: make test-engines installs it"
    place = tmp_path_factory.mktemp("vllm")
    before = Path.cwd()
    os.chdir(place)
    server = Vllm(export(place, top_k=1), log=place / "vllm.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()
        os.chdir(before)


def client(url: str, **settings: Any) -> RemoteEngine:
    model = compose(*MODEL).model
    assert model.expert_layout is not None
    axis = RouteAxis(layout=model.expert_layout, num_layers=len(model.layer_types))
    config = RolloutsConfig(source=Source.vllm, urls=[url], **settings)
    return RemoteEngine(config, axis=axis, vocab_size=model.vocab_size)


def answered(remote: RemoteEngine, requests: list[Request], *, tokens: int) -> list[Generation]:
    """The answers of the engine with the weights that it has."""
    (url,) = remote.versions
    remote.adopt(None, 0, versions={url: 0})
    remote.engines[0].version = 0
    found = remote.start(
        requests, max_new_tokens=tokens, stop_token=None, temperature=1.0, top_p=1.0, seed=0
    ).result(BOUND_SECONDS)
    whole = [generation for generation in found if generation is not None]
    assert len(whole) == len(requests), remote.engines[0].faults
    return whole


def test_before_the_first_reload_log_probs_and_routes_are_ours_and_sampling_is_neutral(
    engine: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = client(engine.url)

    async def as_it_is(_: Any) -> None:
        """It was given no weights yet."""

    monkeypatch.setattr(remote._fleet, "compare_version", as_it_is)
    requests = [Request(id=f"r{n}", tokens=[40 + n // 8, 50, 60]) for n in range(16)]
    try:
        found = answered(remote, requests, tokens=10)
    finally:
        remote.close()
    decoder = HybridDecoder(compose(*MODEL).model, attention="reference")
    load_weights(decoder, "hf", key="init_from")
    logprobs, routers = score(decoder, found, replay=False)
    gaps = [
        np.abs(ours.numpy() - theirs.logprobs).max() for ours, theirs in zip(logprobs, found, strict=True)
    ]
    start, differing, rows = 0, 0, 0
    for generation in found:
        assert generation.routes is not None
        for position, layer in enumerate(sorted(routers)):
            ours = routers[layer][start : start + len(generation.tokens) - 1].sort(-1).values.numpy()
            theirs = np.sort(generation.routes[:, position], axis=-1)
            differing += int((ours != theirs).any(-1).sum())
            rows += len(ours)
        start += len(generation.tokens)
    distinct = len({tuple(generation.tokens.tolist()) for generation in found})
    print(f"log-probs of {len(found)} answers differ by at most {max(gaps):.2g} nats; ", end="")
    print(f"route rows: {rows}, unlike the router's own top-k: {differing}; ", end="")
    print(f"distinct answers under generation_config top_k=1: {distinct} of {len(found)}")
    assert max(gaps) < 1e-3
    assert differing == 0
    assert distinct == len(found)


def training(url: str, *, name: str, steps: int, **keys: Any) -> subprocess.Popen[bytes]:
    """`python train.py` of one process against the engine at `url`, one collection ahead."""
    given = {
        "run_name": name,
        "init_from": "hf",
        "warm_start.steps": 0,
        "trainer": "cpu",
        "strategy": "single",
        "task.eval_problems": 0,
        "batch.samples_per_step": SAMPLES,
        "rollouts": "vllm",
        "rollouts.urls": f"[{url}]",
        "rollouts.group_size": 4,
        "rollouts.max_new_tokens": 16,
        "rollouts.max_lag": 1,
        "rollouts.on_gap": "warn",
        "callbacks": "quiet",
        "trainer.max_steps": steps,
    } | {key.replace("__", "."): value for key, value in keys.items()}
    command = [sys.executable, str(ROOT / "train.py"), "+experiment=packed_moe", *MODEL]
    with Path(f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *(f"{key}={value}" for key, value in given.items())], stdout=log, stderr=log
        )


def counts_of(name: str) -> Counter[str]:
    rows = read_metrics(Path("outputs") / name / "metrics.csv")
    found: Counter[str] = Counter({"updates": len(rows)})
    for row in rows:
        found.update({count: int(row[f"rollouts/{count}"]) for count in COUNTED})
        found["over_age"] += int(row.get("batch/over_age", 0))
        assert row["replay/coverage"] == 1
    return found


def shown(counts: Counter[str], proxy: Proxy) -> str:
    calls = {path: count for path, count in sorted(proxy.calls.items()) if path != "/v1/completions"}
    return (
        f"{dict(counts)}; completions {dict(proxy.statuses)}, finish reasons {dict(proxy.reasons)}, "
        f"abandoned by the client {proxy.left}; calls {calls}"
    )


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_the_loop_loses_nothing_and_reloads_once_a_publication(engine: Vllm, pause: str) -> None:
    updates = 4
    proxy = Proxy(upstream=engine.url)
    with listening(proxy.application()) as url:
        run = training(url, name=pause, steps=updates, rollouts__pause=pause)
        assert run.wait(BOUND_SECONDS) == 0, Path(f"{pause}.log").read_text()[-3000:]
    counts = counts_of(pause)
    warned = re.findall(r"log-probs of version \d+ differ .* nats a token", Path(f"{pause}.log").read_text())
    print(f"pause={pause}: {shown(counts, proxy)}; warned of: {warned}")
    assert len(warned) == 1, "after a reload it computes with other weights"
    assert counts["asked"] == counts["received"] + counts["abandoned"] == updates * SAMPLES
    assert counts["abandoned"] == counts["over_age"] == 0
    assert proxy.calls["/collective_rpc"] == updates + 1, "reloads = publications"
    assert proxy.calls["/resume"] == proxy.calls[f"/pause?mode={pause}"] == updates + 1
    if pause != "abort":
        assert proxy.reasons["abort"] == proxy.left == counts["retried"] == 0
    else:
        # Each was asked again; those of the collection that was ahead at the end stand in no row.
        assert counts["retried"] <= proxy.reasons["abort"] <= counts["retried"] + SAMPLES


def test_slow_and_wrong_answers_cost_retries(engine: Vllm) -> None:
    """Every third answer takes up to a second longer, every fifth is damaged in one of three ways."""
    dice = random.Random(0)
    number = [0]

    async def slow(body: dict[str, Any]) -> None:
        if dice.random() < 1 / 3:
            await asyncio.sleep(dice.random())

    def damaged(body: bytes) -> bytes:
        number[0] += 1
        if number[0] % 5:
            return body
        answer = json.loads(body)
        (choice,) = answer["choices"]
        if number[0] % 3 == 0:
            return body[: len(body) // 2]
        if number[0] % 3 == 1:
            choice["logprobs"]["token_logprobs"][0] = 3.0
        else:
            choice["token_ids"][0] = 10**6
        return json.dumps(answer).encode()

    proxy = Proxy(upstream=engine.url, before=slow, change=damaged)
    with listening(proxy.application()) as url:
        run = training(url, name="wrong", steps=3)
        assert run.wait(BOUND_SECONDS) == 0, Path("wrong.log").read_text()[-3000:]
    counts = counts_of("wrong")
    print(f"slow and wrong: damaged {number[0] // 5}, {shown(counts, proxy)}")
    assert counts["asked"] == counts["received"] == 3 * SAMPLES
    assert counts["retried"] >= 1
    assert proxy.calls["/collective_rpc"] == 4, "an engine that has its weights is not repaired"


def test_the_start_lines_of_the_how_to_are_parsed_by_the_real_command_line() -> None:
    program = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for line in json.load(sys.stdin):
    found = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    print(found.model_tag, found.port, found.enable_return_routed_experts)
"""
    lines = [words[2:] for words in start_lines()["vllm"]]
    done = subprocess.run(
        [str(HOME / "bin" / "python"), "-c", program],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-len(lines) :] == ["Qwen3-30B-A3B 8000 True", "hf 8000 True"]


def wait_until(true: Callable[[], bool], *, run: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while not true():
        assert run.poll() is None, Path(log).read_text()[-3000:]
        assert time.monotonic() < deadline, Path(log).read_text()[-3000:]
        time.sleep(0.1)


def test_the_run_waits_for_an_engine_that_was_killed(engine: Vllm) -> None:
    proxy = Proxy(upstream=engine.url)
    rows = Path("outputs/killed/metrics.csv")

    def updates() -> int:
        return len(read_metrics(rows)) if rows.is_file() else 0

    with listening(proxy.application()) as url:
        run = training(url, name="killed", steps=1000)
        wait_until(lambda: updates() >= 2 and proxy.under_way > 0, run=run, log="killed.log")
        engine.kill()
        at_kill, began = updates(), time.monotonic()
        engine.start()
        away = time.monotonic() - began
        wait_until(lambda: updates() >= at_kill + 3, run=run, log="killed.log")
        run.send_signal(signal.SIGTERM)
        assert run.wait(BOUND_SECONDS) == 75, Path("killed.log").read_text()[-3000:]
    counts = counts_of("killed")
    print(f"killed for {away:.0f} s after {at_kill} updates: {shown(counts, proxy)}")
    assert counts["asked"] == counts["received"] == counts["updates"] * SAMPLES
    assert counts["retried"] >= 1


def test_an_engine_that_was_started_again_while_idle_gets_the_present_weights_first(engine: Vllm) -> None:
    proxy = Proxy(upstream=engine.url)
    requests = [Request(id="a", tokens=[40, 50])]
    with listening(proxy.application()) as url:
        remote = client(url)
        try:
            remote.publish(str(Path("hf").resolve()), 7)
            engine.kill()
            engine.start()
            (answer,) = remote.generate(requests, max_new_tokens=4, seed=0)
        finally:
            remote.close()
    assert answer is not None
    assert answer.policy_version == 7
    assert proxy.calls["/collective_rpc"] == 2
    print(f"started again while idle: calls {dict(proxy.calls)}")
