"""The typed configuration of a run: every key with its default, documentation, bounds and conditions.

YAML under `conf/` states only differences from these defaults. `null` in YAML is None here. keys.py describes
what a key carries; rules that relate several keys are in refusals/. `register()` gives the schema to Hydra;
the command line and tests call it, never an import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from olmo_rl.keys import Choice, Needs, key, section
from olmo_rl.types import ExpertLayout, Padding


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeEntry:
    """The function behind a recipe as `module:function`, whether every rank of the job runs it, and whether
    it takes what the preflight read (`inputs`).
    """

    entry: str
    doc: str
    ranks: bool = False
    reads: bool = False


# A class body cannot bind the word `import`.
Recipe = Enum(
    "Recipe",
    {
        "train": "train",
        "sft": "sft",
        "rollout": "rollout",
        "score": "score",
        "evaluate": "evaluate",
        "plan": "plan",
        "validate": "validate",
        "check": "check",
        "export": "export",
        "serve": "serve",
        "upcycle": "upcycle",
        "import": "import",
        "report": "report",
    },
)

RECIPES: dict[Recipe, RecipeEntry] = {
    Recipe.train: RecipeEntry(
        entry="recipes.train:train", doc="GRPO: collect, plan, update, publish", ranks=True, reads=True
    ),
    Recipe.sft: RecipeEntry(
        entry="recipes.sft:train",
        doc="supervised updates on chat data or a task's answers, packed like GRPO",
        ranks=True,
        reads=True,
    ),
    Recipe.rollout: RecipeEntry(
        entry="recipes.rollout:generate",
        doc="generate collections and write them as files",
        ranks=True,
        reads=True,
    ),
    Recipe.score: RecipeEntry(
        entry="recipes.score:score", doc="log-probs of recorded samples", ranks=True, reads=True
    ),
    Recipe.evaluate: RecipeEntry(
        entry="recipes.evaluate:run",
        doc="held-out problems answered by given weights or by serving engines: rewards and pass@k",
    ),
    Recipe.plan: RecipeEntry(
        entry="recipes.plan:run",
        doc="packs and ranks of every update as table, JSON and picture; no GPU, no torch",
        reads=True,
    ),
    Recipe.validate: RecipeEntry(
        entry="recipes.validate:run", doc="report every invalid setting and file at once, before weights load"
    ),
    Recipe.check: RecipeEntry(
        entry="recipes.check:run",
        doc="this machine and every engine: whether they have what training needs, as a table",
    ),
    Recipe.export: RecipeEntry(
        entry="recipes.export:run", doc="weights of a run as a Hugging Face directory"
    ),
    Recipe.serve: RecipeEntry(
        entry="recipes.serve:run", doc="the local engine behind the HTTP API of serving engines"
    ),
    Recipe.upcycle: RecipeEntry(
        entry="recipes.upcycle:run", doc="weights of a dense model as those of a mixture of experts"
    ),
    Recipe["import"]: RecipeEntry(
        entry="recipes.convert:run", doc="convert rollouts of another system into rollout files of olmo_rl"
    ),
    Recipe.report: RecipeEntry(
        entry="recipes.report:run", doc="a page about a run, two runs or a sweep; no GPU, no torch"
    ),
}


class LayerType(Choice):
    linear_attention = "linear_attention", "Kimi Delta Attention with short convolutions"
    full_attention = "full_attention", "softmax attention over the whole document"
    sliding_attention = "sliding_attention", "softmax attention over the last model.sliding_window tokens"


class QkNorm(Choice):
    none = "none"
    head = "head", "every head of queries and keys on its own"
    projection = "projection", "all heads of queries together, all heads of keys together"


class BlockNorms(Choice):
    before = "before", "on the input of the mixer and of the feed-forward"
    after = "after", "on their output, before it is added to the residual stream"
    both = "both"


class ScoreFunction(Choice):
    softmax = "softmax"
    sigmoid = "sigmoid"


class Filter(Choice):
    drop = "drop", "filtered samples leave the batch"
    mask = "mask", "they stay without a trained token"


class PackingKind(Choice):
    none = "none", "one sample per forward"
    consecutive = "consecutive", "consecutive samples share a row up to the budget"
    trees = "trees", "samples with equal beginnings also share the rows of these, and lie in one pack"


class BalanceKind(Choice):
    none = "none", "the order of arrival"
    reference = "reference", "a simple search that permutes the batch"
    anneal = "anneal", "simulated annealing that also sets the boundaries of packs"


class Attention(Choice):
    auto = "auto", "the first backend that supports the configuration"
    torch = "torch", "one document a row"
    reference = "reference", "plain torch, any device"
    varlen = "varlen", "the kernel that torch ships"
    flash_2 = "flash_2"
    flash_3 = "flash_3"
    flash_4 = "flash_4"


class LinearAttention(Choice):
    auto = "auto", "the first backend that supports the configuration"
    reference = "reference", "plain torch, any device"
    fla = "fla", "kernels of flash-linear-attention"


class Recompute(Choice):
    none = "none"
    full = "full", "every block"
    selective = "selective", "all but the expensive results of a block"


class LogprobKind(Choice):
    chunked = "chunked", "logits of policy.logprob_chunk tokens at a time"
    full = "full", "all logits at once"
    liger = "liger", "a fused CUDA kernel"


class Dtype(Choice):
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64", "on a CPU, to distinguish a fault from rounding: weights and optimizer too"


class WrittenDtype(Choice):
    float32 = "float32"
    bfloat16 = "bfloat16"


class OptimizerKind(Choice):
    adamw = "adamw", "AdamW for every weight"
    muon = "muon", "Muon for the matrices of blocks, AdamW for everything else"


class ScheduleKind(Choice):
    constant = "constant", "optim.lr to the end"
    linear = "linear", "a straight line to optim.min_lr_ratio"
    cosine = "cosine", "half a cosine to optim.min_lr_ratio"
    wsd = "wsd", "constant, then a straight line in the last optim.decay_fraction"


class LossKind(Choice):
    grpo = "grpo"
    gspo = "gspo"
    cispo = "cispo"


class AdvantageKind(Choice):
    group = "group", "reward minus the mean of its group, over its deviation"
    rloo = "rloo", "reward minus the mean of the others of its group"
    batch = "batch", "reward minus the mean of the whole collection, over its deviation"


class WeightLevel(Choice):
    token = "token", "one weight a token"
    sequence = "sequence", "the product over the response"


class WeightBound(Choice):
    truncate = "truncate", "clip the weight"
    mask = "mask", "set it to 0"


class Reduction(Choice):
    token = "token", "mean over response tokens"
    response = "response", "mean of the means of responses"


class KlEstimator(Choice):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class OnNonfinite(Choice):
    abort = "abort", "the run ends"
    skip = "skip", "the update is skipped"


class AuxGrouping(Choice):
    pack = "pack"
    sequence = "sequence", "each document on its own"


class CountSource(Choice):
    dispatch = "dispatch", "the experts in use"
    current = "current", "the live top-k"


class ScoringMode(Choice):
    auto = "auto", "skip the pass where that is exact and checked"
    always = "always"


class Source(Choice):
    local = "local", "the engine of this process"
    files = "files", "recorded collections"
    vllm = "vllm", "serving engines with the API of vLLM"
    sglang = "sglang", "serving engines with the API of SGLang"


class RolloutMode(Choice):
    collections = "collections", "one collection after another is generated and trained"
    continuous = "continuous", "engines always have work; a step starts when finished groups fill it"


class Overdue(Choice):
    wait = "wait", "the last step that may train it waits for it: no group is lost for being slow"
    cancel = "cancel", "its requests are cancelled and its problem is asked again"


class PublicationKind(Choice):
    directory = "directory", "files that every engine reads"
    collective = "collective", "a broadcast from rank 0"


class PauseMode(Choice):
    keep = "keep", "they go on with the new weights"
    wait = "wait", "they end first (vLLM only)"
    abort = "abort", "they are aborted and asked again"


class OnGap(Choice):
    refuse = "refuse", "the run ends, naming the engine"
    warn = "warn", "one warning for each engine"
    ignore = "ignore", "nothing is compared"


class EngineApi(Choice):
    vllm = "vllm", "that of vLLM 0.32.0"
    sglang = "sglang", "that of SGLang 0.5.23"


class OnVerifierFailure(Choice):
    refuse = "refuse", "the run ends and names the problem"
    leave_out = "leave_out", "the sample is not trained"
    zero = "zero", "a reward of 0"


class SftFormat(Choice):
    auto = "auto", "by the suffix of each file, .jsonl or .parquet"
    jsonl = "jsonl"
    parquet = "parquet"
    datasets = "datasets", "a directory or name of Hugging Face datasets"


class Overlong(Choice):
    refuse = "refuse"
    drop = "drop"
    truncate = "truncate"


class TrainOn(Choice):
    all = "all"
    last = "last"


class OverlongPrompt(Choice):
    refuse = "refuse"
    leave_out = "leave_out"  # counted as rollouts/overlong_prompts


class TaskKind(Choice):
    addition = "addition"
    reasoning_gym = "reasoning_gym"
    jsonl = "jsonl", "rows of a file: JSONL, parquet or Hugging Face datasets"
    mixed = "mixed", "several tasks by weight"


class LoggerKind(Choice):
    csv = "csv", "metrics.csv alone"
    wandb = "wandb", "Weights & Biases too"
    tensorboard = "tensorboard", "TensorBoard too, in tensorboard/ of the run directory"


_GENERATES = Needs(
    lambda c: c.generates, "with rollouts=files: nothing is generated", "choose rollouts=local"
)
_ENGINES = Needs(
    lambda c: c.asks_engines, "without serving engines", "choose rollouts=vllm or rollouts=sglang"
)
_ENVIRONMENT = Needs(
    lambda c: c.environment.taskset is not None,
    "without environment.taskset",
    "name the environment with environment.taskset",
)
_CONTINUOUS = Needs(lambda c: c.continuous, "without continuous generation", "set rollouts.mode=continuous")
_EXPERTS = Needs(
    lambda c: c.model.num_experts != 0,
    "in a model without experts (model.num_experts=0)",
    "set model.num_experts",
)
_ROUTERS = Needs(
    lambda c: bool(c.model.routed_layers), "in a model without routed layers", "set model.num_experts"
)
_PACKS = Needs(
    lambda c: c.packed,
    "with packing=none: every forward is one unpadded sample",
    "choose packing=consecutive",
    planning=True,
)
_BALANCES = Needs(
    lambda c: c.balanced, "with balance=none", "choose balance=reference or balance=anneal", planning=True
)
_JUDGES = Needs(
    lambda c: c.lends and c.recipe in (Recipe.plan, Recipe.validate),
    "without balance.guests under recipe=plan or recipe=validate",
    "set balance.guests",
    planning=True,
)
_PLANS = Needs(lambda c: c.recipe is Recipe.plan, "without recipe=plan", "set recipe=plan")
_REPORTS = Needs(lambda c: c.recipe is Recipe.report, "without recipe=report", "set recipe=report")
_SERVES = Needs(lambda c: c.recipe is Recipe.serve, "without recipe=serve")
_IMPORTS = Needs(
    lambda c: c.recipe is Recipe["import"],
    "without recipe=import",
    "use rollouts=files rollouts.path for files of olmo_rl",
)
_KL = Needs(lambda c: c.loss.kl_coef != 0, "with loss.kl_coef=0", "set loss.kl_coef")
_REFERENCE = Needs(
    lambda c: c.needs_reference,
    "with loss.kl_coef=0 and loss.kl_reward_coef=0",
    "set one of them",
)
_TIS = Needs(
    lambda c: c.loss.tis_low is not None or c.loss.tis_high is not None,
    "without clips of the importance weight",
    "set loss.tis_low or loss.tis_high",
)
_AUX = Needs(
    lambda c: c.loss.router_aux_weight != 0, "without a router balancing loss", "set loss.router_aux_weight"
)
_CHECKS = Needs(
    lambda c: not c.scores_separately(steps_in_collection=c.batch.steps_per_collection),
    "where every update has a scoring pass of its own: there is nothing to check",
    "set scoring.mode=auto batch.steps_per_collection=1",
)
_JSONL = Needs(lambda c: c.task.kind is TaskKind.jsonl, "without task=jsonl", "choose task=jsonl")
_JUDGES = Needs(
    lambda c: c.task.kind in (TaskKind.jsonl, TaskKind.mixed),
    "without task=jsonl or task=mixed",
    "choose one of them",
)
_TABLES = Needs(
    lambda c: c.task.format is SftFormat.datasets, "without task.format=datasets", "set task.format=datasets"
)
_CHAT_DATA = Needs(
    lambda c: c.sft.path is not None,
    "without sft.path: a task's demonstrations are drawn without end",
    "name the data with sft.path",
)
_DATASETS = Needs(
    lambda c: c.sft.format is SftFormat.datasets, "without sft.format=datasets", "set sft.format=datasets"
)
_HELD_OUT = Needs(
    lambda c: c.sft.eval_path is not None,
    "without sft.eval_path",
    "name held-out conversations with sft.eval_path",
)
_EXPORTS = Needs(
    lambda c: c.recipe is Recipe.export or c.asks_engines,
    "where nothing is exported and no engine receives weights",
    "choose recipe=export, rollouts=vllm or rollouts=sglang",
)
_WANDB = Needs(lambda c: c.logger.kind is LoggerKind.wandb, "without logger=wandb", "choose logger=wandb")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A hybrid decoder: mixers by layer type, dense or routed feed-forward by layer index."""

    vocab_size: int = key(259, "bytes and three special ids", min=1)
    dim: int = key(128, "width of the residual stream", min=1)
    layer_types: list[LayerType] = key([LayerType.full_attention] * 2, "mixer of every layer")
    dense_layers: list[int] = key([], "global ids of layers with a dense feed-forward", needs=_EXPERTS)
    dense_hidden: int = key(256, "width of a dense feed-forward", min=1)
    num_heads: int = key(4, "query heads", min=1)
    num_kv_heads: int = key(4, "key and value heads, divides num_heads", min=1)
    head_dim: int = key(32, "width of one attention head", min=1)
    qk_norm: QkNorm = key(QkNorm.head, "RMSNorm of queries and keys")
    block_norms: BlockNorms = key(BlockNorms.before, "position of the RMSNorms of a block")
    rope_theta: float | None = key(10000.0, "base of the rotary embedding, null = none", above=0)
    sliding_window: int = key(64, "tokens, the current one included", min=1)
    kda_heads: int = key(4, "heads of a linear attention layer", min=1)
    kda_head_dim: int = key(32, "width of one linear attention head", min=1)
    conv_size: int = key(4, "taps of the short convolution", min=1)
    kda_negative_eigenvalues: bool = key(False, "beta in (0, 2) instead of (0, 1)")
    num_experts: int = key(8, "0 = every layer is dense", min=0)
    top_k: int = key(2, "experts of one token", min=1)
    expert_hidden: int = key(128, "width of one routed expert", min=1)
    shared_hidden: int = key(0, "width of the shared expert, 0 = none", min=0, needs=_EXPERTS)
    latent_dim: int | None = key(None, "width of routed tokens, null = dim", min=1, needs=_EXPERTS)
    latent_norm: bool = key(False, "RMSNorm of the combined latent before it is projected up", needs=_EXPERTS)
    score_function: ScoreFunction = key(ScoreFunction.softmax, "router scores from logits")
    route_norm: bool = key(True, "gate weights of one token sum to 1 before scaling")
    route_scale: float = key(1.0, "factor on gate weights", above=0)
    max_seq_len: int = key(1024, "tokens of one document", min=1)
    norm_eps: float = key(1e-6, "epsilon of every RMSNorm", above=0)
    tie_embeddings: bool = key(False, "the output head is the embedding")
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)
    tokenizer: str = key("bytes", "bytes, a Hugging Face directory or name, a .gguf file, or package:NAME")

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Global ids of the layers with routed experts."""
        if self.num_experts == 0:
            return ()
        return tuple(i for i in range(len(self.layer_types)) if i not in self.dense_layers)

    @property
    def expert_layout(self) -> ExpertLayout | None:
        """What recorded routes refer to; None without experts."""
        if not self.routed_layers:
            return None
        return ExpertLayout(num_experts=self.num_experts, top_k=self.top_k, routed_layers=self.routed_layers)


LISTED_DIGITS = 2  # of task=addition: all pairs of numbers with so many digits are listed


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Prompts and their verifier."""

    kind: TaskKind = key(TaskKind.addition, "origin of problems")
    name: str | None = key(
        None,
        "reasoning_gym: dataset name",
        needs=Needs(
            lambda c: c.task.kind is TaskKind.reasoning_gym,
            "without task=reasoning_gym",
            "choose task=reasoning_gym",
        ),
    )
    parameters: dict[str, Any] = key(
        {},
        "arguments of the dataset",
        needs=Needs(
            lambda c: c.task.kind in (TaskKind.addition, TaskKind.reasoning_gym),
            "with task=jsonl or task=mixed: files hold the problems, or every part has its own",
        ),
    )
    path: str | None = key(
        None, "jsonl: rows with prompt and answer; for datasets a directory or name", needs=_JSONL
    )
    format: SftFormat = key(SftFormat.auto, "jsonl: format of path", needs=_JSONL)
    subset: str | None = key(None, "datasets: name of the configuration", needs=(_JSONL, _TABLES))
    split: str = key("train", "datasets: rows to take", needs=(_JSONL, _TABLES))
    prompt_column: str = key("prompt", "jsonl: column of prompts", needs=_JSONL)
    answer_column: str = key("answer", "jsonl: column of reference answers", needs=_JSONL)
    mix: dict[str, Any] = key(
        {},
        "mixed: tasks by name, each with its weight and its keys of task",
        needs=Needs(lambda c: c.task.kind is TaskKind.mixed, "without task=mixed", "choose task=mixed"),
    )
    chat: bool = key(False, "prompts are user turns in the chat template of model.tokenizer")
    system: str | None = key(
        None,
        "chat: the system turn, null = the template's own",
        needs=Needs(lambda c: c.task.chat, "without task.chat", "set task.chat=true"),
    )
    verifier: dict[str, Any] = key(
        {}, "jsonl, mixed: _target_ and arguments; {} = exact match", needs=_JUDGES
    )
    verifiers: dict[str, Any] = key({}, "jsonl, mixed: one verifier for each domain of a line", needs=_JUDGES)
    rewards: dict[str, Any] = key(
        {}, "jsonl, mixed: several rewards by name, each _target_, _weight_ and arguments", needs=_JUDGES
    )
    verifier_seconds: float | None = key(
        None, "jsonl, mixed: time limit of one judgement, null = none", above=0, needs=_JUDGES
    )
    on_verifier_failure: OnVerifierFailure = key(
        OnVerifierFailure.refuse, "jsonl, mixed: a verifier raises or exceeds its time limit", needs=_JUDGES
    )
    overlong: OverlongPrompt = key(
        OverlongPrompt.refuse, "prompts that leave no room in model.max_seq_len for the response"
    )
    set_aside: int = key(
        0,
        "passes that a prompt sits out when all or none of its responses solved it, 0 = none",
        min=0,
        max=100,
        needs=(
            Needs(
                lambda c: c.task.comes_back,
                "on problems made on demand, which do not come back: task=reasoning_gym, task=addition with "
                f"more than {LISTED_DIGITS} digits, task=mixed of these alone",
                "choose another task",
            ),
            Needs(lambda c: c.recipe in (Recipe.train, Recipe.validate), "without recipe=train"),
        ),
    )
    eval_problems: int = key(200, "held-out problems, never trained on", min=0)
    eval_interval: int = key(50, "updates between evaluations, 0 = none", min=0)

    @property
    def comes_back(self) -> bool:
        """Whether training problems come once a pass, those of a mixture in one part at least; what is no
        task breaks another rule.
        """
        if self.kind is not TaskKind.mixed:
            return _comes_back(self.kind.value, self.parameters)
        parts = [part for part in self.mix.values() if isinstance(part, Mapping)]
        return not parts or any(
            _comes_back(part.get("kind", TaskKind.jsonl.value), part.get("parameters", {})) for part in parts
        )


