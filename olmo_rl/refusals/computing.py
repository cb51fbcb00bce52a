"""Rules of how the policy computes: backends of mixers, replay, dtypes, compiled blocks, log-probs."""

from __future__ import annotations

from olmo_rl.backends import (
    ATTENTION_BACKENDS,
    LINEAR_BACKENDS,
    attention_fits,
    attention_of,
    linear_fits,
    linear_of,
)
from olmo_rl.config import Config, Dtype, LogprobKind, Recipe
from olmo_rl.mixers import Family, families
from olmo_rl.refusals.rule import Rule


def _attention_unfit(config: Config) -> bool:
    return Family.softmax in families(config.model) and not attention_fits(config, name=attention_of(config))


def _linear_unfit(config: Config) -> bool:
    return Family.linear in families(config.model) and not linear_fits(config, name=linear_of(config))


def _exactness(dtype: Dtype) -> int:
    return list(Dtype).index(dtype)


def _crosses_documents(config: Config) -> bool:
    return config.packed and not ATTENTION_BACKENDS[attention_of(config)].documents


def _attention_of_shared_rows(config: Config) -> bool:
    row = ATTENTION_BACKENDS[attention_of(config)]
    return config.shares and Family.softmax in families(config.model) and row.documents and not row.branches


def _linear_of_shared_rows(config: Config) -> bool:
    used = Family.linear in families(config.model)
    return config.shares and used and not LINEAR_BACKENDS[linear_of(config)].branches


COMPUTING = (
    Rule(
        keys="policy.attention packing",
        refuses="no rows that samples share under this attention: it knows documents side by side alone",
        fix="choose policy.attention=reference, or packing=consecutive",
        when=_attention_of_shared_rows,
    ),
    Rule(
        keys="policy.linear_attention packing",
        refuses="no rows that samples share under this backend: it knows documents side by side alone",
        fix="choose policy.linear_attention=reference, or packing=consecutive",
        when=_linear_of_shared_rows,
    ),
    Rule(
        keys="policy.attention packing",
        refuses="this attention does not honour document boundaries: packed samples would see each other",
        fix="choose policy.attention=reference or auto, or packing=none",
        when=_crosses_documents,
        planning=True,
    ),
    Rule(
        keys="policy.attention trainer.accelerator policy.dtype model.head_dim",
        refuses="this attention does not run on this accelerator with this compute dtype and head width",
        fix="choose policy.attention=auto or reference (kernels want gpu, bfloat16, heads of a multiple of 8 "
        "up to 256, flash_4 up to 128)",
        when=_attention_unfit,
    ),
    Rule(
        keys="policy.linear_attention trainer.accelerator policy.dtype model.kda_head_dim",
        refuses="this backend does not run on this accelerator with this compute dtype and head width",
        fix="choose policy.linear_attention=auto or reference (fla wants gpu, bfloat16, heads of a multiple "
        "of 8 up to 256)",
        when=_linear_unfit,
    ),
    Rule(
        keys="policy.replay model.num_experts",
        refuses="routes to replay in a model that routes nothing",
        fix="leave policy.replay=null",
        when=lambda c: c.policy.replay is True and not c.model.routed_layers,
    ),
    Rule(
        keys="policy.replay recipe",
        refuses="no routes are recorded for supervised documents",
        fix="leave policy.replay=null",
        when=lambda c: c.policy.replay is True and c.recipe is Recipe.sft,
    ),
    Rule(
        keys="policy.expert_dtype policy.compile",
        refuses="grouped products of experts compile in bfloat16 only",
        fix="leave policy.expert_dtype=null, or set policy.compile=false",
        when=lambda c: c.policy.compile and c.policy.expert_dtype is Dtype.float32,
    ),
    Rule(
        keys="policy.expert_dtype policy.dtype",
        refuses="experts more exact than the rows and weights that reach them",
        fix="leave policy.expert_dtype=null, or raise policy.dtype",
        when=lambda c: _exactness(c.expert_dtype) > _exactness(c.policy.dtype),
    ),
    Rule(
        keys="policy.dtype trainer.accelerator policy.compile policy.expert_dtype",
        refuses="float64 is for exact runs on a CPU, experts included, without compiled regions",
        fix="set policy.dtype=float32, or trainer.accelerator=cpu policy.compile=false "
        "policy.expert_dtype=null",
        when=lambda c: (
            c.policy.dtype is Dtype.float64
            and (c.trainer.accelerator != "cpu" or c.policy.compile or c.expert_dtype is not Dtype.float64)
        ),
    ),
    Rule(
        keys="policy.logprobs trainer.accelerator",
        refuses="this kernel runs on CUDA only",
        fix="choose trainer.accelerator=gpu, or policy.logprobs=chunked",
        when=lambda c: c.policy.logprobs is LogprobKind.liger and c.trainer.accelerator != "gpu",
    ),
    Rule(
        keys="policy.logprobs loss.entropy_coef",
        refuses="this kernel gives no entropies",
        fix="choose policy.logprobs=chunked, or loss.entropy_coef=0",
        when=lambda c: c.policy.logprobs is LogprobKind.liger and c.loss.entropy_coef != 0,
    ),
)
