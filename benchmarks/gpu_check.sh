#!/usr/bin/env bash
# Kernels, packed training, recompiles and log-probs on one GPU, in under 6 minutes; needs torch, numpy and triton.
# Everything else (flash-attn, flash-linear-attention, torchtitan with lightning and hydra) is checked where it is
# installed and named where it is not. Exit code 0: nothing failed; 1: something did; 3: no CUDA device.
#   benchmarks/gpu_check.sh [python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=.
exec timeout 360 "${1:-python3}" tests/gpu_checks.py
