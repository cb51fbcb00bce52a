"""Held-out evaluation of a run with an environment: greedy episodes of held-out tasks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmo_rl.collections.environment_source import HeldOutEpisodes
from olmo_rl.config import Config
from olmo_rl.progress import note_phase
from olmo_rl.running.callbacks import ContractLog, evaluation_due, log_known, results_before


class EnvironmentEvaluation(Callback):
    """The mean score of greedy episodes before the first update, every `task.eval_interval` updates, and at
    the end. `results`: by update, None where nothing was judged.
    """

    def __init__(self, config: Config, *, episodes: HeldOutEpisodes, contract: ContractLog) -> None:
        self._config = config
        self._episodes = episodes
        self._contract = contract
        self.results: dict[int, float | None] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take scores of the run that this one continues from its contract log, up to its checkpoint."""
        self.results = results_before(self._config, step=trainer.global_step)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not on_train_start, which reaches callbacks before the module publishes its weights.
        if trainer.global_step == 0:
            self._evaluate(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = evaluation_due(trainer, pl_module, interval=self._config.task.eval_interval)
        if due and trainer.global_step not in self.results:
            log_known(pl_module, "eval/accuracy", self._evaluate(trainer))

    def _evaluate(self, trainer: Trainer) -> float | None:
        note_phase("evaluate")
        score, metrics = self._episodes.score(step=trainer.global_step)
        self.results[trainer.global_step] = score
        self._contract.write(
            "evaluation",
            trainer=trainer,
            accuracy=score,
            problems=int(metrics["environment/episodes"]) if metrics else 0,
            environment=dict(metrics),
        )
        return score