def _comes_back(kind: object, parameters: object) -> bool:
    """Whether the problems of a task, not a mixture, are listed."""
    digits = parameters.get("digits", 1) if isinstance(parameters, Mapping) else 1
    made = kind == TaskKind.addition.value and isinstance(digits, int) and digits > LISTED_DIGITS
    return not made and kind != TaskKind.reasoning_gym.value


_SAMPLES = Needs(
    lambda c: c.evaluation.samples > 1,
    "with one response to each problem",
    "set evaluation.samples",
)


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """How held-out problems are asked, in training and by recipe=evaluate."""

    sets: dict[str, Any] = key(
        {}, "further held-out sets by name: path, or other keys of task, and a number of problems"
    )
    samples: int = key(1, "responses to each problem", min=1)
    temperature: float = key(0.0, "of sampling, 0 = greedy", min=0)
    top_p: float = key(
        1.0,
        "of sampling",
        above=0,
        max=1,
        needs=Needs(
            lambda c: c.evaluation.temperature > 0, "with greedy answers", "set evaluation.temperature"
        ),
    )
    pass_at: list[int] = key([], "each k of pass@k, up to samples", needs=_SAMPLES)
    solved_from: float = key(
        1.0,
        "least reward of a response that solves its problem",
        needs=Needs(
            lambda c: bool(c.evaluation.pass_at) or c.task.set_aside > 0,
            "without pass@k and prompts that are set aside",
            "set evaluation.pass_at or task.set_aside",
        ),
    )


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """Turns, tools and rewards of an environment of the verifiers library, in place of the task."""

    taskset: str | None = key(None, "module of its tasks, null = prompts and rewards are the task's")
    env: str = key(
        "", "module of how several agents play, '' = the taskset's own, else one agent", needs=_ENVIRONMENT
    )
    harness: str | None = key(
        None, "module of an agent's program, null = the taskset's own, else our chat loop", needs=_ENVIRONMENT
    )
    renderer: dict[str, Any] = key(
        {}, "name and settings of the library's renderer, {} = plain text", needs=_ENVIRONMENT
    )
    settings: dict[str, Any] = key({}, "further settings of the library's environment", needs=_ENVIRONMENT)
    tasks: int | None = key(None, "tasks to read, null = all of them", min=1, needs=_ENVIRONMENT)
    success: str | None = key(
        None, "metric that a held-out evaluation reports, null = the reward", needs=_ENVIRONMENT
    )
    max_turns: int = key(16, "turns of one agent in one episode", min=1, needs=_ENVIRONMENT)
    concurrency: int = key(64, "episodes in flight at once", min=1, needs=_ENVIRONMENT)
    timeout_seconds: float = key(600.0, "of one episode", above=0, needs=_ENVIRONMENT)
    start_seconds: float = key(
        600.0, "until its tasks are loaded, and until its tools are up", above=0, needs=_ENVIRONMENT
    )
    stall_seconds: float = key(
        120.0, "its event loop may stand still for this long", above=0, needs=_ENVIRONMENT
    )


