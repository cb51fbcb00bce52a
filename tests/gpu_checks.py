"""What only a CUDA device can show: kernels against references, packed against unpacked training, recompiles.

Runs with torch, numpy and triton alone; checks that need more are skipped with their reason (`Unavailable`).
Tests in test_gpu.py call these functions; benchmarks/gpu_check.sh runs this file without pytest and prints a
table. Every check returns one line of figures, or raises AssertionError.

Tolerances. Kernels compute in bfloat16 and are held against the reference in float32 on the same bfloat16
inputs, by the root mean square of the difference relative to that of the reference: 1e-2 for outputs, 2e-2
for gradients. Isolation is exact: rows of other documents differ by 0.0. Float32 packed against unpacked:
1e-4 relative to the largest value (other matrix shapes, TF32 off); with bfloat16 kernels 5e-2 of the root
mean square.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from olmo_rl.backends import ATTENTION_BACKENDS, importable
from olmo_rl.config import LogprobKind, LossConfig, ModelConfig
from olmo_rl.data.collate import collate, count_normalisers
from olmo_rl.data.packs import Pack, PackContext, RouteMode
from olmo_rl.policy.attention import DocumentAttention, document_attention
from olmo_rl.policy.compiling import GraphLog, compile_regions, region
from olmo_rl.policy.delta_rule import chunk_table, kda_chunked
from olmo_rl.policy.kda import KimiDeltaAttention, gated_delta_rule, short_convolution, tap_table
from olmo_rl.policy.kernels import fla_convolution
from olmo_rl.policy.logprobs import Head, LogprobRequest, score_tokens
from olmo_rl.policy.loss import policy_loss, scored_slots
from olmo_rl.types import Sample, Topology

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (5, 1, 2, 500, 17, 1024, 33, 64, 65, 128)
OUTPUT, GRADIENT = 1e-2, 2e-2


class Unavailable(Exception):
    """This machine lacks something that a check needs; names it."""


def context_of(lengths: Sequence[int]) -> PackContext:
    """Documents of these lengths on the GPU."""
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return PackContext(
        positions=torch.cat([torch.arange(n) for n in lengths]).cuda(),
        cu_seqlens=torch.tensor(edges, dtype=torch.int32, device="cuda"),
        boundaries=tuple(edges),
        max_seqlen=max(lengths),
        real_tokens=edges[-1],
    )


def normal(*shape: int, seed: int) -> Tensor:
    """bfloat16 values on the GPU, drawn on the CPU."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to("cuda", torch.bfloat16)


