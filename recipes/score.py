"""Score recorded samples with the policy: the training plan and packs, no gradients, log-probs by file and
sample id.

What training would leave out is not scored: the incomplete last step of a file, filtered samples, and
steps without a token to train. All of them are counted and reported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from olmo_rl.collections.datamodule import RolloutDataModule
from olmo_rl.collections.sources import FileSource
from olmo_rl.complete_files import complete_file
from olmo_rl.config import Config
from olmo_rl.data.inputs import Inputs
from olmo_rl.data.means import Mean, shown
from olmo_rl.data.packs import Pack, Step
from olmo_rl.policy.loss import scored_slots
from olmo_rl.running.trainer import build_trainer
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.scoring import score_pack
from olmo_rl.training.step import POLICY
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.transfer import moved


@dataclass(kw_only=True, slots=True)
class Scores:
    """Log-probs by file and sample id, which is unique within its file only; null where nothing is scored."""

    found: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # |policy - behaviour| of every scored token
    read: int = 0  # samples of all files
    tails: int = 0  # of them in incomplete last steps

    def summary(self) -> str:
        gap = shown(Mean.of(self.gaps).value, digits=".3g")
        lines = [f"{len(self.found)} of {self.read} samples scored, mean |policy - behaviour| {gap}"]
        others = self.read - len(self.found) - self.tails
        if self.tails:
            lines.append(f"not scored: {self.tails} in the incomplete last step of their file")
        if others:
            lines.append(f"not scored: {others} filtered, or in steps where no token is trained")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """One line a sample: complete or absent."""
        with complete_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            for (source, id), values in self.found.items():
                line = {"file": source, "sample_id": id, "policy_logprobs": values}
                file.write(json.dumps(line) + "\n")


def score(config: Config, *, inputs: Inputs | None = None) -> None:
    """One rank, top to bottom: `scores.jsonl` holds one line a scored sample. `inputs`: what the preflight
    read.
    """
    strategy = ExpertParallelStrategy(config)
    module = PolicyModule(config, objective=POLICY)
    data = RolloutDataModule(config, source=FileSource(config, inputs=inputs))
    scores = Scores()

    def score_step(step: Step) -> None:
        scores.read += int(step.facts.get("rollouts/samples", 0))  # in the first step of a file
        scores.tails += int(step.facts.get("batch/left_out", 0))
        mine: dict[str, list[float | None]] = {}
        for pack in moved(step.packs, device=strategy.root_device):
            logprobs = score_pack(pack, strategy=strategy, mode=module.mode)
            mine |= _by_sample(pack, logprobs=logprobs.cpu().tolist())
        for part in strategy.gather_objects(mine):
            scores.found |= {(step.source, id): values for id, values in part.items()}
        for sample in step.samples:
            values = [v for v in scores.found[step.source, sample.id] if v is not None]
            scores.gaps.extend(np.abs(values - sample.behavior_logprobs[sample.scored]).tolist())

    module.on_predict = score_step
    trainer = build_trainer(config, strategy=strategy, max_steps=-1, callbacks=[], loggers=[])
    trainer.predict(module, datamodule=data, return_predictions=False)
    if trainer.is_global_zero:
        path = Path(config.run_dir) / "scores.jsonl"
        scores.write(path)
        Console().print(f"{scores.summary()}\n{path}", soft_wrap=True)


def _by_sample(pack: Pack, *, logprobs: list[float]) -> dict[str, list[float | None]]:
    """Log-probs of a pack's scored slots, by sample and token."""
    by_slot = dict(zip(scored_slots(pack).slots.cpu().tolist(), logprobs, strict=True))
    spans = zip(pack.ids, pack.boundaries, pack.boundaries[1:], strict=False)
    return {id: [by_slot.get(slot) for slot in range(start, end)] for id, start, end in spans}
