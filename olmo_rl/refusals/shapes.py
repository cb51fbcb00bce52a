"""Refusals of single numbers, of the model's shape and of the ranks it is laid out on."""

from __future__ import annotations

import math

from olmo_rl.config import Recipe, StrategyKind
from olmo_rl.refusals.rule import Rule, below, changed, outside, outside_from, under, undivided, value_of

EXPERT_WIDTH_MULTIPLE = 8  # of a row of the grouped matrix product, in elements

NUMBERS = (
    Rule(
        keys=(
            *under("model", "vocab_size dim dense_hidden num_heads num_kv_heads head_dim sliding_window"),
            *under("model", "kda_heads kda_head_dim conv_size top_k expert_hidden latent_dim max_seq_len"),
            *under("rollouts", "collections group_size max_new_tokens max_attempts concurrency"),
            *under("batch", "samples_per_step steps_per_collection"),
            *under("packing", "max_tokens pad_to_multiple_of"),
            *under("policy", "logprob_chunk"),
            *under("balance", "layer_stride max_destination_load"),
            *under("strategy", "ep_degree timeout_seconds"),
            *under("trainer", "devices num_nodes max_steps"),
            *under("warm_start", "samples_per_step"),
            *under("sft", "epochs shuffle_buffer eval_samples"),
            *under("callbacks", "checkpoint_interval keep_checkpoints"),
            *under("loss", "constant_length"),
            *under("plan", "world_size ep_degree"),
        ),
        refuses="a count or size below 1",
        fix="give at least 1",
        example=("model.dim=0", "trainer.max_steps=-1"),
        select=below(1),
        planning=True,
    ),
    Rule(
        keys=(
            "seed",
            *under("model", "num_experts shared_hidden"),
            *under("task", "eval_problems eval_interval"),
            *under("rollouts", "max_lag"),
            *under("batch", "max_skips"),
            *under("balance", "proposals"),
            *under("optim", "warmup_steps"),
            *under("warm_start", "steps"),
            *under("sft", "eval_interval"),
            *under("scoring", "check_interval"),
        ),
        refuses="a count below 0",
        fix="give 0 or more",
        example=("seed=-1", "warm_start.steps=-2"),
        select=below(0),
        planning=True,
    ),
    Rule(
        keys=("seed",),
        refuses="more than the random generators take",
        fix="give a seed below 2**32",
        example=("seed=4294967296",),
        when=lambda c: c.seed >= 2**32,
        planning=True,
    ),
    Rule(
        keys=(
            *under("model", "rope_theta route_scale norm_eps init_std"),
            *under("rollouts", "temperature"),
            *under("loss", "clip_high max_sequence_kl"),
            *under("optim", "lr eps max_grad_norm"),
            *under("warm_start", "lr"),
            *under("scoring", "tolerance max_behavior_gap"),
            "task.verifier_seconds",
            "rollouts.timeout_seconds",
        ),
        refuses="not a finite number above 0",
        fix="give one",
        example=("optim.lr=nan", "rollouts.temperature=0.0", "model.norm_eps=inf"),
        select=outside(0.0, math.inf),
        planning=True,
    ),
    Rule(
        keys=(
            *under("loss", "kl_coef entropy_coef router_aux_weight router_z_weight tis_low tis_high"),
            *under("optim", "weight_decay"),
            *under("upcycle", "noise"),
        ),
        refuses="not a finite number of at least 0",
        fix="give one",
        example=("optim.weight_decay=-0.1", "loss.tis_low=inf"),
        select=outside_from(0.0, math.inf),
    ),
    Rule(
        keys=("optim.beta1", "optim.beta2"),
        refuses="a decay outside [0, 1)",
        fix="give 0 <= beta < 1",
        example=("optim.beta2=1.0",),
        select=outside_from(0.0, 1.0),
    ),
    Rule(
        keys=("loss.clip_low", "rollouts.top_p"),
        refuses="a share outside (0, 1]",
        fix="give 0 < share <= 1",
        example=("rollouts.top_p=0.0", "loss.clip_low=1.5"),
        select=outside(0.0, math.nextafter(1.0, 2.0)),
    ),
    Rule(
        keys=("loss.dual_clip",),
        refuses="a second clip that is not above 1 would cut the unclipped surrogate",
        fix="give a finite number above 1, usually 3",
        example=("loss.dual_clip=0.5",),
        select=outside(1.0, math.inf),
    ),
    Rule(
        keys=("loss.tis_low", "loss.tis_high"),
        refuses="the lower clip of the importance weight lies above the upper one",
        fix="swap them",
        example=("loss.tis_low=2.0", "loss.tis_high=0.5"),
        when=lambda c: (c.loss.tis_low or 0.0) > (math.inf if c.loss.tis_high is None else c.loss.tis_high),
    ),
)

