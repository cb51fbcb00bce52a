"""Tasks whose episodes go wrong in one way each, by name; `good` is as it should be."""

import asyncio
import sys
import time

import verifiers.v1 as vf
from odd_names import keys

__all__ = ["OddEnv", "OddTaskset"]


class OddTask(vf.Task[vf.TaskData]):
    """One turn, unless the environment has it otherwise."""

    @property
    def key(self) -> str:
        return f"{self.data.name} {self.data.idx}"

    @vf.reward
    async def judged(self, task: vf.TaskData, trace: vf.Trace) -> dict:
        if task.name == "reward raises":
            raise ZeroDivisionError("of a reward")
        if task.name == "no reward":
            return {}
        return {"judged": float("nan") if task.name == "reward is nan" else float(len(trace.last_reply))}

    def demonstration(self) -> list[dict]:
        return [{"role": "user", "content": str(self.data.prompt)}, {"role": "assistant", "content": "ok"}]


class OddConfig(vf.EnvConfig):
    """One agent."""

    agent: vf.AgentConfig = vf.AgentConfig()


class OddEnv(vf.Env[OddConfig]):
    """What goes wrong while an episode runs."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        match task.data.name:
            case "run raises":
                raise LookupError("of an environment")
            case "run hangs":
                await asyncio.sleep(3600)
            case "run swallows its end":
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        continue
            case "nobody plays":
                return
            case "the loop blocks":
                time.sleep(3600)
            case "the process exits":
                sys.exit(3)
            case "ten thousand turns" | "beyond the context":
                async with agents.agent.interaction(task) as talk:
                    segment = await talk.turn()
                    for _ in range(10_000):
                        if segment.terminated:
                            break
                        more = "x" * (100 if task.data.name == "beyond the context" else 1)
                        segment = await talk.turn(more)
                return
        await agents.agent.run(task)


class OddTaskset(vf.Taskset[OddTask, vf.TasksetConfig]):
    """Several tasks of every name, so that each has some to train on."""

    def load(self) -> list[OddTask]:
        return [OddTask(vf.TaskData(prompt="?", name=name), self.config.task) for name, _ in keys()]
