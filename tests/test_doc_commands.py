"""Every command of README.md and docs/ runs, scaled down: a page is one session in an empty directory.

`python train.py ...` is called in this process on one rank, with small batches, short answers and one update
for the page's smallest `trainer.max_steps`, two for the next. What a page marks with `validate` is composed
and validated instead; rules that read the disk are left out there. Metrics that the runs log must be
explained in the reference.
"""

from __future__ import annotations

import csv
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bounds import BOUND_SECONDS
from composing import compose
from documents import PAGES, ROOT, Block, blocks

from olmo_rl.cli import run as run_command
from olmo_rl.refusals import refusals

ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
SINGLE = ("strategy=single", "trainer=cpu", "callbacks=quiet", "task.eval_problems=2")
GENERATING = ("rollouts.group_size=4", "rollouts.max_new_tokens=2")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OF_USERS = re.compile(
    r"reward/\w+|eval/.+|(rollouts|sft)/epoch/\w+"
)  # documented as `reward/<name>` and so on
METRICS = set(re.findall(r"`(\w+/\w+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
WITH_COMMANDS = [page for page in PAGES if any(block.language == "bash" for block in blocks(page))]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory with the example data, on the path of Python's imports."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").is_relative_to(tmp_path):
            del sys.modules[name]  # another page may write a module of this name


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_page_works(page: Path, session: Path) -> None:
    found = blocks(page)
    steps = step_numbers(found)
    for block in found:
        if block.title is not None:
            path = session / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if block.language == "bash" and block.mark != "external":
            for words in block.commands():
                check(words, mark=block.mark, steps=steps, session=session)
    logged = {column for path in session.glob("outputs/**/metrics.csv") for column in columns_of(path)}
    unexplained = {name for name in logged - METRICS - {"step"} if not OF_USERS.fullmatch(name)}
    assert unexplained == set(), "docs/reference/metrics.md explains every metric"


def columns_of(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file))


def step_numbers(found: Sequence[Block]) -> dict[str, int]:
    """The number of updates in place of each `trainer.max_steps` of a page."""
    text = "\n".join(block.text for block in found)
    given = sorted({int(number) for number in re.findall(r"trainer\.max_steps=(\d+)", text)})
    return {str(number): index for index, number in enumerate(given, start=1)}


def check(words: list[str], *, mark: str | None, steps: dict[str, int], session: Path) -> None:
    """Execute one command, or check as much of it as a test can."""
    line = shlex.join(words)
    while ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    program, *arguments = words
    match Path(program).name:
        case "python" if arguments[0] == "train.py" and mark == "validate":
            assert invalid(arguments[1:]) == [], line
        case "python" if arguments[0] == "train.py":
            code = run_command([*scaled(arguments[1:], steps=steps), *searched(session)])
            assert code == (2 if mark == "invalid" else 0), line
        case "python" if arguments[0] == "-m":
            assert arguments[1] == "venv" or importlib.util.find_spec(arguments[1]) is not None, line
        case "python":
            subprocess.run([sys.executable, *arguments], cwd=session, check=True, timeout=BOUND_SECONDS)
        case "torchrun.sh" | "preflight.sh" | "sbatch":
            script = next(word for word in words if word.startswith("launch/"))
            assert (ROOT / script).is_file(), line
            assert invalid([word for word in arguments if "=" in word and not word.startswith("--")]) == []
        case "make":
            assert arguments[0] in TARGETS, line
        case "pip":
            check_install(arguments, line=line)
        case _:
            pytest.fail(f"no rule for this command: {line}")


def invalid(arguments: Sequence[str]) -> list[str]:
    """Reasons against the configuration, those of the disk aside."""
    given = [argument for argument in arguments if not argument.startswith("-")]
    values = [re.sub(r"=([\w.-]+),[\w.,-]+$", r"=\1", argument) for argument in given]
    launcher = [argument for argument in values if argument.startswith(("hydra/", "hydra."))]
    config = compose(*[argument for argument in values if argument not in launcher])
    return [reason for reason in refusals(replace(config, run_dir="")) if "(read from disk)" not in reason]


def scaled(arguments: Sequence[str], *, steps: dict[str, int]) -> Iterator[str]:
    """The same command on one rank, with little work; its own values stay where they cost nothing."""
    text = " ".join(arguments)
    recipe = "sft" if "sft_chat" in text else (re.findall(r"recipe=(\w+)", text) or ["train"])[0]
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "trainer.max_steps":
            yield f"{key}={steps[value]}"
        elif key == "warm_start.steps":
            yield f"{key}={min(int(value), 1)}"
        elif key == "task.eval_problems":
            yield f"{key}={min(int(value), 2)}"
        elif key == "callbacks.checkpoint_interval":
            yield f"{key}=1"
        else:
            yield re.sub(r"step-(\d+)", lambda found: f"step-{steps[found[1]]}", argument)
    if recipe == "plan" and "batch." not in text:
        yield "batch.samples_per_step=16"
    if recipe not in ("train", "sft", "rollout", "score") or "--help" in arguments:
        return
    own = recipe == "sft" or "task.eval_problems=0" in text
    yield from (one for one in SINGLE if not (own and one.startswith("task")))
    yield "batch.samples_per_step=16"
    if "rollouts=files" not in text and recipe != "sft":
        yield from GENERATING
    if recipe in ("train", "rollout") and "+experiment=" in text and "warm_start.steps" not in text:
        yield "warm_start.steps=1"
    if "warm_start" not in text or "warm_start.steps=0" not in text:
        yield "warm_start.samples_per_step=4"
    if "trainer.max_steps" not in text and recipe in ("train", "sft"):
        yield "trainer.max_steps=1"


def searched(session: Path) -> list[str]:
    """The user's own conf/, where a page writes one."""
    return [f"--config-dir={session / 'conf'}"] if (session / "conf").is_dir() else []


def check_install(arguments: Sequence[str], *, line: str) -> None:
    assert arguments[0] == "install", line
    for extra in re.findall(r"\.\[([\w,]+)\]", line):
        assert set(extra.split(",")) <= set(EXTRAS), line
    if "-c" in arguments:
        assert (ROOT / arguments[arguments.index("-c") + 1]).is_file(), line
