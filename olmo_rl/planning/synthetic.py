"""Batches from a stated law, where no recorded ones exist: lengths, groups and routes (never uniform).

The law. A prompt belongs to a domain (math .40, median 2600 tokens, sigma .65; code .25, 2000, .70; chat .20,
700, .60; instruction .15, 450, .50). Lengths are log-normal around the median: the variance of the logarithm
is shared between the prompt (its difficulty, 60 %) and the response (40 %). A group is 8 responses of one
prompt; groups arrive in the order of their longest response times a log-normal noise (sigma .5), as a
generator with many requests in flight completes them. Expert logits are 0.5 base + 0.8 domain + 0.35 prompt +
0.15 response, standard normal per (layer, expert); probabilities are their softmax, clipped at 1/top_k (no
expert takes more than one slot of a token), and the assignments of a response are multinomial. These are
choices, not measurements: they imitate what is known of real runs.

Shapes: N samples, T tokens of one, L routed layers, X experts, K of them per token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from olmo_rl.types import Collection, ExpertLayout, Refusal, Sample

LONGEST = 8000  # tokens the law is stated for; other lengths scale all of it
SHORTEST = 200
GROUP_SIZE = 8
_PROMPT_SHARE = 0.6
_ARRIVAL_SIGMA = 0.5
_BASE, _DOMAIN, _PROMPT, _RESPONSE = 0.5, 0.8, 0.35, 0.15
# Lengths, routes and tokens draw from streams of their own, so that lengths do not depend on the number of
# experts.
_LENGTHS, _ROUTES, _CONTENTS, _PLACEMENT = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """A kind of prompt: its share of prompts, median tokens, sigma of the logarithm of tokens."""

    name: str
    weight: float
    median: int
    sigma: float


DOMAINS: tuple[Domain, ...] = (
    Domain(name="math", weight=0.40, median=2600, sigma=0.65),
    Domain(name="code", weight=0.25, median=2000, sigma=0.70),
    Domain(name="chat", weight=0.20, median=700, sigma=0.60),
    Domain(name="instruction", weight=0.15, median=450, sigma=0.50),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnLengths:
    """N samples in order of arrival, those of a group together. `domains` index DOMAINS."""

    lengths: NDArray[np.int64]
    domains: NDArray[np.int64]
    prompts: NDArray[np.int64]
    ids: tuple[str, ...]


def draw_lengths(n: int, *, seed: int, group_size: int = GROUP_SIZE, longest: int = LONGEST) -> DrawnLengths:
    """`n` samples of the law, scaled by `longest` / 8000. The last group is smaller where `group_size` does
    not divide n.
    """
    if n < 1 or group_size < 1 or longest < 1:
        raise Refusal(
            f"{n} samples in groups of {group_size} up to {longest} tokens: each must be at least 1"
        )
    rng = np.random.default_rng((seed, _LENGTHS))
    scale = longest / LONGEST
    prompts = np.arange(n) // group_size
    weights = np.array([domain.weight for domain in DOMAINS])
    domain_of = rng.choice(len(DOMAINS), size=int(prompts[-1]) + 1, p=weights / weights.sum())
    domains = domain_of[prompts]
    difficulty = rng.standard_normal(len(domain_of))[prompts]
    chance = rng.standard_normal(n)
    spread = np.sqrt(_PROMPT_SHARE) * difficulty + np.sqrt(1 - _PROMPT_SHARE) * chance
    medians = np.array([domain.median for domain in DOMAINS], dtype=np.float64)[domains]
    sigmas = np.array([domain.sigma for domain in DOMAINS])[domains]
    tokens = np.clip(medians * np.exp(sigmas * spread), SHORTEST, LONGEST) * scale
    lengths = np.maximum(np.rint(tokens), min(2, longest)).astype(np.int64)
    done = np.zeros(len(domain_of))
    np.maximum.at(done, prompts, tokens)
    finish = done * np.exp(_ARRIVAL_SIGMA * rng.standard_normal(len(domain_of)))
    arrival = np.argsort(finish[prompts], kind="stable")
    return DrawnLengths(
        lengths=lengths[arrival],
        domains=domains[arrival],
        prompts=prompts[arrival],
        ids=tuple(f"{DOMAINS[domains[i]].name}-{prompts[i]}-{i % group_size}" for i in arrival),
    )


def expert_counts(drawn: DrawnLengths, *, layout: ExpertLayout, seed: int) -> Iterator[NDArray[np.int64]]:
    """Assignments int64 [L, X] of the recorded rows (no tail) of every sample, one sample at a time."""
    shape = (len(layout.routed_layers), layout.num_experts)
    rng = np.random.default_rng((seed, _ROUTES))
    base = rng.standard_normal(shape)
    by_domain = rng.standard_normal((len(DOMAINS), *shape))
    prompt_of: dict[int, NDArray[np.float64]] = {}
    for length, domain, prompt in zip(drawn.lengths, drawn.domains, drawn.prompts, strict=True):
        if prompt not in prompt_of:
            prompt_of = {int(prompt): rng.standard_normal(shape)}  # samples of a group adjoin: one is enough
        logits = _BASE * base + _DOMAIN * by_domain[domain] + _PROMPT * prompt_of[int(prompt)]
        logits += _RESPONSE * rng.standard_normal(shape)
        rows = int(length) - 1
        counts = rng.multinomial(rows * layout.top_k, _clipped_softmax(logits, ceiling=1 / layout.top_k))
        yield _at_most(counts, rows)


def _clipped_softmax(logits: NDArray[np.float64], *, ceiling: float) -> NDArray[np.float64]:
    """Softmax over the last axis with no entry above `ceiling`; the excess goes to the others in
    proportion.
    """
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    capped = np.zeros(p.shape, dtype=bool)
    while (over := (p > ceiling) & ~capped).any():
        capped |= over
        room = 1 - ceiling * capped.sum(axis=-1, keepdims=True)
        free = np.where(capped, 0, p)
        total = free.sum(axis=-1, keepdims=True)
        share = np.divide(np.maximum(room, 0), total, out=np.zeros_like(total), where=total > 0)
        p = np.where(capped, ceiling, free * share)
    return p / p.sum(axis=-1, keepdims=True)


def _at_most(counts: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """`counts` [L, X] with no expert above `rows`: a draw beyond it goes to the experts with most room, in
    order.
    """
    for layer in np.flatnonzero(counts.max(axis=-1) > rows):
        row = counts[layer]
        surplus = int((row - np.minimum(row, rows)).sum())
        np.minimum(row, rows, out=row)
        for expert in np.argsort(row, kind="stable"):
            moved = min(surplus, rows - int(row[expert]))
            row[expert] += moved
            surplus -= moved
    return counts


def routes_of_counts(
    counts: NDArray[np.int64], *, rows: int, top_k: int, rng: np.random.Generator
) -> NDArray[np.int16] | NDArray[np.int32]:
    """Routes [rows, L, K] that realise `counts` [L, X] exactly, each row with distinct experts.

    The assignments of a layer, sorted by expert, are dealt to rows round-robin: an expert with at most `rows`
    of them meets no row twice. Rows are shuffled layer by layer.
    """
    layers, experts = counts.shape
    dtype = np.int16 if experts <= 2**15 else np.int32
    routes = np.empty((rows, layers, top_k), dtype=dtype)
    names = np.arange(experts, dtype=dtype)
    for layer in range(layers):
        dealt = np.repeat(names, counts[layer]).reshape(top_k, rows)
        routes[:, layer] = dealt[:, rng.permutation(rows)].T
    return routes


def synthetic_collection(
    n: int,
    *,
    layout: ExpertLayout | None,
    seed: int,
    group_size: int = GROUP_SIZE,
    longest: int = LONGEST,
    vocab_size: int = 256,
) -> Collection:
    """A whole collection of the law: lengths, groups, routes (with a `layout`), and contents drawn at random.

    The first eighth of a sample (at least one token) is its prompt; rewards are 0 or 1.
    """
    drawn = draw_lengths(n, seed=seed, group_size=group_size, longest=longest)
    counts = None if layout is None else expert_counts(drawn, layout=layout, seed=seed)
    contents = np.random.default_rng((seed, _CONTENTS))
    placement = np.random.default_rng((seed, _PLACEMENT))
    samples = []
    for id, length, prompt in zip(drawn.ids, drawn.lengths.tolist(), drawn.prompts.tolist(), strict=True):
        response = np.arange(length) >= max(1, length // 8)
        sample = Sample(
            id=id,
            group=f"prompt-{prompt}",
            tokens=contents.integers(0, vocab_size, length).astype(np.int32),
            response_mask=response,
            behavior_logprobs=np.where(response, -contents.exponential(0.5, length), 0).astype(np.float32),
            reward=float(contents.integers(0, 2)),
        )
        if counts is not None and layout is not None:
            sample.routes = routes_of_counts(next(counts), rows=length - 1, top_k=layout.top_k, rng=placement)
        samples.append(sample)
    return Collection(samples=samples, layout=layout, source=f"the synthetic law, seed {seed}")


def recorded_lengths(path: str | Path, *, case: str) -> NDArray[np.int64]:
    """int64 [N]: prompt + response tokens of one case of a file of recorded lengths, in its order.

    The file is JSON, `{case: {"samples_per_prompt": s, "prompt_lengths": [...], "response_lengths": [...]}}`;
    response i belongs to prompt i // s.
    """
    path = Path(path)
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: not a JSON file of recorded lengths: {error}") from None
    if not isinstance(cases, dict) or case not in cases:
        raise Refusal(
            f"{path}: no case {case!r}" + (f", it has {', '.join(cases)}" if isinstance(cases, dict) else "")
        )
    prompts = np.array(cases[case]["prompt_lengths"], dtype=np.int64)
    responses = np.array(cases[case]["response_lengths"], dtype=np.int64)
    repeated = np.repeat(prompts, int(cases[case]["samples_per_prompt"]))
    if len(repeated) != len(responses):
        raise Refusal(f"{path}: case {case!r} has {len(responses)} responses for {len(repeated)} expected")
    return repeated + responses
