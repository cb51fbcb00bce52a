"""Continuous generation against real servers: what is trained, what is waited for, cancelled, resumed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import BOUND_SECONDS
from engine_cases import MODEL_KEYS, StandIn, listening, local_engine, server_of
from engine_proxy import Proxy
from launched import train_on_two_ranks
from lightning.pytorch import Callback

from olmo_rl.cli import run as run_command
from olmo_rl.collections.group_queue import Group, Ticket
from olmo_rl.collections.group_requests import ages_of
from olmo_rl.collections.step_facts import Ledger, lag_facts
from olmo_rl.policy.engine import Generation
from olmo_rl.policy.weights import read_weights
from olmo_rl.run_directory import complete_checkpoints
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.tasks.kinds import AdditionTask
from olmo_rl.tasks.problems import Problem
from olmo_rl.tasks.rewards import Judged
from olmo_rl.types import Refusal, Sample

GROUPS, SIZE = 4, 2  # of a step, of a group
CONTINUOUS = ("rollouts.mode=continuous", "rollouts.max_lag=1")
SAMPLES: list[list[Sample]] = []  # of every step that this process trained


class Watch(Callback):
    """Keeps the samples of every step; `calls` run when a step with their number begins."""

    calls: dict[int, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        SAMPLES.append(list(batch.samples))
        call = self.calls.pop(batch_idx, None)
        if call is not None:
            call()


@pytest.fixture(autouse=True)
def nothing_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SAMPLES.clear()
    Watch.calls = {}


def overrides(url: str, *more: str) -> list[str]:
    return [
        "+experiment=packed_moe",
        *MODEL_KEYS,
        "warm_start.steps=0",
        "task.eval_problems=0",
        f"batch.samples_per_step={GROUPS * SIZE}",
        "rollouts=vllm",
        f"rollouts.urls=[{url}]",
        f"rollouts.group_size={SIZE}",
        "rollouts.max_new_tokens=8",
        "rollouts.on_gap=ignore",
        "callbacks=quiet",
        "run_name=here",
        *more,
    ]


def train(url: str, *more: str) -> int:
    watch = "callbacks.extra=[{_target_:test_continuous.Watch}]"
    return run_command(overrides(url, "strategy=single", "trainer=cpu", watch, *more))


@contextmanager
def proxy_of(before: Any = None) -> Iterator[tuple[Proxy, str]]:
    server = server_of(local_engine())
    server.load = read_weights
    with listening(server.application()) as behind:
        proxy = Proxy(upstream=behind, before=before)
        with listening(proxy.application()) as url:
            yield proxy, url


async def shuffled(body: dict[str, Any]) -> None:
    """A delay that follows from the request alone."""
    await asyncio.sleep(random.Random(body["seed"]).choice([0.0, 0.0, 0.2, 0.4]))


def rows() -> list[dict[str, float]]:
    return read_metrics(Path("outputs/here/metrics.csv"))


def total(name: str) -> float:
    return sum(row[f"rollouts/{name}"] for row in rows())


def lengths() -> Counter[int]:
    return Counter(int(sample.response_mask.sum()) for step in SAMPLES for sample in step)


def check_counts() -> None:
    under_way = rows()[-1]["rollouts/under_way"]
    assert total("asked") == total("received") + total("abandoned") + total("cancelled") + under_way
    trained = [sample.id for step in SAMPLES for sample in step]
    assert len(set(trained)) == len(trained)
    assert all(len({s.group for s in step}) == GROUPS for step in SAMPLES), "groups are trained whole"


def test_the_same_responses_are_trained_as_collection_by_collection_whatever_overtakes(
    tmp_path: Path,
) -> None:
    """Equal ids and seeds, and a learning rate that changes no weight: no length is preferred."""
    with proxy_of(shuffled) as (_, url):
        assert train(url, "optim.lr=1e-30", "trainer.max_steps=4") == 0
        whole, ids = lengths(), {s.id for step in SAMPLES for s in step}
        SAMPLES.clear()
        assert train(url, "optim.lr=1e-30", "trainer.max_steps=4", "overwrite=true", *CONTINUOUS) == 0
    assert lengths() == whole
    assert len(whole) > 2
    assert {s.id for step in SAMPLES for s in step} == ids
    assert max(row["rollouts/max_lag"] for row in rows()) == 1
    assert total("asked") == total("received") == 4 * GROUPS * SIZE
    assert rows()[-1]["rollouts/queued"] == 0
    check_counts()


def test_what_cannot_make_it_ends_in_its_engine_and_its_problem_is_asked_again(tmp_path: Path) -> None:
    """One request is never answered; its sibling was, and is wasted."""
    held: list[int] = []

    async def hold(body: dict[str, Any]) -> None:
        held.append(body["seed"])
        if len(held) == 1:
            await asyncio.sleep(BOUND_SECONDS)

    with proxy_of(hold) as (proxy, url):
        assert train(url, *CONTINUOUS, "rollouts.overdue=cancel", "trainer.max_steps=5") == 0
        assert proxy.left == 1, "the engine saw its client leave"
        assert proxy.under_way == 0
    assert (total("cancelled"), total("wasted"), total("groups_again")) == (1, 1, 1)
    assert total("wasted_tokens") >= 1
    attempts = {sample.group.split("-")[1] for step in SAMPLES for sample in step}
    assert attempts == {"a0", "a1"}
    assert len({s.group for step in SAMPLES for s in step}) == 5 * GROUPS
    check_counts()


def test_an_interrupted_run_trains_its_queue_in_the_recorded_order_and_nothing_twice(
    tmp_path: Path,
) -> None:
    def finish_and_end() -> None:
        time.sleep(1.5)  # the engine answers everything meanwhile
        os.kill(os.getpid(), signal.SIGTERM)

    with proxy_of() as (_, url):
        settings = ("rollouts.mode=continuous", "rollouts.max_lag=2", "trainer.max_steps=6")
        Watch.calls = {1: finish_and_end}
        assert train(url, *settings) == 75
        saved = torch.load(complete_checkpoints("outputs/here")[-1] / "meta.pt", weights_only=True)
        queue = saved["RolloutDataModule"]["queue"]["queue"]
        finished = [Group.of_state(group) for group in queue["finished"]]
        assert len(SAMPLES) == 2
        assert len(finished) >= GROUPS
        before = [sample.id for step in SAMPLES for sample in step]
        assert train(url, *settings, "ckpt_path=last") == 0
    assert len(SAMPLES) == 6
    expected = sorted(finished, key=lambda group: group.version)[:GROUPS]
    assert [s.id for s in SAMPLES[2]] == [s.id for g in expected for s in g.samples.values()]
    after = {sample.id for step in SAMPLES[2:] for sample in step}
    assert not after & set(before)
    assert {s.id for g in finished for s in g.samples.values()} <= after, "nothing finished is lost"
    assert after | set(before) == {
        f"c{index}-a0-p{place}-s{number}"
        for index in range(6)
        for place in range(GROUPS)
        for number in range(SIZE)
    }
    assert total("asked") == total("received") + total("cancelled")
    check_counts()


def test_a_queue_with_finished_groups_is_not_dropped_by_a_run_of_collections(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def finish_and_end() -> None:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    with proxy_of() as (_, url):
        Watch.calls = {0: finish_and_end}
        assert train(url, *CONTINUOUS, "trainer.max_steps=6") == 75
        assert train(url, "trainer.max_steps=6", "ckpt_path=last") == 2
    assert "finished groups, which this run would not train: set rollouts.mode=continuous" in (
        capsys.readouterr().err
    )


def test_all_engines_gone_and_back_costs_time_and_nothing_else(tmp_path: Path) -> None:
    with proxy_of(shuffled) as (proxy, url):
        behind = proxy.upstream

        def come_back(after: int) -> None:
            while proxy.calls.total() < after:
                time.sleep(0.1)
            proxy.upstream = behind

        def leave() -> None:
            proxy.upstream = "http://127.0.0.1:9"
            threading.Thread(target=come_back, args=[proxy.calls.total() + 4], daemon=True).start()

        Watch.calls = {1: leave}
        assert train(url, *CONTINUOUS, "trainer.max_steps=4", "rollouts.wait_seconds=60") == 0
        assert proxy.upstream == behind, "four calls failed meanwhile"
    assert total("abandoned") == total("cancelled") == 0
    check_counts()


def test_engines_that_stay_away_are_refused_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with proxy_of(shuffled) as (proxy, url):
        Watch.calls = {1: lambda: setattr(proxy, "upstream", "http://127.0.0.1:9")}
        assert train(url, *CONTINUOUS, "trainer.max_steps=9", "rollouts.wait_seconds=2") == 2
    assert f"{url}: " in capsys.readouterr().err


def test_an_engine_that_takes_requests_and_never_answers_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("olmo_rl.collections.continuous.patience_of", lambda rollouts: 1.5)

    async def never(body: dict[str, Any]) -> Any:
        await asyncio.sleep(BOUND_SECONDS)

    stand_in = StandIn(reply=never)
    with listening(stand_in.application()) as url:
        short = ("rollouts.wait_seconds=0.5", "rollouts.timeout_seconds=1", "rollouts.retries=9")
        assert train(url, *CONTINUOUS, *short, "trainer.max_steps=2", "rollouts.served_model=policy") == 2
    found = capsys.readouterr().err
    assert "no request was answered for" in found
    assert f"update 1 has 0 of {GROUPS} groups, {2 * GROUPS} are under way: look at the engines" in found


def test_a_broken_verifier_costs_no_answer_once_it_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = AdditionTask.judge

    def broken(self: AdditionTask, problem: Problem, responses: Sequence[str]) -> list[Judged]:
        raise Refusal("the verifier is broken")

    with proxy_of() as (proxy, url):
        Watch.calls = {0: lambda: monkeypatch.setattr(AdditionTask, "judge", broken)}
        assert train(url, *CONTINUOUS, "trainer.max_steps=3") == 2
        assert "the verifier is broken" in capsys.readouterr().err
        assert len(SAMPLES) < 3, "the last groups are asked for when step 1 is drawn"
        saved = torch.load(complete_checkpoints("outputs/here")[-1] / "meta.pt", weights_only=True)
        queue = saved["RolloutDataModule"]["queue"]["queue"]
        assert any(len(group["samples"]) == SIZE for group in queue["under_way"]), "whole, and not judged"
        kept = sum(len(group["samples"]) for group in [*queue["under_way"], *queue["finished"]])
        missing = (3 - len(SAMPLES)) * GROUPS * SIZE - kept
        monkeypatch.setattr(AdditionTask, "judge", judge)
        asked = proxy.calls["/v1/completions"]
        assert train(url, *CONTINUOUS, "trainer.max_steps=3", "ckpt_path=last") == 0
        assert proxy.calls["/v1/completions"] - asked == missing
    assert len(SAMPLES) == 3
    check_counts()


def test_a_step_that_no_answer_fills_ends_with_the_attempts_and_the_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that lives and answers no request."""

    def failing(body: dict[str, Any]) -> Any:
        return 500, {"error": "out of memory"}

    stand_in = StandIn(reply=failing)
    with listening(stand_in.application()) as url:
        few = ("rollouts.retries=0", "rollouts.max_attempts=2", "batch.max_skips=1")
        assert train(url, *CONTINUOUS, *few, "trainer.max_steps=9") == 2
    assert "batch.max_skips=1: 2 steps in a row had nothing to train on" in capsys.readouterr().err


