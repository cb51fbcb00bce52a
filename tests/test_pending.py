"""Checkpoints inside a collection: what travels, and that resuming goes on with the next update, whatever its
place.
"""

from __future__ import annotations

import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from test_checkpoints import SignalDuringUpdate, check_same_end, file_config, names, resumed
from training_cases import LAYOUT, Run, fit, identical, masked, samples_of, write_files

from olmo_rl.collections.pending import (
    Pending,
    anchors_by_sample,
    anchors_of_pack,
    sample_of_state,
    sample_state,
)
from olmo_rl.config import BatchConfig, PackingConfig, PackingKind, RolloutsConfig, Source
from olmo_rl.data.collate import collate
from olmo_rl.run_directory import complete_checkpoints
from olmo_rl.types import Refusal, Sample, Topology

HALVES = BatchConfig(samples_per_step=4)  # two updates a file
LOCAL: dict[str, Any] = {
    "rollouts": RolloutsConfig(source=Source.local, group_size=4, max_new_tokens=4),
    "batch": BatchConfig(samples_per_step=8, steps_per_collection=2),
    "packing": PackingConfig(kind=PackingKind.consecutive),
}


def pending_of(run_dir: Path) -> dict[str, Any]:
    """The pending state of a collection in the newest checkpoint, as torch reads it without trust."""
    meta = torch.load(complete_checkpoints(run_dir)[-1] / "meta.pt", weights_only=True)
    return meta["RolloutDataModule"]["pending"]


def in_parts(run_dir: Path, updates: list[int], **sections: Any) -> list[Run]:
    """A run that ends after each number of updates and is resumed."""
    config = file_config(run_dir, updates=updates[0], interval=None, **sections)
    return [fit(config)] + [fit(resumed(config, updates=count)) for count in updates[1:]]


def check_same_updates(parts: list[Run], whole: Run) -> None:
    """The same samples in the same packs, the same gradients to the last bit, and so the same end."""
    assert [ids for part in parts for ids in part.recorder.ids] == whole.recorder.ids
    batches = [batch for part in parts for batch in part.recorder.batches]
    assert [batch.plan for batch in batches] == [batch.plan for batch in whole.recorder.batches]
    gradients = [found for part in parts for found in part.recorder.gradients]
    assert len(gradients) == len(whole.recorder.gradients)
    assert all(identical(a, b) for a, b in zip(gradients, whole.recorder.gradients, strict=True))
    check_same_end(parts[-1], whole)


def test_a_sample_comes_back_with_every_field_and_type(tmp_path: Path) -> None:
    for kind in (np.uint8, np.int16, np.uint16, np.int32):
        sample = samples_of()[2]
        sample = replace(
            masked(sample, keep=[5]),
            routes=np.asfortranarray(sample.routes.astype(kind)),
            reward=np.float64(0.25),
            advantage=-0.5,
            policy_version=7,
            prompt="1+2=",
            response="3",
        )
        torch.save(sample_state(sample), tmp_path / "sample.pt")
        found = sample_of_state(torch.load(tmp_path / "sample.pt", weights_only=True))
        for entry in fields(Sample):
            mine, theirs = getattr(found, entry.name), getattr(sample, entry.name)
            if isinstance(theirs, np.ndarray):
                assert mine.dtype == theirs.dtype
                assert np.array_equal(mine, theirs), entry.name
            else:
                assert mine == theirs, entry.name


def test_anchors_find_their_samples_in_packs_of_any_order() -> None:
    first, second, third = samples_of(((2, 3), (1, 2), (3, 1)))
    whole = collate([third, first, second], layout=LAYOUT, topology=Topology(1))
    anchors = anchors_by_sample([whole], anchors=[torch.arange(6.0)])
    other = collate([second, third], layout=LAYOUT, topology=Topology(1))
    assert anchors_of_pack(other, anchors=anchors).tolist() == [4.0, 5.0, 0.0]
    assert anchors_of_pack(whole, anchors=anchors).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_generated_collection_resumes_after_every_update(tmp_path: Path) -> None:
    whole = fit(file_config(tmp_path / "straight", updates=4, interval=None, **LOCAL))
    parts = in_parts(tmp_path / "parts", [1, 3, 4], **LOCAL)
    check_same_updates(parts, whole)
    # What the policy of the first step scored is the anchor of the second, which never scores again.
    mine, theirs = parts[1].recorder.batches[0].anchors, whole.recorder.batches[1].anchors
    assert mine is not None
    assert theirs is not None
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    decisions = [event["decision"] for event in parts[-1].events("scoring")]
    assert decisions == ["standalone"] * 4
    assert [event["policy_versions"] for event in parts[-1].events("optimizer")] == [
        [0, 0], [0, 0], [2, 2], [2, 2]]  # fmt: skip
    assert [event["plan"] for event in parts[-1].events("packing")] == [
        "planned", "resumed", "planned", "resumed"]  # fmt: skip


def test_a_checkpoint_inside_a_collection_holds_its_steps_to_come_as_plain_values(tmp_path: Path) -> None:
    run = in_parts(tmp_path / "run", [1], **LOCAL)[0]
    pending = pending_of(tmp_path / "run")
    assert (pending["steps_in_collection"], pending["trained_steps"]) == (2, 2)
    assert len(pending["ids"]) == 1
    assert [sample["id"] for sample in pending["samples"]] == pending["ids"][0]
    assert pending["samples"][0]["tokens"].dtype == torch.int32
    assert set(pending["anchors"]) == set(pending["ids"][0])
    assert [len(pending["anchors"][s["id"]]) for s in pending["samples"]] == [
        int(s["response_mask"].sum()) for s in pending["samples"]
    ]
    assert run.data._open is not None
    plan = run.data._open._steps[1].plan
    assert plan is not None
    assert pending["plans"][0]["packs"] == [[list(pack) for pack in rank] for rank in plan.packs]
    assert pending["facts"] == {}, "the first row had them"
    assert Pending.of_state(pending).plans[0].plan == plan


