"""Everything that touches torchtitan: router, experts, dispatch, meshes, sharding.

No other file imports torchtitan; `tests/test_titan.py` holds the signatures used here to account. Importing
this file changes nothing: `prepare(device_type)` points torchtitan at a device and is called before meshes
are built.

Shapes: T tokens of this rank, K experts per token, E experts, R rows that reach this rank's experts, D width
of routed tokens, F hidden width of an expert. Experts are contiguous per rank and expert-parallel ranks are
consecutive (`types.Topology`).

Refused: expert widths that the grouped matrix product cannot take (multiples of 8), experts that do not
divide among expert-parallel ranks, a process group of another size than the topology.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.moe_sharding import expert_param_placement_sparse
from torchtitan.models.common.token_dispatcher import AllToAllDispatchMetadata, AllToAllTokenDispatcher
from torchtitan.ops.scatter_add import deterministic_scatter_add
from torchtitan.protocols.sharding import ShardingConfig

from olmo_rl.config import Recompute, ScoreFunction
from olmo_rl.data.loans import LayerLoans
from olmo_rl.policy.compiling import region
from olmo_rl.policy.sharded import fsdp_modules, local_part
from olmo_rl.types import Refusal, Topology

if TYPE_CHECKING:
    from olmo_rl.policy.hybrid import HybridDecoder

_SPMD_BACKEND = "partial_dtensor"
_EXPERT_PARAMETERS = ("w1_EFD", "w2_EDF", "w3_EFD")
# Added to every score, before top-k, by Olmo3Moe (modeling_olmo3moe.py of ai2-olmo-core 3.0.0), the only
# released architecture here with sigmoid routers: where all scores of a token vanish, gates become equal.
_SIGMOID_FLOOR = 1e-7
_WIDTH_MULTIPLE = 8  # of the grouped matrix product in bfloat16; float32 needs 4


class Routed(NamedTuple):
    """One router call. `gates` [T, K] weights of the chosen experts, `ids` int64 [T, K], `scores` [T, E]
    after the score function, `logits` [T, E] before it; all but `ids` at least float32 and differentiable.
    """

    gates: Tensor
    ids: Tensor
    scores: Tensor
    logits: Tensor


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's router, except that given ids replace its choice; their weights are CURRENT scores."""

    keep_float32 = True

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    @region()
    def forward(self, x: Tensor, ids: Tensor | None = None, pads: Tensor | None = None) -> Routed:
        """`x` [T, model width]; `ids` int64 [T, K] replace the selection and all selection-only terms, `pads`
        int64 [P, K] that of the last P rows.
        """
        weight = self.gate.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        logits = F.linear(x.to(dtype), weight.to(dtype))
        if self.score_func == "sigmoid":
            scores = torch.sigmoid(logits) + _SIGMOID_FLOOR
        else:
            scores = torch.softmax(logits, dim=-1)
        if ids is None:
            ids = self.choose(scores)
        if pads is not None:
            ids = torch.cat([ids[: ids.shape[0] - pads.shape[0]], pads])
        gates = scores.gather(dim=-1, index=ids)
        if self.route_norm:
            gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
        return Routed(gates=gates * self.route_scale, ids=ids, scores=scores, logits=logits)

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """int64 [T, K]: the live selection from `scores` [T, E]."""
        if self.num_expert_groups is not None:
            scores = self._get_node_limited_routing_scores(scores)
        return torch.topk(scores, k=self.top_k, dim=-1, sorted=False).indices


