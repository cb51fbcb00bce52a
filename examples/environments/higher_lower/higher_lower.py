"""A guessing game of two turns against a player that is code."""

import verifiers.v1 as vf

__all__ = ["HigherLowerEnv", "HigherLowerTaskset"]


class NumberData(vf.TaskData):
    """The number to guess."""

    number: int


class GuessTask(vf.Task[NumberData]):
    """Guess, hear where the number lies, guess again."""

    @vf.reward
    async def second_guess(self, task: NumberData, trace: vf.Trace) -> float:
        """1 for the number, 0.3 for the right side of the first guess, else 0."""
        guesses = [_number(message.content) for message in trace.assistant_messages]
        if len(guesses) != 2 or guesses[1] is None:
            return 0.0
        if guesses[1] == task.number:
            return 1.0
        first = guesses[0]
        sides = first is not None and (guesses[1] > first) == (task.number > first) and guesses[1] != first
        return 0.3 if sides else 0.0


class HigherLowerConfig(vf.EnvConfig):
    """One agent plays."""

    player: vf.AgentConfig = vf.AgentConfig()


class HigherLowerEnv(vf.Env[HigherLowerConfig]):
    """The other player: it answers the first guess."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Two turns of one conversation."""
        async with agents.player.interaction(task) as talk:
            first = await talk.turn()
            guess = _number(first.last_reply)
            number = task.data.number
            hint = (
                "?"
                if guess is None
                else "right"
                if guess == number
                else "higher"
                if guess < number
                else "lower"
            )
            if not first.terminated:
                await talk.turn(hint)


class HigherLowerTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """Numbers from 0 to 9, each a hundred times."""

    def load(self) -> list[GuessTask]:
        """Every task, in order."""
        return [
            GuessTask(NumberData(prompt="0-9?", number=number, name=f"{number}-{round}"), self.config.task)
            for round in range(100)
            for number in range(10)
        ]


def _number(text: str | None) -> int | None:
    words = (text or "").strip()
    return int(words) if len(words) == 1 and words.isdecimal() else None
