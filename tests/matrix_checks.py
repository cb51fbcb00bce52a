"""What must hold between the cells of the topology matrix: one verdict a rule, and the table of errors.

The measure of a tensor is max|a - b| / max|b|. Float32 on CPU: 1e-6 between topologies, 1e-5 where packs
differ. For a GPU the stated tolerance is that of bfloat16 with replayed routes, 1e-2 of the joint vector.
`python matrix_checks.py` runs the matrix and prints the table. Nothing here asserts: a rule lists its faults,
so that a seeded fault is identified by the rules that it breaks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from matrix_cases import (
    COLUMNS,
    EXPERTS,
    LAYOUT,
    ROUTER,
    STEPS,
    UPDATES,
    Cell,
    Files,
    load,
    samples_of_update,
)
from programs import run_program
from torch import Tensor

from olmo_rl.config import Recompute
from olmo_rl.planning.loads import tail_routes
from olmo_rl.types import Sample, Topology

RULES = ("topology", "packing", "recompute", "ranks", "denominators", "loads", "experts", "router")
Results = dict[Cell, list[dict[str, Any]]]
BETWEEN_TOPOLOGIES = {False: 1e-6, True: 1e-10}  # float32, float64
BETWEEN_PACKS = {False: 1e-5, True: 1e-10}


@dataclass
class Verdict:
    """The number of values that a rule checked, and its findings."""

    compared: int = 0
    faults: list[str] = field(default_factory=list)

    def note(self, wrong: bool, fault: str) -> None:
        self.compared += 1
        if wrong:
            self.faults.append(fault)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest relative errors of a cell against another, and the tensor that is worst in any of them."""

    first: float
    second: float
    norm: float
    adam: float
    worst: str

    @property
    def largest(self) -> float:
        return max(self.first, self.second, self.norm, self.adam)


