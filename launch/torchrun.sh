#!/usr/bin/env bash
# The ranks of one node, or of this node of several, under torchrun. Arguments go to train.py:
#   launch/torchrun.sh +experiment=packed_moe
#   NPROC_PER_NODE=8 launch/torchrun.sh +experiment=packed_moe_gpu
#   NNODES=2 NPROC_PER_NODE=8 MASTER_ADDR=node0 launch/torchrun.sh +experiment=packed_moe_gpu trainer.num_nodes=2
# The last one runs on every node. The numbers must be those of trainer.devices and trainer.num_nodes.
# SIGUSR1, SIGTERM, SIGHUP and SIGINT reach every rank of this node once; the exit code is that of the ranks.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
. "$root/launch/common.sh"
find_python "$root"
ranks=${NPROC_PER_NODE:-2}
nodes=${NNODES:-1}

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    threads=$(($(nproc) / ranks))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

if [ "$nodes" -eq 1 ]; then
    rendezvous=(--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id "${RUN_ID:-$$}")
else
    endpoint="${MASTER_ADDR:?MASTER_ADDR is the name of the first node}:${MASTER_PORT:-29500}"
    rendezvous=(--rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${RUN_ID:-olmo_rl}")
fi
export RANK_LOGS=${RANK_LOGS:-$PWD/outputs/logs/torchrun-$(date +%Y%m%d-%H%M%S)-$$}

exec "${python[@]}" -m olmo_rl.running.torchrun "${rendezvous[@]}" --nnodes "$nodes" --nproc-per-node "$ranks" \
    --max-restarts 0 --no-python "$root/launch/rank.sh" "${python[@]}" "$root/train.py" "$@"
