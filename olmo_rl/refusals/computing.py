"""Refusals of how the policy computes: backends of mixers, replay, dtypes, compiled blocks, log-probs."""

from __future__ import annotations

from olmo_rl.backends import ATTENTION_BACKENDS, attention_fits, attention_of, linear_fits, linear_of
from olmo_rl.config import Config, Dtype, LayerType, LogprobKind, Recipe
from olmo_rl.refusals.rule import Rule, changed


def _has_linear(config: Config) -> bool:
    return LayerType.linear_attention in config.model.layer_types


def _has_softmax(config: Config) -> bool:
    return any(kind is not LayerType.linear_attention for kind in config.model.layer_types)


def _attention_unfit(config: Config) -> bool:
    return _has_softmax(config) and not attention_fits(config, name=attention_of(config))


def _linear_unfit(config: Config) -> bool:
    return _has_linear(config) and not linear_fits(config, name=linear_of(config))


def _crosses_documents(config: Config) -> bool:
    return config.packed and not ATTENTION_BACKENDS[attention_of(config)].documents


POLICY = (
    Rule(
        keys=("policy.attention", "packing"),
        refuses="this attention does not honour document boundaries: packed samples would see each other",
        fix="choose policy.attention=reference or auto, or packing=none",
        example=("policy.attention=torch",),
        when=_crosses_documents,
        planning=True,
    ),
    Rule(
        keys=("policy.attention", "trainer.accelerator", "policy.dtype", "model.head_dim"),
        refuses="this attention does not run on this accelerator with this compute dtype and head width",
        fix="choose policy.attention=auto or reference (kernels want gpu, bfloat16, heads of a multiple of 8 "
        "up to 256, flash_4 up to 128)",
        example=("policy.attention=flash_2",),
        when=_attention_unfit,
    ),
    Rule(
        keys=("policy.linear_attention", "trainer.accelerator", "policy.dtype", "model.kda_head_dim"),
        refuses="this backend does not run on this accelerator with this compute dtype and head width",
        fix="choose policy.linear_attention=auto or reference (fla wants gpu, bfloat16, heads of a multiple "
        "of 8 up to 256)",
        example=("policy.linear_attention=fla",),
        when=_linear_unfit,
    ),
    Rule(
        keys=("policy.attention",),
        refuses="no effect: every layer is a linear one",
        fix="leave policy.attention=auto, or name other mixers in model.layer_types",
        example=(
            "model.layer_types=[linear_attention]",
            "model.dense_layers=[]",
            "policy.attention=reference",
        ),
        when=lambda c: not _has_softmax(c),
        select=changed,
    ),
    Rule(
        keys=("policy.linear_attention",),
        refuses="no effect: no layer is a linear one",
        fix="leave policy.linear_attention=auto, or name linear_attention in model.layer_types",
        example=(
            "model.layer_types=[full_attention]",
            "model.dense_layers=[]",
            "policy.linear_attention=fla",
        ),
        when=lambda c: not _has_linear(c),
        select=changed,
    ),
    Rule(
        keys=("policy.replay", "model.num_experts"),
        refuses="routes to replay in a model that routes nothing",
        fix="leave policy.replay=null",
        example=("policy.replay=true", "model.num_experts=0"),
        when=lambda c: c.policy.replay is True and not c.model.routed_layers,
    ),
    Rule(
        keys=("policy.replay", "recipe"),
        refuses="supervised documents have no recorded routes",
        fix="leave policy.replay=null",
        example=("recipe=sft", "policy.replay=true"),
        when=lambda c: c.policy.replay is True and c.recipe is Recipe.sft,
    ),
    Rule(
        keys=("policy.expert_dtype", "policy.compile"),
        refuses="grouped products of experts compile in bfloat16 only",
        fix="leave policy.expert_dtype=null, or set policy.compile=false",
        example=("policy.compile=true", "policy.expert_dtype=float32"),
        when=lambda c: c.policy.compile and c.policy.expert_dtype is Dtype.float32,
    ),
    Rule(
        keys=("policy.expert_dtype", "policy.dtype"),
        refuses="experts more exact than the bfloat16 rows and weights that reach them",
        fix="leave policy.expert_dtype=null, or set policy.dtype=float32",
        example=("policy.dtype=bfloat16", "policy.expert_dtype=float32"),
        when=lambda c: c.policy.dtype is Dtype.bfloat16 and c.policy.expert_dtype is Dtype.float32,
    ),
    Rule(
        keys=("policy.expert_dtype", "model.num_experts"),
        refuses="no effect: no layer has experts",
        fix="leave policy.expert_dtype=null",
        example=("model.num_experts=0", "policy.expert_dtype=bfloat16"),
        when=lambda c: c.policy.expert_dtype is not None and not c.model.routed_layers,
    ),
    Rule(
        keys=("policy.logprobs", "trainer.accelerator"),
        refuses="this kernel runs on CUDA only",
        fix="choose trainer.accelerator=gpu, or policy.logprobs=chunked",
        example=("policy.logprobs=liger",),
        when=lambda c: c.policy.logprobs is LogprobKind.liger and c.trainer.accelerator != "gpu",
    ),
    Rule(
        keys=("policy.logprobs", "loss.entropy_coef"),
        refuses="this kernel gives no entropies",
        fix="choose policy.logprobs=chunked, or loss.entropy_coef=0",
        example=("policy.logprobs=liger", "loss.entropy_coef=0.01"),
        when=lambda c: c.policy.logprobs is LogprobKind.liger and c.loss.entropy_coef != 0,
    ),
    Rule(
        keys=("policy.logprob_chunk", "policy.logprobs"),
        refuses="no effect: logits are not computed in chunks",
        fix="leave policy.logprob_chunk=512, or choose policy.logprobs=chunked",
        example=("policy.logprobs=full", "policy.logprob_chunk=64"),
        when=lambda c: c.policy.logprobs is not LogprobKind.chunked and changed(c, "policy.logprob_chunk"),
    ),
)
