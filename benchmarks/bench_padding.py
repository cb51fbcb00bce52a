"""Padding and expert load: `python -m benchmarks.bench_padding` counts the busiest rank of padded packs.

Every pack is padded four ways to the same number of rows: with route rows of zeros; with a constant token,
which a router sends to the same experts in every row; with the rows 0..top_k-1 (arange); and as this project
does it (planning/pads.py). The load of one pack is the sum over layers of its busiest rank. `relative`: that
load per row, over that of the unpadded pack per token; 1 means that a pad costs what a token costs.

Packs: of the tiny model, addition problems through the model at its initial weights, whose routers are asked;
of the others, the order-preserving packs of the synthetic law (planning/synthetic.py). `memory`: activations
in the experts of the widest layer on its busiest rank, where every rank of the group sends such a pack: each
assignment keeps its input, two hidden rows, their product and its output.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from olmo_rl.planning.loads import collection_loads, count_numpy
from olmo_rl.planning.packing import plan_step
from olmo_rl.planning.pads import Pads
from olmo_rl.planning.synthetic import draw_lengths, expert_counts, routes_of_counts
from olmo_rl.types import ExpertLayout, PackPlan, Padding, Sample, Topology

FILLS = (0.97, 0.9, 0.7)
KINDS = ("zeros", "constant token", "arange", "ours")
MEAN_LIMIT, PACK_LIMIT = 0.02, 0.10


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Experts and where they lie; `width` and `hidden` of one expert, `itemsize` bytes of a number."""

    name: str
    layout: ExpertLayout
    topology: Topology
    width: int
    hidden: int
    itemsize: int

    @property
    def bytes_per_assignment(self) -> int:
        return (2 * self.width + 3 * self.hidden) * self.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Padless:
    """One pack without pads: its samples, and the routes [rows, layers, top_k] that a document of one
    constant token gets; they repeat where pads are more.
    """

    samples: list[Sample]
    constant: NDArray[np.integer]


def law_case(name: str, *, experts: int, ep: int, layers: int, width: int, hidden: int) -> Case:
    layout = ExpertLayout(num_experts=experts, top_k=8, routed_layers=tuple(range(layers)))
    return Case(name=name, layout=layout, topology=Topology(ep, ep), width=width, hidden=hidden, itemsize=2)


LAW = (
    law_case("E128 top-8 EP8", experts=128, ep=8, layers=48, width=2048, hidden=768),
    law_case("E256 top-8 EP32", experts=256, ep=32, layers=58, width=7168, hidden=2048),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=int, default=64, help="packs of each case, at least 50 to conclude")
    arguments = parser.parse_args()
    started, console = time.perf_counter(), Console(width=110)
    kept = True
    for case, packs in cases(arguments.packs):
        results = measure(case, packs=packs)
        console.print(report(case, results=results))
        kept &= all(within_limits(results[fill, "ours"][0]) for fill in FILLS)
    console.print(
        f"ours within {MEAN_LIMIT:.0%} in the mean and {PACK_LIMIT:.0%} for every pack: "
        f"{'met' if kept else 'NOT met'}; {arguments.packs} packs a case, "
        f"{time.perf_counter() - started:.0f} s"
    )


def cases(packs: int) -> Iterator[tuple[Case, Iterator[Padless]]]:
    """Every case with its packs."""
    yield tiny_case(packs)
    for case in LAW:
        yield case, law_packs(case, count=packs)


