"""olmo_rl as a library: its functions, callbacks and loggers by import path, the wheel outside the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import BOUND_SECONDS
from composing import ROOT

import olmo_rl
from olmo_rl.config import Config, Recipe
from olmo_rl.types import Refusal

TINY = (
    "+experiment=packed_moe",
    "strategy=single",
    "trainer=cpu",
    "trainer.max_steps=2",
    "warm_start.steps=0",
    "batch.samples_per_step=16",
    "rollouts.max_new_tokens=4",
    "task.eval_problems=0",
    "callbacks=quiet",
)
OWN = """
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import Logger

STEPS, LOGGED = [], []


class Steps(Callback):
    def __init__(self, offset):
        self.offset = offset

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        STEPS.append(trainer.global_step + self.offset)


class Names(Logger):
    name, version = "names", 0

    def log_metrics(self, metrics, step=None):
        LOGGED.extend(metrics)

    def log_hyperparams(self, params, *args, **kwargs):
        pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with a module of their own."""
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    return tmp_path


def test_the_package_imports_nothing_heavy_and_composes_what_the_command_line_would() -> None:
    script = """
import sys
sys.modules["torch"] = None
import olmo_rl
assert "hydra" not in sys.modules
config = olmo_rl.compose(["+experiment=packed_moe", "seed=3", "run_name=mine"])
assert (config.seed, config.run_dir, config.packed) == (3, "outputs/mine", True)
assert olmo_rl.compose(run_dir="elsewhere").run_dir == "elsewhere"
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=BOUND_SECONDS)


def test_composing_refuses_all_reasons_at_once_and_only_training_recipes_train() -> None:
    with pytest.raises(Refusal) as refused:
        olmo_rl.compose(["+experiment=packed_moe", "packing.max_tokens=8", "trainer.devices=3"])
    assert len(refused.value.reasons) >= 2
    with pytest.raises(Refusal, match=r"trainer\.maxsteps=3: no such key; did you mean trainer\.max_steps\?"):
        olmo_rl.compose(["+experiment=packed_moe", "trainer.maxsteps=3"])
    with pytest.raises(Refusal, match="could not be converted to Float"):
        olmo_rl.compose(["optim.lr=fast"])
    with pytest.raises(Refusal, match="seed 3: write key=value"):
        olmo_rl.compose(["seed", "3"])
    with pytest.raises(Refusal, match=r"recipe=plan: nothing is trained; use olmo_rl\.run"):
        olmo_rl.train(Config(recipe=Recipe.plan))
    with pytest.raises(AttributeError, match="nothing"):
        _ = olmo_rl.nothing  # type: ignore[attr-defined]


def test_a_run_from_python_calls_callbacks_and_loggers_of_ones_own(own: Path) -> None:
    olmo_rl.train(
        olmo_rl.compose(
            [
                *TINY,
                "run_name=mine",
                "callbacks.extra=[{_target_:own_parts.Steps,offset:10}]",
                "logger.extra=[{_target_:own_parts.Names}]",
            ]
        )
    )
    parts = sys.modules["own_parts"]
    assert parts.STEPS == [11, 12]
    assert "loss/total" in parts.LOGGED
    assert (own / "outputs" / "mine" / "metrics.csv").is_file()
    with pytest.raises(Refusal, match="holds an earlier run"):
        olmo_rl.train(olmo_rl.compose([*TINY, "run_name=mine"]))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{_target_:own_parts.Missing}", r"callbacks\.extra\[0\]\._target_=own_parts\.Missing: .*Missing"),
        ("{_target_:own_parts.Steps}", r"own_parts\.Steps: .*offset"),
        ("{_target_:own_parts.Names}", r"own_parts\.Names: Names is no Lightning Callback"),
        (
            "{_target_:nowhere.Steps}",
            r"callbacks\.extra=\[.*\]: .*module is not installed; give import",
        ),
        ("{offset:1}", r"an entry without _target_"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused_with_its_path(own: Path, entry: str, words: str) -> None:
    for recipe in ("validate", "train"):
        with pytest.raises(Refusal, match=words):
            olmo_rl.run(olmo_rl.compose([*TINY, f"callbacks.extra=[{entry}]", f"recipe={recipe}"]))


def test_the_wheel_builds_without_a_warning_and_runs_outside_the_clone(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    place.mkdir()
    for name in ("olmo_rl", "recipes", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip"]
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    built = subprocess.run(
        [*pip, "wheel", "-v", "--no-build-isolation", *offline, "-w", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "absent from the `packages`" not in built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    subprocess.run(
        [*pip, "install", "-q", *offline, "--target", str(target), str(wheel)],
        check=True,
        timeout=BOUND_SECONDS,
    )
    assert (target / "olmo_rl" / "py.typed").is_file()
    shipped = {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    assert {path.relative_to(target / "olmo_rl/conf") for path in target.rglob("*.yaml")} == shipped

    def olmo_rl_command(*arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, str(target / "bin" / "olmo-rl"), *arguments],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(target)},
            capture_output=True,
            text=True,
            timeout=BOUND_SECONDS,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "packed_moe_gpu" in olmo_rl_command("--help")
    assert "packed_moe: nothing is refused" in olmo_rl_command("+experiment=packed_moe", "recipe=validate")
    script = "import olmo_rl, recipes.train; print(olmo_rl.__file__, recipes.train.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )
    assert all(path.startswith(str(target)) for path in found.stdout.split()), found
