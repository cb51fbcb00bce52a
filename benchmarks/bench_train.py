"""Where the time of one update goes: `python -m benchmarks.bench_train`, on a GPU `... --device cuda`.

Packed, packed and padded to the budget, unpacked, with and without recomputation, on the same samples: the
recorded lengths of GRPO samples (scaled down 8 times on a CPU), and documents of 12 tokens. Each arm is a
process of its own, one after the other; its first update warms up and is not counted. Weights are published
to a local engine after every update, as in a run that generates. On CUDA every budget of `--budgets` is an
arm, in bfloat16, and reports model FLOPs utilisation over real tokens and over all that ran.

`--before WORKTREE`: only packed documents of 9 and 10 tokens, as the default experiment trains them, against
another commit: both arms alternate, one thread each, CPU seconds, median of `--pairs` pairs of updates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import WARM, compare
from olmo_rl.config import Config
from olmo_rl.data.files import write_collection
from olmo_rl.library import compose
from olmo_rl.planning.flops import training_flops
from olmo_rl.planning.synthetic import recorded_lengths
from olmo_rl.types import Collection, ExpertLayout, Sample

LENGTHS = Path(__file__).resolve().parent.parent / "tests" / "data" / "grpo_lengths.json"
CPU_SCALE = 8
DOCUMENT = 12  # tokens of a document of the second length set
UNPACKED = ("packing=none",)
FULL = "policy.recompute=full"
PHASES = ("data", "plan", "transfer", "forward", "backward", "optimizer", "publish")
DEFAULT_SAMPLES = 256  # of one rank of the default experiment
UPDATE_BOUND = 1.1  # CPU seconds of an update, another commit's over ours
BOUNDS = {"recorded": 3.0, "short": 12.0}  # real tokens/s, packed over unpacked, on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Settings shared by all arms. `scale` divides recorded lengths."""

    overrides: tuple[str, ...]
    budgets: tuple[int, ...]
    samples: int
    scale: int
    warm: int
    peak_tflops: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--updates", type=int, default=2, help="measured updates of each arm")
    parser.add_argument("--budgets", help="tokens of a pack, comma-separated (2048; cuda 8192,16384,32768)")
    parser.add_argument("--documents", type=int, help="only documents of so many tokens")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="cuda: dense bfloat16, of an H200")
    parser.add_argument("--before", type=Path, help="compare an update with that of this worktree, no more")
    parser.add_argument("--pairs", type=int, default=5, help="with --before: pairs of updates")
    arguments = parser.parse_args()
    setting = setting_of(arguments)
    if arguments.before is not None:
        print(compare_updates(arguments.before, pairs=arguments.pairs, setting=setting))
        return
    lengths = recorded_lengths(LENGTHS, case="mbu_157_percent")
    sets = {
        "recorded": np.maximum(2, lengths // setting.scale),
        "short": np.full(setting.samples, DOCUMENT),
    }
    if arguments.documents is not None:
        sets = {"short": np.full(setting.samples, arguments.documents)}
    console = Console()
    for name, values in sets.items():
        with tempfile.TemporaryDirectory() as scratch:
            found = measure_arms(
                arms_of(setting, short=name == "short"),
                setting=setting,
                lengths=values,
                updates=arguments.updates,
                scratch=Path(scratch),
            )
        title = f"documents of {values[0]} tokens" if name == "short" else "recorded lengths"
        if name == "recorded" and setting.scale > 1:
            title += f" / {setting.scale}"
        console.print(report(found, title=f"{title}, {setting.samples} samples an update, one process"))
        if arguments.device == "cpu" and arguments.documents in (None, DOCUMENT):
            console.print(verdict(found, bound=BOUNDS[name]), soft_wrap=True)


def compare_updates(before: Path, *, pairs: int, setting: Setting) -> str:
    """Updates of one rank of the default experiment: 256 samples of 9 and 10 tokens in one pack."""
    lengths = 9 + np.arange(DEFAULT_SAMPLES) % 2
    with tempfile.TemporaryDirectory() as scratch:
        rollouts = Path(scratch) / "rollouts"
        overrides = file_overrides(
            setting, rollouts=rollouts, samples=DEFAULT_SAMPLES, steps=WARM + pairs
        ) + ["packing=consecutive", "packing.max_tokens=4096"]
        write_steps(lengths, overrides=overrides, rollouts=rollouts, samples=DEFAULT_SAMPLES)
        return compare(before, work="update", overrides=overrides, sizes={}, pairs=pairs, bound=UPDATE_BOUND)


def setting_of(arguments: argparse.Namespace) -> Setting:
    """The model and the sizes for a device."""
    cuda = arguments.device == "cuda"
    budgets = arguments.budgets or ("8192,16384,32768" if cuda else "2048")
    model = (
        "model=hybrid_small",
        "model.max_seq_len=8192",
        "trainer.accelerator=gpu",
        "policy.dtype=bfloat16",
    )
    return Setting(
        overrides=model if cuda else ("model=hybrid_tiny", "model.max_seq_len=1024"),
        budgets=tuple(int(budget) for budget in budgets.split(",")),
        samples=128,
        scale=1 if cuda else CPU_SCALE,
        warm=2 if cuda else 1,
        peak_tflops=arguments.peak_tflops if cuda else None,
    )


def arms_of(setting: Setting, *, short: bool) -> dict[str, tuple[str, ...]]:
    """Overrides of every arm; short documents compare packing alone."""
    arms: dict[str, tuple[str, ...]] = {}
    for budget in setting.budgets:
        name = "packed" if len(setting.budgets) == 1 else f"packed {budget}"
        packed = ("packing=consecutive", f"packing.max_tokens={budget}")
        arms[name] = packed
        if not short:
            arms[f"{name}, padded"] = (*packed, "packing.pad_to_budget=true")
            arms[f"{name}, recomputed"] = (*packed, FULL)
    arms["unpacked"] = UNPACKED
    if not short:
        arms["unpacked, recomputed"] = (*UNPACKED, FULL)
    return arms


def measure_arms(
    arms: dict[str, tuple[str, ...]],
    *,
    setting: Setting,
    lengths: np.ndarray,
    updates: int,
    scratch: Path,
) -> dict[str, dict[str, float]]:
    """Every arm in turn on the same files."""
    rollouts = scratch / "rollouts"
    shared = file_overrides(setting, rollouts=rollouts, samples=setting.samples, steps=setting.warm + updates)
    write_steps(lengths, overrides=[*shared, *UNPACKED], rollouts=rollouts, samples=setting.samples)
    results = {}
    for arm, overrides in arms.items():
        print(f"{arm} ...", flush=True)
        config = compose([*shared, *overrides], run_dir=f"{scratch}/{arm}")
        results[arm] = measure(config, setting=setting)
    return results


def file_overrides(setting: Setting, *, rollouts: Path, samples: int, steps: int) -> list[str]:
    """Overrides of every run on the files below `rollouts`."""
    return [
        *setting.overrides,
        "rollouts=files",
        f"rollouts.path='{rollouts}'",
        f"batch.samples_per_step={samples}",
        f"trainer.max_steps={steps}",
        "scoring.check_interval=0",
        "callbacks.progress=false",
        "callbacks.pictures=false",
    ]


def write_steps(lengths: np.ndarray, *, overrides: Sequence[str], rollouts: Path, samples: int) -> None:
    """One file an update."""
    config = compose(list(overrides), run_dir=str(rollouts.parent))
    layout = config.model.expert_layout
    assert layout is not None, "both models have experts"
    for step in range(config.trainer.max_steps):
        drawn = list(samples_of(lengths, step=step, count=samples, layout=layout))
        found = Collection(samples=drawn, layout=layout, source="given lengths")
        write_collection(found, rollouts / f"collection-{step:05d}.parquet")


def samples_of(lengths: np.ndarray, *, step: int, count: int, layout: ExpertLayout) -> Iterator[Sample]:
    """`count` consecutive lengths from where the step before ended; the list repeats when it is used up."""
    rng = np.random.default_rng(step)
    for i in range(count):
        length = int(lengths[(step * count + i) % len(lengths)])
        shape = (length - 1, len(layout.routed_layers), layout.num_experts)
        yield Sample(
            id=f"step{step}-{i}",
            group=f"step{step}-group{i // 8}",
            tokens=rng.integers(0, 256, length).astype(np.int32),
            response_mask=np.arange(length) >= length // 2,
            behavior_logprobs=np.full(length, -5.5, dtype=np.float32),
            reward=float(rng.integers(0, 2)),
            routes=rng.random(shape).argsort(-1)[..., : layout.top_k].astype(np.int16),
        )


def measure(config: Config, *, setting: Setting) -> dict[str, float]:
    """Train in a fresh process; means over the updates after the warm ones, and the process's peak memory."""
    process = multiprocessing.get_context("spawn").Process(target=train_quietly, args=(config,))
    process.start()
    process.join()
    if process.exitcode != 0:
        print((Path(config.run_dir) / "out").read_text())
        raise SystemExit(process.exitcode or 1)
    from olmo_rl.running.metrics_csv import read_metrics

    run_dir = Path(config.run_dir)
    rows = read_metrics(run_dir / "metrics.csv")[setting.warm :]
    log = map(json.loads, (run_dir / "training_contract_rank0.jsonl").read_text().splitlines())
    return figures(rows, packing=[e for e in log if e["event"] == "packing"][setting.warm :]) | utilisation(
        rows, config=config, setting=setting
    )


def figures(rows: Sequence[dict[str, float]], *, packing: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means an update from metrics and from the contract log's `packing` events. Throughput counts real
    tokens; `fill` is their share of the rows' tokens.
    """
    count, seconds = len(rows), sum(row["time/update_s"] for row in rows)
    real = sum(event["real_tokens"] for event in packing)
    found = {
        "real tokens/s": real / seconds,
        "seconds an update": seconds / count,
        "forwards an update": sum(event["packs"] for event in packing) / count,
        "real share of tokens": real / sum(event["padded_tokens"] for event in packing),
        "peak memory, GiB": max(row["memory/peak_allocated_gib"] for row in rows),
    }
    parts: dict[str, Callable[[dict[str, float]], float]] = {
        "data": lambda row: row.get("time/rollout_s", 0.0) + row["time/collate_s"],
        "plan": lambda row: row["time/plan_ms"] / 1000,
        **{phase: partial(_seconds, phase=phase) for phase in PHASES[2:]},
    }
    found |= {f"{phase}, ms": 1000 * sum(map(part, rows)) / count for phase, part in parts.items()}
    inside = sum(found[f"{phase}, ms"] for phase in PHASES[2:-1])
    found["rest of the update, ms"] = 1000 * found["seconds an update"] - inside
    return found


def _seconds(row: dict[str, float], *, phase: str) -> float:
    clip = row.get("time/clip_s", 0.0) if phase == "optimizer" else 0.0  # earlier commits have no such lap
    return row[f"time/{phase}_s"] + clip


def utilisation(rows: Sequence[dict[str, float]], *, config: Config, setting: Setting) -> dict[str, float]:
    """FLOPs utilisation in percent of the peak: of real tokens, and with padding."""
    if setting.peak_tflops is None:
        return {}
    from olmo_rl.data.files import collection_paths, read_collection

    needed = 0
    for path in collection_paths(Path(str(config.rollouts.path)))[setting.warm :]:
        samples = read_collection(path, require_routes=True).samples
        scored = sum(int(sample.scored.sum()) for sample in samples)
        needed += training_flops(config.model, lengths=[len(s) for s in samples], scored=scored)
    seconds = sum(row["time/update_s"] for row in rows)
    real = needed / seconds / (setting.peak_tflops * 1e12)
    pads = sum(row["throughput/padded_tokens_per_second"] for row in rows) / sum(
        row["throughput/real_tokens_per_second"] for row in rows
    )
    return {"MFU, real tokens, %": 100 * real, "MFU, pads too, %": 100 * real * pads}


def train_quietly(config: Config) -> None:
    """One arm, without its closing table."""
    from olmo_rl.running.ranks import run_ranks

    Path(config.run_dir).mkdir(parents=True)
    with open(Path(config.run_dir) / "out", "w") as out, contextlib.redirect_stdout(out):
        run_ranks(train_and_publish, config)


def train_and_publish(config: Config) -> None:
    """Train on files, and hand weights to an engine as a run that generates does."""
    from lightning.pytorch import Callback

    from olmo_rl.collections.generation import build_local
    from recipes.train import train

    class Publisher(Callback):
        def setup(self, trainer: object, pl_module: object, stage: str) -> None:
            pl_module.publish = build_local(config).publish  # type: ignore[attr-defined]

    train(config, watchers=[Publisher()])


def report(results: dict[str, dict[str, float]], *, title: str) -> Table:
    """One column an arm; ratios of throughput are relative to the first column."""
    table = Table(title=title, title_justify="left")
    for heading in ("", *results):
        table.add_column(heading, justify="right" if heading else "left")
    unpacked = results["unpacked"]["real tokens/s"]
    ratios = [f"{found['real tokens/s'] / unpacked:.2f}x" for found in results.values()]
    table.add_row("real tokens/s over unpacked", *ratios)
    for name in next(iter(results.values())):
        digits = 2 if name.endswith(("GiB", "update", "tokens", "%")) else 0
        table.add_row(name, *(f"{found[name]:,.{digits}f}" for found in results.values()))
    return table


def verdict(results: dict[str, dict[str, float]], *, bound: float) -> str:
    """Whether packing reaches the required gain."""
    ratio = results["packed"]["real tokens/s"] / results["unpacked"]["real tokens/s"]
    return f"{'met' if ratio >= bound else 'NOT MET'}: packed is {ratio:.2f}x unpacked, at least {bound:g}x"


if __name__ == "__main__":
    main()
