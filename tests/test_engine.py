"""The local engine: agreement with the packed forward, sampling semantics, routes, endings, publishing."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from engine_cases import score
from model_cases import context_of, tiny_config

from olmo_rl.config import ModelConfig
from olmo_rl.policy.engine import Generation, LocalEngine, Request
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.sampling import choose_tokens
from olmo_rl.types import Refusal

CPU = torch.device("cpu")
STOP = 3


@cache
def decoder_of(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> HybridDecoder:
    decoder = HybridDecoder(tiny_config(), attention="reference")
    decoder.init_weights(seed)
    return decoder.to(dtype)


def engine_of(
    decoder: HybridDecoder, *, dtype: torch.dtype = torch.float32, max_state_bytes: int = 2**30
) -> LocalEngine:
    engine = LocalEngine(decoder.config, device=CPU, dtype=dtype, max_state_bytes=max_state_bytes)
    engine.publish(dict(decoder.named_parameters()), 5)
    return engine


def requests_of(count: int = 24) -> list[Request]:
    """Prompts of 1 to 6 tokens."""
    rng = np.random.default_rng(0)
    return [Request(id=f"r{i}", tokens=rng.integers(0, 31, 1 + i % 6).tolist()) for i in range(count)]


def assert_equal(a: Generation, b: Generation) -> None:
    assert a.id == b.id
    assert a.tokens.tolist() == b.tokens.tolist()
    assert np.array_equal(a.routes, b.routes)
    assert a.finish_reason == b.finish_reason
    assert np.abs(a.logprobs - b.logprobs).max() < 1e-6


def test_logprobs_agree_with_the_packed_forward_under_replay_of_the_routes() -> None:
    decoder = decoder_of()
    generations = engine_of(decoder).generate(requests_of(96), max_new_tokens=12, stop_token=STOP, seed=1)
    scored, _ = score(decoder, generations, replay=True)
    gaps = np.concatenate([np.abs(s.numpy() - g.logprobs) for s, g in zip(scored, generations, strict=True)])
    assert len(gaps) > 500
    assert np.concatenate([g.logprobs for g in generations]).std() > 0.3
    assert gaps.mean() <= 1e-6
    assert gaps.max() <= 5e-5


def test_in_float64_routes_and_logprobs_are_those_of_the_live_packed_forward() -> None:
    decoder = decoder_of(dtype=torch.float64)
    generations = engine_of(decoder, dtype=torch.float64).generate(
        requests_of(), max_new_tokens=9, stop_token=STOP, seed=1
    )
    scored, ids = score(decoder, generations, replay=False)
    for s, g in zip(scored, generations, strict=True):
        assert np.abs(s.numpy() - g.logprobs).max() < 1e-6  # what float32 storage leaves
    live = torch.stack([ids[layer] for layer in decoder.config.routed_layers], 1)
    for g, rows in zip(generations, live.split([len(g.tokens) for g in generations]), strict=True):
        assert np.array_equal(np.sort(g.routes, -1), rows[:-1].sort(-1).values.numpy())


def test_greedy_takes_the_likeliest_token_and_needs_no_seed() -> None:
    decoder = decoder_of()
    engine = engine_of(decoder)
    first, second = (
        engine.generate(requests_of(), max_new_tokens=6, stop_token=None, greedy=True, seed=seed)
        for seed in (0, 1)
    )
    for a, b in zip(first, second, strict=True):
        assert_equal(a, b)
    context = context_of([len(g.tokens) for g in first])
    with torch.no_grad():
        logits = decoder(torch.from_numpy(np.concatenate([g.tokens for g in first])).long(), context).logits
    for g, start in zip(first, context.boundaries, strict=False):
        prompt = len(g.tokens) - 6
        best = logits[start + prompt - 1 : start + len(g.tokens) - 1].argmax(-1)
        assert g.tokens[prompt:].tolist() == best.tolist()


def test_routes_have_one_row_less_than_tokens_in_the_narrowest_type() -> None:
    for g in engine_of(decoder_of()).generate(requests_of(), max_new_tokens=7, stop_token=STOP, seed=2):
        assert g.routes is not None
        assert g.routes.shape == (len(g.tokens) - 1, 3, 2)
        assert g.routes.dtype == np.int8
        assert g.routes.min() >= 0
        assert g.routes.max() < 8
        assert (g.routes[..., 0] != g.routes[..., 1]).all()


def test_a_stop_token_ends_its_sequence_is_kept_and_is_scored() -> None:
    requests = [replace(r, tokens=[STOP, *r.tokens]) for r in requests_of(60)]  # in a prompt it ends nothing
    generations = engine_of(decoder_of()).generate(requests, max_new_tokens=8, stop_token=STOP, seed=3)
    reasons = {g.finish_reason for g in generations}
    assert reasons == {"stop", "length"}
    for request, g in zip(requests, generations, strict=True):
        prompt, response = g.tokens[: len(request.tokens)], g.tokens[len(request.tokens) :]
        assert prompt.tolist() == list(request.tokens)
        assert len(response) == len(g.logprobs) > 0
        assert (g.logprobs < 0).all()
        if g.finish_reason == "stop":
            assert response.tolist().index(STOP) == len(response) - 1
        else:
            assert STOP not in response
            assert len(response) == 8


def test_any_of_several_stop_tokens_ends_a_sequence() -> None:
    decoder, stops = decoder_of(), [STOP, STOP + 1]
    free = engine_of(decoder).generate(requests_of(60), max_new_tokens=8, seed=3)
    cut = engine_of(decoder).generate(requests_of(60), max_new_tokens=8, stop_token=stops, seed=3)
    lasts = set()
    for whole, part in zip(free, cut, strict=True):
        response = whole.tokens[-8:].tolist()
        ends = [place for place, token in enumerate(response) if token in stops]
        assert part.tokens.tolist() == whole.tokens[: len(whole.tokens) - 8 + min([*ends, 7]) + 1].tolist()
        assert part.finish_reason == ("stop" if ends else "length")
        lasts |= {response[ends[0]]} if ends else set()
    assert lasts == set(stops), "each of them ended some"


def test_without_a_stop_token_every_sequence_runs_to_the_limit() -> None:
    for g in engine_of(decoder_of()).generate(requests_of(), max_new_tokens=3, seed=3):
        assert len(g.logprobs) == 3
        assert g.finish_reason == "length"


def test_results_do_not_depend_on_order_batch_or_company() -> None:
    decoder, requests = decoder_of(dtype=torch.float64), requests_of(40)

    def run(engine: LocalEngine, chosen: list[Request]) -> dict[str, Generation]:
        out = engine.generate(chosen, max_new_tokens=10, stop_token=STOP, seed=4)
        assert [g.id for g in out] == [r.id for r in chosen]
        return {g.id: g for g in out}

    engine = engine_of(decoder, dtype=torch.float64)
    together = run(engine, requests)
    assert (
        len({len(g.tokens) for g in together.values()}) > 5
    )  # sequences end at different steps: rows are dropped
    backwards = run(engine, requests[::-1])
    small = run(engine_of(decoder, dtype=torch.float64, max_state_bytes=60_000), requests)
    alone = {r.id: run(engine, [r])[r.id] for r in requests[:5]}
    for other in (backwards, small, alone):
        for id, generation in other.items():
            assert_equal(generation, together[id])


def test_sequences_that_share_prompts_get_what_each_gets_alone() -> None:
    """Prompts of one to six tokens, of one to four sequences each, some of which end early."""
    engine = engine_of(decoder_of(dtype=torch.float64), dtype=torch.float64)
    prompts = [request.tokens for request in requests_of(9)]
    shared = (0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5, 5, 6)
    requests = [Request(id=f"s{i}", tokens=prompts[number]) for i, number in enumerate(shared)]
    together = engine.generate(requests, max_new_tokens=9, stop_token=STOP, seed=4)
    lengths = [len(g.logprobs) for g in together]
    assert min(lengths) < 5 < max(lengths) == 9
    for request, generation in zip(requests, together, strict=True):
        (alone,) = engine.generate([request], max_new_tokens=9, stop_token=STOP, seed=4)
        assert_equal(alone, generation)
    # Two that nobody waits for any more, one of them before its prompt ends, change nothing for the others.
    gone = {"s2", "s13"}
    rest = engine.generate(requests, max_new_tokens=9, stop_token=STOP, seed=4, dropped=lambda: gone)
    for before, after in zip(together, rest, strict=True):
        if before.id not in gone:
            assert_equal(before, after)


def test_a_prompt_is_read_once_and_the_head_runs_where_a_token_is_drawn() -> None:
    engine = engine_of(decoder_of())
    prompts = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
    requests = [Request(id=f"p{p}-{i}", tokens=prompt) for p, prompt in enumerate(prompts) for i in range(8)]
    read: list[int] = []
    scored: list[int] = []
    hooks = [
        engine._model.tok_embeddings.register_forward_hook(lambda m, args, out: read.append(len(out))),
        engine._model.lm_head.register_forward_hook(lambda m, args, out: scored.append(len(out))),
    ]
    engine.generate(requests, max_new_tokens=3, seed=1)
    for hook in hooks:
        hook.remove()
    # The short prompt is alone at position 1, where eight first tokens are drawn from one row of logits; at
    # position 3 the others are, when its sequences read their second token.
    assert read == [3, 3, 10, 10, 16, 16]
    assert scored == [0, 1, 8, 10, 16, 16]


def test_the_state_bound_decides_how_many_sequences_decode_together() -> None:
    decoder, requests = decoder_of(), requests_of(12)
    longest = max(len(r.tokens) for r in requests) + 10
    state = decoder.init_state(1, length=longest, device=CPU, dtype=torch.float32)
    row = sum(x.numel() * x.element_size() for layer in state for x in layer.values())
    engine = engine_of(decoder, max_state_bytes=5 * row + row // 2)
    assert engine.batch_size(requests, max_new_tokens=10) == 5
    assert engine_of(decoder, max_state_bytes=1).batch_size(requests, max_new_tokens=10) == 1


def test_seeds_versions_and_ids_give_different_samples_and_repeats_equal_ones() -> None:
    decoder = decoder_of()
    engine = engine_of(decoder)
    prompt = [1, 2]

    def run(id: str, seed: int) -> list[int]:
        return engine.generate([Request(id=id, tokens=prompt)], max_new_tokens=20, seed=seed)[
            0
        ].tokens.tolist()

    base = run("a", 0)
    assert base == run("a", 0)
    assert base != run("b", 0)
    assert base != run("a", 1)
    engine.publish(dict(decoder.named_parameters()), 6)
    assert base != run("a", 0)


def test_sampling_by_hand() -> None:
    logprobs = torch.tensor([[0.5, 0.1, 0.4]]).log().repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.59, 0.61, 0.999], dtype=torch.float64)
    plain = choose_tokens(logprobs, uniforms=uniforms, temperature=1.0, top_p=1.0)
    assert plain.tolist() == [0, 0, 1, 1, 2, 2]
    # 0.5 does not reach 0.6, so 0.4 stays too and 0.1 goes: 5/9 and 4/9, likeliest first.
    nucleus = choose_tokens(logprobs, uniforms=uniforms, temperature=1.0, top_p=0.6)
    assert nucleus.tolist() == [0, 0, 0, 2, 2, 2]
    assert choose_tokens(logprobs, uniforms=uniforms, temperature=1.0, top_p=0.49).tolist() == [0] * 6
    assert choose_tokens(logprobs, uniforms=uniforms, temperature=0.01, top_p=1.0).tolist() == [0] * 6
    # At temperature 1/2 the weights are 25, 1, 16 of 42.
    sharp = choose_tokens(logprobs, uniforms=uniforms, temperature=0.5, top_p=1.0)
    assert sharp.tolist() == [0, 0, 0, 0, 1, 2]
    assert choose_tokens(logprobs, uniforms=None, temperature=1.0, top_p=1.0).tolist() == [0] * 6


def test_sampled_frequencies_are_the_distribution_and_impossible_tokens_never_come() -> None:
    weights = torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0])
    uniforms = torch.from_numpy(np.random.default_rng(0).random(40_000))
    chosen = choose_tokens(
        weights.log().expand(40_000, 5), uniforms=uniforms, temperature=1.0, top_p=1.0
    ).bincount(minlength=5)
    assert chosen[1] == chosen[4] == 0
    assert (chosen / 40_000 - weights).abs().max() < 0.01


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_are_those_of_the_temperature_however_the_token_was_chosen(temperature: float) -> None:
    """The packed forward over the temperature, in float64 from its logits on."""
    decoder = decoder_of()
    generations = engine_of(decoder).generate(
        requests_of(), max_new_tokens=6, temperature=temperature, top_p=0.8, seed=5
    )
    scored, _ = score(decoder, generations, replay=True, temperature=temperature)
    for s, g in zip(scored, generations, strict=True):
        assert np.abs(s.numpy() - g.logprobs).max() < 1e-4


def test_publish_replaces_weights_and_version_and_keeps_no_state_of_the_old_ones() -> None:
    old, new = decoder_of(0), decoder_of(1)
    engine = engine_of(old)
    engine.generate(requests_of(), max_new_tokens=4, greedy=True, seed=0)
    engine.publish(dict(new.named_parameters()), 6)
    after = engine.generate(requests_of(), max_new_tokens=4, greedy=True, seed=0)
    fresh = engine_of(new).generate(requests_of(), max_new_tokens=4, greedy=True, seed=0)
    assert {g.policy_version for g in after} == {6}
    assert {g.policy_version for g in fresh} == {5}
    for a, b in zip(after, fresh, strict=True):
        assert_equal(a, b)
        assert np.array_equal(a.logprobs, b.logprobs)


def test_published_weights_are_copies() -> None:
    decoder = HybridDecoder(tiny_config(), attention="reference")
    decoder.init_weights(0)
    engine = engine_of(decoder)
    before = engine.generate(requests_of(), max_new_tokens=4, greedy=True, seed=0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(1.0)
    after = engine.generate(requests_of(), max_new_tokens=4, greedy=True, seed=0)
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True))


def test_a_refused_publish_names_every_fault_and_changes_neither_weights_nor_version() -> None:
    engine = engine_of(decoder_of(0))
    before = engine.generate(requests_of(), max_new_tokens=4, greedy=True, seed=0)
    weights = dict(decoder_of(1).named_parameters())
    del weights["norm.weight"]
    weights["surplus"] = torch.zeros(1)
    weights["lm_head.weight"] = torch.zeros(2, 2)
    with pytest.raises(Refusal) as caught:
        engine.publish(weights, 6)
    text = "\n".join(caught.value.reasons)
    assert len(caught.value.reasons) == 3
    assert "norm.weight is missing" in text
    assert "surplus is not a weight" in text
    assert "lm_head.weight has shape (2, 2), the model (31, 32)" in text
    assert engine.version == 5
    after = engine.generate(requests_of(), max_new_tokens=4, greedy=True, seed=0)
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True))


def test_what_cannot_be_generated_is_refused_by_key_and_request() -> None:
    engine = engine_of(decoder_of())
    request = Request(id="long", tokens=[1] * 1020)
    with pytest.raises(Refusal, match=r"request long: 1020 .*max_new_tokens=5.*max_seq_len=1024"):
        engine.generate([request], max_new_tokens=5, seed=0)
    with pytest.raises(Refusal, match=r"request none: the prompt is empty"):
        engine.generate([Request(id="none", tokens=[])], max_new_tokens=5, seed=0)
    with pytest.raises(Refusal) as caught:
        engine.generate(requests_of(), max_new_tokens=0, temperature=0.0, top_p=1.5, seed=0)
    assert [reason.split("=")[0] for reason in caught.value.reasons] == [
        "rollouts.max_new_tokens",
        "rollouts.temperature",
        "rollouts.top_p",
    ]
    assert engine.generate([], max_new_tokens=5, seed=0) == []


def test_dense_and_tied_models_generate_without_routes() -> None:
    config = ModelConfig(vocab_size=31, dim=32, num_experts=0, tie_embeddings=True, head_dim=8)
    decoder = HybridDecoder(config, attention="reference")
    decoder.init_weights(0)
    for g in engine_of(decoder).generate(requests_of(6), max_new_tokens=3, seed=0):
        assert g.routes is None
        assert len(g.logprobs) == 3
        assert (g.logprobs > -math.inf).all()


def test_a_bfloat16_engine_keeps_the_float32_parameters_that_ask_for_it() -> None:
    decoder = decoder_of()
    engine = engine_of(decoder, dtype=torch.bfloat16)
    single = engine_of(decoder).generate(requests_of(), max_new_tokens=1, greedy=True, seed=0)
    half = engine.generate(requests_of(), max_new_tokens=1, greedy=True, seed=0)
    gaps = [np.abs(a.logprobs - b.logprobs).max() for a, b in zip(single, half, strict=True)]
    assert 0 < np.median(gaps) < 0.1
