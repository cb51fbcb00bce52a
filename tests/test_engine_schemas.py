"""Requests and answers against the classes that vLLM and SGLang publish (`engine_schemas/generate.py`)."""

from __future__ import annotations

import base64
import json
import shlex
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from bounds import BOUND_SECONDS
from documents import ROOT, blocks
from engine_cases import StandIn, client_of, listening, local_engine, server_of
from engine_lies import answer_of
from torch import Tensor

from olmo_rl.config import PauseMode, PublicationKind, Source
from olmo_rl.policy.engine import Request
from olmo_rl.rollouts import vllm_transfer
from olmo_rl.types import Refusal

SCHEMAS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "engine_schemas").glob("*.json"))
}
CONTROL = {
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
}


def validate(body: Any, *, version: str, name: str) -> None:
    jsonschema.validate(body, SCHEMAS[version]["schemas"][name])


def source_of(version: str) -> Source:
    return Source[version.partition("-")[0]]


def test_schemas_are_of_two_versions_of_each_program_and_name_their_sources() -> None:
    assert list(SCHEMAS) == ["sglang-0.5.17", "sglang-0.5.23", "vllm-0.29.0", "vllm-0.32.0"]
    for version, found in SCHEMAS.items():
        assert version.endswith(found["version"])
        assert all(len(digest) == 64 for digest in found["sources"].values())


def test_the_versions_of_tokens_are_those_of_the_spans_and_the_sample_is_as_old_as_the_oldest() -> None:
    def reply(body: dict[str, Any]) -> Any:
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
        return answer_of(body) | {"metadata": {"weight_version": "4", "weight_versions": spans}}

    program = StandIn(reply=reply, api=Source.sglang)
    with listening(program.application()) as url, client_of(url, source=Source.sglang) as remote:
        remote.publish("step-3", 3)
        (answer,) = remote.probe([Request(id="a", tokens=[65])], max_new_tokens=4, seed=0).result(60)[url]
    assert not isinstance(answer, str)
    assert answer.token_versions is not None
    assert answer.token_versions.tolist() == [3, 4]
    assert answer.policy_version == 3


@pytest.mark.parametrize("version", SCHEMAS)
def test_every_request_of_the_client_is_one_that_the_program_knows(version: str) -> None:
    source, bodies = source_of(version), []

    def reply(body: dict[str, Any]) -> Any:
        bodies.append(body)
        return answer_of(body)

    program = StandIn(reply=reply, api=source, program=version.partition("-")[2])
    with listening(program.application()) as url, client_of(url, source=source, retries=0) as remote:
        remote.publish("step-4", 4)
        remote.generate([Request(id="a", tokens=[65])], max_new_tokens=4, stop_token=7, seed=0)
    (body,) = bodies
    validate(body, version=version, name="CompletionRequest")
    neutral = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [body[name] for name in neutral] == [0, 1, 0, 0], "gaps are filled from generation_config.json"
    assert body["top_k"] == (-1 if source is Source.sglang else 0)
    assert body["cache_salt"] == "4", "no prefix of older weights may serve it"
    for path, sent in program.calls if source is Source.sglang else []:
        validate(sent, version=version, name=CONTROL[path])


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize(
    "extra", [{}, {"return_token_ids": True, "logprobs": 1, "return_routed_experts": True}]
)
def test_every_answer_of_the_server_is_one_that_the_program_gives(
    version: str, extra: dict[str, Any]
) -> None:
    server = server_of(local_engine(seed=2), api=source_of(version))
    body = {"model": "policy", "prompt": [[65, 66], [67]], "max_tokens": 3, "n": 2, **extra}
    with listening(server.application()) as url:
        post = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
        answer = json.loads(urllib.request.urlopen(post, timeout=BOUND_SECONDS).read())
        models = json.loads(urllib.request.urlopen(f"{url}/v1/models", timeout=BOUND_SECONDS).read())
    validate(answer, version=version, name="CompletionResponse")
    validate(models, version=version, name="ModelList")
    assert len(answer["choices"]) == 4


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({"weight_version": 4}, "sglang-0.5.23"),
        ({"routed_experts": [[[0]]]}, "vllm-0.32.0"),
        ({"sgl_ext": {}}, "sglang-0.5.23"),
    ],
)
def test_a_field_from_hearsay_fails(changes: dict[str, Any], version: str) -> None:
    """Fields that earlier doubles sent, and no real program does."""
    choice = {"index": 0, "text": "a"}
    body = {"id": "a", "model": "policy", "choices": [choice], "usage": {}}
    validate(body, version=version, name="CompletionResponse")
    with pytest.raises(jsonschema.ValidationError):
        validate(body | {"choices": [choice | changes]}, version=version, name="CompletionResponse")


