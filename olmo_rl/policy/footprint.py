"""The memory of one rank by formula: weights, gradients, Adam state, gathered weights and activations.

Nothing is measured and nothing is allocated: parameters come from the model on the meta device. Weights,
gradients and Adam moments are float32 (float64 with policy.dtype=float64) and sharded over all ranks.
Activations are an upper bound for one pack of the whole budget whose tokens spread evenly over the experts; a
skewed batch sends a rank more. Kernels' workspaces, the allocator's slack and communication buffers are not
counted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from olmo_rl.config import (
    BlockNorms,
    Config,
    Dtype,
    LogprobKind,
    ModelConfig,
    PublicationKind,
    Recompute,
    Source,
)
from olmo_rl.hf.writing import BUCKET_BYTES, is_single_file, written_dtype
from olmo_rl.mixers import mixer_of

_EXPERT = ".routed_experts."
_FLOAT32 = 4  # bytes
_BYTES = {Dtype.bfloat16: 2, Dtype.float32: 4, Dtype.float64: 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One row: `bytes` of a rank at once, and how they are counted."""

    name: str
    bytes: int
    how: str


def parameters_of_rank(shapes: Mapping[str, torch.Size], *, world_size: int, ep_degree: int) -> int:
    """Elements of the largest shard: FSDP cuts dimension 0 of every weight into `world_size` parts, of
    experts first among `ep_degree` ranks and then over their replicas.
    """
    held = 0
    for name, shape in shapes.items():
        rows, row = shape[0], math.prod(shape[1:])
        if _EXPERT not in name:
            held += math.ceil(rows / world_size) * row
            continue
        owned, replicas = rows // ep_degree, world_size // ep_degree
        held += math.ceil(owned * row / replicas)
    return held


def largest_block(shapes: Mapping[str, torch.Size], *, ep_degree: int) -> int:
    """Elements of the block that gathers most: dense weights whole, experts of one rank."""
    blocks: dict[str, int] = {}
    for name, shape in shapes.items():
        key = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        blocks[key] = blocks.get(key, 0) + math.prod(shape) // (ep_degree if _EXPERT in name else 1)
    return max(blocks.values())


def block_activations(model: ModelConfig, *, layer: int) -> int:
    """Elements that one token leaves for a block's backward: inputs of its matrices, norms and kernels."""
    norms = {BlockNorms.before: 2, BlockNorms.after: 2, BlockNorms.both: 4}[model.block_norms] * model.dim
    mixer = mixer_of(model.layer_types[layer]).activations(model)
    if layer not in model.routed_layers:
        return norms + mixer + model.dim + 4 * model.dense_hidden
    width = model.dim if model.latent_dim is None else model.latent_dim
    rows = model.top_k * (3 * width + 4 * model.expert_hidden)  # dispatched, through SwiGLU, combined
    return norms + mixer + 2 * model.dim + 2 * model.num_experts + rows + 4 * model.shared_hidden


def activations(config: Config) -> tuple[int, str]:
    """Bytes of one pack of the whole budget, and how they are counted."""
    model, item = config.model, _BYTES[config.policy.dtype]
    blocks = [block_activations(model, layer=i) for i in range(len(model.layer_types))]
    if config.policy.recompute is Recompute.full:
        kept, how = len(blocks) * model.dim + max(blocks), "inputs of all blocks and one block again"
    else:
        kept, how = sum(blocks), "what all blocks leave for the backward"
        if config.policy.recompute is Recompute.selective:
            how += ", an upper bound under selective recomputation"
    return config.budget * kept * item, f"{config.budget:,} tokens x {kept:,} elements: {how}"


def guest_copies(config: Config, *, shapes: Mapping[str, torch.Size]) -> Line:
    """Copies that forwards with loans keep: of every layer the experts of a rank with its guests behind them,
    under recomputation those of one layer; selective recomputation also keeps what arrived.
    """
    model, guests, recompute = config.model, config.balance.guests, config.policy.recompute
    layers, owned = len(model.routed_layers), model.num_experts // config.ep_degree
    size = sum(math.prod(shape) for name, shape in shapes.items() if _EXPERT in name)
    kept = (layers if recompute is Recompute.none else 1) * (owned + guests)
    kept += layers * guests if recompute is Recompute.selective else 0
    how = f"{kept:,} experts: own ones and guests, copied side by side"
    size //= layers * model.num_experts
    return Line(name="guests", bytes=kept * size * _BYTES[config.expert_dtype], how=how)


def publishing(config: Config, *, shapes: Mapping[str, torch.Size]) -> Line:
    """Memory of rank 0 while it sends weights to serving engines."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    limit, part = int(config.export.shard_gib * 2**30), "one file"
    if config.rollouts.publication is PublicationKind.collective:
        limit, part = BUCKET_BYTES, "what is sent at once"
    elif is_single_file(config.model):
        limit, part = sys.maxsize, "the whole model"
    written = min(sum(sizes) * written_dtype(config.export).itemsize, limit)
    how = f"on rank 0: one parameter, its gather, {part}"
    return Line(name="publishing", bytes=2 * max(sizes) * _FLOAT32 + written, how=how)


def memory_table(config: Config, *, shapes: Mapping[str, torch.Size]) -> list[Line]:
    """Memory of the largest rank in an update, and between updates where it generates."""
    world, ep = config.world_size, config.ep_degree
    total = sum(math.prod(shape) for shape in shapes.values())
    held = parameters_of_rank(shapes, world_size=world, ep_degree=ep)
    item = _BYTES[config.policy.dtype]
    master, word = max(item, _FLOAT32), "float64" if config.policy.dtype is Dtype.float64 else "float32"
    lines = [
        Line(name="weights", bytes=held * master, how=f"{held:,} of {total:,} in {word}"),
        Line(name="gradients", bytes=held * master, how=f"the same in {word}"),
        Line(name="adam", bytes=2 * held * master, how=f"two moments in {word}"),
    ]
    if config.needs_reference:
        lines.append(Line(name="reference", bytes=held * master, how="frozen, sharded like the policy"))
    sharded = world > 1 or config.policy.dtype is Dtype.bfloat16
    if sharded:
        gathered = 2 * largest_block(shapes, ep_degree=ep) * item
        lines.append(Line(name="gathered", bytes=gathered, how="two whole blocks: one computes, one arrives"))
    if config.lends:
        lines.append(guest_copies(config, shapes=shapes))
    size, how = activations(config)
    lines.append(Line(name="activations", bytes=size, how=how))
    rows = config.policy.logprob_chunk if config.policy.logprobs is LogprobKind.chunked else config.budget
    logits = 3 * rows * config.model.vocab_size * 4
    lines.append(Line(name="logits", bytes=logits, how=f"{rows:,} tokens, with softmax and gradient"))
    if config.generates and config.rollouts.source is not Source.local:
        lines.append(publishing(config, shapes=shapes))
    if config.rollouts.source is Source.local:
        address = (4 if total < 2**31 else 8) if sharded else 0
        copies = total * (address + _FLOAT32 * (2 if sharded else 1))
        lines.append(Line(name="publishing", bytes=copies, how="full weights on every rank and their gather"))
        lines.append(Line(name="engine", bytes=total * _FLOAT32, how="full weights of the local engine"))
    return lines
