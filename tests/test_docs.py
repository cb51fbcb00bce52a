"""README.md and docs/: the site builds, links lead somewhere, files that are named exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import BOUND_SECONDS
from documents import PAGES, ROOT

from olmo_rl.reference import pages

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:olmo_rl|recipes|benchmarks|conf|launch|tests|docs|examples)/[\w./-]+)`")
GENERATED = {ROOT / "docs" / "reference" / name for name in pages()}
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_to_files_and_files_named_in_code_exist(page: Path) -> None:
    text = page.read_text()
    targets = [target.partition("#")[0] for target in LINK.findall(text) if "://" not in target]
    linked = [(page.parent / target).resolve() for target in targets if target]
    missing = [str(path) for path in linked if path not in GENERATED and not path.exists()]
    missing += [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    assert missing == []


def test_the_architecture_describes_every_folder() -> None:
    text = (ROOT / "docs" / "explain" / "architecture.md").read_text()
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    folders = {
        path for path in ROOT.glob("[!.]*/") if path.name not in ignored and path.suffix != ".egg-info"
    }
    folders |= {path.parent for path in (ROOT / "olmo_rl").glob("*/*.py")}
    names = sorted(str(path.relative_to(ROOT)) for path in folders)
    assert [name for name in names if f"`{name}/`" not in text] == []


def test_the_readme_is_short_enough_to_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "build" / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    for name, text in pages().items():
        (tmp_path / "build" / "docs" / "reference" / name).write_text(text)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_SECONDS)
    assert built.returncode == 0, built.stdout + built.stderr
    html = list((tmp_path / "build" / "site").rglob("*.html"))
    assert len(html) > len(PAGE_NAMES) - 2
    loaded = re.compile(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^\s>]+")
    assert [found for page in html for found in loaded.findall(page.read_text())] == []
