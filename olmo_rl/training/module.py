"""The policy as a LightningModule: one `training_step` is one optimizer update over this rank's packs.

Manual optimization: forward and backward pack by pack, losses divided by global counts first, gradients
synchronised on the last pack, one all-reduce of sums and one of maxima, clip across meshes, step. Refuses to
step on anything non-finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from olmo_rl.backends import choose_attention
from olmo_rl.config import Config, OnNonfinite
from olmo_rl.data.packs import PackedBatch, RouteMode
from olmo_rl.policy import titan
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.interop import load_weights
from olmo_rl.training.scoring import Decision, ScoringSchedule
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.update import Objective, PackReport, UpdateReport, run_pack, score_pack


class PolicyModule(LightningModule):
    """A decoder trained by `objective`. `report` describes the last update, None after a skipped one.

    `publish` is called with full weights and the policy version before the first update and after every
    update.
    """

    def __init__(self, config: Config, *, objective: Objective) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.objective = objective
        self.decoder: HybridDecoder | None = None
        self.weights: titan.FullWeights | None = None
        self.publish: Callable[[dict[str, Tensor], int], None] | None = None
        self.on_predict: Callable[[Any], None] | None = None
        self.on_pack: Callable[[int, int], None] | None = None
        self.report: UpdateReport | None = None
        self.skipped_updates = 0
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
        config = self.config
        attention = choose_attention(config.policy.attention.value, packed=config.packed)
        decoder = HybridDecoder(config.model, attention=attention)
        decoder.init_weights(config.seed)
        if config.init_from is not None:
            load_weights(decoder, config.init_from)
        self.strategy.parallelize(decoder)
        self.decoder = decoder
        self.weights = titan.FullWeights(decoder)

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
        """Hand full weights to whoever generates. Every rank takes part in the gather."""
        if self.publish is not None:
            assert self.weights is not None
            self.publish(self.weights.gather(), self.trainer.global_step)

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.report = None
        if not batch.packs:
            self.skipped_updates += 1  # the contract log tells it; metrics.csv holds updates
            return
        started = time.perf_counter()
        decision = self._prepare_anchors(batch)
        reports = self._accumulate_gradients(batch, decision=decision)
        report = UpdateReport.of(
            reports,
            batch=batch,
            decision=decision,
            device=self.device,
            replica=self.strategy.topology.replica_of(self.strategy.global_rank),
            sum_over_ranks=self.strategy.sum_over_ranks,
            max_over_ranks=self.strategy.max_over_ranks,
        )
        report.grad_norm = float(titan.clip_grad_norm(self.policy, max_norm=self.config.optim.max_grad_norm))
        report.lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        if self._may_step(report, reports=reports):
            self._step()
        report.seconds = time.perf_counter() - started
        report.publish_seconds = self._timed_publish()
        self.report = report
        report.warn_of_mismatch(update=self.trainer.global_step)
        if report.stepped:
            self._log(report.metrics() | batch.facts | {"batch/skipped_updates": float(self.skipped_updates)})

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
            packs = step.to(self.device).packs
            step.anchors = [score_pack(pack, strategy=self.strategy, mode=self.mode) for pack in packs]
        return decision

    def _accumulate_gradients(self, batch: PackedBatch, *, decision: Decision) -> list[PackReport]:
        reports = []
        count = len(batch.packs)
        for index, pack in enumerate(batch.packs):
            titan.set_gradient_sync(self.policy, last=index == count - 1)
            report = run_pack(
                pack,
                strategy=self.strategy,
                mode=self.mode,
                objective=self.objective,
                config=self.config,
                batch=batch,
                scored=None if batch.anchors is None else batch.anchors[index],
                anchor_is_scored=decision is Decision.standalone,
            )
            self.manual_backward(report.loss)
            report.loss = report.loss.detach()
            reports.append(report)
            if self.on_pack is not None:
                self.on_pack(index + 1, count)
        return reports

    def _may_step(self, report: UpdateReport, *, reports: list[PackReport]) -> bool:
        """Whether the optimizer may step: agreed by all ranks, since loss and norm are global."""
        if report.finite:
            self._nonfinite_in_a_row = 0
            if self.objective.anchored:
                report.check_scoring(self.config.scoring)
            return True
        if self.config.loss.on_nonfinite is OnNonfinite.skip:
            cast(torch.optim.Optimizer, self.optimizers()).zero_grad()
            report.stepped = False
            self.skipped_updates += 1
            self._nonfinite_in_a_row += 1
            if self._nonfinite_in_a_row <= self.config.batch.max_skips:
                return False
        mine = [id for one in reports for id in one.result.suspects]
        suspects = [id for part in self.strategy.gather_objects(mine) for id in part]
        where = f"samples {', '.join(suspects)}" if suspects else "the gradient only, every loss was finite"
        raise FloatingPointError(
            f"update {self.trainer.global_step + 1}: loss {report.totals['loss/total']}, gradient norm "
            f"{report.grad_norm}: {where}. Nothing was stepped; loss.on_nonfinite=skip would count such "
            "updates and go on"
        )

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

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped_updates = checkpoint["skipped_updates"]


def parameter_groups(decoder: nn.Module) -> list[dict[str, Any]]:
    """Dense weights, then routed experts where there are any: a fused update cannot mix shards of two meshes.
    The groups are the same in every topology, so that a run can resume in another one.
    """
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in decoder.named_parameters():
        groups[".routed_experts." in name].append(parameter)
    return [{"params": parameters} for parameters in groups.values() if parameters]
