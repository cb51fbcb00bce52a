"""Engines that restart, abort, drip, flood or are too old; a server asked for nonsense. Every stand-in
accepts what
the real program accepts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from aiohttp import web
from bounds import BOUND_SECONDS
from engine_cases import StandIn, client_of, listening, local_engine, server_of, weights_of
from engine_lies import answer_of

from olmo_rl.config import PauseMode, Source
from olmo_rl.policy.engine import Request
from olmo_rl.rollouts.exchange import exchange
from olmo_rl.types import Refusal

ONE = [Request(id="a", tokens=[65])]


def post(url: str, payload: bytes, *, path: str = "/v1/completions", token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url + path, data=payload, headers=headers)
    try:
        return int(urllib.request.urlopen(request, timeout=BOUND_SECONDS).status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("api", [Source.vllm, Source.sglang])
def test_an_idle_engine_that_was_started_again_gets_the_present_weights_before_it_is_asked(
    api: Source,
) -> None:
    engine = StandIn(reply=answer_of, api=api)
    with listening(engine.application()) as url, client_of(url, source=api, retries=0) as remote:
        remote.publish("step-3", 3)
        engine.label = "default"  # started again: its start weights
        (answer,) = remote.generate(ONE, max_new_tokens=4, seed=0)
        assert answer is not None
        assert answer.policy_version == 3
        assert engine.loads == ["step-3", "step-3"]
        assert engine.label == "3"


def test_an_engine_that_fails_but_has_its_weights_is_not_reloaded() -> None:
    broken = [True]
    engine = StandIn(reply=lambda body: (500, {}) if broken[0] else answer_of(body))
    with listening(engine.application()) as url, client_of(url, retries=0) as remote:
        remote.publish("step-1", 1)
        assert remote.generate(ONE * 3, max_new_tokens=4, seed=0) == [None] * 3
        assert remote.engines[0].resting
        broken[0] = False
        assert remote.generate(ONE, max_new_tokens=4, seed=0) != [None]
        assert engine.loads == ["step-1"], "a repair is for an engine that lost its weights"


def test_responses_that_our_publication_aborts_are_asked_again_and_use_up_no_attempt() -> None:
    asked, paused = threading.Event(), threading.Event()

    async def reply(body: dict[str, Any]) -> Any:
        if not paused.is_set():
            asked.set()
            while not paused.is_set():
                await asyncio.sleep(0.01)
            return answer_of(body, finish_reason="abort")
        return answer_of(body)

    engine = StandIn(reply=reply)
    with (
        listening(engine.application()) as url,
        client_of(url, retries=0, pause=PauseMode.abort) as remote,
    ):
        remote.publish("step-1", 1)
        future = remote.start(ONE, max_new_tokens=4, stop_token=None, temperature=1.0, top_p=1.0, seed=0)
        assert asked.wait(BOUND_SECONDS)
        remote.hold()
        paused.set()
        remote.publish("step-2", 2)
        (answer,) = future.result(BOUND_SECONDS)
        assert answer is not None
        assert remote.engines[0].faults.total() == 0
        assert [path for path, _ in engine.calls[:4]] == [
            "/pause?mode=abort",
            "/collective_rpc",
            "/update_weight_version",
            "/reset_prefix_cache",
        ]
        assert engine.loads == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("api", "program", "words"),
    [
        (Source.vllm, "0.26.0", "vLLM 0.26.0: /weight_info needs vLLM 0.27.1 or newer"),
        (Source.sglang, "0.5.9", "SGLang 0.5.9: return_token_ids of /v1/completions needs SGLang 0.5.17"),
        (Source.vllm, "main", "'main' is no version of vLLM"),
    ],
)
def test_an_engine_of_an_older_program_is_refused_by_name(api: Source, program: str, words: str) -> None:
    engine = StandIn(reply=answer_of, api=api, program=program)
    with listening(engine.application()) as url, client_of(url, source=api) as remote:
        with pytest.raises(Refusal, match=words):
            remote.publish("step-1", 1)
        assert engine.calls == [], "nothing was changed"


def test_all_engines_may_be_gone_for_longer_than_a_request_may_take() -> None:
    """Before a publication and with a request to ask; at once only where no engine ever took weights."""
    engine = StandIn(reply=answer_of)
    with client_of("http://127.0.0.1:1", timeout_seconds=1.0, wait_seconds=60.0, retries=1) as remote:
        with listening(engine.application()) as url:
            remote.engines[0].url = url
            remote.publish("step-1", 1)
        back = threading.Event()

        def restart() -> None:
            time.sleep(4)
            engine.label = "default"  # with its start weights
            with listening(engine.application(), port=int(url.rpartition(":")[2])):
                back.wait(60)

        gone = threading.Thread(target=restart)
        gone.start()
        try:
            future = remote.start(ONE, max_new_tokens=4, stop_token=None, temperature=1.0, top_p=1.0, seed=0)
            remote.publish("step-2", 2)
            (answer,) = future.result(60)
        finally:
            back.set()
            gone.join()
        assert answer is not None
        assert answer.policy_version == 2
        assert remote.counts.abandoned == 0
        assert engine.loads == ["step-1", "step-2"]


@pytest.mark.parametrize("status", [503, 404])
def test_an_engine_that_is_not_healthy_takes_no_weights(status: int) -> None:
    engine = StandIn(reply=answer_of, health=status)
    with (
        listening(engine.application()) as url,
        client_of(url) as remote,
        pytest.raises(Refusal, match=f"/health: status {status}"),
    ):
        remote.publish("step-1", 1)


def test_a_cache_that_is_not_reset_is_a_fault_where_requests_were_not_frozen() -> None:
    engine = StandIn(reply=answer_of, flushes=False)
    with listening(engine.application()) as url:
        with client_of(url, pause=PauseMode.wait) as remote, pytest.raises(Refusal, match="/reset_prefix"):
            remote.publish("step-1", 1)
        with client_of(url) as remote:
            remote.publish("step-1", 1)  # frozen requests hold their blocks; the salt keeps others away


@pytest.mark.parametrize("path", ["/v1/completions", "/weight_info"])
def test_a_dripping_answer_ends_at_the_deadline_of_the_whole_request(path: str) -> None:
    """One byte every tenth of a second: no single read is late."""
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not stop.wait(0.1):
            try:
                connection.sendall(b" ")
            except OSError:
                return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with client_of(url) as remote:

        async def ask() -> None:
            await exchange(remote._client, "GET", remote.engines[0].url, path, seconds=1.0)

        began = time.monotonic()
        with pytest.raises(Exception, match="no complete answer within 1 s"):
            remote._call(ask())
        assert time.monotonic() - began < BOUND_SECONDS
    stop.set()
    listener.close()


BAD = {
    "seed is a lone surrogate": b'{"prompt":[1,2],"max_tokens":2,"seed":"\\ud800"}',
    "stop id of 10^30": b'{"prompt":[1],"stop_token_ids":[1' + b"0" * 30 + b"]}",
    "seed of 10^30": b'{"prompt":[1],"seed":1' + b"0" * 30 + b"}",
    "max_tokens of 10^400": b'{"prompt":[1],"max_tokens":1' + b"0" * 400 + b"}",
    "temperature of 10^400": b'{"prompt":[1],"temperature":1' + b"0" * 400 + b"}",
    "an integer of 5,000 digits": b'{"prompt":[1],"n":1' + b"0" * 5000 + b"}",
    "prompt is a lone surrogate": b'{"prompt":"\\ud800"}',
    "nested 100,000 deep": b"[" * 100_000,
    "n of 30,000": b'{"prompt":[1],"n":30000}',
    "100,000 prompts": b'{"prompt":[' + b"[1]," * 99_999 + b"[1]]}",
    "top_k of 1": b'{"prompt":[1],"top_k":1}',
    "min_p of 0.5": b'{"prompt":[1],"min_p":0.5}',
    "penalty is text": b'{"prompt":[1],"presence_penalty":"much"}',
    "ignore_eos is a list": b'{"prompt":[1],"ignore_eos":[1]}',
    "logprobs is text": b'{"prompt":[1],"logprobs":"one"}',
    "no JSON": b"\xff",
}


@pytest.mark.parametrize("api", [Source.vllm, Source.sglang])
def test_nonsense_is_answered_with_400_and_the_server_goes_on(api: Source) -> None:
    with listening(server_of(local_engine(seed=2), api=api).application()) as url:
        assert {name: post(url, body) for name, body in BAD.items()} == dict.fromkeys(BAD, 400)
        assert post(url, b'{"prompt":[1],"max_tokens":1}') == 200
        control = "/collective_rpc" if api is Source.vllm else "/update_weights_from_disk"
        assert post(url, b'{"method":"reload_weights","kwargs":[1],"model_path":7}', path=control) in (
            400,
            500,
        )
        assert post(url, b'{"prompt":[1],"max_tokens":1}') == 200


def test_reload_weights_takes_no_version_as_in_the_real_program() -> None:
    call = {"method": "reload_weights", "kwargs": {"weights_path": "a", "weight_version": 4}}
    with listening(server_of(local_engine(seed=2), shelf={"a": {}}).application()) as url:
        assert post(url, json.dumps(call).encode(), path="/collective_rpc") == 500
        assert post(url, b'{"new_version": 4}', path="/update_weight_version") == 400


def test_an_exception_in_a_batch_is_answered_with_500_and_a_dead_loop_is_unhealthy() -> None:
    server = server_of(local_engine(seed=2))
    ended = threading.Event()
    server.on_failure = ended.set
    generate = server.engine.generate

    def fails(*arguments: Any, **settings: Any) -> Any:
        raise IndexError("of the engine")

    with listening(server.application()) as url:
        server.engine.generate = fails  # type: ignore[method-assign]
        assert post(url, b'{"prompt":[1],"max_tokens":1}') == 500
        server.engine.generate = generate  # type: ignore[method-assign]
        assert post(url, b'{"prompt":[1],"max_tokens":1}') == 200
        assert urllib.request.urlopen(f"{url}/health", timeout=BOUND_SECONDS).status == 200
        server._queue.put_nowait(None)  # type: ignore[arg-type]
        assert post(url, b'{"prompt":[1],"max_tokens":1}') in (500, 503)
        assert ended.wait(BOUND_SECONDS)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health", timeout=BOUND_SECONDS)


def test_what_a_departed_client_asked_for_ends_within_two_seconds() -> None:
    """Counted in steps of 0.3 s, of which two seconds are six; a busy machine may notice later."""
    engine = local_engine(seed=2)
    server = server_of(engine)
    step, steps = engine._model.step, [0]

    def slow(*arguments: Any, **settings: Any) -> Any:
        time.sleep(0.3)
        steps[0] += 1
        return step(*arguments, **settings)

    engine._model.step = slow  # type: ignore[method-assign]
    with listening(server.application()) as url:
        body = b'{"prompt":[1],"max_tokens":30,"ignore_eos":true}'
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            deadline = time.monotonic() + BOUND_SECONDS
            while not steps[0]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        before = steps[0]
        assert post(url, b'{"prompt":[1],"max_tokens":1}') == 200
        print(f"steps after the client left, its successor's included: {steps[0] - before}")
        assert not server.under_way
        assert steps[0] - before <= 20, "of 30"


def test_an_engine_that_forgets_routes_once_costs_one_retry() -> None:
    forgot = [False]

    def reply(body: dict[str, Any]) -> Any:
        if not forgot[0]:
            forgot[0] = True
            return answer_of(body, routed_experts=None)
        return answer_of(body)

    engine = StandIn(reply=reply)
    with listening(engine.application()) as url, client_of(url) as remote:
        remote.publish("step-1", 1)
        answers = remote.generate(
            [Request(id=f"r{n}", tokens=[65 + n]) for n in range(4)], max_new_tokens=4, seed=0
        )
        assert None not in answers
        counts = remote.counts
        assert (counts.asked, counts.received, counts.retried, counts.abandoned) == (4, 4, 1, 0)
        assert engine.loads == ["step-1"]
        assert "no routed experts" in str(remote.engines[0].faults)


def test_a_token_guards_every_route_but_health_and_the_client_sends_its_own() -> None:
    server = server_of(local_engine(), shelf={"a": weights_of(1)}, token="secret")
    with listening(server.application()) as url:
        assert post(url, b'{"prompt":[1]}') == 401
        assert post(url, b"", path="/pause?mode=keep", token="wrong") == 401
        assert urllib.request.urlopen(f"{url}/health", timeout=BOUND_SECONDS).status == 200
        with client_of(url, token="secret") as remote:
            remote.publish("a", 1)
            assert remote.generate(ONE, max_new_tokens=2, seed=0) != [None]


def test_the_latest_cause_is_shown_and_it_is_the_deepest() -> None:
    def reply(body: dict[str, Any]) -> Any:
        return web.Response(status=500)

    with client_of("http://127.0.0.1:1", wait_seconds=3.0, retries=50) as remote:
        with listening(StandIn(reply=reply).application()) as url:
            remote.engines[0].url = url
            remote.publish("a", 1)
            future = remote.start(ONE, max_new_tokens=2, stop_token=None, temperature=1.0, top_p=1.0, seed=0)
            time.sleep(1.0)
        with pytest.raises(Refusal, match="Connection refused"):
            future.result(BOUND_SECONDS)
