"""Documents of a pack do not see each other: exact in float32 under replay, for each mixer and the whole
model.

Every claim has its negative control: withhold the boundaries from one mixer and the same measurement leaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_cases import context_of, random_routes, random_tokens, tiny_config
from torch import Tensor, nn

from olmo_rl.config import LayerType
from olmo_rl.data.packs import PackContext, RouteMode
from olmo_rl.policy.hybrid import HybridDecoder

LENGTHS = [6, 1, 2, 37, 1, 9, 2, 20]  # shorter than the convolution, longer than a chunk and than the window
TOKENS = sum(LENGTHS)
SPANS = [(sum(LENGTHS[:d]), sum(LENGTHS[: d + 1])) for d in range(len(LENGTHS))]
MIXERS = list(LayerType)


def leak_of(run: Callable[[Tensor], Tensor], changed: list[tuple[Tensor, Tensor]]) -> list[float]:
    """For each (input, input with one document replaced) the largest change outside that document."""
    leaks = []
    for document, (before, after) in enumerate(changed):
        outside = torch.ones(TOKENS, dtype=torch.bool)
        outside[slice(*SPANS[document])] = False
        first, second = run(before), run(after)
        assert not torch.equal(first[~outside], second[~outside]), (
            "the replaced document must matter to itself"
        )
        leaks.append((first[outside] - second[outside]).abs().max().item())
    return leaks


def with_document_replaced(x: Tensor, replacement: Tensor) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for start, stop in SPANS:
        after = x.clone()
        after[start:stop] = replacement[start:stop]
        pairs.append((x, after))
    return pairs


def withhold_boundaries(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook: this module sees the row as one document; positions stay as they were."""
    x, context = args
    rows = context.boundaries[-1]
    whole = dataclasses.replace(
        context,
        boundaries=(0, rows),
        cu_seqlens=torch.tensor([0, rows], dtype=torch.int32),
        max_seqlen=rows,
    )
    return x, whole


@pytest.mark.parametrize("layer_type", MIXERS)
def test_a_mixer_isolates_every_document_exactly_and_leaks_without_boundaries(layer_type: LayerType) -> None:
    config = dataclasses.replace(tiny_config(), layer_types=[layer_type])
    model = HybridDecoder(config, attention="reference")
    model.init_weights(1)
    mixer = model.layers["0"].mixer
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, TOKENS, config.dim, generator=generator).unbind(0)
    context = context_of(LENGTHS)
    pairs = with_document_replaced(x, y)
    with torch.no_grad():
        assert leak_of(lambda rows: mixer(rows, context), pairs) == [0.0] * len(LENGTHS)
        mixer.register_forward_pre_hook(withhold_boundaries)
        leaks = leak_of(lambda rows: mixer(rows, context), pairs)
    assert all(leak > 1e-4 for leak in leaks[:-1]), leaks  # nothing follows the last document


def model_and_pairs() -> tuple[HybridDecoder, PackContext, list[tuple[Tensor, Tensor]]]:
    config = tiny_config()
    model = HybridDecoder(config, attention="reference")
    model.init_weights(3)
    tokens = random_tokens(config, tokens=TOKENS, seed=4)
    routes = random_routes(config, tokens=TOKENS, seed=5)
    context = context_of(LENGTHS, mode=RouteMode.replay, routes=routes)
    return model, context, with_document_replaced(tokens, (tokens + 7) % config.vocab_size)


def test_the_whole_model_isolates_first_interior_and_last_documents_exactly_under_replay() -> None:
    model, context, pairs = model_and_pairs()
    with torch.no_grad():
        assert leak_of(lambda tokens: model(tokens, context).logits, pairs) == [0.0] * len(LENGTHS)


@pytest.mark.parametrize("layer", range(4))
def test_boundaries_withheld_from_any_one_mixer_make_the_whole_model_leak(layer: int) -> None:
    model, context, pairs = model_and_pairs()
    model.layers[str(layer)].mixer.register_forward_pre_hook(withhold_boundaries)
    with torch.no_grad():
        leaks = leak_of(lambda tokens: model(tokens, context).logits, pairs)
    assert all(leak > 1e-4 for leak in leaks[:-1]), leaks


def test_a_documents_loss_sends_exactly_no_gradient_to_other_documents() -> None:
    model, context, pairs = model_and_pairs()
    found: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        found.append(leaf)
        return leaf

    model.tok_embeddings.register_forward_hook(keep)
    for start, stop in SPANS:
        model(pairs[0][0], context).logits[start:stop].square().sum().backward()
        gradient = found.pop().grad.abs().sum(1)
        assert (gradient[start:stop] > 0).all()
        gradient[start:stop] = 0
        assert gradient.max().item() == 0.0


def test_restarting_positions_alone_isolates_nothing() -> None:
    model, context, pairs = model_and_pairs()
    for block in model.layers.values():
        block.mixer.register_forward_pre_hook(withhold_boundaries)
    assert context.positions[:8].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    with torch.no_grad():
        assert leak_of(lambda tokens: model(tokens, context).logits, pairs)[0] > 1e-2
