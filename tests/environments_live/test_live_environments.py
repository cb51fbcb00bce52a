"""Environments of the verifiers library against the real engine, gateway and process: `-m environments`."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bounds import BOUND_SECONDS
from engine_cases import AXIS, MODEL, StandIn, client_of, listening, local_engine, server_of, weights_of
from model_cases import context_of

from olmo_rl.config import RolloutsConfig
from olmo_rl.data.packs import RouteMode, RouteTrace
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.data.validation import check_sample
from olmo_rl.environments.environment import TRAINING, Start
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.environments import EnvironmentProcess, Ready, Record
from olmo_rl.rollouts.gateway import Gateway, Limits, Slot
from olmo_rl.rollouts.traces import Tally, samples_of
from olmo_rl.tasks.problems import is_held_out
from olmo_rl.types import Refusal, Sample

pytestmark = pytest.mark.environments
ROOT = Path(__file__).parents[2]
MODULES = (
    Path(__file__).parent / "modules",
    ROOT / "examples/environments/calculator_tool",
    ROOT / "examples/environments/higher_lower",
)
LIMITS = Limits(vocab_size=259, context=32, max_new_tokens=6, calls=4, num_experts=4)
LAYOUT = AXIS.layout


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, MODULES)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def start_of(taskset: str, directory: Path, **changes: Any) -> Start:
    settings: dict[str, Any] = {
        "env": "",
        "harness": None,
        "renderer": {},
        "settings": {},
        "tasks": None,
        "max_turns": 4,
        "timeout_seconds": 60.0,
        "concurrency": 16,
        "tokenizer": "bytes",
        "directory": str(directory),
    }
    return Start(taskset=taskset, **settings | changes)


@contextmanager
def process_of(start: Start, *, token: str, stall_seconds: float = 120.0) -> Iterator[EnvironmentProcess]:
    process = EnvironmentProcess(start, token=token, start_seconds=BOUND_SECONDS, stall_seconds=stall_seconds)
    try:
        yield process
    finally:
        process.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """An environment that serves, and the gateway in front of an engine."""

    process: EnvironmentProcess
    gateway: Gateway
    ready: Ready

    def play(self, tasks: Sequence[int], *, prefix: str = "c0") -> tuple[list[Record], list[Slot]]:
        slots = self.gateway.open_slots(
            [f"{prefix}-p{place}-s0" for place in range(len(tasks))], temperature=1.0, top_p=1.0
        )
        future = self.process.run([(slot, TRAINING, task) for slot, task in zip(slots, tasks, strict=True)])
        records = future.result(BOUND_SECONDS)
        return records, list(self.gateway.close_slots(slots).values())

    def samples(self, tasks: Sequence[int], *, prefix: str = "c0") -> tuple[list[Sample], Tally]:
        tally = Tally()
        found: list[Sample] = []
        for record, slot in zip(*self.play(tasks, prefix=prefix), strict=True):
            found += samples_of(
                record, slot=slot, group=slot.name, agents=self.ready.agents, layout=LAYOUT, tally=tally
            )
        for sample in found:
            check_sample(sample, vocab_size=259)
        return found, tally


@contextmanager
def world_of(remote: RemoteEngine, start: Start, **options: Any) -> Iterator[World]:
    gateway = Gateway(remote, limits=LIMITS, token="of this test", seed=0)
    try:
        with process_of(start, token=gateway.token, **options) as process:
            ready = process.serve(gateway.url).result(BOUND_SECONDS)
            yield World(process=process, gateway=gateway, ready=ready)
    finally:
        gateway.close()


@contextmanager
def played(start: Start, *, seed: int = 2, **options: Any) -> Iterator[World]:
    """A world around the real engine."""
    with (
        listening(server_of(local_engine(seed=seed, version=5)).application()) as url,
        client_of(url) as remote,
    ):
        remote.adopt(None, 5, versions={url: 5})
        with world_of(remote, start, **options) as world:
            yield world


def fresh_routes(tokens: np.ndarray[Any, Any], *, seed: int) -> np.ndarray[Any, Any]:
    """[T-1, L, K]: the experts that one forward pass over the whole document chooses."""
    decoder = HybridDecoder(MODEL, attention="torch")
    for name, parameter in decoder.named_parameters():
        parameter.data.copy_(weights_of(seed)[name])
    trace = RouteTrace()
    context = context_of([len(tokens)], mode=RouteMode.record, trace=trace)
    with torch.no_grad():
        decoder(torch.from_numpy(tokens).long(), context)
    return np.stack([trace.ids[layer].numpy() for layer in MODEL.routed_layers], axis=1)[:-1]


def test_samples_of_a_game_are_its_conversations_with_the_routes_of_one_fresh_read(tmp_path: Path) -> None:
    start = start_of("higher_lower", tmp_path, max_turns=2)
    with played(start) as world:
        assert (world.ready.training + world.ready.held_out, world.ready.agents) == (1000, ("player",))
        samples, tally = world.samples(range(12))
        again, _ = world.samples(range(12))
        other, _ = world.samples(range(12), prefix="c1")
    assert len(samples) == 12
    assert tally.counts["turns"] == 24
    assert tally.counts["branches"] == 12, "our renderer never forks a conversation"
    rows = 0
    for sample in samples:
        spans = np.flatnonzero(np.diff(np.r_[False, sample.response_mask, False].astype(int)) == 1)
        assert len(spans) == 2, "two turns"
        said = ByteTokenizer().decode(sample.tokens[: spans[0]].tolist())
        assert said == "0-9?\n"
        between = sample.tokens[spans[0] : spans[1]][~sample.response_mask[spans[0] : spans[1]]]
        assert ByteTokenizer().decode(between.tolist()) in ("?\n", "right\n", "higher\n", "lower\n")
        assert sample.policy_version == 5
        assert sample.routes is not None
        fresh = fresh_routes(sample.tokens, seed=2)
        np.testing.assert_array_equal(np.sort(sample.routes, axis=-1), np.sort(fresh, axis=-1))
        rows += len(fresh)
    assert rows > 200
    assert [s.tokens.tolist() for s in samples] == [s.tokens.tolist() for s in again], "equal seeds"
    assert [s.tokens.tolist() for s in samples] != [s.tokens.tolist() for s in other]
    assert len({tuple(sample.tokens.tolist()) for sample in samples}) == 12


def test_a_tool_over_mcp_is_called_and_its_faults_are_told_to_the_model(tmp_path: Path) -> None:
    """The model is scripted: what it says depends on the task alone."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        text = bytes(token for token in body["prompt"] if token < 256).decode()
        asked, rest = text.split("=\n", 1)
        script = {"0": f"calculator({asked})", "1": "calculator(1+)", "2": 'calculator({"sum": )'}
        said = script.get(asked[-1], f"calculator({asked})")
        if rest:
            result = rest.removesuffix("\n").split(")", 1)[1]
            said = result if result.isdecimal() else "no"
        ids = [*said.encode(), 258]
        rows = len(body["prompt"]) + len(ids) - 1
        return {
            "choices": [
                {
                    "index": 0,
                    "token_ids": ids,
                    "finish_reason": "stop",
                    "logprobs": {"token_logprobs": [-0.25] * len(ids)},
                    "routed_experts": [[[0, 1], [2, 3]]] * rows,
                }
            ]
        }

    start = start_of("calculator_tool", tmp_path, max_turns=2)
    limits = Limits(vocab_size=259, context=400, max_new_tokens=200, calls=2, num_experts=4)
    with listening(StandIn(reply=reply).application()) as url, client_of(url) as remote:
        remote.publish("step-1", 1)
        gateway = Gateway(remote, limits=limits, token="of this test", seed=0)
        with process_of(start, token=gateway.token) as process:
            ready = process.serve(gateway.url).result(BOUND_SECONDS)
            world = World(process=process, gateway=gateway, ready=ready)
            samples, tally = world.samples(range(40))
        gateway.close()
    assert len(samples) == 40
    rewards: dict[str, set[float]] = {}
    for sample in samples:
        assert sample.prompt is not None
        digit = sample.prompt[-2]
        rewards.setdefault(digit if digit in "12" else "other", set()).add(sample.reward)
        turns = np.diff(np.r_[False, sample.response_mask, False].astype(int)) == 1
        assert turns.sum() == 2
        if digit not in "12":
            a, b = map(int, sample.prompt.removesuffix("=").split("+"))
            text = f"{sample.prompt}\ncalculator({a}+{b}){a + b}\n{a + b}"
            assert ByteTokenizer().decode(sample.tokens.tolist()) == text
    assert rewards == {"1": {0.0}, "2": {0.0}, "other": {1.0}}
    bad = sum(s.prompt is not None and s.prompt[-2] in "12" for s in samples)
    assert (tally.counts["tool_calls"], tally.counts["tool_errors"]) == (40, bad)
    assert tally.means()["environment/metric/success"] == pytest.approx((40 - bad) / 40)


