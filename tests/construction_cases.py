"""Ranks of tests/test_construction.py: build the decoder of a run from every kind of stored weights, and
measure how many bytes of tensors are alive meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from gloo_world import joined
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from olmo_rl.config import BlockNorms, Config, LayerType, ModelConfig, StrategyConfig, TrainerConfig
from olmo_rl.hf.writing import export_hf
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.running.trainer import build_trainer
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy

SEED = 7
DEGREES = {1: (1,), 2: (1, 2), 4: (2,)}  # expert-parallel degrees by world size


def model(*, tied: bool = False) -> ModelConfig:
    """Every mixer, a dense layer, shared and latent experts; 0.6 million parameters."""
    return ModelConfig(
        vocab_size=1024,
        dim=64,
        layer_types=[LayerType.linear_attention, LayerType.full_attention, LayerType.sliding_attention],
        dense_layers=[0],
        dense_hidden=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        sliding_window=8,
        kda_heads=2,
        kda_head_dim=16,
        num_experts=8,
        top_k=2,
        expert_hidden=128,
        shared_hidden=64,
        latent_dim=64,
        block_norms=BlockNorms.both,
        tie_embeddings=tied,
        max_seq_len=64,
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors on the CPU that operations return and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._counted:
            return
        self._counted.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


def digest(weights: Mapping[str, Tensor]) -> str:
    """A hash of whole weights by name."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        found.update(name.encode())
        found.update(tensor.detach().float().contiguous().numpy().data)
    return found.hexdigest()


def fingerprint(weights: Mapping[str, Tensor]) -> float:
    """One number that changes with every draw, and by no more than rounding with the kernels of a CPU."""
    total = 0.0
    for place, (_, tensor) in enumerate(sorted(weights.items()), start=1):
        values = tensor.detach().double().flatten()
        total += place * float(values @ torch.linspace(-1, 1, len(values), dtype=torch.float64))
    return total


def unsharded(*, seed: int, tied: bool) -> dict[str, Tensor]:
    """The weights of a decoder that one process holds."""
    decoder = HybridDecoder(model(tied=tied), attention="reference")
    decoder.init_weights(seed)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def write_sources(directory: str) -> None:
    """Other weights than the initial ones of the runs: a safetensors file, a checkpoint, and a
    Hugging Face directory.
    """
    for tied in (False, True):
        weights = unsharded(seed=SEED + 1, tied=tied)
        place = Path(directory) / f"tied={tied}"
        save_file(weights, place.with_suffix(".safetensors"))
        named = {f"decoder.{name}": tensor for name, tensor in weights.items()}
        dcp.save({"state_dict": named}, checkpoint_id=place, no_dist=True)
        export_hf(weights, model=model(tied=tied), directory=place.with_suffix(".hf"), shard_bytes=10**6)


def sources(directory: str, *, tied: bool) -> dict[str, str | None]:
    place = Path(directory) / f"tied={tied}"
    return {"seed": None, "file": f"{place}.safetensors", "checkpoint": str(place), "hf": f"{place}.hf"}


def build(number: int, world: int, directory: str) -> None:
    """One rank: the decoder of a run by degree, tying and source; writes hashes and bytes as JSON."""
    found = {}
    with joined(number, world=world, directory=directory):
        for degree in DEGREES[world]:
            for tied in (False, True):
                for name, path in sources(directory, tied=tied).items():
                    config = Config(
                        seed=SEED,
                        model=model(tied=tied),
                        strategy=StrategyConfig(ep_degree=degree),
                        trainer=TrainerConfig(devices=world),
                        run_dir=directory,
                    )
                    found[f"{world},{degree} tied={tied} {name}"] = _built(replace(config, init_from=path))
    (Path(directory) / f"{world}-{number}.json").write_text(json.dumps(found))


def _built(config: Config) -> dict[str, Any]:
    strategy = ExpertParallelStrategy(config)
    trainer = build_trainer(config, strategy=strategy, max_steps=1, callbacks=[], loggers=[])
    module = PolicyModule(config, objective=POLICY)
    module.trainer = trainer
    strategy.connect(module)
    strategy.setup_environment()
    with LiveBytes() as bytes_:
        decoder = module._build(config.init_from)
    parameters = dict(decoder.named_parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters.values()]
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    return {
        "digest": digest(whole),
        "tied": decoder.lm_head.weight is decoder.tok_embeddings.weight,
        "peak": bytes_.peak,
        "shards": sum(tensor.nbytes for tensor in local),
        "whole": sum(tensor.nbytes for tensor in whole.values()),
        "largest": max(tensor.nbytes for tensor in whole.values()),
    }