def error(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference relative to that of `expected`."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-12))


def gradients(out: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(99)).to(out)
    return torch.autograd.grad(out, inputs, weight)


def against_reference(
    kernel: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> tuple[float, float]:
    """Worst output and gradient error of `kernel`; `reference` sees the same values in float32."""
    ours = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().float().requires_grad_() for x in inputs]
    out, expected = kernel(*ours), reference(*theirs)
    pairs = zip(gradients(out, ours), gradients(expected, theirs), strict=True)
    return error(out, expected), max(error(a, b) for a, b in pairs)


def isolated(run: Callable[..., Tensor], inputs: Sequence[Tensor], *, edges: Sequence[int]) -> None:
    """Changing document i changes its rows and no other row by a bit; its output's gradient stays inside."""
    before = run(*inputs)
    for i in (0, 3, len(edges) - 2):
        own = slice(edges[i], edges[i + 1])
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[own] = x[own].roll(1, dims=-1) if x.ndim > 1 else x[own] * 0.5
        moved = (run(*changed) - before).abs().flatten(1).amax(1)
        assert moved[own].max() > 0, f"document {i} does not react to its own tokens"
        moved[own] = 0
        assert float(moved.max()) == 0.0, f"document {i} reaches row {int(moved.argmax())} of another"
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        for gradient in torch.autograd.grad(run(*leaves)[own].float().square().sum(), leaves):
            outside = gradient.clone()
            outside[own] = 0
            assert float(outside.abs().max()) == 0.0, f"the gradient of document {i} leaves it"


# Kernels


def _attention(backend: str, *, context: PackContext, window: int | None) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_attention(q, k=k, v=v, context=context, backend=backend, window=window)

    return run


def attention_kernel(name: str) -> str:
    """One attention kernel: heads alone and grouped, full and windowed, widths 64 and 128."""
    row = ATTENTION_BACKENDS[name]
    if row.module is not None and not importable(row.module):
        raise Unavailable(f"{row.module} is not installed: {row.install}")
    lowest, highest = row.computes
    if not lowest <= torch.cuda.get_device_capability() < highest:
        raise Unavailable(f"{name} does not run on compute capability {torch.cuda.get_device_capability()}")
    context, total = context_of(LENGTHS), sum(LENGTHS)
    worst = [0.0, 0.0]
    for seed, (heads, kv_heads, width, window) in enumerate(
        [(8, 8, 64, None), (8, 2, 128, None), (8, 2, 64, 32), (4, 1, 64, 2)]
    ):
        q, k, v = (
            normal(total, h, width, seed=10 * seed + i) for i, h in enumerate((heads, kv_heads, kv_heads))
        )

        kernel, reference = (_attention(n, context=context, window=window) for n in (name, "reference"))
        out, gradient = against_reference(kernel, reference, (q, k, v))
        worst = [max(worst[0], out), max(worst[1], gradient)]
        isolated(kernel, (q, k, v), edges=context.boundaries)
    assert worst[0] <= OUTPUT, f"output error {worst[0]:.1e}"
    assert worst[1] <= GRADIENT, f"gradient error {worst[1]:.1e}"
    return f"output {worst[0]:.1e}, gradients {worst[1]:.1e}, isolation exact"


def _need_fla() -> None:
    if importlib.util.find_spec("fla") is None:
        raise Unavailable("flash-linear-attention is not installed: pip install flash-linear-attention")


def kda_kernel() -> str:
    """The delta rule of flash-linear-attention against ours, decays from weak to strong."""
    _need_fla()
    context, total, heads, width = context_of(LENGTHS), sum(LENGTHS), 4, 64
    worst = [0.0, 0.0]
    for seed, strength in enumerate((0.05, 1.0, 5.0)):
        q, k = (F.normalize(normal(total, heads, width, seed=seed + i).float(), dim=-1) for i in (1, 2))
        v = normal(total, heads, width, seed=seed + 3)
        g = -strength * torch.rand(total, heads, width, generator=torch.Generator().manual_seed(seed)).cuda()
        beta = torch.rand(total, heads, generator=torch.Generator().manual_seed(seed + 7)).cuda()

        def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return gated_delta_rule(q, k=k, v=v, g=g, beta=beta, context=context, backend="fla")

        def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            table = chunk_table(context.boundaries, device=q.device)
            return kda_chunked(q, k=k, v=v, g=g, beta=beta, table=table)

        inputs = (q.bfloat16(), k.bfloat16(), v, g, beta)
        out, gradient = against_reference(kernel, reference, inputs)
        worst = [max(worst[0], out), max(worst[1], gradient)]
        isolated(
            lambda q, k, v, g=g, beta=beta: kernel(q, k, v, g, beta), inputs[:3], edges=context.boundaries
        )
    assert worst[0] <= OUTPUT, f"output error {worst[0]:.1e}"
    assert worst[1] <= GRADIENT, f"gradient error {worst[1]:.1e}"
    return f"output {worst[0]:.1e}, gradients {worst[1]:.1e}, isolation exact"


def convolution_kernel() -> str:
    """The short convolution of flash-linear-attention against ours."""
    _need_fla()
    context, total = context_of(LENGTHS), sum(LENGTHS)
    inputs = (normal(total, 96, seed=1), normal(96, 4, seed=2))
    taps = tap_table(context.forest, reach=3, device=inputs[0].device)
    out, gradient = against_reference(
        lambda x, w: fla_convolution(x, weight=w, context=context),
        lambda x, w: short_convolution(x, weight=w, table=taps),
        inputs,
    )
    isolated(
        lambda x: fla_convolution(x, weight=inputs[1], context=context), inputs[:1], edges=context.boundaries
    )
    assert out <= OUTPUT, f"output error {out:.1e}"
    assert gradient <= GRADIENT, f"gradient error {gradient:.1e}"
    return f"output {out:.1e}, gradients {gradient:.1e}, isolation exact"


# A decoder from our mixers alone: torchtitan may be missing here


class Layer(nn.Module):
    """A mixer and a gated feed-forward, both residual."""

    def __init__(self, mixer: nn.Module, *, dim: int) -> None:
        super().__init__()
        self.mixer, self.norm = mixer, nn.RMSNorm(dim)
        self.ffn_norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, context: PackContext) -> Tensor:
        return self.feed(x, self.mixer(self.norm(x), context))

    @region()
    def feed(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + y
        gate, up = self.up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Small(nn.Module):
    """Linear, full, sliding and linear attention, width 256."""

    def __init__(self, *, attention: str, linear: str) -> None:
        super().__init__()
        config = ModelConfig(
            dim=256, num_heads=4, num_kv_heads=2, head_dim=64, kda_heads=4, kda_head_dim=64, sliding_window=16
        )
        torch.manual_seed(0)
        mixers = [
            KimiDeltaAttention(config, backend=linear),
            DocumentAttention(config, window=None, backend=attention),
            DocumentAttention(config, window=config.sliding_window, backend=attention),
            KimiDeltaAttention(config, backend=linear),
        ]
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(mixer, dim=config.dim) for mixer in mixers)
        self.norm, self.head = nn.RMSNorm(config.dim), Head(config.dim, vocab_size=config.vocab_size)

    def forward(self, pack: Pack) -> Tensor:
        """Log-probs of the pack's scored slots."""
        slots = scored_slots(pack)
        x, context = self.embedding(pack["tokens"]), pack.context(mode=RouteMode.live)
        for layer in self.layers:
            x = layer(x, context)
        request = LogprobRequest(targets=pack["tokens"][slots.slots], chunk=64)
        return self.head(self.norm(x[slots.rows]), request).logprobs