def test_a_forking_harness_trains_each_token_once_and_tasks_without_end_are_read_as_far_as_asked(
    tmp_path: Path,
) -> None:
    with process_of(start_of("forking", tmp_path), token="t") as process, pytest.raises(Refusal) as endless:
        process.loaded.result(BOUND_SECONDS)
    assert "has tasks without end: set environment.tasks" in str(endless.value)
    with played(start_of("forking", tmp_path, tasks=40)) as world:
        assert world.ready.training + world.ready.held_out == 40
        records, slots = world.play(range(6))
        for record, slot in zip(records, slots, strict=True):
            samples = samples_of(
                record, slot=slot, group="g", agents=world.ready.agents, layout=LAYOUT, tally=Tally()
            )
            assert len(samples) == 2
            written = sum(
                np.frombuffer(node["mask"], dtype=np.bool_).sum() for node in record["traces"][0]["nodes"]
            )
            assert sum(sample.scored.sum() for sample in samples) == written
            assert samples[0].episode == samples[1].episode
            assert samples[1].response_mask.sum() > samples[1].scored.sum()


def test_episodes_that_go_wrong_are_counted_and_the_others_go_on(tmp_path: Path) -> None:
    start = start_of("odd_games", tmp_path, max_turns=3, timeout_seconds=8.0, concurrency=32)
    with played(start) as world:
        names = odd_tasks()
        wanted = ("good", "run raises", "run hangs", "nobody plays", "reward raises", "reward is nan")
        wanted += ("no reward", "ten thousand turns", "beyond the context", "run swallows its end")
        records, slots = world.play([names[name] for name in wanted])
        tallies = {}
        for name, record, slot in zip(wanted, records, slots, strict=True):
            tally = Tally()
            samples = samples_of(
                record, slot=slot, group="g", agents=world.ready.agents, layout=LAYOUT, tally=tally
            )
            outcome = {key for key in ("ok", "failed", "timeouts", "empty") if tally.counts[key]}
            tallies[name] = (outcome, [sample.reward for sample in samples], tally)
    assert tallies["good"][0] == {"ok"}
    for name in ("run raises", "nobody plays", "reward raises", "beyond the context"):
        assert tallies[name][:2] == ({"failed"}, []), name
    for name in ("run hangs", "run swallows its end"):
        assert tallies[name][:2] == ({"timeouts"}, []), name
    for name in ("reward is nan", "no reward"):
        assert tallies[name][0] == {"ok"}
        assert np.isnan(tallies[name][1]).all(), "unknown, which is no zero"
    assert tallies["ten thousand turns"][0] == {"ok"}
    assert tallies["ten thousand turns"][2].counts["turns"] == 3
    assert tallies["ten thousand turns"][2].counts["truncated"] == 1
    faults = " ".join(" ".join(tally.faults) for _, _, tally in tallies.values())
    for words in ("of an environment", "of a reward", "exceeds maximum context length (32)", "ran no agent"):
        assert words in faults


