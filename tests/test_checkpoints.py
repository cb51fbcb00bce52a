"""Checkpoints and resuming: which updates leave one, what it holds, and that resuming changes nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import BOUND_SECONDS
from lightning.pytorch import Callback
from torch import Tensor
from training_cases import MODEL, Run, config_of, files, fit, identical, masked, samples_of, write_files

from olmo_rl import library
from olmo_rl.chosen_checkpoint import best_checkpoint, evaluations_of, resolve_checkpoint, settled
from olmo_rl.config import (
    BatchConfig,
    BlockNorms,
    CallbacksConfig,
    Config,
    OptimConfig,
    OptimizerKind,
    PackingConfig,
    PackingKind,
    RolloutsConfig,
    ScheduleKind,
    Source,
    TrainerConfig,
)
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import load_weights, save_weights
from olmo_rl.refusals import refusals
from olmo_rl.run_directory import (
    FORMAT_VERSION,
    MANIFEST,
    checkpoint_fault,
    complete_checkpoints,
    finish_checkpoint,
    named_checkpoints,
    prune_checkpoints,
)
from olmo_rl.running import checkpoint_writer
from olmo_rl.running.metrics_csv import MetricsCsv, read_metrics
from olmo_rl.running.rank_process import handled_signals
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.optimizer import parameter_groups
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import RankFailed, Refusal

OPTIM = OptimConfig(lr=1e-2, warmup_steps=4, weight_decay=0.05)
FILES = 6


def file_config(run_dir: Path, *, updates: int, interval: int | None = 2, **sections: Any) -> Config:
    fields: dict[str, Any] = {
        "optim": OPTIM,
        "packing": PackingConfig(kind=PackingKind.consecutive, max_tokens=24),
        "trainer": TrainerConfig(max_steps=updates),
        "callbacks": CallbacksConfig(progress=False, pictures=False, checkpoint_interval=interval),
    }
    return config_of(run_dir, **(fields | sections))


def resumed(config: Config, *, updates: int, path: str = "last") -> Config:
    return replace(config, ckpt_path=path, trainer=TrainerConfig(max_steps=updates))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def check_same_end(run: Run, straight: Run) -> None:
    """Equal weights and Adam state to the last bit."""
    assert identical(run.weights, straight.weights)
    assert len(run.optimizer) == len(straight.optimizer) > 0
    assert all(identical(a, b) for a, b in zip(run.optimizer, straight.optimizer, strict=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four updates without a break."""
    run_dir = tmp_path_factory.mktemp("straight")
    write_files(run_dir, files(FILES))
    return fit(file_config(run_dir, updates=4))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same four updates by two runs of two."""
    run_dir = tmp_path_factory.mktemp("halves")
    write_files(run_dir, files(FILES))
    config = file_config(run_dir, updates=2)
    return fit(config), fit(resumed(config, updates=4))


def test_four_updates_with_an_interval_of_two_leave_checkpoints_after_the_second_and_fourth(
    straight: Run,
) -> None:
    assert straight.trainer.global_step == 4
    assert len(straight.recorder.gradients) == 4
    assert names(Path(straight.config.run_dir)) == ["step-2", "step-4"]


def test_a_resumed_run_goes_on_with_the_next_update_and_ends_like_the_straight_one(
    straight: Run, halves: tuple[Run, Run]
) -> None:
    first, second = halves
    assert first.recorder.steps + second.recorder.steps == [1, 2, 3, 4]
    assert first.recorder.ids + second.recorder.ids == straight.recorder.ids
    check_same_end(second, straight)
    assert names(Path(second.config.run_dir)) == ["step-2", "step-4"]
    for gradients, expected in zip(second.recorder.gradients, straight.recorder.gradients[2:], strict=True):
        assert identical(gradients, expected)
    rates = [event["lr"] for event in straight.events("optimizer")]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert [event["lr"] for event in second.events("optimizer")] == rates


def test_metrics_csv_and_contract_log_continue_without_a_repeated_update(
    straight: Run, halves: tuple[Run, Run]
) -> None:
    run = halves[1]
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    for name in ("loss/total", "reward/mean", "grad/norm", "mismatch/mean", "optim/lr"):
        assert [row[name] for row in run.rows] == [row[name] for row in straight.rows]
    assert [event["step"] for event in run.events("optimizer")] == [1, 2, 3, 4]


def test_the_first_update_of_a_resumed_process_is_checked_again(
    straight: Run, halves: tuple[Run, Run]
) -> None:
    decisions = [event["decision"] for event in straight.events("scoring")]
    assert decisions == ["checked", "skipped", "skipped", "skipped"]
    decisions = [event["decision"] for event in halves[1].events("scoring")]
    assert decisions == ["checked", "skipped", "checked", "skipped"]


def moments(run: Run, name: str) -> dict[str, Tensor]:
    """State `name` of the optimizer by parameter."""
    state = run.trainer.optimizers[0].state
    return {key: state[p][name].clone() for key, p in run.module.policy.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_a_muon_run_resumed_inside_its_schedule_ends_like_the_straight_one(
    tmp_path: Path, tied: bool
) -> None:
    write_files(tmp_path / "run", files(FILES))
    optim = OptimConfig(
        kind=OptimizerKind.muon,
        lr=1e-2,
        warmup_steps=1,
        weight_decay=0.1,
        decay_embeddings=True,
        schedule=ScheduleKind.wsd,
        decay_fraction=0.5,
    )
    config = file_config(tmp_path / "run", updates=4, optim=optim, model=replace(MODEL, tie_embeddings=tied))
    straight = fit(config)
    middle = str(tmp_path / "run" / "checkpoints" / "step-2")  # where the rate starts to fall
    branch = fit(resumed(replace(config, run_dir=str(tmp_path / "branch")), updates=4, path=middle))
    assert identical(branch.weights, straight.weights)
    for key, parameter in branch.module.policy.named_parameters():
        state = branch.trainer.optimizers[0].state[parameter]
        same = dict(straight.module.policy.named_parameters())[key]
        assert identical(state, straight.trainer.optimizers[0].state[same]), key
    rates = [row["optim/lr"] for row in straight.rows]
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.005])
    assert [row["optim/lr"] for row in branch.rows] == rates[2:]


def test_a_longer_run_resumes_with_the_rates_of_its_own_schedule(tmp_path: Path) -> None:
    write_files(tmp_path, files(FILES))
    optim = OptimConfig(lr=1e-2, warmup_steps=0, schedule=ScheduleKind.linear)
    config = file_config(tmp_path, updates=2, optim=optim)
    fit(config)
    rates = [row["optim/lr"] for row in fit(resumed(config, updates=4)).rows]
    assert rates == pytest.approx([0.01, 0.005, 0.005, 0.0025]), "the third was 0, the end of the shorter run"


def test_a_resumed_run_takes_rates_and_decay_from_its_own_configuration(
    tmp_path: Path,
) -> None:
    write_files(tmp_path, files(FILES))
    config = file_config(tmp_path, updates=2, optim=OptimConfig(lr=1e-2, warmup_steps=0))
    first = fit(config)
    means = moments(first, "exp_avg")
    other = OptimConfig(lr=1e-3, warmup_steps=0, weight_decay=0.5)
    second = fit(replace(resumed(config, updates=3), optim=other))
    assert [row["optim/lr"] for row in second.rows] == pytest.approx([0.01, 0.01, 0.001])
    (gradients,), (before,) = second.recorder.gradients, second.recorder.weights
    assert identical(before, first.weights)
    now, squares = moments(second, "exp_avg"), moments(second, "exp_avg_sq")
    for name, gradient in gradients.items():
        torch.testing.assert_close(now[name], 0.9 * means[name] + 0.1 * gradient)
        step = now[name] / (1 - 0.9**3) / ((squares[name] / (1 - 0.98**3)).sqrt() + 1e-8)
        decay = 0.5 if name.endswith(".w2_EDF") else 0.0
        if decay > 0 or name == "norm.weight":
            want = before[name] * (1 - 1e-3 * decay) - 1e-3 * step
            torch.testing.assert_close(second.weights[name], want, rtol=1e-6, atol=1e-8)


def test_a_run_that_resumes_with_another_optimizer_or_model_is_refused(straight: Run, tmp_path: Path) -> None:
    config = replace(straight.config, run_dir=str(tmp_path))
    last = resumed(config, updates=5, path=str(complete_checkpoints(straight.config.run_dir)[-1]))
    with pytest.raises(Refusal, match=r"optim\.kind ckpt_path=.*has no .*momentum_buffer .*init_from"):
        fit(replace(last, optim=replace(OPTIM, kind=OptimizerKind.muon)))
    with pytest.raises(Refusal, match=r"ckpt_path=.*layers\.0\.ffn_norm\.weight"):
        fit(replace(last, model=replace(MODEL, block_norms=BlockNorms.after)))


def test_the_optimizer_groups_dense_weights_and_routed_experts_in_every_topology() -> None:
    model = decoder()
    names = {id(p): name for name, p in model.named_parameters()}
    dense, experts = [
        [names[id(p)] for p in group["params"]] for group in parameter_groups(model, config=OptimConfig())
    ]
    assert sorted(dense + experts) == sorted(names.values())
    assert experts == [
        f"layers.{layer}.moe.routed_experts.inner_experts.{w}"
        for layer in (1, 2)
        for w in ("w1_EFD", "w2_EDF", "w3_EFD")
    ]
    whole = HybridDecoder(replace(MODEL, num_experts=0, dense_layers=[]), attention="reference")
    assert len(parameter_groups(whole, config=OptimConfig())) == 1


def test_a_checkpoint_loads_with_weights_only_and_holds_plain_values(straight: Run) -> None:
    meta = torch.load(complete_checkpoints(straight.config.run_dir)[-1] / "meta.pt", weights_only=True)
    assert meta["global_step"] == 4
    assert meta["skipped_updates"] == 0
    assert meta["RolloutDataModule"] == {
        "collections_drawn": 4,
        "skips_in_a_row": 0,
        "source": {},
        "pending": None,
    }
    assert "hyper_parameters" not in meta


def test_an_update_after_the_crash_point_replaces_its_row_in_metrics_csv(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=3, callbacks=CallbacksConfig(
        progress=False, pictures=False, checkpoint_interval=1, keep_checkpoints=9))  # fmt: skip
    before = fit(config).rows
    for path in named_checkpoints(config.run_dir)[1:]:  # as if the process died before it saved
        path.rename(path.with_name(f"{path.name}.incomplete"))
    run = fit(resumed(config, updates=4))
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    for row, old in zip(run.rows, before, strict=False):
        assert (row["loss/total"], row["grad/norm"]) == (old["loss/total"], old["grad/norm"])


def test_a_run_whose_files_are_used_up_ends_saves_and_has_nothing_left_to_do(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES)[:3])
    config = file_config(tmp_path / "run", updates=50)
    first = fit(config)
    assert names(tmp_path / "run") == ["step-2", "step-3"]
    second = fit(resumed(config, updates=50))
    assert second.recorder.ids == []
    assert second.trainer.global_step == 3
    assert identical(second.weights, first.weights)


def test_files_of_several_steps_and_a_tail_resume_at_the_next_file(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "batch": BatchConfig(samples_per_step=3)
    }  # two steps a file, two samples left
    runs = []
    for name, parts in {"straight": [6], "halves": [2, 6]}.items():
        write_files(tmp_path / name, files(FILES))
        config = file_config(tmp_path / name, updates=parts[0], **sections)
        done = [fit(config)] + [fit(resumed(config, updates=updates)) for updates in parts[1:]]
        runs.append(done)
    (whole,), (first, second) = runs
    assert first.recorder.ids + second.recorder.ids == whole.recorder.ids
    assert first.recorder.ids[1] == ["f0-3", "f0-4", "f0-5"]
    assert second.recorder.ids[0] == ["f1-0", "f1-1", "f1-2"]
    check_same_end(second, whole)


def test_a_generating_run_resumes_to_the_same_rollouts_and_weights(tmp_path: Path) -> None:
    local: dict[str, Any] = {
        "rollouts": RolloutsConfig(source=Source.local, group_size=4, max_new_tokens=4),
        "batch": BatchConfig(samples_per_step=8),
        "packing": PackingConfig(kind=PackingKind.consecutive),
    }
    whole = fit(file_config(tmp_path / "straight", updates=4, **local))
    config = file_config(tmp_path / "halves", updates=2, **local)
    fit(config)
    second = fit(resumed(config, updates=4))
    for ours, theirs in zip(second.recorder.batches, whole.recorder.batches[2:], strict=True):
        for sample, other in zip(ours.samples, theirs.samples, strict=True):
            assert (sample.id, sample.policy_version) == (other.id, other.policy_version)
            assert sample.tokens.tolist() == other.tokens.tolist()
            assert sample.behavior_logprobs.tolist() == other.behavior_logprobs.tolist()
    check_same_end(second, whole)


def test_skipped_steps_leave_no_checkpoint_of_their_own_and_are_counted_after_a_resume(
    tmp_path: Path,
) -> None:
    nothing = [masked(sample) for sample in samples_of(prefix="masked")]
    write_files(tmp_path / "run", [nothing, *files(FILES)[:1], nothing, *files(FILES)[1:2]])
    config = file_config(tmp_path / "run", updates=1, interval=1)
    fit(config)
    assert names(tmp_path / "run") == ["step-1"]
    second = fit(resumed(config, updates=2))
    assert names(tmp_path / "run") == ["step-1", "step-2"]
    assert second.module.skipped_updates == 2
    assert [row["batch/skipped_updates"] for row in second.rows] == [1, 2]


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    callbacks = CallbacksConfig(progress=False, pictures=False, checkpoint_interval=1, keep_checkpoints=2)
    fit(file_config(tmp_path / "run", updates=4, callbacks=callbacks))
    assert names(tmp_path / "run") == ["step-3", "step-4"]


def write_checkpoint(run_dir: Path, *, step: int) -> Path:
    """Something whole with a checkpoint's name."""
    final = run_dir / "checkpoints" / f"step-{step}"
    scratch = final.with_name(f"{final.name}.incomplete")
    scratch.mkdir(parents=True)
    for name, size in {".metadata": 7, "meta.pt": 5, "__0_0.distcp": 31, "__1_0.distcp": 29}.items():
        (scratch / name).write_bytes(bytes(size))
    finish_checkpoint(scratch, final=final)
    return final


