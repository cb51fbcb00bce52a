"""What the ranks of test_distributed.py run: recipes over one, two and four gloo ranks, and what was seen.

Each rank runs the recipes as `run_ranks` would call them and leaves `world{n}-rank{r}.pt`. Hooks of torch
watch from outside: every forward of a decoder, and the full gradients that an optimizer is about to use. The
world of one process runs first: its weights and files are what the other worlds start from.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from bounds import BOUND_SECONDS
from gloo_world import full, joined
from routed_fixture import FIXTURE_BUDGET, FIXTURE_MODEL, fixture_samples
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import MODEL, config_of, masked, samples_of, write_files

from olmo_rl.collections.datamodule import RolloutDataModule
from olmo_rl.collections.sources import FileSource
from olmo_rl.config import (
    BatchConfig,
    BlockNorms,
    Config,
    Dtype,
    LossConfig,
    OnNonfinite,
    OptimConfig,
    PackingConfig,
    PackingKind,
    PolicyConfig,
    Recipe,
    Recompute,
    Reduction,
    RolloutsConfig,
    ScoringConfig,
    ScoringMode,
    SftConfig,
    Source,
    StrategyConfig,
    TaskConfig,
    TaskKind,
    TrainerConfig,
)
from olmo_rl.data import validation
from olmo_rl.data.files import collection_paths, read_collection
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.sharded import whole_weights
from olmo_rl.policy.weights import read_weights
from olmo_rl.rollouts.engines import RemoteEngine, Wait
from olmo_rl.running.callbacks import ContractLog
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.trainer import build_trainer
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.publication import Publication
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample
from recipes import rollout, score, sft, train

STEPS = ("distributed_cases:write_inputs", *(f"distributed_cases:run_rank*{n}" for n in (1, 2, 4)))
TWELVE = ((3, 1), (2, 3), (4, 7), (1, 2), (5, 5), (2, 6), (6, 4), (3, 3), (1, 1), (2, 8), (7, 2), (3, 5))
BUDGET = 24
# Even positions go to rank 0: [4, 5], 7, 8, 6, 9 are five packs of ten tokens, 6 7 8 9 6 7 on rank 1 are six.
FIVE_AND_SIX = (4, 6, 5, 7, 7, 8, 8, 9, 6, 6, 9, 7)


def odd_responses(response: str, answer: str) -> float:
    """A verifier that an untrained policy satisfies now and then."""
    return float(len(response) % 2)


@dataclass(eq=False)
class Watch:
    """Operations of torch since `clear`: forwards of decoders with and without gradients, gradients per
    update.
    """

    forwards: list[bool] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    decoder: HybridDecoder | None = None
    terminate_at: int | None = None

    def clear(self) -> None:
        self.forwards, self.gradients, self.terminate_at = [], [], None

    def on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, HybridDecoder):
            self.decoder = module
            self.forwards.append(torch.is_grad_enabled())

    def on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer.param_groups[0]["lr"] == 0:
            return  # saving and loading step once at rate 0, to create the optimizer's state
        assert self.decoder is not None
        self.gradients.append(full({n: p.grad for n, p in self.decoder.named_parameters()}))
        if len(self.gradients) == self.terminate_at:
            os.kill(os.getpid(), signal.SIGTERM)


def digest(weights: Mapping[str, Tensor]) -> str:
    value = hashlib.sha256()
    for name in sorted(weights):
        value.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return value.hexdigest()


@dataclass(kw_only=True, eq=False)
class Rank:
    """One rank at work: `directory` is shared by all worlds, `results` go to the test."""

    world: int
    directory: Path
    watch: Watch
    results: dict[str, Any] = field(default_factory=dict)

    def config(self, name: str, *, ep: int | None = None, files: str = "twelve", **sections: Any) -> Config:
        """A run over the collections in `files`; two ranks share experts unless `ep` is given."""
        fields = {
            "trainer": TrainerConfig(devices=self.world, max_steps=1),
            "strategy": StrategyConfig(
                ep_degree=min(self.world, 2) if ep is None else ep,
                timeout_seconds=BOUND_SECONDS,
            ),
            "packing": PackingConfig(kind=PackingKind.consecutive, max_tokens=BUDGET),
        }
        config = config_of(self.directory / files, **(fields | sections))
        return replace(config, run_name=name, run_dir=str(self.directory / f"world{self.world}" / name))

    def run(self, name: str, recipe: Callable[[Config], None], config: Config, **watch: Any) -> None:
        """Run a recipe of this rank and note what it did, or how it ended."""
        self.watch.clear()
        self.watch.terminate_at = watch.get("terminate_at")
        found: dict[str, Any] = {"ended": None}
        try:
            recipe(config)
        except Refusal as error:
            found["ended"] = f"{type(error).__name__}: {error}"
        except SystemExit as ended:
            found["ended"] = ended.code
        dist.barrier()  # rank 0 writes last
        run_dir = Path(config.run_dir)
        log = run_dir / f"training_contract_rank{dist.get_rank()}.jsonl"
        found |= {
            "forwards": list(self.watch.forwards),
            "gradients": list(self.watch.gradients),
            "events": [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else [],
            "rows": read_metrics(run_dir / "metrics.csv") if (run_dir / "metrics.csv").is_file() else [],
        }
        if (run_dir / "scores.jsonl").is_file():
            lines = [json.loads(line) for line in (run_dir / "scores.jsonl").read_text().splitlines()]
            found["scores"] = {line["sample_id"]: line["policy_logprobs"] for line in lines}
        if (run_dir / "rollouts").is_dir():
            found["samples"] = [
                sample
                for path in collection_paths(run_dir / "rollouts")
                for sample in read_collection(path, require_routes=True).samples
            ]
        if self.watch.decoder is not None:
            found["weights"] = digest(full(dict(self.watch.decoder.named_parameters())))
        self.results[name] = found


def accept_huge_rewards() -> None:
    """Let rewards of this process that overflow reach the guard of the update, behind that of the files."""
    validation.LARGEST_REWARD = math.inf


def write_inputs(place: str) -> None:
    """Collections by name, below the directory, where `config_of` looks for them."""
    accept_huge_rewards()
    directory = Path(place)

    def lengths(*values: int, seed: int) -> list[Sample]:
        return samples_of([(1, length - 1) for length in values], seed=seed)

    twelve = samples_of(TWELVE, seed=1)
    write_files(directory / "twelve", [twelve])
    write_files(directory / "silent", [[masked(s) if i % 2 else s for i, s in enumerate(twelve)]])
    write_files(directory / "five and six", [lengths(*FIVE_AND_SIX, seed=2)])
    write_files(directory / "three", [lengths(8, 8, 8, seed=3)])
    collections = [samples_of(TWELVE[i : i + 4], seed=i, prefix=f"f{i}-") for i in range(4)]
    write_files(directory / "four", collections)
    # Advantages -2 over three tokens on rank 0, -1 over one on rank 1; the others only balance their groups.
    a, c, b, d = samples_of([(2, 3), (1, 2), (4, 1), (2, 2)], seed=4)
    uneven = [replace(a, reward=-2.0), replace(b, reward=-1.0), masked(replace(c, reward=2.0))]
    write_files(directory / "uneven", [[*uneven, masked(replace(d, reward=1.0))]])
    huge = [replace(s, reward=3e38 if i % 2 else -3e38) for i, s in enumerate(samples_of(TWELVE[:4], seed=5))]
    write_files(directory / "huge", [huge])
    write_files(directory / "fixture", [fixture_samples("u1-"), fixture_samples("u2-")])
    write_files(directory / "changed fixture", [fixture_samples("u1-", changed=True)])
    lines = [json.dumps({"prompt": f"{'ab' * (i % 4)}{i}?", "answer": str(i)}) for i in range(100)]
    (directory / "problems.jsonl").write_text("\n".join(lines) + "\n")
    chat = [{"prompt": f"{i}{'q' * (i % 7)}", "response": f"{i * i}{'r' * (i % 4)}"} for i in range(11)]
    for name, rows in (("chat", chat), ("broken", [*chat[:7], {"messages": []}, *chat[8:]])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text)


def follow_fixture(rank: Rank) -> None:
    """Two updates and the scores of the documents in routed_fixture.py, packed and unpacked."""
    packed = PackingConfig(kind=PackingKind.consecutive, max_tokens=FIXTURE_BUDGET)
    for name, packing in (("packed", packed), ("unpacked", PackingConfig())):
        sections: dict[str, Any] = {
            "model": FIXTURE_MODEL,
            "packing": packing,
            "loss": LossConfig(tis_low=0.9, tis_high=1.1),
        }
        steps = TrainerConfig(devices=rank.world, max_steps=2)
        name = f"fixture {name}"
        rank.run(name, train.train, rank.config(name, files="fixture", trainer=steps, **sections))
        for files in ("fixture", "changed fixture"):
            run = f"{name} scores of {files}"
            rank.run(run, score.score, rank.config(run, files=files, **sections))


def compare_updates(rank: Rank) -> None:
    """One update in every form that must give the same gradient, then forms whose gradient is another."""
    unpacked = PackingConfig(kind=PackingKind.none)
    forms: dict[str, dict[str, Any]] = {
        "packed": {},
        "one pack each": {"packing": PackingConfig(kind=PackingKind.consecutive, max_tokens=64)},
        "unpacked": {"packing": unpacked},
        "recomputed": {"policy": PolicyConfig(recompute=Recompute.full)},
        "scored first": {"scoring": ScoringConfig(mode=ScoringMode.always)},
        "by response": {"loss": LossConfig(reduction=Reduction.response)},
        "silent": {"files": "silent"},
    }
    if rank.world == 4:
        forms = {name: forms[name] for name in ("packed", "silent")}
    for name, sections in forms.items():
        rank.run(name, train.train, rank.config(name, **sections))
    if rank.world == 2:
        rank.run("no experts shared", train.train, rank.config("no experts shared", ep=1))


def follow_contracts(rank: Rank) -> None:
    """Contracts that only several ranks can break: counts, denominators, errors."""
    plain = LossConfig(normalize_advantages=False)
    ten = PackingConfig(kind=PackingKind.consecutive, max_tokens=10)
    always = ScoringConfig(mode=ScoringMode.always)
    rank.run("uneven", train.train, rank.config("uneven", files="uneven", loss=plain))
    rank.run("twelve scored", score.score, rank.config("twelve scored"))
    for name, recipe in (("five and six", train.train), ("five and six scored", score.score)):
        rank.run(name, recipe, rank.config(name, files="five and six", packing=ten, scoring=always))
    for name, recipe in (("three", train.train), ("three scored", score.score)):
        rank.run(name, recipe, rank.config(name, files="three", packing=ten))
    for choice in OnNonfinite:
        loss = replace(plain, on_nonfinite=choice)
        name = f"huge {choice.value}"
        rank.run(name, train.train, rank.config(name, files="huge", loss=loss))


def interrupt_and_resume(rank: Rank) -> None:
    """Four updates straight, and the same four with a signal to the last rank during the second."""
    steps = TrainerConfig(devices=rank.world, max_steps=4)
    rank.run("straight", train.train, rank.config("straight", files="four", trainer=steps))
    config = rank.config("interrupted", files="four", trainer=steps)
    last = dist.get_rank() == rank.world - 1
    rank.run("interrupted", train.train, config, terminate_at=2 if last else None)
    rank.results["saved"] = sorted(p.name for p in (Path(config.run_dir) / "checkpoints").rglob("*"))
    rank.run("resumed", train.train, replace(config, ckpt_path="last"))


def generate(rank: Rank) -> None:
    """Supervised updates, then rollouts, their scores, and training on the local engine's samples, from the
    weights and files that one process made.
    """
    local: dict[str, Any] = {
        "packing": PackingConfig(kind=PackingKind.consecutive, max_tokens=64),
        "task": TaskConfig(
            kind=TaskKind.jsonl,
            path=str(rank.directory / "problems.jsonl"),
            verifier={"_target_": "distributed_cases.odd_responses"},
            eval_problems=7,
            eval_interval=1,
        ),
        "rollouts": RolloutsConfig(group_size=4, max_new_tokens=12),
        "batch": BatchConfig(samples_per_step=16),
        "optim": OptimConfig(lr=1e-2, warmup_steps=0),
        "trainer": TrainerConfig(devices=rank.world, max_steps=2),
    }
    single = rank.directory / "world1"
    weights = str(single / "sft" / "checkpoints" / "step-2")
    rank.run(
        "sft",
        sft.train,
        rank.config("sft", recipe=Recipe.sft, loss=LossConfig(router_z_weight=0.01), **local),
    )
    several = {"recipe": Recipe.rollout, "rollouts": replace(local["rollouts"], collections=2)}
    rank.run("rollout", rollout.generate, rank.config("rollout", init_from=weights, **(local | several)))
    files = RolloutsConfig(source=Source.files, path=str(single / "rollout" / "rollouts"))
    rank.run("scored", score.score, rank.config("scored", init_from=weights, rollouts=files))
    rank.run("local", train.train, rank.config("local", init_from=weights, **local))


def converse(rank: Rank) -> None:
    """Supervised updates on chat data, padded, with held-out loss; then data whose eighth row, the second
    rank's to read, is no conversation.
    """
    for name, evaluated in (("chat", True), ("broken", False)):
        held_out = str(rank.directory / "chat.jsonl") if evaluated else None
        config = rank.config(
            name,
            recipe=Recipe.sft,
            sft=SftConfig(
                path=str(rank.directory / f"{name}.jsonl"),
                shuffle_buffer=5 if evaluated else 1,
                eval_path=held_out,
                eval_samples=5 if evaluated else None,
            ),
            batch=BatchConfig(samples_per_step=4),
            packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=32, pad_to_budget=True),
            trainer=TrainerConfig(devices=rank.world, max_steps=3),
        )
        rank.run(f"{name} data", sft.train, config)


def ready() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


@dataclass(eq=False)
class Engines:
    """A client of engines that records publications."""

    published: dict[int, str] = field(default_factory=dict)
    adopted: dict[int, str] = field(default_factory=dict)
    full: bool = False

    @property
    def versions(self) -> dict[str, int | None]:
        return {"http://engine": max(self.published)}

    def publish(self, path: str, version: int, *, wait: Wait) -> None:
        wait(ready())
        if self.full:
            raise Refusal("no engine could be updated")
        self.published[version] = path

    def hold(self, *, wait: Wait) -> None:
        """No request is under way."""
        wait(ready())

    def probe(self, requests: object, *, max_new_tokens: int, seed: int) -> Future[dict[str, str]]:
        """None of its engines can be asked."""
        future: Future[dict[str, str]] = Future()
        future.set_result({})
        return future

    def adopt(self, path: str, version: int, *, versions: dict[str, int | None]) -> None:
        assert versions == {"http://engine": version}
        self.adopted[version] = path


def publish(rank: Rank, *, name: str, block_norms: BlockNorms) -> None:
    """The weights that a publisher finds, as a copy on every rank and in what is written for engines, by
    policy version; what the policy then holds.
    """
    config = rank.config(
        name,
        files="four",
        trainer=TrainerConfig(devices=rank.world, max_steps=2),
        model=replace(MODEL, block_norms=block_norms),
    )
    given: dict[int, str] = {}
    written: dict[int, str] = {}
    engines, strategy = Engines(), ExpertParallelStrategy(config)
    publication = Publication(cast(RemoteEngine, engines), config=config, strategy=strategy)

    def note(decoder: nn.Module, version: int) -> dict[str, float]:
        given[version] = digest(whole_weights(decoder))
        metrics = publication(decoder, version)
        if version in engines.published:
            found = read_weights(engines.published[version])
            written[version] = digest({name: found[name] for name, _ in decoder.named_parameters()})
        return metrics

    killed = Path(config.run_dir) / "published" / ".step-1.4242.partial"  # of a run that ended inside it
    killed.mkdir(parents=True, exist_ok=True)
    module = PolicyModule(config, objective=POLICY)
    module.publish = note
    data = RolloutDataModule(config, source=FileSource(config))
    trainer = build_trainer(config, strategy=strategy, max_steps=2, callbacks=[], loggers=[])
    trainer.fit(module, datamodule=data)
    held = digest(full(dict(module.policy.named_parameters())))
    kept = sorted(path.name for path in (Path(config.run_dir) / "published").iterdir())
    dist.barrier()  # rank 0 writes the next
    engines.full, refused = True, ""
    try:
        publication(module.policy, 2)
    except Refusal as refusal:
        refused = str(refusal)
    rank.results[name] = {
        "given": given,
        "written": written,
        "adopted": [Path(path).name for path in engines.adopted.values()],
        "held": held,
        "kept": kept,
        "refused": refused,
    }


def train_in_double(config: Config) -> None:
    config = replace(config, policy=replace(config.policy, dtype=Dtype.float64))
    strategy = ExpertParallelStrategy(config)
    trainer = build_trainer(
        config, strategy=strategy, max_steps=1, callbacks=[ContractLog(config.run_dir)], loggers=[]
    )
    data = RolloutDataModule(config, source=FileSource(config))
    trainer.fit(PolicyModule(config, objective=POLICY), datamodule=data)


def pad(rank: Rank) -> None:
    """One update with and without pads, with replayed and live routes, in float64 and float32."""
    for replay in (True, False):
        for pads in (False, True):
            packing = PackingConfig(kind=PackingKind.consecutive, max_tokens=BUDGET, pad_to_budget=pads)
            sections = {"packing": packing, "policy": PolicyConfig(replay=replay)}
            name = f"{'padded' if pads else 'bare'} {'replayed' if replay else 'live'}"
            rank.run(f"{name} double", train_in_double, rank.config(f"{name} double", **sections))
            rank.run(name, train.train, rank.config(name, **sections))


def run_rank(number: int, world: int, directory: str) -> None:
    accept_huge_rewards()
    with joined(number, world=world, directory=directory):
        watch = Watch()
        rank = Rank(world=world, directory=Path(directory), watch=watch)
        with register_module_forward_hook(watch.on_forward), register_optimizer_step_pre_hook(watch.on_step):
            compare_updates(rank)
            if world < 4:
                generate(rank)
                converse(rank)
                follow_fixture(rank)
            if world == 2:
                follow_contracts(rank)
                pad(rank)
                interrupt_and_resume(rank)
                # Hugging Face directories can say the first model, and not the second.
                publish(rank, name="published", block_norms=BlockNorms.both)
                publish(rank, name="published flat", block_norms=BlockNorms.before)
        torch.save(rank.results, Path(directory) / f"world{world}-rank{number}.pt")
