"""Seconds of an update from what a plan predicts: fitted to measured updates, never extrapolated.

seconds = a X + b T + c Q + d columns + e with non-negative weights: X expert, T token and Q pair work as in
objective.py, `e` what every update costs. Refuses too few measurements and another topology; does not predict
outside the measured range of a quantity.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_rl.planning.objective import Work
from olmo_rl.types import Refusal, Topology

QUANTITIES = ("expert_work", "token_work", "pair_work", "columns")
LEAST = 10  # measured updates: five weights, and as many again to judge them by
_RECENT = 0.3  # share of updates, the last ones, that the error is measured on


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """`weights` in seconds per unit, by quantity and `update`; `ranges` smallest and largest measured value.

    `held_out` is the mean absolute error on updates that the weights of the check did not see, relative to
    their mean; `measured` counts the updates.
    """

    world_size: int
    ep_degree: int
    weights: dict[str, float]
    ranges: dict[str, tuple[float, float]]
    held_out: float
    measured: int

    def outside(self, work: Work) -> list[str]:
        """One phrase for every quantity of `work` that was not measured."""
        values = quantities(work)
        return [
            f"{name} {values[name]:g} outside the measured {low:g}..{high:g}"
            for name, (low, high) in self.ranges.items()
            if not low <= values[name] <= high
        ]

    def seconds(self, work: Work) -> float:
        """Predicted seconds of one update. Raises Refusal for steps outside the measured range."""
        if reasons := self.outside(work):
            raise Refusal(f"balance.cost_model does not extrapolate: {', '.join(reasons)}")
        values = quantities(work)
        return self.weights["update"] + sum(self.weights[name] * values[name] for name in QUANTITIES)

    def lines(self, steps: Sequence[tuple[int, Work, Work]]) -> Iterator[str]:
        """Seconds of every (step, arrival, planned). Raises Refusal where no step is within the measured
        range.
        """
        lines, reasons = [], []
        for step, *works in steps:
            for name, work in zip(("arrival", "planned"), works, strict=True):
                where = f"step {step}, {name}"
                if outside := self.outside(work):
                    reasons.append(f"balance.cost_model: {where}: {', '.join(outside)}")
                    lines.append(f"Update time, {where}: not predicted, {', '.join(outside)}")
                else:
                    lines.append(f"Update time, {where}: {self.seconds(work):.3f} s")
        if len(reasons) == len(lines):
            raise Refusal(reasons[:2])
        yield from lines[:32]
        yield f"A fit to {self.measured} measured updates, held-out error {100 * self.held_out:.1f} %."

    def check(self, topology: Topology) -> None:
        if (self.world_size, self.ep_degree) != (topology.world_size, topology.ep_degree):
            raise Refusal(
                f"balance.cost_model was measured on {self.world_size} ranks, EP {self.ep_degree}; this plan "
                f"is for {topology.world_size} with EP {topology.ep_degree}: fit one to logs of that topology"
            )


def quantities(work: Work) -> dict[str, float]:
    """The measured quantities of one plan; expert work 0 where nothing is known of experts."""
    return {
        "expert_work": float(work.expert_work or 0),
        "token_work": float(work.token_work),
        "pair_work": float(work.pair_work),
        "columns": float(work.packs_per_rank),
    }


def non_negative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 that minimises |a x - b|, for a handful of columns.

    The minimum solves plain least squares on the columns it uses, so all sets of columns are tried. Columns
    are scaled first: they differ by many powers of ten.
    """
    scale = np.maximum(np.abs(a).max(axis=0), np.finfo(np.float64).tiny)
    scaled, best = a / scale, (float(b @ b), np.zeros(a.shape[1]))
    for size in range(1, a.shape[1] + 1):
        for chosen in itertools.combinations(range(a.shape[1]), size):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], b, rcond=None)
            error = float(np.square(scaled[:, chosen] @ part - b).sum())
            # Of equal fits the one with fewer columns stays.
            if (part >= 0).all() and error < best[0] * (1 - 1e-9):
                x = np.zeros(a.shape[1])
                x[list(chosen)] = part
                best = (error, x)
    return best[1] / scale


def fit_costs(measured: Sequence[dict[str, float]], *, topology: Topology) -> CostModel:
    """Fit updates with QUANTITIES and `seconds`, in order of time; the error is that of the last third under
    weights of the first two.
    """
    if len(measured) < LEAST:
        raise Refusal(f"{len(measured)} measured updates: a cost model needs at least {LEAST}")
    a = np.array([[row[name] for name in QUANTITIES] + [1.0] for row in measured])
    b = np.array([row["seconds"] for row in measured])
    cut = len(b) - max(1, round(len(b) * _RECENT))
    check = non_negative_least_squares(a[:cut], b[:cut])
    held_out = float(np.abs(a[cut:] @ check - b[cut:]).mean() / b[cut:].mean())
    weights = non_negative_least_squares(a, b)
    return CostModel(
        world_size=topology.world_size,
        ep_degree=topology.ep_degree,
        weights=dict(zip((*QUANTITIES, "update"), weights.tolist(), strict=True)),
        ranges={
            name: (float(column.min()), float(column.max()))
            for name, column in zip(QUANTITIES, a.T, strict=False)
        },
        held_out=held_out,
        measured=len(b),
    )


def write_cost_model(model: CostModel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": 1} | asdict(model), indent=1) + "\n", encoding="utf-8")


def read_cost_model(path: str | Path) -> CostModel:
    """Refuses a file that `benchmarks.fit_cost_model` did not write."""
    where = f"balance.cost_model={path}"
    try:
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        ranges = {name: (float(low), float(high)) for name, (low, high) in values["ranges"].items()}
        model = CostModel(
            world_size=int(values["world_size"]),
            ep_degree=int(values["ep_degree"]),
            weights={name: float(weight) for name, weight in values["weights"].items()},
            ranges=ranges,
            held_out=float(values["held_out"]),
            measured=int(values["measured"]),
        )
    except OSError as error:
        raise Refusal(
            f"{where}: {error.strerror}: name a file of `python -m benchmarks.fit_cost_model`"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            f"{where}: not a cost model ({error!r}): write one with benchmarks.fit_cost_model"
        ) from None
    if set(model.ranges) != set(QUANTITIES) or set(model.weights) != {*QUANTITIES, "update"}:
        raise Refusal(f"{where}: not a cost model of this version: write one with benchmarks.fit_cost_model")
    return model
