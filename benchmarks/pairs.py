"""Two source trees against each other: the same work in alternation, in CPU seconds of one thread.

`python benchmarks/pairs.py update|generation job.json run_dir` is one arm: it imports `olmo_rl` from
PYTHONPATH, and for every line on its standard input does the work once and answers with the CPU seconds that
it took. An arm uses only what both trees have: `compose`, `train`, `LocalEngine`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent.parent
WARM = 2  # rounds of each arm that are not counted
PROMPTS, GROUP = 32, 8  # what one rank of the default experiment generates at a time


class Arm:
    """One arm in a process of its own; a context manager that ends it."""

    def __init__(self, tree: Path, *, work: str, job: Mapping[str, Any], scratch: Path) -> None:
        if not (tree / "olmo_rl" / "__init__.py").is_file():
            raise SystemExit(f"--before {tree}: holds no olmo_rl: name a worktree of this repository")
        scratch.mkdir(parents=True)
        (scratch / "job.json").write_text(json.dumps(job))
        self._log = scratch / "out"
        self._process = subprocess.Popen(
            # -P: neither the script's folder nor the present one comes before PYTHONPATH.
            [sys.executable, "-P", __file__, work, str(scratch / "job.json"), str(scratch / "run")],
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )
        self._ask()
        if (found := Path(self._answer())) != tree / "olmo_rl":
            raise SystemExit(f"{work}: imported {found}, not {tree / 'olmo_rl'}")

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def seconds(self) -> float:
        """Do the work once: its CPU seconds."""
        self._ask()
        return float(self._answer())

    def _ask(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(self._log.read_text()) from None

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(self._log.read_text())
        return line.strip()


def compare(
    before: Path, *, work: str, overrides: Sequence[str], sizes: Mapping[str, int], pairs: int, bound: float
) -> str:
    """Alternate both arms: in one line the median of `before / now` over the pairs, and whether it reaches
    `bound`. `sizes`: of generation, `prompt` and `new` tokens.
    """
    job = {"overrides": list(overrides), "sizes": dict(sizes)}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = {"before": before.resolve(), "now": HERE}
        arms = [
            stack.enter_context(Arm(tree, work=work, job=job, scratch=scratch / name))
            for name, tree in trees.items()
        ]
        for _ in range(WARM):
            for arm in arms:
                arm.seconds()
        found = []
        for pair in range(pairs):
            order = arms if pair % 2 == 0 else arms[::-1]
            taken = {arm: arm.seconds() for arm in order}
            found.append((taken[arms[0]], taken[arms[1]]))
    ratio = statistics.median(first / second for first, second in found)
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    return (
        f"{'met' if ratio >= bound else 'NOT MET'}: {work} {ratio:.2f}x, at least {bound:g}x (CPU seconds, "
        f"median of {pairs} pairs: before {medians[0]:.3f}, now {medians[1]:.3f})"
    )


class Turns:
    """An arm's side of the conversation: standard input asks, `answers` is what was standard output."""

    def __init__(self, answers: TextIO) -> None:
        self._answers, self._started = answers, 0.0

    def wait(self) -> None:
        """Until the next request; whoever asked has gone when there is none."""
        if not sys.stdin.readline():
            os._exit(0)
        self._started = time.process_time()

    def done(self) -> None:
        """Answer with the CPU seconds since the request."""
        print(time.process_time() - self._started, file=self._answers, flush=True)


def update_arm(job: dict[str, Any], run_dir: str, turns: Turns) -> None:
    """One update a turn, as `train` makes it."""
    from lightning.pytorch import Callback

    from olmo_rl.library import compose
    from olmo_rl.running.ranks import run_ranks
    from recipes.train import train

    class Turn(Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            turns.wait()

        def on_train_batch_end(self, *arguments: Any) -> None:
            turns.done()

    Path(run_dir).mkdir()
    run_ranks(lambda config: train(config, watchers=[Turn()]), compose(job["overrides"], run_dir=run_dir))


def generation_arm(job: dict[str, Any], run_dir: str, turns: Turns) -> None:
    """One batch of generated groups a turn."""
    import numpy as np
    import torch

    from olmo_rl.library import compose
    from olmo_rl.policy.engine import LocalEngine, Request
    from olmo_rl.policy.hybrid import HybridDecoder
    from olmo_rl.running.rank_process import keep_freed_memory

    keep_freed_memory()
    sizes, config = job["sizes"], compose(job["overrides"], run_dir=run_dir)
    decoder = HybridDecoder(config.model, attention="reference")
    decoder.init_weights(0)
    engine = LocalEngine(config.model, device=torch.device("cpu"))
    engine.publish(dict(decoder.named_parameters()), 0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 256, sizes["prompt"]).tolist() for _ in range(PROMPTS)]
    requests = [Request(id=f"{i}-{j}", tokens=prompts[i]) for i in range(PROMPTS) for j in range(GROUP)]
    while True:
        turns.wait()
        engine.generate(requests, max_new_tokens=sizes["new"], seed=1)
        turns.done()


def main() -> None:
    work, job, run_dir = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # everything that the program prints goes to the log
    import olmo_rl

    turns = Turns(answers)
    turns.wait()
    print(Path(olmo_rl.__file__).parent, file=answers, flush=True)
    entry = {"update": update_arm, "generation": generation_arm}[work]
    entry(json.loads(Path(job).read_text()), run_dir, turns)


if __name__ == "__main__":
    main()
