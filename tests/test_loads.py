"""Synthetic routes and destination loads: counts by hand, the kernel against NumPy, every refusal."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from olmo_rl.planning.loads import (
    collection_loads,
    count_compiled,
    count_numpy,
    placeholder_routes,
    sample_loads,
    tail_routes,
)
from olmo_rl.planning.numba_kernels import HAVE_NUMBA
from olmo_rl.types import ExpertLayout, Refusal, Sample, Topology


def make_sample(name: str, tokens: int, routes: np.ndarray | None) -> Sample:
    return Sample(
        id=name,
        group="g",
        tokens=np.arange(tokens, dtype=np.int32),
        response_mask=np.ones(tokens, dtype=bool),
        behavior_logprobs=np.zeros(tokens, dtype=np.float32),
        reward=0.0,
        routes=routes,
    )


def distinct_routes(
    rng: np.random.Generator, rows: int, layout: ExpertLayout, dtype: str = "int16"
) -> np.ndarray:
    draws = rng.random((rows, len(layout.routed_layers), layout.num_experts))
    return draws.argsort(axis=-1)[..., : layout.top_k].astype(dtype)


def test_loads_of_a_sample_are_the_counts_of_its_rows_and_of_its_tail() -> None:
    layout = ExpertLayout(num_experts=4, top_k=2, routed_layers=(1, 3))
    topology = Topology(2, 2)
    routes = np.array([[[0, 1], [2, 3]], [[0, 2], [3, 1]]], dtype=np.uint8)  # 3 tokens, 2 rows
    loads = sample_loads(make_sample("a", 3, routes), layout=layout, topology=topology)
    # Recorded rows: layer 1 has experts 0 1 0 2 = ranks 0 0 0 1, layer 3 has 2 3 3 1 = ranks 1 1 1 0.
    # The tail (k=2 over two ranks) adds one assignment to either rank in every layer.
    assert loads.tolist() == [[3 + 1, 1 + 1], [1 + 1, 3 + 1]]
    assert loads.dtype == np.int32


def test_a_sample_of_one_token_has_only_its_tail() -> None:
    layout = ExpertLayout(num_experts=8, top_k=4, routed_layers=(0, 1, 2))
    sample = make_sample("a", 1, np.zeros((0, 3, 4), dtype=np.int32))
    assert sample_loads(sample, layout=layout, topology=Topology(2, 2)).tolist() == [[2, 2, 2], [2, 2, 2]]


def test_layer_stride_counts_only_the_sampled_layers() -> None:
    rng = np.random.default_rng(0)
    layout = ExpertLayout(num_experts=16, top_k=3, routed_layers=(1, 2, 3, 5, 7))
    topology = Topology(4, 4)
    samples = [make_sample(f"s{i}", 6 + i, distinct_routes(rng, 5 + i, layout)) for i in range(3)]
    full = collection_loads(samples, layout=layout, topology=topology)
    for stride in (1, 2, 3, 9):
        loads = collection_loads(samples, layout=layout, topology=topology, layer_stride=stride)
        assert np.array_equal(loads, full[:, :, ::stride])
    assert (full.sum(axis=1) == np.array([18, 21, 24])[:, None]).all()  # T x K assignments in every layer


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_the_kernel_counts_what_numpy_counts(dtype: str) -> None:
    assert HAVE_NUMBA
    rng = np.random.default_rng(1)
    layout = ExpertLayout(num_experts=24, top_k=5, routed_layers=tuple(range(7)))
    table = Topology(6, 6).destinations(24)
    for rows in (0, 1, 33, 255, 600):
        routes = distinct_routes(rng, rows, layout, dtype)
        for stride in (1, 2, 4):
            expected, _ = count_numpy(routes, table=table, ep_degree=6, layer_stride=stride)
            loads, bad = count_compiled(routes, table=table, ep_degree=6, layer_stride=stride)
            assert bad == -1
            assert np.array_equal(loads, expected)
            swapped = np.asfortranarray(routes)
            assert np.array_equal(
                count_compiled(swapped, table=table, ep_degree=6, layer_stride=stride)[0], loads
            )
    for value in (24, 100, -1) if dtype.startswith("i") else (24, 255):
        broken = distinct_routes(rng, 9, layout, dtype)
        broken[4, 3, 2] = value
        broken[8, 0, 0] = value
        for count in (count_compiled, count_numpy):
            assert count(broken, table=table, ep_degree=6, layer_stride=2)[1] == (4 * 7 + 3) * 5 + 2


@pytest.mark.parametrize("experts", [255, 256, 257, 65535, 65536])
def test_expert_counts_at_the_edges_of_narrow_types_are_counted(experts: int) -> None:
    topology = Topology(1) if experts % 2 else Topology(2, 2)
    table = topology.destinations(experts)
    routes = np.array([0, experts // 2, experts - 1, experts // 2 - 1], dtype=np.int32).reshape(4, 1, 1)
    loads, bad = count_compiled(routes, table=table, ep_degree=topology.ep_degree, layer_stride=1)
    assert bad == -1
    assert loads[:, 0].tolist() == ([4] if experts % 2 else [2, 2])
    assert count_compiled(routes + 1, table=table, ep_degree=topology.ep_degree, layer_stride=1)[1] == 2


def test_ids_out_of_range_are_refused_naming_sample_layer_and_row() -> None:
    layout = ExpertLayout(num_experts=4, top_k=2, routed_layers=(1, 3))
    for value in (4, -1):
        routes = np.array([[[0, 1], [2, 3]], [[0, 2], [value, 1]]], dtype=np.int32)
        with pytest.raises(
            Refusal, match=rf"sample bad: expert id {value} in row 1, layer 3 is outside 0\.\.3"
        ):
            sample_loads(make_sample("bad", 3, routes), layout=layout, topology=Topology(2, 2))
    # A sampled layer is not needed to notice: the range of every layer is checked.
    with pytest.raises(Refusal, match="layer 3"):
        sample_loads(make_sample("bad", 3, routes), layout=layout, topology=Topology(2, 2), layer_stride=2)


def test_missing_misshapen_and_fractional_routes_are_refused() -> None:
    layout = ExpertLayout(num_experts=4, top_k=2, routed_layers=(0,))
    cases = {
        "no routes": None,
        r"shape \(3, 1, 2\), expected \(2, 1, 2\)": np.zeros((3, 1, 2), dtype=np.int32),
        r"shape \(2, 2, 2\)": np.zeros((2, 2, 2), dtype=np.int32),
        "float64, expected integers": np.zeros((2, 1, 2)),
    }
    for message, routes in cases.items():
        with pytest.raises(Refusal, match=f"sample x: .*{message}"):
            sample_loads(make_sample("x", 3, routes), layout=layout, topology=Topology(2, 2))
    for stride in (0, -1, 1.5, True):
        with pytest.raises(Refusal, match="layer_stride"):
            collection_loads([], layout=layout, topology=Topology(2, 2), layer_stride=stride)


def test_experts_that_do_not_divide_over_ranks_and_too_many_choices_are_refused() -> None:
    with pytest.raises(Refusal, match="divisible"):
        tail_routes(
            "a", layout=ExpertLayout(num_experts=6, top_k=2, routed_layers=(0,)), topology=Topology(4, 4)
        )
    with pytest.raises(Refusal, match="top_k=5"):
        tail_routes(
            "a", layout=ExpertLayout(num_experts=4, top_k=5, routed_layers=(0,)), topology=Topology(2, 2)
        )


@pytest.mark.parametrize(
    ("experts", "top_k", "ep"), [(8, 2, 2), (64, 6, 8), (64, 8, 8), (16, 16, 4), (12, 5, 3), (8, 3, 1)]
)
def test_tail_ids_are_distinct_and_visit_ranks_before_they_repeat_one(
    experts: int, top_k: int, ep: int
) -> None:
    layout = ExpertLayout(num_experts=experts, top_k=top_k, routed_layers=tuple(range(0, 40, 3)))
    topology = Topology(ep, ep)
    owners = topology.destinations(experts)
    for i in range(50):
        tail = tail_routes(f"sample-{i}", layout=layout, topology=topology)
        assert tail.shape == (14, top_k)
        assert tail.dtype == np.int64
        for row in tail:
            assert len(set(row.tolist())) == top_k
            ranks = owners[row]
            assert len(set(ranks[: min(ep, top_k)].tolist())) == min(ep, top_k)
            assert np.ptp(np.bincount(ranks, minlength=ep)) <= 1


def test_a_tail_depends_on_the_sample_and_the_global_layer_alone() -> None:
    topology = Topology(4, 4)
    wide = ExpertLayout(num_experts=32, top_k=4, routed_layers=(1, 3, 6))
    narrow = ExpertLayout(num_experts=32, top_k=4, routed_layers=(3,))
    assert np.array_equal(
        tail_routes("a", layout=wide, topology=topology)[1:2],
        tail_routes("a", layout=narrow, topology=topology),
    )
    rows = {tuple(tail_routes(i, layout=wide, topology=topology)[0].tolist()) for i in "abcdefgh"}
    assert len(rows) > 4


def test_tails_of_many_samples_spread_evenly_over_experts_and_ranks() -> None:
    layout = ExpertLayout(num_experts=16, top_k=1, routed_layers=(0, 5))
    topology = Topology(4, 4)
    tails = np.stack([tail_routes(f"{i}", layout=layout, topology=topology) for i in range(3200)])
    for layer in range(2):
        counts = np.bincount(tails[:, layer].ravel(), minlength=16)
        assert abs(counts - 200).max() < 75  # 5 standard deviations of a fair draw
        assert abs(counts.reshape(4, 4).sum(axis=1) - 800).max() < 125


def test_tails_are_equal_in_processes_with_different_hash_seeds() -> None:
    program = (
        "from olmo_rl.planning.loads import tail_routes; from olmo_rl.types import ExpertLayout, Topology;"
        "print(tail_routes('sample/7', layout=ExpertLayout(num_experts=64, top_k=6, routed_layers=(2, 9)),"
        "topology=Topology(8, 8)).tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    # Written down once: a change of these numbers changes the loads of every recorded plan.
    expected = tail_routes(
        "sample/7",
        layout=ExpertLayout(num_experts=64, top_k=6, routed_layers=(2, 9)),
        topology=Topology(8, 8),
    )
    assert outputs == {f"{expected.tolist()}\n"}
    assert expected.tolist() == PINNED_TAIL


PINNED_TAIL = [[57, 1, 9, 17, 25, 33], [5, 13, 21, 29, 37, 45]]


def test_placeholder_rows_give_every_expert_the_same_number_of_assignments() -> None:
    layout = ExpertLayout(num_experts=8, top_k=2, routed_layers=(0, 1, 4))
    rows = placeholder_routes(12, layout=layout, topology=Topology(2, 2))
    assert rows.shape == (12, 3, 2)
    for layer in range(3):
        assert Counter(rows[:, layer].ravel().tolist()) == dict.fromkeys(range(8), 3)
    layout = ExpertLayout(num_experts=64, top_k=6, routed_layers=(0, 1))
    rows = placeholder_routes(66, layout=layout, topology=Topology(8, 8))
    for layer in range(2):
        counts = np.bincount(rows[:, layer].ravel(), minlength=64)
        assert (counts.min(), counts.max()) == (6, 7)
        assert np.ptp(counts.reshape(8, 8).sum(axis=1)) <= 1
    assert all(len(set(row.tolist())) == 6 for row in rows.reshape(-1, 6))
    assert placeholder_routes(0, layout=layout, topology=Topology(8, 8)).shape == (0, 2, 6)
