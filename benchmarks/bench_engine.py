"""The local engine against another commit: `python -m benchmarks.bench_engine --before WORKTREE`.

256 sequences of the tiny hybrid model, 32 prompts times 8, as one rank of the default experiment generates
them. Both arms alternate in processes of their own, one thread each; CPU seconds, median of the pairs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pairs import compare

BOUND = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a worktree of the commit to compare with")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=6, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=4, help="tokens of a response")
    arguments = parser.parse_args()
    longest = arguments.prompt + arguments.new
    verdict = compare(
        arguments.before,
        work="generation",
        overrides=[
            "model=hybrid_tiny",
            f"model.max_seq_len={longest}",
            f"rollouts.max_new_tokens={arguments.new}",
        ],
        sizes={"prompt": arguments.prompt, "new": arguments.new},
        pairs=arguments.pairs,
        bound=BOUND,
    )
    print(verdict)


if __name__ == "__main__":
    main()
