"""The hybrid decoder: KDA, full or sliding attention per layer, dense or routed feed-forward per layer.

Owns the order of computation and the initial weights. The pack is one row: tensors are [T, ...] without a
batch axis, and everything about documents and routes arrives as the `PackContext` argument, so that
activation recomputation sees the same object as the first forward.

Shapes: T tokens of a pack, D model width, V vocabulary, R rows that need logits, L routed layers, B sequences
that are decoded together, K experts per token.

Refused: replay whose routes do not name exactly this model's routed layers.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_rl.config import LayerType, ModelConfig, Recompute
from olmo_rl.data.packs import PackContext, RouteMode
from olmo_rl.policy.attention import DocumentAttention
from olmo_rl.policy.kda import KimiDeltaAttention
from olmo_rl.policy.moe import MixtureOfExperts, SwiGLU, recomputed
from olmo_rl.types import Refusal


class DecoderOutput(NamedTuple):
    """`logits` [R, V]; `router_balance` and `router_z` [L]: `moe.RouterLosses` of every routed layer."""

    logits: Tensor
    router_balance: Tensor
    router_z: Tensor


class Block(nn.Module):
    """Pre-norm residual block: mixer, then dense or routed feed-forward."""

    def __init__(self, config: ModelConfig, *, layer: int, attention: str) -> None:
        super().__init__()
        self.moe_enabled = layer in config.routed_layers
        self.mixer_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mixer = build_mixer(config, layer=layer, attention=attention)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        if self.moe_enabled:
            self.moe = MixtureOfExperts(config, layer=layer)
        else:
            self.feed_forward = SwiGLU(config.dim, hidden=config.dense_hidden)

    def forward(
        self, x: Tensor, context: PackContext, *, recompute: Recompute = Recompute.none
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [T, D] -> output [T, D], balance penalty and z sum (zeros for a dense block).

        Recomputed in the backward: under `full` the whole block; under `selective` the feed-forward without
        norm and router, where the widest activations are, keeping what all-to-all delivered.
        """
        if recompute is Recompute.full:
            return checkpoint(
                self._block, x, context, use_reentrant=False, preserve_rng_state=False, early_stop=False
            )
        return self._block(x, context, recompute=recompute)

    def step(self, x: Tensor, *, position: int, state: Any) -> tuple[Tensor, Tensor | None]:
        """Decoding: `x` [B, D] -> output [B, D] and int64 ids [B, K] of a routed block. Updates `state`."""
        x = x + self.mixer.step(self.mixer_norm(x), position=position, state=state)
        if not self.moe_enabled:
            return x + self.feed_forward(self.ffn_norm(x)), None
        y, ids = self.moe.step(self.ffn_norm(x))
        return x + y, ids

    def _block(
        self, x: Tensor, context: PackContext, recompute: Recompute = Recompute.none
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.mixer(self.mixer_norm(x), context)
        h = self.ffn_norm(x)
        again = recompute is Recompute.selective
        if self.moe_enabled:
            y, losses = self.moe(h, context, recompute=again)
            return x + y, losses.balance, losses.z
        zero = x.new_zeros(())
        return x + (recomputed(self.feed_forward, h) if again else self.feed_forward(h)), zero, zero


def build_mixer(config: ModelConfig, *, layer: int, attention: str) -> DocumentAttention | KimiDeltaAttention:
    """The token mixer of one layer."""
    match config.layer_types[layer]:
        case LayerType.linear_attention:
            return KimiDeltaAttention(config)
        case LayerType.sliding_attention:
            return DocumentAttention(config, window=config.sliding_window, backend=attention)
        case LayerType.full_attention:
            return DocumentAttention(config, window=None, backend=attention)


# Weights that write to the residual stream.
_RESIDUAL_OUTPUTS = ("mixer.wo.weight", ".w2.weight", ".w2_EDF", ".latent_up.weight")


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))


