"""The planner's benchmark: `python -m benchmarks.bench_planner [--quick] [--panel FILE] [--out DIR]`.

Every arm plans identical held-out batches: gaps of J over its bound with paired differences and 95 %
bootstrap intervals, a simulated step under three synchronisation models, proposals per second, and where
the time goes, cold and warm. Writes `planner.csv` and `planner.png` and prints the tables. Counts are not
seconds: nothing here claims a faster step.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.planner_arms import ARMS, SETTINGS, Batch, Row, draw_batch, read_panel, run_arms
from olmo_rl.config import BalanceConfig, BalanceKind
from olmo_rl.planning.loads import collection_loads
from olmo_rl.planning.objective import Work, pair_straggler, token_straggler
from olmo_rl.planning.planners import compile_kernels, schedule_step
from olmo_rl.planning.schedule import StepInput
from olmo_rl.planning.synthetic import recorded_lengths
from olmo_rl.types import ExpertLayout, Refusal, Sample, Topology

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "grpo_lengths.json"
FIRST_SEED = 1000  # far from the seeds that the constants of the search were chosen on
COMPARED = (
    ("anneal", "length_anneal"),
    ("anneal", "kk_descending"),
    ("anneal", "reference"),
)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % bootstrap interval of the mean."""
    array = np.array(values)
    means = np.random.default_rng(0).choice(array, size=(2000, len(array))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(array.mean()), float(low), float(high)


def shown(values: Sequence[float]) -> str:
    """A mean in percent with its interval, which a single batch does not have."""
    mean, low, high = interval(values)
    return (
        f"{100 * mean:.1f}" if len(values) == 1 else f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    )


def of_arm(rows: Sequence[Row], arm: str) -> list[Row]:
    return [row for row in rows if row.arm == arm]


def numpy_proposals_per_second(batch: Batch, *, seconds: float) -> float:
    """Swaps per second of an optimised NumPy evaluator: two changed blocks, preallocated, nothing else.

    It scores what a swap between two blocks of two columns does to expert work, no tokens, pairs or books.
    """
    rng = np.random.default_rng(0)
    n, ep, layers = batch.loads.shape
    replicas = batch.topology.num_replicas
    load = rng.integers(0, 10_000, (2, replicas, ep, layers)).astype(np.int32)
    peak = load.max(axis=2)
    others = [peak[c, 1:].max(axis=0) if replicas > 1 else np.zeros(layers, np.int32) for c in range(2)]
    difference, block = np.empty((ep, layers), np.int32), np.empty((ep, layers), np.int32)
    top = np.empty(layers, np.int32)
    pairs = rng.integers(0, n, (4096, 2)).tolist()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for i, j in pairs[done % 4096 : done % 4096 + 64]:
            np.subtract(batch.loads[j], batch.loads[i], out=difference)
            work = 0
            for c, change in ((0, np.add), (1, np.subtract)):
                change(load[c, 0], difference, out=block)
                np.max(block, axis=0, out=top)
                np.maximum(top, others[c], out=top)
                work += int(top.sum())
        done += 64
    return done / (time.perf_counter() - began)


def rates(rows: Sequence[Row], batch: Batch) -> dict[str, float]:
    """Proposals per second: the fastest batch of each search, and the NumPy evaluator of two changed
    blocks.
    """
    best = {
        arm: max(1e3 * row.proposals / row.search_ms for row in of_arm(rows, arm))
        for arm in ("reference", "anneal")
    }
    return best | {"numpy": numpy_proposals_per_second(batch, seconds=0.5)}


def bench(name: str, batches: Sequence[Batch], console: Console) -> list[Row]:
    """All arms on all batches of one setting, and their tables."""
    rows: list[Row] = []
    for index, batch in enumerate(batches):
        rows += run_arms(batch, setting=name, index=index)
    table = Table(title=f"{name}: {len(batches)} held-out batches", title_justify="left")
    for header in ("arm", "gap %", "packs", "meet at gradient %", "at every layer %", "strict sum %"):
        table.add_column(header, justify="left" if header == "arm" else "right")
    for header in ("start ms", "search ms", "verify ms"):
        table.add_column(header, justify="right")
    for arm in ARMS:
        mine = of_arm(rows, arm)
        table.add_row(
            arm,
            shown([row.gap for row in mine]),
            f"{np.mean([row.work.packs_per_rank for row in mine]):.1f}",
            *(shown([row.models[k] for row in mine]) for k in range(3)),
            *(
                f"{np.mean([getattr(row, f'{part}_ms') for row in mine]):.1f}"
                for part in ("start", "search", "verify")
            ),
        )
    console.print(table)
    for a, b in COMPARED:
        pairs = [y.gap - x.gap for x, y in zip(of_arm(rows, a), of_arm(rows, b), strict=True)]
        console.print(f"  {b} minus {a}: {shown(pairs)} points of gap, paired")
    speed = rates(rows, batches[0])
    by_reference, by_numpy = speed["anneal"] / speed["reference"], speed["anneal"] / speed["numpy"]
    console.print(
        f"  anneal: {speed['anneal'] / 1e6:.2f} M proposals/s, {by_reference:.0f} x the reference search "
        f"({speed['reference']:.0f}/s), {by_numpy:.1f} x NumPy on two blocks ({speed['numpy']:.0f}/s), "
        f"target 20 x: {met(by_numpy >= 20)}"
    )
    mean = float(np.mean([row.gap for row in of_arm(rows, "anneal")]))
    console.print(f"  anneal: mean gap {100 * mean:.2f} %, target 2 %: {met(mean <= 0.02)}")
    return rows


def met(good: bool) -> str:
    return "[green]met[/]" if good else "[red]missed[/]"


def time_split(console: Console) -> None:
    """Count, start, search and verify of 256 samples x 2000 tokens x 48 layers x top-8."""
    layout = ExpertLayout(num_experts=128, top_k=8, routed_layers=tuple(range(48)))
    topology = Topology(16, 8)
    rng = np.random.default_rng(0)
    # Rows of distinct ids from skewed scores; every sample has another order of rows and of experts.
    scores = rng.standard_normal((1, 48, 128)) + rng.gumbel(size=(1999, 48, 128))
    rows = np.argpartition(-scores, 8, axis=-1)[..., :8].astype(np.int16)
    shifts = rng.integers(0, 128, 256).astype(np.int16)
    samples = [sample_of(i, (np.roll(rows, 7 * i, axis=0) + shifts[i]) % 128) for i in range(256)]
    lengths = np.full(256, 2000)
    balance = BalanceConfig(kind=BalanceKind.anneal)
    for turn in ("first", "warm"):
        began = time.perf_counter()
        loads = collection_loads(samples, layout=layout, topology=topology)
        counted = time.perf_counter() - began
        found = schedule_step(
            StepInput(
                lengths=lengths,
                ids=[s.id for s in samples],
                loads=loads,
                budget=16384,
                topology=topology,
                balance=balance,
            )
        )
        total = time.perf_counter() - began
        split = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in found.seconds.items())
        console.print(f"  {turn}: {1e3 * total:.0f} ms = count {1e3 * counted:.0f}, {split}")
    console.print(f"  target 300 ms warm: {met(total <= 0.3)}")


