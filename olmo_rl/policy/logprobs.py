"""The output head and the log-probs of scored tokens: whole logits, chunk by chunk, or a fused kernel.

Owns what happens between the last hidden state and log-probs. `chunked` never holds more than chunk x V
logits at a time, forward or backward. It walks over slices of the vocabulary, all scored rows at once, and
keeps one log-sum-exp a row; the backward computes logits again. So the weight is read once a pass, and every
row of its gradient is one matrix product: nothing is summed in bfloat16, no second buffer has its size.

Refused: `liger` without a liger-kernel that weights gradients token by token, or asked for entropies.

Shapes: S scored slots of a pack, D model width, V vocabulary. All sums are in float32 or, for float64, in
float64.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from olmo_rl.config import LogprobKind
from olmo_rl.types import Refusal

# The first liger-kernel whose unreduced loss takes one gradient a token; older ones scale their sum.
_LIGER = (0, 8, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRequest:
    """Asks the head for log-probs of `targets` int64 [S] instead of logits. `chunk`: rows whose logits are
    held at a time, for `chunked`.
    """

    targets: Tensor
    kind: LogprobKind = LogprobKind.chunked
    chunk: int = 512
    entropy: bool = False
    temperature: float = 1.0


class Logprobs(NamedTuple):
    """`logprobs` [S] of the targets; `entropies` [S] of the next-token distributions in nats, where asked."""

    logprobs: Tensor
    entropies: Tensor | None


class Head(nn.Linear):
    """The output projection. Log-probs are computed inside its forward, because only there FSDP holds the
    whole weight.
    """

    def __init__(self, dim: int, *, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, x: Tensor, request: LogprobRequest | None = None) -> Tensor | Logprobs:  # type: ignore[override]
        """`x` [S, D] -> logits [S, V], or log-probs where there is a request."""
        if request is None:
            return F.linear(x, self.weight)
        return score_tokens(x, weight=self.weight, request=request)


def score_tokens(x: Tensor, *, weight: Tensor, request: LogprobRequest) -> Logprobs:
    """Hidden states `x` [S, D] and `weight` [V, D] -> log-probs and entropies, differentiable in both."""
    if request.kind is LogprobKind.full:
        logits = F.linear(x, weight)
        return Logprobs(
            token_logprobs(logits, targets=request.targets, temperature=request.temperature),
            token_entropies(logits, temperature=request.temperature) if request.entropy else None,
        )
    if request.kind is LogprobKind.liger and len(x):
        return Logprobs(_liger_logprobs(x, weight=weight, request=request), None)
    logprobs, entropies = _Chunked.apply(
        x, weight, request.targets, request.chunk, request.temperature, request.entropy
    )
    return Logprobs(logprobs, entropies if request.entropy else None)


def token_logprobs(logits: Tensor, *, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """[S, V] logits, [S] token ids -> [S] log-probs, in float32 (float64 stays)."""
    logits = _at_temperature(logits, temperature)
    return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)


def token_entropies(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """[S, V] logits -> [S] entropies of the next-token distribution in nats, in float32 (float64 stays)."""
    logits = _at_temperature(logits, temperature)
    probabilities = logits.softmax(-1)
    # A token of probability 0 contributes 0 even where its logit is -inf.
    expected = torch.where(probabilities > 0, probabilities * logits, torch.zeros_like(logits)).sum(-1)
    return logits.logsumexp(-1) - expected


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits / temperature


class _Chunked(torch.autograd.Function):
    """Log-probs and entropies [S] from hidden states; see the top of this file."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        chosen = x.new_zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        normaliser = torch.full_like(chosen, -torch.inf)  # log-sum-exp of the logits so far
        mean = torch.zeros_like(chosen)  # of the logits so far, under their softmax
        slices = _Slices(x, weight=weight, chunk=chunk, temperature=temperature)
        for tokens in slices:
            logits = slices.logits(tokens)
            inside, places = _find(targets, tokens)
            chosen += torch.where(inside, logits.gather(1, places[:, None])[:, 0], 0)
            highest = logits.amax(1)
            powers = logits.sub_(highest[:, None])
            if entropy:
                logs = _finite(powers)
                powers = logs.exp()
                total = powers.sum(1)
                mean_here = powers.mul_(logs).sum(1) / total + highest
            else:
                total = powers.exp_().sum(1)
            here = total.log() + highest
            normaliser = torch.logaddexp(normaliser, here)
            if entropy:
                mean += (here - normaliser).exp() * (mean_here - mean)
        entropies = normaliser - mean if entropy else mean
        ctx.save_for_backward(x, weight, targets, normaliser, entropies)
        ctx.chunk, ctx.temperature, ctx.entropy = chunk, temperature, entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return chosen - normaliser, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        """With p the probabilities, l their logarithms, H the entropy, z the logits over the temperature:
        d logprob / dz = onehot(target) - p, dH / dz = -p (l + H).
        """
        x, weight, targets, normaliser, entropies = ctx.saved_tensors
        by_logprob, by_entropy = grad_logprobs / ctx.temperature, grad_entropies / ctx.temperature
        grad_x = torch.zeros_like(x, dtype=normaliser.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:  # every slice is written once, where there are rows
            grad_weight = torch.empty_like(weight) if len(x) else torch.zeros_like(weight)
        slices = _Slices(x, weight=weight, chunk=ctx.chunk, temperature=ctx.temperature)
        for tokens in slices:
            grad = slices.logits(tokens).sub_(normaliser[:, None])
            if ctx.entropy:
                probabilities = _finite(grad).exp()
                grad.add_(entropies[:, None]).mul_(by_entropy[:, None]).add_(by_logprob[:, None])
                grad.mul_(probabilities).neg_()
            else:
                grad.exp_().mul_(-by_logprob[:, None])
            inside, places = _find(targets, tokens)
            grad.scatter_add_(1, places[:, None], torch.where(inside, by_logprob, 0)[:, None])
            grad = grad.to(weight.dtype)
            if grad_weight is not None:
                torch.mm(grad.T, x, out=grad_weight[tokens])
            if grad_x is not None:
                _add_product(grad_x, grad, weight[tokens])
        return (None if grad_x is None else grad_x.to(x.dtype)), grad_weight, None, None, None, None


class _Slices:
    """Walks over slices of the vocabulary that are as wide as S x slice <= chunk x V allows; wide ones are
    whole multiples of 64. One buffer holds the logits of one slice after another.
    """

    def __init__(self, x: Tensor, *, weight: Tensor, chunk: int, temperature: float) -> None:
        self._x, self._weight, self._temperature = x, weight, temperature
        self._width = min(len(weight), max(1, chunk * len(weight) // max(1, len(x))))
        if 64 <= self._width < len(weight):
            self._width -= self._width % 64
        self._buffer = x.new_empty(len(x) * self._width)

    def __iter__(self) -> Iterator[slice]:
        size = len(self._weight) if len(self._x) else 0  # no rows, no logits
        for start in range(0, size, self._width):
            yield slice(start, min(start + self._width, size))

    def logits(self, tokens: slice) -> Tensor:
        """[S, slice] over the temperature, at least float32; free to be written, gone with the next call."""
        weight = self._weight[tokens]
        out = self._buffer[: len(self._x) * len(weight)].view(len(self._x), len(weight))
        logits = torch.mm(self._x, weight.T, out=out)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)


def _find(targets: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """bool [S]: targets in the slice; int64 [S]: their columns, any column for the others."""
    inside = (targets >= tokens.start) & (targets < tokens.stop)
    return inside, (targets - tokens.start).clamp(0, tokens.stop - tokens.start - 1)


def _finite(logs: Tensor) -> Tensor:
    """-inf becomes finite, in place: times a probability of 0 it then is 0."""
    return logs.clamp_(min=torch.finfo(logs.dtype).min)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total` += `a` @ `b`, summed in the dtype of `total`."""
    if total.dtype is a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def check_logprobs(kind: LogprobKind) -> None:
    """Refuse a kernel that is not installed, before weights load."""
    if kind is not LogprobKind.liger:
        return
    try:
        version = importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < _LIGER:
        raise Refusal(
            f"policy.logprobs=liger: needs liger-kernel {'.'.join(map(str, _LIGER))} or newer, found "
            f"{'none' if version == '0' else version}: pip install -c constraints.txt -e '.[liger]', or "
            "choose policy.logprobs=chunked"
        )


def _liger_logprobs(x: Tensor, *, weight: Tensor, request: LogprobRequest) -> Tensor:
    """[S]; the gradient of the weight is summed in float32."""
    if request.entropy:
        raise Refusal("policy.logprobs=liger: gives no entropies: choose policy.logprobs=chunked")
    cross_entropy = importlib.import_module("liger_kernel.transformers.functional")
    scaled = x if request.temperature == 1.0 else x / request.temperature
    loss = cross_entropy.liger_fused_linear_cross_entropy(
        input=scaled, weight=weight, target=request.targets, reduction="none", accum_dtype=torch.float32
    )
    return -loss.float()
