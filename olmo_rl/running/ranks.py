"""Ranks of one job: who this process is, and how its entry runs.

A launcher (torchrun, srun) names every rank in its environment: then this process is one rank and runs the
entry. Without a launcher one process is a world of its own, and several devices of one node become child
processes that this process supervises. Refused: a launcher whose world is not `trainer.devices` x
`trainer.num_nodes`, and several nodes without a launcher. Nothing here joins a process group: the entry does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from olmo_rl.config import BalanceKind, Config
from olmo_rl.running.heartbeat import beating
from olmo_rl.running.launchers import launched_rank, rank_faults, rank_variables
from olmo_rl.running.rank_process import (
    Entry,
    Named,
    call,
    device_variables,
    end_with_launcher,
    ended_by_signals,
    identity_of,
    leave_process_group,
    rendezvous,
    threads_per_rank,
)
from olmo_rl.running.supervisor import supervise
from olmo_rl.types import Refusal, Topology


def run_ranks(entry: Entry | Named, config: Config) -> None:
    """Run `entry(config)` on every rank of the job and return when all ended well. A `Named` entry is
    imported by ranks only.

    Raises what one process would raise: the Refusal of a rank, SystemExit with a rank's exit code (75 = can
    be resumed), Interrupted(128 + signal) where ranks ended of a signal sent to us, RankFailed for the rest.
    The first cause wins; the other ranks are ended. `entry` must be importable by name.
    """
    if reasons := rank_faults(config, environ=os.environ):
        raise Refusal(reasons)
    variables = rank_variables(os.environ, config=config)
    with ended_by_signals():
        _compile_planner(config)
    if variables is not None:
        _run_launched(entry, config, variables=variables)
    elif config.trainer.world_size == 1:
        _run_alone(entry, config)
    else:
        supervise(entry, config)


def _compile_planner(config: Config) -> None:
    """Compile the kernels of a planner that searches, or find them in the cache on disk. A compilation takes
    ten seconds to minutes, and ranks that wait for rank 0 in a collective give up after their own limit: so
    it happens before there is a process group, in the parent of the ranks or in each launched rank.
    """
    if config.balance.kind is BalanceKind.none:
        return
    from olmo_rl.planning.planners import compile_kernels  # imports compiled kernels

    if not launched_rank(os.environ):
        print(
            f"balance={config.balance.kind.value}: compiling the planner's kernels, or loading them from the "
            "cache",
            flush=True,
        )
    layout = config.model.expert_layout if config.replay else None
    compile_kernels(config.balance, layout=layout, topology=Topology(config.world_size, config.ep_degree))


def _run_launched(entry: Entry | Named, config: Config, *, variables: Mapping[str, str]) -> None:
    end_with_launcher(os.environ)
    variables = {**variables, **device_variables(os.environ, config=config)}
    with _environment(variables), ended_by_signals():
        if "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(threads_per_rank(config.trainer.devices))
        with beating(config.run_dir, environ=os.environ, watches=True):
            call(entry, config)
        leave_process_group()


def _run_alone(entry: Entry | Named, config: Config) -> None:
    identity = {**identity_of(0, world_size=1), **device_variables(os.environ, config=config)}
    with ended_by_signals(), rendezvous(world_size=1) as variables, _environment({**variables, **identity}):
        try:
            call(entry, config)
        finally:  # the next job of a sweep starts with no group, also after a refusal
            leave_process_group()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a block; afterwards the environment is what it was, whatever the block did to it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