@dataclass(kw_only=True, slots=True)
class RolloutsConfig:
    """Where collections come from."""

    source: Source = key(Source.local, "the local engine, serving engines, or recorded files")
    path: str | None = key(
        None,
        "files: one file, or a directory read in name order",
        needs=Needs(
            lambda c: not c.generates,
            "where collections are generated",
            "choose rollouts=files",
            planning=True,
        ),
    )
    collections: int = key(
        1,
        "recipe=rollout: number of collections to write",
        min=1,
        needs=Needs(
            lambda c: c.recipe in (Recipe.rollout, Recipe.validate),
            "without recipe=rollout: trainer.max_steps ends a run",
            "set recipe=rollout",
        ),
    )
    group_size: int = key(8, "generated: responses of one prompt", min=1, needs=_GENERATES)
    max_new_tokens: int = key(16, "generated: response length limit", min=1, needs=_GENERATES)
    temperature: float = key(
        1.0,
        "of sampling, and of the probabilities that are trained: logits over it",
        above=0,
        needs=Needs(
            lambda c: c.recipe is not Recipe.sft,
            "in supervised training: nothing is sampled",
            "set recipe=train",
        ),
    )
    top_p: float = key(1.0, "generated: of sampling", above=0, max=1, needs=_GENERATES)
    length_penalty: float = key(
        0.0,
        "generated: taken from the reward of a response of max_new_tokens tokens",
        min=0,
        needs=_GENERATES,
    )
    length_buffer: int | None = key(
        None,
        "last tokens of max_new_tokens over which that grows from 0, null = a quarter of them",
        min=1,
        needs=(
            _GENERATES,
            Needs(
                lambda c: c.rollouts.length_penalty > 0,
                "without a length penalty",
                "set rollouts.length_penalty",
            ),
        ),
    )
    max_attempts: int = key(
        4,
        "generated: rounds to fill one collection",
        min=1,
        needs=(
            _GENERATES,
            Needs(
                lambda c: c.rollouts.source is not Source.local or c.batch.drops,
                "without a filter that drops samples: one round fills a collection",
                "set batch.filter_zero_variance or batch.filter_truncated",
            ),
        ),
    )
    mode: RolloutMode = key(
        RolloutMode.collections,
        "vllm, sglang: how generation and training take turns",
        needs=(
            _ENGINES,
            Needs(
                lambda c: c.recipe in (Recipe.train, Recipe.validate, Recipe.check),
                "where nothing is trained while engines generate",
                "set recipe=train",
            ),
        ),
    )
    overdue: Overdue = key(
        Overdue.wait,
        "continuous: a group that the last step that may train it would leave unfinished",
        needs=_CONTINUOUS,
    )
    max_lag: int | None = key(
        None,
        "optimizer steps from generation to update, older samples are dropped; null = any",
        min=0,
        needs=Needs(
            lambda c: c.rollouts.source is not Source.local,
            "with rollouts=local: the engine always generates with the current weights",
            "choose rollouts=files",
        ),
    )
    urls: list[str] = key([], "vllm, sglang: addresses of engines, http://host:port", needs=_ENGINES)
    served_model: str | None = key(
        None, "vllm, sglang: name of the model there, null = the first one listed", needs=_ENGINES
    )
    concurrency: int = key(
        64, "vllm, sglang: requests in flight at once, for each rank", min=1, needs=_ENGINES
    )
    timeout_seconds: float = key(
        600.0, "vllm, sglang: of one attempt at one request", above=0, needs=_ENGINES
    )
    wait_seconds: float = key(
        1800.0, "vllm, sglang: all engines may be gone for this long", above=0, needs=_ENGINES
    )
    retries: int = key(
        4,
        "vllm, sglang: further attempts of one request, on another engine if possible",
        min=0,
        needs=_ENGINES,
    )
    publication: PublicationKind = key(
        PublicationKind.directory, "vllm, sglang: how engines get new weights", needs=_ENGINES
    )
    pause: PauseMode = key(
        PauseMode.keep, "vllm, sglang: what happens to requests in flight when weights change", needs=_ENGINES
    )
    on_gap: OnGap = key(
        OnGap.refuse,
        "vllm, sglang: an engine's log-probs after a publication are not those of the policy",
        needs=_ENGINES,
    )
    max_gap: float | None = key(
        None,
        "mean difference of those log-probs in nats, null = 0.01, or 0.1 where bfloat16 is used",
        above=0,
        needs=(
            _ENGINES,
            Needs(
                lambda c: c.rollouts.on_gap is not OnGap.ignore,
                "where nothing is compared",
                "set rollouts.on_gap=refuse",
            ),
        ),
    )
    token: str | None = key(
        None, "vllm, sglang: sent as bearer token; the run directory keeps it in plain text", needs=_ENGINES
    )
    engine_ranks: int = key(
        1,
        "publication=collective: GPUs of one engine, tp x dp",
        min=1,
        needs=Needs(
            lambda c: c.rollouts.publication is PublicationKind.collective,
            "without a broadcast to engines",
            "choose rollouts=sglang rollouts.publication=collective",
        ),
    )


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """recipe=export: a Hugging Face directory of the weights in init_from."""

    path: str | None = key(
        None,
        "directory to write, which must not exist; null = hf/ in the run directory",
        needs=Needs(lambda c: c.recipe is Recipe.export, "without recipe=export"),
    )
    dtype: WrittenDtype = key(WrittenDtype.float32, "of the written weights", needs=_EXPORTS)
    shard_gib: float = key(
        4.0,
        "largest size of one safetensors file, in GiB",
        above=0,
        needs=(
            _EXPORTS,
            Needs(
                lambda c: (
                    c.recipe is Recipe.export
                    or not c.asks_engines
                    or c.rollouts.publication is PublicationKind.directory
                ),
                "with rollouts.publication=collective: broadcast weights are no files",
                "choose rollouts.publication=directory",
            ),
        ),
    )


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """recipe=serve: the local engine behind the HTTP API of serving engines."""

    host: str = key("127.0.0.1", "address to listen on", needs=_SERVES)
    port: int = key(8000, "0 = any free one, which is printed", min=0, max=65535, needs=_SERVES)
    api: EngineApi = key(EngineApi.vllm, "whose routes and fields it imitates", needs=_SERVES)
    token: str | None = key(
        None, "bearer token that every request but /health needs, null = none", needs=_SERVES
    )
    weights_from: list[str] = key(
        ["outputs"], "directories below which requests may name weights to load, [] = none", needs=_SERVES
    )


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """The optimizer batch over all ranks."""

    samples_per_step: int | None = key(512, "samples of one update, null = the whole collection", min=1)
    steps_per_collection: int = key(
        1,
        "updates from one collection",
        min=1,
        needs=Needs(
            lambda c: c.generates,
            "with rollouts=files: a file is cut into as many updates as it holds",
            "choose rollouts=local",
        ),
    )
    filter: Filter = key(
        Filter.drop,
        "treatment of filtered samples",
        needs=Needs(
            lambda c: c.batch.filters,
            "without a filter",
            "set batch.filter_zero_variance or batch.filter_truncated",
        ),
    )
    filter_zero_variance: bool = key(False, "filter groups whose rewards are all equal")
    max_skips: int = key(100, "consecutive steps without anything to train on that end the run", min=0)
    filter_truncated: bool = key(False, "filter responses cut at max_new_tokens")

    @property
    def filters(self) -> bool:
        """Whether samples may be filtered."""
        return self.filter_zero_variance or self.filter_truncated

    @property
    def drops(self) -> bool:
        """Whether filtered samples leave the batch."""
        return self.filters and self.filter is Filter.drop


