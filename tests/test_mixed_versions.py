"""Tokens of several weight versions in one response, at a temperature: each has the log-prob of the version
that wrote it, and importance weights, masks and sequence ratios follow the definition, in float64.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import MODEL, local_engine, score, weights_of
from model_cases import context_of
from oracle import OracleDocument, policy_objective
from test_loss import make_pack, plain_settings
from torch import Tensor

from olmo_rl.collections.group_requests import ages_of
from olmo_rl.collections.sources import unjudged
from olmo_rl.config import Config, LossConfig, LossKind, Reduction, WeightBound, WeightLevel
from olmo_rl.data.collate import count_normalisers
from olmo_rl.data.packs import RouteMode
from olmo_rl.data.tokenizers import ByteTokenizer
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.logprobs import token_logprobs
from olmo_rl.policy.loss import policy_loss, scored_slots
from olmo_rl.tasks.kinds import AdditionTask
from olmo_rl.types import Sample

TEMPERATURE = 0.7
TOKENS = 6
FIRST = (6, 2, 4, 0)  # tokens of each response that version 0 wrote; version 1 wrote the rest
ADVANTAGES = (1.0, -0.5, -1.5, 0.75)


def decoder_of(version: int) -> HybridDecoder:
    decoder = HybridDecoder(MODEL, attention="torch")
    decoder.load_state_dict(weights_of(version))
    return decoder


def written(number: int, *, first: int) -> Generation:
    """A response whose weights changed after `first` tokens, as an engine with `pause=keep` writes it."""
    engine = local_engine(seed=0, version=0)
    parts: list[Generation] = []
    for version, count in ((0, first), (1, TOKENS - first)):
        engine.publish(weights_of(version), version)
        if count:
            tokens = parts[-1].tokens.tolist() if parts else [10 + number, 20, 30]
            request = Request(id=f"r{number}", tokens=tokens)
            parts += engine.generate([request], max_new_tokens=count, temperature=TEMPERATURE, seed=number)
    versions = np.repeat(np.array([0, 1], dtype=np.int32), [first, TOKENS - first])
    return replace(
        parts[-1],
        logprobs=np.concatenate([part.logprobs for part in parts]),
        token_versions=versions,
        policy_version=int(versions.min()),
    )


@pytest.fixture(scope="module")
def generations() -> list[Generation]:
    return [written(number, first=first) for number, first in enumerate(FIRST)]


@pytest.fixture(scope="module")
def samples(generations: list[Generation]) -> list[Sample]:
    task = AdditionTask(Config().task, seed=0)
    (problem,) = task.problems(1, seed=0)
    found = [unjudged(g, group="g", id=g.id, problem=problem, tokenizer=ByteTokenizer()) for g in generations]
    for sample, advantage in zip(found, ADVANTAGES, strict=True):
        sample.advantage = advantage
    return found


def test_a_token_has_the_log_prob_of_the_version_that_wrote_it(generations: list[Generation]) -> None:
    for generation, first in zip(generations, FIRST, strict=True):
        by_version = []
        for version, count in ((0, first), (1, TOKENS)):
            length = len(generation.tokens) - TOKENS + count
            part = replace(
                generation,
                tokens=generation.tokens[:length],
                logprobs=generation.logprobs[:count],
                routes=None,
            )
            scored = score(decoder_of(version), [part], replay=False, temperature=TEMPERATURE)[0][0]
            by_version.append(scored.numpy())
        expected = np.concatenate([by_version[0], by_version[1][first:]])
        assert np.abs(generation.logprobs - expected).max() < 1e-5
        if 0 < first < TOKENS:
            other = np.concatenate([by_version[1][:first], by_version[1][first:]])
            assert np.abs(generation.logprobs - other).max() > 0.01, "the versions differ"
    assert [ages_of(g) for g in generations] == [{0: 6}, {0: 2, 1: 4}, {0: 4, 1: 2}, {1: 6}]
    assert [g.policy_version for g in generations] == [0, 0, 0, 1]


OFF_POLICY = {
    "tis": {"tis_low": 0.9, "tis_high": 1.1},
    "icepop": {"tis_low": 0.9, "tis_high": 1.1, "tis_bound": WeightBound.mask},
    "tis by sequence": {"tis_high": 1.05, "tis_level": WeightLevel.sequence, "reduction": Reduction.response},
    "sequence mask": {"max_sequence_kl": 0.0},
    "gspo": {"kind": LossKind.gspo, "tis_high": 1.1},
    "gspo, icepop, mask": {
        "kind": LossKind.gspo,
        "tis_low": 0.95,
        "tis_high": 1.2,
        "tis_bound": WeightBound.mask,
        "max_sequence_kl": 0.02,
    },
}


def logits_of(version: int, sample: Sample) -> Tensor:
    """float64 [T, V] of one document alone, over the temperature."""
    context = context_of([len(sample)], mode=RouteMode.live)
    with torch.no_grad():
        logits = decoder_of(version)(torch.from_numpy(sample.tokens).long(), context).logits
    return logits.double() / TEMPERATURE


@pytest.mark.parametrize("name", list(OFF_POLICY))
def test_losses_over_mixed_versions_equal_the_oracle(name: str, samples: list[Sample]) -> None:
    """Version 1 is the anchor, version 2 the policy. The oracle sees documents and tokens one by one."""
    config = LossConfig(**OFF_POLICY[name])
    anchors = [logits_of(1, sample) for sample in samples]
    policies = [logits_of(2, sample).requires_grad_(True) for sample in samples]
    documents = [
        OracleDocument(
            tokens=sample.tokens.tolist(),
            logits=policy,
            mask=sample.response_mask.tolist(),
            anchor=[0.0, *_chosen(anchor, sample)],
            behavior=sample.behavior_logprobs.tolist(),
            reference=[0.0] * len(sample),
            advantage=float(sample.advantage or 0.0),
        )
        for sample, anchor, policy in zip(samples, anchors, policies, strict=True)
    ]
    expected = policy_objective(documents, settings=plain_settings(config))
    wanted = torch.autograd.grad(expected, policies, materialize_grads=True)

    raw = [(policy.detach() * TEMPERATURE).requires_grad_(True) for policy in policies]
    pack = make_pack(samples)
    slots = scored_slots(pack)
    targets = pack["tokens"][slots.slots]
    output = policy_loss(
        token_logprobs(torch.cat(raw)[slots.rows], targets=targets, temperature=TEMPERATURE),
        anchor_logprobs=token_logprobs(torch.cat(anchors)[slots.rows], targets=targets),
        behavior_logprobs=pack["behavior_logprobs"][slots.slots],
        ref_logprobs=None,
        advantages=pack["advantages"][slots.slots],
        slots=slots,
        config=config,
        normalisers=count_normalisers(samples),
    )
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for found, gradient in zip(torch.autograd.grad(output.loss, raw), wanted, strict=True):
        torch.testing.assert_close(found, gradient / TEMPERATURE, rtol=1e-9, atol=1e-12)
    newest = [replace(sample, behavior_logprobs=_written_by_anchor(sample)) for sample in samples]
    other = make_pack(newest)["behavior_logprobs"][slots.slots]
    assert not torch.allclose(other, pack["behavior_logprobs"][slots.slots], atol=0.01)


def _chosen(logits: Tensor, sample: Sample) -> list[float]:
    rows = logits.log_softmax(-1)[:-1]
    return rows.gather(1, torch.from_numpy(sample.tokens[1:]).long()[:, None])[:, 0].tolist()


def _written_by_anchor(sample: Sample) -> np.ndarray:
    """The log-probs that a sample would have if one version had written all of it."""
    found = np.array([0.0, *_chosen(logits_of(1, sample), sample)], dtype=np.float32)
    return np.where(sample.response_mask, found, 0.0).astype(np.float32)