def relative(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of any tensor, and its name."""
    assert got.keys() == want.keys()
    errors = []
    for name, expected in want.items():
        scale = float(expected.abs().max())
        errors.append((float((got[name] - expected).abs().max()) / (scale if scale > 0 else 1.0), name))
    return max(errors)


def errors_of(got: dict[str, Any], want: dict[str, Any]) -> Errors:
    parts = [relative(got["gradients"][u], want["gradients"][u]) for u in range(UPDATES)]
    parts.append(relative(got["moments"], want["moments"]))
    norms = [(a["grad_norm"], b["grad_norm"]) for a, b in zip(got["updates"], want["updates"], strict=True)]
    return Errors(
        first=parts[0][0],
        second=parts[1][0],
        adam=parts[2][0],
        norm=max(abs(a - b) / b for a, b in norms),
        worst=max(parts)[1],
    )


def counterparts(cells: Iterable[Cell]) -> list[tuple[str, Cell, Cell, float]]:
    """(rule, cell, the cell it must equal, limit) for every comparison up to rounding."""
    cells = set(cells)
    pairs = []
    for cell in sorted(cells, key=str):
        alone = replace(cell, world=1, ep=1, recompute=Recompute.none)
        packs_differ = cell.files in (Files.arrival, Files.shared)
        if (cell.world > 1 or packs_differ) and alone in cells and cell != alone:
            limits = BETWEEN_PACKS if packs_differ else BETWEEN_TOPOLOGIES
            pairs.append(("topology", cell, alone, limits[cell.double]))
        unpacked = replace(cell, packed=False, trees=False)
        if cell.packed and unpacked in cells:
            pairs.append(("packing", cell, unpacked, BETWEEN_PACKS[cell.double]))
        if cell.files is Files.arrival and cell.world == 1:
            pairs.append(("packing", cell, replace(alone, files=Files.packs), BETWEEN_PACKS[cell.double]))
    return pairs


def verdicts(results: Results) -> dict[str, Verdict]:
    """Every rule's verdict by name."""
    found = {rule: Verdict() for rule in RULES}
    for rule, cell, other, limit in counterparts(results):
        errors = errors_of(results[cell][0], results[other][0])
        found[rule].note(not errors.largest <= limit, f"{cell}: {errors} against {other}, limit {limit:g}")
        if rule == "topology":
            _compare_experts(cell, results[cell][0], results[other][0], verdict=found["experts"], limit=limit)
    for cell, ranks in results.items():
        without = replace(cell, recompute=Recompute.none)
        if cell != without and without in results:
            same = ranks[0]["digest"] == results[without][0]["digest"]
            found["recompute"].note(not same, f"{cell}: not the bits of {without}")
        digests = {rank["digest"] for rank in ranks}
        found["ranks"].note(len(digests) > 1, f"{cell}: ranks gathered {len(digests)} different results")
        _check_denominators(cell, ranks, verdict=found["denominators"])
        if cell.recompute is Recompute.none:
            _check_loads(cell, ranks, verdict=found["loads"])
        if cell.router:
            _check_router(cell, ranks[0], verdict=found["router"])
    return found


def _compare_experts(
    cell: Cell, got: dict[str, Any], want: dict[str, Any], *, verdict: Verdict, limit: float
) -> None:
    """Norms of expert and of dense gradients keep their ratio at every EP degree."""
    for update in range(UPDATES):
        ratios = []
        for found in (got, want):
            squares = {True: 0.0, False: 0.0}
            for name, gradient in found["gradients"][update].items():
                squares[EXPERTS in name] += float(gradient.double().square().sum())
            ratios.append((squares[True] / squares[False]) ** 0.5)
        ratio = ratios[0] / ratios[1]
        verdict.note(not abs(ratio - 1) <= limit, f"{cell}: expert-to-dense gradient ratio {ratio:.9f}")


def _check_denominators(cell: Cell, ranks: list[dict[str, Any]], *, verdict: Verdict) -> None:
    """Global counts, counted here from the samples; sums over ranks see every token and pack once."""
    for update in range(UPDATES):
        samples = samples_of_update(update, files=cell.files)
        scored = [int(sample.loss_mask.sum()) for sample in samples]
        want = (sum(scored), sum(count > 0 for count in scored))
        packs = sum(len(column) for column in COLUMNS) if cell.packed else len(samples)
        if cell.files in (Files.arrival, Files.shared):
            packs = sum(len(rank["updates"][update]["packs"]) for rank in ranks)
        for number, rank in enumerate(ranks):
            found = rank["updates"][update]
            where = f"{cell}: rank {number}, update {update + 1}:"
            verdict.note(found["normalisers"] != want, f"{where} {found['normalisers']}, not {want}")
            totals = {name: found["totals"][f"count/{name}"] for name in ("scored", "tokens", "packs")}
            expected = {"scored": want[0], "tokens": sum(len(s) for s in samples), "packs": packs}
            verdict.note(totals != expected, f"{where} {totals}, not {expected}")


def _check_loads(cell: Cell, ranks: list[dict[str, Any]], *, verdict: Verdict) -> None:
    """Every rank receives the rows that routes and synthetic tails send to its experts, as was predicted."""
    for found in (update for rank in ranks for update in rank["updates"] if cell.ep > 1):
        verdict.note(not found["balance"]["equal"], f"{cell}: {found['balance']['where'][:1]}")
    per_rank = LAYOUT.num_experts // cell.ep
    for number, rank in enumerate(ranks):
        want = _expected_rows(cell, ranks, replica=number // cell.ep)
        mine = slice(number % cell.ep * per_rank, (number % cell.ep + 1) * per_rank)
        for index, layer in enumerate(LAYOUT.routed_layers):
            got = [counts.tolist() for counts in rank["received"][layer]]
            expected = [counts[index, mine].tolist() for counts in want]
            fault = f"{cell}: rank {number}, layer {layer} received {got}, not {expected}"
            verdict.note(got != expected, fault)


def _expected_rows(cell: Cell, ranks: list[dict[str, Any]], *, replica: int) -> list[np.ndarray]:
    """int64 [L, E] by forward of one replica; the first update's packs are scored before they are trained."""
    topology = Topology(cell.world, cell.ep)
    rows = []
    for update in range(UPDATES):
        samples = {sample.id: sample for sample in samples_of_update(update, files=cell.files)}
        members = ranks[replica * cell.ep : (replica + 1) * cell.ep]
        columns = []
        for packs in zip(*(rank["updates"][update]["packs"] for rank in members), strict=True):
            counts = np.zeros((len(LAYOUT.routed_layers), LAYOUT.num_experts), dtype=np.int64)
            for pack in packs:
                for row in _rows_of(pack, samples=samples, topology=topology, shared=cell.trees):
                    np.add.at(counts, (np.arange(len(counts))[:, None], row), 1)
            columns.append(counts)
        rows += columns * (2 if ranks[0]["updates"][update]["scoring"] == "checked" else 1)
    return rows


def _rows_of(
    pack: Sequence[str], *, samples: dict[str, Sample], topology: Topology, shared: bool
) -> list[np.ndarray]:
    """Routes of every row of a pack: recorded ones, shared where tokens and experts so far are equal, and
    one synthetic row where nobody goes on.
    """

    def key(id: str, t: int, rows: int) -> tuple[object, ...]:
        experts = np.sort(samples[id].routes[:rows], axis=-1).tobytes()
        return (samples[id].tokens[: t + 1].tobytes(), experts) if shared else (id, t)

    recorded = {
        key(id, t, t + 1): (key(id, t, t), samples[id].routes[t])
        for id in pack
        for t in range(len(samples[id].routes))
    }
    going_on = {before for before, _ in recorded.values()}
    tails: dict[object, np.ndarray] = {}
    for id in pack:
        end = key(id, len(samples[id]) - 1, len(samples[id]) - 1)
        if end not in going_on:
            tails.setdefault(end, tail_routes(id, layout=LAYOUT, topology=topology))
    return [row for _, row in recorded.values()] + list(tails.values())


def _check_router(cell: Cell, found: dict[str, Any], *, verdict: Verdict) -> None:
    """The combined objective: its parts add up, every value is finite, every tensor moves."""
    for update in range(UPDATES):
        totals = found["updates"][update]["totals"]
        combined = totals["loss/policy"] + ROUTER["router_aux_weight"] * totals["loss/router_balance"]
        combined += ROUTER["router_z_weight"] * totals["loss/router_z"]
        off = abs(totals["loss/total"] - combined)
        verdict.note(not off <= (1e-12 if cell.double else 1e-6), f"{cell}: parts are {off:.3g} off")
        for name, gradient in found["gradients"][update].items():
            fine = bool(gradient.isfinite().all()) and bool(gradient.abs().max() > 0)
            verdict.note(not fine, f"{cell}: {name} is not finite, or nowhere other than 0")


def table(results: Results) -> str:
    """The largest relative errors of every comparison, one line each."""
    head = ("cell", "against", "gradient 1", "gradient 2", "norm", "Adam", "limit", "worst tensor")
    lines = [head]
    for rule, cell, other, limit in counterparts(results):
        errors = errors_of(results[cell][0], results[other][0])
        against = (
            "1 rank"
            if rule == "topology"
            else "other packs"
            if other.packing == cell.packing
            else other.packing
        )
        numbers = [f"{x:.1e}" for x in (errors.first, errors.second, errors.norm, errors.adam, limit)]
        lines.append((str(cell), against, *numbers, errors.worst))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_program(Path(directory), *STEPS)
        results = load(Path(directory))
    print(table(results))
    for rule, verdict in verdicts(results).items():
        print(f"{rule}: {verdict.compared} compared, {len(verdict.faults)} faults")
        print("".join(f"    {fault}\n" for fault in verdict.faults), end="")


if __name__ == "__main__":
    main()
