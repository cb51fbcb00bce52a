"""Seeded faults: copies of the package with one line changed each, and the topology matrix over each.

`make_copies` and `examine_copies` are steps of programs.py. Every copy gets processes of its own, which
import olmo_rl from it, and a `faults.json`: the faults found, by rule.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from programs import fork

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """`old` stands once in `file` and becomes `new`; `rules` of matrix_checks are those that it breaks."""

    file: str
    old: str
    new: str
    rules: frozenset[str]


MUTATIONS = {
    "local denominators": Mutation(
        file="data/collate.py",
        old="normalisers=count_normalisers(samples),",
        new="normalisers=count_normalisers([samples[i] for pack in plan.packs[rank] for i in pack]),",
        # Ranks weigh otherwise, and with them what experts have of the gradient.
        rules=frozenset({"topology", "denominators", "experts"}),
    ),
    "expert gradients times the expert-parallel degree": Mutation(
        file="policy/titan.py",
        old="w1, w2, w3 = (local_part(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))",
        new="w1, w2, w3 = (\n"
        "            local_part(w) * ep - (local_part(w) * (ep - 1)).detach()\n"
        "            for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)\n"
        "            for ep in [w.device_mesh.size() if hasattr(w, 'device_mesh') else 1]\n"
        "        )",
        rules=frozenset({"topology", "experts"}),
    ),
    "routes of tails are zero": Mutation(
        file="data/collate.py",
        old="rows.append(tail_routes(sample.id, layout=layout, topology=topology)[None])",
        new="rows.append(0 * tail_routes(sample.id, layout=layout, topology=topology)[None])",
        rules=frozenset({"loads"}),
    ),
    "balancing loss doubled under recomputation": Mutation(
        file="training/step.py",
        old="loss = loss + config.loss.router_aux_weight * balance",
        new="again = config.policy.recompute.value == 'full'\n"
        "        balance = balance + again * (balance - balance.detach())\n"
        "        loss = loss + config.loss.router_aux_weight * balance",
        rules=frozenset({"recompute"}),
    ),
    "labels shifted by one more in every further document of a pack": Mutation(
        file="policy/loss.py",
        old="rows=pack.rows_of(heads - 1),",
        new="rows=pack.rows_of(heads - 1 - pack.document_ids[heads]),",
        # Rows of other documents' tails are scored, whose routes depend on the expert-parallel degree.
        rules=frozenset({"packing", "topology", "experts"}),
    ),
}


def make_copy(directory: Path, mutation: Mutation | None) -> None:
    """The package at `directory`/olmo_rl, with the fault where there is one."""
    shutil.copytree(ROOT / "olmo_rl", directory / "olmo_rl", ignore=_being_written)
    if mutation is None:
        return
    path = directory / "olmo_rl" / mutation.file
    text = path.read_text()
    count = text.count(mutation.old)
    assert count == 1, f"{mutation.file} holds {mutation.old!r} {count} times"
    path.write_text(text.replace(mutation.old, mutation.new))


def _being_written(directory: str, names: list[str]) -> set[str]:
    """Names of a cache that another process is still writing; what is compiled already goes with the copy."""
    whole = (".py", ".pyc", ".nbi", ".nbc", ".typed", ".yaml")
    return {name for name in names if not Path(directory, name).is_dir() and not name.endswith(whole)}


def make_copies(directory: str) -> None:
    """A copy for every fault, and "none" without one."""
    for name, mutation in {"none": None, **MUTATIONS}.items():
        make_copy(Path(directory, name), mutation)


def examine_copies(directory: str) -> None:
    """Two at a time: much of a copy keeps one core busy."""
    processes = multiprocessing.get_context("fork")
    copies = sorted(Path(directory).iterdir())
    for two in (copies[i : i + 2] for i in range(0, len(copies), 2)):
        children = [processes.Process(target=examine, args=(str(copy),)) for copy in two]
        for child in children:
            child.start()
        for child in children:
            child.join()
        for copy, child in zip(two, children, strict=True):
            assert child.exitcode == 0, f"{copy.name}: the copy did not run through"


def examine(copy: str) -> None:
    """Run the cells that distinguish the faults on one copy."""
    sys.path.insert(0, copy)
    steps = ("write_faulty_inputs", "run_faulty_rank*1", "run_faulty_rank*2")
    for step in (*(f"matrix_cases:{step}" for step in steps), "mutants:judge"):
        fork(step, copy)


def judge(copy: str) -> None:
    """Leave the faults that were found, by rule."""
    import matrix_cases
    import matrix_checks

    import olmo_rl

    assert Path(olmo_rl.__file__).is_relative_to(copy), "the copy, and nothing else"
    verdicts = matrix_checks.verdicts(matrix_cases.load(Path(copy)))
    faults = {rule: verdict.faults for rule, verdict in verdicts.items()}
    Path(copy, "faults.json").write_text(json.dumps(faults))
