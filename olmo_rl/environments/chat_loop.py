"""A harness of the library that runs its chat loop in this process: no program is fetched, nothing needs a
network. The library finds it as the module `olmo_rl_chat`.

A turn asks the model and calls the tools that it names, until it names none. A call that cannot be made (an
unknown tool, arguments that are no JSON object, an error of the tool, too long a call) is answered to the
model with the reason and counted in `trace.info["chat_loop"]`: it is never the end of an episode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import HarnessError
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import connect_mcp, mcp_content_to_chat_content
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatLoop"]
MODULE = "olmo_rl_chat"
_SHOWN = 200


class ChatLoopConfig(HarnessConfig):
    """The settings of every harness; programs and skills have no part in this one."""


class ChatLoop(Harness[ChatLoopConfig]):
    """Chat completions and tools over MCP, one conversation after another on an endpoint of the library."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Run one segment to its last reply; the trace records what was said."""
        del runtime
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system is not None else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            tools = await _tools(mcp_urls, stack=stack, seconds=self.config.tool_timeout)
            headers = {"Authorization": f"Bearer {secret}"}
            timeout = aiohttp.ClientTimeout(total=None)  # the deadline of the episode bounds it
            client = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
            while True:
                message = await _ask(
                    client, endpoint, model=ctx.model, messages=messages, tools=tools, trace=trace
                )
                if message is None:
                    break
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    break
                messages += [await tools.answer(call, trace=trace) for call in calls]
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _ask(
    client: aiohttp.ClientSession,
    endpoint: str,
    *,
    model: str,
    messages: list[dict[str, Any]],
    tools: _Tools,
    trace: Any,
) -> dict[str, Any] | None:
    """The model's next message; None where a limit or a stop condition refused the turn."""
    body: dict[str, Any] = {"model": model, "messages": messages}
    if tools.schemas:
        body["tools"] = tools.schemas
    async with client.post(f"{endpoint}/chat/completions", json=body) as answer:
        text = await answer.text()
        if answer.status == 200:
            message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
            return message
    if trace.stop_condition is not None:
        return None
    raise HarnessError(f"the model's endpoint answered {answer.status}: {text[:_SHOWN]}")


class _Tools:
    """The tools of an episode and their servers."""

    def __init__(
        self,
        schemas: list[dict[str, Any]],
        places: Mapping[str, tuple[str, str]],
        servers: Mapping[str, Any],
        *,
        seconds: float,
    ) -> None:
        self.schemas = schemas
        self._places, self._servers, self._seconds = places, servers, seconds

    async def answer(self, call: Mapping[str, Any], *, trace: Any) -> dict[str, Any]:
        """The message that answers a call."""
        counts = trace.info.setdefault("chat_loop", {"tool_calls": 0, "tool_errors": 0})
        counts["tool_calls"] += 1
        content, fault = await self._result(call.get("function") or {})
        counts["tool_errors"] += fault
        return {"role": "tool", "tool_call_id": call.get("id", ""), "content": content}

    async def _result(self, function: Mapping[str, Any]) -> tuple[Any, bool]:
        """What the tool returned, or the reason why it did not, and whether that is a fault."""
        name, text = function.get("name"), function.get("arguments")
        if name not in self._places:
            return f"error: no tool {str(name)[:_SHOWN]!r}", True
        try:
            arguments = json.loads(text) if isinstance(text, str) else text
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return "error: the arguments are no JSON object", True
        server, tool = self._places[str(name)]
        try:
            async with asyncio.timeout(self._seconds):
                result = await self._servers[server].run(lambda client: client.call_tool(tool, arguments))
        except TimeoutError:
            return f"error: no result within {self._seconds:g} s", True
        return mcp_content_to_chat_content(result.content), bool(result.is_error)


async def _tools(urls: Mapping[str, str], *, stack: AsyncExitStack, seconds: float) -> _Tools:
    if not urls:
        return _Tools([], {}, {}, seconds=seconds)
    servers = {name: {"url": url, "timeout": seconds} for name, url in urls.items()}
    schemas, places, connections = await connect_mcp({"mcpServers": servers}, stack)
    return _Tools(schemas, places, connections, seconds=seconds)
