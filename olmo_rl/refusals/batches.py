"""Refusals of the optimizer batch, packing, the planner and where collections come from."""

from __future__ import annotations

from olmo_rl.config import AuxGrouping, BalanceKind, Config, Filter, PackingKind, Recipe, Source
from olmo_rl.refusals.rule import Rule, changed, undivided


def filters(config: Config) -> bool:
    """Whether samples may be filtered."""
    return config.batch.filter_zero_variance or config.batch.filter_truncated


def drops(config: Config) -> bool:
    """Whether filtered samples leave the batch."""
    return filters(config) and config.batch.filter is Filter.drop


def collection_size(config: Config) -> int:
    """Samples that a generating source collects; 0 where their number is not given."""
    return (config.batch.samples_per_step or 0) * config.batch.steps_per_collection


def pads(config: Config) -> bool:
    """Whether rows are padded."""
    return config.packing.pad_to_budget or config.packing.pad_to_multiple_of > 1


def balanced(config: Config) -> bool:
    """Whether the planner arranges batches."""
    return config.balance.kind is not BalanceKind.none


def replays(config: Config) -> bool:
    """Whether routes are replayed; a plan may be of files that another model recorded."""
    return config.policy.replay is not False if config.recipe is Recipe.plan else config.replay


BATCH = (
    Rule(
        keys=("batch.samples_per_step", "trainer.devices", "trainer.num_nodes", "plan.world_size"),
        refuses="samples of one update do not divide over the ranks: all run the same number of samples",
        fix="choose a multiple of the world size",
        example=("trainer.devices=6",),
        when=lambda c: undivided(c.batch.samples_per_step or 0, c.world_size),
        select=lambda c, key: key != "plan.world_size" or c.plan.world_size is not None,
        planning=True,
    ),
    Rule(
        keys=("warm_start.samples_per_step", "trainer.devices", "trainer.num_nodes"),
        refuses="documents of one supervised update do not divide over the ranks",
        fix="choose a multiple of the world size",
        example=("warm_start.steps=5", "warm_start.samples_per_step=127"),
        when=lambda c: c.warm_start.steps > 0 and undivided(c.warm_start.samples_per_step, c.world_size),
    ),
    Rule(
        keys=("batch.samples_per_step", "rollouts"),
        refuses="the whole collection as one update, which only files can be",
        fix="give batch.samples_per_step, or choose rollouts=files",
        example=("batch.samples_per_step=null",),
        when=lambda c: c.batch.samples_per_step is None and c.generates,
        planning=True,
    ),
    Rule(
        keys=("batch.samples_per_step", "recipe"),
        refuses="supervised updates are drawn without end, there is no whole collection",
        fix="give batch.samples_per_step",
        example=("recipe=sft", "batch.samples_per_step=null", "warm_start.steps=0"),
        when=lambda c: c.batch.samples_per_step is None and c.recipe is Recipe.sft,
    ),
    Rule(
        keys=("batch.samples_per_step", "batch.steps_per_collection"),
        refuses="several updates from a collection that is one update",
        fix="give batch.samples_per_step, or set batch.steps_per_collection=1",
        example=("rollouts=files", "batch.samples_per_step=null", "batch.steps_per_collection=2"),
        when=lambda c: c.batch.samples_per_step is None and c.batch.steps_per_collection > 1,
        planning=True,
    ),
    Rule(
        keys=("batch.samples_per_step", "batch.steps_per_collection", "rollouts.group_size"),
        refuses="a collection that would cut a group: samples x steps is no multiple of the group size",
        fix="choose a multiple of rollouts.group_size",
        example=("batch.samples_per_step=500", "rollouts.group_size=8"),
        when=lambda c: (
            c.generates
            and c.recipe is not Recipe.sft
            and c.sft.path is None
            and undivided(collection_size(c), c.rollouts.group_size)
        ),
    ),
    Rule(
        keys=("rollouts.group_size",),
        refuses="a group of one sample has advantage 0, nothing would be learnt",
        fix="give at least 2",
        example=("rollouts.group_size=1",),
        when=lambda c: c.generates and c.rollouts.group_size == 1 and c.recipe is not Recipe.sft,
    ),
    Rule(
        keys=("rollouts.group_size", "trainer.devices", "trainer.num_nodes", "batch.filter"),
        refuses="filters drop groups, and a group that does not divide over the ranks leaves them unequal",
        fix="choose a group size that is a multiple of the world size, or batch.filter=mask",
        example=("rollouts.group_size=9", "batch.filter=drop", "batch.filter_zero_variance=true"),
        when=lambda c: c.generates and drops(c) and undivided(c.rollouts.group_size, c.world_size),
    ),
    Rule(
        keys=("batch.filter",),
        refuses="no effect: nothing is filtered",
        fix="set batch.filter_zero_variance or batch.filter_truncated, or leave batch.filter=drop",
        example=("batch.filter=mask", "batch.filter_zero_variance=false"),
        when=lambda c: not filters(c),
        select=changed,
    ),
    Rule(
        keys=("batch.steps_per_collection", "rollouts"),
        refuses="no effect: a file is cut into as many updates as it holds",
        fix="leave batch.steps_per_collection=1, or choose rollouts=local",
        example=("rollouts=files", "rollouts.path={run}", "batch.steps_per_collection=2"),
        when=lambda c: not c.generates and c.batch.steps_per_collection != 1,
    ),
    Rule(
        keys=("rollouts.max_lag", "rollouts"),
        refuses="no effect: the local engine always generates with the current weights",
        fix="leave rollouts.max_lag=null, or choose rollouts=files",
        example=("rollouts.max_lag=2",),
        when=lambda c: c.rollouts.source is Source.local and c.rollouts.max_lag is not None,
    ),
    Rule(
        keys=("rollouts.max_lag", "batch.steps_per_collection"),
        refuses="later updates of a collection would find every sample too old: age counts where it trains",
        fix="set rollouts.max_lag to at least batch.steps_per_collection - 1",
        example=("rollouts=vllm", "rollouts.max_lag=0", "batch.steps_per_collection=2"),
        when=lambda c: (
            c.generates
            and c.rollouts.max_lag is not None
            and c.rollouts.max_lag < c.batch.steps_per_collection - 1
        ),
    ),
    Rule(
        keys=("rollouts.temperature", "rollouts.top_p"),
        refuses="training on tokens from another distribution than the one whose log-probs are recorded",
        fix="set rollouts.temperature=1 rollouts.top_p=1, or use it with recipe=rollout alone",
        example=("rollouts.temperature=0.7",),
        when=lambda c: c.generates and c.recipe in (Recipe.train, Recipe.validate),
        select=changed,
    ),
    Rule(
        keys=("rollouts.max_attempts",),
        refuses="no effect: without a filter that drops samples, one round fills a collection",
        fix="leave it at its default, or set batch.filter_zero_variance or batch.filter_truncated",
        example=("rollouts.max_attempts=2", "batch.filter_zero_variance=false"),
        when=lambda c: c.rollouts.source is Source.local and not drops(c),
        select=changed,
    ),
)

