"""Numbered run directories: which one a command gets, where the link leads, what a refused command leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bounds import BOUND_SECONDS
from documents import ROOT
from torch.distributed import TCPStore
from training_cases import config_of, files, write_files

from olmo_rl import backends, library
from olmo_rl.chosen_checkpoint import settled
from olmo_rl.cli import run as run_command
from olmo_rl.config import Config, Recipe, StrategyConfig, TrainerConfig
from olmo_rl.numbered_runs import (
    link_newest,
    new_directory,
    note_job,
    unchosen,
    with_directory,
    without_links,
)
from olmo_rl.run_directory import finish_checkpoint
from olmo_rl.running import agreement
from olmo_rl.running.agreement import announced, changed, differences
from olmo_rl.types import Refusal


def asked(outputs: Path, **values: object) -> Config:
    return Config(run_dir=unchosen("a", root=outputs), **values)  # type: ignore[arg-type]


def directory_of(config: Config, *, environ: dict[str, str] | None = None) -> str:
    chosen, _ = with_directory(config, environ=environ or {})
    return Path(chosen.run_dir).name


def save_checkpoint(run_dir: Path, *, step: int, accuracy: float) -> Path:
    final = run_dir / "checkpoints" / f"step-{step}"
    scratch = final.with_name(f"{final.name}.incomplete")
    scratch.mkdir(parents=True)
    (scratch / "weights").write_text("w")
    finish_checkpoint(scratch, final=final)
    event = {"event": "evaluation", "step": step, "accuracy": accuracy}
    with (run_dir / "training_contract_rank0.jsonl").open("a") as log:
        log.write(json.dumps(event) + "\n")
    return final


def test_every_command_without_a_name_gets_the_next_number(tmp_path: Path) -> None:
    assert [directory_of(asked(tmp_path)) for _ in range(3)] == ["a-1", "a-2", "a-3"]
    (tmp_path / "a-7").mkdir()  # of another program
    (tmp_path / "a-b-9").mkdir()
    assert directory_of(asked(tmp_path)) == "a-8"
    named = Config(run_dir=str(tmp_path / "named"))
    assert with_directory(named, environ={}) == (named, False)
    assert with_directory(asked(tmp_path, recipe=Recipe.validate), environ={})[0].run_dir == ""


def test_continuing_and_replacing_take_the_newest_run_of_the_name_and_recipe(tmp_path: Path) -> None:
    new_directory(tmp_path / "a", kind="train")
    newest = new_directory(tmp_path / "a", kind="train")
    new_directory(tmp_path / "a", kind="rollout")
    new_directory(tmp_path / "ab", kind="train")
    for values in ({"ckpt_path": "last"}, {"ckpt_path": "auto"}, {"overwrite": True}):
        assert directory_of(asked(tmp_path, **values)) == newest.name, values
        assert directory_of(asked(tmp_path, recipe=Recipe.sft, **values)) == newest.name
        assert directory_of(asked(tmp_path, recipe=Recipe.rollout, **values)) == "a-3"
    assert directory_of(asked(tmp_path, recipe=Recipe.score, overwrite=True)) == "a-4"
    assert directory_of(asked(tmp_path, ckpt_path="elsewhere/step-1")) == "a-5"


def test_best_begins_a_new_run_from_the_best_checkpoint_of_the_newest_one(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="ckpt_path=best: .*no complete checkpoint has a held-out evaluation"):
        with_directory(asked(tmp_path, ckpt_path="best"), environ={})
    earlier = new_directory(tmp_path / "a", kind="train")
    best = save_checkpoint(earlier, step=2, accuracy=0.75)
    save_checkpoint(earlier, step=4, accuracy=0.5)
    config, created = with_directory(asked(tmp_path, ckpt_path="best"), environ={})
    assert (config.ckpt_path, Path(config.run_dir).name, created) == (str(best), "a-2", True)
    assert settled(config) == config


def test_a_run_that_was_given_the_name_itself_is_continued_and_never_becomes_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.csv").touch()
    assert directory_of(asked(tmp_path, ckpt_path="last")) == "a"
    link_newest(new_directory(tmp_path / "a", kind="train"))
    assert "is a run of that name and stays" in capsys.readouterr().out
    assert (tmp_path / "a" / "metrics.csv").exists()
    assert not (tmp_path / "a").is_symlink()


def job(number: str, *, restarts: int = 0) -> dict[str, str]:
    """What SLURM sets in a job."""
    return {"SLURM_JOB_ID": number, "SLURM_RESTART_COUNT": str(restarts)}


def test_a_requeued_job_returns_to_its_directory_and_other_jobs_do_not(tmp_path: Path) -> None:
    for number in ("77", "78"):
        note_job(new_directory(tmp_path / "a", kind="train"), kind="train", environ=job(number))
    with (tmp_path / "a-2" / ".jobs-train").open("a") as lines:
        lines.write('{"job": "7')  # a process that was killed
    again = job("77", restarts=1)
    assert directory_of(asked(tmp_path), environ=again) == "a-1"
    assert directory_of(asked(tmp_path), environ=job("77")) == "a-3", "another command of the same allocation"
    array = {"SLURM_JOB_ID": "78", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    assert directory_of(asked(tmp_path), environ={**again, **array}) == "a-4"
    assert directory_of(asked(tmp_path, recipe=Recipe.rollout), environ=again) == "a-5"


def test_two_commands_of_a_requeued_job_return_to_a_directory_each(tmp_path: Path) -> None:
    assert [directory_of(asked(tmp_path), environ=job("77")) for _ in range(2)] == ["a-1", "a-2"]
    for expected in ("a-1", "a-2", "a-3"):
        again = job("77", restarts=1)
        assert directory_of(asked(tmp_path), environ=again) == expected
        note_job(tmp_path / expected, kind="train", environ=again)


def test_a_requeued_job_that_had_begun_nothing_replaces_no_run_of_another_command(tmp_path: Path) -> None:
    directory_of(asked(tmp_path))
    again = job("77", restarts=1)
    assert directory_of(asked(tmp_path, ckpt_path="auto"), environ=again) == "a-1"
    assert directory_of(asked(tmp_path, overwrite=True), environ=again) == "a-2"
    directory_of(asked(tmp_path))
    twice = job("77", restarts=2)
    assert directory_of(asked(tmp_path, overwrite=True), environ=twice) == "a-2", "recorded when created"


def test_a_requeued_job_that_had_not_saved_begins_again_from_the_best_of_the_run_before_it(
    tmp_path: Path,
) -> None:
    best = save_checkpoint(new_directory(tmp_path / "a", kind="train"), step=2, accuracy=0.75)
    asks = asked(tmp_path, ckpt_path="best")
    first, _ = with_directory(asks, environ=job("77"))
    save_checkpoint(new_directory(tmp_path / "a", kind="train"), step=9, accuracy=1.0)  # of another command
    again, created = with_directory(asks, environ=job("77", restarts=1))
    assert (again, created) == (first, False)
    assert again.ckpt_path == str(best)
    save_checkpoint(Path(first.run_dir), step=4, accuracy=0.5)
    assert with_directory(asks, environ=job("77", restarts=1))[0].run_dir == first.run_dir


def test_a_long_text_with_a_slash_is_no_path() -> None:
    text = f"Answer with {'a' * 300}/b"
    assert without_links(Config(init_from=text)).init_from == text


def test_the_link_leads_to_the_newest_and_a_run_that_reads_through_it_keeps_its_target(
    tmp_path: Path,
) -> None:
    outputs = tmp_path / "outputs"
    older, newer = (new_directory(outputs / "a", kind="train") for _ in range(2))
    link_newest(newer)
    link_newest(older)
    assert os.readlink(outputs / "a") == newer.name
    through = Config(init_from=str(outputs / "a" / "checkpoints" / "step-1"), ckpt_path="last")
    kept = without_links(replace(through, loss=replace(through.loss, reference=str(outputs / "a" / "r"))))
    assert kept.init_from == str(newer / "checkpoints" / "step-1")
    assert kept.loss.reference == str(newer / "r")
    named, _ = with_directory(Config(run_dir=str(outputs / "a")), environ={})
    assert named.run_dir == str(newer)
    (tmp_path / "mine").symlink_to(tmp_path)  # of the user
    assert without_links(Config(init_from=str(tmp_path / "mine" / "w"))).init_from == str(
        tmp_path / "mine" / "w"
    )


@pytest.mark.parametrize("argument", ["run_name=../../x", "++run_name=../../x", "+run_name=/tmp/x"])
def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    assert run_command(["+experiment=packed_moe", "recipe=plan", argument]) == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]


def test_a_second_command_is_not_refused_and_a_refused_one_leaves_nothing(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    write_files(tmp_path / "run", files(1))
    config = replace(config_of(tmp_path / "run"), run_dir=unchosen("a", root=outputs))
    for _ in range(2):
        library.run(config)
    assert sorted(path.name for path in outputs.iterdir()) == ["a", "a-1", "a-2"]
    assert [path.name for path in (outputs / "a" / "checkpoints").iterdir()] == ["step-1"]
    assert os.readlink(outputs / "a") == "a-2"
    (tmp_path / "run" / "files" / "collection-00000.parquet").write_bytes(b"no parquet")
    with pytest.raises(Refusal):
        library.run(config)
    assert sorted(path.name for path in outputs.iterdir()) == ["a", "a-1", "a-2"]


def test_a_refused_command_does_not_touch_the_records_of_the_run_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ["+experiment=packed_moe", "recipe=plan", "balance=none", "batch.samples_per_step=32"]
    assert run_command([*plan, "run_name=p"]) == 0
    records = tmp_path / "outputs" / "p" / ".hydra"
    before = {path.name: path.read_text() for path in records.iterdir()}
    assert set(before) == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert run_command([*plan, "run_name=p", "packing.max_tokens=8"]) == 2
    assert run_command([*plan, "run_name=p", "recipe=rollout", "packing.max_tokens=8"]) == 2
    assert {path.name: path.read_text() for path in records.iterdir()} == before
    assert run_command([*plan, "packing.max_tokens=8"]) == 2
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["p"]


@pytest.mark.parametrize(
    ("override", "launched", "reason"),
    [
        ("trainer.num_nodes=2", False, "needs a launcher"),
        ("trainer.devices=2", True, "the launcher started WORLD_SIZE=1 ranks"),
        ("logger=wandb", False, "not installed"),
    ],
)
def test_what_the_ranks_cannot_start_with_is_refused_before_anything_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    override: str,
    launched: bool,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends, "importable", lambda name: name != "wandb")
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        if launched:
            monkeypatch.setenv(name, value)
    assert run_command(["+experiment=packed_moe", override]) == 2
    assert reason in capfd.readouterr().err
    assert not (tmp_path / "outputs").exists() or not list((tmp_path / "outputs").iterdir())
    new_directory(tmp_path / "outputs" / "packed_moe", kind="train")
    before = sorted((tmp_path / "outputs" / "packed_moe-1").iterdir())
    assert run_command(["+experiment=packed_moe", "ckpt_path=auto", override]) == 2
    assert sorted((tmp_path / "outputs" / "packed_moe-1").iterdir()) == before
    assert not (tmp_path / "outputs" / "packed_moe").exists()


def test_what_rank_0_settled_reaches_the_other_ranks() -> None:
    given = Config(run_dir="outputs/a-*", ckpt_path="auto")
    loss = replace(given.loss, reference="outputs/a-1/reference")
    settled_by_0 = replace(given, run_dir="outputs/a-2", ckpt_path=None, overwrite=True, loss=loss)
    told = json.loads(json.dumps(differences(given, settled_by_0)))
    assert told == {
        "run_dir": "outputs/a-2",
        "ckpt_path": None,
        "overwrite": True,
        "loss.reference": "outputs/a-1/reference",
    }
    assert changed(given, told) == settled_by_0


RANK = """
import os, sys, time
from pathlib import Path
from olmo_rl.library import compose, prepared
from olmo_rl.types import Refusal

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.02)

