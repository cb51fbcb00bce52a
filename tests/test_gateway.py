"""The gateway between clients of the verifiers library and the real server around a tiny engine.

Calls are those that the library's own client sent (`environment_dumps/generate.py`).
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from bounds import BOUND_SECONDS
from engine_cases import AXIS, MODEL, StandIn, client_of, listening, local_engine, server_of
from engine_lies import answer_of as engine_answer

from olmo_rl.policy.engine import Generation, Request
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.gateway import Gateway, Limits, answer_of, call_of, digest_of
from olmo_rl.types import Refusal

CALLS = json.loads((Path(__file__).parent / "environment_dumps" / "calls.json").read_text())
_, FIRST, SECOND = CALLS
LIMITS = Limits(vocab_size=259, context=32, max_new_tokens=6, calls=3, num_experts=4)


@contextmanager
def gateway_of(remote: RemoteEngine, *, limits: Limits = LIMITS) -> Iterator[Gateway]:
    gateway = Gateway(remote, limits=limits, token="of this test", seed=0)
    try:
        yield gateway
    finally:
        gateway.close()


@contextmanager
def served(*, version: int = 5, limits: Limits = LIMITS) -> Iterator[Gateway]:
    """A gateway to the real server."""
    server = server_of(local_engine(seed=2, version=version))
    with listening(server.application()) as url, client_of(url) as remote:
        server.rename(str(version))
        remote.adopt(None, version, versions={url: version})
        with gateway_of(remote, limits=limits) as gateway:
            yield gateway


def body_of(recorded: Mapping[str, Any], slot: int, **params: Any) -> dict[str, Any]:
    body: dict[str, Any] = copy.deepcopy(recorded["body"])
    body["sampling_params"] |= {"seed": slot, **params}
    return body


def post(
    gateway: Gateway, body: Any, *, session: str | None = "trace", token: str | None = None
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {gateway.token if token is None else token}"}
    headers |= {} if session is None else {"X-Session-ID": session}
    url = gateway.url.removesuffix("/v1") + FIRST["path"]
    return httpx.post(url, json=body, headers=headers, timeout=BOUND_SECONDS, trust_env=False)


def choice_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice)


def routes_in(choice: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    routes = choice["routed_experts"]
    return np.frombuffer(base64.b64decode(routes["data"]), dtype=routes["dtype"]).reshape(routes["shape"])


def test_a_call_of_the_library_is_answered_with_what_the_engine_wrote() -> None:
    with served() as gateway:
        assert CALLS[0]["path"] == "/v1/models"
        headers = {"Authorization": f"Bearer {gateway.token}"}
        (card,) = httpx.get(f"{gateway.url}/models", headers=headers, trust_env=False).json()["data"]
        assert (card["id"], card["max_model_len"]) == (FIRST["body"]["model"], 32)
        (slot,) = gateway.open_slots(["c0-a0-p0-s0"], temperature=1.0, top_p=1.0)
        raw = post(gateway, body_of(FIRST, slot))
        choice = choice_of(raw)
        assert b'"routed_experts":{"data":"' in raw.content, "where the library's client looks for it"
        prompt, ids = FIRST["body"]["token_ids"], choice["token_ids"]
        read = np.array([*prompt, *ids], dtype=np.int32)
        prefix = digest_of(np.array(prompt, dtype=np.int32)).hex()
        asked = Request(id=f"c0-a0-p0-s0/0/{prefix}/0", tokens=prompt)
        with client_of(gateway._engine.engines[0].url) as direct:
            direct.adopt(None, 5, versions={direct.engines[0].url: 5})
            (expected,) = direct.generate([asked], max_new_tokens=6, stop_token=258, seed=0)
        assert expected is not None
        assert read.tolist() == expected.tokens.tolist()
        given = [(entry["token"], np.float32(entry["logprob"])) for entry in choice["logprobs"]["content"]]
        assert given == [(f"token_id:{t}", p) for t, p in zip(ids, expected.logprobs, strict=True)]
        np.testing.assert_array_equal(routes_in(choice), expected.routes)
        noted = gateway.close_slots([slot])[slot].sessions["trace"].versions
        assert noted == {digest_of(read): 5}


def test_a_later_turn_gets_the_routes_from_the_row_that_it_names() -> None:
    with served() as gateway:
        (slot,) = gateway.open_slots(["s"], temperature=1.0, top_p=1.0)
        start = SECOND["body"]["sampling_params"]["routed_experts_prompt_start"]
        part = choice_of(post(gateway, body_of(SECOND, slot)))
        whole = choice_of(
            post(gateway, body_of(SECOND, slot, routed_experts_prompt_start=0), session="again")
        )
        assert part["routed_experts"]["start"] == start == 9
        length = len(SECOND["body"]["token_ids"]) + len(part["token_ids"])
        assert part["routed_experts"]["shape"] == [length - 1 - start, 2, 2]
        np.testing.assert_array_equal(routes_in(part)[:4], routes_in(whole)[start : start + 4])


def test_random_numbers_follow_from_slot_session_and_prompt_whatever_the_order() -> None:
    def draw(order: list[tuple[int, str]]) -> dict[tuple[int, str], list[int]]:
        with served() as gateway:
            slots = gateway.open_slots(["a", "b"], temperature=1.0, top_p=1.0)
            return {
                (slot, session): choice_of(post(gateway, body_of(FIRST, slots[slot]), session=session))[
                    "token_ids"
                ]
                for slot, session in order
            }

    first = draw([(0, "x"), (1, "y"), (0, "z")])
    second = draw([(1, "v"), (0, "u"), (0, "w")])
    named = {(0, "x"): (0, "u"), (1, "y"): (1, "v"), (0, "z"): (0, "w")}
    assert {named[key]: ids for key, ids in first.items()} == second
    assert len({tuple(ids) for ids in first.values()}) == 3, "rollouts of one prompt differ"


def test_a_fork_that_asks_the_same_again_gets_another_answer_and_a_greedy_slot_the_same() -> None:
    with served() as gateway:
        drawn, greedy = [
            gateway.open_slots(["s"], temperature=temperature, top_p=1.0)[0] for temperature in (1.0, 0.0)
        ]
        answers = {
            slot: [tuple(choice_of(post(gateway, body_of(FIRST, slot)))["token_ids"]) for _ in range(3)]
            for slot in (drawn, greedy)
        }
        assert len(set(answers[drawn])) == 3
        assert len(set(answers[greedy])) == 1


def test_a_response_fits_the_context_and_a_conversation_beyond_it_is_refused() -> None:
    with served() as gateway:
        (slot,) = gateway.open_slots(["s"], temperature=1.0, top_p=1.0)
        body = body_of(FIRST, slot, stop_token_ids=[])
        body["token_ids"] = [65] * 30
        choice = choice_of(post(gateway, body))
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (2, "length")
        body["token_ids"] = [65] * 32
        answer = post(gateway, body)
        assert answer.status_code == 400
        assert "model.max_seq_len=32: the conversation has 32 tokens" in answer.json()["error"]["message"]
        asked_for_two = body_of(FIRST, slot, stop_token_ids=[], max_tokens=2)
        assert len(choice_of(post(gateway, asked_for_two))["token_ids"]) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "judge"}, "model: 'judge' is not served here"),
        ({"token_ids": []}, "a first token has nothing to be drawn from"),
        ({"token_ids": [1, 259]}, "token_ids: an id outside 0..258"),
        ({"token_ids": "abc"}, "token_ids: no list of token ids"),
        ({"features": {"mm_hashes": {}}}, "only text"),
        ({"sampling_params": None}, "sampling_params: no object"),
        ({"sampling_params": {"seed": 77}}, "seed: 77 is the number of no episode"),
        ({"sampling_params": {}}, "seed: -1 is the number of no episode"),
        ({"temperature": 0.5}, "rollouts.temperature=1: tokens of another distribution cannot be trained"),
        ({"top_p": 0.9}, "rollouts.top_p=1"),
        ({"top_k": 20}, "top_k: 20 changes the distribution"),
        ({"min_p": 0.1}, "min_p: 0.1 changes the distribution"),
        ({"logit_bias": {"1": 5}}, "logit_bias: no sampling setting"),
        ({"stop_token_ids": [259]}, "stop_token_ids: an id outside"),
        ({"routed_experts_prompt_start": 8}, "lies behind the prompt of 7 tokens"),
        ({"max_tokens": 0}, "max_tokens: 0 is no integer"),
    ],
)
def test_what_cannot_be_answered_or_trained_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    class Known:
        temperature, top_p = 1.0, 1.0

    body = body_of(FIRST, 0)
    whole = {"model", "token_ids", "features", "sampling_params"}
    for name, value in change.items():
        (body if name in whole else body["sampling_params"])[name] = value
    with pytest.raises(Refusal) as refused:
        call_of(body, limits=LIMITS, slots={0: Known()})  # type: ignore[dict-item]
    assert reason in str(refused.value)


def test_strangers_nameless_sessions_endless_ones_and_closed_episodes_are_refused() -> None:
    with served() as gateway:
        (slot,) = gateway.open_slots(["s"], temperature=1.0, top_p=1.0)
        body = body_of(FIRST, slot)
        assert post(gateway, body, token="guessed").status_code == 401
        assert "X-Session-ID: missing" in post(gateway, body, session=None).text
        for _ in range(3):
            choice_of(post(gateway, body))
        assert "environment.max_turns=3: this session had as many answers" in post(gateway, body).text
        choice_of(post(gateway, body, session="another"))
        gateway.close_slots([slot])
        assert f"seed: {slot} is the number of no episode" in post(gateway, body).text


def test_a_client_that_leaves_ends_its_request_at_the_engine() -> None:
    ended = asyncio.Event()

    async def endless(body: dict[str, Any]) -> Any:
        try:
            await asyncio.sleep(BOUND_SECONDS)
        finally:
            ended.set()
        return engine_answer(body)

    with listening(StandIn(reply=endless).application()) as url, client_of(url) as remote:
        remote.publish("step-1", 1)
        with gateway_of(remote) as gateway:
            (slot,) = gateway.open_slots(["s"], temperature=1.0, top_p=1.0)
            headers = {"Authorization": f"Bearer {gateway.token}", "X-Session-ID": "trace"}
            address = gateway.url.removesuffix("/v1") + FIRST["path"]
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(address, json=body_of(FIRST, slot), headers=headers, timeout=1.0, trust_env=False)
            until = time.monotonic() + BOUND_SECONDS
            while not ended.is_set() and time.monotonic() < until:
                time.sleep(0.02)
            assert ended.is_set()
            assert remote.engines[0].under_way == 0


def test_calls_wait_while_weights_are_published_and_count_as_new() -> None:
    with served(version=5) as gateway:
        remote = gateway._engine
        (slot,) = gateway.open_slots(["s"], temperature=1.0, top_p=1.0)
        url = remote.engines[0].url
        remote.hold()
        remote._fleet.version = 6  # as at the beginning of a publication: no engine has it yet
        answer = remote.run(asyncio.to_thread(post, gateway, body_of(FIRST, slot)))
        time.sleep(0.3)
        assert not answer.done()
        httpx.post(f"{url}/update_weight_version", json={"new_version": "6"}, trust_env=False)
        remote.adopt(None, 6, versions={url: 6})
        choice_of(answer.result(BOUND_SECONDS))
        assert list(gateway.close_slots([slot])[slot].sessions["trace"].versions.values()) == [6]


def test_an_engine_that_refuses_is_the_failure_of_the_gateway_and_one_that_fails_that_of_a_call() -> None:
    replies: list[Any] = [(500, {}), (400, {"error": "no"})]
    with (
        listening(StandIn(reply=lambda body: replies[0]).application()) as url,
        client_of(url, retries=0) as remote,
    ):
        remote.publish("step-1", 1)
        with gateway_of(remote) as gateway:
            (slot,) = gateway.open_slots(["s"], temperature=1.0, top_p=1.0)
            assert post(gateway, body_of(FIRST, slot)).status_code == 502
            assert gateway.failure is None
            replies.pop(0)
            assert post(gateway, body_of(FIRST, slot)).status_code == 400
            assert gateway.failure is not None
            assert "refused request s/0/" in str(gateway.failure)
            assert post(gateway, body_of(FIRST, slot)).status_code == 503
            assert gateway.counts.metrics()["rollouts/asked"] == 2.0


def test_an_answer_has_the_narrowest_type_that_holds_every_expert() -> None:
    routes = np.array([[[0, 299]], [[1, 2]], [[3, 4]]], dtype=np.int16)
    generation = Generation(
        id="a",
        tokens=np.array([1, 2, 3, 4], dtype=np.int32),
        logprobs=np.array([-0.5], dtype=np.float32),
        routes=routes,
        finish_reason="stop",
        policy_version=0,
    )

    class Called:
        tokens, first_row = [1, 2, 3], 1

    body = answer_of(generation, call=Called(), num_experts=300)  # type: ignore[arg-type]
    found = body["choices"][0]["routed_experts"]
    assert (found["dtype"], found["shape"], found["start"]) == ("uint16", [2, 1, 2], 1)
    assert "routed_experts" not in answer_of(generation, call=Called(), num_experts=0)["choices"][0]  # type: ignore[arg-type]
    assert MODEL.num_experts == AXIS.layout.num_experts == LIMITS.num_experts
