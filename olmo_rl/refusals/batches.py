"""Rules of the optimizer batch, packing, the planner and the source of collections."""

from __future__ import annotations

from olmo_rl.config import (
    AdvantageKind,
    AuxGrouping,
    Config,
    PauseMode,
    PublicationKind,
    Recipe,
    ScheduleKind,
    Source,
)
from olmo_rl.refusals.rule import Rule, changed, undivided


def replays(config: Config) -> bool:
    """Whether routes are replayed; a plan may be of files that another model recorded."""
    return config.policy.replay is not False if config.recipe is Recipe.plan else config.replay


def _collection_size(config: Config) -> int:
    """Samples that a generating source collects; 0 where their number is not given."""
    return (config.batch.samples_per_step or 0) * config.batch.steps_per_collection


def _planned(config: Config, key: str) -> bool:
    """Leaves out keys of the planned topology that are not set."""
    return not key.startswith("plan.") or changed(config, key)


BATCH = (
    Rule(
        keys="batch.samples_per_step trainer.devices trainer.num_nodes plan.world_size",
        refuses="samples of one update do not divide over the ranks: all run the same number of samples",
        fix="choose a multiple of the world size",
        when=lambda c: undivided(c.batch.samples_per_step or 0, c.world_size),
        select=_planned,
        planning=True,
    ),
    Rule(
        keys="warm_start.samples_per_step trainer.devices trainer.num_nodes",
        refuses="documents of one supervised update do not divide over the ranks",
        fix="choose a multiple of the world size",
        when=lambda c: c.warm_start.steps > 0 and undivided(c.warm_start.samples_per_step, c.world_size),
    ),
    Rule(
        keys="batch.samples_per_step rollouts",
        refuses="only files can be one update as a whole, a generating source has no end",
        fix="give batch.samples_per_step, or choose rollouts=files",
        when=lambda c: c.batch.samples_per_step is None and c.generates,
        planning=True,
    ),
    Rule(
        keys="batch.samples_per_step recipe",
        refuses="supervised updates are drawn without end, there is no whole collection",
        fix="give batch.samples_per_step",
        when=lambda c: c.batch.samples_per_step is None and c.recipe is Recipe.sft,
    ),
    Rule(
        keys="optim.schedule sft.epochs",
        refuses="a schedule that ends with trainer.max_steps, in a run that ends after a number of epochs",
        fix="set sft.epochs=null and trainer.max_steps, or choose optim.schedule=constant",
        when=lambda c: (
            c.recipe is Recipe.sft
            and c.sft.epochs is not None
            and c.optim.schedule is not ScheduleKind.constant
        ),
    ),
    Rule(
        keys="batch.samples_per_step batch.steps_per_collection",
        refuses="several updates from a collection that is one update",
        fix="give batch.samples_per_step, or set batch.steps_per_collection=1",
        when=lambda c: c.batch.samples_per_step is None and c.batch.steps_per_collection > 1,
        planning=True,
    ),
    Rule(
        keys="batch.samples_per_step batch.steps_per_collection rollouts.group_size",
        refuses="a collection that would cut a group: samples x steps is no multiple of the group size",
        fix="choose a multiple of rollouts.group_size",
        when=lambda c: (
            c.generates
            and c.recipe is not Recipe.sft
            and c.sft.path is None
            and undivided(_collection_size(c), c.rollouts.group_size)
        ),
    ),
    Rule(
        keys="rollouts.group_size",
        refuses="a group of one sample has advantage 0, nothing would be learnt",
        fix="give at least 2, or choose loss.advantage=batch",
        when=lambda c: (
            c.generates
            and c.rollouts.group_size == 1
            and c.recipe is not Recipe.sft
            and c.loss.advantage is not AdvantageKind.batch
        ),
    ),
    Rule(
        keys="rollouts.group_size trainer.devices trainer.num_nodes batch.filter",
        refuses="filters drop groups, and a group that does not divide over the ranks leaves them unequal",
        fix="choose a group size that is a multiple of the world size, or batch.filter=mask",
        when=lambda c: c.generates and c.batch.drops and undivided(c.rollouts.group_size, c.world_size),
    ),
    Rule(
        keys="batch.filter_zero_variance loss.advantage loss.kl_reward_coef",
        refuses="groups of equal rewards, and of one response, have advantages other than 0 here, and the "
        "filter would take them",
        fix="set batch.filter_zero_variance=false, or choose loss.advantage=group or rloo with "
        "loss.kl_reward_coef=0",
        when=lambda c: (
            c.batch.filter_zero_variance
            and (c.loss.advantage is AdvantageKind.batch or c.loss.kl_reward_coef != 0)
        ),
        select=changed,
    ),
    Rule(
        keys="rollouts.max_lag batch.steps_per_collection",
        refuses="later updates of a collection would find every sample too old: age counts where it trains",
        fix="set rollouts.max_lag to at least batch.steps_per_collection - 1",
        when=lambda c: (
            c.generates
            and c.rollouts.max_lag is not None
            and c.rollouts.max_lag < c.batch.steps_per_collection - 1
        ),
    ),
    Rule(
        keys="rollouts.top_p",
        refuses="training on tokens from a part of the vocabulary, with log-probs over the whole of it",
        fix="set rollouts.top_p=1, or use it with recipe=rollout alone",
        when=lambda c: c.generates and c.recipe in (Recipe.train, Recipe.validate),
        select=changed,
    ),
)

