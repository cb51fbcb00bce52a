"""Commands as users type them, in an empty directory, with small batches.

What needs several ranks or a signal runs as `python train.py ...`; the rest calls the same command line in
this process, which imports torch and Lightning once. One directory of rollouts serves many tests. Two ranks
train in interpreters of their own (`trained`); other commands and their ranks are forked (warm_python.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bounds import BOUND_SECONDS
from composing import ROOT
from launched import train_on_two_ranks
from omegaconf import OmegaConf
from warm_python import started_commands

from olmo_rl.cli import run as run_command
from olmo_rl.data.files import collection_paths, read_collection
from olmo_rl.run_directory import complete_checkpoints
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.types import Sample

pytestmark = pytest.mark.usefixtures("forked")

PACKED = "+experiment=packed_moe"
COLD = "warm_start.steps=0"
SMALL = (COLD, "batch.samples_per_step=64", "task.eval_problems=0", "rollouts.max_new_tokens=8")
SINGLE = ("strategy=single", "trainer=cpu", "callbacks=quiet")
FILES = ("rollouts=files", "rollouts.path=outputs/r/rollouts")
HYDRA_FILES = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"}
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str


# train.py that tells in the end what the parent of the ranks imported.
LISTING = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from olmo_rl.cli import run
code = run(sys.argv[1:])
print("the parent imported", *sorted({{"hydra", "lightning", "torchtitan"}} & set(sys.modules)))
sys.exit(code)
"""


def start(*arguments: str, place: Path, program: str | None = None) -> tuple[subprocess.Popen[str], str]:
    """`python train.py ...`; the mark is in the environment of every process of the job."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "TEST_MARK": mark, "PYTHONPATH": str(place)}
    command = [
        sys.executable,
        *([str(ROOT / "train.py")] if program is None else ["-c", program]),
        *arguments,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=place, env=environment, stdout=pipe, stderr=pipe, text=True), mark


def finish(process: subprocess.Popen[str], mark: str) -> Ended:
    try:
        out, err = process.communicate(timeout=BOUND_SECONDS)
    finally:
        process.kill()
    assert still_running(mark) == [], "processes are left behind"
    return Ended(code=process.returncode, out=out, err=err)


def still_running(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TEST_MARK={mark}".encode() in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:
            continue  # it ended, or is not ours
    return found


def python_train(*arguments: str, place: Path, program: str | None = None) -> Ended:
    return finish(*start(*arguments, place=place, program=program))


@dataclass(frozen=True)
class Here:
    """The same command line in this process."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> Ended:
        self.capture.readouterr()
        code = run_command(arguments)
        out, err = self.capture.readouterr()
        return Ended(code=code, out=out, err=err)