@dataclass(kw_only=True, slots=True)
class PackingConfig:
    """How samples become rows."""

    kind: PackingKind = key(PackingKind.none, "how samples share a row")
    max_tokens: int | None = key(
        None, "budget of one pack in tokens, null = model.max_seq_len", min=1, needs=_PACKS
    )
    pad_to_multiple_of: int = key(
        1,
        "tokens of a row, divides the budget; padding repeats the pack's own documents",
        min=1,
        needs=(
            _PACKS,
            Needs(
                lambda c: not c.packing.pad_to_budget,
                "with packing.pad_to_budget=true: every row is as long as the budget",
                "set packing.pad_to_budget=false",
                planning=True,
            ),
        ),
    )
    pad_to_budget: bool = key(False, "every row as long as the budget", needs=_PACKS)
    pad_id: int = key(
        0,
        "token of padding where no document of a pack may be repeated: all have placeholders",
        min=0,
        needs=Needs(
            lambda c: c.packing.pads,
            "without padding",
            "set packing.pad_to_multiple_of or packing.pad_to_budget",
            planning=True,
        ),
    )

    @property
    def pads(self) -> bool:
        """Whether rows are padded."""
        return self.pad_to_budget or self.pad_to_multiple_of > 1


@dataclass(kw_only=True, slots=True)
class BalanceConfig:
    """The planner. Lower counts do not establish faster training: measure before you turn it on."""

    kind: BalanceKind = key(BalanceKind.none, "how packs and ranks are chosen")
    proposals: int | None = key(
        None,
        "swaps that each chain of the search tries, null = its own default; 0 = the best start",
        min=0,
        needs=_BALANCES,
    )
    seconds: float = key(1.0, "deadline of one batch, inf = none", min=0, max=math.inf, needs=_BALANCES)
    layer_stride: int = key(1, "look at every n-th routed layer", min=1, needs=_BALANCES)
    max_destination_load: int | None = key(
        None, "assignments of one EP rank in one layer of one column", min=1, needs=_BALANCES
    )
    overlap: bool = key(
        True,
        "plan the next step, or file, while this one trains",
        needs=Needs(
            lambda c: c.balanced or c.lends,
            "with balance=none and balance.guests=0",
            "choose balance=reference or balance=anneal, or set balance.guests",
            planning=True,
        ),
    )
    guests: int = key(
        0,
        "slots of every rank and layer in which it computes a share of another rank's experts",
        min=0,
        max=2,
        needs=_ROUTERS,
    )
    cost_model: str | None = key(
        None, "recipe=plan: file of benchmarks.fit_cost_model, predicts seconds", needs=_PLANS
    )
    write_permutation: str | None = key(
        None, "recipe=plan: file for a longest-first placement of experts", needs=_PLANS
    )


