"""Sparse upcycling (arXiv 2212.05055): the MLPs of a dense Llama become the experts of a routed model.

Attention, norms, embeddings and the MLPs of dense layers are copied. Every expert is its layer's MLP plus a
Gaussian perturbation; routers are drawn with `model.init_std`. Gates sum to 1, so with equal experts the
mixture equals the MLP whatever the router chooses: before experts are perturbed, the logits of the routed
model are compared with those that transformers computes with the dense one.

Refused: sources that are not a Llama or differ from `model.*`, key by key; missing, unexpected or wrongly
shaped weights; logits that differ by more than TOLERANCE. Nothing is written then.

Shapes: T tokens of a document, V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from olmo_rl.complete_files import complete_directory
from olmo_rl.config import Config, LayerType, ModelConfig, QkNorm
from olmo_rl.data.chat import user_prompt
from olmo_rl.data.gguf import find_gguf, require
from olmo_rl.data.packs import PackContext
from olmo_rl.data.tokenizers import HfTokenizer, Tokenizer, fitting_tokenizer
from olmo_rl.hf.agreement import meaning, typed
from olmo_rl.hf.formats import HfFormat, is_hf_directory
from olmo_rl.hf.names import Piece, pieces, refuse_mismatches
from olmo_rl.policy.hybrid import HybridDecoder, named_generator
from olmo_rl.policy.weights import save_weights
from olmo_rl.types import Refusal

WEIGHTS, REPORT = "weights.safetensors", "upcycling.json"
TOLERANCE = 1e-3  # of a logit, absolute, in float32: a deep model sums in another order
# Texts on which logits are compared; rendered by the tokenizer's chat template where it has one.
PROMPTS = (
    "What is the capital of France?",
    "State the final answer to the following arithmetic problem: 17 + 25 =",
    "Write one sentence about a river in winter.",
    "Which weighs more, a kilogram of iron or two kilograms of feathers?",
)
_KEY = "upcycle.dense"
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_ROUTER = ".mlp.gate.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Upcycling:
    """Size of the routed model and its distance from the dense one. Logits are compared at every token of
    the prompts; `noise` is the measured perturbation of experts, RMS over RMS.
    """

    dense: str
    parameters: int
    tokens: int
    tolerance: float
    largest_logit: float
    difference_of_equal_experts: float
    noise: float
    difference_of_perturbed_experts: float

    def lines(self) -> list[str]:
        """Return the report as lines for the terminal."""
        return [
            f"upcycled: {self.dense} -> {self.parameters:,} parameters",
            f"equal experts: logits at {self.tokens} tokens differ from the dense model's by at most "
            f"{self.difference_of_equal_experts:.2g} (tolerance {self.tolerance:g}, largest logit "
            f"{self.largest_logit:.3g})",
            f"experts perturbed by {self.noise:.3g} of their RMS: by at most "
            f"{self.difference_of_perturbed_experts:.2g}",
        ]


def write_upcycled(config: Config, *, directory: Path) -> Upcycling:
    """Create the weights of `config.model` from `upcycle.dense` and write them, the report and the tokenizer
    into `directory`: complete or absent.
    """
    assert config.upcycle.dense is not None, "refusals require upcycle.dense"
    refuse_misfits(config)
    tokenizer = fitting_tokenizer(config.model)
    dense = load_dense(config.upcycle.dense)
    decoder = HybridDecoder(config.model, attention="reference").requires_grad_(False).eval()
    fill_from_dense(decoder, dict(dense.named_parameters()), seed=config.seed)
    documents = [torch.tensor(ids) for ids in prompt_ids(tokenizer)]
    expected = dense_logits(dense, documents)
    equal = difference(decoder, documents, expected=expected)
    if not equal <= TOLERANCE:
        raise Refusal(
            f"{_KEY}={config.upcycle.dense}: with equal experts logits differ from the dense model's by "
            f"{equal:.3g}, more than {TOLERANCE:g}: it is not the Llama that model.* computes"
        )
    noise = perturb(decoder, noise=config.upcycle.noise, seed=config.seed)
    report = Upcycling(
        dense=config.upcycle.dense,
        parameters=sum(parameter.numel() for parameter in decoder.parameters()),
        tokens=sum(map(len, documents)),
        tolerance=TOLERANCE,
        largest_logit=float(expected.abs().max()),
        difference_of_equal_experts=equal,
        noise=noise,
        difference_of_perturbed_experts=difference(decoder, documents, expected=expected),
    )
    _write(directory, decoder=decoder, report=report, tokenizer=tokenizer)
    return report


def read_report(directory: Path) -> Upcycling:
    """Read the report that `write_upcycled` wrote into this directory."""
    return Upcycling(**json.loads((directory / REPORT).read_text(encoding="utf-8")))


def load_dense(name: str) -> Any:
    """Load the dense model with transformers, in float32."""
    from transformers import AutoModelForCausalLM

    folder, file = _place(name)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=torch.float32,
        attn_implementation="sdpa",
        trust_remote_code=False,
    ).eval()


def _place(name: str) -> tuple[Path, str | None]:
    """Return the directory of the dense model, and the name of its GGUF file, None for other formats."""
    where = f"{_KEY}={name}"
    path = find_gguf(name, key=_KEY)
    if path is not None:
        require(("transformers", "gguf", "accelerate"), where=where)
        return path.parent, path.name
    if not is_hf_directory(name):
        raise Refusal(f"{where}: neither a Hugging Face directory, nor a .gguf file, nor package:NAME")
    require(("transformers",), where=where)
    return Path(name), None


def dense_files(name: str) -> list[Path]:
    """List the files of the dense model in name order."""
    folder, file = _place(name)
    return [folder / file] if file is not None else sorted(p for p in folder.iterdir() if p.is_file())


def refuse_misfits(config: Config) -> None:
    """Refuse a dense model of which `config.model` is not an upcycled form; no weights are read."""
    name = config.upcycle.dense
    assert name is not None, "refusals require upcycle.dense"
    folder, file = _place(name)
    from transformers import AutoConfig

    try:
        dense = AutoConfig.from_pretrained(folder, gguf_file=file, trust_remote_code=False)
    except Exception as error:  # readers of GGUF and JSON raise whatever they meet in a damaged file
        reason = (str(error).splitlines() or [""])[0][:200]
        raise Refusal(f"{_KEY}={name}: {reason} ({type(error).__name__}): give a whole one") from error
    if dense.model_type != "llama":
        raise Refusal(f"{_KEY}={name}: model_type={dense.model_type!r}, only llama can be upcycled")
    if reasons := _misfits(config.model, dense=dense, where=f"{_KEY}={name}"):
        raise Refusal(reasons)


def _misfits(model: ModelConfig, *, dense: Any, where: str) -> list[str]:
    """List one line for each differing key, with the override to type, and for each unsupported feature."""
    rope = dict(dense.rope_parameters)
    held = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    reasons = [
        f"{where}: {name}={getattr(dense, name)} is not supported, {value} is"
        for name, value in held.items()
        if getattr(dense, name) != value
    ]
    if rope.get("rope_type", "default") != "default":
        reasons.append(f"{where}: rope_type={rope['rope_type']} is not supported, plain RoPE is")
    same = replace(
        model,
        vocab_size=dense.vocab_size,
        dim=dense.hidden_size,
        layer_types=[LayerType.full_attention] * dense.num_hidden_layers,
        dense_hidden=dense.intermediate_size,
        num_heads=dense.num_attention_heads,
        num_kv_heads=dense.num_key_value_heads,
        head_dim=dense.head_dim or dense.hidden_size // dense.num_attention_heads,
        qk_norm=QkNorm.none,
        rope_theta=float(rope["rope_theta"]),
        expert_hidden=dense.intermediate_size,
        norm_eps=round(float(dense.rms_norm_eps), 12),  # GGUF stores it in float32
        tie_embeddings=dense.tie_word_embeddings,
    )
    ours, theirs = meaning(model), meaning(same)
    reasons += [
        f"model.{name}={typed(ours[name])}: {where} has another: set model.{name}={typed(theirs[name])}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]
    if model.max_seq_len > dense.max_position_embeddings:
        reasons.append(
            f"model.max_seq_len={model.max_seq_len}: {where} has max_position_embeddings="
            f"{dense.max_position_embeddings}: lower it"
        )
    return reasons


@torch.no_grad()
def fill_from_dense(decoder: HybridDecoder, dense: Mapping[str, Tensor], *, seed: int) -> None:
    """Fill a decoder from the dense model's weights by their Hugging Face names: equal experts, routers drawn
    from `seed`. Every weight of one model must have a counterpart in the other.
    """
    parameters = dict(decoder.named_parameters())
    parts = pieces({name: p.shape for name, p in parameters.items()}, kind=HfFormat.qwen3_moe)
    copied = {piece: _EXPERT.sub(".mlp.", piece.name) for piece in parts if not _is_router(piece)}
    refuse_mismatches(
        {name: piece.shape for piece, name in copied.items()},
        {name: tensor.shape for name, tensor in dense.items()},
        where=_KEY,
    )
    for piece in parts:
        part = parameters[piece.parameter][piece.start : piece.stop]
        if _is_router(piece):
            generator = named_generator(piece.parameter, seed)
            part.copy_(torch.randn(part.shape, generator=generator) * decoder.config.init_std)
        else:
            part.copy_(dense[copied[piece]].view_as(part))


def _is_router(piece: Piece) -> bool:
    return piece.name.endswith(_ROUTER)


@torch.no_grad()
def perturb(decoder: HybridDecoder, *, noise: float, seed: int) -> float:
    """Add to every matrix of every expert a Gaussian of `noise` times the matrix's own RMS; return the
    measured perturbation, RMS over RMS of all experts together.
    """
    added, whole = 0.0, 0.0
    for name, parameter in decoder.named_parameters():
        if ".routed_experts." not in name:
            continue
        generator = named_generator(f"{name}/noise", seed)
        scale = parameter.square().mean(dim=(1, 2), keepdim=True).sqrt() * noise
        change = torch.randn(parameter.shape, generator=generator) * scale
        whole += float(parameter.square().sum(dtype=torch.float64))
        added += float(change.square().sum(dtype=torch.float64))
        parameter.add_(change)
    return (added / whole) ** 0.5


def prompt_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Encode PROMPTS."""
    chat = isinstance(tokenizer, HfTokenizer) and tokenizer.backend.chat_template
    texts = [user_prompt(t, tokenizer=tokenizer, system=None) for t in PROMPTS] if chat else list(PROMPTS)
    return [tokenizer.encode(text) for text in texts]


