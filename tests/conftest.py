"""What every test runs under: one thread, no launcher. The time limit of a test stands in pyproject.toml."""

from __future__ import annotations

import os

# Before torch is imported, here and in every process that a test starts: two cores, several processes.
os.environ["OMP_NUM_THREADS"] = "1"
# A suite that runs inside a SLURM job or under torchrun must not believe that it is one of the ranks.
for _name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
    del os.environ[_name]
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
