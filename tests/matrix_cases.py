"""The topology matrix: one hybrid model, two updates in every form that must give the same updates.

The ranks of worlds of one, two and four gloo processes each leave `world{n}-rank{r}.pt`. What must hold
between cells stands in matrix_checks.py.

Every topology gets the same samples in an order of its own, such that all of them form the SAME packs: then a
topology changes nothing but who computes what and how sums travel. `Files.arrival` keeps one order instead,
as a recorded file does, so that packs differ too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bounds import BOUND_SECONDS
from gloo_world import full, joined
from lightning.pytorch import Callback, Trainer
from model_cases import tiny_config
from torch import Tensor, nn
from typing_extensions import override

from olmo_rl.collections.datamodule import RolloutDataModule
from olmo_rl.collections.sources import FileSource
from olmo_rl.config import (
    AuxGrouping,
    BatchConfig,
    CallbacksConfig,
    Config,
    Dtype,
    LossConfig,
    OptimConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recompute,
    RolloutsConfig,
    Source,
    StrategyConfig,
    TaskConfig,
    TrainerConfig,
)
from olmo_rl.data.files import write_collection
from olmo_rl.data.packs import Step
from olmo_rl.planning.loads import tail_routes
from olmo_rl.running.trainer import build_trainer
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Collection, Sample, Topology

WORLDS = (1, 2, 4)
STEPS = ("matrix_cases:write_inputs", *(f"matrix_cases:run_rank*{world}" for world in WORLDS))
TOPOLOGIES = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
RECOMPUTED = {
    (1, 1): tuple(Recompute),
    (2, 1): (Recompute.none, Recompute.full),
    (2, 2): tuple(Recompute),
    (4, 2): (Recompute.none, Recompute.full),
    (4, 4): (Recompute.none, Recompute.full),
}
SHARING = ((1, 1), (2, 2), (4, 2))  # where samples of a group also share rows
UPDATES = 2
BUDGET = 48
# Lengths of the documents of every pack, two packs a column of the world of four. A pack holds at least 34
# tokens and begins with at least 15, so that no order of packs lets two of them merge.
COLUMNS = (((19, 17), (35,)), ((34,), (21, 26)), ((24, 18), (37,)), ((39,), (33, 15)))
# Small weights: their rounding errors stay rounding errors instead of being multiplied by steep layers. Many
# small KDA heads: the gradient of A_log is one number a head, a sum over tokens and channels that cancels.
# What was rounded before it counts sum|terms| / max|sum| times: 23 times with 2 heads of 16 channels, less
# than 5 times with these and `SEEDS`, so that the limits hold whatever kernels a CPU has.
MODEL = replace(tiny_config(), init_std=0.05, kda_heads=8, kda_head_dim=4)
SEEDS = (503, 281)  # of the samples of each update
LAYOUT = MODEL.expert_layout
assert LAYOUT is not None
ARRIVAL = (2, 4, 0, 1, 5, 11, 3, 10, 7, 8, 9, 6)  # packs of every world differ, and their numbers by rank
EXPERTS = ".routed_experts."
IDLE_LAYER, IDLE_EXPERT = LAYOUT.routed_layers[0], MODEL.num_experts - 1
ROUTER = {"router_aux_weight": 0.3, "router_z_weight": 0.02}


class Files(Enum):
    """`packs`: orders that keep the packs. `arrival`: one order for all. `idle`: as `packs`, but the first
    routed layer uses the experts of half of the ranks, and no layer the last expert. `ten`: as `packs`, with
    rewards that give the first gradient the norm 10. `shared`: samples of a group begin alike.
    """

    packs = "packs"
    arrival = "arrival"
    idle = "idle"
    ten = "ten"
    shared = "shared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of two updates."""

    world: int
    ep: int
    packed: bool = True
    trees: bool = False
    recompute: Recompute = Recompute.none
    double: bool = False
    files: Files = Files.packs
    router: bool = False
    max_grad_norm: float | None = None

    @property
    def packing(self) -> str:
        return "trees" if self.trees else "packed" if self.packed else "unpacked"

    def __str__(self) -> str:
        parts = [f"{self.world} ranks, EP{self.ep}", self.packing]
        parts += [f"recompute {self.recompute.value}", "float64" if self.double else "float32"]
        parts += [f"files {self.files.value}"] if self.files is not Files.packs else []
        parts += ["router losses"] if self.router else []
        parts += [f"norm at most {self.max_grad_norm:g}"] if self.max_grad_norm is not None else []
        return ", ".join(parts)