def test_a_starving_run_says_so_once_with_numbers_and_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("olmo_rl.collections.continuous.STARVING_SECONDS", 0.5)

    async def slow(body: dict[str, Any]) -> None:
        await asyncio.sleep(2.0)

    with proxy_of(slow) as (_, url):
        assert train(url, *CONTINUOUS, "trainer.max_steps=3", "rollouts.concurrency=2") == 0
    found = [line for line in capsys.readouterr().out.splitlines() if "training has waited" in line]
    assert len(found) == 1
    assert "of 2 requests that rollouts.concurrency allows were under way: add engines" in found[0]
    assert rows()[0]["rollouts/trainer_idle_s"] > 6
    assert rows()[0]["rollouts/utilisation"] > 0.9
    assert rows()[0]["rollouts/engine_idle_s"] < 2


def test_two_ranks_share_the_groups_and_train_each_once(tmp_path: Path) -> None:
    with proxy_of(shuffled) as (_, url):
        code, printed = train_on_two_ranks(
            *overrides(url, *CONTINUOUS, "trainer.max_steps=3"), place=tmp_path
        )
    assert code == 0, printed
    ids = []
    for rank in (0, 1):
        for line in Path(f"outputs/here/training_contract_rank{rank}.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "packing":
                ids += [id for pack in event["sample_ids"] for id in pack]
    assert sorted(ids) == sorted(
        f"c{index}-a0-p{place}-s{number}"
        for index in range(3)
        for place in range(GROUPS)
        for number in range(SIZE)
    )
    assert total("asked") == total("received") == 3 * GROUPS * SIZE
    assert max(row["rollouts/max_lag"] for row in rows()) <= 1


def test_tokens_count_by_the_version_that_wrote_them() -> None:
    """Ten tokens: six of version 2, four of version 3, trained at 4; and five of a sample of version 4."""
    mixed = Generation(
        id="a",
        tokens=torch.arange(12).int().numpy(),
        logprobs=torch.zeros(10).numpy(),
        routes=None,
        finish_reason="stop",
        policy_version=2,
        token_versions=torch.tensor([2] * 6 + [3] * 4).int().numpy(),
    )
    assert ages_of(mixed) == {2: 6, 3: 4}
    group = Group(ticket=Ticket(index=0, position=0), version=2)
    for number, (version, ages) in enumerate([(2, ages_of(mixed)), (4, {4: 5})]):
        group.add(number, sample_of_version(version), ages=ages)
    facts = lag_facts([group], step=4)
    assert [facts[f"rollouts/lag_{age}"] for age in range(3)] == [5 / 15, 4 / 15, 6 / 15]
    old = lag_facts([group], step=40)
    assert old["rollouts/lag_7"] == 1.0


def sample_of_version(version: int) -> Sample:
    zeros = torch.zeros(3)
    return Sample(
        id=str(version),
        group="g",
        tokens=zeros.int().numpy(),
        response_mask=zeros.bool().numpy(),
        behavior_logprobs=zeros.numpy(),
        reward=0.0,
        policy_version=version,
    )


def test_requests_that_ended_with_their_process_count_as_cancelled() -> None:
    ledger = Ledger()
    ledger.counts.update({"asked": 8, "received": 3})
    ledger.open = 5
    after = Ledger()
    after.load(ledger.state())
    facts = after.close_step(slots=1)
    assert (facts["rollouts/cancelled"], facts["rollouts/under_way"]) == (5.0, 0.0)
    assert facts["rollouts/asked"] == facts["rollouts/received"] + facts["rollouts/cancelled"]
