"""Refusals of upcycling: what it needs named, and what equal experts could not make of the dense model."""

from __future__ import annotations

from olmo_rl.config import BlockNorms, Config, LayerType, QkNorm, Recipe
from olmo_rl.refusals.rule import Rule, changed, value_of

_MAKES = (Recipe.train, Recipe.sft, Recipe.rollout, Recipe.upcycle, Recipe.validate, Recipe.plan)
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


UPCYCLE: tuple[Rule, ...] = (
    Rule(
        keys=("recipe", "upcycle.dense"),
        refuses="the dense model to upcycle is not named",
        fix="set upcycle.dense to a Hugging Face directory, a .gguf file, or package:NAME",
        example=("recipe=upcycle",),
        when=lambda c: c.recipe is Recipe.upcycle and c.upcycle.dense is None,
    ),
    Rule(
        keys=("upcycle.noise",),
        refuses="no effect without upcycle.dense",
        fix="leave it at its default",
        example=("upcycle.noise=0.1",),
        when=lambda c: c.upcycle.dense is None,
        select=changed,
    ),
    Rule(
        keys=("upcycle.dense", "recipe"),
        refuses="no effect: this recipe takes weights as they are",
        fix="set upcycle.dense=null, and init_from to what recipe=upcycle or a run wrote",
        example=("recipe=export", "init_from={run}", "upcycle.dense=dense"),
        when=lambda c: c.upcycle.dense is not None and c.recipe not in _MAKES,
    ),
    Rule(
        keys=("upcycle.dense", "init_from"),
        refuses="weights to start from are named twice",
        fix="drop one of them",
        example=("upcycle.dense=dense", "init_from={run}"),
        when=lambda c: c.upcycle.dense is not None and c.init_from is not None,
    ),
    Rule(
        keys=("upcycle.dense", "model.num_experts"),
        refuses="no layer has experts that its MLP could become",
        fix="give model.num_experts, and leave layers out of model.dense_layers",
        example=("upcycle.dense=dense", "model.num_experts=0"),
        when=lambda c: c.upcycle.dense is not None and not c.model.routed_layers,
    ),
    Rule(
        keys=("model.layer_types", *_EXACT),
        refuses="not what a dense Llama computes where all experts equal its MLP",
        fix="set full_attention for every layer, model.block_norms=before model.qk_norm=none "
        "model.route_norm=true model.route_scale=1.0 model.shared_hidden=0 model.latent_dim=null",
        example=("upcycle.dense=dense",),
        when=lambda c: c.upcycle.dense is not None,
        select=_is_inexact,
    ),
)
