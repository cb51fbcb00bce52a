"""Log-probs of a pack's scored tokens, whole logits against chunks: `python -m benchmarks.bench_logprobs`.

One row of 2,048 tokens, the second half of every document a response, vocabulary 50,000, width 1,024: forward
and backward from hidden states to the gradients of hidden states and weight. Times are medians over rounds in
which every arm runs once, in one process. Peak memory is measured in a process for each arm: what a step took
beyond its inputs. `--device cuda` measures there, with the kernel of `policy.logprobs=liger` where it is
installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import resource
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from olmo_rl.config import LogprobKind
from olmo_rl.policy.logprobs import LogprobRequest, score_tokens

TOKENS, VOCABULARY, WIDTH = 2048, 50_000, 1024
DOCUMENT = 256  # tokens; the second half of each is its response
EQUAL_POSITIONS, RESPONSES_ONLY, NUMERICS = 1.4, 1.0, 1e-6  # what the figures have to keep
CHUNKS_HELD = 3  # chunk x vocabulary float32 tensors that a step may hold, the scratch of products included


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """The computation of log-probs, for every position or for those of responses."""

    kind: LogprobKind
    scored: bool

    @property
    def name(self) -> str:
        return f"{self.kind.value}, {'responses' if self.scored else 'every position'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--chunk", type=int, default=128, help="rows whose logits are held at a time")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, one more warms up")
    arguments = parser.parse_args()
    kinds = [LogprobKind.full, LogprobKind.chunked]
    if arguments.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        kinds.append(LogprobKind.liger)
    arms = [Arm(kind=kind, scored=scored) for scored in (False, True) for kind in kinds]
    memory = {arm: extra_memory(arm, chunk=arguments.chunk, device=arguments.device) for arm in arms}
    seconds, differences = measure(
        arms, chunk=arguments.chunk, device=arguments.device, rounds=arguments.rounds
    )
    console = Console()
    console.print(report(seconds, memory=memory, differences=differences))
    for line in verdicts(seconds, memory=memory, differences=differences, chunk=arguments.chunk):
        console.print(line, soft_wrap=True)


def inputs(arm: Arm, *, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [S, D] and weight [V, D] that want gradients, targets int64 [S]; equal for all kinds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(WIDTH**-0.5)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    if arm.scored:
        kept = torch.arange(TOKENS) % DOCUMENT >= DOCUMENT // 2
        x, targets = x[kept], targets[kept]
    return x.to(device).requires_grad_(True), weight.to(device).requires_grad_(True), targets.to(device)


def step(arm: Arm, x: Tensor, weight: Tensor, targets: Tensor, *, chunk: int) -> list[Tensor]:
    """Log-probs, and the gradients of a weighted sum of them."""
    request = LogprobRequest(targets=targets, kind=arm.kind, chunk=chunk)
    logprobs = score_tokens(x, weight=weight, request=request).logprobs
    loss = (torch.linspace(-1.0, 1.0, len(x), device=x.device) * logprobs).sum()
    return [logprobs.detach(), *torch.autograd.grad(loss, [x, weight])]


def measure(
    arms: list[Arm], *, chunk: int, device: str, rounds: int
) -> tuple[dict[Arm, float], dict[Arm, float]]:
    """Median seconds of every arm; the largest relative distance of its results from those of `full`."""
    given = {arm: inputs(arm, device=device) for arm in arms}
    differences: dict[Arm, float] = {}
    whole: list[Tensor] = []
    for arm in arms:  # whole logits come first; this round also warms up
        results = step(arm, *given[arm], chunk=chunk)
        whole = results if arm.kind is LogprobKind.full else whole
        differences[arm] = max(float((a - b).norm() / b.norm()) for a, b in zip(results, whole, strict=True))
    del results, whole
    taken: dict[Arm, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            started = time.perf_counter()
            results = step(arm, *given[arm], chunk=chunk)
            if device == "cuda":
                torch.cuda.synchronize()
            taken[arm].append(time.perf_counter() - started)
            del results
    return {arm: statistics.median(values) for arm, values in taken.items()}, differences


def extra_memory(arm: Arm, *, chunk: int, device: str) -> float:
    """GiB that one step took beyond its inputs and the gradients that it returns, in a fresh process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_one_step, args=(arm, chunk, device, there))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(process.exitcode or 1)
    return float(here.recv())


def _one_step(arm: Arm, chunk: int, device: str, found: Connection) -> None:
    tensors = inputs(arm, device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = step(arm, *tensors, chunk=chunk)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        results = step(arm, *tensors, chunk=chunk)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - pages * resource.getpagesize()
    returned = sum(tensor.numel() * tensor.element_size() for tensor in results)
    found.send((peak - returned) / 2**30)


def report(seconds: dict[Arm, float], *, memory: dict[Arm, float], differences: dict[Arm, float]) -> Table:
    title = f"{TOKENS:,} tokens, half of them response, vocabulary {VOCABULARY:,}, width {WIDTH:,}, float32"
    table = Table(title=title, title_justify="left")
    for heading in ("log-probs", "seconds", "/ full", "memory, GiB", "difference"):
        table.add_column(heading, justify="left" if heading == "log-probs" else "right")
    for arm, value in seconds.items():
        whole = seconds[Arm(kind=LogprobKind.full, scored=arm.scored)]
        table.add_row(
            arm.name, f"{value:.2f}", f"{value / whole:.2f}x", f"{memory[arm]:.2f}", f"{differences[arm]:.1e}"
        )
    return table


def verdicts(
    seconds: dict[Arm, float], *, memory: dict[Arm, float], differences: dict[Arm, float], chunk: int
) -> list[str]:
    """One line for every figure that has to hold."""
    chunked = {scored: Arm(kind=LogprobKind.chunked, scored=scored) for scored in (False, True)}
    full = {scored: Arm(kind=LogprobKind.full, scored=scored) for scored in (False, True)}
    held = max(memory[arm] for arm in chunked.values()) * 2**30 / (4 * chunk * VOCABULARY)
    equal = max(seconds[chunked[scored]] / seconds[full[scored]] for scored in (False, True))
    figures = (
        (f"memory, in logits of one chunk of {chunk} rows", held, CHUNKS_HELD),
        ("time, chunked over whole logits at equal positions", equal, EQUAL_POSITIONS),
        (
            "time, chunked responses over whole logits of every position",
            seconds[chunked[True]] / seconds[full[False]],
            RESPONSES_ONLY,
        ),
        ("difference from whole logits", max(differences[arm] for arm in chunked.values()), NUMERICS),
    )
    return [
        f"{'met' if value <= bound else 'NOT MET'}: {what}: {value:.3g}, at most {bound:g}"
        for what, value, bound in figures
    ]


if __name__ == "__main__":
    main()