def odd_tasks() -> dict[str, int]:
    """The number of a training task of every name of `odd_games`."""
    names = runpy.run_path(str(MODULES[0] / "odd_names.py"))["keys"]()
    training = [name for name, key in names if not is_held_out(key)]
    return {name: training.index(name) for name in training}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "the loop blocks",
            "environment.stall_seconds=5: the loop of environment.taskset=odd_games stood still",
        ),
        ("the process exits", "ended with exit code 3"),
        ("killed", "ended by SIGKILL"),
    ],
)
def test_the_end_of_the_process_is_named_in_every_wait(tmp_path: Path, name: str, reason: str) -> None:
    start = start_of("odd_games", tmp_path)
    with played(start, stall_seconds=5.0) as world:
        names = odd_tasks()
        task = names["run hangs" if name == "killed" else name]
        slots = world.gateway.open_slots(["a"], temperature=1.0, top_p=1.0)
        future = world.process.run([(slots[0], TRAINING, task)])
        if name == "killed":
            threading.Timer(1.0, os.kill, (world.process.pid, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(Refusal) as refused:
            future.result(BOUND_SECONDS)
        assert reason in str(refused.value)
        assert time.monotonic() - began < 30 + 5
        with pytest.raises(Refusal, match="odd_games"):
            world.process.run([(slots[0], TRAINING, task)]).result(BOUND_SECONDS)


def descendants(pid: int) -> list[int]:
    """Every process below this one, children first."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def test_tool_servers_end_with_an_environment_process_that_is_killed(tmp_path: Path) -> None:
    with played(start_of("calculator_tool", tmp_path, max_turns=2)) as world:
        world.play(range(2))
        worker, *tools = descendants(world.process.pid)
        assert any(os.getsid(tool) != world.process.pid for tool in tools), "in sessions of their own"
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(Refusal, match="ended by SIGKILL"):
            world.process.run([(0, TRAINING, 0)]).result(BOUND_SECONDS)
        assert not [tool for tool in tools if Path(f"/proc/{tool}").exists()]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"taskset": "no_such_environment"}, "no_such_environment"),
        (
            {"settings": {"agent": {"runtime": {"type": "docker"}}}},
            "environment.settings.agent.runtime.type=docker",
        ),
        ({"settings": {"no_such_key": 1}}, "no_such_key"),
        ({"taskset": "textarena"}, "textarena"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    start = start_of(changes.pop("taskset", "odd_games"), tmp_path, **changes)
    with process_of(start, token="t") as process, pytest.raises(Refusal) as refused:
        process.loaded.result(BOUND_SECONDS)
    assert reason in str(refused.value)


def test_an_engine_that_is_gone_fails_episodes_and_no_run_hangs(tmp_path: Path) -> None:
    start = start_of("higher_lower", tmp_path, max_turns=2)
    with listening(server_of(local_engine(seed=2, version=5)).application()) as url:
        config = RolloutsConfig(
            urls=[url], served_model="policy", retries=0, wait_seconds=2.0, timeout_seconds=5.0
        )
        remote = RemoteEngine(config, axis=AXIS, vocab_size=MODEL.vocab_size)
        remote.adopt(None, 5, versions={url: 5})
    with world_of(remote, start) as world:
        records, _ = world.play(range(4))
        assert not any(record["ok"] for record in records)
        assert world.gateway.failure is not None
        assert "no engine answered for 2 seconds" in str(world.gateway.failure)
    remote.close()


def test_a_departed_environment_leaves_no_request_in_the_engine(tmp_path: Path) -> None:
    waiting: Future[None] = Future()

    async def never(body: dict[str, Any]) -> Any:
        del body
        if not waiting.done():
            waiting.set_result(None)
        await asyncio.sleep(BOUND_SECONDS)

    with listening(StandIn(reply=never).application()) as url, client_of(url) as remote:
        remote.publish("step-1", 1)
        gateway = Gateway(remote, limits=LIMITS, token="of this test", seed=0)
        with process_of(start_of("higher_lower", tmp_path), token=gateway.token) as process:
            process.serve(gateway.url).result(BOUND_SECONDS)
            (slot,) = gateway.open_slots(["a"], temperature=1.0, top_p=1.0)
            process.run([(slot, TRAINING, 0)])
            waiting.result(BOUND_SECONDS)
            assert remote.engines[0].under_way == 1
        until = time.monotonic() + 30
        while remote.engines[0].under_way and time.monotonic() < until:
            time.sleep(0.05)
        assert remote.engines[0].under_way == 0
        gateway.close()
