"""One comparison after every publication: does each engine compute with the weights that were published?

Every engine with the present weights answers one request, and the policy scores those answers, with their
routes where routes are replayed. The first time, repeated draws of one token also show an engine that samples
from less than the whole distribution. An engine that does not answer is not judged.

Refused or warned of, by `rollouts.on_gap`: a mean difference above `rollouts.max_gap`, and such draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import cast

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from olmo_rl.config import Config, Dtype, OnGap, WrittenDtype
from olmo_rl.data.collate import collate
from olmo_rl.data.packs import RouteMode
from olmo_rl.policy.engine import Generation, Request
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.rollouts.engines import RemoteEngine
from olmo_rl.rollouts.probes import UNLIKELY, chance_of_repeats, compared_request, draw_requests
from olmo_rl.training.rank_agreement import outcome, together
from olmo_rl.training.scoring import score_pack
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample, Topology

# Nats a token, the mean over one answer: both sides in float32, or one of them in bfloat16.
FLOAT32_GAP, BFLOAT16_GAP = 0.01, 0.1
Answers = Mapping[str, Sequence[Generation] | str]  # by address; text: why there is none


class EngineAgreement:
    """Compares after each publication. A collective of all ranks."""

    def __init__(self, remote: RemoteEngine, *, config: Config, strategy: ExpertParallelStrategy) -> None:
        self._remote = remote
        self._config = config
        self._strategy = strategy
        self._sampling_is_known = False
        self._warned: set[str] = set()

    def __call__(self, decoder: nn.Module, version: int) -> dict[str, float]:
        """Metrics; Refusal on all ranks alike."""
        model, bound = self._config.model, gap_bound(self._config)
        request, tokens = compared_request(vocab_size=model.vocab_size, max_seq_len=model.max_seq_len)
        answers = self._asked([request], tokens=tokens, seed=version)
        found = {url: given[0] for url, given in answers.items() if not isinstance(given, str)}
        gaps = self._gaps(cast(HybridDecoder, decoder), found)
        cause = _cause(self._config)
        reasons = {
            url: f"log-probs of version {version} differ from the trainer's by {gap:.3g} nats a token, "
            f"rollouts.max_gap={bound:g}: {cause}; rollouts.on_gap=warn goes on"
            for url, gap in gaps.items()
            if not gap <= bound
        }
        if not self._sampling_is_known:
            reasons = self._narrow(draw_requests(request.tokens), seed=version) | reasons
            self._sampling_is_known = True
        self._judge(reasons, unknown={url: why for url, why in answers.items() if isinstance(why, str)})
        known = [gap for gap in gaps.values() if np.isfinite(gap)]
        return {"mismatch/published": max(known)} if known else {}

    def _asked(self, requests: Sequence[Request], *, tokens: int, seed: int) -> Answers:
        """The answers of all engines, on every rank."""
        future: Future[dict[str, list[Generation] | str]] | None = None
        if self._strategy.global_rank == 0:
            future = self._remote.probe(requests, max_new_tokens=tokens, seed=seed)
        self._strategy.meet(future)
        found = self._strategy.from_rank_zero(
            lambda: outcome(cast(Future[dict[str, list[Generation] | str]], future).result)
        )
        (answers,) = together([found])
        return answers

    def _narrow(self, requests: Sequence[Request], *, seed: int) -> dict[str, str]:
        """Why an engine's draws cannot come from the distribution that it reports, by address."""
        reasons = {}
        for url, draws in self._asked(requests, tokens=1, seed=seed).items():
            chance = None if isinstance(draws, str) else chance_of_repeats(draws)
            if chance is not None and chance < UNLIKELY:
                probability = np.exp(chance / (len(draws) - 1))
                reasons[url] = (
                    f"{len(draws)} draws gave one token, of probability {probability:.2g} each: it samples "
                    "from less than the whole distribution: start it without sampling defaults (vLLM: "
                    "--generation-config vllm)"
                )
        return reasons

    def _gaps(self, decoder: HybridDecoder, found: Mapping[str, Generation]) -> dict[str, float]:
        """Mean absolute difference of log-probs by address. All ranks score all answers, one a pack, so that
        they run the same number of packs; those of rank 0 are judged.
        """
        config = self._config
        topology = Topology(config.trainer.world_size, config.strategy.ep_degree)
        layout = config.model.expert_layout if config.replay else None
        mode = RouteMode.replay if config.replay else RouteMode.live
        gaps = {}
        for url, generation in found.items():
            sample = as_sample(generation)
            pack = collate([sample], layout=layout, topology=topology, padding=config.padding)
            scores: Tensor = score_pack(
                pack.to(self._strategy.root_device), strategy=self._strategy, mode=mode, decoder=decoder
            )
            difference = scores.double().cpu().numpy() - generation.logprobs
            gaps[url] = float(np.abs(difference).mean())
        return self._strategy.from_rank_zero(lambda: gaps)

    def _judge(self, reasons: Mapping[str, str], *, unknown: Mapping[str, str]) -> None:
        """Refuse, or warn of each engine once."""
        if reasons and self._config.rollouts.on_gap is OnGap.refuse:
            raise Refusal([f"rollouts.urls: {url}: {reason}" for url, reason in reasons.items()])
        lines = {url: f"not compared: {reason}" for url, reason in unknown.items()} | dict(reasons)
        for url in lines.keys() - self._warned:
            rank_zero_warn(f"rollouts.urls: {url}: {lines[url]}")
            self._warned.add(url)


def gap_bound(config: Config) -> float:
    """`rollouts.max_gap`, or the bound that fits the lowest precision that the trainer knows of."""
    if config.rollouts.max_gap is not None:
        return config.rollouts.max_gap
    halved = Dtype.bfloat16 in (config.policy.dtype, config.expert_dtype)
    return BFLOAT16_GAP if halved or config.export.dtype is WrittenDtype.bfloat16 else FLOAT32_GAP


def _cause(config: Config) -> str:
    """What makes log-probs differ, and what to do about the one that is a setting of the engine."""
    temperature = config.rollouts.temperature
    if temperature == 1.0:
        return "it has other weights or another precision"
    return (
        f"it has other weights or another precision, or reports log-probs at temperature 1 instead of "
        f"rollouts.temperature={temperature:g}: start vLLM with --logprobs-mode processed_logprobs, SGLang "
        "without SGLANG_RETURN_ORIGINAL_LOGPROB"
    )


def as_sample(generation: Generation) -> Sample:
    """An answer as a sample without reward: its generated tokens are scored."""
    prompt = len(generation.tokens) - len(generation.logprobs)
    logprobs = np.zeros(len(generation.tokens), dtype=np.float32)
    logprobs[prompt:] = generation.logprobs
    return Sample(
        id=generation.id,
        group=generation.id,
        tokens=np.asarray(generation.tokens, dtype=np.int32),
        response_mask=np.arange(len(generation.tokens)) >= prompt,
        behavior_logprobs=logprobs,
        reward=0.0,
        policy_version=generation.policy_version,
        routes=generation.routes,
    )
