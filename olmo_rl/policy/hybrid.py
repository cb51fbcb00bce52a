"""The hybrid decoder: KDA, full or sliding attention per layer, dense or routed feed-forward per layer.

Owns the order of computation and the initial weights. The pack is one row: tensors are [T, ...] without a
batch axis, and everything about documents and routes arrives as the `PackContext` argument, so that
activation recomputation sees the same object as the first forward.

Shapes: T tokens of a pack, D model width, V vocabulary, R rows that need logits, L routed layers, B sequences
that are decoded together, K experts per token.

Refused: replay whose routes do not name exactly this model's routed layers; a model whose forward takes no
context.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import pkgutil
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_rl.config import BlockNorms, ModelConfig, Recompute
from olmo_rl.data.packs import PackContext, RouteMode
from olmo_rl.mixers import Family, mixer_of
from olmo_rl.policy.compiling import region
from olmo_rl.policy.logprobs import Head, LogprobRequest, Logprobs
from olmo_rl.policy.moe import MixtureOfExperts, RouterStatistics, SwiGLU, recomputed
from olmo_rl.policy.norms import RMSNorm
from olmo_rl.policy.sharded import draw_parameter, local_part
from olmo_rl.types import Refusal


class DecoderOutput(NamedTuple):
    """`router`: statistics for the router losses, L layers in front, None for a dense model. Either `logits`
    [R, V], or, where log-probs were asked for, `logprobs` and `entropies` [R] and no logits.
    """

    logits: Tensor | None
    router: RouterStatistics | None
    logprobs: Tensor | None = None
    entropies: Tensor | None = None


class Block(nn.Module):
    """Residual block: mixer, then dense or routed feed-forward, each with an RMSNorm before it, after it or
    both.
    """

    def __init__(self, config: ModelConfig, *, layer: int, attention: str, linear: str) -> None:
        super().__init__()
        self.moe_enabled = layer in config.routed_layers
        before = config.block_norms is not BlockNorms.after
        after = config.block_norms is not BlockNorms.before
        self.mixer_norm = RMSNorm(config.dim, eps=config.norm_eps) if before else None
        self.mixer = build_mixer(config, layer=layer, attention=attention, linear=linear)
        self.mixer_out_norm = RMSNorm(config.dim, eps=config.norm_eps) if after else None
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps) if before else None
        self.ffn_out_norm = RMSNorm(config.dim, eps=config.norm_eps) if after else None
        if self.moe_enabled:
            self.moe = MixtureOfExperts(config, layer=layer)
        else:
            self.feed_forward = SwiGLU(config.dim, hidden=config.dense_hidden)

    def forward(
        self, x: Tensor, context: PackContext, *, recompute: Recompute = Recompute.none
    ) -> tuple[Tensor, RouterStatistics | None]:
        """`x` [T, D] -> output [T, D], and the router's statistics of a routed block.

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
        x, h = self._join(x, self.mixer.step(self._enter(x), position=position, state=state))
        if not self.moe_enabled:
            return self._leave(x, self.feed_forward(h)), None
        y, ids = self.moe.step(h)
        return self._leave(x, y), ids

    def _block(
        self, x: Tensor, context: PackContext, recompute: Recompute = Recompute.none
    ) -> tuple[Tensor, RouterStatistics | None]:
        x, h = self._join(x, self.mixer(self._enter(x), context))
        again = recompute is Recompute.selective
        if self.moe_enabled:
            y, statistics = self.moe(h, context, recompute=again)
            return self._leave(x, y), statistics
        return self._leave(x, recomputed(self.feed_forward, h) if again else self.feed_forward(h)), None

    @region()
    def _enter(self, x: Tensor) -> Tensor:
        """The input of the mixer."""
        return x if self.mixer_norm is None else self.mixer_norm(x)

    def _leave(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual stream after the block."""
        return x + (y if self.ffn_out_norm is None else self.ffn_out_norm(y))

    @region()
    def _join(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after the mixer, and what the feed-forward reads."""
        x = x + (y if self.mixer_out_norm is None else self.mixer_out_norm(y))
        return x, x if self.ffn_norm is None else self.ffn_norm(x)


def build_mixer(config: ModelConfig, *, layer: int, attention: str, linear: str) -> Any:
    """The token mixer of one layer: a module with `forward(x [T, D], context)`, `init_state` and `step`."""
    mixer = mixer_of(config.layer_types[layer])
    backend = {Family.softmax: attention, Family.linear: linear}[mixer.family]
    return pkgutil.resolve_name(mixer.build)(config, backend)


# Weights that write to the residual stream.
_RESIDUAL_OUTPUTS = ("mixer.wo.weight", ".w2.weight", ".w2_EDF", ".latent_up.weight")


def named_generator(name: str, seed: int) -> torch.Generator:
    """Random numbers that depend on the name and the seed alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))


def _draw(parameter: Tensor, *, module: nn.Module, std: float, generator: torch.Generator) -> None:
    if isinstance(module, nn.RMSNorm):
        local_part(parameter).fill_(1.0)
    elif parameter.ndim == 1:
        local_part(parameter).zero_()
    else:
        draw_parameter(parameter, lambda whole: whole.normal_(generator=generator).mul_(std))


def require_context(model: nn.Module) -> None:
    """Refuse a model that could not see document boundaries: its forward, and that of every mixer in it, must
    name the argument `context`. One that swallows unknown arguments would train on leaks, silently.
    """
    mixers = [(name, module) for name, module in model.named_modules() if name.endswith(".mixer")]
    for name, module in [("the model", model), *mixers]:
        if "context" not in inspect.signature(module.forward).parameters:
            raise Refusal(
                f"packing: {name} ({type(module).__name__}) takes no argument `context`: document boundaries "
                "would be dropped: give its forward that argument and honour it, or set packing=none"
            )


class HybridDecoder(nn.Module):
    """Embedding, blocks, norm, head. `attention` and `linear` name backends of `olmo_rl.backends`. Attribute
    names are the ones torchtitan's FSDP helper expects of a decoder.
    """

    def __init__(self, config: ModelConfig, *, attention: str, linear: str = "reference") -> None:
        super().__init__()
        self.config = config
        self.recompute = Recompute.none
        self.enable_weight_tying = config.tie_embeddings
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(config, layer=i, attention=attention, linear=linear)
                for i in range(len(config.layer_types))
            }
        )
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = Head(config.dim, vocab_size=config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def allocate(self, device: torch.device) -> None:
        """Move from the meta device to `device`; parameters, or this rank's shards of them, are
        uninitialised. Tied embeddings stay one parameter.
        """
        assert next(self.buffers(), None) is None, "a buffer would stay uninitialised"
        self.to_empty(device=device)
        if self.enable_weight_tying:
            self.lm_head.weight = self.tok_embeddings.weight

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order."""
        return [cast(Block, block) for block in self.layers.values()]

    def forward(
        self,
        tokens: Tensor,
        context: PackContext,
        rows: Tensor | None = None,
        request: LogprobRequest | None = None,
    ) -> DecoderOutput:
        """`tokens` int64 [T] -> logits of `rows` (int64 [R], None = all T), or log-probs of the targets in
        `request`, and router statistics.

        The head runs only for `rows`; it runs for zero rows too, so that every rank enters the same
        collectives.
        """
        self._check_routes(context)
        x = self.tok_embeddings(tokens)
        layers: list[RouterStatistics] = []
        for block in self.blocks:
            x, statistics = block(x, context, recompute=self.recompute)
            if statistics is not None:
                layers.append(statistics)
        if rows is not None:
            x = x.index_select(0, rows)
        scored = self.lm_head(self.norm(x), request)
        stacked = [torch.stack(parts) for parts in zip(*layers, strict=True)]
        router = RouterStatistics(*stacked) if stacked else None
        if isinstance(scored, Logprobs):
            return DecoderOutput(None, router, logprobs=scored.logprobs, entropies=scored.entropies)
        return DecoderOutput(scored, router)

    def set_expert_dtype(self, dtype: torch.dtype | None) -> None:
        """Set the dtype in which routed experts compute; None = the dtype of the rows that reach them."""
        for block in self.blocks:
            if block.moe_enabled:
                block.moe.routed_experts.inner_experts.compute_dtype = dtype

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw all weights from `seed`; each rank keeps its shards, which are equal on every topology.

        Parameters are drawn whole on the CPU, one at a time. Each module has its own generator, seeded by its
        name, so that none depends on another's shape.
        Matrices are normal with `init_std`; those that write to the residual stream are scaled by 1/sqrt(2 x
        layers). A module with a method `init_weights(generator)` draws its own parameters.
        """
        for name, module in self.named_modules():
            if module is self or (module is self.lm_head and self.enable_weight_tying):
                continue
            generator = named_generator(name, seed)
            if hasattr(module, "init_weights"):
                module.init_weights(generator)
                continue
            for leaf, parameter in module.named_parameters(recurse=False):
                std = self.config.init_std
                if f"{name}.{leaf}".endswith(_RESIDUAL_OUTPUTS):
                    std /= math.sqrt(2 * len(self.layers))
                _draw(parameter, module=module, std=std, generator=generator)

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
    def step(
        self, tokens: Tensor, *, position: int, state: list[Any], heads: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One token of every sequence, all at `position`: `tokens` int64 [B] -> logits [B, V] and the experts
        chosen while it was read, int64 [B, L, K] (None for a dense model). Updates `state`. `heads` int64
        [H]: the sequences whose logits [H, V] are wanted.
        """
        x = self.tok_embeddings(tokens)
        routes = []
        for block, block_state in zip(self.blocks, state, strict=True):
            x, ids = block.step(x, position=position, state=block_state)
            if ids is not None:
                routes.append(ids)
        wanted = x if heads is None else x[heads]
        return self.lm_head(self.norm(wanted)), torch.stack(routes, dim=1) if routes else None
