"""Rules of the model's shape, of the ranks that share it, and of upcycling a dense model."""

from __future__ import annotations

from olmo_rl.config import BlockNorms, Config, LayerType, QkNorm, Recipe
from olmo_rl.refusals.rule import Rule, undivided, value_of

EXPERT_WIDTH_MULTIPLE = 8  # of a row of the grouped matrix product, in elements
# With these, and experts that equal its MLP, a routed model computes what a dense Llama does.
_EXACT = {
    "model.block_norms": BlockNorms.before,
    "model.qk_norm": QkNorm.none,
    "model.route_norm": True,
    "model.route_scale": 1.0,
    "model.shared_hidden": 0,
    "model.latent_dim": None,
}


def _is_inexact(config: Config, key: str) -> bool:
    if key == "model.layer_types":
        return any(kind is not LayerType.full_attention for kind in config.model.layer_types)
    return bool(value_of(config, key) != _EXACT[key])


MODEL = (
    Rule(
        keys="model.layer_types",
        refuses="a model without layers",
        fix="name a mixer for every layer",
        when=lambda c: not c.model.layer_types,
    ),
    Rule(
        keys="model.dense_layers",
        refuses="a layer that the model does not have, or the same layer twice",
        fix="list ids from 0 to the number of model.layer_types - 1, each once",
        when=lambda c: (
            sorted(set(c.model.dense_layers) & set(range(len(c.model.layer_types))))
            != sorted(c.model.dense_layers)
        ),
    ),
    Rule(
        keys="model.num_experts model.dense_layers",
        refuses="experts that no layer has, because every layer is dense",
        fix="set model.num_experts=0, or shorten model.dense_layers",
        when=lambda c: c.model.num_experts > 0 and bool(c.model.layer_types) and not c.model.routed_layers,
    ),
    Rule(
        keys="model.top_k model.num_experts",
        refuses="more experts per token than there are",
        fix="lower model.top_k",
        when=lambda c: 0 < c.model.num_experts < c.model.top_k,
    ),
    Rule(
        keys="model.route_norm model.top_k",
        refuses="the normalised gate of a token's only expert is always 1: routers get no gradient",
        fix="set model.route_norm=false, or raise model.top_k",
        when=lambda c: c.model.num_experts > 0 and c.model.top_k == 1 and c.model.route_norm,
    ),
    Rule(
        keys="model.latent_norm model.latent_dim",
        refuses="a norm of a latent that the model does not have",
        fix="give model.latent_dim, or set model.latent_norm=false",
        when=lambda c: c.model.latent_norm and c.model.latent_dim is None and c.model.num_experts > 0,
    ),
    Rule(
        keys="model.dim model.latent_dim model.expert_hidden",
        refuses=f"a width of routed experts that is no multiple of {EXPERT_WIDTH_MULTIPLE}",
        fix=f"choose multiples of {EXPERT_WIDTH_MULTIPLE}: grouped matrix products need them",
        when=lambda c: bool(c.model.routed_layers),
        select=lambda c, key: (
            value_of(c, key) is not None
            and value_of(c, key) % EXPERT_WIDTH_MULTIPLE != 0
            and (key != "model.dim" or c.model.latent_dim is None)
        ),
    ),
    Rule(
        keys="model.num_kv_heads model.num_heads",
        refuses="query heads that do not share key and value heads evenly",
        fix="choose num_kv_heads that divides num_heads",
        when=lambda c: c.model.num_kv_heads > 0 and c.model.num_heads % c.model.num_kv_heads != 0,
    ),
    Rule(
        keys="model.head_dim model.rope_theta",
        refuses="rotary embeddings turn pairs of channels, the head width is odd",
        fix="choose an even model.head_dim, or model.rope_theta=null",
        when=lambda c: c.model.head_dim % 2 == 1 and c.model.rope_theta is not None,
    ),
    Rule(
        keys="model.vocab_size model.tokenizer",
        refuses="the byte tokenizer has 259 ids, the embedding fewer rows",
        fix="set model.vocab_size to at least 259",
        when=lambda c: c.model.tokenizer == "bytes" and c.model.vocab_size < 259,
    ),
    Rule(
        keys="rollouts.max_new_tokens model.max_seq_len",
        refuses="responses as long as the model's longest document leave no room for a prompt",
        fix="lower rollouts.max_new_tokens or raise model.max_seq_len",
        when=lambda c: c.generates and c.rollouts.max_new_tokens >= c.model.max_seq_len,
    ),
)

RANKS = (
    Rule(
        keys="strategy.ep_degree trainer.devices trainer.num_nodes",
        refuses="the expert-parallel degree does not divide the world size, devices x nodes",
        fix="choose strategy.ep_degree that divides it",
        when=lambda c: c.recipe is not Recipe.plan and undivided(c.world_size, c.ep_degree),
    ),
    Rule(
        keys="plan.ep_degree plan.world_size strategy.ep_degree trainer.devices trainer.num_nodes",
        refuses="the expert-parallel degree does not divide the planned world size",
        fix="choose plan.ep_degree that divides it (null stands for the strategy's and the trainer's values)",
        when=lambda c: c.recipe is Recipe.plan and undivided(c.world_size, c.ep_degree),
        planning=True,
    ),
    Rule(
        keys="model.num_experts strategy.ep_degree",
        refuses="experts that do not divide evenly over expert-parallel ranks",
        fix="choose strategy.ep_degree that divides model.num_experts",
        when=lambda c: (
            bool(c.model.routed_layers)
            and (c.recipe is not Recipe.plan or c.generates)
            and undivided(c.model.num_experts, c.ep_degree)
        ),
        planning=True,
    ),
    Rule(
        keys="strategy.ep_degree model.num_experts",
        refuses="expert parallelism for a model without experts",
        fix="set strategy.ep_degree=1, the model is then sharded by FSDP2 alone",
        when=lambda c: not c.model.routed_layers and c.strategy.ep_degree > 1,
    ),
    Rule(
        keys="trainer.accelerator",
        refuses="an accelerator that is neither cpu nor gpu",
        fix="choose one of them",
        when=lambda c: c.trainer.accelerator not in ("cpu", "gpu"),
    ),
)

UPCYCLE = (
    Rule(
        keys="recipe upcycle.dense",
        refuses="the dense model to upcycle is not named",
        fix="set upcycle.dense to a Hugging Face directory, a .gguf file, or package:NAME",
        when=lambda c: c.recipe is Recipe.upcycle and c.upcycle.dense is None,
    ),
    Rule(
        keys="upcycle.dense init_from",
        refuses="weights to start from are named twice",
        fix="drop one of them",
        when=lambda c: c.upcycle.dense is not None and c.init_from is not None,
    ),
    Rule(
        keys="upcycle.dense model.num_experts",
        refuses="no layer has experts that its MLP could become",
        fix="give model.num_experts, and leave layers out of model.dense_layers",
        when=lambda c: c.upcycle.dense is not None and not c.model.routed_layers,
    ),
    Rule(
        keys=" ".join(("model.layer_types", *_EXACT)),
        refuses="not what a dense Llama computes where all experts equal its MLP",
        fix="set full_attention for every layer, model.block_norms=before model.qk_norm=none "
        "model.route_norm=true model.route_scale=1.0 model.shared_hidden=0 model.latent_dim=null",
        when=lambda c: c.upcycle.dense is not None,
        select=_is_inexact,
    ),
)
