"""What the ranks of test_two_ranks.py run: router losses, a frozen reference, a guard, weights of Hugging
Face directories; one and two gloo ranks. Each leaves `world{n}-rank{r}.pt`; ranks are those of
distributed_cases.py.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from distributed_cases import TWELVE, Rank, Watch, accept_huge_rewards
from gloo_world import full, joined
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import MODEL, samples_of, write_files

from olmo_rl.config import (
    AuxGrouping,
    BlockNorms,
    CountSource,
    KlEstimator,
    LayerType,
    LossConfig,
    ModelConfig,
    Reduction,
    ScoringConfig,
    TrainerConfig,
)
from olmo_rl.hf.writing import export_hf
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import save_weights
from olmo_rl.run_directory import complete_checkpoints
from recipes import train

STEPS = ("two_rank_cases:write_inputs", *(f"two_rank_cases:run_rank*{world}" for world in (1, 2)))
ROUTER = LossConfig(router_aux_weight=0.3, router_z_weight=0.02)
SEQUENCE = replace(
    ROUTER,
    router_aux_grouping=AuxGrouping.sequence,
    router_aux_reduction=Reduction.response,
    router_z_reduction=Reduction.response,
    router_count_source=CountSource.current,
)
KL = LossConfig(kl=KlEstimator.k2, kl_coef=0.5)
ATTENTION = [LayerType.full_attention] * len(MODEL.layer_types)
# A directory that fills shards, and one of tied embeddings, which is read whole.
DIRECTORIES: dict[str, ModelConfig] = {
    "olmo3moe": replace(
        MODEL,
        block_norms=BlockNorms.both,
        latent_dim=8,
        latent_norm=True,
        shared_hidden=8,
        kda_heads=8,  # many small ones: the gradient of A_log loses less to cancellation (matrix_cases.py)
        kda_head_dim=4,
    ),
    "tied qwen3_moe": replace(MODEL, layer_types=ATTENTION, tie_embeddings=True),
}


def cases(rank: Rank) -> None:
    two = TrainerConfig(devices=rank.world, max_steps=2)
    rank.run("by sequence", train.train, rank.config("by sequence", loss=SEQUENCE))
    rank.run("reference", train.train, rank.config("reference", files="bare", loss=KL, trainer=two))
    for name, model in DIRECTORIES.items():
        given = {"directory": rank.directory / name, "file": rank.directory / f"{name}.safetensors"}
        for form, path in given.items():
            run = f"{name} {form}"
            rank.run(run, train.train, rank.config(run, model=model, init_from=str(path)))
    if rank.world == 1:
        return
    for degree in (1, 2):
        name = f"by pack, EP{degree}"
        rank.run(name, train.train, rank.config(name, ep=degree, loss=ROUTER))
    resumed = rank.config("resumed", files="bare", loss=KL, trainer=replace(two, max_steps=1))
    rank.run("half", train.train, resumed)
    rank.run("resumed", train.train, replace(resumed, ckpt_path="last", trainer=two))
    lost = {"model": DIRECTORIES["olmo3moe"], "init_from": str(rank.directory / "lost")}
    rank.run("lost", train.train, rank.config("lost", **lost))
    four = TrainerConfig(devices=rank.world, max_steps=4)
    plain = LossConfig(normalize_advantages=False)
    huge = rank.config("not finite", files="huge second", loss=plain, trainer=four)
    rank.run("not finite", train.train, huge)
    checkpoints = complete_checkpoints(huge.run_dir)
    rank.results["not finite"]["checkpoints"] = [path.name for path in checkpoints]
    gap = rank.config("gap", scoring=ScoringConfig(max_behavior_gap=0.1))
    rank.run("gap", train.train, gap)


def run_rank(number: int, world: int, directory: str) -> None:
    accept_huge_rewards()
    with joined(number, world=world, directory=directory):
        watch = Watch()
        rank = Rank(world=world, directory=Path(directory), watch=watch)
        with register_module_forward_hook(watch.on_forward), register_optimizer_step_pre_hook(watch.on_step):
            cases(rank)
        if watch.decoder is not None:
            rank.results["full"] = full(dict(watch.decoder.named_parameters()))
        torch.save(rank.results, Path(directory) / f"world{world}-rank{number}.pt")


def write_inputs(directory: str) -> None:
    accept_huge_rewards()
    write_files(Path(directory) / "twelve", [samples_of(TWELVE, seed=1)])
    bare = [
        [replace(s, ref_logprobs=None) for s in samples_of(TWELVE, seed=i, prefix=f"f{i}-")] for i in (2, 3)
    ]
    write_files(Path(directory) / "bare", bare)
    huge = [replace(s, reward=3e38 if i % 2 else -3e38) for i, s in enumerate(samples_of(TWELVE, seed=5))]
    write_files(Path(directory) / "huge second", [samples_of(TWELVE, seed=4, prefix="f"), huge])
    for name, model in DIRECTORIES.items():
        decoder = HybridDecoder(model, attention="reference")
        decoder.init_weights(7)  # runs have seed 0: initial weights of their own are others
        weights = {key: parameter.detach() for key, parameter in decoder.named_parameters()}
        export_hf(weights, model=model, directory=Path(directory) / name, shard_bytes=4000)
        save_weights(weights, Path(directory) / f"{name}.safetensors")
    shutil.copytree(Path(directory) / "olmo3moe", Path(directory) / "lost")
    sorted((Path(directory) / "lost").glob("*.safetensors"))[-1].unlink()
