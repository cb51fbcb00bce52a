"""The policy as a LightningModule: one `training_step` is one optimizer update over this rank's packs.

Manual optimization: forward and backward pack by pack, losses divided by global counts first, gradients
synchronised on the last pack, one all-reduce of sums and one of maxima, clip across meshes, step. Refuses to
step on anything non-finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from olmo_rl.backends import attention_of, backends_of, linear_of
from olmo_rl.config import Config, OnNonfinite
from olmo_rl.data.packs import PackedBatch, RouteMode
from olmo_rl.hf_config import is_hf_directory
from olmo_rl.policy import sharded
from olmo_rl.policy.compiling import Graph
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.interop import fill, load_weights
from olmo_rl.policy.kernels import refuse_gpu
from olmo_rl.policy.logprobs import check_logprobs
from olmo_rl.training.frozen_reference import (
    FrozenReference,
    build_reference,
    check_fingerprint,
    check_recorded,
)
from olmo_rl.training.scoring import Decision, ScoringSchedule
from olmo_rl.training.step_checks import nonfinite, refuse_disagreement
from olmo_rl.training.step_report import UpdateReport
from olmo_rl.training.stopwatch import Stopwatch
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.transfer import moved
from olmo_rl.training.update import Objective, PackReport, run_pack, score_pack


class PolicyModule(LightningModule):
    """A decoder trained by `objective`. `report` describes the last update, None after a skipped one;
    `new_graphs` are what it compiled.

    `publish` is called with the decoder and the policy version before the first update and after every
    update, by all ranks.
    """

    def __init__(self, config: Config, *, objective: Objective) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.objective = objective
        self.decoder: HybridDecoder | None = None
        self.reference: FrozenReference | None = None
        self.publish: Callable[[HybridDecoder, int], None] | None = None
        self.on_predict: Callable[[Any], None] | None = None
        self.on_pack: Callable[[int, int], None] | None = None
        self.report: UpdateReport | None = None
        self.new_graphs: list[Graph] = []
        self.skipped_updates = 0
        self._watch = Stopwatch(torch.device("cpu"))
        self._nonfinite_in_a_row = 0
        self.schedule = ScoringSchedule(config=config)

    @property
    def policy(self) -> HybridDecoder:
        """The decoder, once Lightning configured the model."""
        assert self.decoder is not None
        return self.decoder

    @property
    def strategy(self) -> ExpertParallelStrategy:
        return cast(ExpertParallelStrategy, self.trainer.strategy)

    @override
    def configure_model(self) -> None:
        if self.decoder is not None:
            return
        check_logprobs(self.config.policy.logprobs)
        if self.device.type == "cuda":
            refuse_gpu(backends_of(self.config), capability=torch.cuda.get_device_capability(self.device))
        self.decoder = self._build(self.config.init_from)
        if self.objective.anchored and self.trainer.state.fn is TrainerFn.FITTING:
            self.reference = build_reference(self.config, strategy=self.strategy, build=self._build)

    def _build(self, weights: str | None) -> HybridDecoder:
        """A decoder, sharded, with the weights at a path, None: the initial ones of this seed.

        A Hugging Face directory fills the shards, and no rank ever holds the whole; tied embeddings are one
        parameter that empty modules would make two, so that such a model is filled before it is sharded.
        """
        config = self.config
        key = "init_from" if weights == config.init_from else "loss.reference"
        streamed = weights is not None and is_hf_directory(weights) and not config.model.tie_embeddings
        with torch.device("meta") if streamed else nullcontext():
            decoder = HybridDecoder(config.model, attention=attention_of(config), linear=linear_of(config))
        if not streamed:
            decoder.init_weights(config.seed)
            if weights is not None:
                load_weights(decoder, weights, key=key)
        self.strategy.parallelize(decoder)
        if streamed:
            fill(decoder, cast(str, weights), key=key)
        return decoder

    @override
    def configure_optimizers(self) -> Any:
        optim = self.config.optim
        optimizer = torch.optim.AdamW(
            parameter_groups(self.policy),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        warmup = max(1, optim.warmup_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        return [optimizer], [scheduler]

    @override
    def on_train_start(self) -> None:
        self.publish_weights()

    @override
    def on_predict_start(self) -> None:
        self.publish_weights()

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> None:
        assert self.on_predict is not None, "the recipe says what a prediction is"
        self.on_predict(batch)

    def publish_weights(self) -> None:
        """Hand the weights to whoever generates, a collective."""
        if self.publish is not None:
            self.publish(self.policy, self.trainer.global_step)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """An update moves its packs itself, one ahead of the computation."""
        if self.trainer.training:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.report = None
        self.new_graphs = []
        cast(Any, self.trainer)._results.reset()  # or every row repeats what only earlier updates told
        if not batch.packs:
            self.skipped_updates += 1  # the contract log tells it; metrics.csv holds updates
            batch.finished = True
            return
        started = time.perf_counter()
        self._watch = Stopwatch(self.device)
        with self._watch.lap("score"):
            decision = self._prepare_anchors(batch)
            references = self._score_reference(batch)
        reports = self._accumulate_gradients(batch, decision=decision, references=references)
        report = UpdateReport.of(
            reports,
            batch=batch,
            decision=decision,
            device=self.device,
            replica=self.strategy.topology.replica_of(self.strategy.global_rank),
            sum_over_ranks=self.strategy.sum_over_ranks,
            max_over_ranks=self.strategy.max_over_ranks,
        )
        with self._watch.lap("optimizer"):
            norm = sharded.clip_grad_norm(self.policy, max_norm=self.config.optim.max_grad_norm)
        report.grad_norm = float(norm)
        report.lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        if self.objective.anchored and self.config.loss.kl_coef > 0:
            report.reference = "recorded" if self.reference is None else "frozen"
        if self._may_step(report, reports=reports):
            with self._watch.lap("optimizer"):
                self._step()
        batch.finished = True  # from here on a checkpoint goes on with the next step
        report.phases = self._watch.seconds()
        report.seconds = time.perf_counter() - started
        self.report = report
        compiled = self._look_for_graphs()
        report.warn_of_mismatch(update=self.trainer.global_step)
        try:
            report.publish_seconds = self._timed_publish()
        finally:  # an update that no engine took happened nevertheless, and its checkpoint has a row
            if report.stepped:
                skipped = {"batch/skipped_updates": float(self.skipped_updates)}
                self._log(report.metrics() | batch.facts | skipped | compiled)

    def _look_for_graphs(self) -> dict[str, float]:
        """Keep what was compiled since the last update; the number of graphs so far as a metric."""
        if self.strategy.graphs is None:
            return {}
        self.new_graphs = self.strategy.graphs.new()
        return {"compile/graphs": float(self.strategy.graphs.total)}

    def _prepare_anchors(self, batch: PackedBatch) -> Decision:
        """Score where this update needs it. With several steps per collection all of them are scored before
        the first.
        """
        if not self.objective.anchored:
            return Decision.skipped
        decision = self.schedule.decide(steps_in_collection=batch.steps_in_collection)
        wanted: Iterable[PackedBatch] = ()
        if decision is Decision.standalone:
            # One after another: while this step is scored, the planner works on the next.
            wanted = (step for step in batch.collection if step.packs)
        elif decision is Decision.checked:
            wanted = (batch,)
        for step in wanted:
            packs = moved(step.packs, device=self.device)
            step.anchors = [score_pack(pack, strategy=self.strategy, mode=self.mode) for pack in packs]
        return decision

    def _score_reference(self, batch: PackedBatch) -> list[Tensor] | None:
        """Log-probs of the frozen reference for every pack, None where it has no part. Its weights never
        change, so each step is scored when it trains.
        """
        if self.config.loss.kl_coef == 0 or not self.objective.anchored:
            return None
        check_recorded(batch.samples, frozen=self.reference is not None)
        if self.reference is None:
            return None
        return self.reference.score(moved(batch.packs, device=self.device), strategy=self.strategy)

    def _accumulate_gradients(
        self, batch: PackedBatch, *, decision: Decision, references: list[Tensor] | None
    ) -> list[PackReport]:
        reports = []
        count = len(batch.packs)
        packs = moved(batch.packs, device=self.device, watch=self._watch)
        for index, pack in enumerate(packs):
            sharded.set_gradient_sync(self.policy, last=index == count - 1)
            with self._watch.lap("forward"):
                report = run_pack(
                    pack,
                    strategy=self.strategy,
                    mode=self.mode,
                    objective=self.objective,
                    config=self.config,
                    batch=batch,
                    scored=None if batch.anchors is None else batch.anchors[index].to(self.device),
                    anchor_is_scored=decision is Decision.standalone,
                    reference=None if references is None else references[index],
                )
            with self._watch.lap("backward"):
                self.manual_backward(report.loss)
            report.loss = report.loss.detach()
            reports.append(report)
            if self.on_pack is not None:
                self.on_pack(index + 1, count)
        return reports

    def _may_step(self, report: UpdateReport, *, reports: list[PackReport]) -> bool:
        """Whether the optimizer may step: agreed by all ranks, since loss and norm are global."""
        update, gather = self.trainer.global_step + 1, self.strategy.gather_objects
        if report.finite:
            self._nonfinite_in_a_row = 0
            if self.objective.anchored:
                refuse_disagreement(report, reports=reports, update=update, config=self.config, gather=gather)
            return True
        if self.config.loss.on_nonfinite is OnNonfinite.skip:
            cast(torch.optim.Optimizer, self.optimizers()).zero_grad()
            report.stepped = False
            self.skipped_updates += 1
            self._nonfinite_in_a_row += 1
            if self._nonfinite_in_a_row <= self.config.batch.max_skips:
                return False
        in_a_row = self._nonfinite_in_a_row
        raise nonfinite(report, reports=reports, update=update, skips_in_a_row=in_a_row, gather=gather)

    def _step(self) -> None:
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        optimizer.step()
        optimizer.zero_grad()
        cast(torch.optim.lr_scheduler.LRScheduler, self.lr_schedulers()).step()

    def _timed_publish(self) -> float:
        started = time.perf_counter()
        self.publish_weights()
        return time.perf_counter() - started

    @property
    def mode(self) -> RouteMode:
        """Replayed routes where the objective has them; live routing otherwise."""
        return RouteMode.replay if self.config.replay and self.objective.replays else RouteMode.live

    def _log(self, metrics: dict[str, float]) -> None:
        step = float(self.trainer.global_step)
        self.log_dict({name: float(value) for name, value in metrics.items()} | {"step": step}, batch_size=1)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_updates"] = self.skipped_updates
        checkpoint["reference"] = None if self.reference is None else self.reference.fingerprint

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped_updates = checkpoint["skipped_updates"]
        check_fingerprint(self.reference, expected=checkpoint.get("reference"), config=self.config)


def parameter_groups(decoder: nn.Module) -> list[dict[str, Any]]:
    """Dense weights, then routed experts where there are any: a fused update cannot mix shards of two meshes.
    The groups are the same in every topology, so that a run can resume in another one.
    """
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in decoder.named_parameters():
        groups[".routed_experts." in name].append(parameter)
    return [{"params": parameters} for parameters in groups.values() if parameters]
