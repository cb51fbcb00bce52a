"""`recipe=check`: what it asks this machine and engines for, and which answers fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_cases import MODEL_KEYS, StandIn, listening, local_engine, server_of
from engine_lies import answer_of

from olmo_rl.cli import run as run_command
from olmo_rl.config import Source

RUN = ("+experiment=packed_moe", *MODEL_KEYS, "rollouts.max_new_tokens=8", "recipe=check", "run_name=c")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")


def asked(source: Source, *urls: str) -> int:
    return run_command([*RUN, f"rollouts={source.value}", f"rollouts.urls=[{','.join(urls)}]"])


def test_without_engines_the_machine_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*RUN]) == 0
    printed = capsys.readouterr().out
    assert [printed.count(name) for name in ("torch", "extras", "disk")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        (["trainer=gpu", "strategy=single"], "devices: 0 GPUs, trainer.devices=1: set trainer.devices"),
        (["logger=wandb"], "extras: logger=wandb needs wandb, which is not installed: pip install"),
    ],
)
def test_what_this_machine_lacks_fails_with_the_fix(
    lacks: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olmo_rl.backends.importable", lambda name: False)
    assert run_command([*RUN, *lacks]) == 2
    assert words in capsys.readouterr().err


def test_a_full_disk_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=1000))
    assert run_command([*RUN]) == 2
    assert "disk: 0.0 GiB free" in capsys.readouterr().err


@pytest.mark.parametrize("source", [Source.vllm, Source.sglang])
def test_engines_that_have_everything_pass_and_nothing_of_them_is_changed(
    source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = local_engine(seed=2, version=3)
    server = server_of(engine, api=source)
    with listening(server.application()) as url:
        assert asked(source, url) == 0
    printed = capsys.readouterr().out
    for name in ("weight version", "context length", "control calls", "log-probs", "routes", "whole dist"):
        (line,) = [line for line in printed.splitlines() if name in line and url in line]
        assert "good" in line, line
    assert "routes (" in printed
    assert (engine.version, server.label) == (3, "default")


def bare(body: dict[str, Any]) -> Any:
    return answer_of(body, routed_experts=None)


def cut(body: dict[str, Any]) -> Any:
    return answer_of(body, logprobs=None)


FAILING = {
    "an older program": ({"program": "0.26.0"}, "engine: vLLM 0.26.0: /weight_info needs vLLM 0.27.1"),
    "not healthy": ({"health": 503}, "engine: /health: status 503"),
    "no routes": ({"reply": bare}, "routes: answer: no routed experts: start"),
    "no log-probs": ({"reply": cut}, "log-probs, token ids: answer, choice 0: no logprobs"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_an_engine_that_lacks_something_fails_with_the_fix(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, words = FAILING[kind]
    given: dict[str, Any] = {"reply": answer_of} | settings
    with listening(StandIn(**given).application()) as url:
        assert asked(Source.vllm, url) == 2
    printed = capsys.readouterr()
    assert f"{url}: {words}" in printed.err
    assert "FAILS" in printed.out


def test_an_engine_that_repeats_one_token_or_is_gone_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Its single token has log-prob -1 each time, so eleven repetitions have -22."""

    def one(body: dict[str, Any]) -> Any:
        answer = answer_of(body)
        if body["max_tokens"] == 1:
            (choice,) = answer["choices"]
            logprobs = {name: values[:1] for name, values in choice["logprobs"].items()}
            return answer_of(body, token_ids=[7], logprobs=logprobs | {"token_logprobs": [-2.0]})
        return answer

    with listening(StandIn(reply=one).application()) as url:
        assert asked(Source.vllm, url, "http://127.0.0.1:9") == 2
    printed = capsys.readouterr().err
    assert f"{url}: whole distribution: 12 draws gave one token, log-probability -22" in printed
    assert "http://127.0.0.1:9: engine: /health: ConnectError: Connection refused: is it up" in printed
    assert json.dumps("Traceback") not in printed