class Experts(GroupedExperts):
    """SwiGLU experts in `compute_dtype` (None = the dtype of their input): grouped products, or a loop over
    experts for float64. The output has the input's dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compute_dtype: torch.dtype | None = None

    def forward(
        self,
        x_RD: Tensor,
        num_tokens_per_expert_E: Tensor,
        loans: LayerLoans | None = None,
        ep_mesh: DeviceMesh | None = None,
    ) -> Tensor:
        """`x_RD` sorted by local expert, guests last; `num_tokens_per_expert_E` int64: rows of each. With
        `loans` a collective of all ranks of `ep_mesh`.
        """
        offsets = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        w1, w2, w3 = (local_part(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        if loans is not None:
            assert ep_mesh is not None, "experts are lent to other ranks"
            weights = [w.to(self._dtype(x_RD)) for w in (w1, w2, w3)]
            w1, w2, w3 = with_guests(weights, loans=loans, ep_mesh=ep_mesh)
        return self._products(x_RD, w1, w2, w3, offsets)

    def _dtype(self, rows: Tensor) -> torch.dtype:
        return rows.dtype if self.compute_dtype is None else self.compute_dtype

    @region(rows=1)
    def _products(self, x_RD: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offsets: Tensor) -> Tensor:
        dtype = self._dtype(x_RD)
        rows, w1, w2, w3 = (x.to(dtype) for x in (x_RD, w1, w2, w3))
        gate = self._grouped_mm(A=rows, B_t=w1.transpose(-2, -1), offs=offsets)
        up = self._grouped_mm(A=rows, B_t=w3.transpose(-2, -1), offs=offsets)
        out = self._grouped_mm(A=F.silu(gate) * up, B_t=w2.transpose(-2, -1), offs=offsets)
        return out.to(x_RD.dtype)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        if A.dtype is torch.float64:
            return loop_mm(A, B_t=B_t, offsets=offs)
        return torch._grouped_mm(A, B_t, offs=offs)


def with_guests(weights: Sequence[Tensor], *, loans: LayerLoans, ep_mesh: DeviceMesh) -> list[Tensor]:
    """`weights`, each [own experts, ...], with the guests of this rank behind them, zeros in free slots:
    [own experts + guests, ...]. The backward adds a guest's gradient to that of its owner.

    A collective of all ranks of `ep_mesh`, also of those that neither send nor receive; the weights of an
    expert travel side by side, so that every layer has one exchange in each direction.
    """
    leaving = torch.cat([w.index_select(0, loans.leaving).flatten(1) for w in weights], dim=1)
    arrived = all_to_all_single_autograd(leaving, list(loans.received), list(loans.sent), ep_mesh)
    free = arrived.new_zeros(loans.guests - sum(loans.received), leaving.shape[1])
    parts = torch.cat([arrived, free]).split([w[0].numel() for w in weights], dim=1)
    return [torch.cat([w, part.reshape(-1, *w.shape[1:])]) for w, part in zip(weights, parts, strict=True)]


def loop_mm(rows: Tensor, *, B_t: Tensor, offsets: Tensor) -> Tensor:
    """`rows` [R, in] times `B_t` [E, in, out], expert e on the rows before `offsets[e]`: exact in any dtype.
    Experts without rows stay in the graph, so that their gradients are zeros and not None.
    """
    ends = [0, *offsets.tolist()]
    return torch.cat([rows[ends[e] : ends[e + 1]] @ B_t[e] for e in range(len(ends) - 1)])


class Dispatcher(AllToAllTokenDispatcher):
    """torchtitan's all-to-all dispatch, local where one rank holds all experts. It weights rows in float32;
    here float64 rows stay float64.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def combine(self, routed_output_RD: Tensor, metadata: AllToAllDispatchMetadata, x_TD: Tensor) -> Tensor:
        if routed_output_RD.dtype is not torch.float64:
            return super().combine(routed_output_RD, metadata, x_TD)
        if self.ep_mesh is not None:
            routed_output_RD = self._unpermute(
                routed_output_RD, metadata.input_shape, metadata.permuted_indices
            )
            routed_output_RD = self._combine_token_exchange(
                routed_output_RD, self.ep_mesh.get_group(), metadata.input_splits, metadata.output_splits
            )
        weighted = routed_output_RD * metadata.topk_scores_experts_sorted_N.reshape(-1, 1)
        index = metadata.token_indices_experts_sorted_N.reshape(-1, 1).expand_as(weighted)
        return deterministic_scatter_add(torch.zeros_like(x_TD), index, weighted)


