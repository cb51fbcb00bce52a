"""reward.png: what a run learned, drawn from its own metrics.csv and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from olmo_rl.running.metrics_csv import read_metrics

SMOOTHING = 10  # updates


def draw_reward(metrics: Path, *, evaluations: Mapping[int, float | None], path: Path, title: str) -> None:
    """Mean reward of every collection, its running mean, and greedy held-out accuracy over updates."""
    from matplotlib.figure import Figure

    rows = [row for row in read_metrics(metrics) if "reward/mean" in row]
    steps = np.array([row["step"] for row in rows])
    rewards = np.array([row["reward/mean"] for row in rows])
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="mean reward of the sampled responses")
    if len(rewards) >= SMOOTHING:
        smooth = np.convolve(rewards, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
        axes.plot(
            steps[SMOOTHING - 1 :], smooth, color="#1f6fb4", linewidth=2, label=f"mean of {SMOOTHING} updates"
        )
    points = sorted((step, value) for step, value in evaluations.items() if value is not None)
    if points:
        axes.plot(
            [step for step, _ in points],
            [accuracy for _, accuracy in points],
            color="#d6604d",
            marker="o",
            linewidth=1.5,
            label="greedy accuracy, held-out problems",
        )
    shown = [0.0, 1.0, *rewards.tolist(), *(value for _, value in points)]
    margin = 0.02 * (max(shown) - min(shown))
    bottom = min(shown) - margin if min(shown) < 0 else 0.0
    axes.set(xlabel="update", ylabel="reward, accuracy", title=title, ylim=(bottom, max(shown) + margin))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)
