"""Loads counted in the background as samples arrive: the same numbers, refused where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from training_cases import LAYOUT, samples_of

from olmo_rl.collections.load_counting import LoadCounter
from olmo_rl.planning.loads import collection_loads
from olmo_rl.types import Refusal, Topology

TOPOLOGY = Topology(4, 2)


@pytest.fixture
def counter() -> Iterator[LoadCounter]:
    counter = LoadCounter(topology=TOPOLOGY, layer_stride=1)
    yield counter
    counter.close()


def test_counts_are_those_of_the_whole_collection_in_any_order_and_over_several_arrivals(
    counter: LoadCounter,
) -> None:
    samples = samples_of([(1 + i % 5, 2 + i % 7) for i in range(80)])
    counts = counter.collection(LAYOUT)
    counts.arrive(samples[:50])
    counts.arrive(samples[50:])
    order = [79, 3, 41, 0, 55]
    loads, seconds = counts.of([samples[i] for i in order])
    expected = collection_loads(samples, layout=LAYOUT, topology=TOPOLOGY)
    assert loads is not None
    assert loads.dtype == np.int32
    assert np.array_equal(loads, expected[order])
    assert seconds > 0


def test_equal_ids_of_two_collections_do_not_meet(counter: LoadCounter) -> None:
    first, second = samples_of(seed=1), samples_of(seed=2)
    both = [(samples, counter.collection(LAYOUT)) for samples in (first, second)]
    for samples, counts in both:
        counts.arrive(samples)
    for samples, counts in both:
        expected = collection_loads(samples, layout=LAYOUT, topology=TOPOLOGY)
        assert np.array_equal(counts.of(samples)[0], expected)


def test_a_stride_looks_at_every_second_layer() -> None:
    counter = LoadCounter(topology=TOPOLOGY, layer_stride=2)
    samples = samples_of()
    counts = counter.collection(LAYOUT)
    counts.arrive(samples)
    loads, _ = counts.of(samples)
    counter.close()
    assert loads is not None
    assert np.array_equal(loads, collection_loads(samples, layout=LAYOUT, topology=TOPOLOGY)[:, :, ::2])


def test_a_sample_with_bad_routes_is_refused_when_it_is_used_and_harms_no_other(counter: LoadCounter) -> None:
    samples = samples_of()
    routes = samples[3].routes.copy()
    routes[1, 0, 1] = LAYOUT.num_experts
    samples[3] = replace(samples[3], routes=routes)
    counts = counter.collection(LAYOUT)
    counts.arrive(samples)
    good = samples[:3] + samples[4:]
    expected = collection_loads(good, layout=LAYOUT, topology=TOPOLOGY)
    assert np.array_equal(counts.of(good)[0], expected)
    with pytest.raises(Refusal, match=r"sample s3: expert id 4 in row 1, layer 1 is outside 0..3"):
        counts.of(samples)


def test_without_routes_or_without_a_layout_there_is_nothing_to_count(counter: LoadCounter) -> None:
    samples = samples_of()
    counts = counter.collection(None)
    counts.arrive(samples)
    assert counts.of(samples) == (None, 0.0)
    samples[5] = replace(samples[5], routes=None)
    counts = counter.collection(LAYOUT)
    counts.arrive(samples)
    assert counts.of(samples) == (None, 0.0)
    assert counts.of(samples[:5])[0] is not None
