"""Score recorded samples with the policy: the training plan and packs, no gradients, log-probs by sample
id.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rich.console import Console

from olmo_rl.config import Config
from olmo_rl.data.packs import PackedBatch
from olmo_rl.training.build import build_trainer
from olmo_rl.training.datamodule import RolloutDataModule
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.processes import run_ranks
from olmo_rl.training.sources import FileSource
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.training.update import POLICY, score_pack, scored_slots


def run(config: Config) -> None:
    """Start the ranks of this job; every rank runs `score`."""
    run_ranks(score, config)


def score(config: Config) -> None:
    """One rank, top to bottom: `scores.jsonl` holds one line a sample, log-probs null where nothing is
    scored.
    """
    strategy = ExpertParallelStrategy(config)
    module = PolicyModule(config, objective=POLICY)
    data = RolloutDataModule(config, source=FileSource(config))
    scores: dict[str, list[float | None]] = {}
    gaps: list[float] = []

    def score_batch(batch: PackedBatch) -> None:
        mine: dict[str, list[float | None]] = {}
        for pack in batch.packs:
            logprobs = score_pack(pack, strategy=strategy, mode=module.mode).cpu().tolist()
            slots = scored_slots(pack).slots.cpu().tolist()
            by_slot = dict(zip(slots, logprobs, strict=True))
            for document, id in enumerate(pack.ids):
                span = range(pack.boundaries[document], pack.boundaries[document + 1])
                mine[id] = [by_slot.get(slot) for slot in span]
        for part in strategy.gather_objects(mine):
            scores.update(part)
        for sample in batch.samples:
            found = np.array([value for value in scores[sample.id] if value is not None])
            gaps.extend(np.abs(found - sample.behavior_logprobs[sample.scored]).tolist())

    module.on_predict = score_batch
    trainer = build_trainer(config, strategy=strategy, max_steps=-1, callbacks=[], loggers=[])
    trainer.predict(module, datamodule=data, return_predictions=False)
    if trainer.is_global_zero:
        path = Path(config.run_dir) / "scores.jsonl"
        scratch = path.with_suffix(".tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("w", encoding="utf-8") as file:
            for id, values in scores.items():
                file.write(json.dumps({"sample_id": id, "policy_logprobs": values}) + "\n")
        scratch.replace(path)
        gap = float(np.mean(gaps)) if gaps else 0.0
        Console().print(
            f"{len(scores)} samples scored, mean |policy - behaviour| {gap:.3g}: {path}", soft_wrap=True
        )
