"""RMSNorm, on a CPU in one pass forward and one backward where torch composes ten elementwise operators.

Refuses nothing. Compiled graphs, inference mode (where torch has one operator), other devices and dtypes
below float32 take torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_EXACT = (torch.float32, torch.float64)


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis: [..., D] -> [..., D]. `eps` is a number."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # first: no graph can ask for the mode
            return super().forward(x)
        composed = x.device.type == "cpu" and not torch.is_inference_mode_enabled()
        if composed and x.dtype in _EXACT and x.dtype is self.weight.dtype:
            return _RmsNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class _RmsNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps), u = x r and y = u w:

    dw = sum over rows of dy u        dx = r (dy w - u mean(dy w u))
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rate = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rate = rate.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rate)
        return (x * rate).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rate = ctx.saved_tensors
        unit = x * rate
        product = d_out * unit
        d_weight = product.flatten(0, -2).sum(0)
        mean = (product @ weight)[..., None] / -x.shape[-1]
        d_x = (d_out * weight).addcmul_(unit, mean).mul_(rate)
        return d_x, d_weight, None