@pytest.fixture
def here(place: Path, capfd: pytest.CaptureFixture[str]) -> Here:
    return Here(capfd)


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def records(run: Path, event: str, *, rank: int = 0) -> list[dict[str, Any]]:
    lines = (run / f"training_contract_rank{rank}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def rows_of(run: Path) -> list[dict[str, float]]:
    return read_metrics(run / "metrics.csv")


def looked_at() -> set[str]:
    """Files of a GRPO run for people to look at, beside its generations."""
    return {"reward.png", "packs.png", "report.html"}


def training_files(*, steps: int, ranks: int, generations: bool = True) -> set[str]:
    shards = {f"checkpoints/step-{steps}/__{rank}_0.distcp" for rank in range(ranks)}
    logs = {f"training_contract_rank{rank}.jsonl" for rank in range(ranks)}
    checkpoint = {f"checkpoints/step-{steps}/{name}" for name in (".metadata", "manifest.json", "meta.pt")}
    kept = {f"samples/step-{step}.parquet" for step in range(1, steps + 1)} if generations else set()
    return HYDRA_FILES | shards | logs | checkpoint | kept | {"metrics.csv"}


@pytest.fixture(scope="module")
def rolled(place: Path) -> Ended:
    own = ("task=jsonl", "task.path=problems.jsonl", "+task.verifier._target_=own_verifier.odd")
    collections = ("recipe=rollout", "run_name=r", "rollouts.collections=2")
    code, printed = train_on_two_ranks(PACKED, *collections, *SMALL, *own, place=place)
    return Ended(code=code, out=printed, err=printed)


@pytest.fixture(scope="module")
def trained(rolled: Ended, place: Path) -> Ended:
    arguments = ("run_name=t", "trainer.max_steps=2", COLD, "batch.samples_per_step=64")
    with started_commands():
        return python_train(PACKED, *arguments, *FILES, place=place, program=LISTING)


def samples(place: Path) -> list[list[Sample]]:
    paths = collection_paths(place / "outputs" / "r" / "rollouts")
    return [read_collection(path, require_routes=True).samples for path in paths]


def test_two_ranks_write_rollouts_of_a_task_with_the_users_own_verifier(rolled: Ended, place: Path) -> None:
    assert rolled.code == 0, rolled.err
    assert str(place / "outputs" / "r" / "rollouts") in rolled.out
    assert "collection-00001.parquet: 64 samples" in rolled.out
    assert "Warning" not in rolled.err
    written = {f"rollouts/collection-0000{i}.parquet" for i in (0, 1)}
    assert files_of(place / "outputs" / "r") == HYDRA_FILES | written
    collections = samples(place)
    assert [len(collection) for collection in collections] == [64, 64]
    first = collection_paths(place / "outputs" / "r" / "rollouts")[0]
    sampling = read_collection(first, require_routes=True).sampling
    assert sampling.temperature == 1.0
    assert sampling.deviations() == {}
    for sample in (sample for collection in collections for sample in collection):
        assert sample.response is not None
        assert sample.reward == len(sample.response) % 2
        assert sample.routes is not None
        assert sample.routes.shape == (len(sample) - 1, 3, 2)
        assert sample.policy_version == 0
    assert len({sample.id for collection in collections for sample in collection}) == 128
    assert 0.05 < np.mean([sample.reward for sample in collections[0]]) < 0.95


def test_two_ranks_train_on_the_files(trained: Ended, place: Path) -> None:
    assert trained.code == 0, trained.err
    assert "Warning" not in trained.err
    run = place / "outputs" / "t"
    assert files_of(run) == training_files(steps=2, ranks=2) | looked_at()
    for picture in ("reward.png", "packs.png"):
        assert (run / picture).read_bytes().startswith(PNG)
        assert (run / picture).stat().st_size > 5000
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2]
    rewards = [np.mean([sample.reward for sample in collection]) for collection in samples(place)]
    assert [row["reward/mean"] for row in rows] == pytest.approx(rewards)
    for row in rows:
        assert row["grad/norm"] > 0.01
        assert row["replay/coverage"] == 1
        assert row["packing/samples_per_pack"] >= 4
    assert rows[0]["mismatch/mean"] <= 1e-6, "the policy that trains is the one that generated"
    assert rows[1]["mismatch/mean"] > 1e-5, "it has moved since"
    for rank in (0, 1):
        assert [event["mismatches"] for event in records(run, "replay", rank=rank)] == [0, 0]
        assert [event["rank"] for event in records(run, "optimizer", rank=rank)] == [rank] * 2
    assert "t: 2 updates, 0 skipped" in trained.out
    assert trained.out.splitlines()[-1] == "the parent imported hydra", "only ranks pay for Lightning"
    assert "mismatch/mean" in trained.out
    config = (run / ".hydra" / "config.yaml").read_text()
    assert "${" not in config
    assert OmegaConf.create(config).trainer.max_steps == 2


def test_a_plan_of_the_files_is_what_training_ran(trained: Ended, place: Path) -> None:
    done = python_train(PACKED, "recipe=plan", "run_name=p", "batch.samples_per_step=64", *FILES, place=place)
    assert done.code == 0, done.err
    run = place / "outputs" / "p"
    assert files_of(run) == HYDRA_FILES | {"plan.json", "packs.png"}
    assert str(run / "plan.json") in done.out.replace("\n", "")
    plan = json.loads((run / "plan.json").read_text())
    assert plan["topology"] == {"world_size": 2, "ep_degree": 2}
    assert [block["step"] for block in plan["blocks"]] == [0, 1]
    for block in plan["blocks"]:
        for rank, packs in enumerate(block["ranks"]):
            event = records(place / "outputs" / "t", "packing", rank=rank)[block["step"]]
            assert [len(pack) for pack in packs] == event["samples_per_pack"]
        row = rows_of(place / "outputs" / "t")[block["step"]]
        assert row["packing/fill"] == pytest.approx(block["fill"])
        assert row["packing/expert_dispatch_skew_mean"] == pytest.approx(block["after"]["skew_mean"])


