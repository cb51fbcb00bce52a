"""What only a CUDA device can show; see gpu_checks.py for the checks and their tolerances."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import CHECKS, Unavailable

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: run benchmarks/gpu_check.sh on a machine that has one")
    try:
        print(CHECKS[name]())
    except Unavailable as reason:
        pytest.skip(str(reason))
