"""Tables of Hugging Face datasets: a directory that datasets saved, or a name on the Hub. No torch here.

Refuses what cannot be read, by key, and reports a Hub that is not reachable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olmo_rl.types import Refusal

_SAVED = ("dataset_dict.json", "state.json")


def load_table(path: str, *, subset: str | None, split: str, where: str) -> Any:
    """The rows of `split`, mapped from disk, with every column; `where` opens the message of a Refusal."""
    import datasets  # seconds to import, needed for this format alone

    try:
        if any((Path(path) / name).is_file() for name in _SAVED):
            table = datasets.load_from_disk(path)
            if isinstance(table, datasets.DatasetDict):
                if split not in table:
                    raise Refusal(f"{where}: no split {split!r}, there are {', '.join(table)}")
                table = table[split]
        else:
            table = datasets.load_dataset(path, subset, split=split)
    except ConnectionError as error:  # also of a cache that lacks it while offline
        raise Refusal(
            f"{where}: no directory of that name here, and the Hugging Face Hub is not reachable "
            f"({_first_line(error)}): name a directory that datasets saved, or load it once where the Hub is "
            "reachable, into the cache of this machine"
        ) from None
    except (
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
        datasets.exceptions.DatasetsError,
    ) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{where}: {_first_line(error)}") from None
    # A saved format hides columns, or turns lists into arrays.
    return table.with_format(None)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
