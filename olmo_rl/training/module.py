"""The policy as a LightningModule: its weights, its optimizer, and what of a run's life it keeps. One
`training_step` is one optimizer step, which step.py does; optimization is manual.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from olmo_rl.backends import attention_of, backends_of, linear_of
from olmo_rl.config import Config
from olmo_rl.data.packs import RouteMode, Step
from olmo_rl.policy.compiling import Graph
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.kernels import refuse_gpu
from olmo_rl.policy.logprobs import check_logprobs
from olmo_rl.policy.weights import load_weights
from olmo_rl.progress import note_phase
from olmo_rl.training.frozen_reference import FrozenReference, build_reference, check_fingerprint
from olmo_rl.training.lightning_internals import forget_logged
from olmo_rl.training.optimizer import (
    build_optimizer,
    check_moments,
    moments_of,
    rate_factor,
    resume_rates,
)
from olmo_rl.training.scoring import ScoringSchedule
from olmo_rl.training.step import Learner, Objective, StepResult, publish, route_mode, run_step, score_step
from olmo_rl.training.step_report import metrics_of, warn_of_mismatch
from olmo_rl.training.stopwatch import Stopwatch
from olmo_rl.training.strategy import ExpertParallelStrategy


class PolicyModule(LightningModule):
    """A decoder trained by `objective`. `result` is that of the last step, None where nothing could train;
    `new_graphs` are what it compiled, `logged` its metrics; `finished_step` is the last step that needs no
    further work.

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
        self.recorded_reference: bool | None = None  # whether files carry its log-probs; None: look there
        self.publish: Callable[[HybridDecoder, int], dict[str, float]] | None = None
        self.on_predict: Callable[[Any], None] | None = None
        self.on_pack: Callable[[int, int], None] | None = None
        self.result: StepResult | None = None
        self.finished_step: Step | None = None
        self.new_graphs: list[Graph] = []
        self.logged: dict[str, float] = {}
        self.skipped_updates = 0
        self._watch = Stopwatch(torch.device("cpu"))
        self._nonfinite_in_a_row = 0
        self.scoring = ScoringSchedule(config=config)

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
        note_phase("load")
        check_logprobs(self.config.policy.logprobs)
        if self.device.type == "cuda":
            refuse_gpu(backends_of(self.config), capability=torch.cuda.get_device_capability(self.device))
        # A resumed run loads the weights of its checkpoint into the shards (ExpertParallelStrategy).
        resumed = self.config.ckpt_path is not None
        self.decoder = self._allocate() if resumed else self._build(self.config.init_from)
        if self.objective.anchored and self.trainer.state.fn is TrainerFn.FITTING:
            self.reference = build_reference(
                self.config,
                strategy=self.strategy,
                build=self._build,
                recorded=self.recorded_reference,
            )

    def _allocate(self) -> HybridDecoder:
        """Return a sharded decoder whose weights are uninitialised."""
        config = self.config
        with torch.device("meta"):
            decoder = HybridDecoder(config.model, attention=attention_of(config), linear=linear_of(config))
        self.strategy.parallelize(decoder)
        return decoder

    def _build(self, weights: str | None) -> HybridDecoder:
        """Return a sharded decoder with the weights at a path, None: the initial ones of this seed.

        No rank ever contains the whole model: its shards are allocated first, then filled one parameter at a
        time.
        """
        config, decoder = self.config, self._allocate()
        if weights is None:
            decoder.init_weights(config.seed)
        else:
            load_weights(
                decoder, weights, key="init_from" if weights == config.init_from else "loss.reference"
            )
        return decoder

    @override
    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.policy, config=self.config.optim)
        factor = rate_factor(self.config.optim, total=self.config.trainer.max_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [scheduler]

    @override
    def on_train_start(self) -> None:
        self._watch = Stopwatch(self.device)
        self._set_rates()
        self.publish_weights()

    def _set_rates(self) -> None:
        """Set the learning rates of the next update, which follow from the configuration and the number of
        updates alone: a resumed run has those of its own schedule, whatever its checkpoint contains.
        """
        optim, groups = self.config.optim, self.trainer.optimizers[0].param_groups
        factor = rate_factor(optim, total=self.config.trainer.max_steps)
        scheduler = cast(torch.optim.lr_scheduler.LRScheduler, self.lr_schedulers())
        scheduler.base_lrs = [optim.lr for _ in groups]
        for group in groups:
            group["lr"] = optim.lr * factor(self.trainer.global_step)

    @override
    def on_predict_start(self) -> None:
        self.publish_weights()

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> None:
        assert self.on_predict is not None, "the recipe defines a prediction"
        self.on_predict(batch)

    def publish_weights(self) -> dict[str, float]:
        """Send the weights to the engines; return the metrics of that. A collective of all ranks."""
        return publish(self.policy, version=self.trainer.global_step, to=self.publish)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """A step stays on the host: its packs move one by one, ahead of the computation (transfer.py)."""
        return batch

    @override
    def training_step(self, batch: Step, batch_idx: int) -> None:
        self.result = None
        self.new_graphs, self.logged = [], {}
        forget_logged(self.trainer)
        if not batch.packs:
            self.skipped_updates += 1  # the contract log has it; metrics.csv has updates only
            self.finished_step = batch
            return
        result = run_step(
            batch,
            learner=self.learner,
            update=self.trainer.global_step + 1,
            skips_in_a_row=self._nonfinite_in_a_row,
        )
        self._watch = Stopwatch(self.device)
        self._nonfinite_in_a_row = 0 if result.stepped else self._nonfinite_in_a_row + 1
        self.skipped_updates += not result.stepped
        self.finished_step, self.result = batch, result
        compiled = self._look_for_graphs()
        warn_of_mismatch(result, update=self.trainer.global_step)
        started = time.perf_counter()
        published: dict[str, float] = {}
        try:
            published = self.publish_weights()
        finally:  # an update that no engine took happened nevertheless, and its checkpoint has a row
            if result.stepped:
                skipped = {"batch/skipped_updates": float(self.skipped_updates)}
                spent = {"time/publish_s": time.perf_counter() - started}
                self._log(metrics_of(result) | published | spent | dict(batch.facts) | skipped | compiled)

    @property
    def learner(self) -> Learner:
        """The parts that this run's steps use."""
        return Learner(
            config=self.config,
            objective=self.objective,
            strategy=self.strategy,
            decoder=self.policy,
            reference=self.reference,
            optimizer=self.trainer.optimizers[0],
            scoring=self.scoring,
            watch=self._watch,
            backward=self.manual_backward,
            apply=self._step_optimizer,
            on_pack=self.on_pack,
        )

    def scores_ahead(self, *, steps_in_collection: int) -> bool:
        """Whether all steps of a collection are scored before the first one trains."""
        anchored = self.objective.anchored and self.trainer.training
        return anchored and self.config.scores_separately(steps_in_collection=steps_in_collection)

    def score_step(self, step: Step) -> tuple[Tensor, ...]:
        """Log-probs [S] of the scored slots of every pack by the present policy, without gradients."""
        with self._watch.lap("score"):
            return score_step(step, learner=self.learner)

    def _step_optimizer(self) -> None:
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        optimizer.step()
        optimizer.zero_grad()
        cast(torch.optim.lr_scheduler.LRScheduler, self.lr_schedulers()).step()

    def _look_for_graphs(self) -> dict[str, float]:
        """Keep the graphs compiled since the last update; return the number of all graphs as a metric."""
        if self.strategy.graphs is None:
            return {}
        self.new_graphs = self.strategy.graphs.new()
        return {"compile/graphs": float(self.strategy.graphs.total)}

    @property
    def mode(self) -> RouteMode:
        return route_mode(self.config, objective=self.objective)

    def _log(self, metrics: dict[str, float]) -> None:
        self.logged = metrics
        step = float(self.trainer.global_step)
        self.log_dict({name: float(value) for name, value in metrics.items()} | {"step": step}, batch_size=1)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_updates"] = self.skipped_updates
        checkpoint["nonfinite_in_a_row"] = self._nonfinite_in_a_row
        checkpoint["moments"] = moments_of(self.config.optim)
        checkpoint["reference"] = None if self.reference is None else self.reference.fingerprint

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped_updates = checkpoint["skipped_updates"]
        self._nonfinite_in_a_row = checkpoint.get("nonfinite_in_a_row", 0)
        check_moments(self.config.optim, saved=checkpoint.get("moments", {}))
        (schedule,) = checkpoint["lr_schedulers"]
        schedule |= resume_rates(
            self.trainer.optimizers[0],
            config=self.config.optim,
            total=self.config.trainer.max_steps,
            step=schedule["last_epoch"],
        )
        check_fingerprint(self.reference, expected=checkpoint.get("reference"), config=self.config)
