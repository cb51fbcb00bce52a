"""The comparison of two trees: it measures the trees it was given, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pairs import Arm


def test_a_folder_without_the_library_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no olmo_rl"):
        Arm(tmp_path, work="generation", job={}, scratch=tmp_path / "arm")


def test_an_arm_imports_its_own_tree_and_reports_its_own_failure(tmp_path: Path) -> None:
    package = tmp_path / "tree" / "olmo_rl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "library.py").write_text("raise RuntimeError('the library of this tree')")
    with (
        Arm(package.parent, work="generation", job={}, scratch=tmp_path / "arm") as arm,
        pytest.raises(SystemExit, match="the library of this tree"),
    ):
        arm.seconds()
