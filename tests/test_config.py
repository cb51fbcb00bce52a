"""The configuration: conf/, the schema and what people type."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path

import pytest
from composing import CONF, GROUPS, ROOT, compose, compose_fast, header_commands
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from olmo_rl import config as schema
from olmo_rl.cli import Jobs, attempt
from olmo_rl.config import (
    RECIPES,
    Config,
    PackingConfig,
    PackingKind,
    Recipe,
    RolloutsConfig,
    Source,
    StrategyConfig,
)
from olmo_rl.keys import Choice
from olmo_rl.manual import EXIT_CODES, WIDTH, manual
from olmo_rl.overrides import SET_BY_USERS, explain_typos, keep_text
from olmo_rl.reference import pages
from olmo_rl.refusals import WRITTEN
from olmo_rl.types import Refusal

CHOICES = [(group, choice) for group, choices in GROUPS.items() for choice in choices]


def test_every_yaml_file_has_at_most_twenty_lines_and_says_what_it_is() -> None:
    for path in CONF.rglob("*.yaml"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 20, path
        assert path.name.startswith("consecutive_") or lines[0].startswith("#"), path


def test_every_key_and_recipe_has_a_documentation_of_one_line() -> None:
    for key in SET_BY_USERS.values():
        assert 3 <= len(key.doc) <= 90, key.name
        assert "\n" not in key.doc
    assert list(RECIPES) == list(Recipe)
    assert all(entry.doc for entry in RECIPES.values())


def test_names_of_enumerations_are_spelt_as_they_are_typed() -> None:
    kinds = [kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, Enum)]
    assert len(kinds) > 20
    for kind in kinds:
        assert all(member.name == member.value for member in kind)
        assert kind in (Recipe, Choice) or all(isinstance(member.doc, str) for member in kind)


def test_every_recipe_names_a_function_that_exists() -> None:
    for entry in RECIPES.values():
        module, _, function = entry.entry.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_every_choice_of_every_group_composes_into_the_one_schema() -> None:
    groups = {
        name: choices for name, choices in GROUPS.items() if name not in ("experiment", "sweep", "debug")
    }
    for turn in range(max(map(len, groups.values()))):
        chosen = {name: choices[turn % len(choices)] for name, choices in groups.items()}
        config = compose(*(f"{name}={choice}" for name, choice in chosen.items()))
        assert isinstance(config, Config)


def test_a_group_file_states_differences_from_the_schema_only() -> None:
    default = OmegaConf.structured(Config())
    for group, choice in CHOICES:
        if group in default:
            stated = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{choice}.yaml"))
            assert isinstance(stated, dict)
            named = set(stated) - {"kind", "source", "accelerator"}
            assert [key for key in named if stated[key] == default[group][key]] == []


@pytest.mark.parametrize(("name", "command"), header_commands().items())
def test_the_header_of_every_experiment_sweep_and_debug_file_is_its_command(name: str, command: str) -> None:
    program, script, *overrides = command.split()
    assert (program, script) == ("python", "train.py")
    assert f"+{name.replace('/', '=')}" in overrides
    assert isinstance(compose(*overrides), Config)


def test_files_as_source_leave_nothing_of_the_local_engine_behind() -> None:
    for experiment in GROUPS["experiment"]:
        config = compose(f"+experiment={experiment}", "rollouts=files", "rollouts.path=somewhere")
        assert config.rollouts == RolloutsConfig(source=Source.files, path="somewhere")


def test_every_experiment_saves_every_fifteen_minutes() -> None:
    for experiment in GROUPS["experiment"]:
        assert compose(f"+experiment={experiment}").callbacks.checkpoint_minutes == 15


def test_another_choice_of_a_group_leaves_nothing_of_the_experiments_choice_behind() -> None:
    config = compose("+experiment=packed_moe", "packing=none", "strategy=single", "trainer=cpu")
    assert config.packing == PackingConfig(kind=PackingKind.none)
    assert config.strategy == StrategyConfig()
    assert config.world_size == 1


def test_unpacked_moe_is_packed_moe_without_packing() -> None:
    packed, unpacked = (asdict(compose(f"+experiment={name}_moe")) for name in ("packed", "unpacked"))
    differing = {key for key in packed if packed[key] != unpacked[key]}
    assert differing == {"run_name", "packing", "policy"}
    assert unpacked["packing"] == asdict(PackingConfig(kind=PackingKind.none))
    changed = {key for key in packed["policy"] if packed["policy"][key] != unpacked["policy"][key]}
    assert changed == {"attention"}


def test_packed_moe_has_each_mixer_a_latent_and_a_shared_expert_and_both_kinds_of_layer() -> None:
    model = compose("+experiment=packed_moe").model
    assert {layer.name for layer in model.layer_types} == {kind.name for kind in schema.LayerType}
    assert 0 < len(model.routed_layers) < len(model.layer_types)
    assert model.latent_dim is not None
    assert 0 < model.latent_dim < model.dim
    assert model.shared_hidden > 0


@pytest.mark.parametrize(
    "override", ["packing.max_tokens=6k", "trainer.devices=2.5", "optim.lr=fast", "recipe=tran"]
)
def test_a_value_of_another_type_is_refused(override: str) -> None:
    with pytest.raises(OmegaConfBaseException):
        compose_fast(override)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("010", "010"),
        ("1E5", "1E5"),
        ("1e-5", "1e-5"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("true", "true"),
        ("No", "No"),
        ("nan", "nan"),
        ("'quoted 1'", "quoted 1"),
        ("/a/b=c", "/a/b=c"),
        ("'/a/b=c'", "/a/b=c"),
        ("/a (1)/it's", "/a (1)/it's"),
        ("a#b", "a#b"),
        ("plain", "plain"),
    ],
)
def test_a_text_stays_what_was_typed(typed: str, read: str) -> None:
    config = compose_fast(f"run_name={typed}", f"++rollouts.path={typed}")
    assert (config.run_name, config.rollouts.path) == (read, read)


def test_null_stays_null_and_numbers_stay_numbers() -> None:
    config = compose_fast(
        "ckpt_path=null", "optim.lr=1e-5", "packing.max_tokens=010", "packing.pad_to_budget=yes"
    )
    assert config.ckpt_path is None
    assert config.optim.lr == 1e-5
    assert config.packing.max_tokens == 10
    assert config.packing.pad_to_budget is True


def test_a_float_in_yaml_is_a_float() -> None:
    assert compose("loss=gspo").loss.clip_low == 3e-4


def test_sweeps_over_texts_are_split_and_each_kept() -> None:
    assert keep_text(["run_name=010,a,1E5"]) == ["run_name=010,a,'1E5'"]
    assert keep_text(["run_name=choice(a,b)", "run_name=${seed}"]) == [
        "run_name=choice(a,b)",
        "run_name=${seed}",
    ]
    assert keep_text(["trainer.max_steps=010", "--cfg", "job"]) == ["trainer.max_steps=010", "--cfg", "job"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("packing.max_tokns=10", "packing.max_tokens"),
        ("+packing.max_tokns=10", "packing.max_tokens"),
        ("max_steps=3", "trainer.max_steps"),
        ("lr=1e-3", "optim.lr or warm_start.lr"),
        ("packing=consecutiv", "consecutive"),
        ("+experiment=paked_moe", "packed_moe"),
        ("rolouts=files", "rollouts"),
        ("zzzz=1", "--help"),
        ("balance.level=order", "leave it out"),
        ("balance=greedy", "balance=anneal balance.proposals=0"),
    ],
)
def test_a_typo_is_told_with_the_nearest_key_or_choice(override: str, words: str) -> None:
    (line,) = explain_typos([override], groups=GROUPS)
    assert override.lstrip("+").split("=")[0] in line
    assert words in line


def test_what_is_no_typo_is_not_called_one() -> None:
    rights = [
        "+experiment=packed_moe",
        "packing=none,consecutive",
        "task.parameters.digits=3",
        "seed=1",
    ]
    rights += ["hydra.job.num=1", "hydra/launcher=basic", "model.layer_types=[full_attention]"]
    assert explain_typos(rights, groups=GROUPS) == []


def test_the_manual_names_every_recipe_choice_and_key_at_a_hundred_columns() -> None:
    text = manual(GROUPS)
    assert max(map(len, text.splitlines())) <= WIDTH
    words = text.split()
    assert all(recipe.value in words for recipe in Recipe)
    assert all(choice in words for _, choice in CHOICES)
    for name in SET_BY_USERS:
        assert f"  {name}=" in text


def test_the_reference_has_a_row_for_every_key_rule_recipe_choice_and_exit_code(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "olmo_rl.reference", "--output", str(tmp_path)], check=True, cwd=ROOT
    )
    text = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert text == pages()
    for name in SET_BY_USERS:
        assert f"\n| `{name}` |" in text["configuration.md"]
    assert all(f"| {rule.refuses} | {rule.fix} |" in text["refusals.md"] for rule in WRITTEN)
    words = [f"`recipe={recipe.value}`" for recipe in Recipe] + [f"`{code}`" for code in EXIT_CODES]
    assert all(word in text["command_line.md"] for word in words)
    assert all(f"`{choice}`" in text["command_line.md"] for _, choice in CHOICES)
    (row,) = [line for line in text["configuration.md"].splitlines() if line.startswith("| `serve.port` |")]
    assert row == (
        "| `serve.port` | integer | `8000` | 0 = any free one, which is printed | in [0, 65535] | "
        "no effect without recipe=serve |"
    )


def test_the_topology_of_a_plan_may_be_another_machines() -> None:
    given = ("trainer.devices=2", "strategy.ep_degree=2", "plan.world_size=16", "plan.ep_degree=8")
    config = compose_fast("recipe=plan", *given)
    assert (config.world_size, config.ep_degree) == (16, 8)
    config = compose_fast("recipe=train", *given)
    assert (config.world_size, config.ep_degree) == (2, 2)


def test_nothing_heavy_is_imported_to_refuse_and_a_spawned_child_imports_nothing() -> None:
    script = f"""