def matrix() -> list[Cell]:
    """Every topology packed and unpacked; then the forms that some topologies need. Packs of one document are
    among those of the packed form, so that recomputation runs there alone. What float64 compares with the
    closer limit need not run in float32 everywhere.
    """
    cells: list[Cell] = []
    for world, ep in TOPOLOGIES:
        base = Cell(world=world, ep=ep)
        double = replace(base, double=True)
        cells += [replace(base, recompute=recompute) for recompute in RECOMPUTED[world, ep]]
        cells += [replace(base, packed=False)] if world == ep <= 2 else []
        cells += [double, replace(double, packed=False)]
        cells += [replace(double, files=Files.arrival), replace(double, router=True)]
        if world == ep:
            cells += [replace(double, files=Files.idle)]
            cells += [replace(base, files=Files.ten), replace(base, files=Files.ten, max_grad_norm=1.0)]
        if (world, ep) in SHARING:
            shared = replace(base, files=Files.shared, router=True)
            forms = [shared, replace(shared, double=True)]
            forms += [replace(shared, recompute=Recompute.full)] if world == ep == 2 else []
            cells += [replace(cell, trees=trees, packed=trees) for cell in forms for trees in (True, False)]
        if world == ep == 2:
            cells += [replace(base, router=True, recompute=recompute) for recompute in Recompute]
    return cells


def seeded_faults() -> list[Cell]:
    """The few cells that distinguish the seeded faults."""
    one = Cell(world=1, ep=1, double=True)
    aux = replace(one, router=True)
    two = replace(one, world=2)
    alone = [one, replace(one, packed=False), aux, replace(aux, recompute=Recompute.full)]
    return [*alone, two, replace(two, ep=2)]


# Samples and their files


def column_order(world: int) -> list[int]:
    """Positions of the samples, packs kept whole: with `world` ranks every rank gets complete columns."""
    numbers = iter(range(sum(len(pack) for column in COLUMNS for pack in column)))
    columns = [[next(numbers) for pack in column for _ in pack] for column in COLUMNS]
    ranks = [[i for column in columns[rank::world] for i in column] for rank in range(world)]
    return [rank[k] for k in range(len(ranks[0])) for rank in ranks]


