"""Creates a routed model from a dense Llama, with experts copied from its MLPs. No GPU, one process.

Before the copies are perturbed, the logits of both models are compared.
"""

from __future__ import annotations

from pathlib import Path

from olmo_rl.config import Config
from olmo_rl.policy.upcycling import WEIGHTS, write_upcycled


def run(config: Config) -> None:
    """Write weights, report and tokenizer into the run directory."""
    directory = Path(config.run_dir) / "upcycled"
    report = write_upcycled(config, directory=directory)
    print("\n".join(report.lines()))
    tokenizer = f" model.tokenizer={directory}" if config.model.tokenizer != "bytes" else ""
    print(f"start from it: upcycle.dense=null init_from={directory / WEIGHTS}{tokenizer}")
