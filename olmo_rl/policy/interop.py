"""Weights in and out of a decoder: one safetensors file, or the model part of a training checkpoint.

Names and shapes are strict: nothing is left at its initial value silently. Hugging Face directories come with
a later issue; a directory without either form is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from olmo_rl.types import Refusal

# Lightning prefixes the decoder's names with the attribute that holds it.
CHECKPOINT_PREFIX = "decoder."


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write full weights as one safetensors file: complete or absent, never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, scratch)
    scratch.replace(path)


def load_weights(decoder: nn.Module, path: str) -> None:
    """Fill an unsharded decoder from a .safetensors file or from a checkpoint directory of a run."""
    location = Path(path)
    expected = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    tied = decoder.state_dict().keys() - expected.keys()  # further names of weights that are there already
    if location.is_file():
        try:
            found = load_file(location)
        except SafetensorError as error:
            raise Refusal(f"init_from={path}: not a safetensors file ({error})") from None
    elif (location / ".metadata").is_file():
        found = _read_checkpoint(location, expected)
    else:
        raise Refusal(
            f"init_from={path}: neither a .safetensors file nor a checkpoint directory of a run: "
            "give outputs/<run>/checkpoints/<step> or a weights file"
        )
    found = {name: tensor for name, tensor in found.items() if name not in tied}
    _check_names(expected, found, path=path)
    for name, parameter in expected.items():
        parameter.copy_(found[name])


def _read_checkpoint(location: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = dcp.FileSystemReader(location).read_metadata().state_dict_metadata
    prefix = f"state_dict.{CHECKPOINT_PREFIX}"
    names = [name.removeprefix(prefix) for name in stored if name.startswith(prefix)]
    shapes = {name: getattr(stored[prefix + name], "size", None) for name in names}
    strange = [name for name in names if name in expected and expected[name].shape != shapes[name]]
    if strange:
        name = strange[0]
        raise Refusal(
            f"init_from={location}: {name} has shape {tuple(shapes[name] or ())}, the model "
            f"{tuple(expected[name].shape)} ({len(strange)} such weights): they are of another model"
        )
    model = {CHECKPOINT_PREFIX + name: torch.empty_like(expected[name]) for name in names if name in expected}
    dcp.load({"state_dict": model}, checkpoint_id=location, no_dist=True)
    found = {name.removeprefix(CHECKPOINT_PREFIX): tensor for name, tensor in model.items()}
    return found | {name: torch.empty(0) for name in names if name not in expected}


def _check_names(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], *, path: str) -> None:
    reasons = [f"init_from={path}: {name} is missing" for name in expected if name not in found]
    reasons += [
        f"init_from={path}: {name} is not a weight of this model" for name in found if name not in expected
    ]
    reasons += [
        f"init_from={path}: {name} has shape {tuple(found[name].shape)}, the model {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if reasons:
        raise Refusal(reasons)
