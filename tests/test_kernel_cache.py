"""Kernels that other processes, or other sources, left in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from olmo_rl.planning import kernel_cache

COUNT = """
import sys
import numpy as np
from olmo_rl.planning.numba_kernels import count_kernel
for bits in sys.argv[1:]:
    routes = np.array([[[0, 3]], [[1, 2]], [[0, 1]]], f"uint{bits}")
    print(count_kernel(routes, np.array([2, 4], np.uint8), 1).ravel().tolist())
print(sum(count_kernel.stats.cache_hits.values()))
"""


def count(cache: Path, *bits: str, before: str = "") -> list[str]:
    """Loads of three rows on two ranks in a new process, for each width of ids; then the cache hits."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", f"{before}\n{COUNT}", *bits]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_entry_that_holds_the_code_for_other_types_is_compiled_anew(tmp_path: Path) -> None:
    right = "[4, 2, 0]"
    assert count(tmp_path, "16", "32") == [right, right, "0"]
    assert count(tmp_path, "16", "32") == [right, right, "2"]
    first, second = sorted(tmp_path.rglob("numba_kernels.count_kernel*.nbc"))
    second.write_bytes(first.read_bytes())  # as two processes leave it that took the same file
    assert count(tmp_path, "16", "32") == [right, right, "1"]
    assert count(tmp_path, "16", "32") == [right, right, "2"]


def test_an_entry_compiled_from_other_sources_of_the_package_is_compiled_anew(tmp_path: Path) -> None:
    right = "[4, 2, 0]"
    others = "from olmo_rl.planning import kernel_cache; kernel_cache.SOURCES = 'others'"
    assert count(tmp_path, "16") == [right, "0"]
    assert count(tmp_path, "16") == [right, "1"]
    assert count(tmp_path, "16", before=others) == [right, "0"]
    assert count(tmp_path, "16") == [right, "0"]


def test_a_cut_file_of_the_cache_is_written_again(tmp_path: Path) -> None:
    """Pickle raised in every later run."""
    right = "[4, 2, 0]"
    assert count(tmp_path, "16") == [right, "0"]
    for suffix, share in (("nbc", 0.0), ("nbc", 0.5), ("nbi", 0.5)):
        (file,) = tmp_path.rglob(f"numba_kernels.count_kernel*.{suffix}")
        data = file.read_bytes()
        file.write_bytes(data[: int(share * len(data))])
        assert count(tmp_path, "16") == [right, "0"], (suffix, share)
    assert count(tmp_path, "16") == [right, "1"]


def test_a_full_disk_under_the_cache_is_warned_of_and_ends_nothing(tmp_path: Path) -> None:
    full = """
import errno, os
from numba.core import caching
def fails(*_): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
caching.IndexDataCacheFile.save = fails
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("default", message=".*a compiled kernel cannot be kept, No space left on device")
"""
    assert count(tmp_path, "16", before=full) == ["[4, 2, 0]", "0"]


def test_every_source_of_the_package_counts(tmp_path: Path) -> None:
    package = tmp_path / "planning"
    shutil.copytree(Path(kernel_cache.__file__).parent, package)
    assert kernel_cache.digest(package) == kernel_cache.SOURCES
    for name in ("numba_kernels.py", "searches/annealing_kernels.py"):
        text = (package / name).read_text()
        (package / name).write_text(text + "# changed\n")
        assert kernel_cache.digest(package) != kernel_cache.SOURCES, name
        (package / name).write_text(text)