def _mixes(model: ModelConfig, key: str) -> bool:
    """Whether a layer computes with the backend that a key names; the table of mixers needs this schema."""
    from olmo_rl.mixers import Family, families

    return Family(key) in families(model)


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """How the policy computes."""

    attention: Attention = key(
        Attention.auto,
        "backend of full and sliding attention",
        needs=Needs(
            lambda c: _mixes(c.model, "policy.attention"),
            "where every layer is linear",
            "name other mixers in model.layer_types",
        ),
    )
    linear_attention: LinearAttention = key(
        LinearAttention.auto,
        "backend of KDA and its short convolution",
        needs=Needs(
            lambda c: _mixes(c.model, "policy.linear_attention"),
            "where no layer is linear",
            "name linear_attention in model.layer_types",
        ),
    )
    replay: bool | None = key(None, "replay recorded routes; null = true for a model with experts")
    recompute: Recompute = key(Recompute.none, "activations computed again in backward")
    compile: bool = key(False, "torch.compile of every block, in regions between its mixers and experts")
    logprobs: LogprobKind = key(LogprobKind.chunked, "how logits become log-probs")
    logprob_chunk: int = key(
        512,
        "scored tokens whose logits are held at a time",
        min=1,
        needs=Needs(
            lambda c: c.policy.logprobs is LogprobKind.chunked,
            "where logits are not computed in chunks",
            "choose policy.logprobs=chunked",
        ),
    )
    dtype: Dtype = key(Dtype.float32, "compute dtype; weights and reductions are float32, or float64")
    expert_dtype: Dtype | None = key(
        None, "of routed experts; null = bfloat16 under compile, else policy.dtype", needs=_ROUTERS
    )


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """The objective. Every sum is divided once, by a global count."""

    kind: LossKind = key(LossKind.grpo, "policy objective")
    surrogate: str | None = key(None, "package.module.function of an objective of your own, in place of kind")
    reduction: Reduction = key(Reduction.token, "how tokens are averaged")
    clip_low: float = key(0.2, "ratio clipped below 1 - clip_low", above=0, max=1)
    clip_high: float = key(0.28, "ratio clipped above 1 + clip_high", above=0)
    dual_clip: float | None = key(
        None,
        "ratio bound where the advantage is negative, usually 3; null = none",
        above=1,
        needs=Needs(
            lambda c: c.loss.kind is not LossKind.cispo,
            "with loss=cispo: it keeps the gradient of every token",
            "choose loss=grpo or loss=gspo",
        ),
    )
    constant_length: int | None = key(
        None,
        "tokens that replace each response's own length in reduction=response",
        min=1,
        needs=Needs(
            lambda c: c.loss.reduction is Reduction.response,
            "with loss.reduction=token: tokens are averaged over all responses together",
            "set loss.reduction=response",
        ),
    )
    tis_low: float | None = key(None, "importance weight behaviour -> anchor, lower clip", min=0)
    tis_high: float | None = key(None, "upper clip of the same weight", min=0)
    tis_level: WeightLevel = key(WeightLevel.token, "extent of one importance weight", needs=_TIS)
    tis_bound: WeightBound = key(WeightBound.truncate, "treatment of weights outside the clips", needs=_TIS)
    max_sequence_kl: float | None = key(
        None, "behaviour -> policy, per token; responses above it are left out", above=0
    )
    entropy_coef: float = key(0.0, "weight of the entropy bonus", min=0)
    kl: KlEstimator = key(KlEstimator.k3, "estimator of the KL divergence from the reference", needs=_KL)
    kl_coef: float = key(0.0, "weight of that divergence", min=0)
    reference: str | None = key(
        None, "frozen weights, read like init_from; null = those the run starts from", needs=_REFERENCE
    )
    kl_reward_coef: float = key(
        0.0, "weight of log-prob minus reference log-prob, summed over a response, in its reward", min=0
    )
    advantage: AdvantageKind = key(AdvantageKind.group, "how rewards become advantages")
    normalize_advantages: bool = key(
        True,
        "divide by the group's standard deviation",
        needs=Needs(
            lambda c: c.loss.advantage is AdvantageKind.group,
            "without loss.advantage=group",
            "choose loss.advantage=group",
        ),
    )
    truncated_votes: bool = key(True, "responses cut at the length limit count in baselines")
    on_nonfinite: OnNonfinite = key(OnNonfinite.abort, "a loss or gradient that is not finite")
    router_aux_weight: float = key(0.0, "weight of the router balancing loss", min=0, needs=_ROUTERS)
    router_z_weight: float = key(0.0, "weight of the router z-loss", min=0, needs=_ROUTERS)
    router_aux_grouping: AuxGrouping = key(AuxGrouping.pack, "tokens of one balancing penalty", needs=_AUX)
    router_aux_reduction: Reduction = key(Reduction.token, "how balancing penalties are averaged", needs=_AUX)
    router_z_reduction: Reduction = key(
        Reduction.token,
        "how z penalties are averaged",
        needs=Needs(
            lambda c: c.loss.router_z_weight != 0, "without a router z-loss", "set loss.router_z_weight"
        ),
    )
    router_count_source: CountSource = key(
        CountSource.dispatch,
        "experts that the balancing loss counts",
        needs=(
            _AUX,
            Needs(
                lambda c: c.loss.router_aux_weight == 0 or (c.replay and c.recipe is not Recipe.sft),
                "without replayed routes: the experts in use are the live top-k",
            ),
        ),
    )


