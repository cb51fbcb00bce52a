"""Calls and episodes as the classes of the verifiers library write them, for tests that do not have it.

`python tests/environment_dumps/generate.py` needs the extra `environments`. It writes beside itself:

calls.json     two turns of a conversation, as `renderers.client.generate` sends them over HTTP
episodes.msgpack  records of traces that the library's graph committed, turn by turn, each with what the
    library itself makes of every branch: tokens, mask, log-probs, routes
SOURCES.json   the releases
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import verifiers.v1 as vf
from aiohttp import web
from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate
from renderers.configs import CustomRendererConfig
from verifiers.v1 import graph
from verifiers.v1.clients.train import response_from_generate
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.trace import AgentInfo, TraceTask

sys.path.insert(0, str(Path(__file__).parents[2]))
from olmo_rl.environments.byte_tokenizer import write_byte_tokenizer  # noqa: E402
from olmo_rl.environments.records import array_record, episode_record  # noqa: E402

HERE = Path(__file__).parent
LAYERS, TOP_K, EXPERTS = 2, 2, 4
EOS = 258
PLAIN = {"name": "custom", "import_path": "olmo_rl.environments.plain.PlainRenderer"}


def renderer() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        write_byte_tokenizer(Path(directory))
        return create_renderer(load_tokenizer(directory), CustomRendererConfig.model_validate(PLAIN))


PLAIN_RENDERER = renderer()
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "",
        "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]},
    },
}


def written(text: str, *, ends: bool = True) -> list[int]:
    return list(text.encode()) + [EOS] * ends


def routes_of(tokens: list[int], *, salt: int = 0) -> np.ndarray:
    """uint8 [T, L, K]: two different experts of each token, by its place and id."""
    first = [
        [(place + token + layer + salt) % EXPERTS for layer in range(LAYERS)]
        for place, token in enumerate(tokens)
    ]
    rows = np.array(first, dtype=np.uint8)
    return np.stack([rows, (rows + 1) % EXPERTS], axis=-1)


@dataclass
class Conversation:
    """A trace that grows as the interception server grows one: prepare a turn, render, commit an answer."""

    trace: Any

    def turn(self, messages: list[Any], answer: list[int], *, salt: int = 0, finish: str = "stop") -> Any:
        tools = [vf.Tool(name="calculator", description="", parameters=TOOL["function"]["parameters"])]
        pending = graph.prepare_turn(self.trace, messages, tools)
        wire = [_wire(message) for message in messages]
        before = pending.previous_renderer_token_ids()
        bridged = None
        if before is not None:
            bridged = PLAIN_RENDERER.bridge_to_next_turn(*before, wire[pending.tail_start :], tools=[TOOL])
        rendered = bridged or PLAIN_RENDERER.render(wire, tools=[TOOL], add_generation_prompt=True)
        prompt = list(rendered.token_ids)
        start = max(pending.path_len - 1, 0) if bridged is not None else 0
        read = routes_of(prompt + answer, salt=salt)[start:-1]
        parsed = PLAIN_RENDERER.parse_response(answer, tools=[TOOL])
        result = {
            "prompt_ids": prompt,
            "completion_ids": answer,
            "completion_logprobs": [-0.01 * (place + 1) for place in range(len(answer))],
            "content": parsed.content,
            "tool_calls": parsed.tool_calls,
            "finish_reason": finish,
            "routed_experts": {
                "data": base64.b64encode(read.tobytes()).decode(),
                "shape": list(read.shape),
                "start": start,
                "dtype": "uint8",
            },
            "prompt_attribution": rendered,
        }
        response = response_from_generate(result, "policy", pending if bridged is not None else None)
        node = pending.commit(response)
        self.trace.calls.append(vf.ModelCall(node=node, finish_reason=finish))
        return response.message


def _wire(message: Any) -> dict[str, Any]:
    from verifiers.v1.dialects.chat import message_to_wire

    return message_to_wire(message)


def trace_of(name: str, prompt: str, *, agent: str = "agent") -> Any:
    return vf.Trace(
        id=name,
        task=TraceTask(type="Task", data=vf.TaskData(idx=0, prompt=prompt)),
        agent=AgentInfo(config=AgentConfig(runtime={"type": "subprocess"}), name=agent),
    )


def finished(trace: Any, *, reward: float | None, ok: bool = True) -> Any:
    if reward is not None:
        trace.record_reward("right", reward)
    trace.record_metric("length", len(trace.nodes))
    trace.stop("agent_completed")
    trace.ok = ok
    return trace


def tool_episode() -> Any:
    """Two turns with a tool between them; the second finds other routes for what it reads again."""
    trace = trace_of("tool", "37+58=")
    talk = Conversation(trace)
    opening = vf.UserMessage(content="37+58=")
    call = talk.turn([opening], written("calculator(37+58)"), finish="tool_calls")
    result = vf.ToolMessage(content="95", tool_call_id=call.tool_calls[0].id)
    talk.turn([opening, call, result], written("95"), salt=1)
    trace.info["chat_loop"] = {"tool_calls": 1, "tool_errors": 0}
    return finished(trace, reward=1.0)


def forked_episode() -> Any:
    """A turn that two later ones share: its tokens belong to two branches."""
    trace = trace_of("fork", "go")
    talk = Conversation(trace)
    opening = vf.UserMessage(content="go")
    shared = talk.turn([opening], written("ab"))
    talk.turn([opening, shared, vf.UserMessage(content="left")], written("cde"))
    talk.turn([opening, shared, vf.UserMessage(content="right")], written("f"))
    return finished(trace, reward=0.5)


def cut_episode() -> Any:
    """A first answer without its end token, which the renderer adds."""
    trace = trace_of("cut", "go")
    talk = Conversation(trace)
    opening = vf.UserMessage(content="go")
    cut = talk.turn([opening], written("abcd", ends=False), finish="length")
    talk.turn([opening, cut, vf.UserMessage(content="more")], written("e", ends=False), finish="length")
    return finished(trace, reward=0.0)


def episodes() -> dict[str, Any]:
    late = finished(trace_of("late", "go"), reward=0.0)
    late.record_timeout("agent")
    failed = trace_of("failed", "go")
    Conversation(failed).turn([vf.UserMessage(content="go")], written("a"))
    failed.record_error(vf.ProviderError("the engine is gone"))
    unjudged = trace_of("unjudged", "go")
    Conversation(unjudged).turn([vf.UserMessage(content="go")], written("a"))
    two = [trace_of(name, "go", agent=name) for name in ("second", "first")]
    for trace in two:
        Conversation(trace).turn([vf.UserMessage(content="go")], written("x"))
        finished(trace, reward=1.0 if trace.id == "first" else -1.0)
    fixed = trace_of("judge", "go", agent="judge")
    fixed.agent.trainable = False
    Conversation(fixed).turn([vf.UserMessage(content="go")], written("y"))
    made = {
        "tool": [tool_episode()],
        "fork": [forked_episode()],
        "cut": [cut_episode()],
        "late": [late],
        "failed": [failed],
        "empty": [finished(trace_of("empty", "go"), reward=0.0)],
        "unjudged": [finished(unjudged, reward=None)],
        "two": [*two, finished(fixed, reward=0.0)],
    }
    return {
        name: vf.Episode(task=traces[0].task, traces=traces, ok=all(trace.ok for trace in traces))
        for name, traces in made.items()
    }


def branch_of(branch: Any) -> dict[str, Any]:
    """What the library makes of a branch."""
    return {
        "tokens": list(branch.token_ids),
        "mask": list(branch.sampled_mask),
        "logprobs": list(branch.logprobs),
        "routes": dict(array_record(branch.routed_experts)),
    }


def records() -> dict[str, Any]:
    found = {}
    for slot, (name, episode) in enumerate(episodes().items()):
        branches = [
            [branch_of(branch) for branch in trace.branches] for trace in episode.traces if trace.nodes
        ]
        found[name] = {"record": episode_record(episode, slot=slot), "branches": branches}
    return found


async def calls() -> list[dict[str, Any]]:
    """Both turns of a conversation through the library's client to a server that notes what it is sent."""
    heard: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        body = await request.json()
        kept = {name: request.headers[name] for name in ("X-Session-ID", "Authorization")}
        heard.append({"path": request.path, "headers": kept, "body": body})
        ids = written("95")
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in ids]
        choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"choices": [choice]})

    async def models(request: web.Request) -> web.Response:
        heard.append({"path": request.path, "headers": {}, "body": None})
        return web.json_response({"data": [{"id": "policy", "max_model_len": 64}]})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", take)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = AsyncOpenAI(base_url=url, api_key="token", max_retries=0)
    opening = [{"role": "user", "content": "37+58="}]
    rendered = PLAIN_RENDERER.render(opening, tools=[TOOL], add_generation_prompt=True)
    common: dict[str, Any] = {
        "client": client,
        "renderer": PLAIN_RENDERER,
        "model": "policy",
        "tools": [TOOL],
        "extra_headers": {"X-Session-ID": "trace"},
    }
    first = await generate(
        messages=opening,
        prompt_ids=rendered.token_ids,
        prompt_attribution=rendered,
        sampling_params={"seed": 0},
        **common,
    )
    tail = [{"role": "tool", "tool_call_id": "call_0", "content": "95"}]
    bridged = PLAIN_RENDERER.bridge_to_next_turn(
        first["prompt_ids"], first["completion_ids"], tail, tools=[TOOL]
    )
    start = len(first["prompt_ids"]) + len(first["completion_ids"]) - 1
    await generate(
        messages=[*opening, {"role": "assistant", "content": "95"}, *tail],
        prompt_ids=bridged.token_ids,
        prompt_attribution=bridged,
        sampling_params={"seed": 0, "routed_experts_prompt_start": start},
        **common,
    )
    await client.close()
    await runner.cleanup()
    return heard


def main() -> None:
    sources = {name: version(name) for name in ("renderers", "verifiers")}
    (HERE / "SOURCES.json").write_text(json.dumps(sources, indent=1) + "\n")
    (HERE / "calls.json").write_text(json.dumps(asyncio.run(calls()), indent=1) + "\n")
    (HERE / "episodes.msgpack").write_bytes(msgpack.packb(records()))


if __name__ == "__main__":
    main()
