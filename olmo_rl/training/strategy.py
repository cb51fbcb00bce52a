"""The Lightning strategy: meshes of an expert-parallel world, the one way to run the model, and the
collectives we use.

Every forward (training, scoring, evaluation of log-probs) goes through `forward_pack`, which builds the
`PackContext` and so sets document boundaries and replayed routes. Nothing else in this project calls the
decoder on a pack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from typing_extensions import override

from olmo_rl.config import Config, Dtype
from olmo_rl.data.loans import LayerLoans, loans_of_rank
from olmo_rl.data.packs import Pack, RouteMode, RouteTrace
from olmo_rl.policy import titan
from olmo_rl.policy.compiling import GraphLog, compile_regions
from olmo_rl.policy.hybrid import DecoderOutput, HybridDecoder, require_context
from olmo_rl.policy.logprobs import LogprobRequest
from olmo_rl.policy.loss import ScoredSlots
from olmo_rl.policy.stored_checkpoint import load_plain_state, load_tensors, read_metadata
from olmo_rl.policy.weights import check_weights
from olmo_rl.progress import note_collective
from olmo_rl.types import Lending, Refusal, Topology

T = TypeVar("T")

LAP_SECONDS = 5.0  # the longest that a rank waits inside a collective for another one's requests
TORCH_DTYPES = {
    Dtype.bfloat16: torch.bfloat16,
    Dtype.float32: torch.float32,
    Dtype.float64: torch.float64,
}


class ExpertParallelStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks for dense weights, expert parallelism over `strategy.ep_degree` consecutive ranks.

    One process works too: the model then stays unsharded. Gradients are summed, never averaged: losses are
    divided by global counts before backward.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(timeout=timedelta(seconds=config.strategy.timeout_seconds))
        self._lap = min(LAP_SECONDS, config.strategy.timeout_seconds / 4)
        self.topology = Topology(config.trainer.world_size, config.strategy.ep_degree)
        self.dtype = TORCH_DTYPES[config.policy.dtype]
        lower = config.expert_dtype is not config.policy.dtype
        # None: the dtype of the rows that reach experts.
        self.expert_dtype = TORCH_DTYPES[config.expert_dtype] if lower else None
        self.recompute = config.policy.recompute
        self.compiles, self.static_rows = config.policy.compile, config.packing.pad_to_budget
        self.graphs: GraphLog | None = None
        self.compile_backend = "inductor"
        self.logprobs, self.logprob_chunk = config.policy.logprobs, config.policy.logprob_chunk
        self.temperature = config.rollouts.temperature
        self._dims: titan.ParallelDims | None = None
        self._collects, self._collected = False, dict[str, Any]()
        self._loans: tuple[Lending, Mapping[int, LayerLoans]] | None = None  # of the last step that lends

    def join(self) -> None:
        """Join the process group before Lightning does, for decisions that ranks must share. A Trainer owns
        us by now.
        """
        self._setup_distributed()

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        titan.prepare(self.root_device.type)
        self._setup_distributed()
        assert dist.get_world_size() == self.topology.world_size, (
            "processes.run_ranks checks the world size first"
        )
        self._dims = titan.build_parallel_dims(self.topology, device_type=self.root_device.type)
        self._device_mesh = titan.dense_mesh(self._dims, device_type=self.root_device.type)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def parallelize(self, decoder: HybridDecoder) -> None:
        """Shard a decoder on the meta device in place and allocate its shards, which the caller fills; one
        process leaves it whole, unless weights are cast for computing.
        """
        require_context(decoder)
        decoder.set_expert_dtype(self.expert_dtype)
        if self.dtype is torch.float64:
            decoder.double()
        if self.topology.world_size == 1 and self.dtype is not torch.bfloat16:
            decoder.recompute = self.recompute
        else:
            assert self._dims is not None
            titan.parallelize(
                decoder,
                dims=self._dims,
                dtype=self.dtype,
                recompute=self.recompute,
                device_type=self.root_device.type,
            )
        decoder.allocate(self.root_device)
        if self.compiles:
            self.graphs = self.graphs or GraphLog()
            compile_regions(decoder, static_rows=self.static_rows, backend=self.compile_backend)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if self._collects:
            self._collected = checkpoint
        else:  # a callback of the user
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def state_of(self, trainer: Trainer) -> dict[str, Any]:
        """Return what a checkpoint of this moment contains, without writing it: tensors on the CPU, which
        may be those that train. A collective of all ranks.
        """
        self._collects = True
        try:
            trainer.save_checkpoint("")  # through every hook of Lightning
        finally:
            self._collects = False
        collected, self._collected = self._collected, {}
        return collected

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Weights and optimizer state from the shards, whatever topology wrote them; returns everything else.

        Settings of an optimizer, such as rates and decay, stay those of this run's configuration. Lightning's
        own function refuses a model that is not sharded, which one process is. A collective of all ranks.
        """
        del weights_only  # the checkpoint holds plain values beside its shards
        path = Path(self.broadcast(checkpoint_path))
        assert self.model is not None
        check_weights(cast(Any, self.lightning_module).decoder, str(path), key="ckpt_path")
        weights = {"state_dict": get_model_state_dict(self.model)}
        load_tensors(weights, path, key="ckpt_path")
        set_model_state_dict(self.model, weights["state_dict"])
        for index, optimizer in enumerate(self.optimizers):
            own = get_optimizer_state_dict(self.model, optimizer)
            _refuse_another_optimizer(cast(Any, own["state"]), prefix=f"optimizer_{index}.state", path=path)
            load_tensors({f"optimizer_{index}": {"state": own["state"]}}, path, key="ckpt_path")  # in place
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=own)
        return load_plain_state(path, key="ckpt_path")

    def forward_pack(
        self,
        pack: Pack,
        *,
        mode: RouteMode,
        slots: ScoredSlots,
        entropy: bool = False,
        trace: RouteTrace | None = None,
        decoder: HybridDecoder | None = None,
    ) -> DecoderOutput:
        """Run the policy, or another `decoder`, on one pack that lies on `root_device`: log-probs [S] of its
        scored slots, and on request their entropies, both of logits over `rollouts.temperature`.
        """
        if decoder is None:
            decoder = cast(Any, self.lightning_module).decoder
        request = LogprobRequest(
            targets=pack["tokens"][slots.heads],
            kind=self.logprobs,
            chunk=self.logprob_chunk,
            entropy=entropy,
            temperature=self.temperature,
        )
        context = pack.context(mode=mode, trace=trace, loans=self._loans_of(pack, decoder=decoder))
        return spread(decoder(pack.row_tokens, context, slots.rows, request), slots=slots)

    def _loans_of(self, pack: Pack, *, decoder: HybridDecoder) -> Mapping[int, LayerLoans] | None:
        """This rank's loans of the step of `pack`; one lending is moved to the device once."""
        if pack.lending is None:
            return None
        if self._loans is None or self._loans[0] is not pack.lending:
            layout = decoder.config.expert_layout
            assert layout is not None, "only a model with experts lends them"
            loans = loans_of_rank(
                pack.lending,
                layout=layout,
                topology=self.topology,
                rank=self.global_rank % self.topology.ep_degree,
                device=self.root_device,
            )
            self._loans = pack.lending, loans
        return self._loans[1]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """All-reduced sum of a small tensor; every rank calls it once per update, so counts agree."""
        if self.world_size > 1:
            note_collective("sum_over_ranks")
            dist.all_reduce(values)
        return values

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """All-reduced elementwise maximum of a small tensor, called like `sum_over_ranks`."""
        if self.world_size > 1:
            note_collective("max_over_ranks")
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def from_rank_zero(self, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, on every rank: for choices that another process might make
        otherwise.
        """
        note_collective("from_rank_zero")
        return self.broadcast(make() if self.global_rank == 0 else cast(T, None))

    def meet(self, mine: Future[Any] | None = None) -> None:
        """Return once `mine` is done on every rank; None: this rank waits for nothing of its own.

        For work outside this job, such as requests to engines: however long one rank's takes, no rank is
        inside a collective for longer than a lap, and one that is gone or stuck is found by a collective's
        limit. A collective of all ranks, which decide together how many laps there are.
        """
        done = False
        while not done:
            done = mine is None or bool(wait([mine], timeout=self._lap).done)
            if self.world_size > 1:
                flag = torch.tensor([int(done)], device=self.root_device)
                dist.all_reduce(flag, op=dist.ReduceOp.MIN)
                done = bool(flag.item())

    def gather_objects(self, value: object, *, group: dist.ProcessGroup | None = None) -> list[Any]:
        """The objects of all ranks, in rank order. `group`: of all ranks, with a limit of its own."""
        if self.world_size == 1:
            return [value]
        note_collective("gather_objects")
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=group)
        return gathered


def spread(output: DecoderOutput, *, slots: ScoredSlots) -> DecoderOutput:
    """Log-probs and entropies [P] of heads -> [S] of scored slots."""
    if slots.head_of is None:
        return output
    assert output.logprobs is not None, "a forward with slots gives log-probs"
    entropies = output.entropies
    return output._replace(
        logprobs=output.logprobs.index_select(0, slots.head_of),
        entropies=None if entropies is None else entropies.index_select(0, slots.head_of),
    )


def _refuse_another_optimizer(state: Mapping[str, Any], *, prefix: str, path: Path) -> None:
    """Refuse a checkpoint without the optimizer state that this run continues: `state` by parameter, stored
    under names with `prefix`.
    """
    stored = read_metadata(path, key="ckpt_path").state_dict_metadata
    wanted = [f"{prefix}.{name}.{part}" for name, parts in state.items() for part in parts]
    absent = [name for name in wanted if name not in stored]
    if absent:
        raise Refusal(
            f"optim.kind ckpt_path={path}: the checkpoint has no {absent[0]} ({len(absent)} such), its run "
            "used another optimizer: set the optim.kind of that run, or start a new run with init_from"
        )


def cluster_environment() -> ClusterEnvironment:
    """The environment from which Lightning learns the rank of this process.

    Every rank under `run_ranks` carries torchrun's variables, also one that srun started: Lightning's own
    SLURM class would save and requeue inside a signal handler.
    """
    return TorchElasticEnvironment() if "RANK" in os.environ else LightningEnvironment()


def local_device(config: Config) -> torch.device:
    """The device of this rank."""
    if config.trainer.accelerator == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", cluster_environment().local_rank())