def test_the_newest_whole_checkpoint_is_chosen_by_number_and_names_alone_do_not_count(
    straight: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(straight.config, ckpt_path="last", run_dir=str(tmp_path))
    for step in (2, 10, 11, 12):
        write_checkpoint(tmp_path, step=step)
    directory = tmp_path / "checkpoints"
    (directory / "step-11").rename(directory / "step-11.incomplete")
    shutil.copytree(directory / "step-12", directory / "step-final")
    (directory / "step-12" / MANIFEST).unlink()
    (directory / "step-13").mkdir()
    assert resolve_checkpoint(config) == str(directory / "step-10")
    damage = f"is damaged, {MANIFEST} is missing or damaged: passed over"
    printed = [f"{directory / name} {damage}" for name in ("step-13", "step-12")]
    assert capsys.readouterr().out.splitlines() == printed


def test_a_checkpoint_that_lost_any_file_or_any_byte_is_passed_over_and_refused_by_that_file(
    straight: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = complete_checkpoints(straight.config.run_dir)[0]
    config = replace(straight.config, run_dir=str(tmp_path))
    shutil.copytree(older.parent, tmp_path / "checkpoints")
    newest = tmp_path / "checkpoints" / "step-4"
    files = sorted(newest.iterdir())
    assert {path.name for path in files} == {".metadata", "__0_0.distcp", MANIFEST, "meta.pt"}
    for path in files:
        whole = path.read_bytes()
        # A changed checksum in the manifest looks like another file.
        named = path.name if path.name != MANIFEST else r"(manifest\.json|differs from its checksum)"
        middle, bit = len(whole) // 2, bytes([whole[len(whole) // 2] ^ 1])
        flipped = whole[:middle] + bit + whole[middle + 1 :]
        for damage in (None, b"", whole[:middle], whole[:-1], whole + b"0", flipped):
            path.unlink(missing_ok=True)
            if damage is not None:
                path.write_bytes(damage)
            chosen = resolve_checkpoint(replace(config, ckpt_path="last"))
            assert chosen == str(newest.with_name("step-2"))
            (line,) = capsys.readouterr().out.splitlines()
            assert re.search(named, line)
            with pytest.raises(Refusal, match=f"no whole checkpoint, .*{named}"):
                settled(replace(config, ckpt_path=str(newest)))
        path.write_bytes(whole)
    assert resolve_checkpoint(replace(config, ckpt_path="last")) == str(newest)


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_when_the_run_goes_on(
    tmp_path: Path,
) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=2)
    fit(config)
    scratch = tmp_path / "run" / "checkpoints" / "step-3.incomplete"
    shutil.copytree(scratch.with_name("step-2"), scratch)  # killed just before the rename
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step-2"]
    with pytest.raises(Refusal, match="still being written when its run ended"):
        resolve_checkpoint(replace(config, ckpt_path=str(scratch)))
    fit(resumed(config, updates=4))
    assert names(tmp_path / "run") == ["step-2", "step-4"]


def test_a_run_from_an_older_checkpoint_is_another_run_and_leaves_the_first_alone(
    straight: Run, tmp_path: Path
) -> None:
    first = Path(straight.config.run_dir)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    older = first / "checkpoints" / "step-2"
    (line,) = refusals(replace(straight.config, ckpt_path=str(older)))
    assert "the run directory holds an earlier run" in line
    assert "choose another run_name" in line
    branch = replace(straight.config, run_dir=str(tmp_path / "branch"), run_name="branch")
    callbacks = CallbacksConfig(progress=False, pictures=False, checkpoint_interval=1, keep_checkpoints=1)
    run = fit(replace(resumed(branch, updates=4, path=str(older)), callbacks=callbacks))
    check_same_end(run, straight)
    assert names(tmp_path / "branch") == ["step-4"]
    assert [row["step"] for row in run.rows] == [3, 4]
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before


def rows_handed_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of every row that a logger is given, as they come."""
    steps: list[int] = []
    write = MetricsCsv.log_metrics

    def noted(self: MetricsCsv, metrics: dict[str, float], step: int | None = None) -> None:
        steps.append(step or 0)
        write(self, metrics, step)

    monkeypatch.setattr(MetricsCsv, "log_metrics", noted)
    return steps


def test_an_update_whose_publication_is_refused_is_told_before_it_is_saved(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_engines(module: PolicyModule) -> None:
        def publish(decoder: HybridDecoder, version: int) -> dict[str, float]:
            if version == 2:
                raise Refusal("rollouts.urls: no engine could be updated")
            return {}

        module.publish = publish

    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=4, interval=None)
    steps = rows_handed_on(monkeypatch)
    with pytest.raises(Refusal, match="no engine could be updated"):
        fit(config, prepare=without_engines)
    assert names(tmp_path / "run") == ["step-2"]
    assert steps == [1, 2]
    run = fit(resumed(config, updates=4))
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    for event in ("packing", "optimizer", "replay"):
        assert [line["step"] for line in run.events(event)] == [1, 2, 3, 4]
    check_same_end(run, straight)


def test_a_refusal_of_a_later_file_keeps_the_updates_before_it(
    straight: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = rows_handed_on(monkeypatch)
    good = files(FILES)
    stranger = replace(good[2][0], tokens=good[2][0].tokens + MODEL.vocab_size)
    write_files(tmp_path / "run", [*good[:2], [stranger, *good[2][1:]], *good[3:]])
    config = file_config(tmp_path / "run", updates=4, interval=None)
    with pytest.raises(Refusal, match="collection-00002"):
        fit(config)
    assert names(tmp_path / "run") == ["step-2"]
    assert steps == [1, 2], "once each"
    assert "refused after update 2, which is saved" in capsys.readouterr().out
    write_files(tmp_path / "run", good)
    check_same_end(fit(resumed(config, updates=4)), straight)


def test_lines_that_a_killed_process_left_unfinished_are_cut_before_a_run_goes_on(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=2)
    fit(config)
    for name, rest in (("metrics.csv", "3,0.25,"), ("training_contract_rank0.jsonl", '{"event": "opt')):
        with (tmp_path / "run" / name).open("a") as file:
            file.write(rest)
    run = fit(resumed(config, updates=3))
    assert [row["step"] for row in run.rows] == [1, 2, 3]
    assert run.rows[1].keys() == run.rows[2].keys(), "the first also measures how far the weights move"
    assert [event["step"] for event in run.events("optimizer")] == [1, 2, 3]


def test_a_path_that_is_no_checkpoint_is_refused(straight: Run, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"ckpt_path=last: .* holds no complete checkpoint"):
        resolve_checkpoint(replace(straight.config, ckpt_path="last", run_dir=str(tmp_path)))
    with pytest.raises(Refusal, match=r"no whole checkpoint, manifest.json is missing"):
        resolve_checkpoint(replace(straight.config, ckpt_path=str(tmp_path)))
    with pytest.raises(Refusal, match=r"no whole checkpoint, no such directory"):
        resolve_checkpoint(replace(straight.config, ckpt_path=str(tmp_path / "gone")))
    assert resolve_checkpoint(straight.config) is None


def test_checkpoints_have_a_version_and_another_one_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "weights").write_bytes(b"1234")
    finish_checkpoint(tmp_path / "new", final=tmp_path / "step-1")
    manifest = json.loads((tmp_path / "step-1" / MANIFEST).read_text())
    # SHA-256 of "1234", as sha256sum prints it.
    digest = "03ac674216f3e15c761ee1a5e255f067953623c8b388b4459e13f978d7c846f4"
    assert manifest == {
        "version": FORMAT_VERSION,
        "bytes": {"weights": 4},
        "sha256": {"weights": digest},
    }
    assert checkpoint_fault(tmp_path / "step-1") is None
    for version, fault in (
        (None, None),
        (FORMAT_VERSION + 1, "version 2, this olmo_rl reads"),
        ("1", "version 1,"),
    ):
        changed = {"bytes": manifest["bytes"]} | ({} if version is None else {"version": version})
        (tmp_path / "step-1" / MANIFEST).write_text(json.dumps(changed))
        found = checkpoint_fault(tmp_path / "step-1")
        assert (found is None) if fault is None else (found is not None and fault in found), version


class SignalDuringUpdate(Callback):
    """Sends the signal of a scheduler that is about to take a node away."""

    def __init__(self, number: signal.Signals, *, batch: int) -> None:
        self._number, self._batch = number, batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_update_with_a_checkpoint_to_resume_from(
    straight: Run, tmp_path: Path, number: signal.Signals
) -> None:
    write_files(tmp_path / "run", files(FILES))
    handler = signal.getsignal(number)
    config = file_config(tmp_path / "run", updates=4, interval=None)
    run = fit(config, callbacks=[SignalDuringUpdate(number, batch=2)])
    assert run.checkpoints.interrupted
    assert run.recorder.steps == [1, 2, 3]
    assert names(tmp_path / "run") == ["step-3"]
    assert signal.getsignal(number) == handler
    check_same_end(fit(resumed(config, updates=4)), straight)


def test_checkpoints_follow_minutes_too(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    saving = CallbacksConfig(
        progress=False, pictures=False, checkpoint_minutes=1e-9, keep_checkpoints=3, checkpoint_async=False
    )
    fit(file_config(tmp_path / "run", updates=3, callbacks=saving))
    assert names(tmp_path / "run") == ["step-1", "step-2", "step-3"]


def test_a_full_disk_is_named_with_numbers_and_earlier_checkpoints_stay(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=4, interval=1)
    synced = os.fsync

    def full(descriptor: int) -> None:
        if names(tmp_path / "run") != ["step-1.incomplete"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(Refusal) as caught:
            fit(config)
    (reason,) = caught.value.reasons
    directory = tmp_path / "run" / "checkpoints"
    assert reason.startswith(f"disk full: a checkpoint in {directory} needs ")
    assert "MiB free: free space there and continue with ckpt_path=last; step-1 is complete" in reason
    check_same_end(fit(resumed(config, updates=4)), straight)


def saving(*, beside: bool, **values: Any) -> CallbacksConfig:
    fields = {"checkpoint_interval": 1, "keep_checkpoints": 4, "checkpoint_async": beside}
    return CallbacksConfig(progress=False, pictures=False, **(fields | values))


def test_a_save_beside_training_has_the_bytes_of_one_that_training_waits_for(tmp_path: Path) -> None:
    hashes = []
    for beside in (True, False):
        run_dir = tmp_path / str(beside) / "run"
        write_files(run_dir, files(FILES))
        fit(file_config(run_dir, updates=3, callbacks=saving(beside=beside)))
        manifests = [
            json.loads((run_dir / "checkpoints" / f"step-{n}" / MANIFEST).read_text()) for n in (1, 2, 3)
        ]
        hashes.append([m["sha256"]["__0_0.distcp"] for m in manifests])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 3


def until(event: threading.Event) -> None:
    assert event.wait(BOUND_SECONDS), "nobody let it go on"


class AfterUpdate(Callback):
    """Calls a function when an update has ended."""

    def __init__(self, update: int, function: Callable[[], Any]) -> None:
        self._update, self._function = update, function

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._update:
            self._function()


def test_training_goes_on_beside_a_save_and_the_checkpoint_has_its_name_only_when_whole(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "run", files(FILES))
    go_on, seen = threading.Event(), []

    def finish(scratch: Path, *, final: Path) -> None:
        until(go_on)
        finish_checkpoint(scratch, final=final)

    def look() -> None:
        seen.extend(names(tmp_path / "run"))
        go_on.set()

    monkeypatch.setattr(checkpoint_writer, "finish_checkpoint", finish)
    config = file_config(tmp_path / "run", updates=4, callbacks=saving(beside=True, checkpoint_interval=2))
    fit(config, callbacks=[AfterUpdate(3, look)])  # one update after the save began
    assert seen == ["step-2.incomplete"]
    assert names(tmp_path / "run") == ["step-2", "step-4"]
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    check_same_end(fit(resumed(config, updates=4)), straight)


def test_ranks_await_the_end_of_a_save_as_long_as_the_save_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "run", files(FILES))
    limits = []
    gather = ExpertParallelStrategy.gather_objects

    def gather_objects(self: Any, value: object, *, group: Any = None) -> list[Any]:
        if group is not None:
            limits.append(group._get_backend(torch.device("cpu")).options._timeout)
        return gather(self, value, group=group)

    monkeypatch.setattr(ExpertParallelStrategy, "gather_objects", gather_objects)
    fit(file_config(tmp_path / "run", updates=1))
    assert limits == [checkpoint_writer._LIMIT]


def test_a_save_beside_training_that_fails_ends_the_run_after_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "run", files(FILES))
    ended = threading.Event()

    def finish(scratch: Path, *, final: Path) -> None:
        if final.name == "step-2":
            ended.set()
            raise OSError(errno.EIO, "Input/output error")
        finish_checkpoint(scratch, final=final)

    monkeypatch.setattr(checkpoint_writer, "finish_checkpoint", finish)
    config = file_config(tmp_path / "run", updates=6, callbacks=saving(beside=True, checkpoint_interval=2))
    recorder = AfterUpdate(3, lambda: (until(ended), time.sleep(0.2)))
    with pytest.raises(
        RankFailed, match=r"step-2\.incomplete: the save failed, OSError: .*no earlier checkpoint"
    ):
        fit(config, callbacks=[recorder])
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4][: len(rows)]
    assert len(rows) < 6


def test_a_signal_beside_a_save_completes_both_checkpoints(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "run", files(FILES))
    go_on = threading.Event()

    def finish(scratch: Path, *, final: Path) -> None:
        until(go_on)
        finish_checkpoint(scratch, final=final)

    monkeypatch.setattr(checkpoint_writer, "finish_checkpoint", finish)
    config = file_config(tmp_path / "run", updates=4, callbacks=saving(beside=True, checkpoint_interval=2))
    signalled = AfterUpdate(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    release = AfterUpdate(2, lambda: threading.Timer(0.5, go_on.set).start())
    run = fit(config, callbacks=[signalled, release])
    assert run.checkpoints.interrupted
    assert names(tmp_path / "run") == ["step-2", "step-3"]
    check_same_end(fit(resumed(config, updates=4)), straight)


def test_learning_rate_schedule_and_weight_decay_of_a_resumed_run_act(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=2, optim=replace(OPTIM, weight_decay=0.0))
    first = fit(config)
    changed = replace(OPTIM, lr=2e-2, weight_decay=0.05, schedule=ScheduleKind.linear, warmup_steps=0)
    second = fit(replace(resumed(config, updates=4), optim=changed))
    # Of four updates two are done: factors 1 - 2/4 and 1 - 3/4.
    rates = [event["lr"] for event in second.events("optimizer")]
    assert rates == pytest.approx([0.0025, 0.005, 0.01, 0.005])
    decays = {group["weight_decay"] for group in second.trainer.optimizers[0].param_groups}
    assert decays == {0.0, 0.05}
    assert len(first.trainer.optimizers[0].param_groups) < len(second.trainer.optimizers[0].param_groups)
    back = fit(replace(resumed(config, updates=5), optim=replace(OPTIM, weight_decay=0.0)))
    assert back.events("optimizer")[-1]["lr"] == pytest.approx(0.01)


def test_state_of_the_optimizer_belongs_to_names_when_groups_change(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=2, optim=replace(OPTIM, weight_decay=0.0))
    first = fit(config)
    second = fit(resumed(replace(config, optim=OPTIM), updates=2))  # nothing left to train

    def states(run: Run) -> dict[str, dict[str, torch.Tensor]]:
        state = run.trainer.optimizers[0].state
        return {name: dict(state[p]) for name, p in run.module.policy.named_parameters()}

    ours, theirs = states(first), states(second)
    assert ours.keys() == theirs.keys()
    assert all(identical(ours[name], theirs[name]) for name in ours)


def test_decays_of_the_averages_that_differ_from_the_checkpoint_are_refused_by_key(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=1)
    fit(config)
    other = replace(OPTIM, beta1=0.5, beta2=0.9, eps=1e-6)
    with pytest.raises(Refusal) as caught:
        fit(replace(resumed(config, updates=2), optim=other))
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == [
        "optim.beta1=0.5",
        "optim.beta2=0.9",
        "optim.eps=1e-06",
    ]
    assert "optim.beta1=0.9" in caught.value.reasons[0]


def test_a_checkpoint_that_torch_cannot_read_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=1)
    fit(config)
    (whole,) = complete_checkpoints(config.run_dir)
    (shard,) = whole.glob("*.distcp")
    shard.write_bytes(b"\0" * shard.stat().st_size)
    scratch = whole.rename(whole.with_name("step-1.incomplete"))
    (scratch / "manifest.json").unlink()
    finish_checkpoint(scratch, final=whole)  # as if the damage had been there before the checksums
    with pytest.raises(Refusal, match=r"ckpt_path: .*step-1 cannot be read, \w+: .*give another checkpoint"):
        fit(resumed(config, updates=2))


def test_auto_starts_where_no_checkpoint_is_complete_and_resumes_where_one_is(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    config = file_config(tmp_path / "run", updates=2, ckpt_path="auto", init_from=str(weights))
    started = settled(config)
    assert (started.ckpt_path, started.init_from, started.overwrite) == (None, str(weights), True)
    whole = str(write_checkpoint(tmp_path / "run", step=2))
    goes_on = settled(config)
    assert (goes_on.ckpt_path, goes_on.init_from, goes_on.overwrite) == (whole, None, False)
    assert settled(replace(config, ckpt_path="last")).ckpt_path == whole
    assert refusals(replace(config, init_from=None)) == []
    (tmp_path / "run" / "checkpoints" / "step-2" / "meta.pt").unlink()
    (line,) = refusals(replace(config, init_from=None))
    assert "holds no complete checkpoint" in line


def test_an_attempt_that_saved_nothing_is_started_again_by_auto(straight: Run, tmp_path: Path) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=4, ckpt_path="auto")
    (tmp_path / "run" / "metrics.csv").write_text("step\n1\n2\n")
    (tmp_path / "run" / "training_contract_rank0.jsonl").write_text('{"event": "optimizer", "step": 1}\n')
    library.run(config)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    lines = (tmp_path / "run" / "training_contract_rank0.jsonl").read_text().splitlines()
    steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "optimizer"]
    assert steps == [1, 2, 3, 4]
    library.run(replace(config, trainer=TrainerConfig(max_steps=5)))
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == [1, 2, 3, 4, 5]


def test_checkpoints_that_are_deleted_in_part_have_no_name_and_damaged_old_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step=step)
    directory = tmp_path / "checkpoints"
    (directory / "step-1" / "meta.pt").unlink()
    (directory / "step-4" / "meta.pt").unlink()
    prune_checkpoints(tmp_path, keep=1, newest=directory / "step-3")
    assert names(tmp_path) == ["step-3", "step-4"]


def test_a_later_checkpoint_that_was_passed_over_as_damaged_is_not_kept_instead_of_the_one_just_saved(
    tmp_path: Path,
) -> None:
    config = Config(run_dir=str(tmp_path), ckpt_path="last")
    for step in (10, 20):
        write_checkpoint(tmp_path, step=step)
    directory = tmp_path / "checkpoints"
    (directory / "step-20" / "meta.pt").write_bytes(b"other")  # as many bytes
    assert settled(config).ckpt_path == str(directory / "step-10")
    saved = write_checkpoint(tmp_path, step=12)
    prune_checkpoints(tmp_path, keep=1, newest=saved)
    assert names(tmp_path) == ["step-12", "step-20"]
    assert settled(config).ckpt_path == str(saved)


def test_damaged_checkpoints_are_renamed_by_the_owner_of_the_run_and_never_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path / "run", files(FILES))
    config = file_config(tmp_path / "run", updates=2, interval=1)
    library.run(config)
    saved = tmp_path / "run" / "checkpoints" / "step-2"
    whole = (saved / "__0_0.distcp").read_bytes()
    for aside in ("step-2.damaged", "step-2.damaged-2"):
        (saved / "__0_0.distcp").write_bytes(whole[:-1] + b"!")
        capsys.readouterr()
        library.run(resumed(config, updates=2))
        assert f"checksum: passed over and renamed to {aside}\n" in capsys.readouterr().out
        assert (saved.with_name(aside) / "__0_0.distcp").read_bytes() == whole[:-1] + b"!"
        assert checkpoint_fault(saved, contents=True) is None
    assert names(tmp_path / "run") == ["step-1", "step-2", "step-2.damaged", "step-2.damaged-2"]


def test_a_newer_checkpoint_of_another_version_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, step=1)
    newest = write_checkpoint(tmp_path, step=2)
    manifest = json.loads((newest / MANIFEST).read_text())
    (newest / MANIFEST).write_text(json.dumps(manifest | {"version": FORMAT_VERSION + 1}))
    with pytest.raises(Refusal, match=r"ckpt_path=last: .*step-2: its format has version 2"):
        settled(Config(run_dir=str(tmp_path), ckpt_path="auto"), owned=True)
    assert names(tmp_path) == ["step-1", "step-2"]


def write_evaluations(run_dir: Path, values: dict[int, float | None], *, name: str = "accuracy") -> None:
    lines = [{"event": "evaluation", "step": step, name: value} for step, value in values.items()]
    log = run_dir / "training_contract_rank0.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)) + '\n{"event": "eval')


def test_best_is_the_checkpoint_with_the_best_held_out_evaluation_of_its_own_update(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path), ckpt_path="best")
    for step in (2, 4, 6, 8):
        write_checkpoint(tmp_path, step=step)
    assert best_checkpoint(tmp_path) is None
    write_evaluations(tmp_path, {3: 0.9})
    assert best_checkpoint(tmp_path) is None
    with pytest.raises(Refusal, match="ckpt_path=best: .*no complete checkpoint has a held-out evaluation"):
        settled(config)
    write_evaluations(tmp_path, {0: 1.0, 2: 0.2, 3: 0.9, 4: 0.5, 6: 0.5, 8: None})
    assert settled(config).ckpt_path == str(tmp_path / "checkpoints" / "step-6")
    (line,) = refusals(config)
    assert "the best checkpoint of the run directory is not its newest" in line
    write_evaluations(tmp_path, {2: 1.5, 4: 1.25, 8: 1.75}, name="loss")  # of recipe=sft: the lowest
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-4"
    prune_checkpoints(
        tmp_path, keep=1, newest=tmp_path / "checkpoints" / "step-8", best=best_checkpoint(tmp_path)
    )
    assert names(tmp_path) == ["step-4", "step-8"]
    write_evaluations(tmp_path, {8: 1.0})
    assert refusals(config) == []
    assert settled(config).ckpt_path == str(tmp_path / "checkpoints" / "step-8")


def test_evaluations_of_updates_that_a_resume_undid_do_not_count() -> None:
    def update(step: int) -> dict[str, Any]:
        return {"event": "optimizer", "step": step}

    def evaluation(step: int, accuracy: float) -> dict[str, Any]:
        return {"event": "evaluation", "step": step, "accuracy": accuracy}

    straight = [evaluation(0, 0.1), update(1), update(2), evaluation(2, 0.2), update(3), evaluation(3, 0.3)]
    assert evaluations_of(straight) == {0: 0.1, 2: 0.2, 3: 0.3}
    again = [*straight, update(2), update(3)]  # killed, and resumed after update 1, without evaluations
    assert evaluations_of(again) == {0: 0.1}
    assert evaluations_of([*again, evaluation(3, 0.4)]) == {0: 0.1, 3: 0.4}


def test_a_closed_terminal_is_ignored_where_nohup_says_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in handled_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in handled_signals()
        assert signal.SIGTERM in handled_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


# Weights in and out


def decoder(seed: int = 0) -> HybridDecoder:
    model = HybridDecoder(MODEL, attention="reference")
    model.init_weights(seed)
    return model


def test_weights_come_back_from_a_file_and_from_a_checkpoint(straight: Run, tmp_path: Path) -> None:
    save_weights(straight.weights, tmp_path / "weights.safetensors")
    for path in (tmp_path / "weights.safetensors", complete_checkpoints(straight.config.run_dir)[-1]):
        model = decoder(seed=5)
        load_weights(model, str(path))
        assert identical(dict(model.named_parameters()), straight.weights)
        assert not identical(straight.weights, dict(decoder().named_parameters()))


def test_a_run_starts_from_the_weights_it_is_given(straight: Run, tmp_path: Path) -> None:
    path = complete_checkpoints(straight.config.run_dir)[-1]
    write_files(tmp_path / "run", files(FILES))
    run = fit(file_config(tmp_path / "run", updates=1, init_from=str(path)))
    assert identical(run.recorder.weights[0], straight.weights)
    assert run.recorder.steps == [1]


def test_weights_with_a_missing_a_strange_or_a_misshapen_name_are_refused_all_at_once(tmp_path: Path) -> None:
    weights = dict(decoder().named_parameters())
    weights["layers.7.ffn_norm.weight"] = weights.pop("norm.weight")
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1]
    save_weights(weights, tmp_path / "weights.safetensors")
    model = decoder()
    with pytest.raises(Refusal) as caught:
        load_weights(model, str(tmp_path / "weights.safetensors"))
    where = f"init_from={tmp_path / 'weights.safetensors'}: "
    assert caught.value.reasons == (
        f"{where}norm.weight is missing",
        f"{where}layers.7.ffn_norm.weight is not a weight of this model",
        f"{where}lm_head.weight has shape (258, 16), the model (259, 16)",
    )
    assert identical(dict(model.named_parameters()), dict(decoder().named_parameters()))


def test_a_checkpoint_of_another_model_is_refused_by_name(straight: Run) -> None:
    other = HybridDecoder(replace(MODEL, dense_layers=[0, 2]), attention="reference")
    with pytest.raises(Refusal) as caught:
        load_weights(other, str(complete_checkpoints(straight.config.run_dir)[-1]))
    assert any("layers.2.feed_forward.w1.weight is missing" in reason for reason in caught.value.reasons)
    assert any(
        "layers.2.moe.router.gate.weight is not a weight of this model" in r for r in caught.value.reasons
    )


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"neither a \.safetensors file nor a checkpoint directory"):
        load_weights(decoder(), str(tmp_path))


def test_tied_weights_come_back_too(tmp_path: Path) -> None:
    tied = replace(MODEL, tie_embeddings=True)
    model, other = (HybridDecoder(tied, attention="reference") for _ in range(2))
    model.init_weights(1)
    save_weights(dict(model.named_parameters()), tmp_path / "weights.safetensors")
    load_weights(other, str(tmp_path / "weights.safetensors"))
    assert identical(dict(other.named_parameters()), dict(model.named_parameters()))
    assert other.lm_head.weight is other.tok_embeddings.weight
