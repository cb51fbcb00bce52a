#!/usr/bin/env bash
# The engines of one node of a SLURM job, until one of them ends or the job does: launch/slurm.sbatch starts it where ENGINE is set.
# Engine N of a host writes $RANK_LOGS/engine-<host>-N.log. Ends with 1 where an engine ends.
set -euo pipefail
# shellcheck source=launch/common.sh
. launch/common.sh

engines=()
trap end_engines EXIT
trap 'exit 0' TERM
trap '' USR1 HUP # SLURM signals all steps ahead of the time limit: trainers save, and engines serve them until then
mkdir -p "$RANK_LOGS"
start_engines "$RANK_LOGS/engine-${SLURMD_NODENAME:-$(hostname)}"
wait -n || true
exit 1