def law_packs(case: Case, *, count: int, budget: int = 16384, seed: int = 0) -> Iterator[Padless]:
    """Packs of arrival of the synthetic law, dealt over the ranks of one group; drawn pack by pack."""
    world = case.topology.world_size
    drawn = draw_lengths(world * max(1, -(-8 * count // world)), seed=seed)
    plan = plan_step(drawn.lengths, budget=budget, topology=case.topology)
    random = np.random.default_rng(seed)
    cells = random.permutation(np.array([cell for rank in plan.packs for cell in rank], dtype=object))
    cells = cells[:count]
    wanted = {position for cell in cells for position in cell}
    counts = {
        i: row.astype(np.int32)
        for i, row in enumerate(expert_counts(drawn, layout=case.layout, seed=seed))
        if i in wanted
    }
    for cell in cells:
        samples = []
        for i in cell:
            length = int(drawn.lengths[i])
            routes = routes_of_counts(
                counts[i].astype(np.int64), rows=length - 1, top_k=case.layout.top_k, rng=random
            )
            samples.append(sample_of(drawn.ids[i], length=length, routes=routes))
        first = samples[0].routes
        assert first is not None
        yield Padless(samples=samples, constant=first[:1])


def sample_of(id: str, *, length: int, routes: NDArray[np.integer]) -> Sample:
    """A sample of which only length and routes matter."""
    return Sample(
        id=id,
        group=id,
        tokens=np.zeros(length, dtype=np.int32),
        response_mask=np.ones(length, dtype=np.bool_),
        behavior_logprobs=np.zeros(length, dtype=np.float32),
        reward=0.0,
        routes=routes,
    )


def tiny_case(count: int, *, budget: int = 512) -> tuple[Case, Iterator[Padless]]:
    """The model of `+experiment=packed_moe` over two ranks, asked for its routes at initial weights."""
    from olmo_rl.library import compose

    config = compose(["+experiment=packed_moe"], run_dir="")
    layout = config.model.expert_layout
    assert layout is not None, "the tiny hybrid model has experts"
    case = Case(
        name=f"tiny model, E{layout.num_experts} top-{layout.top_k} EP2",
        layout=layout,
        topology=Topology(2, 2),
        width=config.model.latent_dim or config.model.dim,
        hidden=config.model.expert_hidden,
        itemsize=4,
    )

    def packs() -> Iterator[Padless]:
        import torch

        from olmo_rl.data.collate import collate
        from olmo_rl.data.packs import RouteMode, RouteTrace
        from olmo_rl.data.tokenizers import load_tokenizer
        from olmo_rl.policy.hybrid import HybridDecoder
        from olmo_rl.tasks.kinds import build_task

        decoder = HybridDecoder(config.model, attention="reference")
        decoder.init_weights(config.seed)
        tokenizer = load_tokenizer(config.model.tokenizer)
        problems = iter(build_task(config.task, seed=config.seed).problems(60 * count, seed=1))

        @torch.no_grad()
        def routes_of(samples: list[Sample]) -> NDArray[np.int64]:
            pack, trace = collate(samples, layout=None, topology=Topology(1)), RouteTrace()
            decoder(pack["tokens"], pack.context(mode=RouteMode.record, trace=trace), torch.arange(1))
            return torch.stack([trace.ids[layer] for layer in layout.routed_layers], dim=1).numpy()

        constant = sample_of("pads", length=budget, routes=np.zeros((0, 0, 0), dtype=np.int64))
        constant_routes = routes_of([constant])
        for number in range(count):
            samples: list[Sample] = []
            while True:
                problem = next(problems)
                text = tokenizer.encode(problem.prompt + problem.answer) + [tokenizer.eos_id]
                if sum(map(len, samples)) + len(text) > budget * 0.97:
                    break
                sample = sample_of(f"{number}-{len(samples)}", length=len(text), routes=constant_routes)
                sample.tokens = np.array(text, dtype=np.int32)
                samples.append(sample)
            rows, start = routes_of(samples), 0
            for sample in samples:
                sample.routes = rows[start : start + len(sample) - 1]
                start += len(sample)
            yield Padless(samples=samples, constant=constant_routes)

    return case, packs()


Results = dict[tuple[float, str], tuple[NDArray[np.float64], float]]


def measure(case: Case, *, packs: Iterator[Padless]) -> Results:
    """By fill and kind of pads: `relative` of every pack, and the largest memory of any pack in bytes. Fill 1
    is the unpadded pack.
    """
    relative: dict[tuple[float, str], list[float]] = {}
    peaks: dict[tuple[float, str], int] = {}

    def note(key: tuple[float, str], *, value: float, load: NDArray[np.int64]) -> None:
        relative.setdefault(key, []).append(value)
        peaks[key] = max(peaks.get(key, 0), int(load.max()))

    for pack in packs:
        loads = collection_loads(pack.samples, layout=case.layout, topology=case.topology)
        bare = loads.sum(axis=0, dtype=np.int64)
        tokens = sum(len(sample) for sample in pack.samples)
        share = busiest(bare) / tokens
        note((1.0, "no pads"), value=1.0, load=bare)
        for fill in FILLS:
            rows = round(tokens / fill)
            for kind in KINDS:
                padded = bare + pad_loads(kind, pack=pack, case=case, loads=loads, rows=rows)
                note((fill, kind), value=busiest(padded) / rows / share, load=padded)
    scale = case.topology.ep_degree * case.bytes_per_assignment
    return {key: (np.array(values), peaks[key] * scale) for key, values in relative.items()}


def busiest(load: NDArray[np.int64]) -> int:
    """Sum over layers of the busiest rank; `load` [E, L]."""
    return int(load.max(axis=0).sum())


def pad_loads(
    kind: str, *, pack: Padless, case: Case, loads: NDArray[np.int32], rows: int
) -> NDArray[np.int64]:
    """int64 [E, L]: assignments of the pads that make `pack` a row of `rows` tokens."""
    layers, top_k = len(case.layout.routed_layers), case.layout.top_k
    pads = rows - sum(len(sample) for sample in pack.samples)
    if kind == "ours":
        step = Pads(
            samples=pack.samples,
            padding=Padding(multiple_of=rows),
            topology=case.topology,
            loads=loads,
            layout=case.layout,
        )
        added = step.work(PackPlan(packs=((tuple(range(len(pack.samples))),),))).loads
        assert added is not None
        return added[0, 0]
    routes = {
        "zeros": np.zeros((1, layers, top_k), dtype=np.int64),
        "arange": np.broadcast_to(np.arange(top_k), (1, layers, top_k)),
        "constant token": pack.constant,
    }[kind]
    table = case.topology.destinations(case.layout.num_experts)

    def count(rows: NDArray[np.integer]) -> NDArray[np.int64]:
        return count_numpy(rows, table=table, ep_degree=case.topology.ep_degree, layer_stride=1)[0]

    return count(routes) * (pads // len(routes)) + count(routes[: pads % len(routes)])


def within_limits(values: NDArray[np.float64]) -> bool:
    return bool(abs(values.mean() - 1) <= MEAN_LIMIT and np.abs(values - 1).max() <= PACK_LIMIT)


def report(case: Case, *, results: Results) -> Table:
    """One line for every fill and kind: mean, worst pack, memory of the busiest rank."""
    count = len(next(iter(results.values()))[0])
    table = Table(title=f"{case.name}, {count} packs", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in ("fill", "pads", "relative", "least", "most", "memory, MiB", ""):
        table.add_column(heading, justify="left" if heading == "pads" else "right")
    for (fill, kind), (values, memory) in results.items():
        table.add_row(
            f"{fill:.2f}",
            kind,
            f"{values.mean():.3f}",
            f"{values.min():.3f}",
            f"{values.max():.3f}",
            f"{memory / 2**20:,.1f}",
            "" if kind != "ours" else "met" if within_limits(values) else "NOT met",
        )
    return table


if __name__ == "__main__":
    main()
