"""Ranks of one job: who this process is, and how its entry runs.

A launcher (torchrun, srun) names every rank in its environment: then this process is one rank and runs the
entry. Without a launcher one process is a world of its own, and several devices of one node become child
processes that this process supervises. Refused: a launcher whose world is not `trainer.devices` x
`trainer.num_nodes`, and several nodes without a launcher. Nothing here joins a process group: the entry does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from olmo_rl.backends import missing
from olmo_rl.config import Config
from olmo_rl.training.rank import (
    Entry,
    call,
    ended_by_signals,
    identity_of,
    leave_process_group,
    rendezvous,
    threads_per_rank,
)
from olmo_rl.training.supervisor import supervise
from olmo_rl.types import Refusal

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment


def run_ranks(entry: Entry | str, config: Config) -> None:
    """Run `entry(config)` on every rank of the job and return when all ended well. An entry given by name,
    `module:function`, is imported by ranks only.

    Raises what one process would raise: the Refusal of a rank, SystemExit with a rank's exit code (75 = can
    be resumed), Interrupted(128 + signal) where ranks ended of a signal sent to us, RankFailed for the rest.
    The first cause wins; the other ranks are ended. `entry` must be importable by name.
    """
    if lacking := missing(config):
        raise Refusal(lacking)
    launched = launched_rank(os.environ, config=config)
    if launched is not None:
        _run_launched(entry, config, variables=launched)
    elif config.trainer.world_size == 1:
        _run_alone(entry, config)
    elif config.trainer.num_nodes == 1:
        supervise(entry, config)
    else:
        raise Refusal(
            f"trainer.num_nodes={config.trainer.num_nodes} needs a launcher that starts the ranks of every "
            "node: use launch/slurm.sbatch or launch/torchrun.sh, or set trainer.num_nodes=1"
        )


def cluster_environment() -> ClusterEnvironment:
    """What Lightning asks who this process is.

    Every rank under `run_ranks` carries torchrun's variables, also one that srun started: Lightning's own
    SLURM class would save and requeue inside a signal handler.
    """
    from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

    return TorchElasticEnvironment() if "RANK" in os.environ else LightningEnvironment()


def launched_rank(environ: Mapping[str, str], *, config: Config) -> dict[str, str] | None:
    """torchrun's variables for the rank that a launcher made of this process; None where no launcher did.

    Raises Refusal where the launcher's world contradicts the configuration: ranks would wait for absent ones.
    """
    trainer = config.trainer
    ours = f"trainer.devices={trainer.devices} x trainer.num_nodes={trainer.num_nodes}"
    if "RANK" in environ and "WORLD_SIZE" in environ:
        missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise Refusal(
                f"RANK is set but not {', '.join(missing)}: start the ranks with launch/torchrun.sh"
            )
        local = environ.get("LOCAL_WORLD_SIZE", str(trainer.devices))
        if int(environ["WORLD_SIZE"]) != trainer.world_size or int(local) != trainer.devices:
            raise Refusal(
                f"the launcher started WORLD_SIZE={environ['WORLD_SIZE']} ranks, {local} of them here, but "
                f"{ours}: give the launcher and trainer.devices, trainer.num_nodes the same numbers"
            )
        return {}
    # A batch script and an interactive shell in an allocation carry SLURM's variables too, but are no ranks.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or "SLURM_PTY_PORT" in environ:
        return None
    tasks = int(environ["SLURM_NTASKS"])
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", str(trainer.devices))
    if tasks != trainer.world_size or not re.fullmatch(rf"{trainer.devices}(\(x\d+\))?", layout):
        per_node = environ.get("SLURM_NTASKS_PER_NODE", layout)
        raise Refusal(
            f"srun started SLURM_NTASKS={tasks} ranks (SLURM_NTASKS_PER_NODE={per_node}), but {ours}: "
            "give --ntasks-per-node and trainer.devices, --nodes and trainer.num_nodes the same numbers"
        )
    if trainer.num_nodes > 1 and "MASTER_ADDR" not in environ:
        raise Refusal("MASTER_ADDR is not set: start the ranks of several nodes with launch/slurm.sbatch")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(trainer.devices),
        "GROUP_RANK": environ.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": environ.get("MASTER_PORT", str(15000 + int(environ["SLURM_JOB_ID"]) % 10000)),
    }


def _run_launched(entry: Entry | str, config: Config, *, variables: Mapping[str, str]) -> None:
    with _environment(variables), ended_by_signals():
        if "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(threads_per_rank(config.trainer.devices))
        call(entry, config)
        leave_process_group()


def _run_alone(entry: Entry | str, config: Config) -> None:
    identity = identity_of(0, world_size=1)
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
