"""Fit seconds of an update to contract logs: `python -m benchmarks.fit_cost_model LOG... [--out FILE]`.

Reads the `expert_balance` events of `training_contract_rank*.jsonl` (of one topology; name the logs of runs
with and without balancing, so that the quantities vary). An update is as slow as its slowest rank. Left out:
the first update of each log, and updates with another scoring decision than most, which run other forwards.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from olmo_rl.planning.cost_model import CostModel, fit_costs, write_cost_model
from olmo_rl.run_directory import log_fault
from olmo_rl.types import Refusal, Topology


def read_updates(paths: Sequence[Path]) -> tuple[list[dict[str, float]], Topology]:
    """Measured updates of all runs (logs of one directory are one run) and their topology."""
    runs: dict[Path, dict[int, dict[str, Any]]] = defaultdict(dict)
    topologies: set[tuple[int, int]] = set()
    for path in paths:
        lines = _lines(path)
        if (fault := log_fault(path)) is not None:
            raise Refusal(f"{path}: {fault}")
        for number, line in enumerate(lines, start=1):
            try:
                event = json.loads(line)
                if event["event"] not in ("expert_balance", "optimizer"):
                    continue
                found = runs[path.parent].setdefault(event["step"], {"seconds": 0.0})
                if event["event"] == "optimizer":
                    found["scoring"] = event["scoring"]
                    continue
                topologies.add((event["world_size"], event["ep_degree"]))
                found["seconds"] = max(found["seconds"], event["update_s"])
                found |= {name: event[name] for name in ("expert_work", "token_work", "pair_work", "columns")}
            except (ValueError, KeyError, TypeError) as error:
                raise Refusal(f"{path}, line {number}: not a line of a contract log ({error!r})") from None
    if not topologies:
        raise Refusal("no expert_balance events in these logs: train with replay and strategy.ep_degree >= 2")
    if len(topologies) > 1:
        raise Refusal(f"logs of several topologies (ranks, EP): {sorted(topologies)}: fit each on its own")
    measured = [row for rows in runs.values() for row in list(rows.values())[1:] if "expert_work" in row]
    usual = Counter(row.get("scoring") for row in measured).most_common(1)
    kept = [row for row in measured if row.get("scoring") == usual[0][0]] if usual else []
    return kept, Topology(*topologies.pop())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None


def describe(model: CostModel) -> str:
    units = {"expert_work": "assignment", "token_work": "token", "pair_work": "pair", "columns": "column"}
    lines = [
        f"{model.measured} updates of {model.world_size} ranks, EP {model.ep_degree}",
        *(f"  {1e6 * model.weights[name]:12.4g} us a {unit}" for name, unit in units.items()),
        f"  {1e6 * model.weights['update']:12.4g} us an update",
        f"held-out error {100 * model.held_out:.1f} % (last 30 % of updates, weights of the others)",
        *(f"  measured {name}: {low:g}..{high:g}" for name, (low, high) in model.ranges.items()),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_cost_model", description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path, help="training_contract_rank*.jsonl")
    parser.add_argument("--out", type=Path, default=Path("outputs/cost_model.json"), help="file to write")
    options = parser.parse_args(arguments)
    try:
        measured, topology = read_updates(options.logs)
        model = fit_costs(measured, topology=topology)
    except Refusal as refusal:
        print("\n".join(refusal.reasons), file=sys.stderr)
        return 2
    write_cost_model(model, options.out)
    print(describe(model))
    print(f"wrote {options.out}: recipe=plan balance.cost_model={options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