def build_small(*, attention: str, linear: str, dtype: torch.dtype) -> Small:
    """On the GPU; decays keep float32, as under mixed precision."""
    model = Small(attention=attention, linear=linear).to("cuda", dtype)
    for module in model.modules():
        if getattr(module, "keep_float32", False):
            module.float()
    return model


def samples(count: int, *, seed: int = 0) -> list[Sample]:
    """Prompts and responses of many lengths; every value differs."""
    random = np.random.default_rng(seed)
    made = []
    for i in range(count):
        prompt, response = int(random.integers(1, 24)), int(random.integers(1, 120))
        length = prompt + response
        made.append(
            Sample(
                id=f"s{i}",
                group=f"g{i // 2}",
                tokens=random.integers(0, 259, length, dtype=np.int32),
                response_mask=np.arange(length) >= prompt,
                behavior_logprobs=random.uniform(-6, -5, length).astype(np.float32),
                ref_logprobs=random.uniform(-6, -5, length).astype(np.float32),
                reward=float(random.random()),
                advantage=float(random.normal()),
                policy_version=0,
            )
        )
    return made


def packs_of(batch: Sequence[Sample], *, size: int) -> list[Pack]:
    return [
        collate(batch[i : i + size], layout=None, topology=Topology(1, 1)).to(torch.device("cuda"))
        for i in range(0, len(batch), size)
    ]


def loss_of(logprobs: Tensor, pack: Pack, *, batch: Sequence[Sample], config: LossConfig) -> Tensor:
    slots = scored_slots(pack)
    result = policy_loss(
        logprobs,
        anchor_logprobs=logprobs.detach() + 0.1,
        behavior_logprobs=pack["behavior_logprobs"][slots.slots],
        ref_logprobs=pack["ref_logprobs"][slots.slots],
        advantages=pack["advantages"][slots.slots],
        slots=slots,
        config=config,
        normalisers=count_normalisers(batch),
    )
    return result.loss


OBJECTIVE = LossConfig(kl_coef=0.1, tis_high=2.0)


