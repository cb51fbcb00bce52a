"""The steps of a collection that were not trained yet, as a checkpoint holds them: plain values and tensors,
which `torch.load(weights_only=True)` reads.

A generated collection travels whole: samples, plans, and the log-probs that a scoring pass of its own found
before its first step, which the policy has moved away from. Of a file only ids, plans and those log-probs
travel: the file is read again. Everything is keyed by sample, so that any topology can go on; a plan is taken
over where the settings it was made under are still those of the run. Refuses a file that no longer holds the
samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olmo_rl.collections.planner import PlanRecord
from olmo_rl.data.packs import Pack
from olmo_rl.planning.schedule import lending_of, loan_rows
from olmo_rl.policy.loss import scored_slots
from olmo_rl.types import PackPlan, Refusal, Sample, SearchLog


@dataclass(kw_only=True, slots=True, eq=False)
class Pending:
    """The rest of a collection of `steps_in_collection` steps, `trained_steps` of which are updates.

    `ids` of every step still to come; `samples` in that order, None where a file holds them; `plans` by step;
    `anchors` by sample id, [scored tokens], empty unless every step to come has them; `facts` that no row
    has reported yet.
    """

    source: str
    steps_in_collection: int
    trained_steps: int
    ids: list[list[str]]
    samples: list[Sample] | None
    plans: list[PlanRecord | None]
    anchors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {
            "source": self.source,
            "steps_in_collection": self.steps_in_collection,
            "trained_steps": self.trained_steps,
            "ids": self.ids,
            "samples": None if self.samples is None else [sample_state(sample) for sample in self.samples],
            "plans": [None if plan is None else _plan_state(plan) for plan in self.plans],
            "anchors": self.anchors,
            "facts": self.facts,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Pending:
        samples = state["samples"]
        return cls(
            source=state["source"],
            steps_in_collection=state["steps_in_collection"],
            trained_steps=state["trained_steps"],
            ids=state["ids"],
            samples=None if samples is None else [sample_of_state(sample) for sample in samples],
            plans=[None if plan is None else _plan_of_state(plan) for plan in state["plans"]],
            anchors=state["anchors"],
            facts=state["facts"],
        )

    def blocks(self, samples: Sequence[Sample], *, world_size: int) -> tuple[list[list[Sample]], int]:
        """The samples of every step to come, out of `samples`, and how many of them are left out because
        they do not divide over the ranks of this run.
        """
        by_id = {sample.id: sample for sample in samples}
        missing = [id for step in self.ids for id in step if id not in by_id]
        if missing:
            raise Refusal(
                f"{self.source}: sample {missing[0]!r} ({len(missing)} such) was still to be trained when "
                "the checkpoint was saved, and this run does not find it there: restore the file and the "
                "filters of the run that is resumed, or start a new one"
            )
        whole = [len(step) - len(step) % world_size for step in self.ids]
        blocks = [[by_id[id] for id in step[:count]] for step, count in zip(self.ids, whole, strict=True)]
        return blocks, sum(len(step) for step in self.ids) - sum(whole)


def sample_state(sample: Sample) -> dict[str, Any]:
    """A sample as plain values: arrays become tensors of the same type."""
    return {entry.name: _tensor_or_scalar(getattr(sample, entry.name)) for entry in fields(Sample)}


def sample_of_state(state: Mapping[str, Any]) -> Sample:
    """The sample that `sample_state` described."""
    values: dict[str, Any] = {
        name: value.numpy() if isinstance(value, Tensor) else value for name, value in state.items()
    }
    return Sample(**values)


def _tensor_or_scalar(value: object) -> object:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value, order="C"))
    return value.item() if isinstance(value, np.generic) else value


def _plan_state(record: PlanRecord) -> dict[str, Any]:
    plan = record.plan
    return {
        "packs": [[[int(i) for i in pack] for pack in rank] for rank in plan.packs],
        "search": None if plan.search is None else asdict(plan.search),
        "rows": None if plan.rows is None else [list(rank) for rank in plan.rows],
        "lending": None
        if plan.lending is None
        else {"guests": plan.lending.guests, "layers": loan_rows(plan.lending)},
        "start": record.start,
        "paths": record.paths,
        "settings": record.settings,
    }


def _plan_of_state(state: Mapping[str, Any]) -> PlanRecord:
    search, rows = state["search"], state.get("rows")  # absent before rows could be shared
    lending = state.get("lending")  # absent before experts could be lent
    return PlanRecord(
        plan=PackPlan(
            packs=tuple(tuple(tuple(pack) for pack in rank) for rank in state["packs"]),
            search=None if search is None else SearchLog(**search),
            rows=None if rows is None else tuple(tuple(rank) for rank in rows),
            lending=None if lending is None else lending_of(lending["layers"], guests=lending["guests"]),
        ),
        start=state["start"],
        paths=state["paths"],
        settings=state["settings"],
    )


def anchors_by_sample(packs: Sequence[Pack], *, anchors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Log-probs [S] of packs -> by sample id [scored tokens], on the CPU."""
    found: dict[str, Tensor] = {}
    for pack, values in zip(packs, anchors, strict=True):
        documents, values = scored_slots(pack).documents.cpu(), values.cpu()
        for document, id in enumerate(pack.ids):
            found[id] = values[documents == document]
    return found


def anchors_of_pack(pack: Pack, *, anchors: Mapping[str, Tensor]) -> Tensor:
    """Log-probs [S] of the scored slots of `pack`: slots come document by document, in order."""
    return torch.cat([anchors[id] for id in pack.ids])
