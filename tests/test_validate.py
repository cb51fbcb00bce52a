"""recipe=validate, and refusals on the command line; test_rules.py has the rules themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bounds import BOUND_SECONDS
from composing import GROUPS, ROOT, compose_fast
from omegaconf import OmegaConf

from olmo_rl.cli import gather_lines
from olmo_rl.cli import run as run_command
from olmo_rl.config import Config, ModelConfig, Recipe
from olmo_rl.data.files import write_collection
from olmo_rl.policy.weights import parameter_shapes
from olmo_rl.refusals import refusals
from olmo_rl.run_directory import finish_checkpoint
from olmo_rl.types import Collection, Refusal, Sample
from recipes import validate

pytestmark = pytest.mark.usefixtures("forked")

TRIO = ("policy.attention=torch", "packing.max_tokens=8", "trainer.devices=3")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds a run without a complete checkpoint, for rules that read the disk."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "metrics.csv").write_text("step\n")
    (directory / "checkpoints" / "step-3.incomplete").mkdir(parents=True)
    return directory


def test_no_experiment_is_refused() -> None:
    recipes = (Recipe.train, Recipe.validate, Recipe.plan, Recipe.rollout)
    for experiment in GROUPS["experiment"]:
        config = compose_fast(f"+experiment={experiment}")
        found = {recipe.value: refusals(replace(config, recipe=recipe)) for recipe in recipes}
        assert found == {recipe.value: [] for recipe in recipes}, experiment


def test_the_defaults_and_every_single_choice_that_needs_nothing_else_are_not_refused() -> None:
    assert refusals(compose_fast()) == []
    free = ("model", "loss", "optim", "callbacks", "logger")
    for turn in range(max(len(GROUPS[group]) for group in free)):
        choices = [f"{group}={GROUPS[group][turn % len(GROUPS[group])]}" for group in free]
        assert refusals(compose_fast(*choices)) == [], choices
    assert refusals(compose_fast("task=reasoning_gym")) == []
    assert refusals(compose_fast("rollouts=files", "rollouts.path=somewhere")) == []
    four = ("+experiment=packed_moe", "trainer.devices=4")
    for kind in GROUPS["balance"]:
        assert refusals(compose_fast(f"balance={kind}", *four)) == []


def test_debug_runs_are_not_refused_also_over_files_and_an_earlier_run(run_directory: Path) -> None:
    for debug in GROUPS["debug"]:
        config = compose_fast("+experiment=packed_moe", f"+debug={debug}", f"run_dir={run_directory}")
        assert refusals(config) == []


def test_continuing_a_run_is_not_refused_where_a_checkpoint_is_complete(
    run_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "metrics.csv").touch()
    scratch, whole = (tmp_path / "checkpoints" / name for name in ("step-20.incomplete", "step-20"))
    scratch.mkdir(parents=True)
    (scratch / "meta.pt").write_bytes(b"1234")
    config = compose_fast("+experiment=packed_moe", "ckpt_path=last", f"run_dir={tmp_path}")
    assert len(refusals(config)) == 1
    finish_checkpoint(scratch, final=whole)
    assert refusals(config) == []
    assert refusals(replace(config, ckpt_path=str(whole), run_dir="")) == []
    (whole / "meta.pt").write_bytes(b"123")
    assert len(refusals(config)) == 1
    (line,) = refusals(replace(config, ckpt_path=str(whole), run_dir=""))
    assert line.startswith(f"ckpt_path={whole}: no whole checkpoint")
    assert len(refusals(replace(config, run_dir=str(run_directory)))) == 1


def test_another_recipe_may_use_the_directory_of_a_run(run_directory: Path) -> None:
    for recipe in ("validate", "plan", "rollout"):
        config = compose_fast("+experiment=packed_moe", f"recipe={recipe}", f"run_dir={run_directory}")
        assert refusals(config) == []


def test_all_refusals_are_told_at_once() -> None:
    lines = refusals(compose_fast("+experiment=packed_moe", "recipe=validate", *TRIO))
    for words in (
        "policy.attention=torch packing=consecutive",
        "packing.max_tokens=8 model.max_seq_len=64",
        "strategy.ep_degree=2 trainer.devices=3",
        "batch.samples_per_step=512 trainer.devices=3",
        "warm_start.samples_per_step=128 trainer.devices=3",
    ):
        assert sum(line.startswith(words) for line in lines) == 1, words


@pytest.mark.parametrize("recipe", ["validate", "plan"])
def test_attention_that_ignores_boundaries_is_refused_with_packing_by_both_keys(recipe: str) -> None:
    (line,) = refusals(compose_fast("+experiment=packed_moe", f"recipe={recipe}", "policy.attention=torch"))
    assert line.startswith("policy.attention=torch packing=consecutive: ")


def write_file(path: Path, *, lengths: list[int], logprobs: bool = False) -> None:
    """A collection without routes whose samples have these lengths."""
    samples = [
        Sample(
            id=f"s{i}",
            group=f"g{i // 2}",
            tokens=np.arange(length, dtype=np.int32),
            response_mask=np.arange(length) >= 1,
            behavior_logprobs=np.full(length, -1.0, dtype=np.float32),
            ref_logprobs=np.full(length, -2.0, dtype=np.float32) if logprobs else None,
            reward=float(i % 2),
        )
        for i, length in enumerate(lengths)
    ]
    write_collection(Collection(samples=samples, layout=None, source="test"), path)


def files(path: Path, *more: str) -> Config:
    replay = () if any(text.startswith("policy.replay") for text in more) else ("policy.replay=false",)
    given = ("rollouts=files", f"rollouts.path={path}", "warm_start.steps=0", *replay)
    return compose_fast("+experiment=packed_moe", "recipe=validate", *given, *more)


def test_files_are_refused_together_with_the_configuration(tmp_path: Path) -> None:
    write_file(tmp_path / "a.parquet", lengths=[4, 300])
    (tmp_path / "b.jsonl").write_text(json.dumps({"sample_id": "x"}) + "\n")
    with pytest.raises(Refusal) as refused:
        validate.run(files(tmp_path, "policy.attention=torch"))
    text = str(refused.value)
    assert "policy.attention=torch" in text
    assert "b.jsonl" in text
    assert "'s1'" in text, "token 299 lies outside the vocabulary of 259"


def test_a_sample_longer_than_the_budget_is_refused_by_id_and_length(tmp_path: Path) -> None:
    write_file(tmp_path / "a.parquet", lengths=[4, 5, 70, 6])
    with pytest.raises(Refusal, match=r"'s2' has 70 tokens.* budget of 64"):
        validate.run(
            files(
                tmp_path / "a.parquet",
                "batch.samples_per_step=2",
                "packing.max_tokens=64",
                "model.max_seq_len=128",
            )
        )


def test_a_sample_longer_than_the_context_is_refused_by_id_and_length(tmp_path: Path) -> None:
    write_file(tmp_path / "a.parquet", lengths=[4, 5, 70, 6])
    with pytest.raises(Refusal, match=r"'s2' has 70 tokens.* model.max_seq_len=64"):
        validate.run(files(tmp_path / "a.parquet", "batch.samples_per_step=2"))


def test_files_that_hold_no_complete_update_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "a.parquet", lengths=[4, 5])
    with pytest.raises(Refusal, match=r"batch.samples_per_step=4"):
        validate.run(files(tmp_path, "batch.samples_per_step=4"))


def test_files_without_routes_are_refused_under_replay_and_without_reference_log_probs_a_reference_is_kept(
    tmp_path: Path,
) -> None:
    write_file(tmp_path / "a.parquet", lengths=[4, 5])
    with pytest.raises(Refusal, match="routes"):
        validate.run(files(tmp_path, "batch.samples_per_step=2", "policy.replay=true"))
    validate.run(files(tmp_path, "batch.samples_per_step=2", "loss.kl_coef=0.1"))


def test_a_sound_file_is_told_with_its_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(tmp_path / "a.parquet", lengths=[4, 5, 6, 7, 8], logprobs=True)
    validate.run(files(tmp_path, "batch.samples_per_step=2"))
    out = capsys.readouterr().out
    assert "1, 5 samples of up to 8 tokens, 2 updates" in out
    assert "2 optimizer steps from one collection" in out
    validate.run(files(tmp_path, "batch.samples_per_step=2", "loss.kl_coef=0.1"))
    assert "loss.kl_coef=0.1" in capsys.readouterr().out


def test_prompts_that_leave_no_room_and_unknown_parameters_of_a_task_are_refused() -> None:
    config = compose_fast("recipe=validate", "model.max_seq_len=20", "rollouts.max_new_tokens=16")
    with pytest.raises(Refusal, match=r"prompt of \d+ tokens.*model.max_seq_len=20"):
        validate.run(config)
    with pytest.raises(Refusal, match="digts"):
        validate.run(compose_fast("recipe=validate", "++task.parameters.digts=3"))


def test_parameters_are_counted_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelConfig(
        vocab_size=10,
        dim=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        num_experts=4,
        top_k=1,
        expert_hidden=16,
    )
    total, active = validate.count_parameters(Config(model=model), shapes=parameter_shapes(model))
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 4  # q, k and v, o, norms of q and k
    experts = 4 * 3 * 8 * 16
    router, norms = 4 * 8, 2 * 8
    assert total == 2 * (attention + experts + router + norms) + 8 + 2 * 10 * 8
    assert active == total - 2 * 3 * 3 * 8 * 16


def command(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        timeout=BOUND_SECONDS,
    )


def left_behind(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_refused_command_exits_with_two_and_leaves_no_file(tmp_path: Path) -> None:
    done = command("+experiment=packed_moe", "recipe=validate", *TRIO, cwd=tmp_path)
    assert done.returncode == 2
    first, *reasons = done.stderr.splitlines()
    assert first == f"refused, {len(reasons)} reasons:"
    for override in TRIO:
        assert any(override in reason for reason in reasons)
    assert "Traceback" not in done.stderr + done.stdout
    assert left_behind(tmp_path) == set()


def test_a_typo_exits_with_one_names_the_nearest_key_and_leaves_nothing(tmp_path: Path) -> None:
    done = command("recipe=validate", "packing.max_tokns=10", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "packing.max_tokns=10: no such key; did you mean packing.max_tokens?\n"
    assert list(tmp_path.iterdir()) == []


def test_help_exits_with_zero_and_leaves_nothing(tmp_path: Path) -> None:
    done = command("+experiment=packed_moe", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "recipes (recipe=...)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_goes_on_after_a_refused_job_and_ends_with_its_code(tmp_path: Path) -> None:
    arguments = ["+experiment=packed_moe", "recipe=plan", "packing.max_tokens=8,256,9,512"]
    done = command("-m", *arguments, "batch.samples_per_step=32", cwd=tmp_path)
    assert done.returncode == 2
    assert "job 0: refused, one reason:" in done.stderr
    assert "job 2: refused, one reason:" in done.stderr
    assert "sweep: 4 jobs, 2 refused, 0 failed" in done.stderr
    sweep = tmp_path / "outputs" / "packed_moe"
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"1", "3"}, "no refused job"
    for job, budget in enumerate([8, 256, 9, 512]):
        records, plan = sweep / str(job) / ".hydra" / "config.yaml", sweep / str(job) / "plan.json"
        assert records.exists() == plan.exists() == (budget > 64)
        assert budget < 64 or OmegaConf.load(records).packing.max_tokens == budget


@pytest.mark.parametrize("flag", ["--config-dir={}", "--config-dir {}", "-cd {}", "--config-d={}"])
def test_an_experiment_of_ones_own_directory_is_found_by_every_spelling_of_the_flag(
    flag: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine" / "experiment").mkdir(parents=True)
    (here / "mine" / "experiment" / "own.yaml").write_text(
        "# @package _global_\ndefaults: [packed_moe, _self_]\npacking: {max_tokens: 8}\n"
    )
    flags = flag.format(here / "mine").split()
    assert run_command([*flags, "+experiment=own", "recipe=plan"]) == 2
    assert "packing.max_tokens=8 model.max_seq_len=64" in capsys.readouterr().err
    assert run_command([*flags, "+experiment=ownn", "recipe=plan"]) == 1
    assert "experiment=ownn: no such choice; did you mean own?" in capsys.readouterr().err
    assert run_command([*flags, "+experiment=own", "packing.max_tokens=6k"]) == 1
    assert "no such choice" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"), [("source=miles", "imports.source=miles"), ("path=a.pt", "imports.path=a.pt")]
)
def test_a_renamed_key_is_refused_with_its_new_name(
    old: str, new: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["recipe=import", old]) == 1
    assert capsys.readouterr().err == f"{old}: the key has another name now; set {new}\n"
    assert run_command(["recipe=import", f"+{old}"]) == 1
    assert f"set {new}" in capsys.readouterr().err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory for commands that run in this process."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["packing.max_tokens=6k"], "6k"),
        (["recipe=tran"], "expected one of [train, sft"),
        (["+typo=3"], "no such key"),
        (["++packing.max_tokns=3"], "packing.max_tokens"),
        (["packing=consecutiv"], "consecutive"),
        (["experiment=packed_moe"], "+experiment=packed_moe"),
        (["-m", "packing.max_tokens=10,6k"], "6k"),
        (["packing.max_tokens=1,2"], "multirun"),
        (["seed=[1"], "seed=[1"),
        (["--colour"], "--colour: write key=value"),
        (["--learning_rate", "1e-4"], "--learning_rate 1e-4: write key=value"),
        (["--batch-size=8"], "did you mean batch.samples_per_step?"),
        (["optim.learning_rate=1e-4"], "did you mean optim.lr?"),
        (["trainer.max_steps", "5"], "trainer.max_steps 5: write key=value"),
        (["run_name", "=x"], "run_name =x: write key=value"),
        (["optim.lr=fast"], "'fast' of type 'str' could not be converted to Float"),
    ],
)
def test_what_hydra_refuses_ends_with_one_and_a_few_readable_lines(
    arguments: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 1
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) <= 4
    assert "object_type" not in err
    assert "Traceback" not in err
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_the_same_reason_of_many_lines_is_one_reason_that_lists_them() -> None:
    failed = "task.verifier failed on a response to p.jsonl"
    broken = [f"{failed}, line {number}: KeyError: 'a'" for number in (1, 2, 3, 5, 8)]
    other = ["p.jsonl, line 9: not JSON", "p.jsonl, line 10: not JSON", "seed=-1: not a whole number"]
    assert gather_lines([*broken, *other]) == [f"{failed}, lines 1, 2, 3 and 2 more: KeyError: 'a'", *other]


def test_texts_reach_the_run_as_typed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "recipe=plan",
        "run_name=010",
        "rollouts=files",
        "rollouts.path=/a/b=c",
        "packing=consecutive",
    ]
    assert run_command(arguments) == 2
    assert "/a/b=c" in capsys.readouterr().err
    assert not (here / "outputs" / "010" / ".hydra").exists(), "files are judged before anything is written"


def test_a_directory_that_holds_a_run_is_not_touched(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = here / "outputs" / "packed_moe" / "metrics.csv"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("step\n1\n")
    assert run_command(["+experiment=packed_moe", "run_name=packed_moe"]) == 2
    err = capsys.readouterr().err
    assert "run_name=packed_moe recipe=train: " in err
    assert "overwrite=true" in err
    assert metrics.read_text() == "step\n1\n"


def test_the_run_directory_is_not_a_key(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["recipe=validate", "run_dir=elsewhere"]) == 2
    assert "set run_name" in capsys.readouterr().err


def test_a_rank_of_a_launcher_is_silent_and_writes_no_records(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(["+experiment=packed_moe", *TRIO]) == 2
    assert capsys.readouterr().err == ""
    assert left_behind(here) == set()


def test_a_sweep_under_a_launcher_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(["-m", "recipe=plan", "seed=1,2"]) == 2
    assert "without torchrun or srun" in capsys.readouterr().err
    assert left_behind(here) == set()


def test_a_sweep_file_sweeps_without_a_flag(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = "model.max_seq_len=4096"
    assert run_command(["+experiment=packed_moe", "+sweep=pack_budget", "recipe=plan", refused]) == 2
    err = capsys.readouterr().err
    assert "sweep: 4 jobs, 4 refused, 0 failed" in err
    budgets = [int(budget) for budget in re.findall(r"packing\.max_tokens=(\d+) model\.max_seq_len", err)]
    assert budgets == [256, 512, 1024, 2048]
