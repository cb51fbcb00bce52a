"""Models, directories and ranks for the tests of Hugging Face directories: `run_rank` fills a decoder on two
gloo ranks, FSDP only and EP2, and saves what they hold.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from gloo_world import joined
from model_cases import tiny_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from olmo_rl.config import BlockNorms, LayerType, ModelConfig, QkNorm, Recompute
from olmo_rl.hf.agreement import typed
from olmo_rl.policy import titan
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import CHECKPOINT_PREFIX, load_weights
from olmo_rl.types import Topology

DEGREES = (1, 2)


def hybrid() -> ModelConfig:
    """Every mixer, latent and shared experts, norms on both sides: what olmo3moe can say of the hybrid."""
    return replace(tiny_config(), vocab_size=260, block_norms=BlockNorms.both)


def attention_only() -> ModelConfig:
    """The part of the hybrid that the Hugging Face implementation of olmo3moe runs on a CPU."""
    types = [LayerType.full_attention, LayerType.sliding_attention, LayerType.full_attention]
    return replace(hybrid(), layer_types=types, rope_theta=None)


def plain(norm: QkNorm) -> ModelConfig:
    """Attention and routed experts alone: qwen3_moe or olmoe, square expert matrices."""
    return ModelConfig(
        vocab_size=260,
        dim=32,
        layer_types=[LayerType.full_attention] * 2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qk_norm=norm,
        num_experts=4,
        expert_hidden=32,
        max_seq_len=64,
    )


def weights_of(model: ModelConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Weights of which every element of every tensor is its own, those of norms included."""
    decoder = HybridDecoder(model, attention="reference")
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in decoder.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        found[name] = 1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise
    return found


def overrides(model: ModelConfig) -> list[str]:
    """The command line that gives `model`, whatever group was chosen before."""
    return [f"model.{name}={typed(getattr(model, name))}" for name in ModelConfig.__dataclass_fields__]


def decoder_of(model: ModelConfig, weights: dict[str, Tensor]) -> HybridDecoder:
    decoder = HybridDecoder(model, attention="reference")
    for name, parameter in decoder.named_parameters():
        parameter.data.copy_(weights[name])
    return decoder


def run_rank(number: int, world: int, directory: str) -> None:
    with joined(number, world=world, directory=directory):
        for degree in DEGREES:
            fill_and_save(Topology(world, degree), directory=directory)


def fill_and_save(topology: Topology, *, directory: str) -> None:
    with torch.device("meta"):
        decoder = HybridDecoder(hybrid(), attention="reference")
    dims = titan.build_parallel_dims(topology, device_type="cpu")
    titan.parallelize(decoder, dims=dims, dtype=torch.float32, recompute=Recompute.none, device_type="cpu")
    decoder.allocate(torch.device("cpu"))
    for parameter in decoder.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    load_weights(decoder, f"{directory}/hf")
    parameters = dict(decoder.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    weights = {CHECKPOINT_PREFIX + name: parameter for name, parameter in parameters.items()}
    dcp.save({"state_dict": weights}, checkpoint_id=f"{directory}/ep{topology.ep_degree}")
