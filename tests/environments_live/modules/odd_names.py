"""The names of the tasks of `odd_games`, which tests read without the library."""

NAMES = (
    "good",
    "run raises",
    "run hangs",
    "run swallows its end",
    "nobody plays",
    "reward raises",
    "reward is nan",
    "no reward",
    "ten thousand turns",
    "beyond the context",
    "the loop blocks",
    "the process exits",
)
EACH = 20


def keys() -> list[tuple[str, str]]:
    """Name and key of every task, in order."""
    names = [name for name in NAMES for _ in range(EACH)]
    return [(name, f"{name} {place}") for place, name in enumerate(names)]