class TokenExperts(RoutedExperts):
    """Dispatch, experts, combine over [T, D]: torchtitan's region without its batch axis."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def forward(
        self, x: Tensor, gates: Tensor, ids: Tensor, counts: Tensor, loans: LayerLoans | None = None
    ) -> Tensor:
        """`x` [T, D], `gates` and `ids` [T, K], `counts` int64 [E]: assignments of this rank's tokens. With
        `loans`, ids and counts are of slots.
        """
        rows, counts_local, metadata = self.token_dispatcher.dispatch(x, gates, ids, counts)
        out = self.inner_experts(rows, counts_local, loans, self.token_dispatcher.ep_mesh)
        return self.token_dispatcher.combine(out, metadata, x)


def build_router(
    dim: int,
    *,
    num_experts: int,
    top_k: int,
    score_function: ScoreFunction,
    route_norm: bool,
    route_scale: float,
) -> ReplayRouter:
    """A router at model width `dim`."""
    return ReplayRouter.Config(
        num_experts=num_experts,
        gate=Linear.Config(in_features=dim, out_features=num_experts),
        top_k=top_k,
        score_func=score_function.value,
        route_norm=route_norm,
        route_scale=route_scale,
    ).build()


def build_experts(dim: int, *, hidden: int, num_experts: int, top_k: int) -> TokenExperts:
    """Routed experts at width `dim`, sharded over expert-parallel ranks once `parallelize` runs."""
    for key, width in (("model.latent_dim or model.dim", dim), ("model.expert_hidden", hidden)):
        if width % _WIDTH_MULTIPLE:
            raise Refusal(
                f"{key}={width} is not a multiple of {_WIDTH_MULTIPLE}: grouped experts need one, change it"
            )
    set_spmd_backend(_SPMD_BACKEND)
    inner = Experts.Config(dim=dim, hidden_dim=hidden, num_experts=num_experts)
    inner.sharding_config = ShardingConfig(
        state_shardings={name: expert_param_placement_sparse() for name in _EXPERT_PARAMETERS}
    )
    dispatcher = Dispatcher.Config(num_experts=num_experts, top_k=top_k)
    return TokenExperts.Config(inner_experts=inner, token_dispatcher=dispatcher).build()


def prepare(device_type: str) -> None:
    """Point torchtitan at `cpu` or `cuda`: at import, several of its modules keep the machine's device."""
    for name in (
        "tools.utils",
        "distributed.parallel_dims",
        "distributed.utils",
        "models.common.token_dispatcher",
    ):
        module: Any = sys.modules[f"torchtitan.{name}"]
        module.device_type = device_type
        if hasattr(module, "device_module"):
            module.device_module = torch.get_device_module(device_type)
    set_spmd_backend(_SPMD_BACKEND)


def build_parallel_dims(topology: Topology, *, device_type: str) -> ParallelDims:
    """Dense mesh [world] for FSDP, sparse mesh [replicas, ep_degree] for experts, over the process group."""
    if not dist.is_initialized() or dist.get_world_size() != topology.world_size:
        have = dist.get_world_size() if dist.is_initialized() else None
        raise Refusal(
            f"trainer.devices x trainer.num_nodes is {topology.world_size}, but the process group has {have} "
            "ranks: start that many processes"
        )
    prepare(device_type)
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=topology.world_size,
        cp=1,
        tp=1,
        pp=1,
        ep=topology.ep_degree,
        world_size=topology.world_size,
        spmd_backend=_SPMD_BACKEND,
    )
    dims.build_mesh()
    return dims


def dense_mesh(dims: ParallelDims, *, device_type: str) -> DeviceMesh:
    """The FSDP mesh of dense weights: every rank of the world, one rank too (torchtitan drops that mesh)."""
    if dims.world_size == 1:
        return init_device_mesh(device_type, (1,), mesh_dim_names=("fsdp",))
    return dims.get_mesh("fsdp")


def parallelize(
    model: HybridDecoder,
    *,
    dims: ParallelDims,
    dtype: torch.dtype,
    recompute: Recompute,
    device_type: str | None = None,
) -> None:
    """Shard `model` in place, experts over the expert-parallel mesh and all over FSDP, computing in `dtype`.

    Gradients are SUMMED over ranks, never divided: the loss is divided by global counts. Modules that ask for
    it (`keep_float32 = True`) keep their weights in float32 whatever `dtype` is. `device_type` is that of a
    model on the meta device, which has none yet.
    """
    model.recompute = recompute
    topology = Topology(dims.world_size, dims.ep)
    for block in model.blocks:
        if block.moe_enabled:
            topology.experts_per_rank(block.moe.router.num_experts)
            block.moe.routed_experts.parallelize(dims)
    dense = dense_mesh(dims, device_type=device_type or next(model.parameters()).device.type)
    if dtype.itemsize < 4:
        exact = MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for module in [m for m in model.modules() if getattr(m, "keep_float32", False)]:
            fully_shard(module, mesh=dense, mp_policy=exact)
    apply_fsdp_to_decoder(
        model,
        dp_mesh=dense,
        param_dtype=dtype,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        pp_enabled=False,
        ep_degree=dims.ep,
        edp_mesh=dims.get_mesh("efsdp") if dims.ep > 1 else None,
    )
    for unit in fsdp_modules(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
