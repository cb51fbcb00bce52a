"""What an update does between its first and its last pack: it never waits for the device, packs arrive in
order, and its time is reported by phase; and the settings of a rank for its memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import LAYOUT, SHAPES, config_of, fit, samples_of, write_files

from olmo_rl.config import LossConfig, PackingConfig, PackingKind
from olmo_rl.data.collate import collate
from olmo_rl.policy.loss import scored_slots
from olmo_rl.training import step
from olmo_rl.training.stopwatch import PHASES, Stopwatch
from olmo_rl.training.transfer import moved
from olmo_rl.types import Topology

ROOT = Path(__file__).parents[1]
# Operations whose result's shape, or whose value on the host, depends on what the device computes.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "equal",
    "is_nonzero",
    "unique_dim",
    "_unique2",
    "repeat_interleave",
}


class Waits(TorchDispatchMode):
    """Names of operations that would wait for a device. Indexing by a boolean tensor is one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)
        if name in WAITING or masked:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_recorder_sees_what_waits() -> None:
    with Waits() as waits:
        x = torch.arange(3)
        x[x > 1], x.sum().item(), x.nonzero(), torch.bincount(x)
    assert waits.found == ["index", "_local_scalar_dense", "nonzero", "bincount"]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_forwards_and_backwards_of_an_update_never_wait_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entropy_coef: float
) -> None:
    waits = Waits()
    accumulate = step.accumulate_gradients

    def watched(*args: Any, **kwargs: Any) -> Any:
        with waits:
            return accumulate(*args, **kwargs)

    monkeypatch.setattr(step, "accumulate_gradients", watched)
    write_files(tmp_path, [samples_of(SHAPES)])
    packing = PackingConfig(kind=PackingKind.consecutive, max_tokens=24)
    loss = LossConfig(entropy_coef=entropy_coef, router_aux_weight=0.01, router_z_weight=0.001)
    run = fit(config_of(tmp_path, packing=packing, loss=loss))
    assert run.rows[0]["packing/packs"] > 1
    # Scored rows are found on the host before a pack moves; everything else is the device's.
    packs = int(run.rows[0]["packing/packs"])
    assert waits.found == ["nonzero"] * packs


def test_packs_arrive_in_order_and_scored_rows_travel_with_them() -> None:
    samples = samples_of(SHAPES)
    packs = [collate([sample], layout=LAYOUT, topology=Topology(1)) for sample in samples]
    expected = [scored_slots(pack).slots for pack in packs]
    watch = Stopwatch(torch.device("cpu"))
    arrived = list(moved(packs, device=torch.device("cpu"), watch=watch))
    assert [pack.ids for pack in arrived] == [pack.ids for pack in packs]
    for pack, slots in zip(arrived, expected, strict=True):
        assert pack.scored is not None
        assert torch.equal(scored_slots(pack).slots, slots)
    assert list(moved([], device=torch.device("cpu"))) == []
    assert watch.seconds()["transfer"] > 0


def test_a_stopwatch_adds_laps_by_phase_and_knows_no_other() -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.seconds() == dict.fromkeys(PHASES, 0.0)
    with watch.lap("forward"):
        pass
    first = watch.seconds()["forward"]
    with watch.lap("forward"):
        pass
    assert watch.seconds()["forward"] > first > 0
    with pytest.raises(AssertionError, match="elsewhere"), watch.lap("elsewhere"):
        pass


def test_phases_of_an_update_are_metrics_and_do_not_exceed_it(tmp_path: Path) -> None:
    write_files(tmp_path, [samples_of(SHAPES)])
    (row,) = fit(config_of(tmp_path)).rows
    phases = [row[f"time/{phase}_s"] for phase in PHASES]
    assert all(seconds >= 0 for seconds in phases)
    assert row["time/forward_s"] > 0
    assert row["time/backward_s"] > 0
    assert sum(phases) <= row["time/update_s"]
    assert row["time/collate_s"] > 0


def test_freed_memory_is_kept_for_the_next_array() -> None:
    """In a process of its own, since the setting is the process's: page faults of arrays made and freed."""
    code = """
import resource, sys, numpy
if sys.argv[1] == "kept":
    from olmo_rl.running.rank_process import keep_freed_memory
    keep_freed_memory()
def work():
    many = [numpy.ones(2**18) for _ in range(8)]
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    faults = {
        how: int(subprocess.check_output([sys.executable, "-c", code, how], env=environ, cwd=ROOT, text=True))
        for how in ("kept", "returned")
    }
    assert faults["kept"] < 0.1 * faults["returned"]