def two_updates(model: Small, *, size: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients of two updates over packs of `size` samples, and Adam's moments after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    seen = []
    for update in range(2):
        batch = samples(16, seed=update)
        for pack in packs_of(batch, size=size):
            loss_of(model(pack), pack, batch=batch, config=OBJECTIVE).backward()
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    moments = {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
        if key.startswith("exp_avg")
    }
    return seen, moments


def packed_against_unpacked(*, kernels: bool) -> str:
    """Two updates with Adam: eight samples a pack against one. Float32 references, or bfloat16 kernels."""
    linear = "fla" if kernels and importlib.util.find_spec("fla") is not None else "reference"
    names: dict[str, Any] = {
        "attention": "varlen" if kernels else "reference",
        "linear": linear if kernels else "reference",
        "dtype": torch.bfloat16 if kernels else torch.float32,
    }
    packed, packed_moments = two_updates(build_small(**names), size=8)
    alone, alone_moments = two_updates(build_small(**names), size=1)
    worst = 0.0
    for a, b in [*zip(packed, alone, strict=True), (packed_moments, alone_moments)]:
        assert a.keys() == b.keys()
        for name in a:
            scale = b[name].abs().max().clamp(min=1e-30)
            distance = error(a[name], b[name]) if kernels else float((a[name] - b[name]).abs().max() / scale)
            limit = 5e-2 if kernels else 1e-4
            assert distance <= limit, f"{name}: {distance:.1e}"
            worst = max(worst, distance)
    return f"{names['attention']} + {linear}: gradients and Adam's moments within {worst:.1e}"


def combined_objective() -> str:
    """Surrogate, KL and importance weights on the GPU equal the same in float64 on the CPU."""
    batch = samples(8)
    (pack,) = packs_of(batch, size=8)
    logprobs = -5.5 + 0.3 * torch.randn(
        len(scored_slots(pack).slots), generator=torch.Generator().manual_seed(0)
    )
    there = pack.to(torch.device("cpu"))
    there.fields = {n: x.double() if x.is_floating_point() else x for n, x in there.fields.items()}
    results = []
    for values, where in ((logprobs.cuda(), pack), (logprobs.double(), there)):
        leaf = values.clone().requires_grad_()
        loss = loss_of(leaf, where, batch=batch, config=OBJECTIVE)
        results.append((loss.detach().cpu().double(), torch.autograd.grad(loss, leaf)[0].cpu().double()))
    (loss, gradient), (expected, expected_gradient) = results
    assert abs(float(loss - expected)) <= 1e-5 * max(1.0, abs(float(expected)))
    distance = float((gradient - expected_gradient).abs().max() / expected_gradient.abs().max())
    assert distance <= 1e-4, f"gradient {distance:.1e}"
    return f"loss {float(loss):+.5f}, gradient within {distance:.1e} of float64"


def recompiles() -> str:
    """Compiled layers over 30 packs of one length: no graph after the first update; compiled = plain."""
    model, plain = (
        build_small(attention="varlen", linear="reference", dtype=torch.bfloat16) for _ in range(2)
    )
    torch._dynamo.reset()
    log = GraphLog()
    compile_regions(model, static_rows=True)
    first, distance = 0, 0.0
    for seed in range(30):
        pack = one_length(512, seed=seed)
        with torch.no_grad():
            model(pack)
        out, expected = model(pack), plain(pack)
        pairs = zip(
            torch.autograd.grad(out.sum(), list(model.parameters())),
            torch.autograd.grad(expected.sum(), list(plain.parameters())),
            strict=True,
        )
        distance = max([distance, error(out, expected), *(error(a, b) for a, b in pairs)])
        graphs = log.new()
        assert seed == 0 or not graphs, f"pack {seed} compiled {graphs}"
        first = log.total if seed == 0 else first
    assert distance <= 5e-2, f"compiled differs by {distance:.1e}"
    return f"{first} graphs in the first update, none in 29 more; within {distance:.1e} of plain"


def one_length(tokens: int, *, seed: int) -> Pack:
    """A pack of exactly `tokens` rows whose number of documents differs from seed to seed."""
    random = np.random.default_rng(seed)
    made, left = [], tokens
    while left:
        length = left if left < 8 else int(min(left, random.integers(4, 8 + 10 * seed)))
        made.append(
            Sample(
                id=f"d{len(made)}",
                group="g",
                tokens=random.integers(0, 259, length, dtype=np.int32),
                response_mask=np.arange(length) >= 1,
                behavior_logprobs=np.full(length, -5, dtype=np.float32),
                reward=0.0,
                advantage=1.0,
                policy_version=0,
            )
        )
        left -= length
    return collate(made, layout=None, topology=Topology(1, 1)).to(torch.device("cuda"))


def chunked_logprobs() -> str:
    """Log-probs of 4,096 tokens over 50,000 words: values, gradients, and memory bounded by the chunk."""
    rows, dim, words, chunk = 4096, 1024, 50_000, 256
    x = normal(rows, dim, seed=1)
    weight = (normal(words, dim, seed=2).float() * 0.02).bfloat16()
    targets = torch.randint(words, (rows,), generator=torch.Generator().manual_seed(3)).cuda()
    found = {}
    for kind in (LogprobKind.full, LogprobKind.chunked):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        request = LogprobRequest(targets=targets, kind=kind, chunk=chunk)
        logprobs = score_tokens(leaves[0], weight=leaves[1], request=request).logprobs
        results = torch.autograd.grad(logprobs.sum(), leaves)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - held
        found[kind] = (logprobs.detach(), results, peak)
    (full, full_gradients, full_peak), (values, grads, peak) = (
        found[LogprobKind.full],
        found[LogprobKind.chunked],
    )
    assert error(values, full) <= OUTPUT
    distance = max(error(a, b) for a, b in zip(grads, full_gradients, strict=True))
    assert distance <= GRADIENT, f"gradients {distance:.1e}"
    assert peak < full_peak / 2, f"{peak / 2**20:.0f} MiB against {full_peak / 2**20:.0f} MiB of whole logits"
    return f"gradients {distance:.1e}, peak {peak / 2**20:.0f} MiB against {full_peak / 2**20:.0f} MiB"


def bench_train() -> str:
    """One short run of `benchmarks.bench_train` on the GPU, where all it needs is installed."""
    needed = ("torchtitan", "lightning", "hydra", "pyarrow", "rich", "fla")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        raise Unavailable(f"{', '.join(lacking)} not installed: pip install -c constraints.txt -e '.[fla]'")
    options = ["--device", "cuda", "--budgets", "8192", "--updates", "1"]
    command = [sys.executable, "-m", "benchmarks.bench_train", *options]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    except subprocess.TimeoutExpired as late:
        raise TimeoutError("benchmarks.bench_train took more than 150 s") from late
    assert done.returncode == 0, done.stderr[-2000:]
    return "\n" + done.stdout.rstrip()


CHECKS: dict[str, Callable[[], str]] = {
    "varlen attention": lambda: attention_kernel("varlen"),
    "flash attention 2": lambda: attention_kernel("flash_2"),
    "flash attention 3": lambda: attention_kernel("flash_3"),
    "flash attention 4": lambda: attention_kernel("flash_4"),
    "KDA kernel": kda_kernel,
    "short convolution kernel": convolution_kernel,
    "packed against unpacked, float32": lambda: packed_against_unpacked(kernels=False),
    "packed against unpacked, kernels": lambda: packed_against_unpacked(kernels=True),
    "combined objective": combined_objective,
    "recompiles": recompiles,
    "chunked log-probs": chunked_logprobs,
    "bench_train": bench_train,
}


def main() -> int:
    """Run all checks and print their figures; 0 if none failed, 1 otherwise, 3 without a CUDA device."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 3
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    failed = 0
    for name, check in CHECKS.items():
        started = time.perf_counter()
        try:
            verdict, figures = "ok", check()
        except Unavailable as reason:
            verdict, figures = "left out", str(reason)
        except (AssertionError, ImportError, RuntimeError, TypeError, ValueError, TimeoutError) as wrong:
            verdict, figures, failed = "FAILED", f"{type(wrong).__name__}: {wrong}", failed + 1
        print(f"{verdict:<9} {name:<34} {time.perf_counter() - started:6.1f} s  {figures}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