MODEL = (
    Rule(
        keys=("model.layer_types",),
        refuses="a model without layers",
        fix="name a mixer for every layer",
        example=("model.layer_types=[]",),
        when=lambda c: not c.model.layer_types,
    ),
    Rule(
        keys=("model.dense_layers",),
        refuses="a layer that the model does not have, or the same layer twice",
        fix="list ids from 0 to the number of model.layer_types - 1, each once",
        example=("model.dense_layers=[0,9]",),
        when=lambda c: (
            sorted(set(c.model.dense_layers) & set(range(len(c.model.layer_types))))
            != sorted(c.model.dense_layers)
        ),
    ),
    Rule(
        keys=("model.num_experts", "model.dense_layers"),
        refuses="experts that no layer has, because every layer is dense",
        fix="set model.num_experts=0, or shorten model.dense_layers",
        example=("model.dense_layers=[0,1,2,3]",),
        when=lambda c: c.model.num_experts > 0 and bool(c.model.layer_types) and not c.model.routed_layers,
    ),
    Rule(
        keys=("model.dense_layers", "model.latent_dim", "model.latent_norm", "model.shared_hidden"),
        refuses="no effect in a model without experts (model.num_experts=0)",
        fix="leave it at its default, or give model.num_experts",
        example=("model.num_experts=0",),
        when=lambda c: c.model.num_experts == 0,
        select=changed,
    ),
    Rule(
        keys=("model.top_k", "model.num_experts"),
        refuses="more experts per token than there are",
        fix="lower model.top_k",
        example=("model.top_k=9",),
        when=lambda c: 0 < c.model.num_experts < c.model.top_k,
    ),
    Rule(
        keys=("model.latent_norm", "model.latent_dim"),
        refuses="a norm of a latent that the model does not have",
        fix="give model.latent_dim, or set model.latent_norm=false",
        example=("model.latent_norm=true", "model.latent_dim=null"),
        when=lambda c: c.model.latent_norm and c.model.latent_dim is None and c.model.num_experts > 0,
    ),
    Rule(
        keys=("model.dim", "model.latent_dim", "model.expert_hidden"),
        refuses=f"a width of routed experts that is no multiple of {EXPERT_WIDTH_MULTIPLE}",
        fix=f"choose multiples of {EXPERT_WIDTH_MULTIPLE}: grouped matrix products need them",
        example=("model.expert_hidden=12", "model.latent_dim=20"),
        when=lambda c: bool(c.model.routed_layers),
        select=lambda c, key: (
            value_of(c, key) is not None
            and value_of(c, key) % EXPERT_WIDTH_MULTIPLE != 0
            and (key != "model.dim" or c.model.latent_dim is None)
        ),
    ),
    Rule(
        keys=("model.num_kv_heads", "model.num_heads"),
        refuses="query heads that do not share key and value heads evenly",
        fix="choose num_kv_heads that divides num_heads",
        example=("model.num_kv_heads=3",),
        when=lambda c: c.model.num_kv_heads > 0 and c.model.num_heads % c.model.num_kv_heads != 0,
    ),
    Rule(
        keys=("model.head_dim", "model.rope_theta"),
        refuses="rotary embeddings turn pairs of channels, the head width is odd",
        fix="choose an even model.head_dim, or model.rope_theta=null",
        example=("model.head_dim=31",),
        when=lambda c: c.model.head_dim % 2 == 1 and c.model.rope_theta is not None,
    ),
    Rule(
        keys=("model.vocab_size", "model.tokenizer"),
        refuses="the byte tokenizer has 259 ids, the embedding fewer rows",
        fix="set model.vocab_size to at least 259",
        example=("model.vocab_size=256",),
        when=lambda c: c.model.tokenizer == "bytes" and c.model.vocab_size < 259,
    ),
    Rule(
        keys=("rollouts.max_new_tokens", "model.max_seq_len"),
        refuses="responses as long as the model's longest document leave no room for a prompt",
        fix="lower rollouts.max_new_tokens or raise model.max_seq_len",
        example=("rollouts.max_new_tokens=64", "model.max_seq_len=64"),
        when=lambda c: c.generates and c.rollouts.max_new_tokens >= c.model.max_seq_len,
    ),
)