_DECAYED = Needs(lambda c: c.optim.weight_decay > 0, "without weight decay", "set optim.weight_decay")
_FALLING = Needs(
    lambda c: c.optim.schedule is not ScheduleKind.constant,
    "with a constant rate",
    "choose optim.schedule=linear, cosine or wsd",
)


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW or Muon with linear warm-up, then a schedule of the learning rate over trainer.max_steps."""

    kind: OptimizerKind = key(OptimizerKind.adamw, "rule of the updates")
    lr: float = key(2e-4, "learning rate after warm-up", above=0)
    warmup_steps: int = key(10, "updates of linear warm-up", min=0)
    beta1: float = key(0.9, "decay of the first moment", min=0, below=1)
    beta2: float = key(0.98, "decay of the second moment", min=0, below=1)
    eps: float = key(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = key(
        0.0, "decoupled; norms, biases, router gates, A_log and dt_bias are never decayed", min=0
    )
    decay_embeddings: bool = key(False, "decay embeddings and the output head too", needs=_DECAYED)
    schedule: ScheduleKind = key(ScheduleKind.constant, "learning rate after warm-up")
    min_lr_ratio: float = key(0.0, "learning rate at the end, a share of lr", min=0, max=1, needs=_FALLING)
    decay_fraction: float = key(
        0.2,
        "wsd: share of trainer.max_steps in which the rate falls",
        above=0,
        max=1,
        needs=Needs(
            lambda c: c.optim.schedule is ScheduleKind.wsd,
            "without optim.schedule=wsd",
            "choose optim.schedule=wsd",
        ),
    )
    muon_momentum: float = key(
        0.95,
        "muon: decay of the momentum",
        min=0,
        below=1,
        needs=Needs(lambda c: c.optim.kind is OptimizerKind.muon, "without optim=muon", "choose optim=muon"),
    )
    max_grad_norm: float | None = key(1.0, "null = no clipping", above=0)


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    """How ranks share the model: FSDP2 over all of them, experts over some."""

    ep_degree: int = key(1, "consecutive ranks that hold all experts once", min=1)
    timeout_seconds: int = key(600, "of one collective", min=1)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """Arguments of the Lightning trainer."""

    accelerator: str = key("cpu", "cpu or gpu")
    devices: int = key(1, "processes of one node", min=1)
    num_nodes: int = key(1, "world size = devices x num_nodes", min=1)
    max_steps: int = key(100, "optimizer steps", min=1)
    profile_steps: int = key(0, "updates whose trace and table of operators go to profile/, 0 = none", min=0)

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """Supervised updates before the recipe; not part of trainer.max_steps."""

    steps: int = key(0, "supervised updates in a fresh run, never on resume; 0 = none", min=0)
    lr: float = key(2e-3, "learning rate of the warm start", above=0)
    samples_per_step: int = key(128, "documents of one supervised update", min=1)


@dataclass(kw_only=True, slots=True)
class UpcycleConfig:
    """A dense Llama model whose feed-forwards become experts, before the recipe; made once, then cached."""

    dense: str | None = key(
        None,
        "Hugging Face directory, .gguf file, or package:NAME that carries one",
        needs=Needs(
            lambda c: c.recipe not in (Recipe.score, Recipe.export, Recipe.serve, Recipe["import"]),
            "in this recipe: it takes weights as they are",
            "name what recipe=upcycle or a run wrote with init_from",
        ),
    )
    noise: float = key(
        0.01,
        "perturbation of an expert's weights, RMS over their RMS; 0 = equal experts",
        min=0,
        needs=Needs(lambda c: c.upcycle.dense is not None, "without upcycle.dense", "set upcycle.dense"),
    )


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """Chat data of recipe=sft; without a path it trains on the task's demonstrations."""

    path: str | None = key(
        None,
        "file or directory of conversations, for datasets also a name; null = the task's",
        needs=Needs(
            lambda c: c.recipe in (Recipe.sft, Recipe.validate),
            "without recipe=sft: only supervised fine-tuning trains on chat data",
            "set recipe=sft",
        ),
    )
    format: SftFormat = key(SftFormat.auto, "format of path and eval_path", needs=_CHAT_DATA)
    subset: str | None = key(None, "datasets: name of the configuration", needs=_DATASETS)
    split: str = key("train", "datasets: rows to train on", needs=_DATASETS)
    epochs: int | None = key(
        None, "passes over the data, null = as many as trainer.max_steps takes", min=1, needs=_CHAT_DATA
    )
    shuffle_buffer: int = key(
        1024, "consecutive rows shuffled together, 1 = the order of the file", min=1, needs=_CHAT_DATA
    )
    overlong: Overlong = key(
        Overlong.refuse, "conversations of more than model.max_seq_len tokens", needs=_CHAT_DATA
    )
    train_on: TrainOn = key(
        TrainOn.all,
        "assistant turns that are trained; last also serves templates that rewrite earlier turns",
        needs=_CHAT_DATA,
    )
    ignore: list[str] = key([], "names of a row that mean nothing here", needs=_CHAT_DATA)
    eval_path: str | None = key(None, "held-out conversations, read like path", needs=_CHAT_DATA)
    eval_split: str = key("validation", "datasets: rows of eval_path", needs=(_DATASETS, _HELD_OUT))
    eval_samples: int | None = key(
        None, "conversations of eval_path, from its beginning, null = all", min=1, needs=_HELD_OUT
    )
    eval_interval: int = key(
        50,
        "updates between evaluations, 0 = only before the first and after the last",
        min=0,
        needs=_HELD_OUT,
    )


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """The settings that imported tokens were drawn under, where their file does not record them."""

    temperature: float | None = key(None, "null = unknown", min=0, needs=_IMPORTS)
    top_p: float | None = key(
        None, "share of the probability that was kept, null = unknown", above=0, max=1, needs=_IMPORTS
    )
    top_k: int | None = key(None, "tokens that were kept, 0 = all, null = unknown", min=-1, needs=_IMPORTS)
    min_p: float | None = key(
        None, "share of the likeliest token's probability, 0 = none, null = unknown", min=0, needs=_IMPORTS
    )
    repetition_penalty: float | None = key(None, "1 = none, null = unknown", above=0, needs=_IMPORTS)
    presence_penalty: float | None = key(None, "0 = none, null = unknown", needs=_IMPORTS)
    frequency_penalty: float | None = key(None, "0 = none, null = unknown", needs=_IMPORTS)


