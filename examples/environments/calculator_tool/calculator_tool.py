"""Sums of two numbers that a calculator computes: a tool over MCP, one server for all episodes."""

import random
import re

import verifiers.v1 as vf

__all__ = ["CalculatorTaskset"]
TASKS = 1000


class SumData(vf.TaskData):
    """One sum and its result."""

    answer: str


class CalculatorConfig(vf.SharedToolsetConfig):
    """The tool has no settings."""


class Calculator(vf.Toolset[CalculatorConfig]):
    """The tool, under its own name alone."""

    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, sum: str) -> str:
        """Compute a sum such as 37+58."""
        match = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", sum)
        if match is None:
            raise ValueError("no sum of two numbers")
        return str(int(match[1]) + int(match[2]))


class SumTask(vf.Task[SumData]):
    """Ask, call, read, repeat."""

    @vf.reward
    async def right_through_the_tool(self, task: SumData, trace: vf.Trace) -> float:
        """1 for the result that the tool gave, 0.2 for a call that it could compute, else 0."""
        results = [
            str(message.content) for message in trace.tool_messages if str(message.content).isdecimal()
        ]
        if not results:
            return 0.0
        return 1.0 if task.answer in results and trace.last_reply == task.answer else 0.2

    @vf.metric
    async def success(self, task: SumData, trace: vf.Trace) -> float:
        """Whether the reward is 1."""
        return float(await self.right_through_the_tool(task, trace) == 1.0)

    def demonstration(self) -> tuple[list[dict], list[dict]]:
        """A conversation that earns the reward, and the tools that it has."""
        asked = str(self.data.prompt)
        arguments = {"sum": asked.removesuffix("=")}
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": "calculator", "arguments": arguments},
        }
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": self.data.answer},
            {"role": "assistant", "content": self.data.answer},
        ]
        parameters = {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}
        return messages, [{"type": "function", "function": {"name": "calculator", "parameters": parameters}}]


class CalculatorTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """`TASKS` sums of two-digit numbers, the same ones always."""

    def load(self) -> list[SumTask]:
        """Every task, in order."""
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        chosen = random.Random(0).sample(pairs, TASKS)
        return [SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task) for a, b in chosen]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        """One server for all episodes."""
        del config
        return [Calculator(CalculatorConfig())]


if __name__ == "__main__":
    Calculator.run()