def sample_of(i: int, routes: NDArray[np.int16]) -> Sample:
    tokens = len(routes) + 1
    return Sample(
        id=f"s{i}",
        group=f"g{i // 8}",
        tokens=np.zeros(tokens, dtype=np.int32),
        response_mask=np.ones(tokens, dtype=bool),
        behavior_logprobs=np.zeros(tokens, dtype=np.float32),
        reward=0.0,
        routes=routes,
    )


def cold_seconds() -> float:
    """Wall seconds to compile a search in a new process with an empty cache."""
    code = (
        "import time; t = time.perf_counter()\n"
        "from olmo_rl.config import BalanceConfig, BalanceKind\n"
        "from olmo_rl.planning.planners import compile_kernels\n"
        "from olmo_rl.types import Topology\n"
        "compile_kernels(BalanceConfig(kind=BalanceKind.anneal), layout=None, topology=Topology(1))\n"
        "print(time.perf_counter() - t)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        )
    return float(result.stdout)


def real_lengths(console: Console) -> None:
    """The recorded case that planner.md's targets name: packing alone, no experts."""
    lengths = recorded_lengths(RECORDED, case="mbu_157_percent")
    topology = Topology(8)
    ids = [str(i) for i in range(len(lengths))]
    balances = {"arrival": BalanceConfig(), "anneal": BalanceConfig(kind=BalanceKind.anneal)}
    console.print("\n[bold]Recorded lengths[/] (mbu_157_percent: 512 samples, 8 ranks, budget 4608)")
    work: Work | None = None
    for name, balance in balances.items():
        found = schedule_step(
            StepInput(lengths=lengths, ids=ids, loads=None, budget=4608, topology=topology, balance=balance)
        )
        work = found.after
        token = token_straggler(work, lengths=lengths, topology=topology)
        pair = pair_straggler(work, lengths=lengths, topology=topology)
        console.print(
            f"  {name}: {work.packs_per_rank} packs, token straggler {token:.3f}, pair straggler {pair:.3f}"
        )
    good = work is not None and work.packs_per_rank == 9 and token <= 1.02 and pair <= 1.18
    console.print(f"  anneal, target 9 packs, 1.02, 1.18: {met(good)}")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    flat = []
    for row in rows:
        values = {k: v for k, v in asdict(row).items() if k not in ("work", "models")} | asdict(row.work)
        names = ("step_gradient", "step_layer", "step_strict")
        flat.append(values | dict(zip(names, row.models, strict=True)))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)


