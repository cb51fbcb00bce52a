"""The shape of the source, read from its syntax: who imports whom, how long files are, what they say."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "olmo_rl"

FLOORS = {
    "olmo_rl.types": 0,
    "olmo_rl.keys": 0,
    "olmo_rl.config": 0,
    "olmo_rl.backends": 0,
    "olmo_rl.mixers": 0,
    "olmo_rl.user_code": 0,
    "olmo_rl.progress": 0,
    "olmo_rl.hf.weight_files": 2,
    "olmo_rl.hf.writing": 2,
    "olmo_rl.hf": 0,
    "olmo_rl.refusals": 0,
    "olmo_rl.run_directory": 0,
    "olmo_rl.run_lease": 0,
    "olmo_rl.replaced_runs": 0,
    "olmo_rl.chosen_checkpoint": 0,
    "olmo_rl.numbered_runs": 0,
    "olmo_rl.planning": 1,
    "olmo_rl.checks": 0,
    "olmo_rl.complete_files": 0,
    "olmo_rl.full_disks": 0,
    "olmo_rl.requeued_runs": 0,
    "olmo_rl.data": 1,
    "olmo_rl.environments": 1,
    "olmo_rl.report": 1,
    "olmo_rl.tasks": 1,
    "olmo_rl.policy": 2,
    "olmo_rl.rollouts": 2,
    "olmo_rl.training": 3,
    "olmo_rl.collections": 4,
    "olmo_rl.running": 5,
    "olmo_rl.manual": 6,
    "olmo_rl.reference": 6,
    "olmo_rl.overrides": 6,
    "olmo_rl.cli": 6,
    "olmo_rl.numbered_sweeps": 6,
    "olmo_rl.library": 6,
}
TORCH_FREE = (
    "olmo_rl.types",
    "olmo_rl.keys",
    "olmo_rl.config",
    "olmo_rl.backends",
    "olmo_rl.mixers",
    "olmo_rl.user_code",
    "olmo_rl.hf",
    "olmo_rl.refusals",
    "olmo_rl.run_directory",
    "olmo_rl.run_lease",
    "olmo_rl.replaced_runs",
    "olmo_rl.chosen_checkpoint",
    "olmo_rl.numbered_runs",
    "olmo_rl.progress",
    "olmo_rl.running.heartbeat",
    "olmo_rl.running.launchers",
    "olmo_rl.planning",
    "olmo_rl.data",
    "olmo_rl.environments",
    "olmo_rl.tasks",
    "olmo_rl.complete_files",
    "olmo_rl.full_disks",
    "olmo_rl.requeued_runs",
    "olmo_rl.report",
    "olmo_rl.manual",
    "olmo_rl.reference",
    "olmo_rl.overrides",
    "olmo_rl.cli",
    "olmo_rl.library",
    "olmo_rl.running.launchers",
)
WITH_TORCH = {  # the tensors of floor 1; files and weights of Hugging Face directories
    "olmo_rl.data.packs",
    "olmo_rl.data.loans",
    "olmo_rl.data.collate",
    "olmo_rl.hf.weight_files",
    "olmo_rl.hf.writing",
}
# What the library loads by name in the environment process; extra `environments` installs it.
IN_THE_LIBRARY = {"olmo_rl.environments.plain", "olmo_rl.environments.chat_loop"}
USES_TORCH = {"torch", "lightning", "torchtitan", "fla", "triton", "safetensors.torch"}
MAX_LINES = 400
# A table: every key with its description, read by section.
LONGER = {"olmo_rl/config.py": 1510}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SOURCES = sorted(
    path
    for folder in ("olmo_rl", "hydra_plugins", "recipes", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if path.stat().st_size
)


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, in functions and for type checkers too.

    `from a import b` gives `a.b`: b may be a module.
    """
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def floor_of(name: str) -> int | None:
    return next((floor for package, floor in FLOORS.items() if within(name, package)), None)


def test_every_module_stands_on_a_floor() -> None:
    assert [name for name in MODULES if name != "olmo_rl" and floor_of(name) is None] == []


def test_lower_floors_never_import_higher_ones() -> None:
    upward = [
        f"{name} (floor {floor_of(name)}) imports {imported} (floor {above})"
        for name, path in MODULES.items()
        if name != "olmo_rl"  # it imports the functions of the library when they are used
        for imported in imports(path)
        if (above := floor_of(imported)) is not None and above > (floor_of(name) or 0)
    ]
    assert upward == []


def importers_of(package: str) -> set[str]:
    return {name for name, path in MODULES.items() if any(within(i, package) for i in imports(path))}


def test_recipes_are_named_in_one_table_and_nothing_imports_benchmarks() -> None:
    assert importers_of("recipes") == set()
    assert importers_of("benchmarks") == set()
    shipped = [path for path in SOURCES if path.is_relative_to(ROOT / "recipes")]
    assert [path for path in shipped if any(within(i, "benchmarks") for i in imports(path))] == []


def test_planning_files_and_configuration_import_nothing_that_needs_torch() -> None:
    torch_free = [n for n in MODULES if any(within(n, p) for p in TORCH_FREE) and n not in WITH_TORCH]
    assert len(torch_free) > len(TORCH_FREE)
    needing = [
        f"{name} imports {imported}"
        for name in torch_free
        for imported in imports(MODULES[name])
        if any(within(imported, package) for package in USES_TORCH)
    ]
    assert needing == []
    # Whatever they import in turn: a login node has no torch.
    torch_free = [name for name in torch_free if name not in IN_THE_LIBRARY]
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in ("torch", "lightning", "torchtitan"))
    code = f"import importlib, sys; {blocked}\nfor name in {torch_free!r}: importlib.import_module(name)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_only_titan_imports_torchtitan() -> None:
    assert importers_of("torchtitan") == {"olmo_rl.policy.titan"}


def test_private_members_of_lightnings_trainer_are_used_in_one_file() -> None:
    trainers = ("trainer", "self.trainer", "cast(Any, trainer)", "cast(Any, self.trainer)")
    users = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if ast.unparse(node.value) in trainers
    }
    assert users == {"olmo_rl.training.lightning_internals"}


def test_mixers_and_loss_run_without_lightning_hydra_and_torchtitan() -> None:
    for module in ("attention", "kda", "loss", "logprobs"):
        name = f"olmo_rl.policy.{module}"
        heavy = ("lightning", "hydra", "omegaconf", "torchtitan", "olmo_rl.policy.titan")
        found = [i for i in imports(MODULES[name]) if any(within(i, package) for package in heavy)]
        assert found == [], name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_is_for_and_is_short_enough_to_read(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "a file opens with a docstring"
    assert path.is_relative_to(ROOT / "tests") or len(text.splitlines()) <= LONGER.get(
        str(path.relative_to(ROOT)), MAX_LINES
    )


def test_configuration_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "conf").rglob("*.yaml")}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 20} == {}


def test_the_wheel_ships_every_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {module_name(path) for path in PACKAGE.rglob("__init__.py")}
    assert set(packages) == folders | {"olmo_rl.conf", "hydra_plugins.olmo_rl_slurm", "recipes"}
    assert (ROOT / "conf" / "__init__.py").exists()