def test_one_process_scores_what_two_ranks_generated(rolled: Ended, here: Here, place: Path) -> None:
    done = here(PACKED, "recipe=score", "run_name=s", *SINGLE, COLD, "batch.samples_per_step=64", *FILES)
    assert done.code == 0, done.err
    assert "128 samples scored" in done.out
    lines = (place / "outputs" / "s" / "scores.jsonl").read_text().splitlines()
    scores = {row["sample_id"]: row["policy_logprobs"] for row in map(json.loads, lines)}
    gaps = []
    for sample in (sample for collection in samples(place) for sample in collection):
        slots = np.flatnonzero(sample.response_mask)
        assert [t for t, value in enumerate(scores[sample.id]) if value is not None] == slots.tolist()
        gaps += [abs(scores[sample.id][t] - float(sample.behavior_logprobs[t])) for t in slots]
    assert np.mean(gaps) <= 1e-6
    assert np.max(gaps) <= 5e-5


def test_validate_accepts_the_experiment_and_tells_every_refusal_of_a_bad_one(here: Here) -> None:
    done = here(PACKED, "recipe=validate", "run_name=v")
    assert done.code == 0
    assert "v: nothing is refused" in done.out
    wrong = ("policy.attention=torch", "packing.max_tokens=8", "trainer.devices=3")
    done = here(PACKED, "recipe=validate", "run_name=v", *wrong)
    assert done.code == 2
    for words in (
        "policy.attention=torch packing=consecutive: ",
        "packing.max_tokens=8 model.max_seq_len=64: ",
        "strategy.ep_degree=2 trainer.devices=3 ",
        "batch.samples_per_step=512 trainer.devices=3 ",
        "warm_start.samples_per_step=128 trainer.devices=3 ",
    ):
        assert done.err.count(words) == 1, words


def test_a_sweep_of_two_rank_jobs_goes_on_after_a_refused_and_a_failed_job(place: Path) -> None:
    """Job 0 is refused, job 1 fails on rank 0 when it draws its picture."""
    sweep = place / "outputs" / "swept"
    (sweep / "1" / "packs.png").mkdir(parents=True)
    budgets = (8, 1024, 512)
    swept = f"packing.max_tokens={','.join(map(str, budgets))}"
    done = python_train("-m", PACKED, "run_name=swept", swept, "trainer.max_steps=2", *SMALL, place=place)
    assert done.code == 1
    assert "job 0: refused, one reason:" in done.err
    assert "rank 0 failed" in done.err
    assert "IsADirectoryError" in done.err
    assert "sweep: 3 jobs, 1 refused, 1 failed" in done.err
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"1", "2"}, "0 was left empty"
    for job in (1, 2):
        composed = OmegaConf.load(sweep / str(job) / ".hydra" / "config.yaml")
        assert composed.packing.max_tokens == budgets[job]
    assert not (sweep / "1" / "checkpoints").exists()
    run = sweep / "2"
    assert files_of(run) == training_files(steps=2, ranks=2) | looked_at()
    assert [row["step"] for row in rows_of(run)] == [1, 2]
    assert [len(records(run, "optimizer", rank=rank)) for rank in (0, 1)] == [2, 2]