CONTINUOUS = (
    Rule(
        keys="rollouts.mode rollouts.max_lag",
        refuses="continuous generation without a bound on age, or with one that engines wait for",
        fix="set rollouts.max_lag to at least 1",
        when=lambda c: c.continuous and (c.rollouts.max_lag is None or c.rollouts.max_lag < 1),
    ),
    Rule(
        keys="rollouts.mode batch.steps_per_collection",
        refuses="continuous generation has no collections, a step starts when it is full",
        fix="set batch.steps_per_collection=1",
        when=lambda c: c.continuous and c.batch.steps_per_collection > 1,
    ),
    Rule(
        keys="rollouts.mode rollouts.pause",
        refuses="engines that always have work would run empty at every publication",
        fix="choose rollouts.pause=keep",
        when=lambda c: c.continuous and c.rollouts.pause is PauseMode.wait,
    ),
    Rule(
        keys="rollouts.mode batch.filter_truncated batch.filter",
        refuses="continuous generation trains whole groups, and this filter drops parts of them",
        fix="choose batch.filter=mask",
        when=lambda c: c.continuous and c.batch.filter_truncated and c.batch.drops,
    ),
    Rule(
        keys="rollouts.mode environment.taskset",
        refuses="continuous generation asks engines itself, and episodes of an environment do",
        fix="set rollouts.mode=collections",
        when=lambda c: c.continuous and c.environment.taskset is not None,
    ),
    Rule(
        keys="rollouts.mode task.set_aside",
        refuses="continuous generation does not set solved problems aside",
        fix="set task.set_aside=0",
        when=lambda c: c.continuous and c.task.set_aside > 0,
    ),
    Rule(
        keys="rollouts.mode loss.kl_reward_coef",
        refuses="continuous generation takes no divergence from rewards",
        fix="set loss.kl_reward_coef=0, or use loss.kl_coef",
        when=lambda c: c.continuous and c.loss.kl_reward_coef != 0,
    ),
)

