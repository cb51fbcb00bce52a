"""Serving engines over real sockets: the server against the local engine, the client against faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from bounds import BOUND_SECONDS
from composing import ROOT
from engine_cases import AXIS, MODEL, client_of, listening, local_engine, server_of, stand_in, weights_of
from engine_lies import LIES, answer_of
from torch import Tensor

from olmo_rl.config import PublicationKind, Source
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.hf.names import Piece
from olmo_rl.hf.writing import buckets
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts import control
from olmo_rl.rollouts.collective import Arrivals, address_for, join, own_store
from olmo_rl.rollouts.control import Engine
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.fleet import REST_SECONDS
from olmo_rl.rollouts.wire import completions_of
from olmo_rl.types import Refusal

EOS = ByteTokenizer().eos_id
REQUESTS = [Request(id=f"r{n}", tokens=[65 + n, 66 + n, 67][: 1 + n % 3]) for n in range(6)]


def complete(generations: list[Generation | None]) -> list[Generation]:
    found = [generation for generation in generations if generation is not None]
    assert len(found) == len(generations)
    return found


def test_greedy_answers_over_http_are_those_of_the_engine_itself() -> None:
    local = local_engine(seed=1)
    direct = local.generate(REQUESTS, max_new_tokens=5, stop_token=EOS, greedy=True, seed=0)
    shelf = {"step-7": weights_of(1)}
    for source in (Source.vllm, Source.sglang):
        served = local_engine()
        with (
            listening(server_of(served, shelf=shelf, api=source).application()) as url,
            client_of(url, source=source) as remote,
        ):
            remote.publish("step-7", 7)
            answers = complete(
                remote.generate(REQUESTS, max_new_tokens=5, stop_token=EOS, greedy=True, seed=0)
            )
        for mine, theirs in zip(direct, answers, strict=True):
            assert theirs.id == mine.id
            assert theirs.tokens.tolist() == mine.tokens.tolist()
            assert theirs.routes is not None
            assert mine.routes is not None
            np.testing.assert_array_equal(theirs.routes, mine.routes)
            np.testing.assert_allclose(theirs.logprobs, mine.logprobs, atol=1e-5)
            assert (theirs.finish_reason, theirs.policy_version) == (mine.finish_reason, 7)
        assert remote.counts.metrics() == {
            "rollouts/asked": 6,
            "rollouts/received": 6,
            "rollouts/retried": 0,
            "rollouts/abandoned": 0,
        }


def test_the_openai_client_drives_the_server() -> None:
    with listening(server_of(local_engine(seed=2, version=3)).application()) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["policy"]
        answer = client.completions.create(
            model="policy",
            prompt=[[65, 66], [67]],
            max_tokens=4,
            n=2,
            logprobs=1,
            temperature=1.0,
            seed=5,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)
        found = completions_of(answer.model_dump(), axis=AXIS)
        assert [completion.prompt.tolist() for completion in found] == [[65, 66], [65, 66], [67], [67]]
        assert all(completion.policy_version is None for completion in found), "as the real one"
        assert all(completion.routes is not None for completion in found)
        assert len({tuple(completion.tokens.tolist()) for completion in found}) == 4
        text = client.completions.create(model="policy", prompt="hello", max_tokens=2, temperature=0)
        assert text.choices[0].logprobs is None
        with pytest.raises(openai.BadRequestError, match="model.max_seq_len=32"):
            client.completions.create(model="policy", prompt=[1] * 30, max_tokens=4)
        with pytest.raises(openai.BadRequestError, match="stream: not supported"):
            client.completions.create(model="policy", prompt="a", stream=True)
    with listening(server_of(local_engine()).application()) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="no weights yet"):
            client.completions.create(model="policy", prompt="a")


def test_equal_seeds_give_equal_samples_and_share_no_batch() -> None:
    with listening(server_of(local_engine(seed=2)).application()) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

        def ask(seed: int) -> str:
            answer = client.completions.create(model="policy", prompt="ab", max_tokens=8, n=3, seed=seed)
            return json.dumps([choice.text for choice in answer.choices])

        assert ask(1) == ask(1) != ask(2)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "max_tokens": True},
        {"prompt": "a", "temperature": -1},
        {"prompt": "a", "top_p": 0},
        {"prompt": "a", "stop_token_ids": [1, "2"]},
        {"prompt": "a", "stop_token_ids": [1, 259]},
        {"prompt": "a", "stop_token_ids": list(range(257))},
        {"prompt": "a", "n": "two"},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [1, 259]},
        {"prompt": [[1], "text", 5]},
        {},
        [],
    ],
)
def test_a_request_that_makes_no_sense_is_answered_with_400_and_the_server_lives(body: Any) -> None:
    with listening(server_of(local_engine(seed=2)).application()) as url:

        def post(payload: bytes) -> int:
            request = urllib.request.Request(f"{url}/v1/completions", data=payload)
            try:
                return int(urllib.request.urlopen(request, timeout=BOUND_SECONDS).status)
            except urllib.error.HTTPError as error:
                return error.code if json.loads(error.read())["error"]["message"] else 0

        assert post(json.dumps(body).encode()) == 400
        assert post(b"\xff not json") == 400
        assert post(json.dumps({"prompt": "a", "max_tokens": 1}).encode()) == 200


def test_an_update_is_pause_update_version_resume_and_a_failed_one_changes_no_version() -> None:
    calls: list[tuple[str, Any]] = []
    with listening(stand_in(answer_of, calls=calls)) as url, client_of(url) as remote:
        remote.publish("step-4", 4)
    assert calls == [
        ("/pause?mode=keep", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "step-4"}}),
        ("/update_weight_version", {"new_version": "4"}),
        ("/resume", None),
    ]
    calls.clear()
    with (
        listening(stand_in(answer_of, calls=calls, api=Source.sglang)) as url,
        client_of(url, source=Source.sglang) as remote,
    ):
        remote.publish("step-4", 4)
    assert calls == [
        ("/pause_generation", {"mode": "in_place"}),
        (
            "/update_weights_from_disk",
            {"model_path": "step-4", "weight_version": "4", "flush_cache": False},
        ),
        ("/continue_generation", {}),
    ]
    engine = local_engine(seed=1, version=2)
    with listening(server_of(engine).application()) as url, client_of(url) as remote:
        with pytest.raises(Refusal, match="no engine could be updated") as refused:
            remote.publish("step-3", 3)
        assert "step-3: no such weights" in str(refused.value)
        assert engine.version == 2
        assert complete_text(url) == complete_text(url)  # it was resumed, and serves what it had


def complete_text(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    return client.completions.create(model="policy", prompt="ab", max_tokens=6, temperature=0).choices[0].text


def test_every_wrong_answer_costs_retries_which_another_engine_answers_and_is_counted() -> None:
    """One engine lies in every way of the table, request by request; the other is right."""
    current: list[str] = [""]
    assert len(LIES) >= 45

    def lie(body: dict[str, Any]) -> Any:
        remote.engines[1].under_way = -1  # the next attempt goes to the other
        return LIES[current[0]](body)

    with (
        listening(stand_in(lie)) as bad,
        listening(stand_in(answer_of)) as good,
        client_of(bad, good, retries=3) as remote,
    ):
        remote.publish("step-1", 1)
        liar, honest = remote.engines
        for current[0] in LIES:
            before, retried = liar.faults.total(), remote.counts.retried
            liar.resting, liar.failures, honest.under_way = False, 0, 9  # the liar is asked first
            (answer,) = complete(remote.generate(REQUESTS[:1], max_new_tokens=4, seed=0))
            assert answer.tokens[-2:].tolist() == [7, 8], current[0]
            assert liar.faults.total() > before, f"{current[0]}: taken for an answer"
            assert remote.counts.retried > retried, current[0]
        assert remote.counts.received == remote.counts.asked == len(LIES)
        assert remote.counts.abandoned == 0
        assert honest.faults.total() == 0


def test_a_fault_names_the_row_that_is_wrong() -> None:
    with listening(stand_in(LIES["an expert twice"])) as url, client_of(url, retries=0) as remote:
        remote.publish("step-1", 1)
        assert remote.generate(REQUESTS[:1], max_new_tokens=4, seed=0) == [None]
        assert "row 0, layer 1: expert 3 appears more than once" in str(remote.engines[0].latest)


def test_a_request_that_fails_everywhere_is_abandoned_and_counted() -> None:
    def sometimes(body: dict[str, Any]) -> Any:
        return (500, {}) if body["prompt"] == [67] else answer_of(body)

    requests = [Request(id="a", tokens=[65]), Request(id="b", tokens=[67]), Request(id="c", tokens=[66])]
    with listening(stand_in(sometimes)) as url, client_of(url, retries=1) as remote:
        remote.publish("step-1", 1)
        answers = remote.generate(requests, max_new_tokens=4, seed=0)
        assert [answer is None for answer in answers] == [False, True, False]
        counts = remote.counts
        assert (counts.asked, counts.received, counts.abandoned, counts.retried) == (3, 2, 1, 1)


def test_a_stalled_engine_costs_its_time_limit_and_no_sample() -> None:
    async def never(body: dict[str, Any]) -> Any:
        await asyncio.sleep(3600)

    with (
        listening(stand_in(never)) as stalled,
        listening(stand_in(answer_of)) as good,
        client_of(stalled, good, timeout_seconds=5.0) as remote,
    ):
        remote.publish("step-1", 1)
        assert len(complete(remote.generate(REQUESTS, max_new_tokens=4, seed=0))) == len(REQUESTS)
        assert "no complete answer within 5 s" in str(remote.engines[0].faults)


def test_our_own_mistakes_and_a_world_without_engines_are_refused_with_their_reasons() -> None:
    with (
        listening(stand_in(lambda body: (400, {"error": "prompt too long"}))) as url,
        client_of(url) as remote,
    ):
        remote.publish("step-1", 1)
        with pytest.raises(Refusal, match="prompt too long"):
            remote.generate(REQUESTS, max_new_tokens=4, seed=0)
    words = "http://127.0.0.1:9: took no weights: /health: ConnectError: Connection refused"
    with client_of("http://127.0.0.1:9") as remote, pytest.raises(Refusal, match=words):
        remote.publish("step-1", 1)


def test_a_sample_is_as_old_as_the_oldest_weights_that_may_have_written_it() -> None:
    versions: list[int] = []

    def reply(body: dict[str, Any]) -> Any:
        return answer_of(body, weight_version=versions[0])

    with listening(stand_in(reply)) as url, client_of(url, retries=0) as remote:
        remote.publish("step-5", 5)
        versions.append(5)
        assert complete(remote.generate(REQUESTS[:1], max_new_tokens=4, seed=0))[0].policy_version == 5
        versions[0] = 0  # the server was started again and holds what it was started with
        assert remote.generate(REQUESTS[:1], max_new_tokens=4, seed=0) == [None]
        assert "weights of version 0, published were 5" in str(remote.engines[0].faults)


def started(place: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """`recipe=serve` as a user starts it, and its address."""
    command = [sys.executable, str(ROOT / "train.py"), "recipe=serve", "serve.port=0", *arguments]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "http://" in line:
            return process, line.split()[-1].strip()
    raise AssertionError(f"the server ended with {process.wait()}")


def test_a_killed_server_loses_nothing_and_comes_back_with_the_present_weights(tmp_path: Path) -> None:
    model = [f"model.{name}={value}" for name, value in (("max_seq_len", 64), ("num_experts", 8))]
    process, url = started(tmp_path, "model=moe_tiny", *model)
    try:
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}/olmo_rl/status", timeout=BOUND_SECONDS) as health:
            assert json.loads(health.read()) == {"version": None, "requests": 0}
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_SECONDS) == 0
    finally:
        process.kill()
    # Two engines answer; one dies with requests under way; the other takes them over.
    dying, shelf = local_engine(), {"step-1": weights_of(3)}
    with (
        listening(server_of(local_engine(), shelf=shelf).application()) as lasting,
        client_of(lasting, retries=6) as remote,
    ):
        with listening(server_of(dying, shelf=shelf).application()) as doomed:
            remote.engines.append(type(remote.engines[0])(url=doomed))
            remote.publish("step-1", 1)
            future = remote.start(
                [Request(id=f"r{n}", tokens=[65 + n]) for n in range(40)],
                max_new_tokens=8,
                stop_token=None,
                temperature=1.0,
                top_p=1.0,
                seed=0,
            )
        answers = complete(future.result(BOUND_SECONDS))
        assert sorted(answer.id for answer in answers) == sorted(f"r{n}" for n in range(40))
        assert remote.counts.asked == remote.counts.received + remote.counts.abandoned == 40


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with listening(stand_in(answer_of)) as url:
        port = url.rpartition(":")[2]
        command = [sys.executable, str(ROOT / "train.py"), "recipe=serve", f"serve.port={port}"]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_SECONDS, env=dict(os.environ)
        )
    assert ended.returncode == 2
    assert f"serve.port={port}: cannot listen there" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_engine_that_rests_is_asked_again_once_it_is_healthy() -> None:
    healthy: list[bool] = [False]

    def reply(body: dict[str, Any]) -> Any:
        return answer_of(body) if healthy[0] else (503, {})

    with listening(stand_in(reply)) as url, client_of(url, retries=0) as remote:
        remote.publish("step-1", 1)
        assert remote.generate(REQUESTS[:2], max_new_tokens=4, seed=0) == [None, None]
        assert remote.engines[0].resting
        healthy[0] = True
        assert len(complete(remote.generate(REQUESTS[:2], max_new_tokens=4, seed=0))) == 2
        assert not remote.engines[0].resting


def sent_in_parts(seed: int, *, limit: int = 2000) -> Iterator[dict[str, Tensor]]:
    weights = weights_of(seed)
    return buckets(MODEL, read=weights.__getitem__, dtype=torch.float32, limit=limit)


def collective(*urls: str, **settings: Any) -> AbstractContextManager[RemoteEngine]:
    return client_of(*urls, source=Source.sglang, publication=PublicationKind.collective, **settings)


def test_broadcast_weights_are_the_published_ones_and_arrive_whole_or_not_at_all() -> None:
    direct = local_engine(seed=1).generate(REQUESTS, max_new_tokens=5, stop_token=EOS, greedy=True, seed=0)
    first, second = local_engine(), local_engine()
    with (
        listening(server_of(first, api=Source.sglang).application()) as a,
        listening(server_of(second, api=Source.sglang).application()) as b,
        collective(a, b) as remote,
    ):
        for version, seed in ((1, 5), (2, 1)):
            remote.broadcast(sent_in_parts(seed), version)
            assert remote.versions == {a: version, b: version}
            assert (first.version, second.version) == (version, version)
        answers = complete(remote.generate(REQUESTS, max_new_tokens=5, stop_token=EOS, greedy=True, seed=0))
        for mine, theirs in zip(direct, answers, strict=True):
            assert theirs.tokens.tolist() == mine.tokens.tolist()
            assert theirs.policy_version == 2
        assert all(engine.under_way == 0 for engine in remote.engines)
        with pytest.raises(Refusal, match="x.weight is not a weight of this model"):
            remote.broadcast([{"x.weight": torch.zeros(2)}], 3)
        assert (first.version, second.version) == (2, 2)


def test_an_engine_that_dies_in_a_broadcast_is_left_out_and_gets_the_next_one() -> None:
    dying, lasting, again = local_engine(), local_engine(), local_engine()
    with (
        listening(server_of(lasting, api=Source.sglang).application()) as lasts,
        collective(lasts, retries=6) as remote,
        listening(server_of(again, api=Source.sglang).application()) as back,
    ):
        with listening(server_of(dying, api=Source.sglang).application()) as dies:
            remote.engines.append(Engine(url=dies))
            remote.broadcast(sent_in_parts(1), 1)
            assert remote.versions == {lasts: 1, dies: 1}
        remote.broadcast(sent_in_parts(2), 2)
        assert (lasting.version, dying.version) == (2, 1)
        assert len(complete(remote.generate(REQUESTS, max_new_tokens=4, seed=0))) == len(REQUESTS)
        remote.engines[1].url = back  # at its old address, without weights
        remote.broadcast(sent_in_parts(3), 3)
        assert remote.versions == {lasts: 3, back: 3}
        assert again.version == 3


def test_an_engine_that_says_no_version_may_have_been_started_again_since_the_broadcast() -> None:
    def reply(body: dict[str, Any]) -> Any:
        return answer_of(body)

    with (
        listening(stand_in(reply, api=Source.sglang, label="4")) as url,
        collective(url, retries=0) as remote,
    ):
        remote.adopt(None, 4, versions={url: 4})
        assert remote.generate(REQUESTS[:1], max_new_tokens=4, seed=0) == [None]
        assert "weights of version None, published were 4" in str(remote.engines[0].faults)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"group_name": "nobody"}, "was not opened"),
        ({"names": ["a"], "dtypes": ["float32"]}, "give three lists of one length"),
        ({"names": [], "dtypes": [], "shapes": []}, "give three lists of one length"),
        (
            {"names": ["norm.weight"], "dtypes": ["float32"], "shapes": [[3]]},
            "norm.weight has \\[3\\], the model",
        ),
        ({"names": ["norm.weight"], "dtypes": ["int8"], "shapes": [[16]]}, "norm.weight has 'int8'"),
    ],
)
def test_tensors_of_another_model_are_refused_before_any_is_received(
    body: dict[str, Any], words: str
) -> None:
    part = Piece(name="norm.weight", shape=(16,), parameter="norm.weight", start=0, stop=16)
    arrivals = Arrivals([part], shapes={"norm.weight": torch.Size([16])})
    store, told = own_store("g", world_size=2)
    meeting = partial(join, store, name="g", rank=0, world_size=2, device=torch.device("cpu"))
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(meeting)
        arrivals.open(told | {"master_address": "127.0.0.1"})
        group = joined.result(BOUND_SECONDS)
    with pytest.raises(Refusal, match=words):
        arrivals.take({"group_name": "g"} | body)
    group.close()
    arrivals.close()


def test_nobody_gives_an_engine_older_weights_than_another_process_has_just_published() -> None:
    """Two ranks ask one engine. It fails twice at the second, which then would look after it, while the first
    publishes: `hold`, which every rank calls before, keeps the second from bringing it back to the old ones.
    """
    calls: list[tuple[str, Any]] = []
    failing = [False]

    def reply(body: dict[str, Any]) -> Any:
        return (500, {}) if failing[0] else answer_of(body)

    def loads() -> list[str]:
        return [body["kwargs"]["weights_path"] for path, body in calls if path == "/collective_rpc"]

    with (
        listening(stand_in(reply, calls=calls)) as url,
        client_of(url) as zero,
        client_of(url, retries=0) as one,
    ):
        zero.publish("step-1", 1)
        one.adopt("step-1", 1, versions=zero.versions)
        failing[0] = True
        assert one.generate(REQUESTS[:2], max_new_tokens=4, seed=0) == [None, None]
        failing[0] = False
        one.hold()
        given = loads()
        zero.publish("step-2", 2)
        time.sleep(2 * REST_SECONDS)
        assert loads() == [*given, "step-2"]
        one.adopt("step-2", 2, versions=zero.versions)
        (answer,) = complete(one.generate(REQUESTS[:1], max_new_tokens=4, seed=0))
        assert answer.policy_version == 2
        assert set(loads()[len(given) :]) == {"step-2"}


def test_while_newer_weights_are_being_published_an_answer_from_them_counts_as_older() -> None:
    reported = [1]
    with (
        listening(stand_in(lambda body: answer_of(body, weight_version=reported[0]))) as url,
        client_of(url, retries=0) as remote,
    ):
        remote.publish("step-1", 1)
        remote.hold()
        reported[0] = 2
        (answer,) = complete(remote.generate(REQUESTS[:1], max_new_tokens=4, seed=0))
        assert answer.policy_version == 1
        remote.adopt("step-2", 2, versions={url: 2})
        reported[0] = 3
        assert remote.generate(REQUESTS[:1], max_new_tokens=4, seed=0) == [None]


@pytest.mark.parametrize("publication", PublicationKind)
def test_an_engine_that_is_stopped_costs_a_publication_seconds(
    monkeypatch: pytest.MonkeyPatch, publication: PublicationKind
) -> None:
    monkeypatch.setattr(control, "AT_ONCE_SECONDS", 0.5)
    stopped = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    silent = f"http://127.0.0.1:{stopped.getsockname()[1]}"
    with (
        listening(
            server_of(local_engine(), shelf={"step-1": weights_of(1)}, api=Source.sglang).application()
        ) as url,
        client_of(url, silent, source=Source.sglang, publication=publication) as remote,
    ):
        began = time.monotonic()
        if publication is PublicationKind.directory:
            remote.publish("step-1", 1)
        else:
            remote.broadcast(sent_in_parts(1), 1)
        assert time.monotonic() - began < 300, "far below the limit of a control call"
        assert remote.versions == {url: 1, silent: None}
        assert "/health: no complete answer within 0.5 s" in remote.engines[1].faults
    stopped.close()


def test_an_engine_that_was_started_again_since_the_last_broadcast_takes_the_next_one() -> None:
    first, second = local_engine(), local_engine()
    with collective("http://127.0.0.1:1") as remote:
        with listening(server_of(first, api=Source.sglang).application()) as url:
            remote.engines[0].url = url
            remote.broadcast(sent_in_parts(1), 1)
        port = int(url.rpartition(":")[2])
        with listening(server_of(second, api=Source.sglang).application(), port=port):
            remote.broadcast(sent_in_parts(2), 2)
            assert remote.versions == {url: 2}
            assert (first.version, second.version) == (1, 2)


def test_the_address_on_the_way_to_an_engine_is_of_its_family_and_an_unknown_one_is_its_fault() -> None:
    assert address_for("http://127.0.0.1:30000") == "127.0.0.1"
    with (
        collective("http://no.such.host.invalid:30000") as remote,
        pytest.raises(Refusal, match="took no weights"),
    ):
        remote.broadcast(sent_in_parts(1), 1)