@dataclass(kw_only=True, slots=True)
class ImportsConfig:
    """How recipe=import reads rollouts of another system; expert counts come from the model."""

    source: str | None = key(
        None,
        "program that recorded imports.path (a wrong name lists all), or package.module.function",
        needs=_IMPORTS,
        was="source",
    )
    path: str | None = key(None, "a file of that system, or a directory of them", needs=_IMPORTS, was="path")
    reward_key: str | None = key(None, "entry of rewards that are mappings", needs=_IMPORTS)
    default_reward: float | None = key(
        None, "of samples without a reward, null = they are refused", needs=_IMPORTS
    )
    group_size: int | None = key(
        None, "this many consecutive samples are a group, null = as recorded", min=1, needs=_IMPORTS
    )
    leave_out_bad_routes: bool = key(
        False,
        "leave out samples whose routes cannot be replayed, instead of a refusal",
        needs=(
            _IMPORTS,
            Needs(
                lambda c: c.recipe is not Recipe["import"] or c.replay,
                "where routes are not read",
                "choose policy.replay=null",
            ),
            Needs(
                lambda c: c.recipe is not Recipe["import"] or c.imports.source != "olmo_rl",
                "with imports.source=olmo_rl, whose files are checked whole",
                "leave such samples out of the file",
            ),
        ),
    )
    sampling: SamplingConfig = section(SamplingConfig)


@dataclass(kw_only=True, slots=True)
class ScoringConfig:
    """When the anchor log-probs come from a pass of their own."""

    mode: ScoringMode = key(ScoringMode.auto, "when to run the pass")
    check_interval: int = key(50, "updates, 0 = only the first of each process", min=0, needs=_CHECKS)
    tolerance: float = key(1e-3, "mean absolute difference over active tokens", above=0, needs=_CHECKS)
    max_behavior_gap: float | None = key(None, "mean absolute policy - behaviour, null = off", above=0)


_SAVES = Needs(
    lambda c: c.callbacks.saves_between,
    "without callbacks.checkpoint_interval and callbacks.checkpoint_minutes",
    "set one of them",
)


@dataclass(kw_only=True, slots=True)
class CallbacksConfig:
    """What happens around updates."""

    checkpoint_interval: int | None = key(None, "updates between checkpoints, null = not by updates", min=1)
    checkpoint_minutes: float | None = key(
        15.0, "minutes of training between checkpoints, null = not by time", above=0
    )
    checkpoint_async: bool = key(
        True,
        "write checkpoints between updates beside the training, from a copy in CPU memory",
        needs=_SAVES,
    )
    keep_checkpoints: int = key(
        2,
        "newest ones that stay",
        min=1,
        needs=_SAVES,
    )
    progress: bool = key(True, "bar over packs and updates")
    pictures: bool = key(True, "reward.png and packs.png at the end")
    samples: int = key(8, "generations of every update kept in samples/, 0 = none", min=0, max=256)
    report: bool = key(True, "report.html at the end")
    extra: list[dict[str, Any]] = key(
        [], "your Lightning callbacks, each {_target_: package.Class, argument: value}"
    )

    @property
    def saves_between(self) -> bool:
        """Whether checkpoints are saved before the end."""
        return self.checkpoint_interval is not None or self.checkpoint_minutes is not None


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    """Where metrics go beside the terminal; metrics.csv is always written."""

    kind: LoggerKind = key(LoggerKind.csv, "loggers of the run")
    project: str = key("olmo_rl", "wandb project", needs=_WANDB)
    offline: bool = key(True, "wandb without an account", needs=_WANDB)
    extra: list[dict[str, Any]] = key(
        [], "your Lightning loggers, each {_target_: package.Class, argument: value}"
    )


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """Topology and speeds for recipe=plan when they are not this machine's."""

    world_size: int | None = key(None, "null = trainer.devices x trainer.num_nodes", min=1, needs=_PLANS)
    ep_degree: int | None = key(None, "null = strategy.ep_degree", min=1, needs=_PLANS)
    link_gigabytes: float = key(
        45.0, "a second from one expert-parallel rank to another, to judge lending", above=0, needs=_JUDGES
    )
    tflops: float = key(400.0, "of one rank in products of experts, to judge lending", above=0, needs=_JUDGES)


