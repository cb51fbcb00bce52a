"""Whether this machine can run the configuration: Python and torch, devices, extras, room on the disk."""

from __future__ import annotations

import math
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path

from olmo_rl.backends import missing
from olmo_rl.checks import HERE, Finding
from olmo_rl.config import Config, OptimizerKind

PUBLISHED = 2  # directories of weights that a run keeps for engines
MOMENTS = {OptimizerKind.adamw: 2, OptimizerKind.muon: 1}


def check_torch(config: Config) -> Iterable[Finding]:
    """The build that is imported here."""
    import torch

    cuda = torch.version.cuda
    needs_cuda = config.trainer.accelerator != "cpu"
    built = "for CPUs" if cuda is None else f"for CUDA {cuda}"
    yield Finding(
        name="torch",
        subject=HERE,
        good=cuda is not None or not needs_cuda,
        found=f"{torch.__version__} {built}, Python {platform.python_version()}",
        fix="install a build for CUDA, or choose trainer=cpu",
    )


def check_devices(config: Config) -> Iterable[Finding]:
    """As many GPUs as ranks of one node."""
    import torch

    if config.trainer.accelerator == "cpu":
        return
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(number) for number in range(count)}))
    yield Finding(
        name="devices",
        subject=HERE,
        good=count >= config.trainer.devices,
        found=f"{count} GPUs{names and f' ({names})'}, trainer.devices={config.trainer.devices}",
        fix="set trainer.devices to the number of GPUs of one node",
    )


def check_extras(config: Config) -> Iterable[Finding]:
    """Packages and compilers that the configuration needs."""
    lacking = missing(config)
    if not lacking:
        yield Finding(name="extras", subject=HERE, good=True, found="nothing is lacking")
    for reason in lacking:
        found, _, fix = reason.partition(": ")
        yield Finding(name="extras", subject=HERE, good=False, found=found, fix=fix)


def check_disk(config: Config) -> Iterable[Finding]:
    """Room for one checkpoint, and for the weights that engines read."""
    from olmo_rl.policy.weights import parameter_shapes

    parameters = sum(math.prod(shape) for shape in parameter_shapes(config.model).values())
    values = 1 + MOMENTS[config.optim.kind] + (PUBLISHED if config.asks_engines else 0)
    needed = 4 * parameters * values
    place = Path(config.run_dir or ".").absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    yield Finding(
        name="disk",
        subject=HERE,
        good=free >= needed,
        found=f"{free / 2**30:,.1f} GiB free, a checkpoint and published weights take {needed / 2**30:,.2f}",
        fix="free some, or start in a directory of another disk",
    )