@torch.inference_mode()
def dense_logits(dense: Any, documents: Sequence[Tensor]) -> Tensor:
    """[sum of T, V]: each document (int64 [T]) on its own through a model of transformers."""
    return torch.cat([dense(document[None]).logits[0] for document in documents])


@torch.inference_mode()
def difference(decoder: HybridDecoder, documents: Sequence[Tensor], *, expected: Tensor) -> float:
    """The largest absolute difference of a logit: the documents as one pack of our decoder, live routes."""
    boundaries = (0, *accumulate(map(len, documents)))
    context = PackContext(
        positions=torch.cat([torch.arange(len(document)) for document in documents]),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        boundaries=boundaries,
        max_seqlen=max(b - a for a, b in pairwise(boundaries)),
        real_tokens=boundaries[-1],
    )
    logits = decoder(torch.cat(list(documents)), context).logits
    return float((logits - expected).abs().max())


def _write(directory: Path, *, decoder: HybridDecoder, report: Upcycling, tokenizer: Tokenizer) -> None:
    with complete_directory(directory) as scratch:
        save_weights(dict(decoder.named_parameters()), scratch / WEIGHTS)
        (scratch / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        if isinstance(tokenizer, HfTokenizer):
            tokenizer.backend.save_pretrained(scratch)
