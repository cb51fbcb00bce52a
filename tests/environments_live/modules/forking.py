"""Single turns, a harness that asks three times from one conversation, and tasks without end."""

import itertools

import aiohttp
import verifiers.v1 as vf

__all__ = ["ForkingHarness", "ForkingTaskset"]


class WordTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ForkingHarness(vf.Harness[vf.HarnessConfig]):
    """One shared turn, then two continuations of it."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        opening = [{"role": "user", "content": data.prompt}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as client:

            async def ask(messages):
                body = {"model": ctx.model, "messages": messages}
                async with client.post(f"{endpoint}/chat/completions", json=body) as answer:
                    return (await answer.json())["choices"][0]["message"]

            shared = [*opening, await ask(opening)]
            for word in ("left", "right"):
                await ask([*shared, {"role": "user", "content": word}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class ForkingTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield WordTask(vf.TaskData(prompt=f"go{number}"), self.config.task)