def test_an_interrupted_run_ends_with_75_and_one_process_resumes_what_two_saved(
    here: Here, place: Path
) -> None:
    unpacked = ("+experiment=unpacked_moe", "run_name=u", *SMALL, "batch.samples_per_step=16")
    process, mark = start(*unpacked, "trainer.max_steps=100000", place=place)
    run = place / "outputs" / "u"
    deadline = time.monotonic() + BOUND_SECONDS
    while not (run / "metrics.csv").is_file() or len(rows_of(run)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    done = finish(process, mark)
    assert done.code == 75, done.err
    assert "Traceback" not in done.err
    assert "SIGTERM: the ranks save and end" in done.err
    steps = len(rows_of(run))
    expected = f"interrupted by SIGTERM, saved after update {steps}: continue {run} with ckpt_path=last"
    assert expected in done.out
    assert [path.name for path in complete_checkpoints(run)] == [f"step-{steps}"]
    for rank in (0, 1):
        packing = records(run, "packing", rank=rank)
        assert len(packing) == steps
        assert all(set(event["samples_per_pack"]) == {1} for event in packing)
        assert [event["packs"] for event in packing] == [8] * steps

    done = here(*unpacked, *SINGLE, "ckpt_path=last", f"trainer.max_steps={steps + 1}")
    assert done.code == 0, done.err
    rows = rows_of(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 2))
    assert rows[-1]["mismatch/mean"] <= 1e-6
    assert records(run, "optimizer")[-1]["policy_versions"] == [steps, steps]


def test_interrupted_rollouts_end_with_the_signal_and_leave_whole_collections(place: Path) -> None:
    arguments = ("recipe=rollout", "run_name=cut", "rollouts.collections=100000", *SMALL)
    process, mark = start(PACKED, *arguments, place=place)
    rollouts = place / "outputs" / "cut" / "rollouts"
    deadline = time.monotonic() + BOUND_SECONDS
    while not (rollouts / "collection-00000.parquet").is_file():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    done = finish(process, mark)
    assert done.code == 128 + signal.SIGTERM, done.err
    assert "Traceback" not in done.err
    paths = collection_paths(rollouts)
    assert f"cut: ended by SIGTERM; {len(paths)} collections are written, each whole" in done.err
    assert all(len(read_collection(path, require_routes=True).samples) == 64 for path in paths)


def test_a_signal_during_the_warm_start_saves_nothing_and_says_so(place: Path) -> None:
    arguments = ("run_name=cold", "warm_start.steps=100000", *SMALL[1:], "strategy=single", "trainer=cpu")
    process, mark = start(PACKED, *arguments, place=place)
    assert process.stdout is not None
    while "warm-up 10/100000" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    done = finish(process, mark)
    assert done.code == 128 + signal.SIGINT, done.err
    assert "Traceback" not in done.err
    assert "cold: ended by SIGINT; no checkpoint to resume" in done.err
    assert files_of(place / "outputs" / "cold") == HYDRA_FILES
    assert not list((place / "outputs" / ".cache" / "warm_start").glob(".*.partial"))


def test_a_run_directory_that_cannot_be_is_refused_and_leaves_nothing(here: Here, place: Path) -> None:
    before = set(place.rglob("*")) | set(place.parent.iterdir())
    for name in ("../stray", "a/../../../stray", "''"):
        done = here(PACKED, f"run_name={name}")
        assert done.code == 2
        assert "the run directory would not lie under outputs/" in done.err
    assert set(place.rglob("*")) | set(place.parent.iterdir()) == before
    (place / "outputs").mkdir(exist_ok=True)
    (place / "outputs" / "taken").write_text("a file")
    done = here(PACKED, "run_name=taken")
    assert done.code == 2
    assert f"run_name: the run directory {place / 'outputs' / 'taken'} cannot be written" in done.err
    assert "Traceback" not in done.err


