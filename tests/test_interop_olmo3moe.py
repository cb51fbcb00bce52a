"""olmo3moe against its Hugging Face implementation, which needs another transformers: in its own process.

Random weights of several models, and a model that the command line trained and exported. The peer's packages
go into a directory of the cache, once a machine; the environment of the tests is left as it is. Without an
index the tests are skipped and say so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training_cases
from bounds import BOUND_SECONDS
from composing import compose
from interop_cases import attention_only, decoder_of, hybrid, overrides, weights_of
from model_cases import context_of, random_tokens
from torch import Tensor

from olmo_rl.cli import run as run_command
from olmo_rl.config import BlockNorms, LayerType, ModelConfig, QkNorm, ScoreFunction
from olmo_rl.hf.formats import HfFormat
from olmo_rl.hf.names import pieces
from olmo_rl.hf.writing import export_hf
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import parameter_shapes, read_weights

TESTS = Path(__file__).parent
PINS = ("transformers==5.2.0", "tokenizers==0.22.2", "ai2-olmo-core==3.0.0")
LENGTHS = [5, 1, 9]
Found = dict[str, Any]
MODELS: dict[str, ModelConfig] = {
    "latent": attention_only(),
    "after": replace(
        attention_only(),
        block_norms=BlockNorms.after,
        qk_norm=QkNorm.projection,
        latent_dim=None,
        latent_norm=False,
        shared_hidden=0,
        route_scale=2.0,
    ),
    "sigmoid": replace(attention_only(), score_function=ScoreFunction.sigmoid, latent_norm=False),
    "hybrid": hybrid(),
    "packed_moe": compose("+experiment=packed_moe").model,
}
# Attention layers and latent experts, with the routes of the files that training_cases.py writes.
TRAINED = replace(
    training_cases.MODEL,
    layer_types=[LayerType.full_attention, LayerType.sliding_attention, LayerType.full_attention],
    sliding_window=4,
    rope_theta=None,
    block_norms=BlockNorms.both,
    latent_dim=8,
    latent_norm=True,
    shared_hidden=8,
)


@pytest.fixture(scope="module")
def site(pytestconfig: pytest.Config) -> Path:
    """The peer's packages, installed once; a directory that has its own name is whole."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "olmo_rl_tests"
    final = cache / "-".join(PINS).replace("==", "_")
    if final.is_dir():
        return final
    scratch = final.with_name(f"{final.name}.{os.getpid()}.tmp")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(scratch), *PINS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_SECONDS)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install {' '.join(PINS)}: {done.stderr.strip().splitlines()[-1:]}")
    try:
        scratch.rename(final)
    except OSError:  # another process was first
        assert final.is_dir()
    return final


@pytest.fixture(scope="module")
def checkpoint(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of two updates of `TRAINED` from files, by commands; exported beside it, into
    trained/hf.
    """
    place = tmp_path_factory.mktemp("trained")
    collections = [training_cases.samples_of(seed=i, prefix=f"f{i}-") for i in range(2)]
    training_cases.write_files(place, collections)
    saved = place / "outputs" / "t" / "checkpoints" / "step-2"
    train = "run_name=t rollouts=files rollouts.path=files packing=consecutive trainer.max_steps=2"
    train += " batch.samples_per_step=8 optim.lr=0.03 optim.warmup_steps=0 callbacks=quiet"
    export = f"recipe=export run_name=x init_from={saved} export.path=trained/hf export.shard_gib=3e-5"
    before = Path.cwd()
    os.chdir(place)
    try:
        for command in (train, export):
            assert run_command([*overrides(TRAINED), *command.split()]) == 0
    finally:
        os.chdir(before)
    return saved


@pytest.fixture(scope="module")
def peer(site: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Results of the peer for every model: logits by document, shapes by name."""
    root = tmp_path_factory.mktemp("peer")
    places = {name: root / name for name in MODELS} | {"trained": checkpoint.parents[3] / "trained"}
    for name, model in MODELS.items():
        export_hf(weights_of(model), model=model, directory=places[name] / "hf", shard_bytes=40000)
    for name, place in places.items():
        torch.save(list(tokens_of(MODELS.get(name, TRAINED)).split(LENGTHS)), place / "tokens.pt")
    command = [sys.executable, str(TESTS / "olmo3moe_peer.py"), str(site), *map(str, places.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return {name: torch.load(place / "peer.pt") for name, place in places.items()}


def tokens_of(model: ModelConfig) -> Tensor:
    return random_tokens(model, tokens=sum(LENGTHS), seed=3)


def check_logits(name: str, ours: HybridDecoder, want: Tensor) -> None:
    """Equal to the peer's in one pack, and document by document."""
    tokens = tokens_of(ours.config)
    with torch.no_grad():
        packed = ours(tokens, context_of(LENGTHS)).logits
        single = torch.cat([ours(d, context_of([len(d)])).logits for d in tokens.split(LENGTHS)])
    apart, alone = ((logits - want).abs().max() for logits in (packed, single))
    print(
        f"olmo3moe {name}: logits up to {want.abs().max():.2g}, largest difference {apart:.2g} packed, "
        f"{alone:.2g} not"
    )
    torch.testing.assert_close(packed, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(single, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["latent", "after", "sigmoid"])
def test_logits_of_attention_layers_are_the_peers_packed_or_not(name: str, peer: dict[str, Found]) -> None:
    model = MODELS[name]
    check_logits(name, decoder_of(model, weights_of(model)), torch.cat(peer[name]["logits"]))


def test_a_model_that_commands_trained_and_exported_has_the_peers_logits(
    checkpoint: Path, peer: dict[str, Found]
) -> None:
    weights = read_weights(str(checkpoint))
    initial = HybridDecoder(TRAINED, attention="reference")
    initial.init_weights(0)
    starts = {name: parameter.detach() for name, parameter in initial.named_parameters()}
    moved = {name: float((weights[name] - start).abs().max()) for name, start in starts.items()}
    print(f"two updates moved every one of {len(moved)} weights, by {min(moved.values()):.2g} at least")
    assert min(moved.values()) > 1e-2
    check_logits("trained", decoder_of(TRAINED, weights), torch.cat(peer["trained"]["logits"]))


@pytest.mark.parametrize("name", [*MODELS, "trained"])
def test_names_and_shapes_are_exactly_the_peers_kda_layers_included(
    name: str, peer: dict[str, Found]
) -> None:
    shapes = parameter_shapes(MODELS.get(name, TRAINED))
    written = {piece.name: tuple(piece.shape) for piece in pieces(shapes, kind=HfFormat.olmo3moe)}
    assert written == peer[name]["shapes"]
