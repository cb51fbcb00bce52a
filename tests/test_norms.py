"""RMSNorm in one pass against torch's operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from olmo_rl.policy.norms import RMSNorm


def norm_of(kind: type[nn.RMSNorm], width: int, *, dtype: torch.dtype) -> nn.RMSNorm:
    norm = kind(width, eps=1e-6, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, width))
    return norm


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 8)])
def test_one_pass_equals_torch_in_values_and_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, bound: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, d_out = torch.randn(2, *shape, generator=generator, dtype=dtype).unbind(0)
    x[0] *= 1e-4  # where eps counts

    def run(kind: type[nn.RMSNorm]) -> list[Tensor]:
        norm, leaf = norm_of(kind, shape[-1], dtype=dtype), x.clone().requires_grad_()
        out = norm(leaf)
        return [out, *torch.autograd.grad(out, (leaf, norm.weight), d_out)]

    ours, theirs = run(RMSNorm), run(nn.RMSNorm)
    assert type(ours[0].grad_fn).__name__ == "_RmsNormBackward"
    for a, b in zip(ours, theirs, strict=True):
        assert ((a - b).abs() / b.abs().max()).max() < bound


def test_low_precision_is_torchs_own() -> None:
    norm = norm_of(RMSNorm, 8, dtype=torch.bfloat16)
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(norm(x), norm_of(nn.RMSNorm, 8, dtype=torch.bfloat16)(x))
    assert type(norm(x).grad_fn).__name__ != "_RmsNormBackward"