def test_resuming_gives_what_one_run_gives_and_a_finished_run_is_not_overwritten_by_accident(
    rolled: Ended, here: Here, place: Path
) -> None:
    base = (PACKED, *SINGLE, COLD, "batch.samples_per_step=32", *FILES)
    for arguments in (
        ("run_name=whole", "trainer.max_steps=4"),
        ("run_name=parts", "trainer.max_steps=2"),
        ("run_name=parts", "trainer.max_steps=4", "ckpt_path=last"),
    ):
        done = here(*base, *arguments)
        assert done.code == 0, done.err
    whole, parts = place / "outputs" / "whole", place / "outputs" / "parts"
    assert [row["step"] for row in rows_of(parts)] == [1, 2, 3, 4]
    for name in ("loss/total", "grad/norm", "reward/mean", "mismatch/mean", "optim/lr", "packing/packs"):
        assert [row.get(name) for row in rows_of(parts)] == [row.get(name) for row in rows_of(whole)], name
    assert {record["scoring"] for record in records(parts, "optimizer")} == {"standalone"}
    for path in complete_checkpoints(parts):
        torch.load(path / "meta.pt", weights_only=True)

    before = {name: (parts / name).read_bytes() for name in files_of(parts) - HYDRA_FILES}
    done = here(*base, "run_name=parts", "trainer.max_steps=4")
    assert done.code == 2
    assert "run_name=parts recipe=train: " in done.err
    assert {name: (parts / name).read_bytes() for name in files_of(parts) - HYDRA_FILES} == before

    done = here(*base, "run_name=parts", "trainer.max_steps=2", "overwrite=true")
    assert done.code == 0, done.err
    assert len(rows_of(parts)) == 2
    assert [path.name for path in complete_checkpoints(parts)] == ["step-2"]


def test_supervised_weights_are_where_a_later_run_starts(here: Here, place: Path) -> None:
    supervised = ("recipe=sft", "trainer.max_steps=12", "optim.lr=0.002", "batch.samples_per_step=32")
    done = here(PACKED, *SINGLE, *supervised, COLD, "run_name=sft")
    assert done.code == 0, done.err
    run = place / "outputs" / "sft"
    assert files_of(run) == training_files(steps=12, ranks=1, generations=False)
    losses = [row["loss/total"] for row in rows_of(run)]
    assert losses[-1] < losses[0] - 0.5
    weights = "init_from=outputs/sft/checkpoints/step-12"
    done = here(PACKED, *SINGLE, *SMALL, "recipe=rollout", "run_name=after_sft", weights)
    assert done.code == 0, done.err
    (path,) = collection_paths(place / "outputs" / "after_sft" / "rollouts")
    texts = [sample.response for sample in read_collection(path, require_routes=True).samples]
    digits = np.mean([character.isdigit() for text in texts for character in text or ""])
    assert digits > 0.3, "demonstrations answer with digits, an untrained policy with any byte"


def test_a_debug_run_warms_up_once_trains_evaluates_and_replaces_itself(here: Here, place: Path) -> None:
    run = place / "outputs" / "debug"
    for turn in (0, 1):
        done = here(PACKED, "+debug=single")
        assert done.code == 0, done.err
        assert ("made earlier by the same configuration" in done.out) == bool(turn)
        assert files_of(run) == training_files(steps=2, ranks=1) | looked_at() | {".numbered"}
        assert [row["step"] for row in rows_of(run)] == [1, 2]
        evaluations = records(run, "evaluation")
        assert [(event["step"], event["problems"]) for event in evaluations] == [(0, 8), (1, 8), (2, 8)]
    assert "greedy held-out accuracy" in done.out


def test_any_dataset_of_reasoning_gym_is_a_task(here: Here, place: Path) -> None:
    task = ("task=reasoning_gym", "task.name=chain_sum", "+task.parameters.max_terms=3")
    size = ("model.max_seq_len=256", "trainer.max_steps=1", "task.eval_problems=4")
    done = here(PACKED, *SINGLE, *SMALL, *task, *size, "run_name=gym")
    assert done.code == 0, done.err
    run = place / "outputs" / "gym"
    assert len(rows_of(run)) == 1
    assert [event["problems"] for event in records(run, "evaluation")] == [4, 4]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_each_job_of_a_sweep_logs_to_a_wandb_run_of_its_own_without_an_account(
    here: Here, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(place))
    sweep = ("run_name=w", "trainer.max_steps=1", "logger=wandb", "seed=1,2")
    done = here("-m", PACKED, *SINGLE, *SMALL, *sweep)
    assert done.code == 0, done.err
    for job in ("0", "1"):
        run = place / "outputs" / "w" / job
        assert len(rows_of(run)) == 1
        (log,) = (run / "wandb").glob("offline-run-*/*.wandb")
        assert b'"samples_per_step":64' in log.read_bytes().replace(b" ", b""), "the configuration, resolved"
        assert b'"kind":"consecutive"' in log.read_bytes().replace(b" ", b"")
