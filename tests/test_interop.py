"""Hugging Face directories in and out: parity with transformers, exactness, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interop_cases import DEGREES, decoder_of, hybrid, plain, weights_of
from model_cases import context_of, random_tokens
from programs import run_program
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from olmo_rl.config import BlockNorms, ModelConfig, QkNorm
from olmo_rl.hf.agreement import disagreements, format_of, meaning
from olmo_rl.hf.formats import HfFormat, read_config
from olmo_rl.hf.writing import export_hf, export_run
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import load_weights, read_weights
from olmo_rl.types import Refusal

LENGTHS = [5, 1, 9]
MODELS = {
    HfFormat.qwen3_moe: replace(plain(QkNorm.head), head_dim=16, dense_layers=[1], dense_hidden=40),
    HfFormat.olmoe: replace(plain(QkNorm.projection), route_norm=False, norm_eps=1e-5),
    HfFormat.olmo3moe: hybrid(),
}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[HfFormat, Path]:
    """One exported directory of each architecture, of several files."""
    root = tmp_path_factory.mktemp("hf")
    for kind, model in MODELS.items():
        assert (
            export_hf(weights_of(model), model=model, directory=root / kind.value, shard_bytes=40000) is kind
        )
    return {kind: root / kind.value for kind in MODELS}


@pytest.mark.parametrize("kind", [HfFormat.qwen3_moe, HfFormat.olmoe], ids=lambda kind: kind.value)
def test_logits_are_those_of_transformers_packed_or_not(
    kind: HfFormat, directories: dict[HfFormat, Path]
) -> None:
    model = MODELS[kind]
    theirs: Any
    theirs, told = AutoModelForCausalLM.from_pretrained(
        directories[kind], dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    theirs.eval()
    ours = decoder_of(model, weights_of(model))
    tokens = random_tokens(model, tokens=sum(LENGTHS), seed=1)
    documents = tokens.split(LENGTHS)
    with torch.no_grad():
        want = torch.cat([theirs(document[None]).logits[0] for document in documents])
        packed = ours(tokens, context_of(LENGTHS)).logits
        single = torch.cat([ours(d, context_of([len(d)])).logits for d in documents])
    print(f"{kind.value}: largest difference packed {(packed - want).abs().max():.2g}")
    torch.testing.assert_close(packed, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(single, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [HfFormat.qwen3_moe, HfFormat.olmoe], ids=lambda kind: kind.value)
def test_what_transformers_writes_is_read_as_the_same_model_and_weights(
    kind: HfFormat, directories: dict[HfFormat, Path], tmp_path: Path
) -> None:
    theirs: Any = AutoModelForCausalLM.from_pretrained(directories[kind], dtype=torch.float32)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    found, model = read_config(tmp_path)
    assert (found, meaning(model)) == (kind, meaning(MODELS[kind]))
    assert same(read_weights(str(tmp_path)), weights_of(MODELS[kind]))
    written = {name for path in directories[kind].glob("*.safetensors") for name in load_file(path)}
    expected = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert written == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_another_width_are_read_as_the_numbers_they_are(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model, weights = MODELS[HfFormat.qwen3_moe], weights_of(MODELS[HfFormat.qwen3_moe])
    export_hf(weights, model=model, directory=tmp_path / "hf", dtype=dtype, shard_bytes=40000)
    stored = [
        tensor for path in (tmp_path / "hf").glob("*.safetensors") for tensor in load_file(path).values()
    ]
    assert {tensor.dtype for tensor in stored} == {dtype}
    want = {name: tensor.to(dtype).float() for name, tensor in weights.items()}
    assert same(read_weights(str(tmp_path / "hf")), want)
    filled = HybridDecoder(model, attention="reference")
    load_weights(filled, str(tmp_path / "hf"))
    assert same({name: p.detach() for name, p in filled.named_parameters()}, want)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokens = random_tokens(model, tokens=9, seed=1)
    with torch.no_grad():
        ours, expected = filled(tokens, context_of([9])).logits, theirs(tokens[None]).logits[0]
    print(f"{dtype}: largest difference {(ours - expected).abs().max():.2g}")
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.value)
def test_export_then_import_is_bit_exact_and_says_the_same_model(
    kind: HfFormat, directories: dict[HfFormat, Path], tmp_path: Path
) -> None:
    model, weights, directory = MODELS[kind], weights_of(MODELS[kind]), directories[kind]
    assert len(list(directory.glob("*.safetensors"))) > 1
    found, stored = read_config(directory)
    assert (found, meaning(stored), stored.max_seq_len) == (kind, meaning(model), model.max_seq_len)
    assert disagreements(model, directory=directory) == []
    assert same(read_weights(str(directory)), weights)
    filled = HybridDecoder(model, attention="reference")
    filled.init_weights(5)
    load_weights(filled, str(directory))
    assert same({name: p.detach() for name, p in filled.named_parameters()}, weights)
    export_run(
        str(directory), model=model, directory=tmp_path / "again", dtype=torch.float32, shard_bytes=40000
    )
    assert files_of(tmp_path / "again") == files_of(directory)


def test_two_ranks_fill_their_shards_and_every_topology_exports_the_same_bytes(tmp_path: Path) -> None:
    model = hybrid()
    export_hf(weights_of(model), model=model, directory=tmp_path / "hf", shard_bytes=40000)
    run_program(tmp_path, "interop_cases:run_rank*2")
    want = files_of(tmp_path / "hf")
    for degree in DEGREES:
        out = tmp_path / f"out{degree}"
        export_run(
            str(tmp_path / f"ep{degree}"), model=model, directory=out, dtype=torch.float32, shard_bytes=40000
        )
        assert files_of(out) == want, f"EP{degree}"


def test_a_transposed_square_expert_matrix_changes_the_logits_by_far_more_than_parity_allows() -> None:
    model, weights = MODELS[HfFormat.olmoe], weights_of(MODELS[HfFormat.olmoe])
    tokens, context = random_tokens(model, tokens=9, seed=2), context_of([9])
    name = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
    turned = weights | {name: weights[name].transpose(1, 2).contiguous()}
    assert turned[name].shape == weights[name].shape
    with torch.no_grad():
        right, wrong = (decoder_of(model, w)(tokens, context).logits for w in (weights, turned))
    assert (right - wrong).abs().max() > 1e-2


def test_tied_embeddings_are_one_tensor_and_a_head_that_differs_is_refused(tmp_path: Path) -> None:
    model = replace(MODELS[HfFormat.qwen3_moe], tie_embeddings=True)
    weights, directory = weights_of(model), tmp_path / "hf"
    export_hf(weights, model=model, directory=directory)
    stored = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert same(read_weights(str(directory)), weights)
    head = stored["model.embed_tokens.weight"]
    save_file(stored | {"lm_head.weight": head.clone()}, directory / "model.safetensors")
    assert same(read_weights(str(directory)), weights)
    save_file(stored | {"lm_head.weight": head + 1}, directory / "model.safetensors")
    with pytest.raises(Refusal, match=r"tie_word_embeddings=true, yet lm_head\.weight differs"):
        read_weights(str(directory))


def edited(directory: Path, target: Path, *, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a directory with another config.json."""
    shutil.copytree(directory, target)
    values = json.loads((target / "config.json").read_text())
    change(values)
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (HfFormat.qwen3_moe, "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        (HfFormat.qwen3_moe, "rope_parameters", {"rope_type": "default", "factor": 2.0}),
        (HfFormat.qwen3_moe, "use_sliding_window", True),
        (HfFormat.qwen3_moe, "attention_bias", True),
        (HfFormat.qwen3_moe, "hidden_act", "gelu"),
        (HfFormat.qwen3_moe, "e_score_correction_bias", True),
        (HfFormat.qwen3_moe, "partial_rotary_factor", 0.5),
        (HfFormat.qwen3_moe, "qkv_bias", True),
        (HfFormat.qwen3_moe, "use_qk_norm", False),
        (HfFormat.qwen3_moe, "shared_expert_intermediate_size", 32),
        (HfFormat.qwen3_moe, "quantization_config", {"bits": 4}),
        # Values of another kind, which a reader could stumble over.
        (HfFormat.qwen3_moe, "rope_scaling", "yarn"),
        (HfFormat.qwen3_moe, "rope_theta", [10000.0]),
        (HfFormat.qwen3_moe, "num_hidden_layers", "2"),
        (HfFormat.qwen3_moe, "num_attention_heads", 0),
        (HfFormat.qwen3_moe, "decoder_sparse_step", 0),
        (HfFormat.qwen3_moe, "mlp_only_layers", 1),
        (HfFormat.qwen3_moe, "mlp_only_layers", ["1"]),
        (HfFormat.qwen3_moe, "rms_norm_eps", "1e-6"),
        (HfFormat.qwen3_moe, "tie_word_embeddings", "false"),
        (HfFormat.olmoe, "num_experts", 4.0),
        (HfFormat.olmo3moe, "gating_function", "entmax"),
        (HfFormat.olmo3moe, "layer_types", "full_attention"),
        (HfFormat.olmo3moe, "layer_types", ["full_attention"]),
        (HfFormat.olmoe, "clip_qkv", 8.0),
        (HfFormat.olmo3moe, "scalable_softmax", True),
        (HfFormat.olmo3moe, "attention_gate_type", "headwise"),
        (HfFormat.olmo3moe, "latent_moe_bias", True),
        (HfFormat.olmo3moe, "embed_scale", 2.0),
        (HfFormat.olmo3moe, "embed_norm", True),
        (HfFormat.olmo3moe, "normalize_expert_weights", 2.0),
        (HfFormat.olmo3moe, "qk_norm_per_head_gains", True),
        (HfFormat.olmo3moe, "emo_eval_document_expert_pool", 3),
        (HfFormat.olmo3moe, "linear_num_value_heads", 4),
        (HfFormat.olmo3moe, "linear_norm_eps", 1e-3),
    ],
)
def test_what_our_decoder_does_not_compute_is_refused_by_field(
    kind: HfFormat, field: str, value: object, directories: dict[HfFormat, Path], tmp_path: Path
) -> None:
    changed = edited(directories[kind], tmp_path / "hf", change=lambda values: values.update({field: value}))
    with pytest.raises(Refusal, match=rf"config\.json: {field}"):
        read_config(changed)