import runpy, sys
sys.modules["torch"] = None
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__mp_main__")
assert "olmo_rl" not in sys.modules and "hydra" not in sys.modules
from olmo_rl.config import Config
from olmo_rl.refusals import refusals
assert refusals(Config()) == [], refusals(Config())
assert "hydra" not in sys.modules and "omegaconf" not in sys.modules
import olmo_rl.cli
assert "hydra" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_a_job_ends_with_the_code_of_its_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise Refusal(["a=1: no", "b=2: no"])

    def fail() -> None:
        raise ArithmeticError("broken")

    assert attempt(refuse, name="job 3: ") == 2
    assert capsys.readouterr().err == "job 3: refused, 2 reasons:\n  a=1: no\n  b=2: no\n"
    assert attempt(fail, name="") == 1
    assert "ArithmeticError: broken" in capsys.readouterr().err
    assert attempt(lambda: sys.exit(3), name="") == 3
    assert attempt(lambda: None, name="") == 0


@pytest.mark.parametrize("code", [75, 130])
def test_an_interruption_passes_through_and_so_ends_a_sweep(code: int) -> None:
    with pytest.raises(SystemExit) as end:
        attempt(lambda: sys.exit(code), name="")
    assert end.value.code == code


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 2, 2], 2), ([2, 1], 1), ([1], 1), ([3], 3), ([0, 3, 2], 1), ([], 0)]
)
def test_a_sweep_ends_with_two_only_where_every_failure_is_a_refusal(codes: list[int], code: int) -> None:
    assert Jobs(parent=os.getpid(), codes=codes).exit_code() == code
