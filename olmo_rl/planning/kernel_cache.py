"""Compiled kernels kept between runs: numba's cache on disk, with four of its faults corrected.

Numba takes a file for fresh by the time and size of the kernel's own source, though a kernel holds a copy of
every kernel that it calls. And two processes that compile one kernel for different types at the same moment
may both take the same file: the index then promises one's machine code under the other's types. Here an entry
counts if it was compiled from the sources of this package as they are, for the types that were asked for.
A file of the cache that was cut would end every later run, and a disk without space for it the present one:
here the first is written again, and the second is warned of.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile
from typing_extensions import override


def digest(package: Path) -> str:
    """A hash of the code in a package and below; times of files do not enter."""
    value = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        value.update(path.read_bytes())
    return value.hexdigest()


SOURCES = digest(Path(__file__).parent)


class KernelCache(FunctionCache):
    """State: files beside the sources, or where numba keeps them if it may not write there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            cache_path=self.cache_path, filename_base=self._impl.filename_base, source_stamp=SOURCES
        )

    @override
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel for these types, or None: it is compiled then, and its entry is replaced."""
        try:
            found = super().load_overload(sig, target_context)
        except (EOFError, pickle.UnpicklingError):
            self.flush()
            return None
        asked = tuple(getattr(sig, "args", sig))
        return found if found is not None and tuple(found.signature.args) == asked else None

    @override
    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel, where there is space."""
        try:
            super().save_overload(sig, data)
        except (EOFError, pickle.UnpicklingError):  # the index was cut meanwhile
            self.flush()
        except OSError as error:
            warnings.warn(
                f"{self.cache_path}: a compiled kernel cannot be kept, {error.strerror}: every run will "
                "compile it; free space there, or set NUMBA_CACHE_DIR",
                stacklevel=2,
            )