PACKING = (
    Rule(
        keys=("packing.max_tokens", "packing"),
        refuses="a budget without packing has no effect: every forward is one sample",
        fix="choose packing=consecutive, or leave packing.max_tokens=null",
        example=("packing=none", "packing.max_tokens=5"),
        when=lambda c: c.packing.kind is PackingKind.none and c.packing.max_tokens is not None,
        planning=True,
    ),
    Rule(
        keys=("packing.max_tokens", "model.max_seq_len"),
        refuses="the budget of a pack is smaller than the longest document the model may generate",
        fix="set packing.max_tokens to at least model.max_seq_len",
        example=("packing.max_tokens=8",),
        when=lambda c: c.packed and c.generates and c.budget < c.model.max_seq_len,
        planning=True,
    ),
    Rule(
        keys=("packing.pad_to_multiple_of", "packing.pad_to_budget", "packing"),
        refuses="packing is off: every forward is one unpadded sample",
        fix="choose packing=consecutive, or leave pad_to_multiple_of=1 and pad_to_budget=false",
        example=("packing=none", "packing.pad_to_budget=true"),
        when=lambda c: not c.packed and pads(c),
        select=lambda c, key: key == "packing" or changed(c, key),
        planning=True,
    ),
    Rule(
        keys=("packing.pad_to_multiple_of", "packing.pad_to_budget"),
        refuses="no effect: every row is as long as the budget",
        fix="leave packing.pad_to_multiple_of=1, or set packing.pad_to_budget=false",
        example=("packing.pad_to_budget=true", "packing.pad_to_multiple_of=8"),
        when=lambda c: c.packing.pad_to_budget and c.packing.pad_to_multiple_of > 1,
        planning=True,
    ),
    Rule(
        keys=("packing.pad_to_multiple_of", "packing.max_tokens", "model.max_seq_len"),
        refuses="rows of the budget are no multiple of it (packing.max_tokens=null: model.max_seq_len)",
        fix="choose a divisor of the budget, for example a power of two",
        example=("packing.pad_to_multiple_of=48",),
        when=lambda c: c.packed and undivided(c.budget, c.packing.pad_to_multiple_of),
        select=lambda c, key: key != "model.max_seq_len" or c.packing.max_tokens is None,
        planning=True,
    ),
    Rule(
        keys=("packing.pad_id",),
        refuses="no effect without pads",
        fix="leave packing.pad_id=0, or set packing.pad_to_multiple_of or packing.pad_to_budget",
        example=("packing.pad_id=256",),
        when=lambda c: not pads(c),
        select=changed,
        planning=True,
    ),
    Rule(
        keys=("packing.pad_id", "model.vocab_size"),
        refuses="a token that the model does not have",
        fix="choose 0 <= packing.pad_id < model.vocab_size",
        example=("packing.pad_to_budget=true", "packing.pad_id=259"),
        when=lambda c: pads(c) and not 0 <= c.packing.pad_id < c.model.vocab_size,
    ),
)