@dataclass(kw_only=True, slots=True)
class Config:
    """The complete configuration of a run."""

    recipe: Recipe = key(Recipe.train, "the verb")
    run_name: str = key(
        "olmo_rl",
        "names the run directory outputs/<run_name>; without it outputs/<experiment>-<n>",
    )
    seed: int = key(0, "of all randomness", min=0, below=2**32)
    ckpt_path: str | None = key(
        None,
        "last, best (by held-out evaluation), auto (last, else a start), a directory, or null",
    )
    overwrite: bool = key(False, "train into a directory that holds a run")
    cache_dir: str = key("outputs/.cache", "warm starts and upcycled weights, shared by runs")
    init_from: str | None = key(
        None, "weights to start from: checkpoint, safetensors file, Hugging Face model"
    )
    run: str | None = key(None, "directory of a run or a sweep to report on", needs=_REPORTS)
    compare: str | None = key(None, "directory of a run to show beside it", needs=_REPORTS)
    report_path: str | None = key(None, "the page, null = report.html in that directory", needs=_REPORTS)
    run_dir: str = key("", "follows from the run's name, never set by hand")
    model: ModelConfig = section(ModelConfig)
    task: TaskConfig = section(TaskConfig)
    evaluation: EvaluationConfig = section(EvaluationConfig)
    environment: EnvironmentConfig = section(EnvironmentConfig)
    rollouts: RolloutsConfig = section(RolloutsConfig)
    batch: BatchConfig = section(BatchConfig)
    packing: PackingConfig = section(PackingConfig)
    balance: BalanceConfig = section(BalanceConfig)
    policy: PolicyConfig = section(PolicyConfig)
    loss: LossConfig = section(LossConfig)
    scoring: ScoringConfig = section(ScoringConfig)
    optim: OptimConfig = section(OptimConfig)
    strategy: StrategyConfig = section(StrategyConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    upcycle: UpcycleConfig = section(UpcycleConfig)
    warm_start: WarmStartConfig = section(WarmStartConfig)
    sft: SftConfig = section(SftConfig)
    imports: ImportsConfig = section(ImportsConfig)
    export: ExportConfig = section(ExportConfig)
    serve: ServeConfig = section(ServeConfig)
    callbacks: CallbacksConfig = section(CallbacksConfig)
    logger: LoggerConfig = section(LoggerConfig)
    plan: PlanConfig = section(PlanConfig)

    @property
    def budget(self) -> int:
        """Tokens of one pack."""
        return self.packing.max_tokens if self.packing.max_tokens is not None else self.model.max_seq_len

    @property
    def replay(self) -> bool:
        """Whether recorded routes are replayed: null means in models with experts."""
        return bool(self.model.routed_layers) if self.policy.replay is None else self.policy.replay

    @property
    def expert_dtype(self) -> Dtype:
        """Compute dtype of routed experts: compiled grouped products exist for bfloat16 alone."""
        default = Dtype.bfloat16 if self.policy.compile else self.policy.dtype
        return default if self.policy.expert_dtype is None else self.policy.expert_dtype

    @property
    def packed(self) -> bool:
        """Whether several samples share a row."""
        return self.packing.kind is not PackingKind.none

    @property
    def shares(self) -> bool:
        """Whether equal rows of samples are computed once."""
        return self.packing.kind is PackingKind.trees

    @property
    def balanced(self) -> bool:
        """Whether the planner arranges batches."""
        return self.balance.kind is not BalanceKind.none

    @property
    def lends(self) -> bool:
        """Whether ranks compute shares of other ranks' experts."""
        return self.balance.guests > 0

    @property
    def padding(self) -> Padding:
        """How rows are padded."""
        packing = self.packing
        multiple = self.budget if packing.pad_to_budget else packing.pad_to_multiple_of
        return Padding(multiple_of=multiple, pad_id=packing.pad_id, experts=self.model.expert_layout)

    @property
    def generates(self) -> bool:
        """Whether collections are generated during the run; such a source can fill a short collection."""
        return self.rollouts.source is not Source.files

    @property
    def continuous(self) -> bool:
        """Whether serving engines generate while the run trains."""
        return self.asks_engines and self.rollouts.mode is RolloutMode.continuous

    @property
    def asks_engines(self) -> bool:
        """Whether collections come from serving engines."""
        return self.rollouts.source in (Source.vllm, Source.sglang)

    @property
    def trains(self) -> bool:
        """Whether the recipe is a training run; validate and check are judged as one."""
        return self.recipe in (Recipe.train, Recipe.sft, Recipe.validate, Recipe.check)

    @property
    def reads_prompts(self) -> bool:
        """Whether responses to prompts of the task are generated."""
        asked = self.environment.taskset is None and self.recipe is not Recipe.sft
        return self.generates and asked and self.sft.path is None

    @property
    def demonstrates(self) -> bool:
        """Whether the task's answers are trained on."""
        supervised = self.recipe is Recipe.sft and self.sft.path is None
        return (self.warm_start.steps > 0 and self.environment.taskset is None) or supervised

    @property
    def needs_reference(self) -> bool:
        """Whether training compares the policy with a reference."""
        return self.loss.kl_coef != 0 or self.loss.kl_reward_coef != 0

    def scores_separately(self, *, steps_in_collection: int) -> bool:
        """Whether an update needs a scoring pass of its own: asked for, with a reference, or because after
        the first step of a collection the policy has moved away from its anchor.
        """
        return self.scoring.mode is ScoringMode.always or self.loss.kl_coef > 0 or steps_in_collection > 1

    @property
    def world_size(self) -> int:
        """Ranks of the run; of the planned topology for recipe=plan."""
        planned = self.plan.world_size if self.recipe is Recipe.plan else None
        return self.trainer.world_size if planned is None else planned

    @property
    def ep_degree(self) -> int:
        """Expert-parallel degree of the run; of the planned topology for recipe=plan."""
        planned = self.plan.ep_degree if self.recipe is Recipe.plan else None
        return self.strategy.ep_degree if planned is None else planned


def register() -> None:
    """Store the schema as `schema`, the first entry of the defaults list in conf/train.yaml."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)
