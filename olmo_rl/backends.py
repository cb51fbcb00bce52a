"""What each backend of a mixer can do, as data: no torch here, so that a login node can refuse a
configuration.

Owns the two tables of capabilities, what `auto` stands for, and what a machine lacks to run a configuration.
Refused where a run starts, by name and with the command to install it: a package that the chosen backend
needs and a compiler that `policy.compile` needs. Everything else is judged for the CONFIGURED device by
`refusals`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec

from olmo_rl.config import Config, LoggerKind
from olmo_rl.mixers import Family, families, has_window
from olmo_rl.types import Interrupted, Refusal
from olmo_rl.user_code import load_surrogate

NOT_INSTALLED = "is not installed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A capability row. `head_multiple`, `head_max`: head widths it takes. `documents`: honours document
    boundaries; `branches`: computes rows that several documents share; `sliding`: a window of the last
    tokens. `module`: what must be importable, None = nothing beside torch, and `install` how to get it.
    `computes`: compute capabilities of the GPU, from and to (exclusive).
    """

    name: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    documents: bool
    branches: bool = False
    sliding: bool = True
    head_multiple: int = 1
    head_max: int | None = None
    module: str | None = None
    install: str | None = None
    computes: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (99, 0))

    def takes(self, *, device: str, dtype: str, head_dim: int, sliding: bool = False) -> bool:
        """Whether it runs on this kind of device, in this dtype, with heads of this width, and with a sliding
        window where a layer has one.
        """
        fits = head_dim % self.head_multiple == 0 and (self.head_max is None or head_dim <= self.head_max)
        return device in self.devices and dtype in self.dtypes and fits and (self.sliding or not sliding)


_ANY = frozenset({"cpu", "cuda"})
_CUDA = frozenset({"cuda"})
_ALL = frozenset({"float32", "float64", "bfloat16", "float16"})
_HALF = frozenset({"bfloat16", "float16"})

ATTENTION_BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        Backend(name="torch", devices=_ANY, dtypes=_ALL, documents=False),
        Backend(name="reference", devices=_ANY, dtypes=_ALL, documents=True, branches=True),
        Backend(
            name="varlen",
            devices=_CUDA,
            dtypes=_HALF,
            documents=True,
            head_multiple=8,
            head_max=256,
            computes=((8, 0), (99, 0)),
        ),
        Backend(
            name="flash_2",
            devices=_CUDA,
            dtypes=_HALF,
            documents=True,
            head_multiple=8,
            head_max=256,
            module="flash_attn.flash_attn_interface",  # flash-attn 4 has a package flash_attn of its own
            install="pip install flash-attn==2.8.3 --no-build-isolation",
            computes=((8, 0), (99, 0)),
        ),
        Backend(
            name="flash_3",
            devices=_CUDA,
            dtypes=_HALF,
            documents=True,
            head_multiple=8,
            head_max=256,
            module="flash_attn_interface",
            install="git clone https://github.com/Dao-AILab/flash-attention && "
            "pip install --no-build-isolation ./flash-attention/hopper",
            computes=((9, 0), (10, 0)),
        ),
        Backend(
            name="flash_4",
            devices=_CUDA,
            dtypes=_HALF,
            documents=True,
            head_multiple=8,
            head_max=128,
            module="flash_attn.cute",
            install="pip install -c constraints.txt -e '.[flash]'",
            computes=((9, 0), (99, 0)),
        ),
    )
}

LINEAR_BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        Backend(name="reference", devices=_ANY, dtypes=_ALL, documents=True, branches=True, sliding=False),
        Backend(
            name="fla",
            devices=_CUDA,
            dtypes=_HALF,
            documents=True,
            sliding=False,
            head_multiple=8,
            head_max=256,
            module="fla",
            install="pip install -c constraints.txt -e '.[fla]'",
            computes=((8, 0), (99, 0)),
        ),
    )
}


def device_of(config: Config) -> str:
    """The kind of device of the configuration."""
    return "cuda" if config.trainer.accelerator == "gpu" else "cpu"


def attention_fits(config: Config, *, name: str) -> bool:
    """Whether an attention backend runs this model's heads and windows on the configured device and dtype."""
    return ATTENTION_BACKENDS[name].takes(
        device=device_of(config),
        dtype=config.policy.dtype.value,
        head_dim=config.model.head_dim,
        sliding=has_window(config.model),
    )


def linear_fits(config: Config, *, name: str) -> bool:
    """The same for a backend of linear attention."""
    return LINEAR_BACKENDS[name].takes(
        device=device_of(config), dtype=config.policy.dtype.value, head_dim=config.model.kda_head_dim
    )


def attention_of(config: Config) -> str:
    """The backend of full and sliding attention. `auto`: rows of one sample need no boundaries; rows with
    documents take the kernel that comes with torch where it fits, else the reference, as shared rows do.
    """
    requested = config.policy.attention.value
    if requested != "auto":
        return requested
    if not config.packed:
        return "torch"
    return "varlen" if not config.shares and attention_fits(config, name="varlen") else "reference"


def linear_of(config: Config) -> str:
    """The backend of linear attention. `auto`: the kernels of flash-linear-attention where they fit."""
    requested = config.policy.linear_attention.value
    if requested != "auto":
        return requested
    return "fla" if not config.shares and linear_fits(config, name="fla") else "reference"


def backends_of(config: Config) -> dict[str, Backend]:
    """The rows that this model's layers use, by the key that chooses them."""
    rows = {
        Family.softmax: ATTENTION_BACKENDS[attention_of(config)],
        Family.linear: LINEAR_BACKENDS[linear_of(config)],
    }
    return {family.value: row for family, row in rows.items() if family in families(config.model)}


def import_fault(module: str) -> str | None:
    """Why `module` cannot be imported, None where it can be: found without importing it (its parents are
    imported, whatever they do).
    """
    try:
        return None if find_spec(module) is not None else NOT_INSTALLED
    except ModuleNotFoundError as error:
        ours = error.name is not None and (module == error.name or module.startswith(f"{error.name}."))
        return NOT_INSTALLED if ours else f"does not import ({error})"
    except (Interrupted, KeyboardInterrupt):
        raise
    except BaseException as failure:  # a package may raise anything, or end the program
        return f"does not import ({type(failure).__name__}: {failure})"


def importable(module: str) -> bool:
    """Whether `module` can be imported, as far as its parents show it."""
    return import_fault(module) is None


def missing(config: Config) -> list[str]:
    """Requirements of an accepted configuration that THIS machine lacks, one line each, with the command to
    install them.
    """
    lacking = []
    for key, row in backends_of(config).items():
        fault = None if row.module is None else import_fault(row.module)
        if fault is not None:
            lacking.append(
                f"{key}: {row.name} needs {row.module}, which {fault}: {row.install}, or set {key}=reference"
            )
    if config.loss.surrogate is not None:
        try:
            load_surrogate(config.loss.surrogate)
        except Refusal as refusal:
            lacking += refusal.reasons
    if config.logger.kind is LoggerKind.wandb and not importable("wandb"):
        lacking.append(
            "logger=wandb needs wandb, which is not installed: pip install -c constraints.txt -e '.[wandb]', "
            "or set logger=csv"
        )
    if config.policy.compile:
        name, variable = ("g++", "CXX") if device_of(config) == "cpu" else ("gcc", "CC")
        compiler = os.environ.get(variable, name)
        if shutil.which(compiler) is None:
            lacking.append(
                f"policy.compile=true needs a C++ compiler, and {compiler} is not installed: apt-get install "
                f"g++, or name another in the environment variable {variable}, or leave policy.compile=false"
            )
    return lacking