def draw_picture(rows: Sequence[Row], path: Path) -> None:
    """Mean gap of every arm by setting, on a logarithmic axis, with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = list(dict.fromkeys(row.setting for row in rows))
    figure, axes = pyplot.subplots(figsize=(2.6 + 2.2 * len(settings), 4.2), layout="constrained")
    width = 0.8 / len(ARMS)
    for k, arm in enumerate(ARMS):
        stats = [interval([100 * r.gap for r in of_arm(rows, arm) if r.setting == name]) for name in settings]
        means = np.array([mean for mean, _, _ in stats])
        errors = np.abs(np.array([(mean - low, high - mean) for mean, low, high in stats]).T)
        at = np.arange(len(settings)) + (k - (len(ARMS) - 1) / 2) * width
        bars = axes.bar(at, means, width, yerr=errors, label=arm.replace("_", " "), error_kw={"lw": 0.8})
        axes.bar_label(bars, fmt="%.1f", fontsize=6, padding=2)
    axes.set_yscale("log")
    axes.set_xticks(np.arange(len(settings)), settings)
    axes.set_ylabel("gap of J over its bound, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, ncols=4, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_planner", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few batches: under four minutes on two cores")
    parser.add_argument("--panel", help="an .npz with lengths [N] and loads [N, E, L] instead of the law")
    parser.add_argument(
        "--out", default="outputs/bench_planner", help="directory of planner.csv and planner.png"
    )
    options = parser.parse_args(arguments)
    console = Console(width=150, highlight=False)
    try:
        panel = read_panel(options.panel) if options.panel else None
        compile_kernels(BalanceConfig(kind=BalanceKind.anneal), layout=None, topology=Topology(1))
        rows: list[Row] = []
        if panel is not None:
            rows = bench(f"panel {Path(options.panel).name}", [panel], console)
        else:
            for setting in SETTINGS:
                count = setting.quick if options.quick else setting.batches
                batches = [draw_batch(setting, seed=FIRST_SEED + k) for k in range(count)]
                rows += bench(setting.name, batches, console)
    except Refusal as refusal:
        print("\n".join(refusal.reasons), file=sys.stderr)
        return 2
    if panel is None:
        real_lengths(console)
        console.print("\n[bold]Time[/] of 256 samples x 2000 tokens x 48 layers x top-8")
        time_split(console)
        console.print(f"  compilation, nothing cached: {cold_seconds():.0f} s")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(rows, out / "planner.csv")
    draw_picture(rows, out / "planner.png")
    console.print(f"\nwrote {out / 'planner.csv'} and {out / 'planner.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
