"""Maps tensors of Hugging Face directories to parts of our parameters, and compares expected weights with
found ones.

One table of name pairs for each architecture. A Hugging Face tensor contains the rows [start, stop) of
dimension 0 of one of our parameters, in another shape with the same elements: one expert of a stack, one of
three convolutions, or all of it. Every parameter must be covered whole; `pieces` asserts that. No torch.

Shapes: E experts, F hidden width of an expert, D width of routed tokens, W taps of a convolution.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from olmo_rl.hf.formats import HfFormat
from olmo_rl.types import Refusal

Shape = tuple[int, ...]
_SHOWN = 8  # weights named in a refusal; further ones are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The Hugging Face tensor `name` of `shape` is `parameter[start:stop]`. `stacked`: it lacks dimension 0
    of ours.
    """

    name: str
    shape: Shape
    parameter: str
    start: int
    stop: int
    stacked: bool = False


_EVERYWHERE = (
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
)
_MIXER = (
    ("mixer.wq.weight", "self_attn.q_proj.weight"),
    ("mixer.wk.weight", "self_attn.k_proj.weight"),
    ("mixer.wv.weight", "self_attn.v_proj.weight"),
    ("mixer.wo.weight", "self_attn.o_proj.weight"),
    ("mixer.q_norm.weight", "self_attn.q_norm.weight"),
    ("mixer.k_norm.weight", "self_attn.k_norm.weight"),
)
_FEED_FORWARD = (
    ("feed_forward.w1.weight", "mlp.gate_proj.weight"),
    ("feed_forward.w2.weight", "mlp.down_proj.weight"),
    ("feed_forward.w3.weight", "mlp.up_proj.weight"),
    ("moe.routed_experts.inner_experts.w1_EFD", "mlp.experts.{expert}.gate_proj.weight"),
    ("moe.routed_experts.inner_experts.w2_EDF", "mlp.experts.{expert}.down_proj.weight"),
    ("moe.routed_experts.inner_experts.w3_EFD", "mlp.experts.{expert}.up_proj.weight"),
)
_PLAIN = (
    ("mixer_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("moe.router.gate.weight", "mlp.gate.weight"),
)
_OLMO3MOE = (
    ("mixer_norm.weight", "pre_attention_layernorm.weight"),
    ("mixer_out_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("ffn_out_norm.weight", "post_feedforward_layernorm.weight"),
    ("moe.router.gate.weight", "mlp.router.gate.weight"),
    ("moe.latent_down.weight", "mlp.latent_down_proj.weight"),
    ("moe.latent_norm.weight", "mlp.latent_up_proj_input_norm.weight"),
    ("moe.latent_up.weight", "mlp.latent_up_proj.weight"),
    ("moe.shared_experts.w1.weight", "mlp.shared_expert.gate_proj.weight"),
    ("moe.shared_experts.w2.weight", "mlp.shared_expert.down_proj.weight"),
    ("moe.shared_experts.w3.weight", "mlp.shared_expert.up_proj.weight"),
    ("mixer.f_proj_1.weight", "self_attn.f_proj_1.weight"),
    ("mixer.f_proj_2.weight", "self_attn.f_proj_2.weight"),
    ("mixer.b_proj.weight", "self_attn.beta_proj.weight"),
    ("mixer.g_proj_1.weight", "self_attn.g_proj_1.weight"),
    ("mixer.g_proj_2.weight", "self_attn.g_proj_2.weight"),
    ("mixer.g_proj_2.bias", "self_attn.g_proj_2.bias"),
    ("mixer.decay.A_log", "self_attn.A_log"),
    ("mixer.decay.dt_bias", "self_attn.dt_bias"),
    ("mixer.o_norm.weight", "self_attn.o_norm.weight"),
)
# One weight here, three convolutions there, in this order.
_CONVOLUTION = ("mixer.conv.weight", tuple(f"self_attn.{x}_conv1d.weight" for x in "qkv"))
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def pieces(shapes: Mapping[str, Sequence[int]], *, kind: HfFormat) -> list[Piece]:
    """Return all Hugging Face tensors of a model whose parameters have these shapes, in their order."""
    table = dict(_MIXER + _FEED_FORWARD + (_OLMO3MOE if kind is HfFormat.olmo3moe else _PLAIN))
    whole = dict(_EVERYWHERE)
    found = [
        piece
        for parameter, shape in shapes.items()
        for piece in _of_parameter(parameter, tuple(shape), table=table, whole=whole)
    ]
    covered = dict.fromkeys(shapes, 0)
    for piece in found:
        assert piece.start == covered[piece.parameter], f"{piece.name} leaves a gap"
        covered[piece.parameter] = piece.stop
    assert covered == {name: shape[0] for name, shape in shapes.items()}, "a parameter is not covered"
    assert len({piece.name for piece in found}) == len(found), "two tensors of one name"
    return found


def _of_parameter(
    parameter: str, shape: Shape, *, table: Mapping[str, str], whole: Mapping[str, str]
) -> Iterator[Piece]:
    if parameter in whole:
        yield Piece(name=whole[parameter], shape=shape, parameter=parameter, start=0, stop=shape[0])
        return
    match = _LAYER.fullmatch(parameter)
    assert match is not None, f"{parameter} has no name in Hugging Face directories"
    layer, leaf = match.groups()
    prefix = f"model.layers.{layer}."
    if leaf == _CONVOLUTION[0]:
        rows = shape[0] // len(_CONVOLUTION[1])
        for i, name in enumerate(_CONVOLUTION[1]):
            yield Piece(
                name=prefix + name,
                shape=(rows, 1, shape[1]),
                parameter=parameter,
                start=i * rows,
                stop=(i + 1) * rows,
            )
        return
    name = prefix + table[leaf]
    if "{expert}" not in name:
        yield Piece(name=name, shape=shape, parameter=parameter, start=0, stop=shape[0])
        return
    for expert in range(shape[0]):
        yield Piece(
            name=name.format(expert=expert),
            shape=shape[1:],
            parameter=parameter,
            start=expert,
            stop=expert + 1,
            stacked=True,
        )


def by_parameter(found: Sequence[Piece]) -> dict[str, list[Piece]]:
    """Group pieces by parameter; the pieces of one keep their order."""
    grouped: dict[str, list[Piece]] = {}
    for piece in found:
        grouped.setdefault(piece.parameter, []).append(piece)
    return grouped


def refuse_mismatches(
    expected: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int]],
    *,
    where: str,
    further: Sequence[str] = (),
) -> None:
    """Raise a Refusal that names missing, unexpected and wrongly shaped weights, each line after `where`.

    `expected` and `found` are shapes by name, `further` other reasons about the same weights.
    """
    reasons = [f"{name} is missing" for name in expected if name not in found]
    reasons += [f"{name} is not a weight of this model" for name in found if name not in expected]
    reasons += [
        f"{name} has shape {tuple(found[name])}, the model {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    reasons += further
    if rest := reasons[_SHOWN:]:
        reasons = [*reasons[:_SHOWN], f"and {len(rest)} more"]
    if reasons:
        raise Refusal([f"{where}: {reason}" for reason in reasons])
