"""What rank 0 of a launcher's world decides for all ranks before there is a process group: whether the job
is refused, the run directory, the checkpoint or the weights to start from, and what it found in files.

Under torchrun the ranks meet in the agent's store. Under srun rank 0 serves the store, where the process
group then meets too. A rank meets rank 0 within `strategy.timeout_seconds` and waits for its verdict for two
hours at most: rank 0 may read large files. It ends at once where rank 0 refused the run, and where the store
is gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any

from olmo_rl.config import Config
from olmo_rl.running.launchers import launched_rank, launched_world, rank_variables
from olmo_rl.types import Refusal

VERDICT_SECONDS = 7200.0  # that rank 0 has to judge files
_POLL_SECONDS = 0.2
_FAREWELL_SECONDS = 10.0  # for ranks that start later
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class Announcement:
    """What rank 0 announces to the other ranks, once."""

    def __init__(self, store: Any, *, run: int) -> None:
        self._store = store
        self._run = run
        self._announced = False
        self._settled = False

    def settle(self, *, given: Config, settled: Config, facts: Mapping[str, Any]) -> None:
        """Announce the configuration to run, as its differences from the one that every rank was given, and
        facts about its files, values of JSON.
        """
        self._settled = True
        self._announce(json.dumps([differences(given, settled), facts]))

    def refuse(self) -> None:
        """Announce that there is no run, and let the other ranks read it before the store goes."""
        if self._announced or self._store is None:
            return
        self._announce("null")
        others, deadline = launched_world(os.environ) - 1, time.monotonic() + _FAREWELL_SECONDS
        while self._store.add(_read_key(self._run), 0) < others and time.monotonic() < deadline:
            time.sleep(0.02)

    def _announce(self, text: str) -> None:
        self._announced = True
        if self._store is not None:
            self._store.set(_key(self._run), text)

    def close(self) -> None:
        """Delete a settled configuration, which every rank has read once the run is over."""
        if self._store is not None and self._settled:
            self._store.delete_key(_key(self._run))


@contextmanager
def announcing(config: Config, *, run: int) -> Iterator[Announcement]:
    """On rank 0: serve what this block announces, until it ends. A block that raises before refuses. `run`:
    its number among the runs of these processes.
    """
    store = _store(config) if launched_world(os.environ) > 1 else None
    announcement, before = Announcement(store, run=run), os.environ.get(_AGENT_STORE)
    if store is not None:
        os.environ[_AGENT_STORE] = "True"  # the process group meets in it too
    try:
        yield announcement
        announcement.close()
    except BaseException:
        announcement.refuse()
        raise
    finally:
        if store is not None and before is None:
            os.environ.pop(_AGENT_STORE, None)


def announced(config: Config, *, run: int) -> tuple[Config, dict[str, Any]]:
    """On another rank: return the configuration that rank 0 settled for this run, and its facts. Raises
    Refusal where it refused the run, announced nothing in time, or is gone.
    """
    limit = config.strategy.timeout_seconds
    try:
        store = _store(config)
        text = _verdict(store, run=run)
        store.add(_read_key(run), 1)
    except RuntimeError as error:  # torch's DistError: the store is absent, silent, or gone
        reason = str(error).partition("\n")[0]
        raise Refusal(
            f"strategy.timeout_seconds={limit}: rank 0 announced no run directory in time ({reason})"
        ) from error
    found = json.loads(text)
    if found is None:
        raise Refusal("rank 0 refused the run")
    os.environ[_AGENT_STORE] = "True"
    values, facts = found
    return changed(config, values), facts


def _verdict(store: Any, *, run: int) -> str:
    """Wait for the announcement of a run, where signals are handled between two looks."""
    deadline = time.monotonic() + VERDICT_SECONDS
    while not store.check([_key(run)]):
        if time.monotonic() > deadline:
            raise Refusal(
                f"rank 0 announced no run directory within {VERDICT_SECONDS:.0f} s: look at its log"
            )
        time.sleep(_POLL_SECONDS)
    return str(store.get(_key(run)).decode())


def _key(run: int) -> str:
    """The key of a run of this attempt: torchrun restarts all ranks of a job in one store."""
    return f"olmo_rl/settled/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{run}"


def _read_key(run: int) -> str:
    """The key of how many ranks have read it."""
    return f"{_key(run)}/read"


def _store(config: Config) -> Any:
    """A client of the store of this world; on rank 0 its server, where no agent serves it."""
    variables = rank_variables(os.environ, config=config)
    assert variables is not None, "only ranks of a launcher meet"
    environ = {**os.environ, **variables}
    from torch.distributed import TCPStore

    serves = launched_rank(os.environ) == 0 and environ.get(_AGENT_STORE) != "True"
    return TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        world_size=None,
        is_master=serves,
        wait_for_workers=False,
        timeout=timedelta(seconds=config.strategy.timeout_seconds),
    )


def differences(given: Any, settled: Any, *, prefix: str = "") -> dict[str, Any]:
    """Return the values of `settled` that differ from `given`, by dotted key."""
    found: dict[str, Any] = {}
    for field in fields(given):
        before, after = getattr(given, field.name), getattr(settled, field.name)
        if is_dataclass(before):
            found |= differences(before, after, prefix=f"{prefix}{field.name}.")
        elif before != after:
            found[f"{prefix}{field.name}"] = after
    return found


def changed(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration with values of dotted keys replaced."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        part = changed(getattr(config, name), {rest: value}) if rest else value
        config = replace(config, **{name: part})
    return config
