"""Hugging Face directories by commands: train on two ranks, export, start again; tokenizers; refusals.

What needs two ranks runs as under torchrun; the rest calls the same command line in this process.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chat_cases import MARKED, save_tokenizer
from composing import compose
from launched import train_on_two_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from olmo_rl.cli import run as run_command
from olmo_rl.config import LayerType
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import parameter_shapes, read_weights

# packed_moe with its mixers (KDA twice, full, sliding), its latent and its shared experts, at a tenth of its
# width.
OVERRIDES = (
    "+experiment=packed_moe warm_start.steps=0 callbacks=quiet task.eval_problems=0 "
    "model.dim=32 model.dense_hidden=48 model.num_kv_heads=2 model.head_dim=8 model.kda_heads=2 "
    "model.kda_head_dim=16 model.expert_hidden=24 model.shared_hidden=16 model.latent_dim=16 "
    "batch.samples_per_step=32 rollouts.max_new_tokens=6 optim.lr=0.01 optim.warmup_steps=0 "
    "task=jsonl task.path=problems.jsonl +task.verifier._target_=own_verifier.odd"
)
PACKED = tuple(OVERRIDES.split())
SINGLE = ("strategy=single", "trainer=cpu")
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def place(place: Path) -> Iterator[Path]:
    """The working directory of every command of this file, some of which run in this process."""
    sys.path.insert(0, str(place))
    yield place
    sys.path.remove(str(place))


@pytest.fixture
def here(place: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process: exit code and everything that it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        capfd.readouterr()
        code = run_command(arguments)
        return code, "".join(capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def checkpoint(place: Path) -> Path:
    """Three updates of two ranks that share experts."""
    code, output = train_on_two_ranks(*PACKED, "run_name=t", "trainer.max_steps=3", place=place)
    assert code == 0, output
    return place / "outputs" / "t" / "checkpoints" / "step-3"


@pytest.fixture(scope="module")
def directory(checkpoint: Path, place: Path) -> Path:
    """That checkpoint, exported into several files."""
    export = f"recipe=export run_name=x init_from={checkpoint} export.path=hf export.shard_gib=1e-4"
    assert run_command([*PACKED, *export.split()]) == 0
    return place / "hf"


def tensors_of(directory: Path) -> dict[str, Tensor]:
    paths = sorted(directory.glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_of_packed_moe_exports_and_comes_back_bit_equal(
    here: Command, checkpoint: Path, directory: Path, place: Path
) -> None:
    model = compose(*PACKED).model
    assert LayerType.linear_attention in model.layer_types
    trained = read_weights(str(checkpoint))
    assert {name: tensor.shape for name, tensor in trained.items()} == parameter_shapes(model)
    initial = HybridDecoder(model, attention="reference")
    initial.init_weights(0)
    assert all(not torch.equal(trained[name], start) for name, start in initial.named_parameters())

    assert len(list(directory.glob("*.safetensors"))) > 1
    assert identical(read_weights(str(directory)), trained)
    code, output = here(*PACKED, "recipe=export", "run_name=y", "init_from=hf", "export.path=again")
    assert code == 0, output
    assert output.splitlines()[-1] == "olmo3moe: again"
    written = tensors_of(directory)
    assert identical(tensors_of(place / "again"), written)
    elements = sum(tensor.numel() for tensor in trained.values())
    assert sum(tensor.numel() for tensor in written.values()) == elements
    print(f"packed_moe: {len(trained)} weights, {elements:,} elements, as {len(written)} tensors, bit-equal")


def test_two_ranks_start_from_the_directory_with_the_checkpoints_weights_to_the_bit(
    checkpoint: Path, directory: Path, place: Path
) -> None:
    """A KL term keeps what a run starts from: the weights that the ranks read into their shards."""
    run = ("run_name=again", "trainer.max_steps=1", f"init_from={directory}", "loss.kl_coef=0.01")
    code, output = train_on_two_ranks(*PACKED, *run, place=place)
    assert code == 0, output
    trained = read_weights(str(checkpoint))
    assert identical(read_weights("outputs/again/reference"), trained)
    after = read_weights("outputs/again/checkpoints/step-1")
    assert not any(torch.equal(after[name], tensor) for name, tensor in trained.items())


def lose(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def add(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name.replace("weight", "e_score_correction_bias")] = torch.zeros(8)


def turn(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].T.contiguous()


GATE = "model.layers.1.mlp.router.gate.weight"
DAMAGED = {
    "missing": (lose, f"{GATE} is missing"),
    "unexpected": (
        add,
        "model.layers.1.mlp.router.gate.e_score_correction_bias is not a weight of this model",
    ),
    "shape": (turn, f"{GATE} has shape (32, 8), the model (8, 32)"),
}


def damaged(directory: Path, target: Path, *, change: Callable[[dict[str, Tensor], str], None]) -> None:
    """A copy in one file, with one tensor changed."""
    target.mkdir()
    shutil.copy(directory / "config.json", target)
    tensors = tensors_of(directory)
    change(tensors, GATE)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_missing_an_unexpected_and_a_misshapen_tensor_are_refused_by_name_with_exit_code_2(
    kind: str, here: Command, directory: Path, place: Path
) -> None:
    change, message = DAMAGED[kind]
    damaged(directory, place / kind, change=change)
    for name, recipe in (("train", ()), ("export", ("recipe=export",))):
        run = (f"run_name={kind}_{name}", f"init_from={kind}", "trainer.max_steps=1")
        code, output = here(*PACKED, *SINGLE, *recipe, *run)
        assert code == 2, output
        assert f"={kind}: {message}\n" in output
        assert "Traceback" not in output
    assert not (place / "outputs" / f"{kind}_export" / "hf").exists()


def test_a_checkpoint_that_lost_bytes_and_a_cut_file_of_weights_are_refused_before_anything_is_read(
    here: Command, checkpoint: Path, place: Path
) -> None:
    shutil.copytree(checkpoint, place / "cut")
    shard = place / "cut" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    weights = place / "cut.safetensors"
    save_file(read_weights(str(checkpoint)), weights)
    weights.write_bytes(weights.read_bytes()[:-100])
    for path, message in (
        ("cut", "init_from=cut: a directory without config.json, and no whole checkpoint (read from disk); "),
        ("outputs/t", "init_from=outputs/t: a directory without config.json, and no whole checkpoint"),
        ("cut.safetensors", "init_from=cut.safetensors: not a safetensors file ("),
    ):
        code, output = here(*PACKED, "recipe=export", "run_name=cut", f"init_from={path}")
        assert code == 2, output
        assert message in output
        assert "Traceback" not in output


def test_an_export_carries_the_tokenizer_that_a_later_run_starts_with(here: Command, place: Path) -> None:
    tokenizer = save_tokenizer(place / "tokenizer", template=MARKED)
    vocabulary = ("model.vocab_size=304", *SINGLE)
    sft = ("recipe=sft", "trainer.max_steps=1")
    code, output = here(*PACKED, *vocabulary, *sft, "run_name=sft", "model.tokenizer=tokenizer")
    assert code == 0, output
    export = "recipe=export run_name=xt init_from=outputs/sft/checkpoints/step-1 export.path=with_tokenizer"
    code, output = here(*PACKED, *vocabulary, *export.split(), "model.tokenizer=tokenizer")
    assert code == 0, output

    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (place / "with_tokenizer", tokenizer))
    text = "hello there 12+34= good bye \u00e4\u4e2d"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template == MARKED
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    config = json.loads((place / "with_tokenizer" / "config.json").read_text())
    assert config["eos_token_id"] == theirs.eos_token_id
    sampling = GenerationConfig.from_pretrained(place / "with_tokenizer")
    assert (sampling.do_sample, sampling.temperature, sampling.top_p, sampling.top_k) == (True, 1.0, 1.0, 0)
    assert (sampling.repetition_penalty, sampling.eos_token_id) == (1.0, theirs.eos_token_id)

    # The ids of one tokenizer with the weights of another would train on noise.
    start = (*PACKED, *vocabulary, "init_from=with_tokenizer", "trainer.max_steps=1")
    code, output = here(*start, "run_name=bytes")
    assert code == 2, output
    assert "set model.tokenizer=with_tokenizer" in output
    own = ("model.tokenizer=with_tokenizer",)
    code, output = here(*start, *own, "run_name=generated")
    assert code == 0, output
    code, output = here(*start, *own, *sft, "run_name=supervised")
    assert code == 0, output


@pytest.mark.parametrize("recipe", ["train", "rollout", "sft", "validate"])
def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused_by_every_recipe(
    recipe: str, here: Command, place: Path
) -> None:
    if not (place / "large").exists():
        save_tokenizer(place / "large", template=None)
    given = (f"recipe={recipe}", f"run_name=large_{recipe}", "model.tokenizer=large", "trainer.max_steps=1")
    code, output = here(*PACKED, *SINGLE, *given)
    assert code == 2, output
    assert "model.tokenizer=large has " in output
    assert "ids, the embedding fewer rows: raise model.vocab_size=259" in output
    assert "Traceback" not in output


def test_the_memory_of_a_released_model_on_nodes_is_told_on_a_cpu(here: Command) -> None:
    code, output = here("recipe=validate", "+experiment=qwen3_30b_a3b", "trainer=nodes", "run_name=q")
    assert code == 0, output
    assert "ranks      32 x gpu, expert-parallel degree 8" in output
    rows = dict(line.split(maxsplit=2)[1:] for line in output.splitlines() if line.startswith("  memory"))
    sizes = {name: float(text.split()[0]) for name, text in rows.items()}
    assert sizes["sum"] == pytest.approx(sum(sizes.values()) - sizes["sum"], abs=0.05)
    assert sizes["adam"] == pytest.approx(2 * sizes["weights"], abs=0.02)
    # 30.5 G parameters in float32 over 32 ranks.
    assert sizes["weights"] == pytest.approx(30.532e9 * 4 / 32 / 2**30, rel=0.01)