RANKS = (
    Rule(
        keys=("strategy.ep_degree", "trainer.devices", "trainer.num_nodes"),
        refuses="the expert-parallel degree does not divide the world size, devices x nodes",
        fix="choose strategy.ep_degree that divides it",
        example=("trainer.devices=3",),
        when=lambda c: c.recipe is not Recipe.plan and undivided(c.world_size, c.ep_degree),
    ),
    Rule(
        keys=(
            "plan.ep_degree",
            "plan.world_size",
            "strategy.ep_degree",
            "trainer.devices",
            "trainer.num_nodes",
        ),
        refuses="the expert-parallel degree does not divide the planned world size",
        fix="choose plan.ep_degree that divides it (null stands for the strategy's and the trainer's values)",
        example=("recipe=plan", "plan.world_size=6", "plan.ep_degree=4"),
        when=lambda c: c.recipe is Recipe.plan and undivided(c.world_size, c.ep_degree),
        planning=True,
    ),
    Rule(
        keys=("plan.world_size", "plan.ep_degree"),
        refuses="no effect without recipe=plan",
        fix="set trainer.devices, trainer.num_nodes and strategy.ep_degree, or leave it null",
        example=("plan.world_size=8",),
        when=lambda c: c.recipe is not Recipe.plan,
        select=changed,
    ),
    Rule(
        keys=("model.num_experts", "strategy.ep_degree"),
        refuses="experts that do not divide evenly over expert-parallel ranks",
        fix="choose strategy.ep_degree that divides model.num_experts",
        example=("model.num_experts=9",),
        when=lambda c: (
            bool(c.model.routed_layers)
            and (c.recipe is not Recipe.plan or c.generates)
            and undivided(c.model.num_experts, c.ep_degree)
        ),
        planning=True,
    ),
    Rule(
        keys=("strategy.ep_degree", "model.num_experts"),
        refuses="expert parallelism for a model without experts",
        fix="set strategy.ep_degree=1, the model is then sharded by FSDP2 alone",
        example=("model=dense_tiny",),
        when=lambda c: not c.model.routed_layers and c.strategy.ep_degree > 1,
    ),
    Rule(
        keys=("strategy", "trainer.devices", "trainer.num_nodes"),
        refuses="one process cannot be several",
        fix="choose strategy=expert_parallel, or trainer.devices=1 trainer.num_nodes=1",
        example=("strategy=single",),
        when=lambda c: c.strategy.kind is StrategyKind.single and c.trainer.world_size > 1,
    ),
    Rule(
        keys=("strategy", "strategy.ep_degree"),
        refuses="one process has nobody to share experts with",
        fix="choose strategy=expert_parallel, or strategy.ep_degree=1",
        example=("strategy=single", "strategy.ep_degree=2"),
        when=lambda c: c.strategy.kind is StrategyKind.single and c.strategy.ep_degree > 1,
    ),
    Rule(
        keys=("trainer.accelerator",),
        refuses="an accelerator that is neither cpu nor gpu",
        fix="choose one of them",
        example=("trainer.accelerator=tpu",),
        when=lambda c: c.trainer.accelerator not in ("cpu", "gpu"),
    ),
)