PACKING = (
    Rule(
        keys="packing.max_tokens model.max_seq_len",
        refuses="the budget of a pack is smaller than the longest document the model may generate",
        fix="set packing.max_tokens to at least model.max_seq_len",
        when=lambda c: c.packed and c.generates and c.budget < c.model.max_seq_len,
        planning=True,
    ),
    Rule(
        keys="packing.pad_to_multiple_of packing.max_tokens model.max_seq_len",
        refuses="rows of the budget are no multiple of it (packing.max_tokens=null: model.max_seq_len)",
        fix="choose a divisor of the budget, for example a power of two",
        when=lambda c: c.packed and undivided(c.budget, c.packing.pad_to_multiple_of),
        select=lambda c, key: key != "model.max_seq_len" or c.packing.max_tokens is None,
        planning=True,
    ),
    Rule(
        keys="packing.pad_id model.vocab_size",
        refuses="a token that the model does not have",
        fix="choose packing.pad_id below model.vocab_size",
        when=lambda c: c.packing.pads and c.packing.pad_id >= c.model.vocab_size,
    ),
    Rule(
        keys="packing balance",
        refuses="the planner adds up loads of samples, and shared rows do not add up",
        fix="choose balance=none, or packing=consecutive",
        when=lambda c: c.shares and c.balanced,
        planning=True,
    ),
    Rule(
        keys="packing recipe",
        refuses="this recipe does not know rows that samples share",
        fix="choose packing=consecutive",
        when=lambda c: c.shares and c.recipe in (Recipe.sft, Recipe.plan),
        planning=True,
    ),
)

BALANCE = (
    Rule(
        keys="balance packing",
        refuses="the planner arranges packs, and packing is off",
        fix="choose packing=consecutive, or balance=none",
        when=lambda c: c.balanced and not c.packed,
        planning=True,
    ),
    Rule(
        keys="balance policy.replay",
        refuses="the planner needs the experts of every token in advance, and routes are not replayed",
        fix="choose policy.replay=null, or balance=none",
        when=lambda c: c.balanced and not replays(c),
        planning=True,
    ),
    Rule(
        keys="balance strategy.ep_degree plan.ep_degree",
        refuses="without expert parallelism there are no destinations to balance",
        fix="choose an expert-parallel degree of at least 2, or balance=none",
        when=lambda c: c.balanced and c.ep_degree == 1,
        select=_planned,
        planning=True,
    ),
    Rule(
        keys="balance strategy.ep_degree trainer.devices trainer.num_nodes plan.world_size",
        refuses="one replica holds all ranks, so every column sends the same loads wherever samples lie",
        fix="use more ranks than the expert-parallel degree, or balance=none",
        when=lambda c: c.balanced and c.ep_degree > 1 and c.world_size <= c.ep_degree,
        select=_planned,
        planning=True,
    ),
    Rule(
        keys="balance loss.router_aux_weight loss.router_aux_grouping",
        refuses="the router balancing loss looks at whole packs, so the planner would change the objective",
        fix="set loss.router_aux_grouping=sequence, loss.router_aux_weight=0 or balance=none "
        "(loss.router_z_weight may stay)",
        when=lambda c: (
            c.balanced and c.loss.router_aux_weight != 0 and c.loss.router_aux_grouping is AuxGrouping.pack
        ),
        planning=True,
    ),
    Rule(
        keys="balance recipe",
        refuses="supervised documents have no recorded routes for the planner to look at",
        fix="choose balance=none",
        when=lambda c: c.balanced and c.recipe is Recipe.sft,
    ),
    Rule(
        keys="balance.cost_model balance.write_permutation policy.replay",
        refuses="routes determine the cost of experts, and they are not read",
        fix="choose policy.replay=null, or leave the others null",
        when=lambda c: (
            not replays(c) and (c.balance.cost_model is not None or c.balance.write_permutation is not None)
        ),
        planning=True,
    ),
    Rule(
        keys="balance.write_permutation strategy.ep_degree plan.ep_degree",
        refuses="without expert parallelism experts have one place only",
        fix="choose an expert-parallel degree of at least 2, or leave balance.write_permutation=null",
        when=lambda c: c.balance.write_permutation is not None and c.ep_degree == 1,
        planning=True,
    ),
    Rule(
        keys="balance.max_destination_load balance.layer_stride",
        refuses="layers that the stride leaves out can exceed the cap",
        fix="set balance.layer_stride=1, or balance.max_destination_load=null",
        when=lambda c: c.balance.max_destination_load is not None and c.balance.layer_stride > 1,
        planning=True,
    ),
    Rule(
        keys="balance.guests policy.replay",
        refuses="shares of experts follow from the routes of every token, and routes are not replayed",
        fix="choose policy.replay=null, or balance.guests=0",
        when=lambda c: c.lends and not replays(c),
        planning=True,
    ),
    Rule(
        keys="balance.guests strategy.ep_degree plan.ep_degree",
        refuses="without expert parallelism every rank has all experts",
        fix="choose an expert-parallel degree of at least 2, or balance.guests=0",
        when=lambda c: c.lends and c.ep_degree == 1,
        select=_planned,
        planning=True,
    ),
    Rule(
        keys="balance.guests balance.layer_stride",
        refuses="experts of layers that the stride leaves out are not counted",
        fix="set balance.layer_stride=1, or balance.guests=0",
        when=lambda c: c.lends and c.balance.layer_stride > 1,
        planning=True,
    ),
    Rule(
        keys="balance.guests packing",
        refuses="shares are chosen from rows of samples one by one, and here samples share rows",
        fix="choose packing=consecutive, or balance.guests=0",
        when=lambda c: c.lends and c.shares,
        planning=True,
    ),
    Rule(
        keys="balance.guests recipe",
        refuses="supervised documents have no recorded routes to choose shares from",
        fix="choose balance.guests=0",
        when=lambda c: c.lends and c.recipe is Recipe.sft,
    ),
)

