"""Hydra finds hydra/launcher=slurm here: it looks for plugins in packages of `hydra_plugins` only.

Without the extra `slurm` there is nothing to find; every command imports this.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("hydra_plugins.hydra_submitit_launcher") is not None and find_spec("submitit") is not None:
    from hydra_plugins.olmo_rl_slurm._sweep import SlurmSweep as SlurmSweep