two = ["+experiment=packed_moe"]
mine, other = os.environ["RANK"], str(1 - int(os.environ["RANK"]))
with prepared(compose(two)) as accepted:
    config = accepted.config
    print(config.run_dir, flush=True)
    Path(f"inside{mine}").touch()
    wait_for(f"inside{other}")
Path(f"ended{mine}").touch()
wait_for(f"ended{other}")
Path("outputs/held/metrics.csv").touch()
for overrides in (["run_name=held"], ["run_name=held", "strategy.timeout_seconds=1"][: 2 * int(mine)]):
    try:
        with prepared(compose([*two, *overrides])):
            print("accepted")
    except Refusal as refusal:
        print(refusal)
    if mine == "0":
        break
"""


def test_ranks_of_a_launcher_get_the_directory_that_rank_0_chose_or_end(tmp_path: Path) -> None:
    (tmp_path / "outputs" / "held").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        identity = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", RANK]
        environ = {**os.environ, **identity, **address}
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate(timeout=BOUND_SECONDS)[0].splitlines() for rank in ranks]
    assert [lines[0] for lines in printed] == ["outputs/packed_moe-1"] * 2
    assert "the run directory holds an earlier run" in printed[0][1]
    assert printed[1][1] == "rank 0 refused the run"
    assert "strategy.timeout_seconds=1: rank 0 announced no run directory in time" in printed[1][2]
    assert not (tmp_path / "outputs" / "packed_moe").exists(), "an empty directory goes"


def test_a_sweep_gets_a_directory_of_its_own_that_is_never_taken_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = tmp_path / "outputs"
    new_directory(outputs / "packed_moe", kind="plan")
    sweep = ["-m", "+experiment=packed_moe", "recipe=plan", "batch.samples_per_step=32", "balance=none"]
    for _ in range(2):
        assert run_command([*sweep, "seed=1", "overwrite=true"]) == 0
    names = [path.name for path in outputs.iterdir()]
    assert sorted(names) == ["packed_moe", "packed_moe-1", "packed_moe-2", "packed_moe-3"]
    assert os.readlink(outputs / "packed_moe") == "packed_moe-3"
    config = replace(asked(tmp_path), run_dir=unchosen("packed_moe", root=outputs))
    assert directory_of(replace(config, recipe=Recipe.plan, overwrite=True)) == "packed_moe-1"
    refused = ["batch.samples_per_step=-1,-2"]
    assert run_command([*sweep, *refused]) == 2
    assert run_command([*sweep, *refused, "run_name=mine"]) == 2
    assert sorted(path.name for path in outputs.iterdir()) == sorted(names)
    assert os.readlink(outputs / "packed_moe") == "packed_moe-3"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    Path("outputs").touch()
    assert run_command([*sweep, "seed=1"]) == 2
    assert "cannot be written" in capfd.readouterr().err


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process as rank 1 of two, and the store that rank 0 would serve."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    one = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def waiting(seconds: float) -> Config:
    strategy = StrategyConfig(timeout_seconds=seconds)
    return Config(trainer=TrainerConfig(devices=2), strategy=strategy, run_dir="outputs/a-*")


def announce(store: Any, run: int, directory: str) -> None:
    found = replace(waiting(1.0), run_dir=directory)
    announcement = agreement.Announcement(store, run=run)
    announcement.settle(given=waiting(1.0), settled=found, facts={})


def test_the_verdict_of_rank_0_has_a_limit_of_its_own(rank_1: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    later = threading.Timer(2.0, announce, (rank_1, 0, "outputs/a-1"))
    later.start()
    assert announced(waiting(1.0), run=0)[0].run_dir == "outputs/a-1"
    later.join()
    monkeypatch.setattr(agreement, "VERDICT_SECONDS", 0.1)
    with pytest.raises(Refusal, match="rank 0 announced no run directory within 0 s"):
        announced(waiting(600.0), run=1)


def test_a_second_run_of_the_same_processes_reads_no_answer_of_the_first(rank_1: Any) -> None:
    announce(rank_1, 0, "outputs/a-1")
    assert announced(waiting(60.0), run=0)[0].run_dir == "outputs/a-1"
    later = threading.Timer(0.5, announce, (rank_1, 1, "outputs/a-2"))
    later.start()
    assert announced(waiting(60.0), run=1)[0].run_dir == "outputs/a-2"
    later.join()