@dataclass
class Sent:
    """A group that nobody else is in."""

    tensors: list[Tensor] = field(default_factory=list)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self.tensors += tensors

    def close(self) -> None:
        """Nothing is open."""


def test_weight_transfer_to_vllm_is_announced_in_the_words_of_its_own_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broadcasts themselves need two GPUs: not run."""
    group = Sent()
    monkeypatch.setattr(vllm_transfer.nccl, "unique_id", lambda: bytes(128))
    monkeypatch.setattr(vllm_transfer, "joined", lambda *given, **settings: group)
    program = StandIn(reply=answer_of)
    buckets = [{"a.weight": torch.zeros(2, 3)}, {"b.weight": torch.zeros(4, dtype=torch.bfloat16)}]
    with (
        listening(program.application()) as url,
        client_of(url, publication=PublicationKind.collective) as remote,
    ):
        remote.broadcast(buckets, 3)
        remote.broadcast(buckets, 4)
        assert remote.versions == {url: 4}
    paths = [path for path, _ in program.calls]
    once = ["/start_weight_update", "/update_weights", "/update_weights", "/finish_weight_update", "/resume"]
    assert paths == ["/pause?mode=keep", "/init_weight_transfer_engine", *once, "/pause?mode=keep", *once]
    found = SCHEMAS["vllm-0.32.0"]
    for path, body in program.calls:
        assert set(body or {}) <= set(found["routes"][path.partition("?")[0]]), path
    bodies = [body for _, body in program.calls]
    validate(bodies[1]["init_info"], version="vllm-0.32.0", name="NCCLWeightTransferInitInfo")
    assert len(base64.b64decode(bodies[1]["init_info"]["nccl_unique_id_b64"])) == 128
    infos = [body["update_info"] for path, body in program.calls if path == "/update_weights"]
    for info in infos:
        validate(info, version="vllm-0.32.0", name="NCCLWeightTransferUpdateInfo")
    assert infos[1] == {"names": ["b.weight"], "dtype_names": ["bfloat16"], "shapes": [[4]]}
    assert len(group.tensors) == 4


def test_weight_transfer_to_an_older_vllm_is_refused_by_name() -> None:
    assert "nccl_unique_id_b64" not in json.dumps(SCHEMAS["vllm-0.29.0"]["schemas"])
    program = StandIn(reply=answer_of, program="0.29.0")
    with (
        listening(program.application()) as url,
        client_of(url, publication=PublicationKind.collective) as remote,
        pytest.raises(Refusal, match="nccl_unique_id_b64 .* needs vLLM 0.32.0 or newer"),
    ):
        remote.broadcast([{"a.weight": torch.zeros(2)}], 1)
    assert program.calls == []


@pytest.mark.parametrize("version", ["vllm-0.29.0", "vllm-0.32.0"])
def test_every_control_call_to_vllm_has_parameters_of_its_route(version: str) -> None:
    program = StandIn(reply=answer_of, program=version.partition("-")[2])
    with listening(program.application()) as url:
        for pause in PauseMode:
            with client_of(url, pause=pause) as remote:
                remote.publish("step-4", 4)
    routes = SCHEMAS[version]["routes"]
    for path, body in program.calls:
        name, _, query = path.partition("?")
        if name != "/collective_rpc":  # its method and keywords are those of the worker
            given = set(body or {}) | {part.partition("=")[0] for part in query.split("&") if part}
            assert given <= set(routes[name]), path


def start_lines() -> dict[str, list[list[str]]]:
    """The words of every start line of the how-to, by program."""
    page = ROOT / "docs" / "howto" / "engines.md"
    commands = [
        shlex.split(block.text.replace("\\\n", " ")) for block in blocks(page) if block.language == "bash"
    ]
    vllm = [words[words.index("vllm") :] for words in commands if "vllm" in words and "serve" in words]
    sglang = [
        words[words.index("sglang.launch_server") :] for words in commands if "sglang.launch_server" in words
    ]
    return {"vllm": vllm, "sglang": sglang}


@pytest.mark.parametrize("version", SCHEMAS)
def test_every_flag_of_the_how_to_is_one_of_the_command_line(version: str) -> None:
    lines = start_lines()[version.partition("-")[0]]
    assert lines
    for words in lines:
        flags = {word for word in words if word.startswith("--")}
        assert flags <= set(SCHEMAS[version]["flags"]), version
        assert "--enable-return-routed-experts" in flags
