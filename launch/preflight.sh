#!/usr/bin/env bash
# Checks all nodes before a run: devices, drivers, memory, collectives, disk, clocks. Prints a table; exits with 2 and names node
# and fix where a run would fail. Arguments go to olmo_rl.running.node_check (--help).
#   launch/preflight.sh                                                 this machine
#   NNODES=2 NPROC_PER_NODE=8 MASTER_ADDR=node0 launch/preflight.sh     on every node, as for launch/torchrun.sh
#   sbatch --nodes=2 launch/preflight.sh                                nodes of SLURM, or inside salloc without sbatch
#SBATCH --job-name=preflight
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=00:15:00
#SBATCH --output=%x-%j.log
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -n "${SLURM_JOB_ID:-}" ]; then # SLURM runs a copy of this file
    root=$PWD
fi
if [ ! -f "$root/launch/common.sh" ]; then
    echo "launch: $root is not the project's directory: submit from there, or give sbatch --chdir" >&2
    exit 2
fi
# shellcheck source=launch/common.sh
. "$root/launch/common.sh"
find_python "$root"
check=("${python[@]}" -m olmo_rl.running.node_check --free-gib "${FREE_GIB:-20}" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

if [ -n "${SLURM_JOB_ID:-}" ]; then
    read -ra options <<<"${SRUN_OPTIONS:-}"
    exec srun --kill-on-bad-exit=0 "${options[@]}" "${check[@]}"
fi
if [ -z "${NPROC_PER_NODE:-}" ]; then
    NPROC_PER_NODE=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
    NPROC_PER_NODE=$((NPROC_PER_NODE > 0 ? NPROC_PER_NODE : 2))
fi
if [ "${NNODES:-1}" -eq 1 ]; then
    endpoint=localhost:0
else
    endpoint="${MASTER_ADDR:?MASTER_ADDR is the name of the first node}:${MASTER_PORT:-29500}"
fi
exec "${python[@]}" -m olmo_rl.running.torchrun --rdzv-backend c10d --rdzv-endpoint "$endpoint" \
    --rdzv-id "${RUN_ID:-preflight}" --nnodes "${NNODES:-1}" --nproc-per-node "$NPROC_PER_NODE" --max-restarts 0 \
    --no-python "${check[@]}"
