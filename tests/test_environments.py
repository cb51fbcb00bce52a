"""The trainer's side of environments, without the library: `environments_live/` has tests with it."""

from __future__ import annotations

import asyncio
import heapq
import importlib.util
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from bounds import BOUND_SECONDS
from composing import compose
from engine_cases import AXIS, MODEL, local_engine, weights_of
from tokenizers import Tokenizer

from olmo_rl.collections.environment_parts import EnvironmentParts, open_environment
from olmo_rl.collections.environment_source import (
    EnvironmentSource,
    HeldOutEpisodes,
    Played,
    _Ahead,
    notes_of,
    task_at,
)
from olmo_rl.config import (
    Config,
    EnvironmentConfig,
    OnVerifierFailure,
    OverlongPrompt,
    Recipe,
    RolloutsConfig,
)
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.environments.byte_tokenizer import write_byte_tokenizer
from olmo_rl.environments.environment import GRACE_SECONDS, Environment, Start
from olmo_rl.environments.process import Events, _run
from olmo_rl.environments.records import episode_record
from olmo_rl.policy.engine import LocalEngine, Request
from olmo_rl.refusals import refusals
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.environments import EnvironmentProcess, Ready
from olmo_rl.rollouts.serving.hosted import HostedEngine
from olmo_rl.rollouts.traces import Tally
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample


@contextmanager
def process_at(directory: Path) -> Iterator[EnvironmentProcess]:
    """The process of an environment that nobody installed."""
    start = Start(
        taskset="games",
        env="",
        harness=None,
        renderer={},
        settings={},
        tasks=None,
        max_turns=2,
        timeout_seconds=5.0,
        concurrency=2,
        tokenizer="bytes",
        directory=str(directory),
    )
    process = EnvironmentProcess(start, token="t", start_seconds=BOUND_SECONDS, stall_seconds=BOUND_SECONDS)
    try:
        yield process
    finally:
        process.close()


