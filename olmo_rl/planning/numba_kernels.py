"""Numba kernels of planning, compiled on first use and cached on disk. Without numba they run as Python.

Owns no rules: every kernel has a NumPy counterpart that tests compare it with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

try:
    import numba

    HAVE_NUMBA = True
except ImportError:
    HAVE_NUMBA = False
if HAVE_NUMBA:
    from olmo_rl.planning.kernel_cache import KernelCache

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """`function` compiled by numba and cached beside its source; itself where numba is missing."""
    return _compiled(function)


def in_place(function: F) -> F:
    """A kernel that only writes into its arguments: it allocates nothing and returns no array.

    It is compiled without reference counts, which cost several times the arithmetic of an inner loop that
    reads arrays from a NamedTuple.
    """
    return _compiled(function, _nrt=False)


def inlined(function: F) -> F:
    """An `in_place` kernel that is copied into the kernels that call it."""
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: F, **options: Any) -> F:
    if not HAVE_NUMBA:
        return function
    compiled: Any = numba.njit(nogil=True, **options)(function)
    compiled._cache = KernelCache(function)
    return cast(F, compiled)


def compile_for(compiled: Callable[..., Any], *arguments: Any) -> None:
    """Compile a kernel for the types of these `arguments`, or load it from the cache; nothing is run.

    Without numba there is nothing to compile.
    """
    if HAVE_NUMBA:
        dispatcher: Any = compiled
        dispatcher.compile(tuple(numba.typeof(argument) for argument in arguments))


@kernel
def count_kernel(
    routes: NDArray[np.unsignedinteger], thresholds: NDArray[np.unsignedinteger], layer_stride: int
) -> NDArray[np.int64]:
    """`loads.count_numpy` on C-ordered unsigned routes [rows, L, K] under contiguous ownership.

    `thresholds` [E]: first expert id past each rank, the last one num_experts, in the narrowest type that
    holds it. Returns loads int64 [E + 1, L']; its last row counts the ids out of range. Comparing whole
    lines with thresholds needs no look-up per id, so the compiler turns it into vector instructions.
    """
    rows, layers, top_k = routes.shape
    width, ranks = layers * top_k, len(thresholds)
    kept = (layers + layer_stride - 1) // layer_stride
    flat = routes.reshape((rows, width))
    line = np.zeros(width, dtype=thresholds.dtype)
    block = np.zeros((ranks, width), dtype=np.uint8)
    above = np.zeros((ranks, width), dtype=np.int64)
    for first in range(0, rows, 255):  # a byte counts at most 255 rows
        block[:] = 0
        for row in range(first, min(rows, first + 255)):
            source = flat[row]
            for p in range(width):
                line[p] = min(source[p], thresholds[ranks - 1])
            for rank in range(ranks):
                limit, counts = thresholds[rank], block[rank]
                for p in range(width):
                    counts[p] += np.uint8(line[p] >= limit)
        above += block
    loads = np.zeros((ranks + 1, kept), dtype=np.int64)
    for j in range(kept):
        start = j * layer_stride * top_k
        below = rows * top_k
        for rank in range(ranks):
            reached = above[rank, start : start + top_k].sum()
            loads[rank, j] = below - reached
            below = reached
    # Ids of layers that the stride leaves out are checked too.
    loads[ranks, 0] = above[ranks - 1].sum()
    return loads


@kernel
def slot_kernel(
    routes: NDArray[np.unsignedinteger],
    hashes: NDArray[np.uint16],
    limits: NDArray[np.int32],
    slots: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """`lending.count_numpy`: add the assignments of C-ordered unsigned routes [rows, L, K] to `counts` [L, S]
    by slot, and return how many ids are out of range.

    `hashes` [rows]; `limits` [L, X, H] and `slots` [L, X, H + 1] are those of `lending.SlotTable`.
    """
    rows, layers, top_k = routes.shape
    experts, hosts = limits.shape[1], limits.shape[2]
    bad = 0
    for row in range(rows):
        value = np.int32(hashes[row])
        for layer in range(layers):
            for k in range(top_k):
                expert = np.int64(routes[row, layer, k])
                if expert < 0 or expert >= experts:
                    bad += 1
                    continue
                host = 0
                while host < hosts and value >= limits[layer, expert, host]:
                    host += 1
                counts[layer, slots[layer, expert, host]] += 1
    return bad