def test_a_file_resumes_after_every_update_and_travels_by_its_ids(tmp_path: Path) -> None:
    collections = [samples_of(seed=i, prefix=f"f{i}-") for i in range(3)]
    for name in ("straight", "parts"):
        write_files(tmp_path / name, collections)
    whole = fit(file_config(tmp_path / "straight", updates=5, interval=None, batch=HALVES))
    parts = in_parts(tmp_path / "parts", [1, 2, 3, 5], batch=HALVES)
    check_same_updates(parts, whole)
    assert [event["plan"] for event in parts[-1].events("packing")] == [
        "planned", "resumed", "planned", "resumed", "planned"]  # fmt: skip
    pending = pending_of(tmp_path / "parts")
    assert pending["samples"] is None
    assert pending["ids"] == [[f"f2-{i}" for i in range(4, 8)]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_after_the_present_update_wherever_it_falls(
    tmp_path: Path, number: signal.Signals
) -> None:
    collections = [samples_of(seed=i, prefix=f"f{i}-") for i in range(2)]
    for name in ("straight", "run"):
        write_files(tmp_path / name, collections)
    whole = fit(file_config(tmp_path / "straight", updates=4, interval=None, batch=HALVES))
    config = file_config(tmp_path / "run", updates=4, interval=None, batch=HALVES)
    first = fit(config, callbacks=[SignalDuringUpdate(number, batch=2)])
    assert first.checkpoints.interrupted
    assert names(tmp_path / "run") == ["step-3"]
    check_same_updates([first, fit(resumed(config, updates=4))], whole)


def test_an_interval_saves_inside_a_collection_too(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [samples_of()])
    fit(file_config(tmp_path / "run", updates=2, interval=1, batch=HALVES))
    assert names(tmp_path / "run") == ["step-1", "step-2"]


def test_another_budget_makes_another_plan_and_says_so(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [samples_of()])
    config = file_config(tmp_path / "run", updates=1, interval=None, batch=HALVES)
    fit(config)
    wider = replace(config, packing=PackingConfig(kind=PackingKind.consecutive, max_tokens=64))
    run = fit(resumed(wider, updates=2))
    assert [event["plan"] for event in run.events("packing")] == ["planned", "replanned"]
    assert run.recorder.batches[0].plan.packs_per_rank == 1


def test_a_file_that_lost_a_sample_to_be_trained_is_refused_by_name(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [samples_of()])
    config = file_config(tmp_path / "run", updates=1, interval=None, batch=HALVES)
    fit(config)
    write_files(tmp_path / "run", [samples_of()[:6]])
    with pytest.raises(Refusal, match=r"collection-00000.parquet: sample 's6' \(2 such\)"):
        fit(resumed(config, updates=2))
    for file in (tmp_path / "run" / "files").iterdir():
        file.rename(file.with_suffix(".away"))
    with pytest.raises(Refusal):
        fit(resumed(config, updates=2))


class FailAfter(Callback):
    """A refusal that meets the run during its second batch, before the optimizer stepped."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            raise Refusal("no more")


def test_a_step_whose_update_was_refused_is_still_to_come(tmp_path: Path) -> None:
    collections = [samples_of()]
    for name in ("straight", "run"):
        write_files(tmp_path / name, collections)
    whole = fit(file_config(tmp_path / "straight", updates=2, interval=None, batch=HALVES))
    config = file_config(tmp_path / "run", updates=2, interval=None, batch=HALVES)
    with pytest.raises(Refusal, match="no more"):
        fit(config, callbacks=[FailAfter()])
    assert pending_of(tmp_path / "run")["ids"] == [["s4", "s5", "s6", "s7"]]
    second = fit(resumed(config, updates=2))
    assert second.recorder.ids == whole.recorder.ids[1:]
    check_same_end(second, whole)


def test_facts_of_a_collection_stand_in_one_row(tmp_path: Path) -> None:
    write_files(tmp_path / "run", [samples_of(seed=i, prefix=f"f{i}-") for i in range(2)])
    run = fit(file_config(tmp_path / "run", updates=4, interval=None, batch=HALVES))
    assert ["reward/mean" in row for row in run.rows] == [True, False, True, False]
    assert ["time/rollout_s" in row for row in run.rows] == [True, False, True, False]
    assert all("packing/fill" in row for row in run.rows)


def test_steps_without_anything_to_train_travel_too_and_leave_the_facts_to_the_first_update(
    tmp_path: Path,
) -> None:
    samples = [masked(s) if i < 4 else s for i, s in enumerate(samples_of())]
    later = samples_of(seed=1, prefix="f1-")
    silent_end = [masked(s) if i >= 4 else s for i, s in enumerate(later)]
    for name in ("straight", "run"):
        write_files(tmp_path / name, [samples, silent_end, samples_of(seed=2, prefix="f2-")])
    whole = fit(file_config(tmp_path / "straight", updates=3, interval=None, batch=HALVES))
    parts = in_parts(tmp_path / "run", [1, 2, 3], batch=HALVES)
    assert parts[-1].module.skipped_updates == whole.module.skipped_updates == 2
    check_same_end(parts[-1], whole)
    assert ["reward/mean" in row for row in parts[-1].rows] == [True, True, True]
