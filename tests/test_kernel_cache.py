"""Kernels that other processes, or other sources, left in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_rl.planning import kernel_cache, kernels
from olmo_rl.planning.kernels import HAVE_NUMBA

pytestmark = pytest.mark.skipif(not HAVE_NUMBA, reason="needs numba")

COUNT = """
import sys
import numpy as np
from olmo_rl.planning.kernels import count_kernel
for bits in sys.argv[1:]:
    routes = np.array([[[0, 3]], [[1, 2]], [[0, 1]]], f"uint{bits}")
    print(count_kernel(routes, np.array([2, 4], np.uint8), 1).ravel().tolist())
print(sum(count_kernel.stats.cache_hits.values()))
"""


def count(cache: Path, *bits: str) -> list[str]:
    """Loads of three rows on two ranks in a new process, for each width of ids; then the cache hits."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COUNT, *bits]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_entry_that_holds_the_code_for_other_types_is_compiled_anew(tmp_path: Path) -> None:
    right = "[4, 2, 0]"
    assert count(tmp_path, "16", "32") == [right, right, "0"]
    assert count(tmp_path, "16", "32") == [right, right, "2"]
    first, second = sorted(tmp_path.rglob("kernels.count_kernel*.nbc"))
    second.write_bytes(first.read_bytes())  # as two processes leave it that took the same file
    assert count(tmp_path, "16", "32") == [right, right, "1"]
    assert count(tmp_path, "16", "32") == [right, right, "2"]


def test_an_entry_compiled_from_other_sources_of_the_package_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes, thresholds = np.zeros((1, 1, 1), np.uint8), np.array([1], np.uint8)
    kernels.count_kernel(routes, thresholds, 1)
    kernel = kernels.count_kernel
    (types, *_) = kernel.overloads
    assert kernel_cache.KernelCache(kernel.py_func).load_overload(types, kernel.targetctx) is not None
    monkeypatch.setattr(kernel_cache, "SOURCES", "others")
    assert kernel_cache.KernelCache(kernel.py_func).load_overload(types, kernel.targetctx) is None


def test_the_digest_is_that_of_every_source_of_the_package() -> None:
    names = [path.name for path in Path(kernel_cache.__file__).parent.glob("*.py")]
    assert {"kernels.py", "moves.py", "cells.py", "order.py", "repack.py"} <= set(names)
    assert kernel_cache.sources() == kernel_cache.SOURCES