ROLLOUTS = (
    Rule(
        keys="rollouts rollouts.path",
        refuses="files to read are not named",
        fix="set rollouts.path to a file, or to a directory with one collection per file",
        when=lambda c: c.rollouts.source is Source.files and c.rollouts.path is None,
        planning=True,
    ),
    Rule(
        keys="recipe rollouts",
        refuses="recorded collections exist already, nothing is generated",
        fix="choose rollouts=local",
        when=lambda c: c.recipe is Recipe.rollout and not c.generates,
    ),
    Rule(
        keys="recipe rollouts",
        refuses="only recorded samples can be scored",
        fix="choose rollouts=files",
        when=lambda c: c.recipe is Recipe.score and c.generates,
    ),
    Rule(
        keys="rollouts rollouts.urls",
        refuses="engines to ask are not named",
        fix="give their addresses: rollouts.urls=[http://host:8000]",
        when=lambda c: c.asks_engines and not c.rollouts.urls,
    ),
    Rule(
        keys="rollouts.urls",
        refuses="not addresses of HTTP servers, or the same one twice",
        fix="give http://host:port or https://host:port for each, once",
        when=lambda c: (
            c.asks_engines
            and (
                not all(url.startswith(("http://", "https://")) for url in c.rollouts.urls)
                or len(set(c.rollouts.urls)) < len(c.rollouts.urls)
            )
        ),
    ),
    Rule(
        keys="rollouts.publication rollouts trainer.accelerator",
        refuses="vLLM receives broadcasts by NCCL, between GPUs alone",
        fix="choose rollouts.publication=directory, or rollouts=sglang",
        when=lambda c: (
            c.rollouts.source is Source.vllm
            and c.rollouts.publication is PublicationKind.collective
            and c.trainer.accelerator == "cpu"
        ),
    ),
    Rule(
        keys="rollouts.pause rollouts",
        refuses="SGLang has no pause that waits for requests in flight",
        fix="choose rollouts.pause=keep or rollouts.pause=abort",
        when=lambda c: c.rollouts.source is Source.sglang and c.rollouts.pause is PauseMode.wait,
    ),
)
