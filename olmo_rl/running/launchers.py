"""Which rank a launcher (torchrun, srun) made of this process, by the variables that it sets.

Refused: a launcher whose world is not `trainer.devices` x `trainer.num_nodes`. No torch: every command asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from olmo_rl.backends import missing
from olmo_rl.config import Config
from olmo_rl.types import Refusal


def launched_rank(environ: Mapping[str, str]) -> int | None:
    """This process's rank of a launcher's world; None where no launcher started it."""
    if _by_torchrun(environ):
        return int(environ["RANK"])
    return int(environ["SLURM_PROCID"]) if _by_srun(environ) else None


def launched_world(environ: Mapping[str, str]) -> int:
    """The ranks of a launcher's world; 1 where no launcher started this process."""
    if _by_torchrun(environ):
        return int(environ["WORLD_SIZE"])
    return int(environ["SLURM_NTASKS"]) if _by_srun(environ) else 1


def rank_variables(environ: Mapping[str, str], *, config: Config) -> dict[str, str] | None:
    """torchrun's variables for the rank that a launcher made of this process; None where no launcher did.

    Raises Refusal where the launcher's world contradicts the configuration: ranks would wait for absent ones.
    """
    trainer = config.trainer
    ours = f"trainer.devices={trainer.devices} x trainer.num_nodes={trainer.num_nodes}"
    if _by_torchrun(environ):
        absent = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if absent:
            raise Refusal(f"RANK is set but not {', '.join(absent)}: start the ranks with launch/torchrun.sh")
        local = environ.get("LOCAL_WORLD_SIZE", str(trainer.devices))
        if int(environ["WORLD_SIZE"]) != trainer.world_size or int(local) != trainer.devices:
            raise Refusal(
                f"the launcher started WORLD_SIZE={environ['WORLD_SIZE']} ranks, {local} of them here, but "
                f"{ours}: give the launcher and trainer.devices, trainer.num_nodes the same numbers"
            )
        return {}
    if not _by_srun(environ):
        return None
    tasks = int(environ["SLURM_NTASKS"])
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", str(trainer.devices))
    if tasks != trainer.world_size or not re.fullmatch(rf"{trainer.devices}(\(x\d+\))?", layout):
        per_node = environ.get("SLURM_NTASKS_PER_NODE", layout)
        raise Refusal(
            f"srun started SLURM_NTASKS={tasks} ranks (SLURM_NTASKS_PER_NODE={per_node}), but {ours}: "
            "give --ntasks-per-node and trainer.devices, --nodes and trainer.num_nodes the same numbers"
        )
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(trainer.devices),
        "GROUP_RANK": environ.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_port(environ)),
    }


def rank_faults(config: Config, *, environ: Mapping[str, str]) -> list[str]:
    """Why no rank of this job can start here: what the machine lacks, a launcher of another world, and
    several nodes without a launcher.
    """
    reasons = missing(config)
    try:
        launched = rank_variables(environ, config=config) is not None
    except Refusal as refusal:
        return [*reasons, *refusal.reasons]
    if not launched and config.trainer.num_nodes > 1:
        reasons.append(
            f"trainer.num_nodes={config.trainer.num_nodes} needs a launcher that starts the ranks of every "
            "node: use launch/slurm.sbatch or launch/torchrun.sh, or set trainer.num_nodes=1"
        )
    return reasons


def _first_host(environ: Mapping[str, str]) -> str:
    """The host of rank 0: the first one of a list such as `gpu[03-05,9],login`."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", hosts)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def _port(environ: Mapping[str, str]) -> int:
    """A port that other jobs of a node do not use, nor other steps of this one."""
    step = environ["SLURM_STEP_ID"]
    return 15000 + (int(environ["SLURM_JOB_ID"]) + 97 * (int(step) if step.isdecimal() else 0)) % 10000


def _by_torchrun(environ: Mapping[str, str]) -> bool:
    return "RANK" in environ and "WORLD_SIZE" in environ


def _by_srun(environ: Mapping[str, str]) -> bool:
    """A batch script and an interactive shell carry SLURM's variables too, but are no ranks."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and "SLURM_PTY_PORT" not in environ