def samples_of_update(update: int, *, files: Files, reward_scale: float = 1.0) -> list[Sample]:
    """Twelve samples in groups of four. Tokens follow a rule and the one bad response of a group is trained
    in two tokens (once in none): what can be learnt adds up over tokens, so that gradients are not the small
    rest of large terms that cancel.
    """
    random = np.random.default_rng(SEEDS[update])
    lengths = [length for column in COLUMNS for pack in column for length in pack]
    samples = []
    for index, length in enumerate(lengths):
        prompt = 1 + index % 5
        bad = index % 4 == 3
        routes = random.random((length - 1, len(LAYOUT.routed_layers), LAYOUT.num_experts))
        loss_mask = np.arange(length) >= prompt
        loss_mask[prompt + 1] = False
        if bad:
            loss_mask[:] = False
            loss_mask[[prompt, prompt + 4]] = index != 7
        id = f"u{update}-s{index}"
        if files is Files.idle:
            routes[..., IDLE_EXPERT] = 2.0  # sorts last: nobody chooses it
            routes[:, 0, LAYOUT.num_experts // 2 :] = 2.0
            id = idle_id(id)
        tokens = (np.arange(length) + 11 * index) % MODEL.vocab_size
        if files is Files.shared and index % 4:
            # The second and third of a group leave its first after 9 tokens, the fourth the third after 12.
            other, common = (samples[-1], 12) if index % 4 == 3 else (samples[index - index % 4], 9)
            tokens[:common], routes[:common] = other.tokens[:common], 1
            np.put_along_axis(routes[:common], other.routes[:common].astype(np.int64), 0, axis=-1)
        samples.append(
            Sample(
                id=id,
                group=f"u{update}-g{index // 4}",
                tokens=tokens.astype(np.int32),
                response_mask=np.arange(length) >= prompt,
                loss_mask=loss_mask,
                behavior_logprobs=random.uniform(-4.4, -2.9, length).astype(np.float32),
                reward=reward_scale * (float(random.random()) + (-2 if bad else 1)),
                policy_version=0,
                routes=routes.argsort(-1)[..., : LAYOUT.top_k].astype(np.int16),
                finish_reason="stop",
            )
        )
    return samples


def idle_id(id: str) -> str:
    """The first id like this one whose tail leaves out what `Files.idle` promises to leave out: the last
    expert under every EP degree and, with four ranks, the last two ranks in the first routed layer.
    """
    for attempt in range(10_000):
        candidate = f"{id}-{attempt}"
        tails = [tail_routes(candidate, layout=LAYOUT, topology=Topology(4, ep)) for ep in (1, 2, 4)]
        if all(IDLE_EXPERT not in tail for tail in tails) and tails[2][0].max() < LAYOUT.num_experts // 2:
            return candidate
    raise AssertionError("tails are uniform, so that a few hundred ids suffice")


def write_files(directory: Path, files: Files, *, reward_scale: float = 1.0) -> None:
    """One collection an update, for every world in its own order."""
    for world in WORLDS:
        order = ARRIVAL if files in (Files.arrival, Files.shared) else column_order(world)
        for update in range(UPDATES):
            samples = samples_of_update(update, files=files, reward_scale=reward_scale)
            collection = Collection(samples=[samples[i] for i in order], layout=LAYOUT, source="test")
            path = files_of(directory, files, world=world) / f"collection-{update:05d}.parquet"
            write_collection(collection, path)


def write_inputs(directory: str) -> None:
    """All files but those whose rewards depend on what another cell found."""
    for files in set(Files) - {Files.ten}:
        write_files(Path(directory), files)


def write_faulty_inputs(directory: str) -> None:
    """The files of `seeded_faults`."""
    write_files(Path(directory), Files.packs)


def files_of(directory: Path, files: Files, *, world: int) -> Path:
    return directory / files.value / f"world{world}"


# One run


@dataclass(eq=False)
class Recorder(Callback):
    """Inputs of each update: full gradients as the optimizer sees them, sums over ranks, received rows."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    received: dict[int, list[Tensor]] = field(default_factory=dict)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for layer, block in zip(pl_module.config.model.layer_types, pl_module.policy.blocks, strict=True):
            del layer
            if block.moe_enabled:
                self._count_rows(block.moe.layer, block.moe.routed_experts.inner_experts)

    def _count_rows(self, layer: int, experts: nn.Module) -> None:
        """Rows of each local expert in every forward of a layer, int64 [forwards][E of this rank]."""
        counts = self.received.setdefault(layer, [])
        experts.register_forward_pre_hook(lambda module, args: counts.append(args[1].clone()))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        gradients = {name: p.grad for name, p in pl_module.policy.named_parameters()}
        assert all(gradient is not None for gradient in gradients.values()), "zeros, not None"
        self.gradients.append(full(gradients))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Step, batch_idx: int
    ) -> None:
        result = pl_module.result
        self.updates.append(
            {
                "grad_norm": result.grad_norm,
                "totals": result.totals.sums,
                "scoring": result.decision.value,
                "balance": result.totals.balance,
                "normalisers": (batch.normalisers.tokens, batch.normalisers.responses),
                "packs": [pack.ids for pack in batch.packs],
                "real_tokens": [pack.real_tokens for pack in batch.packs],
            }
        )


def config_of(cell: Cell, *, directory: Path) -> Config:
    kind = PackingKind.trees if cell.trees else PackingKind.consecutive
    rows = PackingConfig(kind=kind, max_tokens=BUDGET)
    files = files_of(directory, cell.files, world=cell.world)
    return Config(
        run_name="matrix",
        run_dir=str(directory),
        model=MODEL,
        task=TaskConfig(eval_problems=0),
        rollouts=RolloutsConfig(source=Source.files, path=str(files)),
        batch=BatchConfig(samples_per_step=None),
        packing=rows if cell.packed else PackingConfig(),
        policy=PolicyConfig(recompute=cell.recompute, dtype=Dtype.float64 if cell.double else Dtype.float32),
        loss=LossConfig(
            normalize_advantages=False,
            tis_low=0.5,
            tis_high=2.0,
            # Over whole packs the balancing loss depends on what lies in a pack.
            router_aux_grouping=AuxGrouping.sequence if cell.files is Files.shared else AuxGrouping.pack,
            **(ROUTER if cell.router else {}),
        ),
        # In float32 the weights keep their bits, so that both updates compare what ranks do and not how
        # rounding spreads: the last bit of one weight re-rounds every activation, and moves the gradient of
        # A_log, which is one number a head, by 4e-6. The float64 cells take real steps.
        optim=OptimConfig(
            lr=1e-3 if cell.double else 1e-12, warmup_steps=0, max_grad_norm=cell.max_grad_norm
        ),
        trainer=TrainerConfig(devices=cell.world, max_steps=UPDATES),
        strategy=StrategyConfig(ep_degree=cell.ep, timeout_seconds=BOUND_SECONDS),
        callbacks=CallbacksConfig(progress=False, pictures=False),
    )


def run_cell(cell: Cell, *, directory: Path) -> dict[str, Any]:
    """Train as a recipe does; what rank 0 gathered, and of the others a digest of the same."""
    config = config_of(cell, directory=directory)
    strategy = ExpertParallelStrategy(config)
    module = PolicyModule(config, objective=POLICY)
    recorder = Recorder()
    trainer = build_trainer(config, strategy=strategy, max_steps=UPDATES, callbacks=[recorder], loggers=[])
    trainer.fit(module, datamodule=RolloutDataModule(config, source=FileSource(config)))
    state = trainer.optimizers[0].state
    moments = full(
        {
            f"{name} {moment}": state[parameter][moment]
            for name, parameter in module.policy.named_parameters()
            for moment in ("exp_avg", "exp_avg_sq")
        }
    )
    found: dict[str, Any] = {"updates": recorder.updates, "received": recorder.received}
    found["digest"] = digest(*recorder.gradients, moments)
    if strategy.global_rank == 0:
        found |= {"gradients": recorder.gradients, "moments": moments}
    return found


def digest(*tensors: dict[str, Tensor]) -> str:
    value = hashlib.sha256()
    for group in tensors:
        for name in sorted(group):
            value.update(name.encode() + group[name].contiguous().numpy().tobytes())
    return value.hexdigest()


def run_rank(number: int, world: int, directory: str) -> None:
    """All cells of one world."""
    run_cells(matrix(), number=number, world=world, directory=directory)


def run_faulty_rank(number: int, world: int, directory: str) -> None:
    """Run the cases that distinguish the seeded faults."""
    run_cells(seeded_faults(), number=number, world=world, directory=directory)


def run_cells(cells: Sequence[Cell], *, number: int, world: int, directory: str) -> None:
    with joined(number, world=world, directory=directory):
        results: dict[Cell, dict[str, Any]] = {}
        for cell in (cell for cell in cells if cell.world == world):
            scaled = files_of(Path(directory), Files.ten, world=1)
            if cell.files is Files.ten and number == 0 and not scaled.exists():
                unscaled = results[replace(cell, files=Files.packs, max_grad_norm=None)]["updates"][0]
                write_files(Path(directory), Files.ten, reward_scale=10 / unscaled["grad_norm"])
            dist.barrier()
            results[cell] = run_cell(cell, directory=Path(directory))
        torch.save(results, Path(directory) / f"world{world}-rank{number}.pt")


def load(directory: Path) -> dict[Cell, list[dict[str, Any]]]:
    """By cell, what every rank found."""
    results: dict[Cell, list[dict[str, Any]]] = {}
    for world in WORLDS:
        for path in sorted(directory.glob(f"world{world}-rank*.pt")):
            for cell, found in torch.load(path, weights_only=False).items():
                results.setdefault(cell, []).append(found)
    return results
