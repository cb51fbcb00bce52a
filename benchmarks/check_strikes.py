"""Does a run that is struck anywhere lose anything? `python -m benchmarks.check_strikes --seed 1`

Small runs of four kinds (GRPO with a warm start, supervised, rollouts, GRPO on four ranks with the planner)
are struck, 40 times by default: a signal to a rank, to the launcher or to all at a file operation anywhere in
the run; a full disk from some operation on; a file of the run directory cut, or a bit of a checkpoint or of
the cache flipped; a second start beside the first. Then the same command runs again with `ckpt_path=auto`.
It must end with the weights, the optimizer's state and the rows of metrics.csv (or the collections) of a run
that was left alone, bit for bit, or be refused by name with nothing lost: the complete checkpoints are there.

One process imports everything and forks each run; ranks are started as torchrun starts them. What strikes is
an event of the interpreter (`sys.addaudithook`): this file is opened, that one renamed. Ends with 1 where a
strike ends otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.struck_runs import ENVIRONMENT, KINDS, SIGNALS, Runs, Strike, import_everything, whole

STRIKES = ("signal", "signal", "signal", "signal", "full disk", "torn", "flipped", "twice")


def main() -> None:
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.check_strikes", *sys.argv[1:]])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="of the strikes; fresh where missing")
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    console, place = Console(), Path(tempfile.mkdtemp(prefix="check_strikes-"))
    console.print(f"seed {seed}, {arguments.rounds} strikes", soft_wrap=True)
    passed = strike_runs(
        place, rounds=arguments.rounds, seed=seed, kinds=arguments.kinds.split(","), report=console.print
    )
    console.print(f"{passed} of {arguments.rounds} lost nothing, seed {seed}")
    if passed < arguments.rounds:
        console.print(f"what the runs left is in {place}", soft_wrap=True)
        sys.exit(1)
    shutil.rmtree(place)


def strike_runs(
    place: Path, *, rounds: int, seed: int, kinds: Sequence[str], report: Callable[[str], object]
) -> int:
    """Run every kind straight through, then strike; the number of strikes that lost nothing."""
    import_everything()
    straight = {kind: Runs(place / f"straight-{kind}", kind=kind) for kind in kinds}
    counts: dict[str, list[int]] = {}
    for kind, run in straight.items():
        began = time.monotonic()
        code = run.start(counting=True)
        assert code == 0, f"{kind} straight through ended with {code}: {run.log}"
        counts[kind] = [int(path.read_text()) for path in sorted(run.place.glob("operations*"))]
        per_rank = ", ".join(map(str, counts[kind]))
        report(f"{kind}: {per_rank} file operations of the ranks, {time.monotonic() - began:.1f} s")
    passed = 0
    for number, strike in enumerate(strikes(rounds, seed=seed, kinds=kinds, counts=counts), start=1):
        run = Runs(place / f"round{number}", kind=strike.kind)
        ended, fault = struck(run, strike, straight=straight[strike.kind])
        passed += fault is None
        report(f"{number:>3}  {strike} | {ended} | {fault or 'nothing lost'}")
        if fault is None:
            shutil.rmtree(run.place)
    return passed


def strikes(rounds: int, *, seed: int, kinds: Sequence[str], counts: dict[str, list[int]]) -> list[Strike]:
    pick, found = random.Random(seed), []
    for number in range(rounds):
        kind = kinds[number % len(kinds)]
        ranks, how = len(counts[kind]), pick.choice(STRIKES)
        rank = pick.randrange(ranks) if how == "signal" else 0
        found.append(
            Strike(
                kind=kind,
                how=how,
                operation=pick.randint(1, counts[kind][rank]),
                rank=rank,
                whom=pick.choice(("rank", "launcher", "all")) if ranks > 1 else "rank",
                name=pick.choice(SIGNALS),
                draw=pick.random(),
            )
        )
    return found


def struck(run: Runs, strike: Strike, *, straight: Runs) -> tuple[str, str | None]:
    """How the struck run and those after it ended, and what was lost; None: nothing."""
    codes = [run.start(strike=strike)]
    if not (run.place / "struck").is_file():
        return text_of(codes), f"the strike never came: {run.log}"
    if strike.how in ("torn", "flipped"):
        damage(run, strike)
    before = {path.name for path in whole(run)}
    for _ in range(3):
        if codes[-1] == 0 and len(codes) > 1:
            break
        codes.append(run.start(resume=True))
        lost = {name for name in before if step(name) > newest(run)}
        if lost:
            return text_of(codes), f"{sorted(lost)} are gone"
    if codes[-1] == 0:
        return text_of(codes), run.difference(straight)
    refused = codes[-1] == 2 and "refused" in run.log.read_text()
    if refused and strike.how in ("torn", "flipped") and {path.name for path in whole(run)} == before:
        return text_of(codes), None
    return text_of(codes), f"ended with {codes[-1]}: {run.log}"


def step(name: str) -> int:
    return int(name.rpartition("-")[2])


def newest(run: Runs) -> int:
    return max((step(path.name) for path in whole(run)), default=-1)


def text_of(codes: Sequence[int]) -> str:
    return " then ".join(map(str, codes))


def damage(run: Runs, strike: Strike) -> None:
    """Cut a file that the run wrote, or flip one bit of a checkpoint or of the cache."""
    pick = random.Random(strike.draw)
    files = [path for path in run.place.rglob("*") if path.is_file() and path.stat().st_size > 0]
    kept = [
        path for path in files if "run" in path.parts and ".hydra" not in path.parts or "cache" in path.parts
    ]
    if strike.how == "flipped":  # of what has checksums; a digit of a text has none
        kept = [path for path in kept if path.suffix in (".distcp", ".pt", ".safetensors", ".metadata")]
    if not kept:
        return
    path = pick.choice(sorted(kept))
    data = bytearray(path.read_bytes())
    if strike.how == "torn":
        del data[pick.randrange(len(data)) :]
    else:
        data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    path.write_bytes(bytes(data))
    with run.log.open("a") as log:
        log.write(f"{strike.how}: {path}\n")


if __name__ == "__main__":
    main()