def test_a_process_that_is_killed_is_named_in_every_wait(tmp_path: Path) -> None:
    with process_at(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        waits = [process.loaded, process.serve("http://127.0.0.1:9/v1"), process.run([(0, "training", 0)])]
        for wait in waits:
            with pytest.raises(Refusal) as refused:
                wait.result(BOUND_SECONDS)
            assert str(refused.value) == (
                f"environment.taskset=games: the environment process (pid {process.pid}) ended by SIGKILL"
            )


def test_episodes_behind_those_of_earlier_batches_have_the_time_that_these_may_take(tmp_path: Path) -> None:
    sizes = (9, 1, 4, 0)
    with process_at(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)  # before it can say that there is no such environment
        began, first = time.monotonic(), 0
        for size in sizes:
            process.run([(slot, "training", 0) for slot in range(first, first + size)])
            first += size
        ends = [batch.ends - began for batch in process._batches]
        os.kill(process.pid, signal.SIGKILL)
    free, last = [0.0, 0.0], []  # two at once, first come first served, each as long as it may take
    for size in sizes[:3]:
        for _ in range(size):
            over = heapq.heappop(free) + 2 * 5.0 + GRACE_SECONDS
            heapq.heappush(free, over)
        last.append(over)
    assert last == [200.0, 200.0, 280.0]
    assert len(ends) == 3, "nothing is awaited for no episode"
    for end, least in zip(ends, last, strict=True):
        assert least < end < least + 2 * 60.0, "a bound, and no tighter than the episodes"


def test_events_that_cannot_be_read_end_every_wait(tmp_path: Path) -> None:
    with process_at(tmp_path) as process:
        process._take = lambda event: [][1]  # type: ignore[method-assign,assignment]
        for wait in (process.loaded, process.run([(0, "training", 0)])):
            with pytest.raises(Refusal, match="games: its events cannot be read: IndexError"):
                wait.result(BOUND_SECONDS)


def odd_episode(**changes: Any) -> Any:
    """An episode of one trace as the library has it, with attributes of `changes`."""
    trace = SimpleNamespace(
        id="t",
        agent=SimpleNamespace(name="agent", trainable=True),
        ok=True,
        is_timeout=False,
        is_truncated=False,
        errors=[],
        rewards={},
        metrics={},
        num_turns=1,
        info={},
        task=SimpleNamespace(data=SimpleNamespace(prompt_text="?")),
        last_reply="!",
        nodes=[],
        branches=[],
    )
    vars(trace).update(changes)
    return SimpleNamespace(ok=True, is_timeout=False, errors=[], traces=[trace])


def test_an_episode_without_a_record_is_one_that_failed_and_says_why() -> None:
    episodes = [
        odd_episode(metrics={"m": "many"}),
        odd_episode(num_turns=2**70),
        odd_episode(last_reply="half \ud83d", errors=[SimpleNamespace(type="E", message="\udc00")]),
    ]

    class Played(Environment):
        def __init__(self) -> None: ...

        async def record(self, slot: int, side: str, number: int) -> dict[str, Any]:
            return episode_record(episodes[number], slot=slot)

    async def play(events: Events) -> None:
        for slot in range(len(episodes)):
            await _run(Played(), events, slot, "training", slot)

    read, write = os.pipe()
    asyncio.run(play(Events(write)))
    os.close(write)
    with os.fdopen(read, "rb") as file:
        number, huge, text = [event["record"] for event in msgpack.Unpacker(file)]
    assert (number["slot"], number["ok"], number["traces"]) == (0, False, [])
    assert number["faults"] == ["no record of it: ValueError: could not convert string to float: 'many'"]
    assert (huge["slot"], huge["ok"]) == (1, False)
    assert "OverflowError" in huge["faults"][0]
    assert text["ok"]
    assert (text["traces"][0]["reply"], text["traces"][0]["faults"]) == ("half ?", ["E: ?"])


SUPERVISOR = [sys.executable, "-m", "olmo_rl.environments.supervisor"]
PROGRAM = """
import os, subprocess, sys, time
subprocess.Popen(["sh", "-c", "sleep 300 & wait"], close_fds=False, start_new_session=True)
os.write(int(sys.argv[1]), b"u")
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""
OWNER = """
import os, subprocess, sys, time
written, fork, command = int(sys.argv[1]), sys.argv[2] == "fork", sys.argv[3:]
life, held = os.pipe()
command[3] = str(life)
subprocess.Popen(command, pass_fds=(life, written), start_new_session=True)
os.close(written)
if fork and os.fork() == 0:
    os.close(life)
time.sleep(300)
"""


@pytest.mark.parametrize("how", ["ends", "life", "owner", "fork"])
def test_programs_in_sessions_of_their_own_end_with_what_started_them(how: str) -> None:
    """All of them inherit one end of a pipe, which tells when the last is gone. `how`: the program ends, its
    owner asks for the end, or is killed, or is killed while a fork of it holds its end of `life`.
    """
    read, written = os.pipe()
    life, held = os.pipe()
    program = [sys.executable, "-c", PROGRAM, str(written), "0" if how == "ends" else "300"]
    command = [*SUPERVISOR, str(life), "", *program]
    if how in ("owner", "fork"):
        command = [sys.executable, "-c", OWNER, str(written), how, *command]
    process = subprocess.Popen(command, pass_fds=(written, life), start_new_session=True)
    os.close(written)
    os.close(life)
    try:
        assert os.read(read, 1) == b"u"
        if how == "life":
            os.close(held)
        elif how != "ends":
            process.kill()
        assert select.select([read], [], [], BOUND_SECONDS)[0]
        assert os.read(read, 1) == b"", "every program is gone"
        assert process.wait(BOUND_SECONDS) == (7 if how == "ends" else -signal.SIGKILL)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os.close(read)
        if how != "life":
            os.close(held)


def test_a_run_without_the_library_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_environment(Config()) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match=r"pip install -c constraints.txt -e '.\[environments\]'"):
        open_environment(Config(environment=EnvironmentConfig(taskset="games")))


def test_every_key_that_no_environment_reads_is_refused_by_name() -> None:
    config = Config(environment=EnvironmentConfig(taskset="games"))
    config.task.eval_problems, config.task.eval_interval = 7, 3
    assert not [line for line in refusals(config) if "no effect with environment.taskset" in line]
    task, asked = config.task, config.evaluation
    task.path, task.name, task.verifier_seconds, task.set_aside = "p", "n", 2.0, 2
    task.parameters = task.verifier = task.verifiers = task.rewards = {"a": 1}
    task.overlong, task.on_verifier_failure = OverlongPrompt.leave_out, OnVerifierFailure.leave_out
    asked.sets, asked.samples, config.rollouts.length_penalty = {"more": 1}, 2, 1.0
    (line,) = [line for line in refusals(config) if "no effect with environment.taskset" in line]
    for name in ("path", "name", "verifier_seconds", "set_aside", "parameters", "verifier", "verifiers"):
        assert f"task.{name}=" in line
    for name in ("task.rewards", "task.overlong", "task.on_verifier_failure", "evaluation.sets"):
        assert f"{name}=" in line
    assert "evaluation.samples=2 rollouts.length_penalty=1.0: no effect" in line
    config.recipe = Recipe.evaluate
    assert any("recipe=evaluate: only train and rollout play episodes" in line for line in refusals(config))


def test_every_task_comes_once_a_pass_in_an_order_of_its_own() -> None:
    passes = [[task_at(place, tasks=50, seeds=(3, 0)) for place in range(i, i + 50)] for i in (0, 50)]
    assert [sorted(one) for one in passes] == [list(range(50))] * 2
    assert passes[0] != passes[1]
    assert passes[0] != [task_at(place, tasks=50, seeds=(4, 0)) for place in range(50)]


def test_tasks_asked_for_ahead_are_given_again_after_a_resume() -> None:
    config = Config(environment=EnvironmentConfig(taskset="games"))
    parts = EnvironmentParts(
        ready=Ready(training=9, held_out=1, agents=("agent",)),
        host=None,
        remote=None,
        publish=lambda *_: {},
        close=lambda: None,
    )

    def source() -> EnvironmentSource:
        return EnvironmentSource(config, parts=parts, strategy=ExpertParallelStrategy(config))

    first = source()
    assert first._take(3) == [0, 1, 2]
    ahead = first._take(2)
    first._ahead = _Ahead(key=(1, 0, 2), places=ahead, asked=None)
    assert first._take(1) == [5], "another round of the first collection"
    resumed = source()
    resumed.load_state_dict(first.state_dict())
    assert resumed._take(4) == [3, 4, 6, 7]
    with pytest.raises(Refusal, match="9 training tasks, there were 8"):
        resumed.load_state_dict({"place": 0, "returned": [], "tasks": 8})


def test_the_engine_of_this_process_answers_over_http_as_it_does_here() -> None:
    engine = LocalEngine(MODEL, device=local_engine()._device)
    hosted = HostedEngine(engine, model=MODEL, tokenizer=ByteTokenizer(), token="secret")
    remotes = []
    try:
        for token in ("secret", "guessed"):
            config = RolloutsConfig(urls=[hosted.url], token=token, retries=0, wait_seconds=1.0)
            remotes.append(RemoteEngine(config, axis=AXIS, vocab_size=MODEL.vocab_size))
        known, stranger = remotes
        for version in (3, 4):
            hosted.publish(weights_of(version), version)
            known.adopt(None, version, versions={hosted.url: version})
            requests = [Request(id=f"r{i}", tokens=[65 + i]) for i in range(4)]
            (first, *_) = found = known.generate(requests, max_new_tokens=4, greedy=True, seed=0)
            direct = local_engine(seed=version).generate(requests, max_new_tokens=4, greedy=True, seed=0)
            assert first is not None
            assert first.policy_version == version
            for theirs, ours in zip(found, direct, strict=True):
                assert theirs is not None
                assert theirs.tokens.tolist() == ours.tokens.tolist()
        assert known.counts.received == 8
        stranger.adopt(None, 4, versions={hosted.url: 4})
        with pytest.raises(Refusal):
            stranger.generate(requests, max_new_tokens=4, greedy=True, seed=0)
    finally:
        for remote in remotes:
            remote.close()
        hosted.close()


def test_bytes_are_the_same_ids_in_the_directory_that_the_library_reads(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "37+58=\n  ä€ \t\x00 a"
    assert tokenizer.encode(text, add_special_tokens=False).ids == ByteTokenizer().encode(text)
    every = [*range(256), 258, 257, 256]
    assert [tokenizer.token_to_id(tokenizer.id_to_token(token)) for token in every] == every
    assert tokenizer.decode(ByteTokenizer().encode(text)) == text


def held_out(**settings: Any) -> HeldOutEpisodes:
    config = Config(environment=EnvironmentConfig(taskset="games", **settings))
    parts = EnvironmentParts(
        ready=Ready(training=9, held_out=1, agents=("agent",)),
        host=None,
        remote=None,
        publish=lambda *_: {},
        close=lambda: None,
    )
    return HeldOutEpisodes(config, parts=parts, strategy=ExpertParallelStrategy(config))


def test_a_held_out_score_is_a_metric_or_the_reward_of_what_was_judged() -> None:
    def sample(reward: float, episode: str) -> Sample:
        return Sample(
            id=episode,
            group="g",
            tokens=np.arange(2, dtype=np.int32),
            response_mask=np.array([False, True]),
            behavior_logprobs=np.zeros(2, dtype=np.float32),
            reward=reward,
            episode=episode,
        )

    tally = Tally(values={"metric/success": [1.0, 0.0, 0.0, 1.0]})
    tally.counts["rollouts"] = 4
    samples = [sample(1.0, "a"), sample(1.0, "a"), sample(0.2, "b"), sample(float("nan"), "c")]
    played = Played(samples=samples, tally=tally)
    assert held_out(success="success")._mean(played) == 0.5
    assert held_out()._mean(played) == pytest.approx(0.6), "branches of a once, c unknown"
    assert held_out()._mean(Played(samples=[], tally=Tally())) is None
    assert held_out(success="success")._mean(Played(samples=[], tally=Tally())) is None
    with pytest.raises(
        Refusal, match="environment.success=typo: no rollout has this metric: there are success"
    ):
        held_out(success="typo")._mean(played)


def test_what_was_lost_is_reported_with_its_reasons() -> None:
    tally = Tally()
    tally.counts["episodes"] = 8
    assert notes_of(tally, where="collection 3") == ()
    tally.counts["failed"], tally.counts["timeouts"] = 2, 1
    tally.faults["ProviderError: gone"] = 2
    assert notes_of(tally, where="collection 3") == (
        "collection 3: 3 of 8 episodes are not trained: 2 x ProviderError: gone",
    )


def test_the_experiment_that_learns_to_call_a_tool_is_valid() -> None:
    config = compose("+experiment=tool_use")
    assert (config.environment.taskset, config.rollouts.source.value) == ("calculator_tool", "local")
    assert config.batch.samples_per_step is not None
    assert config.environment.concurrency == config.batch.samples_per_step