def _fill(parameter: Tensor, *, module: nn.Module, std: float, generator: torch.Generator) -> None:
    if isinstance(module, nn.RMSNorm):
        parameter.fill_(1.0)
    elif parameter.ndim == 1:
        parameter.zero_()
    else:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


class HybridDecoder(nn.Module):
    """Embedding, blocks, norm, head. `attention` names a backend of `olmo_rl.backends`. Attribute names are
    the ones torchtitan's FSDP helper expects of a decoder.
    """

    def __init__(self, config: ModelConfig, *, attention: str) -> None:
        super().__init__()
        self.config = config
        self.recompute = Recompute.none
        self.enable_weight_tying = config.tie_embeddings
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): Block(config, layer=i, attention=attention) for i in range(len(config.layer_types))}
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order."""
        return [cast(Block, block) for block in self.layers.values()]

    def forward(self, tokens: Tensor, context: PackContext, rows: Tensor | None = None) -> DecoderOutput:
        """`tokens` int64 [T] -> logits of `rows` (int64 [R], None = all T) and router losses.

        The head runs only for `rows`; it runs for zero rows too, so that every rank enters the same
        collectives.
        """
        self._check_routes(context)
        x = self.tok_embeddings(tokens)
        balance, z = [], []
        for block in self.blocks:
            x, block_balance, block_z = block(x, context, recompute=self.recompute)
            if block.moe_enabled:
                balance.append(block_balance)
                z.append(block_z)
        if rows is not None:
            x = x.index_select(0, rows)
        logits = self.lm_head(self.norm(x))
        none = logits.new_zeros((0,))
        return DecoderOutput(
            logits=logits,
            router_balance=torch.stack(balance) if balance else none,
            router_z=torch.stack(z) if z else none,
        )

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw all weights from `seed`, on the CPU and before sharding, so that every topology starts alike.

        Each module has a generator of its own, seeded by its name, so that none depends on another's shape.
        Matrices are normal with `init_std`; those that write to the residual stream are scaled by 1/sqrt(2 x
        layers). A module with a method `init_weights(generator)` draws its own parameters.
        """
        for name, module in self.named_modules():
            if module is self or (module is self.lm_head and self.enable_weight_tying):
                continue
            generator = _generator(name, seed)
            if hasattr(module, "init_weights"):
                module.init_weights(generator)
                continue
            for leaf, parameter in module.named_parameters(recurse=False):
                std = self.config.init_std
                if f"{name}.{leaf}".endswith(_RESIDUAL_OUTPUTS):
                    std /= math.sqrt(2 * len(self.layers))
                _fill(parameter, module=module, std=std, generator=generator)

    def _check_routes(self, context: PackContext) -> None:
        if context.mode is not RouteMode.replay:
            return
        assert context.routes is not None
        recorded, routed = tuple(sorted(context.routes)), self.config.routed_layers
        if recorded != routed:
            raise Refusal(
                f"replay: recorded routes cover {len(recorded)} layers {list(recorded)}, the model routes "
                f"{len(routed)} layers {list(routed)}: use this model's routes or policy.replay=false"
            )

    def init_state(self, batch: int, *, length: int, device: torch.device, dtype: torch.dtype) -> list[Any]:
        """Decoding state of `batch` sequences of at most `length` tokens, one entry per layer."""
        return [
            block.mixer.init_state(batch, length=length, device=device, dtype=dtype) for block in self.blocks
        ]

    @torch.no_grad()
    def step(self, tokens: Tensor, *, position: int, state: list[Any]) -> tuple[Tensor, Tensor | None]:
        """One token of every sequence, all at `position`: `tokens` int64 [B] -> logits [B, V] and the experts
        chosen while it was read, int64 [B, L, K] (None for a dense model). Updates `state`.
        """
        x = self.tok_embeddings(tokens)
        routes = []
        for block, block_state in zip(self.blocks, state, strict=True):
            x, ids = block.step(x, position=position, state=block_state)
            if ids is not None:
                routes.append(ids)
        return self.lm_head(self.norm(x)), torch.stack(routes, dim=1) if routes else None
