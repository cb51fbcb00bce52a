"""What happens around updates: the contract log, held-out evaluation, the picture of packs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmo_rl.chosen_checkpoint import evaluations_of
from olmo_rl.collections.evaluating import Question, ask, judged, measured, questions_of
from olmo_rl.collections.evaluating import metrics_of as evaluation_metrics
from olmo_rl.collections.generation import RolloutParts
from olmo_rl.config import Config
from olmo_rl.data.packs import Step
from olmo_rl.planning.pictures import draw_packs
from olmo_rl.policy.compiling import Graph
from olmo_rl.progress import note_phase
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.run_directory import FORMAT_VERSION, LOG_EVENT, log_fault, whole_lines
from olmo_rl.tasks.held_out import HeldOut, held_out_sets, start_named
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.step import StepResult
from olmo_rl.training.step_report import events_of
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal


class ContractLog(Callback):
    """`training_contract_rank{r}.jsonl`: what every update really did, one line per event, appended on
    resume.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = Path(run_dir)
        self._file: IO[str] | None = None
        self._written = -1

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = self._run_dir / f"training_contract_rank{trainer.global_rank}.jsonl"
        whole_lines(path)
        self._file = path.open("a", encoding="utf-8")
        if path.stat().st_size == 0:
            self.write(LOG_EVENT, trainer=trainer, version=FORMAT_VERSION)
        elif (fault := log_fault(path)) is not None:
            raise Refusal(f"{path}: {fault}, under another run_name")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, event: str, *, trainer: Trainer, **values: object) -> None:
        """One line: event, step, rank, then the event's own values."""
        assert self._file is not None
        record = {"event": event, "step": trainer.global_step, "rank": trainer.global_rank} | values
        self._file.write(json.dumps(_finite_or_null(record), allow_nan=False) + "\n")
        self._file.flush()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Step, batch_idx: int
    ) -> None:
        result = cast(PolicyModule, pl_module).result
        if result is None:
            self.write("skipped", trainer=trainer, facts=dict(batch.facts))
        else:
            self._write_step(result, trainer=trainer, graphs=cast(PolicyModule, pl_module).new_graphs)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write down an update that was refused after it stepped, as in its publication: a checkpoint will
        hold it.
        """
        module = cast(PolicyModule, pl_module)
        unwritten = self._file is not None and self._written != trainer.global_step
        refused = isinstance(exception, Refusal) and unwritten
        if refused and module.result is not None and module.result.stepped:
            self._write_step(module.result, trainer=trainer, graphs=module.new_graphs)

    def _write_step(self, result: StepResult, *, trainer: Trainer, graphs: Sequence[Graph]) -> None:
        self._written = trainer.global_step
        for event, values in events_of(result, rank=trainer.global_rank).items():
            self.write(event, trainer=trainer, **values)
        if graphs:
            named = [{"region": graph.region, "reason": graph.reason} for graph in graphs]
            self.write("compile", trainer=trainer, graphs=named)


def _finite_or_null(value: object) -> object:
    """The value as JSON has it: NaN and infinities, which it lacks, become null."""
    if isinstance(value, dict):
        return {name: _finite_or_null(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_null(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluation_due(trainer: Trainer, pl_module: LightningModule, *, interval: int) -> bool:
    """Whether the update that has just ended moved the policy to where it is evaluated: every `interval`
    updates (0 = never in between) and at the end.
    """
    result = cast(PolicyModule, pl_module).result
    if result is None or not result.stepped:
        return False  # the policy is what it was
    step = trainer.global_step
    return (interval > 0 and step % interval == 0) or step == trainer.max_steps or trainer.should_stop


def log_known(module: LightningModule, name: str, value: float | None) -> None:
    """Log a metric of this update; an unknown value leaves its cell empty."""
    if value is not None:
        module.log(name, value, batch_size=1)


def results_before(config: Config, *, step: int) -> dict[int, float | None]:
    """Accuracies by update of the run that this one continues, from its contract log, up to update `step`;
    empty for a new run.
    """
    path = Path(config.run_dir) / "training_contract_rank0.jsonl"
    if config.ckpt_path is None or not path.is_file():
        return {}
    with path.open(encoding="utf-8") as lines:
        found = evaluations_of(map(json.loads, lines))
    return {update: value for update, value in found.items() if update <= step}


class Evaluation(Callback):
    """Held-out problems answered before the first update, every `task.eval_interval` updates, and at the end.

    Routes are live: evaluation never replays. Ranks share the problems; means are global sums divided by
    global counts, and unknown where no response was judged. `results`: accuracy on the task's own problems.
    """

    def __init__(self, config: Config, *, parts: RolloutParts, contract: ContractLog) -> None:
        self._config = config
        self._questions: list[Question] | None = None
        self._parts = parts
        self._contract = contract
        self.results: dict[int, float | None] = {}  # None: nothing was judged

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take accuracies of the run that this one continues from its contract log, up to its checkpoint."""
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
            for name, value in self._evaluate(trainer).items():
                log_known(pl_module, name, value)

    def _evaluate(self, trainer: Trainer) -> dict[str, float | None]:
        """The metrics of this evaluation. A collective of all ranks."""
        note_phase("evaluate")
        strategy, parts = cast(ExpertParallelStrategy, trainer.strategy), self._parts
        if self._questions is None:
            self._questions = self._drawn(strategy)
        mine = self._questions[strategy.global_rank :: strategy.world_size]
        asked = outcome(lambda: ask(mine, config=self._config, parts=parts))
        if isinstance(parts.engine, RemoteEngine):  # whose answers take as long as they take
            strategy.meet(asked if isinstance(asked, Future) else None)
        verdicts = outcome(lambda: judged(mine, asked=asked, config=self._config, parts=parts))
        shares = together(strategy.gather_objects(verdicts))
        results = measured([one for share in shares for one in share], config=self._config)
        own = results.get(("", ""))
        accuracy = None if own is None else own.reward.value
        self.results[trainer.global_step] = accuracy
        self._contract.write(
            "evaluation",
            trainer=trainer,
            **({"accuracy": accuracy} if own is None else own.record()),
            sets=[
                {"set": name, "domain": domain, **result.record()}
                for (name, domain), result in results.items()
                if name or domain
            ],
        )
        return evaluation_metrics(results)

    def _drawn(self, strategy: ExpertParallelStrategy) -> list[Question]:
        """All questions, with the problems that rank 0 draws. A collective of all ranks."""

        def sets() -> list[HeldOut]:
            return held_out_sets(self._config, own=self._parts.task, tokenizer=self._parts.tokenizer)

        mine = outcome(sets)
        together(strategy.gather_objects(mine if isinstance(mine, Refusal) else ()))
        assert not isinstance(mine, Refusal), "else all ranks raised it"
        # All of them in half the time that the others wait in the next collective.
        start_named(mine, seconds=self._config.strategy.timeout_seconds / 2)
        drawn = strategy.from_rank_zero(lambda: [list(one.problems) for one in mine])
        return questions_of(
            [replace(one, problems=problems) for one, problems in zip(mine, drawn, strict=True)]
        )


class PackPicture(Callback):
    """packs.png: the plan of the first update, each rank's packs as stacked documents against the budget."""

    def __init__(self, config: Config) -> None:
        self._path = Path(config.run_dir) / "packs.png"
        self._packed = config.packed
        self._padding = config.padding
        self._drawn = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Step, batch_idx: int
    ) -> None:
        if self._drawn or not trainer.is_global_zero or batch.plan is None:
            return
        self._drawn = True
        lengths = [len(sample) for sample in batch.samples]
        draw_packs(
            batch.plan,
            lengths=lengths,
            budget=batch.budget if self._packed else None,
            path=self._path,
            padding=self._padding,
        )
