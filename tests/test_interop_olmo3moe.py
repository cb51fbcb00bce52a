"""olmo3moe against its Hugging Face implementation, which needs another transformers: in its own process.

The peer's packages go into a directory of the cache, once a machine; the environment of the tests is left as
it is. Without an index the tests are skipped and say so.
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
from interop_cases import attention_only, decoder_of, hybrid, weights_of
from model_cases import context_of, random_tokens
from torch import Tensor

from olmo_rl.config import BlockNorms, ModelConfig, QkNorm, ScoreFunction
from olmo_rl.hf_config import HfFormat
from olmo_rl.policy.hf_export import export_hf
from olmo_rl.policy.hf_names import pieces

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
}


@pytest.fixture(scope="module")
def site(pytestconfig: pytest.Config) -> Path:
    """The peer's packages, installed once; a directory that has its own name is whole."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "olmo_rl_tests"
    final = cache / "-".join(PINS).replace("==", "_")
    if final.is_dir():
        return final
    scratch = final.with_name(f"{final.name}.{os.getpid()}.tmp")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(scratch), *PINS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install {' '.join(PINS)}: {done.stderr.strip().splitlines()[-1:]}")
    try:
        scratch.rename(final)
    except OSError:  # another process was first
        assert final.is_dir()
    return final


@pytest.fixture(scope="module")
def peer(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What the peer says of every model: logits by document, shapes by name."""
    root = tmp_path_factory.mktemp("peer")
    for name, model in MODELS.items():
        export_hf(weights_of(model), model=model, directory=root / name / "hf", shard_bytes=40000)
        torch.save(list(tokens_of(model).split(LENGTHS)), root / name / "tokens.pt")
    command = [sys.executable, str(TESTS / "olmo3moe_peer.py"), str(site)]
    done = subprocess.run(
        command + [str(root / name) for name in MODELS], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return {name: torch.load(root / name / "peer.pt") for name in MODELS}


def tokens_of(model: ModelConfig) -> Tensor:
    return random_tokens(model, tokens=sum(LENGTHS), seed=3)


@pytest.mark.parametrize("name", ["latent", "after", "sigmoid"])
def test_logits_of_attention_layers_are_the_peers_packed_or_not(name: str, peer: dict[str, Found]) -> None:
    model = MODELS[name]
    ours, tokens = decoder_of(model, weights_of(model)), tokens_of(model)
    want = torch.cat(peer[name]["logits"])
    with torch.no_grad():
        packed = ours(tokens, context_of(LENGTHS)).logits
        single = torch.cat([ours(d, context_of([len(d)])).logits for d in tokens.split(LENGTHS)])
    print(f"olmo3moe {name}: largest difference packed {(packed - want).abs().max():.2g}")
    torch.testing.assert_close(packed, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(single, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_exactly_the_peers_kda_layers_included(
    name: str, peer: dict[str, Found]
) -> None:
    shapes = {key: tensor.shape for key, tensor in weights_of(MODELS[name]).items()}
    written = {piece.name: tuple(piece.shape) for piece in pieces(shapes, kind=HfFormat.olmo3moe)}
    assert written == peer[name]["shapes"]