def test_the_base_of_rope_is_read_in_both_spellings_and_two_bases_are_refused(
    directories: dict[HfFormat, Path], tmp_path: Path
) -> None:
    plain = {"rope_type": "default", "rope_theta": 77.0}
    forms: list[dict[str, object]] = [
        {"rope_theta": 77.0, "rope_scaling": None},
        {"rope_theta": None, "rope_parameters": plain},
        {"rope_theta": 77, "rope_parameters": plain, "rope_scaling": {"type": "default"}},
    ]
    for i, form in enumerate(forms):
        directory = edited(
            directories[HfFormat.qwen3_moe], tmp_path / str(i), change=lambda v, f=form: v.update(f)
        )
        assert read_config(directory)[1].rope_theta == 77.0
    two = edited(
        directories[HfFormat.qwen3_moe], tmp_path / "two", change=lambda v: v.update(rope_parameters=plain)
    )
    with pytest.raises(Refusal, match=r"rope_theta is given as 10000\.0 and 77\.0: leave one"):
        read_config(two)


def test_every_field_of_olmo3moe_changes_the_model_it_is_read_as(
    directories: dict[HfFormat, Path], tmp_path: Path
) -> None:
    fields: dict[str, tuple[object, dict[str, object]]] = {
        "rope_theta": (77.0, {"rope_theta": 77.0}),
        "use_rope": (False, {"rope_theta": None}),
        "use_peri_ln": (False, {"block_norms": "after"}),
        "use_head_qk_norm": (False, {"qk_norm": "projection"}),
        "restore_weight_scale": (True, {"route_scale": 2.0}),
        "original_num_experts_per_tok": (8, {"route_scale": 2.0}),
        "normalize_expert_weights": (None, {"route_norm": False}),
        "gating_function": ("sigmoid", {"score_function": "sigmoid"}),
        "shared_expert_intermediate_size": (None, {"shared_hidden": 0}),
        "latent_moe_up_proj_input_norm": (False, {"latent_norm": False}),
        "latent_moe_dim": (24, {"latent_dim": 24}),
        "sliding_window": (7, {"sliding_window": 7}),
        "linear_allow_neg_eigval": (True, {"kda_negative_eigenvalues": True}),
        "linear_conv_kernel_dim": (3, {"conv_size": 3}),
        "dense_layers_indices": ([2], {"dense_layers": [2]}),
        "dense_mlp_intermediate_size": (56, {"dense_hidden": 56}),
    }
    before = meaning(read_config(directories[HfFormat.olmo3moe])[1])
    for field, (value, expected) in fields.items():
        directory = tmp_path / field
        directory.mkdir()
        values = json.loads((directories[HfFormat.olmo3moe] / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(values | {field: value}))
        after = meaning(read_config(directory)[1])
        changed = {name: after[name] for name in after if after[name] != before[name]}
        assert changed == expected, field


def test_a_model_that_is_not_the_directorys_is_refused_with_the_overrides_to_type(
    directories: dict[HfFormat, Path],
) -> None:
    model = replace(MODELS[HfFormat.qwen3_moe], top_k=1, rope_theta=None, max_seq_len=65)
    directory = directories[HfFormat.qwen3_moe]
    with pytest.raises(Refusal) as refused:
        load_weights(HybridDecoder(model, attention="reference"), str(directory))
    where = f"init_from={directory} has"
    assert refused.value.reasons == (
        f"model.rope_theta=null: {where} another: set model.rope_theta=10000.0",
        f"model.top_k=1: {where} another: set model.top_k=2",
        f"model.max_seq_len=65: {where} max_position_embeddings=64: lower it",
    )


def cut(pattern: str, *, keep: float) -> Callable[[Path], None]:
    """Keep a share of the bytes of the last file of that name."""

    def damage(directory: Path) -> None:
        path = sorted(directory.glob(pattern))[-1]
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return damage


def lose_file(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def lose_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()


def rewrite(change: Callable[[dict[str, Tensor], str], None]) -> Callable[[Path], None]:
    """Change the tensors of the file that has one expert matrix, and the index with them."""

    def damage(directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        table = json.loads(index.read_text())
        name = "model.layers.0.mlp.experts.2.up_proj.weight"
        file = table["weight_map"][name]
        tensors = load_file(directory / file)
        change(tensors, name)
        save_file(tensors, directory / file)
        kept = {tensor: at for tensor, at in table["weight_map"].items() if at != file}
        index.write_text(json.dumps(table | {"weight_map": kept | dict.fromkeys(tensors, file)}))

    return damage


CUT = r"model-\d+-of-\d+\.safetensors is missing, cut or no safetensors file"
EXPERT = r"model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *[(cut("*.safetensors", keep=share), CUT) for share in (0.0, 0.0003, 0.1, 0.9999)],
        (cut("*.index.json", keep=0.5), r"model\.safetensors\.index\.json cannot be read"),
        (cut("config.json", keep=0.5), r"config\.json cannot be read"),
        (lose_file, r"model-00002-of-\d+\.safetensors is missing"),
        (lose_index, r"neither model\.safetensors nor model\.safetensors\.index\.json"),
        (rewrite(lambda tensors, name: tensors.__delitem__(name)), f"{EXPERT} is missing"),
        (
            rewrite(lambda tensors, name: tensors.update({name + "_bias": torch.zeros(4)})),
            f"{EXPERT}_bias is not a weight of this model",
        ),
        (
            rewrite(lambda tensors, name: tensors.update({name: torch.zeros(8, 32)})),
            rf"{EXPERT} has shape \(8, 32\), the model \(32, 32\)",
        ),
        (
            rewrite(lambda tensors, name: tensors.update({name: torch.zeros(32, 32, dtype=torch.int8)})),
            f"{EXPERT} has dtype I8",
        ),
    ],
    ids=[
        "empty",
        "length",
        "header",
        "tail",
        "cut index",
        "cut config",
        "file",
        "index",
        "missing",
        "unexpected",
        "shape",
        "dtype",
    ],
)
def test_damaged_directories_are_refused_by_tensor_and_file(
    damage: Callable[[Path], None], message: str, directories: dict[HfFormat, Path], tmp_path: Path
) -> None:
    shutil.copytree(directories[HfFormat.olmoe], tmp_path / "hf")
    damage(tmp_path / "hf")
    with pytest.raises(Refusal, match=message):
        read_weights(str(tmp_path / "hf"))


def test_an_export_refuses_what_no_architecture_says_and_leaves_nothing(tmp_path: Path) -> None:
    before = replace(hybrid(), block_norms=BlockNorms.before)
    with pytest.raises(Refusal) as refused:
        format_of(before)
    text = "\n".join(refused.value.reasons)
    for key in ("layer_types", "shared_hidden", "latent_dim", "latent_norm"):
        assert f"model.{key}=" in text
    model = replace(hybrid(), route_scale=1.5)
    with pytest.raises(Refusal, match=r"model\.route_scale=1\.5"):
        export_hf(weights_of(model), model=model, directory=tmp_path / "hf")
    weights = weights_of(hybrid())
    weights.pop("norm.weight")
    with pytest.raises(Refusal, match=r"norm\.weight is missing"):
        export_hf(weights, model=hybrid(), directory=tmp_path / "hf")
    small: ModelConfig = replace(hybrid(), vocab_size=258)
    with pytest.raises(Refusal, match="259 ids, the embedding fewer rows"):
        export_hf(weights_of(small), model=small, directory=tmp_path / "hf")
    (tmp_path / "there").mkdir()
    with pytest.raises(Refusal, match="exists already"):
        export_hf(weights_of(hybrid()), model=hybrid(), directory=tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
