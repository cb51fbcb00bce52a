"""The words that keys of the configuration choose from: every member is spelt as people type it."""

from __future__ import annotations

from enum import Enum


class Recipe(Enum):
    train = "train"  # GRPO: collect, plan, update, publish
    sft = "sft"  # supervised updates on a task's answers, packed like GRPO
    rollout = "rollout"  # generate collections and write them as files
    score = "score"  # log-probs of recorded samples
    plan = "plan"  # packs and ranks of every update as table, JSON and picture; no GPU, no torch
    validate = "validate"  # everything that can be refused, before weights load


class LayerType(Enum):
    linear_attention = "linear_attention"
    full_attention = "full_attention"
    sliding_attention = "sliding_attention"


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


class Recompute(Enum):
    none = "none"
    full = "full"
    selective = "selective"


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