BALANCE = (
    Rule(
        keys=("balance", "packing"),
        refuses="the planner arranges packs, and packing is off",
        fix="choose packing=consecutive, or balance=none",
        example=("balance=anneal", "packing=none"),
        when=lambda c: balanced(c) and not c.packed,
        planning=True,
    ),
    Rule(
        keys=("balance", "policy.replay"),
        refuses="the planner needs the experts of every token in advance, and routes are not replayed",
        fix="choose policy.replay=null, or balance=none",
        example=("balance=anneal", "policy.replay=false"),
        when=lambda c: balanced(c) and not replays(c),
        planning=True,
    ),
    Rule(
        keys=("balance", "strategy.ep_degree", "plan.ep_degree"),
        refuses="without expert parallelism there are no destinations to balance",
        fix="choose an expert-parallel degree of at least 2, or balance=none",
        example=("balance=anneal", "strategy.ep_degree=1"),
        when=lambda c: balanced(c) and c.ep_degree == 1,
        select=lambda c, key: key != "plan.ep_degree" or c.plan.ep_degree is not None,
        planning=True,
    ),
    Rule(
        keys=("balance", "strategy.ep_degree", "trainer.devices", "trainer.num_nodes", "plan.world_size"),
        refuses="one replica holds all ranks, so every column sends the same loads wherever samples lie",
        fix="use more ranks than the expert-parallel degree, or balance=none",
        example=("balance=anneal",),
        when=lambda c: balanced(c) and c.ep_degree > 1 and c.world_size <= c.ep_degree,
        select=lambda c, key: key != "plan.world_size" or c.plan.world_size is not None,
        planning=True,
    ),
    Rule(
        keys=("balance", "loss.router_aux_weight", "loss.router_aux_grouping"),
        refuses="the router balancing loss looks at whole packs, so the planner would change the objective",
        fix="set loss.router_aux_grouping=sequence, loss.router_aux_weight=0 or balance=none "
        "(loss.router_z_weight may stay)",
        example=("balance=anneal", "loss.router_aux_weight=0.01"),
        when=lambda c: (
            balanced(c) and c.loss.router_aux_weight != 0 and c.loss.router_aux_grouping is AuxGrouping.pack
        ),
        planning=True,
    ),
    Rule(
        keys=("balance", "recipe"),
        refuses="supervised documents have no recorded routes for the planner to look at",
        fix="choose balance=none",
        example=("recipe=sft", "balance=anneal"),
        when=lambda c: balanced(c) and c.recipe is Recipe.sft,
    ),
    Rule(
        keys=(
            "balance.level",
            "balance.proposals",
            "balance.seconds",
            "balance.layer_stride",
            "balance.max_destination_load",
            "balance.overlap",
        ),
        refuses="no effect with balance=none",
        fix="leave it at its default, or choose a planner",
        example=("balance.level=order",),
        when=lambda c: not balanced(c),
        select=changed,
        planning=True,
    ),
    Rule(
        keys=("balance.seconds",),
        refuses="not a number of at least 0",
        fix="give one; inf = no deadline",
        example=("balance=anneal", "balance.seconds=nan"),
        when=lambda c: balanced(c),
        select=lambda c, key: not c.balance.seconds >= 0,
        planning=True,
    ),
    Rule(
        keys=("balance.proposals",),
        refuses="no effect: balance=greedy places samples without a search",
        fix="leave balance.proposals=null, or choose balance=reference or balance=anneal",
        example=("balance=greedy", "balance.proposals=100"),
        when=lambda c: c.balance.kind is BalanceKind.greedy,
        select=changed,
        planning=True,
    ),
    Rule(
        keys=("balance.seconds",),
        refuses="no effect: balance=greedy has nothing that a deadline could end",
        fix="leave balance.seconds=1.0, or choose balance=reference or balance=anneal",
        example=("balance=greedy", "balance.seconds=2.0", "trainer.devices=4"),
        when=lambda c: c.balance.kind is BalanceKind.greedy,
        select=changed,
        planning=True,
    ),
    Rule(
        keys=("balance.level",),
        refuses="no effect: the reference search only permutes the batch",
        fix="leave balance.level=cells, or choose balance=anneal",
        example=("balance=reference", "balance.level=order", "trainer.devices=4"),
        when=lambda c: c.balance.kind is BalanceKind.reference,
        select=changed,
        planning=True,
    ),
    Rule(
        keys=("balance.cost_model", "balance.write_permutation"),
        refuses="no effect without recipe=plan",
        fix="set recipe=plan, or leave it null",
        example=("balance.cost_model=model.json",),
        when=lambda c: c.recipe is not Recipe.plan,
        select=changed,
    ),
    Rule(
        keys=("balance.cost_model", "balance.write_permutation", "policy.replay"),
        refuses="routes say what experts cost, and they are not read",
        fix="choose policy.replay=null, or leave the others null",
        example=("recipe=plan", "balance.write_permutation=placement.json", "policy.replay=false"),
        when=lambda c: (
            not replays(c) and (c.balance.cost_model is not None or c.balance.write_permutation is not None)
        ),
        planning=True,
    ),
    Rule(
        keys=("balance.write_permutation", "strategy.ep_degree", "plan.ep_degree"),
        refuses="without expert parallelism experts have one place only",
        fix="choose an expert-parallel degree of at least 2, or leave balance.write_permutation=null",
        example=("recipe=plan", "balance.write_permutation=placement.json", "strategy.ep_degree=1"),
        when=lambda c: c.balance.write_permutation is not None and c.ep_degree == 1,
        planning=True,
    ),
)
