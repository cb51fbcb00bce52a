#!/usr/bin/env bash
# Runs the command of one rank: rank 0 keeps the terminal, the others write to $RANK_LOGS/rank-<n>.log.
set -euo pipefail
rank=${RANK:-${SLURM_PROCID:-0}}
if ((rank > 0)) && [ -n "${RANK_LOGS:-}" ]; then
    mkdir -p "$RANK_LOGS"
    exec >>"$RANK_LOGS/rank-$rank.log" 2>&1
fi
exec "$@"
