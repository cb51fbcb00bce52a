"""Routes to destination loads: how many assignments of each sample go to each expert-parallel rank, by layer.

Owns the synthetic route rows (tails of documents, placeholders for pads without a route to repeat) and the
counting. Refuses routes that are missing, of another shape, or hold an id outside the expert table, naming
sample, layer and row.

Shapes: N samples, T tokens of one of them, L routed layers, K experts per token, E expert-parallel ranks.
Loads are int32 [N, E, L]: the layer axis is innermost because the objective reads it so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from olmo_rl.types import ExpertLayout, Refusal, Sample, Topology

_GOLDEN = 0x9E3779B97F4A7C15


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: nearby inputs give unrelated 64-bit outputs, the same on every machine."""
    x = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stable_hash(text: str) -> int:
    """64 bits of `text`, equal in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _check_layout(layout: ExpertLayout, topology: Topology) -> int:
    """Experts per rank, once top_k is known to fit."""
    if not 1 <= layout.top_k <= layout.num_experts:
        raise Refusal(f"top_k={layout.top_k} must lie between 1 and num_experts={layout.num_experts}")
    return topology.experts_per_rank(layout.num_experts)


def _tails(ids: Sequence[str], layout: ExpertLayout, topology: Topology) -> NDArray[np.int64]:
    """int64 [N, L, K]: `tail_routes` of many samples."""
    per_rank = _check_layout(layout, topology)
    seeds = np.array([stable_hash(i) for i in ids], dtype=np.uint64)
    layers = np.array(layout.routed_layers, dtype=np.uint64)
    mixed = mix(seeds[:, None] + (layers[None, :] + np.uint64(1)) * np.uint64(_GOLDEN))
    # One draw over all experts picks the first rank and the first slot within a rank, so both are uniform.
    start = (mixed % np.uint64(layout.num_experts)).astype(np.int64)[:, :, None]
    k = np.arange(layout.top_k, dtype=np.int64)
    rank = (start // per_rank + k) % topology.ep_degree
    slot = (start % per_rank + k // topology.ep_degree) % per_rank
    return rank * per_rank + slot


def tail_routes(sample_id: str, *, layout: ExpertLayout, topology: Topology) -> NDArray[np.int64]:
    """int64 [L, K]: the synthetic row of the last token, which no engine records.

    The ids of a row are distinct and consecutive k go to different EP ranks until all have been visited. A
    row depends on (sample id, global layer id) alone, so that per-sample loads add up to the loads of any
    pack.
    """
    return _tails([sample_id], layout, topology)[0]


def placeholder_routes(rows: int, *, layout: ExpertLayout, topology: Topology) -> NDArray[np.int64]:
    """int64 [rows, L, K]: routes of pads that have none to repeat.

    One cycle over all experts, alternating ranks, is dealt out row after row and goes on from layer to
    layer: ids of a row are distinct, and within a layer no expert (and no rank) gets more than one
    assignment above another.
    """
    per_rank = _check_layout(layout, topology)
    layers = len(layout.routed_layers)
    dealt = np.arange(layers * rows * layout.top_k, dtype=np.int64).reshape(layers, rows, layout.top_k)
    dealt %= layout.num_experts
    experts = dealt % topology.ep_degree * per_rank + dealt // topology.ep_degree
    return np.ascontiguousarray(experts.transpose(1, 0, 2))


def check_stride(layer_stride: int) -> int:
    """`layer_stride`, once it is known to be an integer of at least 1."""
    if isinstance(layer_stride, bool) or not isinstance(layer_stride, int) or layer_stride < 1:
        raise Refusal(f"balance.layer_stride={layer_stride!r} must be an integer of at least 1")
    return layer_stride


def check_routes(sample: Sample, *, layout: ExpertLayout) -> NDArray[np.integer]:
    """The routes of `sample` [T-1, L, K], once they are known to be there, of that shape and integers."""
    routes = sample.routes
    if routes is None:
        raise Refusal(
            f"sample {sample.id}: no routes, expert loads are unknown: record routes or set balance=none"
        )
    expected = (len(sample) - 1, len(layout.routed_layers), layout.top_k)
    if routes.shape != expected:
        raise Refusal(
            f"sample {sample.id}: routes have shape {routes.shape}, expected {expected} (rows, layers, top_k)"
        )
    if routes.dtype.kind not in "iu":
        raise Refusal(f"sample {sample.id}: routes are {routes.dtype}, expected integers")
    return routes


def refuse_id(sample: Sample, routes: NDArray[np.integer], index: int, *, layout: ExpertLayout) -> NoReturn:
    """Refuse the expert id at flat `index` of `routes`, naming sample, row and layer."""
    row, layer, k = (int(x) for x in np.unravel_index(index, routes.shape))
    raise Refusal(
        f"sample {sample.id}: expert id {int(routes[row, layer, k])} in row {row}, layer "
        f"{layout.routed_layers[layer]} is outside 0..{layout.num_experts - 1}"
    )


def count_numpy(
    routes: NDArray[np.integer], *, table: NDArray[np.int64], ep_degree: int, layer_stride: int
) -> tuple[NDArray[np.int64], int]:
    """Loads int64 [E, L'] of `routes` [rows, L, K] and the flat index of the first id out of range, or -1.

    `table` int64 [num_experts] gives the EP rank of each expert. The counting without numba, and its oracle.
    """
    kept = routes[:, ::layer_stride]
    layers = kept.shape[1]
    bad = (routes < 0) | (routes >= len(table))
    if bad.any():
        return np.zeros((ep_degree, layers), dtype=np.int64), int(np.argmax(bad))
    cells = table[kept] * layers + np.arange(layers)[None, :, None]
    counts = np.bincount(cells.ravel(), minlength=ep_degree * layers)
    return counts.reshape(ep_degree, layers), -1


def compile_counting(layout: ExpertLayout, *, topology: Topology) -> None:
    """Compile `count_compiled` for experts of `layout` and every width of ids, or load it from the cache."""
    from olmo_rl.planning.numba_kernels import compile_for, count_kernel

    limits = _limits(topology.destinations(layout.num_experts), ep_degree=topology.ep_degree)
    for width in (np.uint8, np.uint16, np.uint32, np.uint64):
        compile_for(count_kernel, np.zeros((1, 1, 1), dtype=width), limits, 1)


def _limits(table: NDArray[np.int64], *, ep_degree: int) -> NDArray[np.unsignedinteger]:
    """[E]: the first expert id past each rank, in the narrowest unsigned type that holds them all."""
    limits = np.searchsorted(table, np.arange(1, ep_degree + 1))
    return limits.astype(np.min_scalar_type(len(table)))


def count_compiled(
    routes: NDArray[np.integer], *, table: NDArray[np.int64], ep_degree: int, layer_stride: int
) -> tuple[NDArray[np.int64], int]:
    """`count_numpy` by the kernel: one pass that counts and checks the range."""
    # numba takes half a second to import: length-only plans and users of tail_routes do without it.
    from olmo_rl.planning.numba_kernels import HAVE_NUMBA, count_kernel

    if not HAVE_NUMBA or not routes.size:
        return count_numpy(routes, table=table, ep_degree=ep_degree, layer_stride=layer_stride)
    limits = _limits(table, ep_degree=ep_degree)
    # Read as unsigned, a negative id is a huge one, and so out of range.
    unsigned = np.ascontiguousarray(routes).view(f"u{routes.dtype.itemsize}")
    loads = count_kernel(unsigned, limits, layer_stride)
    if loads[-1].any():
        return count_numpy(routes, table=table, ep_degree=ep_degree, layer_stride=layer_stride)
    return loads[:-1], -1


def _count(
    sample: Sample, *, layout: ExpertLayout, table: NDArray[np.int64], ep_degree: int, layer_stride: int
) -> NDArray[np.int64]:
    """int64 [E, L']: loads of the recorded rows of one sample, the tail not included."""
    routes = check_routes(sample, layout=layout)
    loads, bad = count_compiled(routes, table=table, ep_degree=ep_degree, layer_stride=layer_stride)
    if bad >= 0:
        refuse_id(sample, routes, bad, layout=layout)
    return loads


def collection_loads(
    samples: Sequence[Sample], *, layout: ExpertLayout, topology: Topology, layer_stride: int = 1
) -> NDArray[np.int32]:
    """int32 [N, E, L']: assignments of every sample to every EP rank, in every `layer_stride`-th routed
    layer.

    Tail rows are included: a sample of T tokens has T x K assignments in each layer. Refuses missing routes,
    another shape and ids out of range.
    """
    check_stride(layer_stride)
    _check_layout(layout, topology)
    table = topology.destinations(layout.num_experts)
    ep_degree = topology.ep_degree
    layers = len(range(0, len(layout.routed_layers), layer_stride))
    loads = np.zeros((len(samples), ep_degree, layers), dtype=np.int32)
    for i, sample in enumerate(samples):
        loads[i] = _count(sample, layout=layout, table=table, ep_degree=ep_degree, layer_stride=layer_stride)
    owners = table[_tails([s.id for s in samples], layout, topology)[:, ::layer_stride]]
    for rank in range(ep_degree):
        loads[:, rank] += (owners == rank).sum(axis=2, dtype=np.int32)
    return loads


def sample_loads(
    sample: Sample, *, layout: ExpertLayout, topology: Topology, layer_stride: int = 1
) -> NDArray[np.int32]:
    """int32 [E, L']: `collection_loads` of one sample, for counting as samples arrive."""
    return collection_loads([sample], layout=layout, topology=topology, layer_stride=layer_stride)[0]
