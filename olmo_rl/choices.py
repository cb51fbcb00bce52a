"""The words that keys of the configuration choose from: every member is spelt as people type it."""

from __future__ import annotations

from enum import Enum


class Recipe(Enum):
    train = "train"  # GRPO: collect, plan, update, publish
    sft = "sft"  # supervised updates on chat data or a task's answers, packed like GRPO
    rollout = "rollout"  # generate collections and write them as files
    score = "score"  # log-probs of recorded samples
    plan = "plan"  # packs and ranks of every update as table, JSON and picture; no GPU, no torch
    validate = "validate"  # everything that can be refused, before weights load
    export = "export"  # weights of a run as a Hugging Face directory
    serve = "serve"  # the local engine behind the HTTP API of serving engines
    upcycle = "upcycle"  # weights of a dense model as those of a mixture of experts
    vars()["import"] = "import"  # rollouts that another system recorded as files of ours


class LayerType(Enum):
    linear_attention = "linear_attention"
    full_attention = "full_attention"
    sliding_attention = "sliding_attention"


class QkNorm(Enum):
    none = "none"
    head = "head"  # every head of queries and keys on its own
    projection = "projection"  # all heads of queries together, all heads of keys together


class BlockNorms(Enum):
    before = "before"  # of what the mixer and the feed-forward read
    after = "after"  # of what they add to the residual stream
    both = "both"


class ScoreFunction(Enum):
    softmax = "softmax"
    sigmoid = "sigmoid"


class Filter(Enum):
    drop = "drop"
    mask = "mask"


class PackingKind(Enum):
    none = "none"
    consecutive = "consecutive"


class BalanceKind(Enum):
    none = "none"
    greedy = "greedy"
    reference = "reference"
    anneal = "anneal"


class BalanceLevel(Enum):
    order = "order"
    cells = "cells"


class Attention(Enum):
    auto = "auto"
    torch = "torch"
    reference = "reference"
    varlen = "varlen"
    flash_2 = "flash_2"
    flash_3 = "flash_3"
    flash_4 = "flash_4"


class LinearAttention(Enum):
    auto = "auto"
    reference = "reference"
    fla = "fla"


class Recompute(Enum):
    none = "none"
    full = "full"
    selective = "selective"


class LogprobKind(Enum):
    chunked = "chunked"
    full = "full"
    liger = "liger"


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class LossKind(Enum):
    grpo = "grpo"
    gspo = "gspo"
    cispo = "cispo"


class WeightLevel(Enum):
    token = "token"
    sequence = "sequence"


class WeightBound(Enum):
    truncate = "truncate"
    mask = "mask"


class Reduction(Enum):
    token = "token"
    response = "response"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class OnNonfinite(Enum):
    abort = "abort"
    skip = "skip"


class AuxGrouping(Enum):
    pack = "pack"
    sequence = "sequence"


class CountSource(Enum):
    dispatch = "dispatch"
    current = "current"


class ScoringMode(Enum):
    auto = "auto"
    always = "always"


class Source(Enum):
    local = "local"
    files = "files"
    vllm = "vllm"
    sglang = "sglang"


class PublicationKind(Enum):
    directory = "directory"  # files that every engine reads
    collective = "collective"  # a broadcast from rank 0


class OnVerifierFailure(Enum):
    refuse = "refuse"  # the run ends, naming the problem
    leave_out = "leave_out"  # the sample is not trained
    zero = "zero"  # a reward of 0


class ImportSource(Enum):
    olmo_rl = "olmo_rl"  # our own files, checked and written as parquet
    slime = "slime"  # .pt of --save-debug-rollout-data
    miles = "miles"  # the same
    prime_rl = "prime_rl"  # msgpack of a TrainingBatch
    vllm = "vllm"  # JSON lines of completions with routed experts
    sglang = "sglang"  # the same


class SftFormat(Enum):
    auto = "auto"  # by the suffix of each file: .jsonl or .parquet
    jsonl = "jsonl"
    parquet = "parquet"
    datasets = "datasets"  # a directory or name of Hugging Face datasets


class Overlong(Enum):
    refuse = "refuse"
    drop = "drop"
    truncate = "truncate"


class StrategyKind(Enum):
    single = "single"
    expert_parallel = "expert_parallel"


class TaskKind(Enum):
    addition = "addition"
    reasoning_gym = "reasoning_gym"
    jsonl = "jsonl"


class LoggerKind(Enum):
    csv = "csv"
    wandb = "wandb"
